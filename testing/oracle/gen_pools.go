package main

import (
	"fmt"
	"strconv"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
)

var (
	models   = []string{"A100", "H100", "L40S"}
	memories = map[string]string{"A100": "40Gi", "H100": "80Gi", "L40S": "48Gi"}
)

type qn = resourceapi.QualifiedName

func (g *gen) has() bool { return !g.p(g.missingPct) }

// device builds one GPU; i is its index among the n devices of the node.
func (g *gen) device(name, model string, i, n int) resourceapi.Device {
	d := resourceapi.Device{Name: name, Attributes: map[qn]resourceapi.DeviceAttribute{}}
	half := (n + 1) / 2
	if g.has() {
		d.Attributes["model"] = resourceapi.DeviceAttribute{StringValue: ptr.To(model)}
	}
	if g.has() {
		d.Attributes["numa"] = resourceapi.DeviceAttribute{IntValue: ptr.To(int64(i / half))}
	}
	if (g.constraintPct > 0 || g.wildSelectors) && g.has() {
		d.Attributes["resource.kubernetes.io/pcieRoot"] = resourceapi.DeviceAttribute{StringValue: ptr.To(fmt.Sprintf("pci0000:%02d", i/2))}
	}
	if g.wildSelectors || g.p(12) {
		d.Attributes["driverVersion"] = resourceapi.DeviceAttribute{VersionValue: ptr.To(pick(g.rng, "535.104.5", "550.54.15", "570.0.0"))}
	}
	if g.wildSelectors || g.p(12) {
		d.Attributes["mig"] = resourceapi.DeviceAttribute{BoolValue: ptr.To(g.p(50))}
	}
	if g.listPct > 0 {
		if g.p(g.listPct) {
			links := []int64{int64(g.n(3))}
			for g.p(50) && len(links) < 3 {
				links = append(links, int64(g.n(5)))
			}
			d.Attributes["links"] = resourceapi.DeviceAttribute{IntValues: links}
		} else if g.p(70) {
			d.Attributes["links"] = resourceapi.DeviceAttribute{IntValue: ptr.To(int64(g.n(3)))}
		}
		if g.p(30) {
			d.Attributes["tags"] = resourceapi.DeviceAttribute{StringValues: []string{pick(g.rng, "x", "y"), pick(g.rng, "y", "z")}}
		}
	}
	mem := memories[model]
	d.Capacity = map[qn]resourceapi.DeviceCapacity{"memory": {Value: qty(mem)}}
	if g.p(g.multiPct) {
		d.AllowMultipleAllocations = ptr.To(true)
		c := d.Capacity["memory"]
		if g.p(g.policyPct) {
			switch g.n(4) {
			case 0:
				c.RequestPolicy = &resourceapi.CapacityRequestPolicy{Default: ptr.To(qty("5Gi")),
					ValidRange: &resourceapi.CapacityRequestPolicyRange{Min: ptr.To(qty("5Gi")), Step: ptr.To(qty("5Gi")), Max: ptr.To(qty(pick(g.rng, "20Gi", "40Gi")))}}
			case 1:
				c.RequestPolicy = &resourceapi.CapacityRequestPolicy{Default: ptr.To(qty("10Gi")),
					ValidValues: []resource.Quantity{qty("5Gi"), qty("10Gi"), qty("20Gi"), qty("40Gi")}}
			case 2:
				c.RequestPolicy = &resourceapi.CapacityRequestPolicy{Default: ptr.To(qty("1Gi")),
					ValidRange: &resourceapi.CapacityRequestPolicyRange{Min: ptr.To(qty("1Gi"))}}
			case 3:
				c.RequestPolicy = &resourceapi.CapacityRequestPolicy{Default: ptr.To(qty("8Gi"))}
			}
		}
		d.Capacity["memory"] = c
		if g.p(45) {
			cores := resourceapi.DeviceCapacity{Value: qty("100")}
			if g.p(g.policyPct) {
				if g.p(70) {
					cores.RequestPolicy = &resourceapi.CapacityRequestPolicy{Default: ptr.To(qty("10")),
						ValidRange: &resourceapi.CapacityRequestPolicyRange{Min: ptr.To(qty("5")), Step: ptr.To(qty("5"))}}
				} else {
					cores.RequestPolicy = &resourceapi.CapacityRequestPolicy{Default: ptr.To(qty("500m")),
						ValidRange: &resourceapi.CapacityRequestPolicyRange{Min: ptr.To(qty("500m")), Step: ptr.To(qty(pick(g.rng, "250m", "500m"))), Max: ptr.To(qty("50"))}}
				}
			}
			d.Capacity["cores"] = cores
		}
	}
	for t := 0; t < 2 && g.p(g.taintPct); t++ {
		d.Taints = append(d.Taints, resourceapi.DeviceTaint{
			Key: pick(g.rng, "health", "maint"), Value: pick(g.rng, "", "bad", "soon"),
			Effect: pick(g.rng, resourceapi.DeviceTaintEffectNoSchedule, resourceapi.DeviceTaintEffectNoSchedule, resourceapi.DeviceTaintEffectNoExecute, resourceapi.DeviceTaintEffectNone),
		})
	}
	if g.p(g.bindingPct) {
		d.BindingConditions = []string{pick(g.rng, "ready.example.com/attached", "ready.example.com/powered")}
		d.BindingFailureConditions = []string{"failed.example.com/broken"}
	}
	if g.p(g.bindsToNodePct) {
		d.BindsToNode = ptr.To(true)
	}
	return d
}

// partition builds the MIG-like devices of one GPU, which share one counter set.
func (g *gen) partition(gpu int, model string) ([]resourceapi.Device, resourceapi.CounterSet) {
	set := fmt.Sprintf("gpu-%d", gpu)
	cs := resourceapi.CounterSet{Name: set, Counters: map[string]resourceapi.Counter{
		"compute": {Value: qty("7")}, "mem": {Value: qty("8")},
	}}
	var out []resourceapi.Device
	add := func(name, profile string, compute, mem int) {
		d := resourceapi.Device{Name: name, Attributes: map[qn]resourceapi.DeviceAttribute{
			"model":   {StringValue: ptr.To(model)},
			"profile": {StringValue: ptr.To(profile)},
			"numa":    {IntValue: ptr.To(int64(gpu % 2))},
		}, Capacity: map[qn]resourceapi.DeviceCapacity{"memory": {Value: qty(strconv.Itoa(mem*5) + "Gi")}}}
		d.ConsumesCounters = []resourceapi.DeviceCounterConsumption{{CounterSet: set, Counters: map[string]resourceapi.Counter{
			"compute": {Value: qty(strconv.Itoa(compute))}, "mem": {Value: qty(strconv.Itoa(mem))},
		}}}
		if g.p(g.multiPct) {
			d.AllowMultipleAllocations = ptr.To(true)
		}
		out = append(out, d)
	}
	p := fmt.Sprintf("gpu-%d", gpu)
	if g.p(70) {
		add(p, "7g", 7, 8)
	}
	for i := 0; i < g.in(0, 2); i++ {
		add(fmt.Sprintf("%s-3g-%d", p, i), "3g", 3, 4)
	}
	for i := 0; i < g.in(0, 2); i++ {
		add(fmt.Sprintf("%s-2g-%d", p, i), "2g", 2, 2)
	}
	for i := 0; i < g.in(1, 3); i++ {
		add(fmt.Sprintf("%s-1g-%d", p, i), "1g", 1, 1)
	}
	g.shuffle(len(out), func(i, j int) { out[i], out[j] = out[j], out[i] })
	return out, cs
}

func zoneSelector(key string, op v1.NodeSelectorOperator, values ...string) *v1.NodeSelector {
	return &v1.NodeSelector{NodeSelectorTerms: []v1.NodeSelectorTerm{{MatchExpressions: []v1.NodeSelectorRequirement{{Key: key, Operator: op, Values: values}}}}}
}

func (g *gen) randomSelector() *v1.NodeSelector {
	switch g.n(4) {
	case 0:
		return zoneSelector("zone", v1.NodeSelectorOpIn, pick(g.rng, "a", "b"))
	case 1:
		return zoneSelector("gen", v1.NodeSelectorOpGt, strconv.Itoa(g.in(0, 2)))
	case 2:
		return zoneSelector("zone", v1.NodeSelectorOpNotIn, pick(g.rng, "a", "b"))
	default:
		ns := zoneSelector("zone", v1.NodeSelectorOpIn, "a", "b")
		ns.NodeSelectorTerms[0].MatchExpressions = append(ns.NodeSelectorTerms[0].MatchExpressions, v1.NodeSelectorRequirement{Key: "gen", Operator: v1.NodeSelectorOpExists})
		return ns
	}
}

func (g *gen) slice(name, driver, pool string, count int64, devs []resourceapi.Device) *resourceapi.ResourceSlice {
	return &resourceapi.ResourceSlice{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec:       resourceapi.ResourceSliceSpec{Driver: driver, Pool: resourceapi.ResourcePool{Name: pool, Generation: 1, ResourceSliceCount: count}, Devices: devs},
	}
}

func (g *gen) makeSlices() {
	for ni, node := range g.s.Nodes {
		pool := node.Name
		n := g.in(g.devs[0], g.devs[1])
		model := models[g.n(len(models))]
		var devs []resourceapi.Device
		var sets []resourceapi.CounterSet
		if g.p(g.partitionPct) {
			for i := 0; i < g.in(g.devs[0], min(g.devs[1], 2)); i++ {
				d, cs := g.partition(i, model)
				devs = append(devs, d...)
				sets = append(sets, cs)
			}
		} else {
			for i := 0; i < n; i++ {
				if g.p(20) {
					model = models[g.n(len(models))]
				}
				devs = append(devs, g.device(fmt.Sprintf("gpu-%d", i), model, i, n))
			}
		}
		mode := 0
		if g.selectionMode == 1 {
			mode = g.n(5)
			if mode == 3 && g.p(50) {
				mode = 0
			}
		}
		parts := 1
		if len(devs) > 1 && g.p(g.splitPct) {
			parts = 2
		}
		count := int64(parts)
		if len(sets) > 0 {
			count++
		}
		for i := 0; i < parts; i++ {
			lo, hi := i*len(devs)/parts, (i+1)*len(devs)/parts
			// Names are not always in creation order: upstream orders by name.
			name := fmt.Sprintf("s%d-%d", ni, i)
			if g.p(30) {
				name = fmt.Sprintf("s%d-%d", ni, 9-i)
			}
			sl := g.slice(name, gpuDriver, pool, count, devs[lo:hi])
			g.place(sl, node, mode)
			g.s.ResourceSlices = append(g.s.ResourceSlices, sl)
		}
		if len(sets) > 0 {
			sl := g.slice(fmt.Sprintf("s%d-c", ni), gpuDriver, pool, count, nil)
			sl.Spec.SharedCounters = sets
			switch mode {
			case 1, 2, 3:
				sl.Spec.AllNodes = ptr.To(true)
			default:
				sl.Spec.NodeName = ptr.To(node.Name)
			}
			g.s.ResourceSlices = append(g.s.ResourceSlices, sl)
		}
		if g.p(g.nicPct) {
			g.s.ResourceSlices = append(g.s.ResourceSlices, g.nicSlice(ni, node))
		}
	}
	// Input order of slices must not matter.
	g.shuffle(len(g.s.ResourceSlices), func(i, j int) {
		g.s.ResourceSlices[i], g.s.ResourceSlices[j] = g.s.ResourceSlices[j], g.s.ResourceSlices[i]
	})
}

// place sets the nodes of a slice in one of the selection modes.
func (g *gen) place(sl *resourceapi.ResourceSlice, node *v1.Node, mode int) {
	switch mode {
	case 0, 4:
		sl.Spec.NodeName = ptr.To(node.Name)
	case 1:
		sl.Spec.NodeSelector = g.randomSelector()
	case 2:
		sl.Spec.PerDeviceNodeSelection = ptr.To(true)
		for i := range sl.Spec.Devices {
			d := &sl.Spec.Devices[i]
			switch g.n(4) {
			case 0:
				d.AllNodes = ptr.To(true)
			case 1:
				d.NodeSelector = g.randomSelector()
			default:
				d.NodeName = ptr.To(pick(g.rng, g.s.Nodes...).Name)
			}
		}
	case 3:
		sl.Spec.AllNodes = ptr.To(true)
	}
}

// nicSlice creates the slice of a node's NICs, a pool of another driver.
func (g *gen) nicSlice(ni int, node *v1.Node) *resourceapi.ResourceSlice {
	var nics []resourceapi.Device
	m := g.in(1, 3)
	for i := 0; i < m; i++ {
		d := resourceapi.Device{Name: fmt.Sprintf("nic-%d", i), Attributes: map[qn]resourceapi.DeviceAttribute{
			"resource.kubernetes.io/pcieRoot": {StringValue: ptr.To(fmt.Sprintf("pci0000:%02d", i))},
			"numa":                            {IntValue: ptr.To(int64(i % 2))},
			"rdma":                            {BoolValue: ptr.To(g.p(60))},
		}}
		nics = append(nics, d)
	}
	sl := g.slice(fmt.Sprintf("n%d-0", ni), nicDriver, node.Name, 1, nics)
	sl.Spec.NodeName = ptr.To(node.Name)
	return sl
}

// anomalies makes pools invalid.
func (g *gen) anomalies() {
	for _, sl := range append([]*resourceapi.ResourceSlice{}, g.s.ResourceSlices...) {
		if !g.p(g.anomalyPct) {
			continue
		}
		switch g.n(7) {
		case 6: // compatibility groups while that feature is off: the slice is ignored
			if len(sl.Spec.Devices) > 0 {
				d := &sl.Spec.Devices[g.n(len(sl.Spec.Devices))]
				d.ConsumesCounters = []resourceapi.DeviceCounterConsumption{{CounterSet: "gpu-0", CompatibilityGroups: []string{"mig"}, Counters: map[string]resourceapi.Counter{"mem": {Value: qty("1")}}}}
			}
		case 0: // incomplete
			sl.Spec.Pool.ResourceSliceCount++
			for _, o := range g.s.ResourceSlices {
				if o.Spec.Pool.Name == sl.Spec.Pool.Name && o.Spec.Driver == sl.Spec.Driver {
					o.Spec.Pool.ResourceSliceCount = sl.Spec.Pool.ResourceSliceCount
				}
			}
		case 1: // an older generation remains
			old := sl.DeepCopy()
			old.Name = "a-old-" + sl.Name
			for _, o := range g.s.ResourceSlices {
				if o.Spec.Pool.Name == sl.Spec.Pool.Name && o.Spec.Driver == sl.Spec.Driver {
					o.Spec.Pool.Generation = 2
				}
			}
			for i := range old.Spec.Devices {
				old.Spec.Devices[i].Name = fmt.Sprintf("old-%d", i)
			}
			g.s.ResourceSlices = append(g.s.ResourceSlices, old)
		case 2: // duplicate device name
			if len(sl.Spec.Devices) > 0 {
				sl.Spec.Devices = append(sl.Spec.Devices, *sl.Spec.Devices[0].DeepCopy())
			}
		case 3: // unknown counter set or counter
			if len(sl.Spec.Devices) > 0 {
				d := &sl.Spec.Devices[g.n(len(sl.Spec.Devices))]
				d.ConsumesCounters = []resourceapi.DeviceCounterConsumption{{CounterSet: pick(g.rng, "nope", "gpu-0"), Counters: map[string]resourceapi.Counter{"zzz": {Value: qty("1")}}}}
			}
		case 4: // the newer generation is on another node only
			newer := sl.DeepCopy()
			newer.Name = "z-new-" + sl.Name
			newer.Spec.Pool.Generation = 5
			newer.Spec.NodeSelector, newer.Spec.AllNodes, newer.Spec.PerDeviceNodeSelection = nil, nil, nil
			newer.Spec.NodeName = ptr.To("elsewhere")
			newer.Spec.Devices = nil
			g.s.ResourceSlices = append(g.s.ResourceSlices, newer)
			if g.p(50) {
				sl.Spec.Pool.ResourceSliceCount++
			}
		case 5: // one more slice of the same pool on another node
			other := sl.DeepCopy()
			other.Name = "m-other-" + sl.Name
			other.Spec.NodeSelector, other.Spec.AllNodes, other.Spec.PerDeviceNodeSelection = nil, nil, nil
			other.Spec.NodeName = ptr.To("elsewhere")
			for i := range other.Spec.Devices {
				if g.p(70) {
					other.Spec.Devices[i].Name = fmt.Sprintf("other-%d", i)
				}
				other.Spec.Devices[i].NodeName, other.Spec.Devices[i].AllNodes, other.Spec.Devices[i].NodeSelector = nil, nil, nil
			}
			for _, o := range g.s.ResourceSlices {
				if o.Spec.Pool.Name == sl.Spec.Pool.Name && o.Spec.Driver == sl.Spec.Driver {
					o.Spec.Pool.ResourceSliceCount++
				}
			}
			other.Spec.Pool.ResourceSliceCount = sl.Spec.Pool.ResourceSliceCount
			g.s.ResourceSlices = append(g.s.ResourceSlices, other)
		}
	}
}
