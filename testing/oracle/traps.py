#!/usr/bin/env python3
"""Hand-made cases for semantics that are easily implemented incorrectly, one per trap.
usage: traps.py | oracle solve > traps.jsonl        (the note has the expected result; goldens.sh runs this)"""
import json

D = "gpu.example.com"
out = []


def dev(name, attrs=None, cap=None, multi=False, counters=None, taints=None, **kw):
    d = {"name": name}
    if attrs:
        d["attributes"] = {k: {"string" if isinstance(v, str) else "bool" if isinstance(v, bool) else "int": v} for k, v in attrs.items()}
    if cap:
        d["capacity"] = {k: v if isinstance(v, dict) else {"value": v} for k, v in cap.items()}
    if multi:
        d["allowMultipleAllocations"] = True
    if counters:
        d["consumesCounters"] = [{"counterSet": s, "counters": {k: {"value": v} for k, v in c.items()}} for s, c in counters.items()]
    if taints:
        d["taints"] = taints
    d.update(kw)
    return d


def sl(name, devs, node="n0", pool="p0", count=1, gen=1, driver=D, sets=None, **where):
    spec = {"driver": driver, "pool": {"name": pool, "generation": gen, "resourceSliceCount": count}}
    spec.update(where or {"nodeName": node})
    if devs:
        spec["devices"] = devs
    if sets:
        spec["sharedCounters"] = [{"name": n, "counters": {k: {"value": v} for k, v in c.items()}} for n, c in sets.items()]
    return {"metadata": {"name": name}, "spec": spec}


def body(count=1, cls="gpu", sel=None, cap=None, admin=None, tol=None):
    b = {"deviceClassName": cls, "allocationMode": "All" if count == "All" else "ExactCount"}
    if count != "All":
        b["count"] = count
    if sel:
        b["selectors"] = [{"cel": {"expression": e}} for e in ([sel] if isinstance(sel, str) else sel)]
    if cap:
        b["capacity"] = {"requests": cap}
    if admin is not None:
        b["adminAccess"] = admin
    if tol:
        b["tolerations"] = tol
    return b


def rq(name, count=1, **kw):
    return {"name": name, "exactly": body(count, **kw)}


def fa(name, *subs):
    return {"name": name, "firstAvailable": [dict({"name": f"s{i}"}, **s) for i, s in enumerate(subs)]}


def cl(*reqs, match=None, distinct=None, config=None, name="c0"):
    d = {"requests": list(reqs)}
    cons = [{"matchAttribute": m} for m in match or []] + [{"distinctAttribute": m} for m in distinct or []]
    if cons:
        d["constraints"] = cons
    if config:
        d["config"] = [{**({"requests": r} if r else {}), "opaque": {"driver": D, "parameters": {"n": i}}} for i, r in enumerate(config)]
    return {"metadata": {"name": name, "namespace": "default"}, "spec": {"devices": d}}


def used(device, pool="p0", share=None, consumed=None, admin=None):
    r = {"request": "r", "driver": D, "pool": pool, "device": device}
    if share:
        r["shareID"] = share
    if consumed:
        r["consumedCapacity"] = consumed
    if admin:
        r["adminAccess"] = True
    return {"metadata": {"name": f"old-{device}-{share}", "namespace": "default"}, "status": {"allocation": {"devices": {"results": [r]}}}}


GPU = {"metadata": {"name": "gpu"}, "spec": {"selectors": [{"cel": {"expression": f'device.driver == "{D}"'}}]}}
ANY = {"metadata": {"name": "any"}, "spec": {}}


def trap(name, note, slices, claims, old=(), nodes=("n0",), classes=(GPU,), features=None):
    s = {"name": "trap-" + name, "profile": "traps", "note": note, "deviceClasses": list(classes), "resourceSlices": slices,
         "allocatedClaims": list(old), "claims": claims,
         "nodes": [{"metadata": {"name": n, "labels": {"kubernetes.io/hostname": n}}} for n in nodes]}
    if features is not None:
        s["features"] = features
    out.append(s)


A = f'device.attributes["{D}"]'
DEFAULTS = ["DRAAdminAccess", "DRAConsumableCapacity", "DRADeviceBindingConditions", "DRADeviceTaints", "DRAFractionalCapacityRange", "DRAPartitionableDevices", "DRAPrioritizedList"]

# --- counters
cs = {"a": {"m": "4"}, "b": {"m": "4"}}
two = [dev("a0", counters={"a": {"m": "3"}}), dev("a1", counters={"a": {"m": "3"}}), dev("b0", counters={"b": {"m": "1"}}), dev("plain")]
trap("counters-overcommit-blocks-whole-pool", "Set a is over-committed by existing allocations (6 > 4). The check runs over ALL counter sets of the pool, so b0, which only uses set b, is refused too; a device without counters is fine: plain is chosen.",
     [sl("s0", two, count=2), sl("s1", None, count=2, sets=cs)], [cl(rq("r"))], [used("a0"), used("a1")])
trap("counters-overcommit-no-plain-device", "As before without the counter-less device: nothing fits although set b is free.",
     [sl("s0", two[:3], count=2), sl("s1", None, count=2, sets=cs)], [cl(rq("r"))], [used("a0"), used("a1")])
m = [dev("m0", cap={"memory": {"value": "10Gi", "requestPolicy": {"default": "1Gi"}}}, multi=True, counters={"a": {"m": "4"}})]
trap("counters-not-charged-again-for-shared", "m0 uses up set a and is shared already: a further share does not need counters.",
     [sl("s0", m, count=2), sl("s1", None, count=2, sets={"a": {"m": "4"}})], [cl(rq("r"))], [used("m0", share="x", consumed={"memory": "1Gi"})])
trap("counters-share-without-consumed", "The existing share has no consumedCapacity: it is only known by its share ID, yet counters are not charged again and no capacity counts as used.",
     [sl("s0", m, count=2), sl("s1", None, count=2, sets={"a": {"m": "4"}})], [cl(rq("r", cap={"memory": "10Gi"}))], [used("m0", share="x")])
trap("counters-charged-once-in-flight", "Two requests share m0: counters are charged for the first only.",
     [sl("s0", m, count=2), sl("s1", None, count=2, sets={"a": {"m": "4"}})], [cl(rq("r0"), rq("r1"))])
trap("counters-of-vanished-device", "old-gone is not published any more: its consumption is forgotten.",
     [sl("s0", [dev("a0", counters={"a": {"m": "4"}})], count=2), sl("s1", None, count=2, sets={"a": {"m": "4"}})], [cl(rq("r"))], [used("gone")])
trap("counters-consumed-on-other-node", "The pool spans two nodes; x on n1 is allocated and consumes set a, so y on n0 does not fit.",
     [sl("s0", [dev("y", counters={"a": {"m": "2"}}, nodeName="n0"), dev("x", counters={"a": {"m": "3"}}, nodeName="n1")], count=2, perDeviceNodeSelection=True), sl("s1", None, count=2, sets={"a": {"m": "4"}}, allNodes=True)],
     [cl(rq("r"))], [used("x")], nodes=("n0", "n1"))
trap("counter-slice-devices-ignored", "A slice with sharedCounters never provides devices, even if it has some.",
     [sl("s0", [dev("d0")], count=1, sets={"a": {"m": "4"}})], [cl(rq("r"))])
# --- admin access
one = [sl("s0", [dev("d0")])]
trap("admin-then-normal-same-claim", "The admin request marks d0 as being allocated, the normal one is refused: none.", one, [cl(rq("r0", admin=True), rq("r1"))])
trap("normal-then-admin-same-claim", "Within one claim admin does not get a device which the claim has already: none.", one, [cl(rq("r0"), rq("r1", admin=True))])
trap("normal-then-admin-two-claims", "Across claims of one pod: admin comes second, fits.", one, [cl(rq("r0")), cl(rq("r1", admin=True), name="c1")])
trap("admin-then-normal-two-claims", "Across claims of one pod: admin comes first, the normal claim is refused: none.", one, [cl(rq("r0", admin=True)), cl(rq("r1"), name="c1")])
trap("admin-on-used-device", "Admin ignores existing allocations.", one, [cl(rq("r", admin=True))], [used("d0")])
trap("admin-allocation-does-not-count", "An existing admin allocation does not occupy d0.", one, [cl(rq("r"))], [used("d0", admin=True)])
trap("admin-needs-toleration", "Taints hold for admin too.", [sl("s0", [dev("d0", taints=[{"key": "k", "effect": "NoSchedule"}])])], [cl(rq("r", admin=True))])
M10 = {"memory": {"value": "10Gi", "requestPolicy": {"default": "1Gi"}}}
trap("admin-consumes-capacity-in-flight", "On a shared device an admin request gets a shareID and consumedCapacity and competes for capacity within the pod (6+6 > 10): none.",
     [sl("s0", [dev("d0", cap=M10, multi=True)])], [cl(rq("r0", admin=True, cap={"memory": "6Gi"}), rq("r1", cap={"memory": "6Gi"}))])
trap("admin-share-not-in-state", "... but once allocated, admin shares do not count against capacity.",
     [sl("s0", [dev("d0", cap=M10, multi=True)])], [cl(rq("r1", cap={"memory": "6Gi"}))], [used("d0", share="x", consumed={"memory": "6Gi"}, admin=True)])
# --- pools
trap("pool-newer-generation-elsewhere-complete", "n0 sees generation 1 complete (1 of 1 slices): that a generation 2 exists for n1 goes unnoticed. Fits.",
     [sl("s0", [dev("d0")], gen=1), sl("s1", [dev("d1")], node="n1", gen=2)], [cl(rq("r"))], nodes=("n0", "n1"))
trap("pool-newer-generation-elsewhere-short", "n0 sees 1 of 2 slices, looks at all slices, finds generation 2: the pool is obsolete for n0 and silently left out (even for All).",
     [sl("s0", [dev("d0")], gen=1, count=2), sl("s1", [dev("d1")], node="n1", gen=2)], [cl(rq("r", "All"))], nodes=("n0", "n1"))
trap("pool-complete-through-other-node", "1 of 2 slices targets n0, the other one n1: complete.", [sl("s0", [dev("d0")], count=2), sl("s1", [dev("d1")], node="n1", count=2)], [cl(rq("r"))], nodes=("n0", "n1"))
trap("pool-incomplete-exact", "ExactCount skips the incomplete pool p0, takes p1.", [sl("s0", [dev("d0")], count=2), sl("s1", [dev("d1")], pool="p1")], [cl(rq("r"))])
trap("pool-incomplete-all", "All: fatal error because some pool on the node is incomplete, whatever driver it belongs to.",
     [sl("s0", [dev("x0")], count=2, driver="other.example.com"), sl("s1", [dev("d1")], pool="p1")], [cl(rq("r", "All"))])
trap("pool-invalid-exact-other-fits", "p0 is invalid (duplicate name), p1 is taken.", [sl("s0", [dev("d0"), dev("d0")]), sl("s1", [dev("d1")], pool="p1")], [cl(rq("r"))])
trap("pool-invalid-nothing-fits", "Only an invalid pool: an error, but not a fatal one (this node only).", [sl("s0", [dev("d0"), dev("d0")])], [cl(rq("r"))])
trap("pool-invalid-all", "All with an invalid pool of another driver: fatal error.", [sl("s0", [dev("x"), dev("x")], driver="other.example.com"), sl("s1", [dev("d1")], pool="p1")], [cl(rq("r", "All"))])
trap("pool-invalid-by-counter", "One device with an unknown counter spoils its whole pool.", [sl("s0", [dev("d0"), dev("d1", counters={"nope": {"m": "1"}})])], [cl(rq("r"))])
trap("pool-compatibility-groups-off", "Gate off: a slice with compatibilityGroups does not exist, its pool is incomplete.",
     [sl("s0", [dev("d0", consumesCounters=[{"counterSet": "a", "compatibilityGroups": ["mig"], "counters": {"m": {"value": "1"}}}])], count=3), sl("s1", [dev("d1")], count=3), sl("s2", None, count=3, sets={"a": {"m": "4"}})], [cl(rq("r"))])
trap("pool-order", "Pools by (driver, pool) name, slices by object name, devices in list order - not in input order.",
     [sl("z", [dev("d3")], pool="p1"), sl("b", [dev("d2"), dev("d1")], pool="p0", count=2), sl("a", [dev("d9")], pool="p0", count=2)], [cl(rq("r", 3))])
trap("pool-binding-last", "A pool with any device with bindingConditions goes last as a whole, also its devices without conditions.",
     [sl("a", [dev("d0", bindingConditions=["x.example.com/ready"], bindingFailureConditions=["x.example.com/failed"]), dev("d1")], pool="p0"), sl("b", [dev("d2")], pool="p1")], [cl(rq("r", 2))])
# --- All
N2 = [dev("d0", {"numa": 0}), dev("d1", {"numa": 1})]
trap("all-constraint-is-fatal", "All + matchAttribute which the devices cannot meet: a fatal error, not 'none'.", [sl("s0", N2)], [cl(rq("r", "All"), match=[D + "/numa"])])
trap("all-constraint-depends-on-order", "r0 takes d0 (numa 0) first, then All (x, numa 1) violates the constraint: fatal error instead of trying d1 for r0. L1 also allows a fit.",
     [sl("s0", N2), sl("s1", [dev("x", {"gpu.example.com/numa": 1})], driver="x.example.com")],
     [cl(rq("r0"), rq("r1", "All", cls="x"), match=[D + "/numa"])], classes=(GPU, {"metadata": {"name": "x"}, "spec": {"selectors": [{"cel": {"expression": 'device.driver == "x.example.com"'}}]}}))
trap("all-device-in-use", "One of the devices is in use: none.", [sl("s0", N2)], [cl(rq("r", "All"))], [used("d1")])
trap("all-zero-devices", "No device matches: none (not an empty allocation).", [sl("s0", N2)], [cl(rq("r", "All", sel=A + ".numa == 7"))])
trap("all-capacity-static", "capacity filters the set statically: d0 (5Gi) is left out, All = {d1}.", [sl("s0", [dev("d0", cap={"memory": "5Gi"}), dev("d1", cap={"memory": "20Gi"})])], [cl(rq("r", "All", cap={"memory": "10Gi"}))])
trap("all-capacity-remaining", "A device which has too little left (but enough in total) stays in the set and makes All fail: none.",
     [sl("s0", [dev("d0", cap=M10, multi=True), dev("d1", cap=M10, multi=True)])], [cl(rq("r", "All", cap={"memory": "6Gi"}))], [used("d0", share="x", consumed={"memory": "6Gi"})])
trap("all-tainted", "An untolerated taint does not shrink the set: none.", [sl("s0", [dev("d0"), dev("d1", taints=[{"key": "k", "effect": "NoExecute"}])])], [cl(rq("r", "All"))])
trap("all-33-devices", "33 devices match: fatal error (limit 32 per claim).", [sl("s0", [dev(f"d{i}") for i in range(33)])], [cl(rq("r", "All"))])
# --- consumable capacity
P = lambda v, **p: {"value": v, "requestPolicy": p}
trap("capacity-unrequested-takes-all", "cores was not requested and has no default: the whole value is consumed, so the second request does not fit although memory would.",
     [sl("s0", [dev("d0", cap={"memory": P("10Gi", default="1Gi"), "cores": "100"}, multi=True)])], [cl(rq("r0", cap={"memory": "1Gi"}), rq("r1", cap={"memory": "1Gi"}))])
trap("capacity-same-request-distinct-devices", "count 2 needs two different devices even if both shares would fit on d0: none.", [sl("s0", [dev("d0", cap=M10, multi=True)])], [cl(rq("r", 2))])
trap("capacity-two-requests-one-device", "Two requests may share d0.", [sl("s0", [dev("d0", cap=M10, multi=True)])], [cl(rq("r0"), rq("r1"))])
trap("capacity-distinct-attribute-shared", "distinctAttribute: the same device twice counts as equal values: none.", [sl("s0", [dev("d0", {"numa": 0}, cap=M10, multi=True)])], [cl(rq("r0"), rq("r1"), distinct=[D + "/numa"])])
trap("capacity-qualified-name", "Names must be literally equal: gpu.example.com/memory is not memory. None.", [sl("s0", [dev("d0", cap=M10, multi=True)])], [cl(rq("r", cap={D + "/memory": "1Gi"}))])
trap("capacity-step", "7Gi rounds up to 5+5=10Gi.", [sl("s0", [dev("d0", cap={"memory": P("40Gi", default="5Gi", validRange={"min": "5Gi", "step": "5Gi"})}, multi=True)])], [cl(rq("r", cap={"memory": "7Gi"}))])
trap("capacity-min", "Below min: min.", [sl("s0", [dev("d0", cap={"memory": P("40Gi", default="5Gi", validRange={"min": "5Gi", "step": "5Gi"})}, multi=True)])], [cl(rq("r", cap={"memory": "1Gi"}))])
trap("capacity-max", "Rounded value above max: not this device.", [sl("s0", [dev("d0", cap={"memory": P("40Gi", default="5Gi", validRange={"min": "5Gi", "step": "5Gi", "max": "10Gi"})}, multi=True)])], [cl(rq("r", cap={"memory": "11Gi"}))])
trap("capacity-valid-values", "Up to the next valid value (20Gi).", [sl("s0", [dev("d0", cap={"memory": P("40Gi", default="10Gi", validValues=["10Gi", "20Gi"])}, multi=True)])], [cl(rq("r", cap={"memory": "11Gi"}))])
trap("capacity-valid-values-above", "Above the largest valid value: not this device.", [sl("s0", [dev("d0", cap={"memory": P("40Gi", default="10Gi", validValues=["10Gi", "20Gi"])}, multi=True)])], [cl(rq("r", cap={"memory": "21Gi"}))])
F = {"cores": P("4", default="500m", validRange={"min": "500m", "step": "250m"})}
trap("capacity-milli", "Fractional range (gate on): 600m -> 750m.", [sl("s0", [dev("d0", cap=F, multi=True)])], [cl(rq("r", cap={"cores": "600m"}))])
trap("capacity-milli-off", "Gate off: Value() rounds min and step up to 1, so 600m becomes 1.", [sl("s0", [dev("d0", cap=F, multi=True)])], [cl(rq("r", cap={"cores": "600m"}))], features=[f for f in DEFAULTS if f != "DRAFractionalCapacityRange"])
trap("capacity-milli-integer-grid", "Milli arithmetic is used whenever the range converts losslessly, also for an all-integer range: 1500m -> 2 either way, consumed as '2'.", [sl("s0", [dev("d0", cap={"cores": P("4", default="1", validRange={"min": "1", "step": "1"})}, multi=True)])], [cl(rq("r", cap={"cores": "1500m"}))])
BIG = {"memory": P("40Gi", default="5Gi", validRange={"min": "5Gi", "step": "5Gi"})}
trap("capacity-milli-overflow", "All-integer range, gate on: milli arithmetic is used nevertheless, so 10Pi (above 2^63/1000) is already not representable: fatal error.",
     [sl("s0", [dev("d0", cap=BIG, multi=True)])], [cl(rq("r", cap={"memory": "10Pi"}))])
trap("capacity-milli-overflow-off", "Gate off: int64 arithmetic, 10Pi is just more than the device has: none.",
     [sl("s0", [dev("d0", cap=BIG, multi=True)])], [cl(rq("r", cap={"memory": "10Pi"}))], features=[f for f in DEFAULTS if f != "DRAFractionalCapacityRange"])
trap("capacity-beyond-int64", "Not representable with a step: fatal error even though d1 would do.",
     [sl("s0", [dev("d0", cap={"memory": P("40Gi", default="5Gi", validRange={"min": "5Gi", "step": "5Gi"})}, multi=True)]), sl("s1", [dev("d1", cap={"memory": "20000000000000000000"})], pool="p1")], [cl(rq("r", cap={"memory": "10000000000000000000"}))])
trap("capacity-exclusive-ge", "On an exclusive device capacity.requests is only a lower bound; no shareID, no consumedCapacity.", [sl("s0", [dev("d0", cap={"memory": "5Gi"}), dev("d1", cap={"memory": "40Gi"})])], [cl(rq("r", cap={"memory": "10Gi"}))])
trap("capacity-gate-off", "Gate off: a capacity request is a fatal error.", [sl("s0", [dev("d0", cap={"memory": "5Gi"})])], [cl(rq("r", cap={"memory": "1Gi"}))], features=[f for f in DEFAULTS if "Capacity" not in f])
# --- constraints and attributes
trap("match-missing-attribute-single", "matchAttribute on a single device: the attribute must exist. d1 is taken.", [sl("s0", [dev("d0"), dev("d1", {"numa": 0})])], [cl(rq("r"), match=[D + "/numa"])])
trap("match-lookup-full-name-first", "The full name wins over the bare one: d0 has numa=0 bare and =1 qualified, so it matches d2 (1), not d1 (0).",
     [sl("s0", [dev("d0", {"numa": 0, D + "/numa": 1}), dev("d1", {"numa": 0}), dev("d2", {"numa": 1})])], [cl(rq("r", 2), match=[D + "/numa"])])
trap("match-type-mismatch", "int 1 and string '1' do not match: none.", [sl("s0", [dev("d0", {"numa": 1}), dev("d1", {"numa": "1"})])], [cl(rq("r", 2), match=[D + "/numa"])])
trap("distinct-type-mismatch", "... and are distinct: fits.", [sl("s0", [dev("d0", {"numa": 1}), dev("d1", {"numa": "1"})])], [cl(rq("r", 2), distinct=[D + "/numa"])])
trap("match-subrequest-scope", "A constraint on r0/s1 does not bind r0/s0.", [sl("s0", N2 + [dev("d2", {"numa": 0})])],
     [{"metadata": {"name": "c0", "namespace": "default"}, "spec": {"devices": {"requests": [fa("r0", body(2), body(2))], "constraints": [{"requests": ["r0/s1"], "matchAttribute": D + "/numa"}]}}}])
# --- firstAvailable, limits, search
trap("first-available-greedy", "First fit fixes r0=d0 first; r1/s0 needs d0, so r1/s1 is taken although (r0=d1, r1/s0=d0) exists. L1 accepts both.",
     [sl("s0", N2)], [cl(rq("r0"), fa("r1", body(sel=A + ".numa == 0"), body()))])
trap("first-available-32", "30 + first alternative (4) exceeds 32: the second one (2) is taken.", [sl("s0", [dev(f"d{i}") for i in range(36)])], [cl(rq("r0", 30), fa("r1", body(4), body(2)))])
trap("exact-33", "33 devices: fatal error, before any search.", [sl("s0", [dev("d0")])], [cl(rq("r", 33))])
trap("backtrack-across-claims", "c0 takes d0 first, c1 needs d0: c0 is moved to d1.", [sl("s0", N2)], [cl(rq("r")), cl(rq("r", sel=A + ".numa == 0"), name="c1")])
trap("no-requests", "A claim without requests fits everywhere with an empty result.", one, [cl()])
trap("unknown-class", "Fatal error (the scheduler plugin itself filters this earlier).", one, [cl(rq("r", cls="nosuch"))])
# --- taints
T = lambda e, v="": [{"key": "k", "value": v, "effect": e}]
trap("taint-none", "Effect None never matters.", [sl("s0", [dev("d0", taints=T("None"))])], [cl(rq("r"))])
trap("taint-unknown-effect", "Unknown effects are ignored.", [sl("s0", [dev("d0", taints=T("Future"))])], [cl(rq("r"))])
trap("taint-tolerate-all", "Exists without key and effect tolerates everything; tolerations are copied to the result.", [sl("s0", [dev("d0", taints=T("NoExecute", "v"))])], [cl(rq("r", tol=[{"operator": "Exists"}]))])
trap("taint-empty-operator-is-equal", "No operator means Equal: value '' is not 'v'. None.", [sl("s0", [dev("d0", taints=T("NoSchedule", "v"))])], [cl(rq("r", tol=[{"key": "k"}]))])
trap("taint-wrong-effect", "Toleration for NoSchedule does not cover NoExecute. None.", [sl("s0", [dev("d0", taints=T("NoExecute"))])], [cl(rq("r", tol=[{"key": "k", "operator": "Exists", "effect": "NoSchedule"}]))])
trap("taint-unneeded-toleration-copied", "The toleration is in the result although d0 has no taint.", one, [cl(rq("r", tol=[{"key": "k", "operator": "Exists"}]))])
# --- configs
GC = {"metadata": {"name": "gpu"}, "spec": {"selectors": GPU["spec"]["selectors"], "config": [{"opaque": {"driver": D, "parameters": {"class": 1}}}]}}
GC2 = {"metadata": {"name": "gpu2"}, "spec": {"config": [{"opaque": {"driver": D, "parameters": {"class": 2}}}]}}
D3 = [sl("s0", [dev(f"d{i}") for i in range(3)])]
trap("config-class-once", "The class config appears once, for r0 and r2; class configs come before claim configs; r1 uses another class.", D3, [cl(rq("r0"), rq("r1", cls="gpu2"), rq("r2"), config=[["r1"], None])], classes=(GC, GC2))
trap("config-all-requests-cleared", "A config whose requests cover the whole claim gets an empty list.", D3, [cl(rq("r0"), rq("r1"), config=[["r0", "r1"]])], classes=(GC,))
trap("config-subrequest", "Only configs of the chosen alternative stay; requests are copied as they are.", D3,
     [cl(fa("r0", body(4), body(1, cls="gpu2")), rq("r1"), config=[["r0/s0"], ["r0/s1"], ["r0"], ["r0/s0", "r0/s1"]])], classes=(GC, GC2))
# --- node selectors
SEL = lambda k, *v: {"nodeSelectorTerms": [{"matchExpressions": [{"key": k, "operator": "In", "values": list(v)}]}]}
trap("selector-merged", "Requirements of both pools are merged into one term, without duplicates.",
     [sl("a", [dev("d0")], nodeSelector=SEL("kubernetes.io/hostname", "n0", "n1")), sl("b", [dev("d1")], pool="p1", nodeSelector=SEL("kubernetes.io/hostname", "n1", "n0")), sl("c", [dev("d2")], pool="p2", allNodes=True)], [cl(rq("r", 3))], nodes=("n0", "n1", "n2"))
trap("selector-all-nodes", "Only allNodes devices: no node selector.", [sl("a", [dev("d0")], allNodes=True)], [cl(rq("r"))])
trap("selector-binds-to-node", "bindsToNode: metadata.name of the chosen node.", [sl("a", [dev("d0", bindsToNode=True)], allNodes=True)], [cl(rq("r"))], nodes=("n0", "n1"))
trap("selector-local-wins", "One node-local device is enough for metadata.name.", [sl("a", [dev("d0")], allNodes=True), sl("b", [dev("d1")], pool="p1")], [cl(rq("r", 2))])
# --- CEL
trap("cel-unknown-id", "Unknown attribute: runtime error, fatal for the whole pod.", one, [cl(rq("r", sel=A + '.x == "1"'))])
trap("cel-unknown-domain", "Unknown domain: empty map, optional chaining works.", one, [cl(rq("r", sel='device.attributes["no.example.com"].?x.orValue(1) == 1'))])
trap("cel-lazy", "d0 fits before d1 (which would fail) is looked at: fits. L1 also allows the error.", [sl("s0", [dev("d0", {"x": 1}), dev("d1")])], [cl(rq("r", sel=A + ".x == 1"))])
trap("cel-first-device-fails", "d0 fails before d1 is looked at: fatal error. L1 also allows the fit.", [sl("s0", [dev("d0"), dev("d1", {"x": 1})])], [cl(rq("r", sel=A + ".x == 1"))])
trap("cel-class-first", "The class selector rejects d0 before the request selector could fail on it.", [sl("s0", [dev("d0")], driver="other.example.com"), sl("s1", [dev("d1", {"x": 1})], pool="p1")], [cl(rq("r", sel=A + ".x == 1"))])
trap("cel-in-use-first", "d0 is in use and therefore never evaluated.", [sl("s0", [dev("d0"), dev("d1", {"x": 1})])], [cl(rq("r", sel=A + ".x == 1"))], [used("d0")])
trap("cel-non-bool", "dyn result which is not bool: runtime error.", [sl("s0", [dev("d0", {"x": 1})])], [cl(rq("r", sel=A + ".x"))])
BAD = [sl("s0", [dev("d0", fw={}), dev("d1")])]
BAD[0]["spec"]["devices"][0].pop("fw")
BAD[0]["spec"]["devices"][0]["attributes"] = {"fw": {"version": "01.2.3"}}
trap("cel-bad-version-any-selector", "An attribute which is not semver makes every CEL evaluation on d0 fail, also of selectors which do not use it (even 'true'): fatal error.", BAD, [cl(rq("r", cls="any", sel="true"))], classes=(ANY,))
trap("cel-bad-version-no-selector", "No selector at all: nothing is evaluated, d0 is taken.", BAD, [cl(rq("r", cls="any"))], classes=(ANY,))
trap("cel-cost", "Runtime cost limit: error.", [sl("s0", [dev("d0")])], [cl(rq("r", sel="[" + ",".join("1" for _ in range(110)) + "].all(a, [" + ",".join("1" for _ in range(110)) + "].all(b, [" + ",".join("1" for _ in range(110)) + "].all(c, a + b + c > 0)))"))])

for s in out:
    print(json.dumps(s, separators=(",", ":")))
