package main

import (
	"bufio"
	"fmt"
	"os"
	"strings"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
)

// selectorDevice is the device of allocator/tests/selector_golden.rs.
func selectorDevice() resourceapi.Device {
	return resourceapi.Device{
		Name: "gpu-0",
		Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{
			"index":               {IntValue: ptr.To[int64](3)},
			"mig":                 {BoolValue: ptr.To(false)},
			"model":               {StringValue: ptr.To("H100")},
			"size":                {StringValue: ptr.To("80Gi")},
			"version":             {VersionValue: ptr.To("580.95.5")},
			"other.example.com/n": {IntValue: ptr.To[int64](1)},
		},
		Capacity: map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{
			"memory": {Value: resource.MustParse("80Gi")},
		},
	}
}

// selectorScenario has one request for one device with the selector.
func selectorScenario(expression string) *Scenario {
	node := "n0"
	request := resourceapi.DeviceRequest{
		Name: "r",
		Exactly: &resourceapi.ExactDeviceRequest{
			DeviceClassName: "any",
			AllocationMode:  resourceapi.DeviceAllocationModeExactCount,
			Count:           1,
			Selectors:       []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{Expression: expression}}},
		},
	}
	return &Scenario{
		Name:          expression,
		DeviceClasses: []*resourceapi.DeviceClass{{ObjectMeta: metav1.ObjectMeta{Name: "any"}}},
		ResourceSlices: []*resourceapi.ResourceSlice{{
			ObjectMeta: metav1.ObjectMeta{Name: "s0"},
			Spec: resourceapi.ResourceSliceSpec{
				Driver:   gpuDriver,
				Pool:     resourceapi.ResourcePool{Name: "p0", Generation: 1, ResourceSliceCount: 1},
				NodeName: &node,
				Devices:  []resourceapi.Device{selectorDevice()},
			},
		}},
		Claims: []*resourceapi.ResourceClaim{{
			ObjectMeta: metav1.ObjectMeta{Name: "c0", Namespace: "default", UID: "c0"},
			Spec:       resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{request}}},
		}},
		Nodes: []*v1.Node{{ObjectMeta: metav1.ObjectMeta{Name: node}}},
	}
}

// cmdSelectors reads lines OUTCOME<TAB>EXPRESSION and writes them with upstream's
// outcome; it ignores the outcome that was read.
func cmdSelectors() error {
	w := bufio.NewWriter(os.Stdout)
	defer w.Flush()
	lines := bufio.NewScanner(os.Stdin)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		_, expression, found := strings.Cut(lines.Text(), "\t")
		if !found {
			return fmt.Errorf("expected OUTCOME<TAB>EXPRESSION, got %q", lines.Text())
		}
		s := selectorScenario(expression)
		if err := solve(s, 0); err != nil {
			return err
		}
		fmt.Fprintf(w, "%s\t%s\n", strings.TrimPrefix(s.Results["n0"].Outcome(), "error:"), expression)
	}
	return lines.Err()
}
