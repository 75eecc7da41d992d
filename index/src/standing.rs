//! Where one pod is on its way to its devices, and what each of its claims waits for: for people
//! who ask.

use std::sync::Arc;

use tessera_allocator::model::{Claim, PendingPod, PodUid};
use tessera_api::names::{ClaimName, ClaimUid, Namespace, NodeName, PodName};

use crate::convert::AllocatedClaim;
use crate::index::Index;
use crate::pods::{ClaimRef, PodEntry};
use crate::scope::Scope;
use crate::work::{Blocked, is_owned_by};

/// Where a pod is on its way to its devices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Stage {
    /// Succeeded or failed.
    Ended,
    /// Being deleted.
    Deleting,
    /// Bound to a node.
    Bound(NodeName),
    /// Somebody's scheduling gate holds it back, so it is not planned.
    Gated,
    /// It waits for a node.
    Waiting,
}

/// One entry of a pod's `spec.resourceClaims`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClaimStanding {
    /// The entry's own name.
    pub entry: String,
    /// The claim's name; none where it is to be made from a template and is not yet.
    pub name: Option<ClaimName>,
    /// The claim; none where there is none.
    pub claim: Option<ClaimUid>,
    /// What it waits for.
    pub state: ClaimState,
}

/// What a claim of a pod waits for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ClaimState {
    /// kube-controller-manager has not made it from its template.
    NotGenerated,
    /// There is no claim of that name.
    Missing,
    /// It is being deleted.
    Deleting,
    /// It is called as the pod's own claim would be, and belongs to something else.
    NotThePods,
    /// Nothing: it is allocated.
    Allocated(AllocatedClaim),
    /// Another driver's devices: kube-scheduler allocates it.
    Foreign,
    /// An allocation by us.
    Pending,
}

impl Index {
    /// The pod of that name.
    pub fn pod_called(&self, namespace: &Namespace, name: &PodName) -> Option<&PodUid> {
        let mut pods =
            self.pods.values().filter(|pod| pod.namespace == *namespace && pod.name == *name);
        pods.next().map(|pod| &pod.uid)
    }

    /// The claim of that name.
    pub fn claim_of_name(&self, namespace: &Namespace, name: &ClaimName) -> Option<&ClaimUid> {
        self.claim_names.get(&(namespace.clone(), name.clone()))
    }

    /// What a claim asks for; none if it is not known.
    pub fn asked(&self, claim: &ClaimUid) -> Option<&Arc<Claim>> {
        self.claims.get(claim).map(|entry| &entry.claim)
    }

    /// Where the pod is on its way; none if it is not known.
    pub fn stage(&self, pod: &PodUid) -> Option<Stage> {
        let pod = self.pods.get(pod)?;
        Some(match &pod.node {
            _ if pod.finished => Stage::Ended,
            _ if pod.deleting => Stage::Deleting,
            Some(node) => Stage::Bound(node.clone()),
            None if pod.gated => Stage::Gated,
            None => Stage::Waiting,
        })
    }

    /// The pod's claims, in pod order.
    pub fn claims_standing(&self, pod: &PodUid) -> Vec<ClaimStanding> {
        let Some(pod) = self.pods.get(pod) else { return Vec::new() };
        pod.claims.iter().map(|reference| self.claim_standing(pod, reference)).collect()
    }

    fn claim_standing(&self, pod: &PodEntry, reference: &ClaimRef) -> ClaimStanding {
        let entry = reference.entry.clone();
        let Some(name) = &reference.name else {
            return ClaimStanding {
                entry,
                name: None,
                claim: None,
                state: ClaimState::NotGenerated,
            };
        };
        let named = self.claim_named(pod, name);
        let state = match named {
            Some(entry)
                if reference.generated && !entry.is_deleting() && !is_owned_by(entry, pod) =>
            {
                ClaimState::NotThePods
            }
            Some(entry) => self.claim_state(&entry.claim.uid),
            None => ClaimState::Missing,
        };
        let claim = named.map(|entry| entry.claim.uid.clone());
        ClaimStanding { entry, name: Some(name.clone()), claim, state }
    }

    /// What a claim waits for, whoever uses it.
    pub fn claim_state(&self, claim: &ClaimUid) -> ClaimState {
        let Some(entry) = self.claims.get(claim) else { return ClaimState::Missing };
        match (entry.allocation(), self.scope(claim)) {
            _ if entry.is_deleting() => ClaimState::Deleting,
            (Some(allocation), _) => ClaimState::Allocated(allocation.clone()),
            (None, Some(Scope::Foreign) | None) => ClaimState::Foreign,
            (None, Some(_)) => ClaimState::Pending,
        }
    }

    /// The pod as the allocator is to see it, whether its turn has come or not; none if it is not
    /// complete yet or has nothing to be decided.
    ///
    /// # Errors
    /// It cannot be planned.
    pub fn pending(&self, pod: &PodUid) -> Result<Option<PendingPod>, Blocked> {
        self.pods.get(pod).map_or(Ok(None), |pod| self.plan_of(pod))
    }
}
