//! The barrier of a group: binding conditions of its allocations.
//!
//! kube-scheduler reserves the claims of a pod, and then binds the pod only when the binding
//! conditions of their devices are true. So no pod of a group runs before kube-scheduler has found
//! a node for all of them.

use k8s_openapi::api::resource::v1::{
    AllocatedDeviceStatus, DeviceRequestAllocationResult, ResourceClaimStatus,
};
use tessera_allocator::model::PodUid;
use tessera_api::names::{ClaimUid, GROUP_COMPLETE_CONDITION, GROUP_FAILED_CONDITION};

use crate::claims::ClaimEntry;
use crate::groups::GroupKey;
use crate::index::Index;
use crate::pods::PodEntry;
use crate::work::is_of_group_of;

/// The state of an allocation at the barrier of its group.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum BarrierState {
    /// It has none.
    #[default]
    Open,
    /// Its pod is not bound before the group is complete.
    Waiting,
    /// Its pod may be bound.
    Complete,
    /// Its pod is never bound with it.
    Failed,
}

impl BarrierState {
    /// Returns the state of the allocation in this status.
    pub(crate) fn of(status: &ResourceClaimStatus) -> Self {
        let devices = status.allocation.as_ref().and_then(|one| one.devices.as_ref());
        let results = devices.and_then(|devices| devices.results.as_deref()).unwrap_or_default();
        let reported = status.devices.as_deref().unwrap_or_default();
        let mut states = results.iter().filter(|result| has_barrier(result)).map(|result| {
            let is_it = |one: &&AllocatedDeviceStatus| {
                (&one.driver, &one.pool, &one.device)
                    == (&result.driver, &result.pool, &result.device)
            };
            let is_true = |name: &str| {
                let of_device = reported.iter().filter(is_it);
                let mut conditions = of_device.flat_map(|one| one.conditions.iter().flatten());
                conditions.any(|one| one.type_ == name && one.status == "True")
            };
            match (is_true(GROUP_FAILED_CONDITION), is_true(GROUP_COMPLETE_CONDITION)) {
                (true, _) => Self::Failed,
                (false, true) => Self::Complete,
                (false, false) => Self::Waiting,
            }
        });
        let Some(first) = states.next() else { return Self::Open };
        states.fold(first, |all, one| match (all, one) {
            (Self::Failed, _) | (_, Self::Failed) => Self::Failed,
            (Self::Waiting, _) | (_, Self::Waiting) => Self::Waiting,
            _ => Self::Complete,
        })
    }
}

/// Returns true if the device is at the barrier of a group.
pub fn has_barrier(result: &DeviceRequestAllocationResult) -> bool {
    let mut conditions = result.binding_conditions.iter().flatten();
    conditions.any(|condition| condition == GROUP_COMPLETE_CONDITION)
}

/// The claims of a group at its barrier.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GroupBarrier {
    /// kube-scheduler has a node for as many pods as the group has, or its barrier was opened for
    /// some.
    pub is_complete: bool,
    /// The number of pods of the group.
    pub size: u32,
    /// The number of pods for which kube-scheduler has a node.
    pub arrived: u32,
    /// Its pods that are not bound.
    pub pods: Vec<PodUid>,
    /// Their claims at the barrier, with true for those that are not reserved.
    pub waiting: Vec<(ClaimUid, bool)>,
    /// Their claims for which the barrier has failed, with true for those that are not reserved.
    pub failed: Vec<(ClaimUid, bool)>,
}

impl Index {
    /// Returns the claims of a group at its barrier.
    pub fn barrier_of(&self, group: &GroupKey) -> GroupBarrier {
        let mut barrier = GroupBarrier { size: self.group_size(group), ..GroupBarrier::default() };
        let mut is_opened = false;
        for pod in self.members_of(group) {
            if !pod.is_waiting() {
                barrier.arrived += 1;
                continue;
            }
            barrier.pods.push(pod.uid.clone());
            let entries = self.claims_of(pod).unwrap_or_default();
            barrier.arrived += u32::from(self.has_arrived(pod, &entries));
            for entry in entries {
                let at = (entry.claim.uid.clone(), entry.is_idle());
                match entry.barrier() {
                    BarrierState::Open => {}
                    BarrierState::Waiting => barrier.waiting.push(at),
                    BarrierState::Complete => is_opened = true,
                    BarrierState::Failed => barrier.failed.push(at),
                }
            }
        }
        for claims in [&mut barrier.waiting, &mut barrier.failed] {
            claims.sort_unstable();
            claims.dedup();
        }
        barrier.is_complete =
            barrier.failed.is_empty() && (is_opened || barrier.arrived >= barrier.size);
        barrier
    }

    /// Returns true if an allocation for the pod has a barrier: further pods of its group are not
    /// bound.
    ///
    /// A claim of a PodGroup has none. kube-scheduler reserves it for the PodGroup and not for each
    /// pod, so the reservation does not show which pods have a node; with such claims,
    /// kube-scheduler places the pods of the PodGroup all together.
    pub fn has_barrier(&self, pod: &PodUid) -> bool {
        let Some(group) = self.group_of(pod) else { return false };
        let entry = self.pods.get(pod);
        let has_claim_of_group = entry.is_some_and(|pod| {
            let claims = self.claims_of(pod).into_iter().flatten();
            claims.into_iter().any(|claim| is_of_group_of(claim, pod))
        });
        if has_claim_of_group {
            return false;
        }
        let bound = self.members_of(group).filter(|pod| !pod.is_waiting()).count();
        bound + 1 < self.group_size(group) as usize
    }

    /// Returns true if a claim of the group has failed at its barrier.
    pub(crate) fn has_failed_barrier(&self, group: &GroupKey) -> bool {
        let waiting = self.members_of(group).filter(|pod| pod.is_waiting());
        let mut claims = waiting.filter_map(|pod| self.claims_of(pod)).flatten();
        claims.any(|entry| entry.barrier() == BarrierState::Failed)
    }

    /// Returns true if kube-scheduler has a node for the pod: it has reserved all of its claims.
    /// Those of its PodGroup do not show it.
    fn has_arrived(&self, pod: &PodEntry, entries: &[&ClaimEntry]) -> bool {
        let is_reserved = |entry: &&ClaimEntry| {
            entry.allocation().is_some()
                && entry.reserved_for().iter().any(|consumer| consumer.uid == pod.uid.as_str())
        };
        let mut own = entries.iter().filter(|entry| !is_of_group_of(entry, pod)).peekable();
        own.peek().is_some() && own.all(is_reserved)
    }
}
