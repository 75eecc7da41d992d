package autoscaler

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

const (
	driver  = "gpu.tessera.dev"
	managed = "gpu.tessera.dev/managed"
)

// fence is the object with the managed taint.
type fence string

const (
	taint fence = "taint"
	rule  fence = "rule"
)

// cluster returns nodes of one GPU of 80 GiB each, as the driver publishes them with this fence.
func cluster(by fence, nodes ...string) *Cluster {
	built := &Cluster{Classes: []*resourceapi.DeviceClass{{
		ObjectMeta: metav1.ObjectMeta{Name: driver},
		Spec: resourceapi.DeviceClassSpec{Selectors: []resourceapi.DeviceSelector{{
			CEL: &resourceapi.CELDeviceSelector{Expression: "device.driver == 'gpu.tessera.dev'"},
		}}},
	}}}
	for _, name := range nodes {
		group := nodeGroup(by, name)
		built.Nodes = append(built.Nodes, group.Template)
		built.Slices = append(built.Slices, group.Slices...)
	}
	if by == rule {
		of := driver
		built.Rules = append(built.Rules, &resourceapi.DeviceTaintRule{
			ObjectMeta: metav1.ObjectMeta{Name: "tessera-fence"},
			Spec: resourceapi.DeviceTaintRuleSpec{
				DeviceSelector: &resourceapi.DeviceTaintSelector{Driver: &of},
				Taint:          resourceapi.DeviceTaint{Key: managed, Effect: resourceapi.DeviceTaintEffectNoSchedule},
			},
		})
	}
	return built
}

func nodeGroup(by fence, name string) NodeGroup {
	shared := true
	quantity := func(text string) resource.Quantity { return resource.MustParse(text) }
	step := func(unit string) *resourceapi.CapacityRequestPolicyRange {
		least, by := quantity(unit), quantity(unit)
		return &resourceapi.CapacityRequestPolicyRange{Min: &least, Step: &by}
	}
	all := quantity("80Gi")
	gpu := resourceapi.Device{
		Name:                     "gpu-" + name,
		AllowMultipleAllocations: &shared,
		Capacity: map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{"memory": {
			Value:         all,
			RequestPolicy: &resourceapi.CapacityRequestPolicy{Default: &all, ValidRange: step("1Mi")},
		}},
	}
	annotations := map[string]string{}
	if by == taint {
		gpu.Taints = []resourceapi.DeviceTaint{{Key: managed, Effect: resourceapi.DeviceTaintEffectNoSchedule}}
	} else {
		annotations["gpu.tessera.dev/fence"] = "DeviceTaintRule"
	}
	resources := v1.ResourceList{v1.ResourceCPU: quantity("8"), v1.ResourceMemory: quantity("32Gi"), v1.ResourcePods: quantity("110")}
	return NodeGroup{
		Template: &v1.Node{
			ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{v1.LabelHostname: name}},
			Status:     v1.NodeStatus{Allocatable: resources, Capacity: resources},
		},
		Slices: []*resourceapi.ResourceSlice{{
			ObjectMeta: metav1.ObjectMeta{Name: "000-gpu.tessera.dev-" + name, Annotations: annotations},
			Spec: resourceapi.ResourceSliceSpec{
				Driver:   driver,
				NodeName: &name,
				Pool:     resourceapi.ResourcePool{Name: name, Generation: 1, ResourceSliceCount: 1},
				Devices:  []resourceapi.Device{gpu},
			},
		}},
	}
}

// add adds a pod with a claim for this much memory. With a node, Tessera has allocated the claim
// there and the pod runs.
func (c *Cluster) add(name, memory, node string) {
	uid := types.UID("uid-" + name)
	isController, template := true, "share"
	claim := &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{
			Name: name, Namespace: "team", UID: "claim-" + uid,
			OwnerReferences: []metav1.OwnerReference{{APIVersion: "v1", Kind: "Pod", Name: name, UID: uid, Controller: &isController}},
			Finalizers:      []string{resourceapi.Finalizer},
		},
		Spec: resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{{
			Name: "gpu",
			Exactly: &resourceapi.ExactDeviceRequest{
				DeviceClassName: driver,
				AllocationMode:  resourceapi.DeviceAllocationModeExactCount,
				Count:           1,
				Capacity: &resourceapi.CapacityRequirements{
					Requests: map[resourceapi.QualifiedName]resource.Quantity{"memory": resource.MustParse(memory)},
				},
			},
		}}}},
	}
	pod := &v1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "team", UID: uid},
		Spec: v1.PodSpec{
			SchedulerName:  v1.DefaultSchedulerName,
			NodeName:       node,
			Containers:     []v1.Container{{Name: "main", Image: "none"}},
			ResourceClaims: []v1.PodResourceClaim{{Name: "gpu", ResourceClaimTemplateName: &template}},
		},
		Status: v1.PodStatus{ResourceClaimStatuses: []v1.PodResourceClaimStatus{{Name: "gpu", ResourceClaimName: &claim.Name}}},
	}
	if node != "" {
		share := types.UID(fmt.Sprintf("00000000-0000-0000-0000-%012d", len(c.Claims)))
		claim.Status = resourceapi.ResourceClaimStatus{
			Allocation: &resourceapi.AllocationResult{
				Devices: resourceapi.DeviceAllocationResult{Results: []resourceapi.DeviceRequestAllocationResult{{
					Request: "gpu", Driver: driver, Pool: node, Device: "gpu-" + node, ShareID: &share,
					ConsumedCapacity: map[resourceapi.QualifiedName]resource.Quantity{"memory": resource.MustParse(memory)},
				}}},
				NodeSelector: &v1.NodeSelector{NodeSelectorTerms: []v1.NodeSelectorTerm{{
					MatchFields: []v1.NodeSelectorRequirement{{Key: "metadata.name", Operator: v1.NodeSelectorOpIn, Values: []string{node}}},
				}}},
			},
			ReservedFor: []resourceapi.ResourceClaimConsumerReference{{Resource: "pods", Name: name, UID: uid}},
		}
	}
	c.Claims, c.Pods = append(c.Claims, claim), append(c.Pods, pod)
}

func TestFenceDecidesWhoFindsAFit(t *testing.T) {
	for _, test := range []struct {
		by     fence
		reader Reader
		fits   bool
	}{
		{taint, WithRules, false},
		{taint, AsPublished, false},
		{rule, WithRules, false},
		{rule, AsPublished, true},
	} {
		t.Run(fmt.Sprintf("%s, slices %s", test.by, test.reader), func(t *testing.T) {
			one := cluster(test.by, "a")
			one.add("pending", "20Gi", "")
			placed, err := place(context.Background(), test.reader, one, one.Pods[0])
			if !test.fits {
				if !errors.Is(err, ErrNoFit) || !strings.Contains(err.Error(), "cannot allocate all claims") {
					t.Fatalf("not refused for its devices: %v", err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if node := placed.Pods[0].Spec.NodeName; node != "a" {
				t.Errorf("placed on %q", node)
			}
			results := placed.Claims[0].Status.Allocation.Devices.Results
			taken := results[0].ConsumedCapacity["memory"]
			if len(results) != 1 || taken.String() != "20Gi" {
				t.Errorf("allocated %v", results)
			}
		})
	}
}

func TestSchedulerHonoursAllocationsUnderBothFences(t *testing.T) {
	for _, by := range []fence{taint, rule} {
		one := cluster(by, "a", "b")
		one.add("allocated", "20Gi", "b")
		pod := one.Pods[0].DeepCopy()
		pod.Spec.NodeName = ""
		one.Pods[0] = pod
		placed, err := place(context.Background(), WithRules, one, pod)
		if err != nil {
			t.Fatalf("%s: %v", by, err)
		}
		if node := placed.Pods[0].Spec.NodeName; node != "b" {
			t.Errorf("%s: placed on %q, allocated on b", by, node)
		}
	}
}

func scaleUp(t *testing.T, c *Cluster, group NodeGroup) int {
	t.Helper()
	added, err := ScaleUp(context.Background(), AsPublished, c, group)
	if err != nil {
		t.Fatal(err)
	}
	return added
}

func TestPendingPodsAddNodesOnlyUnderARule(t *testing.T) {
	for by, wanted := range map[fence]int{rule: 2, taint: 0} {
		full := cluster(by, "a")
		full.add("running", "80Gi", "a")
		// Two of them share a new GPU.
		for number := range 3 {
			full.add(fmt.Sprintf("pending-%d", number), "40Gi", "")
		}
		full.add("larger-than-a-gpu", "81Gi", "")
		if added := scaleUp(t, full, full.group("a")); added != wanted {
			t.Errorf("%s: %d nodes added instead of %d", by, added, wanted)
		}
	}
}

func TestGroupWithoutNodesScalesFromItsTemplate(t *testing.T) {
	for by, wanted := range map[fence]int{rule: 1, taint: 0} {
		empty := cluster(by)
		empty.add("pending", "20Gi", "")
		if added := scaleUp(t, empty, nodeGroup(by, "template")); added != wanted {
			t.Errorf("%s: %d nodes added instead of %d", by, added, wanted)
		}
	}
}

func TestPodThatFitsAddsNoNode(t *testing.T) {
	// Tessera has not allocated its claim yet.
	roomy := cluster(rule, "a")
	roomy.add("running", "60Gi", "a")
	roomy.add("pending", "20Gi", "")
	if added := scaleUp(t, roomy, roomy.group("a")); added != 0 {
		t.Errorf("%d nodes added", added)
	}
}

func mayRemove(t *testing.T, c *Cluster, node string) bool {
	t.Helper()
	may, err := MayRemove(context.Background(), AsPublished, c, node)
	if err != nil {
		t.Fatal(err)
	}
	return may
}

func TestNodesAreConsolidatedOnlyUnderARule(t *testing.T) {
	for by, wanted := range map[fence]bool{rule: true, taint: false} {
		halfEmpty := cluster(by, "a", "b")
		halfEmpty.add("one", "20Gi", "a")
		halfEmpty.add("two", "40Gi", "b")
		halfEmpty.add("three", "20Gi", "b")
		if may := mayRemove(t, halfEmpty, "a"); may != wanted {
			t.Errorf("%s: node a may be removed: %t", by, may)
		}
		if may := mayRemove(t, halfEmpty, "b"); may != wanted {
			t.Errorf("%s: node b may be removed: %t", by, may)
		}
	}
}

func TestNodeWhosePodsFitNowhereStays(t *testing.T) {
	full := cluster(rule, "a", "b")
	full.add("one", "40Gi", "a")
	full.add("two", "50Gi", "b")
	if mayRemove(t, full, "a") || mayRemove(t, full, "b") {
		t.Error("a node may be removed, and its pod fits nowhere")
	}
	empty := cluster(rule, "a", "b")
	empty.add("two", "80Gi", "b")
	if !mayRemove(t, empty, "a") {
		t.Error("the last node without pods stays")
	}
}
