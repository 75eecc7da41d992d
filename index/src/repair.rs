//! Repair: bound pods whose claims are on another node, and the possible repairs. The node of a
//! bound pod takes precedence.

use std::sync::Arc;

use k8s_openapi::api::resource::v1::{AllocationResult, ResourceClaimConsumerReference};
use tessera_allocator::model::{NodeSelector, PendingPod, PodClaim, PodUid, SchedulingConstraints};
use tessera_api::names::{ClaimUid, ManagedDrivers, NodeName};

use crate::claims::ClaimEntry;
use crate::convert::AllocatedClaim;
use crate::index::Index;
use crate::pods::PodEntry;
use crate::scope::Scope;

/// A bound pod with a claim of ours that is not on the node of the pod. kube-scheduler causes it
/// when its PreBind meets a conflict: it then reserves whatever allocation it finds. Other clients
/// cause it by clearing a claim in use or by binding a pod without kube-scheduler.
#[derive(Debug, Clone, PartialEq)]
pub struct Misplaced {
    /// The pod.
    pub pod: PodUid,
    /// The claim.
    pub claim: ClaimUid,
    /// The node of the pod.
    pub node: NodeName,
    /// The node of the claim; none if it is not allocated.
    pub allocated: Option<NodeName>,
    /// The possible repair.
    pub repair_action: RepairAction,
}

/// The repair of a misplaced claim.
#[derive(Debug, Clone, PartialEq)]
pub enum RepairAction {
    /// No pod can be using it where it is. An allocation cannot be changed, so it is cleared, with
    /// its reservations.
    Deallocate,
    /// The containers of the pod may be using the previous allocation, so that is written again.
    Restore(Box<AllocationResult>),
    /// The claim is planned on the node of the pod only.
    Plan,
    /// No repair is possible.
    Blocked(RepairBlocker),
}

/// The cause that prevents a repair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RepairBlocker {
    /// Containers of the pod have run with devices that are not known any more.
    Started,
    /// Another pod may be using the claim where it is, or precedes this one.
    InUse,
}

impl Index {
    /// Returns the misplaced claims of a bound pod.
    pub fn misplaced(&self, pod: &PodUid) -> Vec<Misplaced> {
        let pod = self.stranded.get(pod).and_then(|uid| self.pods.get(uid));
        let links = pod.into_iter().flat_map(|pod| pod.links.values().map(move |one| (pod, one)));
        links.filter_map(|(pod, claim)| self.misplaced_of(pod, claim)).collect()
    }

    /// Returns true if a claim of the pod may be misplaced. Pods and claims that are being deleted
    /// do not count.
    pub(crate) fn is_stranded(&self, pod: &PodEntry) -> bool {
        let Some(node) = pod.node.as_ref().filter(|_| pod.is_running() && !pod.deleting) else {
            return false;
        };
        let claims = pod.links.values().filter_map(|claim| self.claims.get(claim));
        claims.filter(|entry| !entry.is_deleting()).any(|entry| match &entry.observed {
            Some(allocation) => is_elsewhere(allocation, node).is_some(),
            None => true,
        })
    }

    fn misplaced_of(&self, pod: &PodEntry, claim: &ClaimUid) -> Option<Misplaced> {
        let entry = self.claims.get(claim).filter(|e| !e.is_deleting() && e.assumed.is_none())?;
        let node = pod.node.clone()?;
        let allocated = match &entry.observed {
            Some(allocation) => {
                let is_ours = is_ours(allocation, &self.managed);
                Some(is_elsewhere(allocation, &node).filter(|_| is_ours)?)
            }
            None if self.scope(claim) != Some(Scope::Ours) => return None,
            None => None,
        };
        let repair_action = self.repair_action(pod, entry, &node, allocated.as_ref());
        Some(Misplaced {
            pod: pod.uid.clone(),
            claim: claim.clone(),
            node,
            allocated,
            repair_action,
        })
    }

    fn repair_action(
        &self,
        pod: &PodEntry,
        entry: &ClaimEntry,
        node: &NodeName,
        allocated: Option<&NodeName>,
    ) -> RepairAction {
        if self.first_user(entry) != Some(&pod.uid)
            || allocated.is_some_and(|there| !self.is_unused(entry, there))
        {
            return RepairAction::Blocked(RepairBlocker::InUse);
        }
        let before = entry.lost_allocation().filter(|(known, _)| {
            is_ours(known, &self.managed)
                && known.nodes.as_deref().and_then(NodeSelector::single_node) == Some(node.as_str())
        });
        match (before, allocated) {
            (None, _) if pod.started => RepairAction::Blocked(RepairBlocker::Started),
            (_, Some(_)) => RepairAction::Deallocate,
            (Some((_, allocation)), None) => RepairAction::Restore(Box::new(allocation.get())),
            (None, None) => RepairAction::Plan,
        }
    }

    /// Returns the bound pod that a claim follows: one whose containers have run, then the oldest.
    fn first_user<'e>(&self, entry: &'e ClaimEntry) -> Option<&'e PodUid> {
        let users = entry.users.keys().filter_map(|uid| Some((uid, self.pods.get(uid)?)));
        users.min_by_key(|(uid, pod)| (!pod.started, pod.created, *uid)).map(|(uid, _)| uid)
    }

    /// Returns true if no pod can be using the claim on `node`: it is reserved by pods only that
    /// are known to be bound elsewhere, and the kubelet allows no other pod to use it.
    fn is_unused(&self, entry: &ClaimEntry, node: &NodeName) -> bool {
        let is_pod = |consumer: &ResourceClaimConsumerReference| {
            consumer.resource == "pods"
                && consumer.api_group.as_deref().unwrap_or_default().is_empty()
        };
        let is_bound_elsewhere = |pod: &PodUid| {
            let bound = self.pods.get(pod).and_then(|pod| pod.node.as_ref());
            bound.is_some_and(|bound| bound != node)
        };
        entry.reserved_for().iter().all(|c| is_pod(c) && is_bound_elsewhere(&PodUid::new(&c.uid)))
            && entry.users.values().all(|bound| bound != node)
    }

    /// Returns a bound pod as the allocator's input. None while one of its claims is still on
    /// another node.
    pub fn bound_pending(&self, pod: &PodUid) -> Option<PendingPod> {
        let pod = self.pods.get(pod)?;
        let node = pod.node.as_ref()?;
        let mut claims = Vec::new();
        for entry in self.claims_of(pod)? {
            let uid = entry.claim.uid.clone();
            match entry.allocation() {
                Some(allocation) if is_elsewhere(allocation, node).is_some() => return None,
                Some(_) => {}
                None if self.scope(&uid) == Some(Scope::Ours) => {
                    claims.push(PodClaim::Pending(Arc::clone(&entry.claim)));
                }
                None => {}
            }
        }
        // Its requests are counted on its node already.
        Some(PendingPod {
            scheduling: Arc::new(SchedulingConstraints::default()),
            ..pod.pending(claims)
        })
    }

    /// Returns a bound pod as the allocator's input for a pod that replaces it: with all of its
    /// claims for managed drivers to allocate. None if the pod is not bound or is ending.
    pub fn replacement_of(&self, pod: &PodUid) -> Option<PendingPod> {
        let pod = self.pods.get(pod).filter(|pod| pod.is_running() && !pod.deleting)?;
        let is_ours = |entry: &&ClaimEntry| self.scope(&entry.claim.uid) == Some(Scope::Ours);
        let ours = self.claims_of(pod)?.into_iter().filter(is_ours);
        let claims = ours.map(|entry| PodClaim::Pending(Arc::clone(&entry.claim))).collect();
        Some(pod.pending(claims))
    }

    /// Returns claims that were deleted although a bound pod uses them, each with such a pod and
    /// its node: a client has removed the finalizer.
    pub fn orphaned(&self) -> Vec<(PodUid, ClaimUid, NodeName)> {
        let gone = self.claims.values().filter(|entry| entry.object.is_none());
        let used = gone.filter_map(|entry| {
            let (pod, node) = entry.users.first()?;
            let pod = self.pods.get(pod).filter(|pod| !pod.deleting)?;
            Some((pod.uid.clone(), entry.claim.uid.clone(), node.clone()))
        });
        used.collect()
    }
}

/// Returns true if all of the devices are of managed drivers.
pub(crate) fn is_ours(allocation: &AllocatedClaim, managed: &ManagedDrivers) -> bool {
    allocation.results.iter().all(|r| managed.contains(r.device.pool.driver.as_str()))
}

/// Returns the node of the allocation, if it has one and it is not `node`.
fn is_elsewhere(allocation: &AllocatedClaim, node: &NodeName) -> Option<NodeName> {
    let there = allocation.nodes.as_ref()?.single_node().filter(|there| *there != node.as_str())?;
    NodeName::new(there).ok()
}
