//! Bound pods whose claims are not where they are, and what can be done about it: a bound pod's
//! node wins.

use std::sync::Arc;

use k8s_openapi::api::resource::v1::{AllocationResult, ResourceClaimConsumerReference};
use tessera_allocator::model::{NodeSelector, PendingPod, PodClaim, PodUid, Scheduling};
use tessera_api::names::{ClaimUid, DRIVER_NAME, NodeName};

use crate::claims::ClaimEntry;
use crate::convert::AllocatedClaim;
use crate::index::Index;
use crate::pods::PodEntry;
use crate::scope::Scope;

/// A bound pod with a claim of ours that is not where the pod is. kube-scheduler makes one when its
/// PreBind meets a conflict: it adds its pod to whatever allocation is there then. Others can, by
/// clearing a claim in use or by binding a pod past kube-scheduler.
#[derive(Debug, Clone, PartialEq)]
pub struct Misplaced {
    /// The pod.
    pub pod: PodUid,
    /// The claim.
    pub claim: ClaimUid,
    /// Where the pod is.
    pub node: NodeName,
    /// Where the claim is; none if it is not allocated.
    pub allocated: Option<NodeName>,
    /// What can be done.
    pub remedy: Remedy,
}

/// How a claim comes to the node of the pod that is bound with it.
#[derive(Debug, Clone, PartialEq)]
pub enum Remedy {
    /// Nobody can be using it where it is. An allocation cannot be changed, so it is ended there,
    /// reservations included.
    TakeBack,
    /// The pod's containers may be using what was allocated before: just that is written again.
    Restore(Box<AllocationResult>),
    /// It is planned, with no other node to choose from.
    Plan,
    /// Nothing.
    None(Hindrance),
}

/// Why nothing can be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Hindrance {
    /// Containers of the pod have run, and it is not known any more with which devices.
    Started,
    /// Somebody else may be using the claim where it is, or has to have it first.
    InUse,
}

impl Index {
    /// Bound pods that cannot have the devices of one of their claims where they are.
    pub fn misplaced(&self) -> Vec<Misplaced> {
        let stranded = self.stranded.iter().filter_map(|uid| self.pods.get(uid));
        stranded
            .flat_map(|pod| pod.links.values().filter_map(|claim| self.misplaced_of(pod, claim)))
            .collect()
    }

    /// Whether one of the pod's claims may have to be repaired. What is going away is left to go.
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
                Some(is_elsewhere(allocation, &node).filter(|_| is_ours(allocation))?)
            }
            None if self.scope(claim) != Some(Scope::Ours) => return None,
            None => None,
        };
        let remedy = self.remedy(pod, entry, &node, allocated.as_ref());
        Some(Misplaced { pod: pod.uid.clone(), claim: claim.clone(), node, allocated, remedy })
    }

    fn remedy(
        &self,
        pod: &PodEntry,
        entry: &ClaimEntry,
        node: &NodeName,
        allocated: Option<&NodeName>,
    ) -> Remedy {
        if self.first_user(entry) != Some(&pod.uid)
            || allocated.is_some_and(|there| !self.is_unused(entry, there))
        {
            return Remedy::None(Hindrance::InUse);
        }
        let before = entry.lost_allocation().filter(|(known, _)| {
            is_ours(known)
                && known.nodes.as_ref().and_then(NodeSelector::single_node) == Some(node.as_str())
        });
        match (before, allocated) {
            (None, _) if pod.started => Remedy::None(Hindrance::Started),
            (_, Some(_)) => Remedy::TakeBack,
            (Some((_, object)), None) => Remedy::Restore(Box::new(object.clone())),
            (None, None) => Remedy::Plan,
        }
    }

    /// The bound pod that a claim follows: one whose containers have run before the others, then
    /// the older.
    fn first_user<'e>(&self, entry: &'e ClaimEntry) -> Option<&'e PodUid> {
        let users = entry.users.keys().filter_map(|uid| Some((uid, self.pods.get(uid)?)));
        users.min_by_key(|(uid, pod)| (!pod.started, pod.created, *uid)).map(|(uid, _)| uid)
    }

    /// Whether nobody can be using the claim on `node`: whoever has reserved it is a pod that is
    /// known to be bound elsewhere, and kubelet lets nobody else use it.
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

    /// A bound pod as [`plan_on`](Self::plan_on) is to see it. None while one of its claims is
    /// still elsewhere.
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
        // What it requests of its node is booked there already.
        Some(PendingPod { scheduling: Arc::new(Scheduling::default()), ..pod.pending(claims) })
    }

    /// Claims that are gone although a bound pod uses them, each with such a pod and its node:
    /// somebody has stripped the finalizer.
    pub fn orphaned(&self) -> Vec<(PodUid, ClaimUid, NodeName)> {
        let gone = self.claims.values().filter(|entry| entry.object.is_none());
        let used = gone.filter_map(|entry| {
            let (pod, node) = entry.users.first_key_value()?;
            let pod = self.pods.get(pod).filter(|pod| !pod.deleting)?;
            Some((pod.uid.clone(), entry.claim.uid.clone(), node.clone()))
        });
        used.collect()
    }
}

/// Whether all of the devices are ours.
pub(crate) fn is_ours(allocation: &AllocatedClaim) -> bool {
    allocation.results.iter().all(|r| r.device.pool.driver.as_str() == DRIVER_NAME)
}

/// The node that the allocation is on, if it is one and not `node`.
fn is_elsewhere(allocation: &AllocatedClaim, node: &NodeName) -> Option<NodeName> {
    let there = allocation.nodes.as_ref()?.single_node().filter(|there| *there != node.as_str())?;
    NodeName::new(there).ok()
}
