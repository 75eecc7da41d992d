// Package autoscaler asks kube-scheduler's own framework the questions of a cluster autoscaler.
package autoscaler

import (
	"context"
	"errors"
	"fmt"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/events"
	resourceslicetracker "k8s.io/dynamic-resource-allocation/resourceslice/tracker"
	"k8s.io/klog/v2"
	fwk "k8s.io/kube-scheduler/framework"
	"k8s.io/kubernetes/pkg/scheduler/apis/config/latest"
	internalcache "k8s.io/kubernetes/pkg/scheduler/backend/cache"
	"k8s.io/kubernetes/pkg/scheduler/framework"
	"k8s.io/kubernetes/pkg/scheduler/framework/plugins"
	"k8s.io/kubernetes/pkg/scheduler/framework/plugins/dynamicresources"
	"k8s.io/kubernetes/pkg/scheduler/framework/plugins/nodevolumelimits"
	"k8s.io/kubernetes/pkg/scheduler/framework/runtime"
	"k8s.io/kubernetes/pkg/scheduler/metrics"
	"k8s.io/kubernetes/pkg/scheduler/util/assumecache"
)

// Reader is the way in which a component reads ResourceSlices.
type Reader string

const (
	// WithRules merges DeviceTaintRules into the slices, as kube-scheduler does.
	WithRules Reader = "with DeviceTaintRules"
	// AsPublished ignores DeviceTaintRules, as Cluster Autoscaler does.
	AsPublished Reader = "as published"
)

// ErrNoFit is returned for a pod that fits on no node.
var ErrNoFit = errors.New("fits on no node")

// ScaleUp returns the number of nodes of the group that the pending pods need. Each pod is placed
// on an existing or new node if it fits, and a node is added only for a pod that it then fits.
func ScaleUp(ctx context.Context, reader Reader, cluster *Cluster, group NodeGroup) (int, error) {
	added := 0
	for _, pod := range cluster.Pods {
		if pod.Spec.NodeName != "" {
			continue
		}
		placed, err := place(ctx, reader, cluster, pod)
		if errors.Is(err, ErrNoFit) {
			larger := cluster.copy()
			node, slices := group.node(added)
			larger.Nodes = append(larger.Nodes, node)
			larger.Slices = append(larger.Slices, slices...)
			placed, err = place(ctx, reader, larger, pod)
			if errors.Is(err, ErrNoFit) {
				continue
			}
			added++
		}
		if err != nil {
			return 0, err
		}
		cluster = placed
	}
	return added, nil
}

// MayRemove returns true if all pods of the node fit on the other nodes.
func MayRemove(ctx context.Context, reader Reader, cluster *Cluster, node string) (bool, error) {
	rest := cluster.without(node)
	for _, pod := range rest.Pods {
		if pod.Spec.NodeName != "" {
			continue
		}
		placed, err := place(ctx, reader, rest, pod)
		if errors.Is(err, ErrNoFit) {
			return false, nil
		}
		if err != nil {
			return false, err
		}
		rest = placed
	}
	return true, nil
}

// place returns the cluster with the pod on the first node on which it fits, its claims allocated
// by kube-scheduler's allocator; ErrNoFit if there is none.
func place(ctx context.Context, reader Reader, cluster *Cluster, pod *v1.Pod) (*Cluster, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	client := fake.NewClientset(cluster.objects()...)
	snapshot := internalcache.NewSnapshot(bound(cluster.Pods), cluster.Nodes)
	scheduler, err := newFramework(ctx, reader, client, snapshot)
	if err != nil {
		return nil, err
	}
	nodes, err := snapshot.NodeInfos().List()
	if err != nil {
		return nil, err
	}
	state := framework.NewCycleState()
	if _, status, _ := scheduler.RunPreFilterPlugins(ctx, state, pod); !status.IsSuccess() {
		return nil, fmt.Errorf("%w: %s", ErrNoFit, status.Message())
	}
	reasons := ErrNoFit
	for _, node := range nodes {
		status := scheduler.RunFilterPlugins(ctx, state, pod, node)
		if !status.IsSuccess() {
			reasons = fmt.Errorf("%w: %s: %s", reasons, node.Node().Name, status.Message())
			continue
		}
		name := node.Node().Name
		if status := scheduler.RunReservePluginsReserve(ctx, state, pod, name); !status.IsSuccess() {
			return nil, status.AsError()
		}
		if status := scheduler.RunPreBindPlugins(ctx, state, pod, name); !status.IsSuccess() {
			return nil, status.AsError()
		}
		return after(ctx, cluster, client, pod, name)
	}
	return nil, reasons
}

// after returns the cluster with the claims as the scheduler has written them, and the pod bound.
func after(ctx context.Context, before *Cluster, client *fake.Clientset, pod *v1.Pod, node string) (*Cluster, error) {
	claims, err := client.ResourceV1().ResourceClaims(metav1.NamespaceAll).List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	placed := before.copy()
	placed.Claims = nil
	for index := range claims.Items {
		placed.Claims = append(placed.Claims, &claims.Items[index])
	}
	for index, one := range placed.Pods {
		if one.Name == pod.Name {
			placed.Pods[index] = pod.DeepCopy()
			placed.Pods[index].Spec.NodeName = node
		}
	}
	return placed, nil
}

func bound(pods []*v1.Pod) []*v1.Pod {
	var bound []*v1.Pod
	for _, pod := range pods {
		if pod.Spec.NodeName != "" {
			bound = append(bound, pod)
		}
	}
	return bound
}

// newFramework returns the default profile of kube-scheduler, whose device allocator reads slices
// by the reader.
func newFramework(ctx context.Context, reader Reader, client *fake.Clientset, snapshot *internalcache.Snapshot) (framework.Framework, error) {
	metrics.Register()
	configuration, err := latest.Default()
	if err != nil {
		return nil, err
	}
	factory := informers.NewSharedInformerFactory(client, 0)
	resources := factory.Resource().V1()
	tracker, err := resourceslicetracker.StartTracker(ctx, resourceslicetracker.Options{
		EnableDeviceTaintRules:   true,
		EnableConsumableCapacity: true,
		SliceInformer:            resources.ResourceSlices(),
		TaintInformer:            resources.DeviceTaintRules(),
		KubeClient:               client,
	})
	if err != nil {
		return nil, err
	}
	claims := assumecache.NewAssumeCache(klog.FromContext(ctx), resources.ResourceClaims().Informer(), "ResourceClaim", "", nil)
	synced := []cache.DoneChecker{
		tracker.HasSyncedChecker(),
		claims.AddEventHandler(cache.ResourceEventHandlerFuncs{}).HasSyncedChecker(),
	}
	var manager fwk.SharedDRAManager = dynamicresources.NewDRAManager(ctx, claims, tracker, factory)
	if reader == AsPublished {
		manager = publishedManager{manager, resources.ResourceSlices().Lister()}
	}
	scheduler, err := runtime.NewFramework(ctx, plugins.NewInTreeRegistry(), &configuration.Profiles[0],
		runtime.WithClientSet(client),
		runtime.WithInformerFactory(factory),
		runtime.WithEventRecorder(&events.FakeRecorder{}),
		runtime.WithSharedDRAManager(manager),
		runtime.WithSharedCSIManager(nodevolumelimits.NewCSIManager(factory.Storage().V1().CSINodes().Lister())),
		runtime.WithSnapshotSharedLister(snapshot),
		runtime.WithPodGroupManager(internalcache.New(ctx, nil, false, false)),
	)
	if err != nil {
		return nil, err
	}
	factory.Start(ctx.Done())
	factory.WaitForCacheSync(ctx.Done())
	if !cache.WaitFor(ctx, "caches", synced...) {
		return nil, errors.New("the caches of the scheduler did not sync")
	}
	return scheduler, nil
}

// publishedManager returns slices as they are published.
type publishedManager struct {
	fwk.SharedDRAManager
	slices sliceLister
}

type sliceLister interface {
	List(selector labels.Selector) ([]*resourceapi.ResourceSlice, error)
}

func (m publishedManager) ResourceSlices() fwk.ResourceSliceLister {
	return publishedSlices{m.slices}
}

type publishedSlices struct{ slices sliceLister }

func (s publishedSlices) ListWithDeviceTaintRules() ([]*resourceapi.ResourceSlice, error) {
	return s.slices.List(labels.Everything())
}
