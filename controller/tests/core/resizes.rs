//! Changes of shares: at no moment do the drivers hold containers to more than what counts, nor
//! counts more than a GPU has.

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::api::resource::v1::{
    AllocationResult, DeviceRequestAllocationResult, ResourceClaim,
};
use serde_json::{Value, json};
use tessera_api::quantity::Quantity;
use tessera_api::resize::{
    APPLIED_CONDITION, GpuResize, IN_USE_REASON, REFUSED_REASON, ShareSize, SizedShare, apply_sizes,
};
use tessera_controller::core::event::{Event, WatchedKind};

use crate::objects;
use crate::world::World;

const RESIZE: WatchedKind = WatchedKind::Resize;

/// The answer of a driver to a grant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DriverAnswer {
    Applied,
    Refused,
    InUse,
}

impl DriverAnswer {
    pub(crate) const ALL: [Self; 3] = [Self::Applied, Self::Refused, Self::InUse];
}

/// The drivers of all nodes. Each sees resizes late, reads claims at once, and reports late.
#[derive(Debug, Default)]
pub(crate) struct Drivers {
    /// The resizes as seen last, by name.
    seen: BTreeMap<String, GpuResize>,
    /// The sizes that containers are held to, by UID of the claim.
    held: BTreeMap<String, Vec<SizedShare>>,
    /// Reports that are not stored, with the UID of the resize.
    reports: BTreeMap<String, (Option<String>, Value)>,
}

impl Drivers {
    /// Checks that no container is held to more than what counts.
    pub(crate) fn check<'c>(&self, claims: impl Iterator<Item = &'c ResourceClaim>) {
        for claim in claims {
            let Some(held) = self.held.get(claim.metadata.uid.as_ref().unwrap()) else { continue };
            let counted = sizes(claim);
            for share in held {
                let same = counted.iter().find(|counted| counted.share_id == share.share_id);
                let is_within = same.is_none_or(|counted| is_within(share, counted));
                assert!(is_within, "{share:?} is held, {same:?} counts");
            }
        }
    }
}

fn is_within(share: &SizedShare, counted: &SizedShare) -> bool {
    let (ShareSize { memory, cores }, most) = (share.size(), counted.size());
    memory <= most.memory && cores <= most.cores
}

/// Returns the allocation with the sizes that count.
pub(crate) fn counted(claim: &ResourceClaim) -> Option<AllocationResult> {
    let mut status = claim.status.clone()?;
    apply_sizes(&mut status);
    status.allocation
}

fn results(allocation: Option<AllocationResult>) -> Vec<DeviceRequestAllocationResult> {
    allocation.and_then(|one| one.devices?.results).unwrap_or_default()
}

/// Returns the sizes of the claim's shares that count.
fn sizes(claim: &ResourceClaim) -> Vec<SizedShare> {
    let sized = |result: DeviceRequestAllocationResult| {
        let consumed = result.consumed_capacity.unwrap_or_default();
        let amount = |name: &str| consumed.get(name).map(|amount| amount.0.clone());
        SizedShare {
            request: result.request,
            pool: result.pool,
            device: result.device,
            share_id: result.share_id.unwrap_or_default(),
            memory: amount("memory").unwrap_or_default(),
            cores: amount("cores").unwrap_or_default(),
        }
    };
    results(counted(claim)).into_iter().map(sized).collect()
}

/// Stores sizes in a claim, as the API server does.
pub(crate) fn store(claim: &mut ResourceClaim, sizes: &[SizedShare]) {
    apply_devices(claim, sizes.iter().map(SizedShare::device_status));
}

/// Applies entries of `status.devices`. Fields of other managers in the same entries stay.
pub(crate) fn apply_devices(claim: &mut ResourceClaim, entries: impl Iterator<Item = Value>) {
    let mut object = json!(claim);
    let mut devices = object["status"]["devices"].as_array().cloned().unwrap_or_default();
    for entry in entries {
        let is_it = |other: &&mut Value| {
            ["pool", "device", "shareID"].iter().all(|key| other[key] == entry[key])
        };
        match devices.iter_mut().find(is_it) {
            Some(known) => {
                known.as_object_mut().unwrap().extend(entry.as_object().unwrap().clone())
            }
            None => devices.push(entry),
        }
    }
    object["status"]["devices"] = devices.into();
    *claim = serde_json::from_value(object).unwrap();
}

/// Returns the allocation with the larger of both amounts of each share.
pub(crate) fn larger(
    a: Option<AllocationResult>,
    b: Option<AllocationResult>,
) -> Option<AllocationResult> {
    let (Some(mut most), Some(other)) = (a.clone(), b.clone()) else { return a.or(b) };
    let shares = most.devices.iter_mut().flat_map(|devices| devices.results.iter_mut().flatten());
    for (share, other) in shares.zip(results(Some(other))) {
        for (name, amount) in share.consumed_capacity.iter_mut().flatten() {
            let other = other.consumed_capacity.as_ref().and_then(|all| all.get(name));
            let parse = |text: &str| Quantity::parse(text).unwrap();
            if let Some(other) = other.filter(|other| parse(&other.0) > parse(&amount.0)) {
                *amount = other.clone();
            }
        }
    }
    Some(most)
}

impl World {
    /// Creates or changes the resize of a claim.
    pub(crate) fn resize(&mut self, claim: &str, size: Value) {
        let mut object = objects::resize(claim, size);
        if let Some(known) = self.get(RESIZE, claim) {
            object["status"] = known["status"].clone();
            let generation = known["metadata"]["generation"].as_i64().unwrap();
            object["metadata"]["generation"] = (generation + 1).into();
        }
        self.put(RESIZE, object);
    }

    /// Ends the write of a status of a resize.
    pub(crate) fn end_resize_status(&mut self, is_stored: bool) {
        let Some((resize, status)) = self.open_resizes.pop_first() else { return };
        let name = resize.name.as_str();
        if is_stored {
            self.edit(RESIZE, name, |object| {
                let mut known = object["status"].take();
                let mut new = json!(status);
                let mut driver = known["conditions"].as_array_mut().into_iter().flatten();
                let driver = driver.find(|condition| condition["type"] == APPLIED_CONDITION);
                new["conditions"].as_array_mut().unwrap().extend(driver.map(|one| one.take()));
                for field in ["applied", "appliedGrant"] {
                    if let Some(value) = known.get(field) {
                        new[field] = value.clone();
                    }
                }
                object["status"] = new;
            });
        }
        self.step([Event::ResizeStatusEnded { resize, is_stored }]);
    }

    /// Has the driver of the node see a resize as it is now.
    pub(crate) fn see_resize(&mut self, name: &str) {
        let object = serde_json::from_value(self.get(RESIZE, name).unwrap()).unwrap();
        self.drivers.seen.insert(name.to_owned(), object);
    }

    /// Has the driver do what the resize that it has seen asks for. Its report comes later.
    pub(crate) fn apply_resize(&mut self, name: &str, answer: DriverAnswer) {
        let Some(object) = self.drivers.seen.get(name).cloned() else { return };
        let status = object.status.clone().unwrap_or_default();
        let is_answered = object.answer().is_some_and(|answer| answer.reason == REFUSED_REASON);
        let claim = self
            .get(WatchedKind::Claim, name)
            .map(|claim| serde_json::from_value::<ResourceClaim>(claim).unwrap());
        let Some(claim) = claim.filter(|claim| claim.metadata.uid == status.claim_uid) else {
            return;
        };
        let (counted, uid) = (sizes(&claim), claim.metadata.uid.unwrap());
        let is_counted = |share: &SizedShare| {
            counted.iter().any(|c| c.share_id == share.share_id && is_within(share, c))
        };
        if is_answered || status.granted.is_empty() || !status.granted.iter().all(is_counted) {
            return;
        }
        // It is prepared now, if it was not before.
        let is_prepared = |held: &Vec<SizedShare>| held[0].share_id == counted[0].share_id;
        let held = self.drivers.held.get(&uid).filter(|held| is_prepared(held)).cloned();
        let mut held = held.unwrap_or(counted);
        let is_smaller = held.iter().zip(&status.granted).any(|(held, new)| !is_within(held, new));
        let (text, reason) = match answer {
            DriverAnswer::Refused => ("False", REFUSED_REASON),
            DriverAnswer::InUse if is_smaller => ("False", IN_USE_REASON),
            DriverAnswer::InUse | DriverAnswer::Applied => {
                held = status.granted.clone();
                ("True", "Applied")
            }
        };
        let report = json!({
            "applied": held, "appliedGrant": status.grant,
            "condition": {
                "type": APPLIED_CONDITION, "status": text, "reason": reason, "message": "m",
                "observedGeneration": object.metadata.generation,
                "lastTransitionTime": "2026-11-28T00:00:00Z",
            },
        });
        self.drivers.held.insert(uid, held);
        self.drivers.reports.insert(name.to_owned(), (object.metadata.uid, report));
    }

    /// Stores the driver's report.
    pub(crate) fn report_resize(&mut self, name: &str) {
        let Some((uid, mut report)) = self.drivers.reports.remove(name) else { return };
        self.edit(RESIZE, name, |object| {
            if object["metadata"]["uid"].as_str() != uid.as_deref() {
                return;
            }
            let status = &mut object["status"];
            status["applied"] = report["applied"].take();
            status["appliedGrant"] = report["appliedGrant"].take();
            let mut conditions = status["conditions"].as_array().cloned().unwrap_or_default();
            conditions.retain(|condition| condition["type"] != APPLIED_CONDITION);
            conditions.push(report["condition"].take());
            status["conditions"] = conditions.into();
        });
    }

    /// Has the driver see, apply and report, and the controller answer.
    fn drive(&mut self, name: &str, answer: DriverAnswer) {
        self.settle();
        self.see_resize(name);
        self.apply_resize(name, answer);
        self.report_resize(name);
        self.settle();
    }

    /// Returns the memory and the cores that count for a claim.
    fn counted_size(&self, claim: &str) -> (String, String) {
        let claim = self.get(WatchedKind::Claim, claim).unwrap();
        let size = sizes(&serde_json::from_value(claim).unwrap()).remove(0);
        (size.memory, size.cores)
    }

    fn held_memory(&self, claim: &str) -> &str {
        &self.drivers.held[&format!("uid-{claim}")][0].memory
    }

    /// Returns reason and message of a condition.
    fn condition(&self, name: &str, condition: &str) -> (String, String) {
        let resize: GpuResize = serde_json::from_value(self.get(RESIZE, name).unwrap()).unwrap();
        let found = resize.condition(condition).unwrap();
        (found.reason.clone(), found.message.clone())
    }
}

/// One GPU, and a bound pod with 10 GiB and 25 percent of it.
fn cluster() -> World {
    let mut world = World::new();
    world.add_node("node-a", 1);
    world.add_bound_pod("a", "10Gi");
    world
}

fn size(memory: &str, cores: &str) -> (String, String) {
    (memory.to_owned(), cores.to_owned())
}

#[test]
fn a_share_grows_first_in_the_claim_then_on_the_node() {
    let mut world = cluster();
    world.resize("a", json!({"memory": "40Gi"}));
    world.settle();
    assert_eq!(world.counted_size("a"), size("40Gi", "25"));
    assert_eq!(world.condition("a", "Granted").0, "Granted");
    let writes = world.writes.len();
    world.drive("a", DriverAnswer::Applied);
    assert_eq!(world.held_memory("a"), "40Gi");
    assert_eq!(world.writes.len(), writes, "nothing is left to be written");
}

#[test]
fn a_share_shrinks_first_on_the_node_then_in_the_claim() {
    let mut world = cluster();
    world.resize("a", json!({"memory": "5Gi", "cores": 10}));
    world.settle();
    assert_eq!(world.counted_size("a"), size("10Gi", "25"), "the driver has not answered");
    world.drive("a", DriverAnswer::Applied);
    assert_eq!(world.counted_size("a"), size("5Gi", "10"));
    assert_eq!(world.held_memory("a"), "5Gi");
}

#[test]
fn memory_in_use_keeps_the_larger_size_until_it_is_free() {
    let mut world = cluster();
    world.resize("a", json!({"memory": "5Gi"}));
    world.drive("a", DriverAnswer::InUse);
    assert_eq!(world.counted_size("a"), size("10Gi", "25"));
    world.drive("a", DriverAnswer::Applied);
    assert_eq!(world.counted_size("a"), size("5Gi", "25"));
}

#[test]
fn more_than_the_gpu_has_is_refused_with_what_is_free() {
    let mut world = cluster();
    world.add_pod("b", "60Gi");
    world.settle();
    world.resize("a", json!({"memory": "30Gi"}));
    world.settle();
    assert_eq!(world.counted_size("a"), size("10Gi", "25"));
    let (reason, message) = world.condition("a", "Granted");
    assert_eq!(reason, "NoRoom");
    assert_eq!(message, "device gpu-0 has 20Gi of `memory` for this share, 30Gi is wanted");
    world.end_pod("b");
    world.settle();
    world.pass(Duration::from_secs(6));
    world.settle();
    assert_eq!(world.counted_size("a"), size("30Gi", "25"), "granted when there is room");
}

#[test]
fn an_amount_that_no_share_can_have_is_refused_for_good() {
    let mut world = cluster();
    for (wanted, text) in [
        (json!({"memory": "200Gi"}), "of `memory` is not allowed on the device, which has 80Gi"),
        (json!({"memory": "lots"}), "memory of request `gpu`: \"lots\" is not an amount"),
        (json!({"memory": 0}), "memory must be more than 0"),
        (json!({}), "request `gpu` needs memory or cores"),
    ] {
        world.resize("a", wanted);
        world.settle();
        let (reason, message) = world.condition("a", "Granted");
        assert_eq!(reason, "Invalid");
        assert!(message.contains(text), "{message}");
    }
    world.edit(RESIZE, "a", |resize| {
        resize["spec"]["requests"] = json!([{"name": "other", "cores": 1}]);
    });
    world.settle();
    let message = world.condition("a", "Granted").1;
    assert_eq!(message, "request `other` has no device of this claim; its requests are gpu");
}

#[test]
fn what_the_driver_refuses_counts_no_longer() {
    let mut world = cluster();
    world.resize("a", json!({"memory": "40Gi"}));
    world.drive("a", DriverAnswer::Applied);
    world.resize("a", json!({"memory": "60Gi"}));
    world.settle();
    assert_eq!(world.counted_size("a"), size("60Gi", "25"));
    // It holds 40 GiB.
    world.drive("a", DriverAnswer::Refused);
    world.drive("a", DriverAnswer::Applied);
    assert_eq!(world.counted_size("a"), size("40Gi", "25"));
    assert_eq!(world.condition("a", "Granted"), size("RefusedByDriver", "m"));
    let writes = world.writes.len();
    world.pass(Duration::from_secs(60));
    world.drive("a", DriverAnswer::Applied);
    assert_eq!(world.writes.len(), writes, "it is not tried again");
    world.resize("a", json!({"memory": "50Gi"}));
    world.drive("a", DriverAnswer::Applied);
    assert_eq!(world.counted_size("a"), size("50Gi", "25"), "a new spec is");
}

#[test]
fn an_old_report_does_not_count_for_sizes_granted_again() {
    let mut world = cluster();
    world.resize("a", json!({"memory": "5Gi"}));
    world.drive("a", DriverAnswer::Applied);
    world.resize("a", json!({"memory": "40Gi"}));
    world.settle();
    world.see_resize("a");
    world.apply_resize("a", DriverAnswer::Applied);
    // The report of 5 GiB is still stored.
    world.resize("a", json!({"memory": "5Gi"}));
    world.settle();
    assert_eq!(world.counted_size("a"), size("40Gi", "25"));
    world.drive("a", DriverAnswer::Applied);
    assert_eq!(world.counted_size("a"), size("5Gi", "25"));
}

#[test]
fn pods_wait_for_a_share_to_shrink_and_then_get_the_rest() {
    let mut world = cluster();
    world.resize("a", json!({"memory": "70Gi"}));
    world.drive("a", DriverAnswer::Applied);
    world.add_pod("b", "40Gi");
    world.settle();
    assert_eq!(world.place("b"), None);
    world.resize("a", json!({"memory": "20Gi"}));
    world.settle();
    assert_eq!(world.place("b"), None, "the driver has not answered");
    world.drive("a", DriverAnswer::Applied);
    assert!(world.place("b").is_some());
}

#[test]
fn a_new_leader_continues_where_the_last_one_ended() {
    let mut world = cluster();
    world.resize("a", json!({"memory": "40Gi", "cores": 10}));
    world.settle();
    world.new_leader(None);
    world.settle();
    assert_eq!(world.counted_size("a"), size("40Gi", "25"));
    world.see_resize("a");
    world.apply_resize("a", DriverAnswer::Applied);
    world.new_leader(None);
    world.report_resize("a");
    world.settle();
    assert_eq!(world.counted_size("a"), size("40Gi", "10"));
}

#[test]
fn a_deleted_resize_changes_nothing() {
    let mut world = cluster();
    world.resize("a", json!({"memory": "40Gi"}));
    world.drive("a", DriverAnswer::Applied);
    world.delete(RESIZE, "a");
    world.settle();
    world.pass(Duration::from_secs(60));
    assert_eq!(world.counted_size("a"), size("40Gi", "25"));
}

#[test]
fn a_quota_limits_what_a_share_may_grow_to() {
    let mut world = cluster();
    world.put(WatchedKind::Quota, objects::quota(json!({"memory": "30Gi"})));
    world.resize("a", json!({"memory": "40Gi"}));
    world.settle();
    let (reason, message) = world.condition("a", "Granted");
    assert_eq!(reason, "QuotaExceeded");
    assert_eq!(message, "GpuQuota `team` leaves 20Gi of memory, 30Gi more is wanted");
    world.resize("a", json!({"memory": "30Gi"}));
    world.drive("a", DriverAnswer::Applied);
    assert_eq!(world.counted_size("a"), size("30Gi", "25"));
}

#[test]
fn a_lost_allocation_is_restored_with_the_changed_size() {
    let mut world = cluster();
    world.resize("a", json!({"memory": "40Gi"}));
    world.drive("a", DriverAnswer::Applied);
    world.delete(RESIZE, "a");
    world.clear("a");
    world.settle();
    world.pass(Duration::from_secs(6));
    world.settle();
    assert!(world.place("a").is_some());
    assert_eq!(world.counted_size("a"), size("40Gi", "25"));
}
