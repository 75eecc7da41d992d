package autoscaler

import (
	"fmt"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/runtime"
)

// Cluster is the state that a simulation starts from.
type Cluster struct {
	Nodes   []*v1.Node
	Slices  []*resourceapi.ResourceSlice
	Rules   []*resourceapi.DeviceTaintRule
	Classes []*resourceapi.DeviceClass
	Claims  []*resourceapi.ResourceClaim
	// Pods with and without a node.
	Pods []*v1.Pod
}

// NodeGroup is a kind of node of which an autoscaler can add more.
type NodeGroup struct {
	// Template is the node that is copied.
	Template *v1.Node
	// Slices are those of the template.
	Slices []*resourceapi.ResourceSlice
}

func (c *Cluster) objects() []runtime.Object {
	var objects []runtime.Object
	for _, node := range c.Nodes {
		objects = append(objects, node)
	}
	for _, slice := range c.Slices {
		objects = append(objects, slice)
	}
	for _, rule := range c.Rules {
		objects = append(objects, rule)
	}
	for _, class := range c.Classes {
		objects = append(objects, class)
	}
	for _, claim := range c.Claims {
		objects = append(objects, claim)
	}
	for _, pod := range c.Pods {
		objects = append(objects, pod)
	}
	return objects
}

func (c *Cluster) copy() *Cluster {
	copied := &Cluster{Rules: c.Rules, Classes: c.Classes}
	copied.Nodes = append(copied.Nodes, c.Nodes...)
	copied.Slices = append(copied.Slices, c.Slices...)
	copied.Claims = append(copied.Claims, c.Claims...)
	copied.Pods = append(copied.Pods, c.Pods...)
	return copied
}

// group returns the group of which the node is one, with the node's slices as they are published.
func (c *Cluster) group(name string) NodeGroup {
	var group NodeGroup
	for _, node := range c.Nodes {
		if node.Name == name {
			group.Template = node
		}
	}
	for _, slice := range c.Slices {
		if slice.Spec.NodeName != nil && *slice.Spec.NodeName == name {
			group.Slices = append(group.Slices, slice)
		}
	}
	return group
}

// node returns the number-th new node of the group, with its slices: another host name, another
// pool, and everything else as the template has it.
func (g NodeGroup) node(number int) (*v1.Node, []*resourceapi.ResourceSlice) {
	name := fmt.Sprintf("new-%d", number)
	node := g.Template.DeepCopy()
	node.Name, node.UID = name, ""
	node.Labels[v1.LabelHostname] = name
	var slices []*resourceapi.ResourceSlice
	for index, slice := range g.Slices {
		copied := slice.DeepCopy()
		copied.Name = fmt.Sprintf("%s-%d", name, index)
		copied.Spec.NodeName, copied.Spec.Pool.Name = &name, name
		slices = append(slices, copied)
	}
	return node, slices
}

// without returns the cluster after the node was removed: its pods are pending, and the claims that
// were made for them are not allocated.
func (c *Cluster) without(name string) *Cluster {
	rest := &Cluster{Rules: c.Rules, Classes: c.Classes}
	evicted := map[string]bool{}
	for _, pod := range c.Pods {
		if pod.Spec.NodeName == name {
			pod = pod.DeepCopy()
			pod.Spec.NodeName = ""
			evicted[pod.Name] = true
		}
		rest.Pods = append(rest.Pods, pod)
	}
	for _, claim := range c.Claims {
		if len(claim.OwnerReferences) > 0 && evicted[claim.OwnerReferences[0].Name] {
			claim = claim.DeepCopy()
			claim.Status = resourceapi.ResourceClaimStatus{}
		}
		rest.Claims = append(rest.Claims, claim)
	}
	for _, node := range c.Nodes {
		if node.Name != name {
			rest.Nodes = append(rest.Nodes, node)
		}
	}
	for _, slice := range c.Slices {
		if slice.Spec.NodeName == nil || *slice.Spec.NodeName != name {
			rest.Slices = append(rest.Slices, slice)
		}
	}
	return rest
}
