package main

import (
	"fmt"
	"strconv"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
)

// occupy creates allocated claims.
func (g *gen) occupy() {
	used := map[string]int64{} // counters used per pool/set/counter
	total := map[string]int64{}
	for _, sl := range g.s.ResourceSlices {
		for _, cs := range sl.Spec.SharedCounters {
			for n, c := range cs.Counters {
				total[sl.Spec.Pool.Name+"/"+cs.Name+"/"+n] = c.Value.Value()
			}
		}
	}
	seen := map[string]bool{}
	for _, sl := range g.s.ResourceSlices {
		for i := range sl.Spec.Devices {
			d := &sl.Spec.Devices[i]
			key := sl.Spec.Driver + "/" + sl.Spec.Pool.Name + "/" + d.Name
			if seen[key] || !g.p(g.occupancy) {
				continue
			}
			fits := true
			for _, cc := range d.ConsumesCounters {
				for _, n := range sortedKeys(cc.Counters) {
					k, c := sl.Spec.Pool.Name+"/"+cc.CounterSet+"/"+n, cc.Counters[n]
					if used[k]+c.Value.Value() > total[k] && !g.p(5) {
						fits = false
					}
				}
			}
			if !fits {
				continue
			}
			for _, cc := range d.ConsumesCounters {
				for n, c := range cc.Counters {
					used[sl.Spec.Pool.Name+"/"+cc.CounterSet+"/"+n] += c.Value.Value()
				}
			}
			seen[key] = true
			base := resourceapi.DeviceRequestAllocationResult{Request: "r", Driver: sl.Spec.Driver, Pool: sl.Spec.Pool.Name, Device: d.Name}
			if g.adminPct > 0 && g.p(20) {
				base.AdminAccess = ptr.To(true)
				g.allocated(base)
				continue
			}
			if !ptr.Deref(d.AllowMultipleAllocations, false) {
				g.allocated(base)
				continue
			}
			for j := 0; j < g.in(1, 3); j++ {
				r := base
				r.ShareID = ptr.To(types.UID(fmt.Sprintf("used-%d", g.share)))
				g.share++
				if g.p(92) {
					r.ConsumedCapacity = map[qn]resource.Quantity{}
					for _, n := range []qn{"cores", "memory"} {
						if _, ok := d.Capacity[n]; !ok {
							continue
						}
						switch n {
						case "memory":
							r.ConsumedCapacity[n] = qty(pick(g.rng, "5Gi", "10Gi", "10Gi", "15Gi"))
						case "cores":
							r.ConsumedCapacity[n] = qty(pick(g.rng, "10", "25", "40"))
						}
					}
				}
				g.allocated(r)
			}
		}
	}
}

func (g *gen) allocated(r ...resourceapi.DeviceRequestAllocationResult) {
	c := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("old-%d", g.nCl), Namespace: "default"}}
	g.nCl++
	c.Status.Allocation = &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{Results: r}}
	g.s.AllocatedClaims = append(g.s.AllocatedClaims, c)
}

func (g *gen) selector() string {
	a := `device.attributes["gpu.example.com"]`
	if !g.wildSelectors {
		list := []string{
			a + `.?model.orValue("") == "` + models[g.n(3)] + `"`,
			a + `.?model.orValue("") != "` + models[g.n(3)] + `"`,
			a + `.?numa.orValue(-1) == ` + strconv.Itoa(g.n(2)),
			`device.capacity["gpu.example.com"].?memory.orValue(quantity("0")).compareTo(quantity("` + pick(g.rng, "40Gi", "48Gi", "60Gi") + `")) >= 0`,
			`!("numa" in ` + a + `) || ` + a + `.numa < 1`,
		}
		if g.partitionPct > 0 {
			list = append(list,
				a+`.?profile.orValue("") == "`+pick(g.rng, "1g", "2g", "3g", "7g")+`"`,
				a+`.?profile.orValue("") in ["1g", "2g"]`,
				a+`.?profile.orValue("") == "`+pick(g.rng, "1g", "2g", "3g", "7g")+`"`)
		}
		if g.multiPct > 0 {
			list = append(list, `device.allowMultipleAllocations`, `!device.allowMultipleAllocations`)
		}
		if g.listPct > 0 {
			l := []string{
				`("links" in ` + a + `) && ` + a + `.links.includes(` + strconv.Itoa(g.n(4)) + `)`,
				`"tags" in ` + a + ` && "y" in ` + a + `.tags`,
				`"links" in ` + a,
			}
			return pick(g.rng, l...)
		}
		return pick(g.rng, list...)
	}
	return pick(g.rng,
		a+`.model == "`+models[g.n(3)]+`"`,
		a+`.model.startsWith("`+pick(g.rng, "A", "H", "L")+`")`,
		a+`.model in ["A100", "H100"]`,
		`sets.contains(["A100", "L40S"], [`+a+`.model])`,
		a+`.numa == `+strconv.Itoa(g.n(2)),
		a+`.numa != 0 && `+a+`.mig`,
		a+`.mig || `+a+`.numa == 0`,
		`has(`+a+`.mig) && !`+a+`.mig`,
		`"numa" in `+a+` ? `+a+`.numa < 1 : true`,
		a+`.driverVersion.isGreaterThan(semver("550.0.0"))`,
		a+`.driverVersion.compareTo(semver("550.54.15")) >= 0`,
		a+`.driverVersion.major() == 535`,
		`device.capacity["gpu.example.com"].memory.isGreaterThan(quantity("40Gi"))`,
		`device.capacity["gpu.example.com"].memory.compareTo(quantity("48Gi")) <= 0`,
		`device.capacity["gpu.example.com"].memory.sub(quantity("8Gi")).asInteger() >= 42949672960`,
		`device.attributes["resource.kubernetes.io"].pcieRoot.matches("^pci0000:0[0-1]$")`,
		`device.attributes["resource.kubernetes.io"].?pcieRoot.orValue("none") != "pci0000:00"`,
		`cel.bind(x, `+a+`, x.model == "A100" && x.numa == `+strconv.Itoa(g.n(2))+`)`,
		a+`.exists(k, k == "mig")`,
		a+`.all(k, v, k != "model" || v != "L40S")`,
		`device.attributes["unknown.example.com"].?x.orValue(1) == 1`,
		`device.driver.endsWith("example.com") && size(`+a+`) > 3`,
		`[1, 2, 3].exists(i, i == `+a+`.numa + 1)`,
		a+`.model.lowerAscii().contains("100")`,
		a+`["model"] == "H100"`,
		`device.attributes.?["gpu.example.com"].?model.hasValue()`,
	)
}

func (g *gen) tolerations() []resourceapi.DeviceToleration {
	var out []resourceapi.DeviceToleration
	for i := 0; i < 2 && g.p(g.tolerationPct); i++ {
		t := resourceapi.DeviceToleration{Key: pick(g.rng, "health", "maint", "maint")}
		switch g.n(4) {
		case 0:
			t = resourceapi.DeviceToleration{Operator: resourceapi.DeviceTolerationOpExists}
		case 1:
			t.Operator = resourceapi.DeviceTolerationOpExists
		default:
			t.Operator = resourceapi.DeviceTolerationOpEqual
			t.Value = pick(g.rng, "", "bad", "soon")
		}
		if g.p(45) {
			t.Effect = pick(g.rng, resourceapi.DeviceTaintEffectNoSchedule, resourceapi.DeviceTaintEffectNoExecute)
		}
		out = append(out, t)
	}
	return out
}

func (g *gen) capacityRequest() *resourceapi.CapacityRequirements {
	if !g.p(g.capReqPct) {
		return nil
	}
	c := &resourceapi.CapacityRequirements{Requests: map[qn]resource.Quantity{}}
	if g.p(85) {
		c.Requests["memory"] = qty(pick(g.rng, "1Gi", "4Gi", "5Gi", "7Gi", "10Gi", "12Gi", "20Gi", "30Gi", "40Gi", "6500Mi"))
	}
	if g.p(15) || len(c.Requests) == 0 {
		c.Requests["cores"] = qty(pick(g.rng, "5", "7", "20", "33", "50", "100", "2500m", "300m"))
	}
	if g.p(4) {
		c.Requests["gpu.example.com/memory"] = qty("1Gi") // not the slice's key: never satisfiable
	}
	return c
}

func (g *gen) className() string {
	l := []string{"gpu", "gpu", "gpu", "gpu", "big"}
	if g.hasClass("nic") && g.nicPct > 0 {
		l = append(l, "nic")
	}
	if g.hasClass("any") {
		l = append(l, "any")
	}
	return pick(g.rng, l...)
}

func (g *gen) count() int64 {
	if g.p(50) {
		return 1
	}
	return int64(g.in(1, max(1, g.maxCount)))
}

func (g *gen) makeClaims() {
	n := g.in(g.claims[0], g.claims[1])
	for ci := 0; ci < n; ci++ {
		c := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("claim-%d", ci), Namespace: "default"}}
		var names, fullNames []string
		for ri := 0; ri < g.in(g.requests[0], g.requests[1]); ri++ {
			req := resourceapi.DeviceRequest{Name: fmt.Sprintf("r%d", ri)}
			names = append(names, req.Name)
			if g.p(g.firstAvailPct) {
				for si := 0; si < g.in(1, 3); si++ {
					sub := resourceapi.DeviceSubRequest{Name: fmt.Sprintf("s%d", si), DeviceClassName: g.className(), AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: g.count() + int64(g.n(2))}
					if si > 0 {
						sub.Count = max(1, sub.Count-1)
					}
					if g.p(g.allPct) {
						sub.AllocationMode, sub.Count = resourceapi.DeviceAllocationModeAll, 0
					}
					if g.p(g.selectorPct) {
						sub.Selectors = []resourceapi.DeviceSelector{celSel(g.selector())}
					}
					sub.Tolerations = g.tolerations()
					sub.Capacity = g.capacityRequest()
					req.FirstAvailable = append(req.FirstAvailable, sub)
					fullNames = append(fullNames, req.Name+"/"+sub.Name)
				}
			} else {
				e := &resourceapi.ExactDeviceRequest{DeviceClassName: g.className(), AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: g.count()}
				if g.p(g.allPct) {
					e.AllocationMode, e.Count = resourceapi.DeviceAllocationModeAll, 0
				}
				for i := 0; i < 2 && g.p(g.selectorPct); i++ {
					e.Selectors = append(e.Selectors, celSel(g.selector()))
				}
				e.Tolerations = g.tolerations()
				e.Capacity = g.capacityRequest()
				if g.p(g.adminPct) {
					e.AdminAccess = ptr.To(true)
				}
				req.Exactly = e
			}
			c.Spec.Devices.Requests = append(c.Spec.Devices.Requests, req)
		}
		for i := 0; i < 2 && g.p(g.constraintPct) && (i == 0 || g.p(30)); i++ {
			var k resourceapi.DeviceConstraint
			attr := pick(g.rng, "gpu.example.com/numa", "gpu.example.com/numa", "gpu.example.com/model", "resource.kubernetes.io/pcieRoot", "resource.kubernetes.io/pcieRoot")
			if g.listPct > 0 {
				attr = pick(g.rng, "gpu.example.com/links", "gpu.example.com/links", "gpu.example.com/tags", "gpu.example.com/numa")
			}
			if g.p(g.distinctPct) {
				k.DistinctAttribute = ptr.To(resourceapi.FullyQualifiedName(attr))
			} else {
				k.MatchAttribute = ptr.To(resourceapi.FullyQualifiedName(attr))
			}
			if g.p(35) {
				k.Requests = []string{pick(g.rng, names...)}
				if len(fullNames) > 0 && g.p(40) {
					k.Requests = []string{pick(g.rng, fullNames...)}
				}
			}
			c.Spec.Devices.Constraints = append(c.Spec.Devices.Constraints, k)
		}
		for i := 0; i < 3 && g.p(g.configPct*2/3); i++ {
			cfg := resourceapi.DeviceClaimConfiguration{DeviceConfiguration: rawConfig(gpuDriver, 10*ci+i)}
			switch g.n(4) {
			case 0: // all
			case 1:
				cfg.Requests = append([]string{}, names...)
			default:
				cfg.Requests = []string{pick(g.rng, names...)}
				if len(fullNames) > 0 && g.p(60) {
					cfg.Requests = []string{pick(g.rng, fullNames...)}
				}
			}
			c.Spec.Devices.Config = append(c.Spec.Devices.Config, cfg)
		}
		g.s.Claims = append(g.s.Claims, c)
	}
}

// injectError adds one cause of an error, which upstream may or may not raise.
func (g *gen) injectError() {
	if !g.p(g.errorPct) {
		return
	}
	c := pick(g.rng, g.s.Claims...)
	req := &c.Spec.Devices.Requests[g.n(len(c.Spec.Devices.Requests))]
	if req.Exactly == nil {
		req.Exactly = &resourceapi.ExactDeviceRequest{DeviceClassName: "gpu", AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: 1}
		req.FirstAvailable = nil
	}
	e := req.Exactly
	a := `device.attributes["gpu.example.com"]`
	switch g.n(15) {
	case 13: // operand of Gt is not a number
		for _, sl := range g.s.ResourceSlices {
			if sl.Spec.NodeName != nil && g.p(60) {
				sl.Spec.NodeName = nil
				sl.Spec.NodeSelector = zoneSelector("gen", v1.NodeSelectorOpGt, "x")
				break
			}
		}
	case 14, 9: // beyond what the request policy's arithmetic can represent, or negative
		for _, sl := range g.s.ResourceSlices {
			for i := range sl.Spec.Devices {
				if d := &sl.Spec.Devices[i]; d.Capacity != nil && g.p(60) {
					d.AllowMultipleAllocations = ptr.To(true)
					d.Capacity["memory"] = resourceapi.DeviceCapacity{Value: qty("40Gi"), RequestPolicy: &resourceapi.CapacityRequestPolicy{Default: ptr.To(qty("1Gi")),
						ValidRange: &resourceapi.CapacityRequestPolicyRange{Min: ptr.To(qty("1Gi")), Step: ptr.To(qty("1Gi"))}}}
				}
			}
		}
		e.Capacity = &resourceapi.CapacityRequirements{Requests: map[qn]resource.Quantity{"memory": qty(pick(g.rng, "9223372036854775807", "16Ei", "7Ei", "-1Gi", "41Gi"))}}
	case 0:
		e.Selectors = append(e.Selectors, celSel(a+`.nosuch == "x"`))
	case 1:
		e.Selectors = append(e.Selectors, celSel(pick(g.rng, `device.attributes[`, `device.nosuch == 1`, `device.driver`, `1 + 1`, `a == b`)))
	case 2:
		e.DeviceClassName = pick(g.rng, "nosuch", "")
	case 3:
		e.AllocationMode, e.Count, e.AdminAccess = resourceapi.DeviceAllocationModeExactCount, int64(pick(g.rng, 33, 32, 40, 1000)), nil
	case 4: // fails on some devices only
		e.Selectors = append(e.Selectors, celSel(a+`.model == "`+models[g.n(3)]+`" || `+a+`.nosuch`))
	case 5:
		e.Selectors = append(e.Selectors, celSel(a+`.model > 3`), celSel(`device.capacity["x.example.com"].y.isInteger()`))
	case 6: // division by zero where numa == 0
		e.Selectors = append(e.Selectors, celSel(`4 / `+a+`.numa == 4`))
	case 7:
		e.AllocationMode, e.Count = "Some", 0
	case 8:
		c.Spec.Devices.Constraints = append(c.Spec.Devices.Constraints, resourceapi.DeviceConstraint{})
	case 10:
		cl := pick(g.rng, g.s.DeviceClasses...)
		cl.Spec.Selectors = append(cl.Spec.Selectors, celSel(pick(g.rng, a+`.nosuch`, `nosuch()`, a+`.?nosuch.orValue("x") == "x"`)))
	case 11: // "All" with a constraint that the devices cannot meet
		e.AllocationMode, e.Count = resourceapi.DeviceAllocationModeAll, 0
		c.Spec.Devices.Constraints = append(c.Spec.Devices.Constraints, resourceapi.DeviceConstraint{MatchAttribute: ptr.To(resourceapi.FullyQualifiedName(pick(g.rng, "gpu.example.com/numa", "gpu.example.com/driverVersion", "gpu.example.com/nosuch")))})
	case 12: // bad version
		for _, sl := range g.s.ResourceSlices {
			if len(sl.Spec.Devices) > 0 && sl.Spec.Driver == gpuDriver {
				d := &sl.Spec.Devices[g.n(len(sl.Spec.Devices))]
				if d.Attributes == nil {
					d.Attributes = map[qn]resourceapi.DeviceAttribute{}
				}
				d.Attributes["fw"] = resourceapi.DeviceAttribute{VersionValue: ptr.To(pick(g.rng, "1.2", "01.2.3"))}
				break
			}
		}
	}
}
