//! The objects of the pods, and the writes of their claims.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use k8s_openapi::api::core::v1::{Pod, PodCondition};
use k8s_openapi::api::resource::v1::{
    AllocatedDeviceStatus, DeviceRequestAllocationResult, ResourceClaim,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use k8s_openapi::jiff::Timestamp;
use tessera_api::names::{GROUP_COMPLETE_CONDITION, GROUP_FAILED_CONDITION};
use tessera_controller::core::clock::Moment;
use tessera_controller::core::effect::{BarrierOutcome, ClaimChange, ClaimWrite};
use tessera_controller::core::event::{Change, Event, WatchedObject, WriteOutcome};

use super::{Agenda, WATCH_LAG};
use crate::answers;

/// Memory of a GPU, in MiB.
pub(super) const GPU_MIB: u64 = 81_559;

/// Something that happens at a time.
pub(super) enum Happening {
    /// The next pod or group arrives.
    Arrival,
    /// A watch delivers a change.
    Delivered(Change),
    /// A write reaches the API server.
    Written(Box<ClaimWrite>),
    /// An answer reaches the controller.
    Answered(Box<Event>),
    /// kube-scheduler looks for a node for a pod.
    Scheduled(String),
    /// kube-scheduler looks at the binding conditions of a pod.
    Polled(String),
    /// A pod ends.
    Ended(String),
}

/// A pod with its claim, both of one name.
pub(super) struct Stored {
    pub(super) pod: Arc<Pod>,
    pub(super) claim: Arc<ResourceClaim>,
    /// Memory that it asks for, in MiB.
    pub(super) mib: u64,
    /// Its group.
    pub(super) group: Option<usize>,
}

/// GPU memory by what it is used for, in MiB.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Sums {
    pub(super) allocated: u64,
    /// Of pods of groups that are not bound.
    pub(super) waiting_groups: u64,
    /// Of single pods that are not bound.
    pub(super) waiting_pods: u64,
}

/// The API server.
#[derive(Default)]
pub(super) struct ApiServer {
    pods: HashMap<String, Stored>,
    /// Memory in use by pool and device.
    used: BTreeMap<(String, String), u64>,
    pub(super) sums: Sums,
    version: u64,
    shares: u64,
}

impl Stored {
    pub(super) fn is_bound(&self) -> bool {
        self.pod.spec.as_ref().is_some_and(|spec| spec.node_name.is_some())
    }

    pub(super) fn is_ending(&self) -> bool {
        self.pod.metadata.deletion_timestamp.is_some()
    }

    pub(super) fn results(&self) -> &[DeviceRequestAllocationResult] {
        let allocation = self.claim.status.as_ref().and_then(|status| status.allocation.as_ref());
        let devices = allocation.and_then(|allocation| allocation.devices.as_ref());
        devices.and_then(|devices| devices.results.as_deref()).unwrap_or_default()
    }

    /// Returns the end of the wait at the barrier; none while it lasts.
    pub(super) fn barrier(&self) -> Option<BarrierOutcome> {
        let has_barrier = self.results().iter().any(|result| result.binding_conditions.is_some());
        if !has_barrier {
            return Some(BarrierOutcome::Complete);
        }
        let devices = self.claim.status.iter().flat_map(|status| status.devices.iter().flatten());
        let conditions = devices.flat_map(|device| device.conditions.iter().flatten());
        let mut types = conditions.map(|condition| condition.type_.as_str());
        types.find_map(|type_| match type_ {
            GROUP_FAILED_CONDITION => Some(BarrierOutcome::Failed),
            GROUP_COMPLETE_CONDITION => Some(BarrierOutcome::Complete),
            _ => None,
        })
    }
}

impl ApiServer {
    pub(super) fn get(&self, pod: &str) -> Option<&Stored> {
        self.pods.get(pod)
    }

    /// Adds a pod and its claim. Returns the changes.
    pub(super) fn create(
        &mut self,
        pod: Pod,
        mut claim: ResourceClaim,
        mib: u64,
        group: Option<usize>,
    ) -> [Change; 2] {
        let name = pod.metadata.name.clone().expect("pods have names");
        self.version += 1;
        claim.metadata.resource_version = Some(self.version.to_string());
        let stored = Stored { pod: Arc::new(pod), claim: Arc::new(claim), mib, group };
        let changes = [claim_applied(&stored), pod_applied(&stored)];
        self.count(&stored, true);
        self.pods.insert(name, stored);
        changes
    }

    /// Has a write take effect. Returns its outcome, and the name of the pod if its claim is
    /// allocated now.
    pub(super) fn write(
        &mut self,
        write: &ClaimWrite,
        agenda: &mut Agenda,
        now: Moment,
    ) -> (Event, Option<String>) {
        let name = write.object.metadata.name.clone().expect("claims have names");
        let ended = |outcome| Event::WriteEnded { id: write.id, outcome };
        let Some(stored) = self.pods.get(&name) else {
            return (ended(WriteOutcome::Conflict(None)), None);
        };
        if stored.claim.metadata.resource_version != write.object.metadata.resource_version {
            return (ended(WriteOutcome::Conflict(Some(Arc::clone(&stored.claim)))), None);
        }
        let is_allocation = matches!(write.change, ClaimChange::Allocate(_));
        let change = write.change.clone();
        self.shares += 1;
        let number = self.shares;
        self.edit_claim(&name, agenda, now, |claim| match change {
            ClaimChange::Allocate(draft) => {
                let allocation = answers::allocation(&draft, claim, number);
                claim.status.get_or_insert_default().allocation = Some(allocation);
            }
            ClaimChange::Release | ClaimChange::Deallocate => claim.status = None,
            ClaimChange::Conclude(outcome) => conclude(claim, outcome),
            other => panic!("not expected: {other:?}"),
        });
        let stored = &self.pods[&name];
        let outcome = WriteOutcome::Stored(Arc::clone(&stored.claim));
        (ended(outcome), is_allocation.then_some(name))
    }

    /// Reserves the claim of a pod for it, or takes the reservation back.
    pub(super) fn reserve(
        &mut self,
        pod: &str,
        is_reserved: bool,
        agenda: &mut Agenda,
        now: Moment,
    ) {
        let Some(consumer) = self.get(pod).map(|one| answers::reservation(&one.pod)) else {
            return;
        };
        self.edit_claim(pod, agenda, now, |claim| {
            claim.status.get_or_insert_default().reserved_for = is_reserved.then(|| vec![consumer]);
        });
    }

    /// Binds a pod to the node of its devices, where it runs.
    pub(super) fn bind(&mut self, pod: &str, agenda: &mut Agenda, now: Moment) {
        self.edit_pod(pod, agenda, now, |stored| {
            let node = stored.results()[0].pool.clone();
            let pod = Arc::make_mut(&mut stored.pod);
            pod.spec.get_or_insert_default().node_name = Some(node);
            let status = pod.status.get_or_insert_default();
            (status.phase, status.conditions) = (Some("Running".to_owned()), None);
        });
    }

    /// Notes that kube-scheduler has found no node for a pod.
    pub(super) fn refuse(&mut self, pod: &str, agenda: &mut Agenda, now: Moment) {
        self.edit_pod(pod, agenda, now, |stored| {
            let condition = PodCondition {
                type_: "PodScheduled".to_owned(),
                status: "False".to_owned(),
                reason: Some("Unschedulable".to_owned()),
                message: Some("0/1 nodes are available: 1 Insufficient cpu.".to_owned()),
                ..PodCondition::default()
            };
            let status = Arc::make_mut(&mut stored.pod).status.get_or_insert_default();
            status.conditions = Some(vec![condition]);
        });
    }

    /// Begins to delete a pod. Returns false if it does not exist or is being deleted.
    pub(super) fn begin_to_end(&mut self, pod: &str, agenda: &mut Agenda, now: Moment) -> bool {
        if self.get(pod).is_none_or(Stored::is_ending) {
            return false;
        }
        self.edit_pod(pod, agenda, now, |stored| {
            let metadata = &mut Arc::make_mut(&mut stored.pod).metadata;
            metadata.deletion_timestamp = Some(Time(Timestamp::UNIX_EPOCH));
        });
        true
    }

    /// Deletes a pod and its claim. Returns false if it does not exist.
    pub(super) fn end(&mut self, pod: &str, agenda: &mut Agenda, now: Moment) -> bool {
        let Some(stored) = self.pods.remove(pod) else { return false };
        self.count(&stored, false);
        let objects = [
            WatchedObject::Pod(Arc::clone(&stored.pod)),
            WatchedObject::Claim(Arc::clone(&stored.claim)),
        ];
        for object in objects {
            agenda.add(now + WATCH_LAG, Happening::Delivered(Change::Deleted(object)));
        }
        true
    }

    fn edit_claim(
        &mut self,
        pod: &str,
        agenda: &mut Agenda,
        now: Moment,
        edit: impl FnOnce(&mut ResourceClaim),
    ) {
        self.version += 1;
        let version = self.version.to_string();
        self.edit(pod, |stored| {
            let claim = Arc::make_mut(&mut stored.claim);
            edit(claim);
            claim.metadata.resource_version = Some(version);
        });
        let change = self.get(pod).map(claim_applied);
        deliver(agenda, now, change);
    }

    fn edit_pod(
        &mut self,
        pod: &str,
        agenda: &mut Agenda,
        now: Moment,
        edit: impl FnOnce(&mut Stored),
    ) {
        self.edit(pod, edit);
        let change = self.get(pod).map(pod_applied);
        deliver(agenda, now, change);
    }

    /// Changes a pod or its claim, and counts its devices anew.
    fn edit(&mut self, pod: &str, edit: impl FnOnce(&mut Stored)) {
        let Some(mut stored) = self.pods.remove(pod) else { return };
        self.count(&stored, false);
        edit(&mut stored);
        self.count(&stored, true);
        self.pods.insert(pod.to_owned(), stored);
    }

    /// Adds the devices of a pod to the sums, or takes them from them.
    ///
    /// # Panics
    /// A device has less memory than is allocated of it.
    fn count(&mut self, stored: &Stored, is_added: bool) {
        let change = |sum: &mut u64| if is_added { *sum += stored.mib } else { *sum -= stored.mib };
        for result in stored.results() {
            let device = (result.pool.clone(), result.device.clone());
            let used = self.used.entry(device).or_default();
            change(used);
            assert!(
                *used <= GPU_MIB,
                "{}/{} is overcommitted: {used} MiB",
                result.pool,
                result.device
            );
            change(&mut self.sums.allocated);
            if !stored.is_bound() {
                let sums = &mut self.sums;
                change(if stored.group.is_some() {
                    &mut sums.waiting_groups
                } else {
                    &mut sums.waiting_pods
                });
            }
        }
    }
}

fn deliver(agenda: &mut Agenda, now: Moment, change: Option<Change>) {
    if let Some(change) = change {
        agenda.add(now + WATCH_LAG, Happening::Delivered(change));
    }
}

fn claim_applied(stored: &Stored) -> Change {
    Change::Applied(WatchedObject::Claim(Arc::clone(&stored.claim)))
}

fn pod_applied(stored: &Stored) -> Change {
    Change::Applied(WatchedObject::Pod(Arc::clone(&stored.pod)))
}

/// Sets the condition of the outcome on the devices of a claim.
fn conclude(claim: &mut ResourceClaim, outcome: BarrierOutcome) {
    let type_ = match outcome {
        BarrierOutcome::Complete => GROUP_COMPLETE_CONDITION,
        BarrierOutcome::Failed => GROUP_FAILED_CONDITION,
    };
    let status = claim.status.get_or_insert_default();
    let devices = status.allocation.as_ref().and_then(|allocation| allocation.devices.as_ref());
    let results = devices.and_then(|devices| devices.results.clone()).unwrap_or_default();
    let device = |result: DeviceRequestAllocationResult| AllocatedDeviceStatus {
        driver: result.driver,
        pool: result.pool,
        device: result.device,
        share_id: result.share_id,
        conditions: Some(vec![Condition {
            type_: type_.to_owned(),
            status: "True".to_owned(),
            reason: "Group".to_owned(),
            message: String::new(),
            last_transition_time: Time(Timestamp::UNIX_EPOCH),
            observed_generation: None,
        }]),
        ..AllocatedDeviceStatus::default()
    };
    status.devices = Some(results.into_iter().map(device).collect());
}
