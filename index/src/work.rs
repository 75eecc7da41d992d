//! Work: pods to plan, pods that cannot be planned, and unneeded allocations.

use std::collections::BTreeSet;
use std::sync::Arc;

use tessera_allocator::model::{PendingPod, PodClaim, PodUid};
use tessera_api::names::{ClaimName, ClaimUid, NodeName};

use crate::claims::ClaimEntry;
use crate::groups::{GroupProblem, GroupWork};
use crate::index::Index;
use crate::pods::{Nomination, PodEntry};
use crate::scope::Scope;
use crate::stored::StoredClaim;

/// The pods that have claims to allocate.
#[derive(Debug, Default)]
pub struct Work {
    /// Pods to plan.
    pub pending: Vec<PendingPod>,
    /// Pods that cannot be planned until something is changed.
    pub blocked: Vec<Blocked>,
}

/// A pod that cannot be planned.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Blocked {
    /// The pod.
    pub pod: PodUid,
    /// The claim that blocks it.
    pub claim: ClaimUid,
    /// The cause.
    pub blocker: PlanningBlocker,
}

/// The cause that blocks a pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PlanningBlocker {
    /// The claim requests devices of our driver and of another, and a claim is allocated as a
    /// whole.
    MixedDrivers,
    /// Another pod is bound with the claim, which is not allocated and has to be on that pod's
    /// node.
    BoundPod,
    /// The group of the pod.
    Group(GroupProblem),
}

impl Index {
    /// Returns the pods to plan and those that cannot be planned.
    pub fn work(&self) -> Work {
        self.work_of(&self.unbound)
    }

    /// Returns those of these pods to plan and those that cannot be planned, with the pods of their
    /// groups.
    pub fn work_of(&self, pods: &BTreeSet<PodUid>) -> Work {
        let mut work = Work::default();
        let mut groups = BTreeSet::new();
        for uid in pods {
            if let Some(group) = self.group_of(uid) {
                groups.insert(group);
                continue;
            }
            match self.to_plan_alone(uid) {
                Ok(Some(pending)) => work.pending.push(pending),
                Ok(None) => {}
                Err(blocked) => work.blocked.push(blocked),
            }
        }
        for group in groups {
            let GroupWork { pending, blocked } = self.plan_group(group);
            work.pending.extend(pending);
            work.blocked.extend(blocked);
        }
        work
    }

    /// Returns a pod of [`work`](Self::work) as the allocator's input; none if it does not wait, is
    /// gated, lacks a claim or needs nothing, or if another pod of its group stands for it.
    ///
    /// # Errors
    /// It cannot be planned.
    pub fn to_plan(&self, pod: &PodUid) -> Result<Option<PendingPod>, Blocked> {
        let Some(group) = self.group_of(pod) else { return self.to_plan_alone(pod) };
        let GroupWork { pending, blocked } = self.plan_group(group);
        match blocked.into_iter().find(|blocked| blocked.pod == *pod) {
            Some(blocked) => Err(blocked),
            None => Ok(pending.filter(|pending| pending.uid == *pod)),
        }
    }

    /// Returns a pod as the allocator's input, as [`to_plan`](Self::to_plan) does if it has no
    /// group.
    pub(crate) fn to_plan_alone(&self, pod: &PodUid) -> Result<Option<PendingPod>, Blocked> {
        let pod = self.pods.get(pod).filter(|pod| self.unbound.contains(&pod.uid) && !pod.gated);
        pod.map_or(Ok(None), |pod| self.plan_of(pod))
    }

    /// Returns the pod as the allocator's input; none if a claim is missing or nothing is to be
    /// decided.
    pub(crate) fn plan_of(&self, pod: &PodEntry) -> Result<Option<PendingPod>, Blocked> {
        let Some(entries) = self.claims_of(pod) else { return Ok(None) };
        let mut claims = Vec::with_capacity(entries.len());
        let mut ours = false;
        for entry in entries {
            let uid = entry.claim.uid.clone();
            if let Some(allocation) = entry.allocation() {
                claims.push(PodClaim::Allocated {
                    uid,
                    name: entry.claim.name.clone(),
                    nodes: allocation.nodes.as_deref().cloned(),
                });
                continue;
            }
            match self.scope(&uid) {
                Some(Scope::Ours | Scope::Any) if !entry.users.is_empty() => {
                    return Err(Blocked {
                        pod: pod.uid.clone(),
                        claim: uid,
                        blocker: PlanningBlocker::BoundPod,
                    });
                }
                Some(Scope::Ours | Scope::Any) => {
                    ours = true;
                    claims.push(PodClaim::Pending(Arc::clone(&entry.claim)));
                }
                Some(Scope::Mixed) => {
                    return Err(Blocked {
                        pod: pod.uid.clone(),
                        claim: uid,
                        blocker: PlanningBlocker::MixedDrivers,
                    });
                }
                // kube-scheduler allocates it, on the node of our claims.
                Some(Scope::Foreign) | None => {}
            }
        }
        Ok(ours.then(|| pod.pending(claims)))
    }

    /// Returns the claims of a pod; none unless all exist, are not being deleted and belong to it.
    pub(crate) fn claims_of(&self, pod: &PodEntry) -> Option<Vec<&ClaimEntry>> {
        let mut entries = Vec::with_capacity(pod.claims.len());
        for reference in &pod.claims {
            let entry = self.claim_named(pod, reference.name.as_ref()?)?;
            if entry.is_deleting() || (reference.generated && !is_owned_by(entry, pod)) {
                return None;
            }
            entries.push(entry);
        }
        Some(entries)
    }

    pub(crate) fn claim_named(&self, pod: &PodEntry, name: &ClaimName) -> Option<&ClaimEntry> {
        let uid = self.claim_names.get(&(pod.namespace.clone(), name.clone()))?;
        self.claims.get(uid).map(Box::as_ref)
    }

    /// Returns true if the claim may request devices of ours and is not allocated.
    pub(crate) fn lacks_allocation(&self, entry: &ClaimEntry) -> bool {
        let is_ours = |scope| matches!(scope, Scope::Ours | Scope::Any | Scope::Mixed);
        entry.allocation().is_none() && self.scope(&entry.claim.uid).is_some_and(is_ours)
    }

    /// Returns the pods with claims that wait for a node.
    pub fn unbound_pods(&self) -> &BTreeSet<PodUid> {
        &self.unbound
    }

    /// Returns kube-scheduler's message about a pod that it could not place.
    pub fn unschedulable_message(&self, pod: &PodUid) -> Option<&str> {
        self.pods.get(pod)?.unschedulable.as_deref()
    }

    /// Returns `status.nominatedNodeName` of a pod, and the component that set it.
    pub fn nomination(&self, pod: &PodUid) -> Option<&Nomination> {
        self.pods.get(pod)?.nomination.as_ref()
    }

    /// Returns true if a claim of the pod is allocated on the node, also if that is only assumed.
    pub fn has_devices_on(&self, pod: &PodUid, node: &NodeName) -> bool {
        let claims = self.pods.get(pod).and_then(|pod| self.claims_of(pod));
        claims.into_iter().flatten().any(|entry| {
            let allocated = entry.nodes().and_then(|nodes| nodes.single_node());
            allocated == Some(node.as_str())
        })
    }

    /// Returns the claims with devices of ours that no pod needs and that were never reserved.
    /// kube-controller-manager does not deallocate them: it acts when the last reservation is
    /// removed, and there was none.
    ///
    /// The cost is that of the claims that have changed since the last call, and of the result.
    pub fn unneeded(&mut self) -> Vec<ClaimUid> {
        self.check_claims();
        self.unneeded.iter().cloned().collect()
    }

    /// Updates what follows from claims with those that have changed.
    pub(crate) fn check_claims(&mut self) {
        for claim in std::mem::take(&mut self.unchecked) {
            self.waiting_changes.claims.insert(claim.clone());
            let entry = self.claims.get(&claim);
            if let Some(entry) = entry {
                let exceeded = entry
                    .counted()
                    .iter()
                    .map(|r| &r.device)
                    .filter(|d| self.troubled.exceeded.contains_key(d));
                self.sums.touched.extend(exceeded.cloned());
            }
            if entry.is_some_and(|entry| self.is_unneeded(entry)) {
                self.unneeded.insert(claim);
            } else {
                self.unneeded.remove(&claim);
            }
        }
    }

    fn is_unneeded(&self, entry: &ClaimEntry) -> bool {
        let mut pods = self.pods_of(entry).filter_map(|uid| self.pods.get(uid));
        entry.is_idle()
            && !entry.counted().is_empty()
            && !pods.any(|p| p.is_waiting() || p.is_running())
    }
}

/// Returns true if the claim was generated for the pod, or for its PodGroup (KEP-5729). Without the
/// feature gate `DRAWorkloadResourceClaims` no pod names a claim of the latter kind.
pub(crate) fn is_owned_by(entry: &ClaimEntry, pod: &PodEntry) -> bool {
    let is_of_pod = |object: &StoredClaim| object.is_controlled_by(pod.uid.as_str());
    entry.object.as_ref().is_some_and(is_of_pod) || is_of_group_of(entry, pod)
}

/// Returns true if the claim was generated for the PodGroup of the pod.
pub(crate) fn is_of_group_of(entry: &ClaimEntry, pod: &PodEntry) -> bool {
    let group = entry.object.as_ref().and_then(StoredClaim::pod_group);
    group.is_some() && group == pod.pod_group.as_deref()
}
