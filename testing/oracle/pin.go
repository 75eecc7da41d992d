package main

import (
	"context"
	"fmt"
	"slices"
	"sort"
	"strconv"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/dynamic-resource-allocation/structured"
)

// pinner restricts a scenario to the devices of a candidate, for the replay of
// validate.
type pinner struct {
	scenario *Scenario
	features structured.Features
	cand     []resourceapi.AllocationResult
	lister   *classLister
	ids      map[string]int // driver/pool/device -> number
}

func newPinner(s *Scenario, f structured.Features, cand []resourceapi.AllocationResult) *pinner {
	classes := append([]*resourceapi.DeviceClass{}, s.DeviceClasses...)
	return &pinner{scenario: s, features: f, cand: cand, lister: newClassLister(classes), ids: map[string]int{}}
}

// id returns the number of a device, the same in slices and claims.
func (p *pinner) id(driver, pool, device string) int {
	k := driver + "/" + pool + "/" + device
	if _, ok := p.ids[k]; !ok {
		p.ids[k] = len(p.ids)
	}
	return p.ids[k]
}

// pinSlices returns the slices with a number per device, and marks the devices that
// are neither allocated nor in the candidate as in use.
func (p *pinner) pinSlices(state *structured.AllocatedState) []*resourceapi.ResourceSlice {
	chosen := map[structured.DeviceID]bool{}
	for _, a := range p.cand {
		for _, r := range a.Devices.Results {
			chosen[structured.MakeDeviceID(r.Driver, r.Pool, r.Device)] = true
		}
	}
	original := trackedFor(p.scenario, p.features).gather()
	unselected := chosenWithoutSelectors(p.scenario, p.cand)
	pinned := make([]*resourceapi.ResourceSlice, len(p.scenario.ResourceSlices))
	for i, sl := range p.scenario.ResourceSlices {
		sl = sl.DeepCopy()
		for j := range sl.Spec.Devices {
			d := &sl.Spec.Devices[j]
			did := structured.MakeDeviceID(sl.Spec.Driver, sl.Spec.Pool.Name, d.Name)
			if !chosen[did] && !structured.IsDeviceAllocated(did, &original) && !usesGroups(d) {
				// In use without consumption: no request evaluates its attributes.
				state.AllocatedDevices.Insert(did)
				for _, cc := range d.ConsumesCounters {
					for n := range cc.Counters {
						cc.Counters[n] = resourceapi.Counter{}
					}
				}
			}
			if unselected[did] {
				dropUnreadable(p.features, sl.Spec.Driver, d)
			}
			if d.Attributes == nil {
				d.Attributes = map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{}
			}
			n := int64(p.id(sl.Spec.Driver, sl.Spec.Pool.Name, d.Name))
			d.Attributes["pin.oracle.invalid/id"] = resourceapi.DeviceAttribute{IntValue: &n}
		}
		pinned[i] = sl
	}
	return pinned
}

// pinClaims returns the claims, whose requests admit only the devices of the candidate.
func (p *pinner) pinClaims() ([]*resourceapi.ResourceClaim, error) {
	claims := make([]*resourceapi.ResourceClaim, len(p.scenario.Claims))
	for ci, claim := range p.scenario.Claims {
		claims[ci] = claim.DeepCopy()
		if err := p.pinClaim(ci, claims[ci]); err != nil {
			return nil, err
		}
	}
	return claims, nil
}

func (p *pinner) pinClaim(ci int, claim *resourceapi.ResourceClaim) error {
	byReq := map[string][]int{}
	for _, r := range p.cand[ci].Devices.Results {
		byReq[r.Request] = append(byReq[r.Request], p.id(r.Driver, r.Pool, r.Device))
	}
	for name, devs := range byReq {
		sorted := append([]int{}, devs...)
		sort.Ints(sorted)
		if len(slices.Compact(sorted)) != len(devs) {
			return fmt.Errorf("claim %s: request %s got the same device twice", claim.Name, name)
		}
	}
	for ri := range claim.Spec.Devices.Requests {
		req := &claim.Spec.Devices.Requests[ri]
		if len(req.FirstAvailable) > 0 {
			chosen, err := chosenSubrequest(claim, req, byReq)
			if err != nil {
				return err
			}
			req.FirstAvailable = req.FirstAvailable[chosen : chosen+1]
			sub := &req.FirstAvailable[0]
			if err := p.pinRequest(ci, byReq, req.Name+"/"+sub.Name, &sub.DeviceClassName, sub.AllocationMode, sub.Count); err != nil {
				return err
			}
			continue
		}
		if req.Exactly == nil {
			return fmt.Errorf("claim %s: request %s: unknown request type", claim.Name, req.Name)
		}
		if err := p.pinRequest(ci, byReq, req.Name, &req.Exactly.DeviceClassName, req.Exactly.AllocationMode, req.Exactly.Count); err != nil {
			return err
		}
	}
	if len(byReq) > 0 {
		return fmt.Errorf("claim %s: results for unknown requests: %v", claim.Name, sortedKeys(byReq))
	}
	return nil
}

// chosenSubrequest returns the index of the subrequest that has results.
func chosenSubrequest(claim *resourceapi.ResourceClaim, req *resourceapi.DeviceRequest, byReq map[string][]int) (int, error) {
	chosen := -1
	for si := range req.FirstAvailable {
		if _, ok := byReq[req.Name+"/"+req.FirstAvailable[si].Name]; ok {
			if chosen >= 0 && req.FirstAvailable[chosen].Name == req.FirstAvailable[si].Name {
				continue // invalid in the API; the first one is used
			}
			if chosen >= 0 {
				return 0, fmt.Errorf("claim %s: request %s: more than one subrequest allocated", claim.Name, req.Name)
			}
			chosen = si
		}
	}
	if chosen < 0 {
		return 0, fmt.Errorf("claim %s: request %s: no subrequest allocated", claim.Name, req.Name)
	}
	return chosen, nil
}

// pinRequest replaces the class of a request or subrequest with a private copy that
// admits only the chosen devices, and removes its results from byReq.
func (p *pinner) pinRequest(ci int, byReq map[string][]int, key string, className *string, mode resourceapi.DeviceAllocationMode, count int64) error {
	claim := p.scenario.Claims[ci].Name
	devs := byReq[key]
	delete(byReq, key)
	if mode == resourceapi.DeviceAllocationModeAll {
		return nil
	}
	if int64(len(devs)) != count {
		return fmt.Errorf("claim %s: request %s wants %d devices, got %d", claim, key, count, len(devs))
	}
	class, err := p.lister.Get(*className)
	if err != nil {
		return fmt.Errorf("claim %s: request %s: device class %q does not exist", claim, key, *className)
	}
	class = class.DeepCopy()
	list := make([]string, len(devs))
	for i, d := range devs {
		list[i] = strconv.Itoa(d)
	}
	sel := resourceapi.DeviceSelector{CEL: &resourceapi.CELDeviceSelector{
		Expression: `device.attributes["pin.oracle.invalid"].id in [` + strings.Join(list, ",") + `]`,
	}}
	class.Spec.Selectors = append([]resourceapi.DeviceSelector{sel}, class.Spec.Selectors...)
	lookup := fmt.Sprintf("pin\x00%d\x00%s", ci, key)
	p.lister.byName[lookup] = class
	*className = lookup
	return nil
}

// chosenWithoutSelectors returns the chosen devices on which upstream need not
// evaluate CEL expressions, because neither the requests nor their classes have
// selectors.
func chosenWithoutSelectors(s *Scenario, cand []resourceapi.AllocationResult) map[structured.DeviceID]bool {
	lister := newClassLister(s.DeviceClasses)
	out := map[structured.DeviceID]bool{}
	for i, a := range cand {
		with := map[string]bool{}
		for _, q := range s.Claims[i].Spec.Devices.Requests {
			mark := func(name, class string, n int) {
				if c, err := lister.Get(class); err == nil {
					n += len(c.Spec.Selectors)
				}
				with[name] = n > 0
			}
			if q.Exactly != nil {
				mark(q.Name, q.Exactly.DeviceClassName, len(q.Exactly.Selectors))
			}
			for _, sub := range q.FirstAvailable {
				mark(q.Name+"/"+sub.Name, sub.DeviceClassName, len(sub.Selectors))
			}
		}
		for _, r := range a.Devices.Results {
			id := structured.MakeDeviceID(r.Driver, r.Pool, r.Device)
			before, seen := out[id]
			out[id] = !with[r.Request] && (!seen || before)
		}
	}
	return out
}

// usesGroups returns true if an allocated device has compatibility groups. It
// restricts other devices, so it must not be marked as in use.
func usesGroups(d *resourceapi.Device) bool {
	return slices.ContainsFunc(d.ConsumesCounters, func(c resourceapi.DeviceCounterConsumption) bool { return len(c.CompatibilityGroups) > 0 })
}

// dropUnreadable removes attributes that make every CEL evaluation on the device
// fail (versions that are not semver, values of an unknown type).
func dropUnreadable(f structured.Features, driver string, d *resourceapi.Device) {
	expr := cel.GetCompiler(cel.Features{EnableConsumableCapacity: f.ConsumableCapacity, EnableListTypeAttributes: f.ListTypeAttributes}).CompileCELExpression("true", cel.Options{DisableCostEstimation: true})
	for n, a := range d.Attributes {
		_, _, err := expr.DeviceMatches(context.Background(), cel.Device{Driver: driver, Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{n: a}})
		if err != nil {
			delete(d.Attributes, n)
		}
	}
}
