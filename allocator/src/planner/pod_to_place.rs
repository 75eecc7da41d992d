//! The part of a pod that a planning pass has not decided yet.

use std::sync::Arc;

use tessera_api::names::ClaimName;

use crate::model::{Claim, NodeSelector, PendingPod};
use crate::outcome::{Refusal, RefusalCause};
use crate::predicate::ClaimNodes;

/// A pod to place: the part that is not decided yet.
#[derive(Clone)]
pub(super) struct PodToPlace<'s> {
    pub(super) pod: &'s PendingPod,
    /// Claims to allocate.
    pub(super) pending: Vec<Arc<Claim>>,
    /// Nodes of its allocated claims.
    pub(super) claim_nodes: Vec<ClaimNodes>,
    /// Number of pods of its group that have got devices before it, which count only if the whole
    /// group fits, and one more if the group is restricted to a domain; `None` for a single pod.
    pub(super) beside: Option<usize>,
}

impl<'s> PodToPlace<'s> {
    /// Returns a pod without its claims, for tests of nodes.
    pub(super) fn without_claims(pod: &'s PendingPod) -> Self {
        Self { pod, pending: Vec::new(), claim_nodes: Vec::new(), beside: None }
    }

    /// Returns all of a pod that is not allocated.
    pub(super) fn all_of(pod: &'s PendingPod) -> Self {
        let mut to_place = Self::without_claims(pod);
        for claim in pod.pending_claims() {
            to_place.add(claim);
        }
        to_place
    }

    /// Adds a claim to allocate, unless it is there already.
    pub(super) fn add(&mut self, claim: &Arc<Claim>) {
        if self.pending.iter().all(|known| known.uid != claim.uid) {
            self.pending.push(Arc::clone(claim));
        }
    }
}

impl PodToPlace<'_> {
    /// Returns true if results apply to every pod with the same claims and constraints.
    pub(super) fn has_shared_results(&self) -> bool {
        !self.is_beside_others()
            && self.claim_nodes.is_empty()
            && self.pod.excluded_nodes.is_empty()
            && self.pod.nominated_node.is_none()
    }

    /// Returns true if other pods of its group have got devices before it.
    pub(super) fn is_beside_others(&self) -> bool {
        self.beside.is_some_and(|others| others > 0)
    }

    pub(super) fn restrict_to(&mut self, claim: &ClaimName, nodes: Option<&NodeSelector>) {
        self.claim_nodes
            .extend(nodes.map(|nodes| ClaimNodes { claim: claim.clone(), nodes: nodes.clone() }));
    }

    /// Refuses each pending claim with its cause.
    pub(super) fn refused(&self, causes: &[Arc<RefusalCause>]) -> Vec<Refusal> {
        let refuse = |(claim, cause): (&Arc<Claim>, &Arc<RefusalCause>)| Refusal {
            pod: self.pod.uid.clone(),
            claim: claim.uid.clone(),
            cause: Arc::clone(cause),
        };
        self.pending.iter().zip(causes).map(refuse).collect()
    }

    /// Refuses all pending claims for one cause.
    pub(super) fn refused_for(&self, cause: &Arc<RefusalCause>) -> Vec<Refusal> {
        self.refused(&vec![Arc::clone(cause); self.pending.len()])
    }

    /// Refuses each pending claim because the step budget was spent.
    pub(super) fn undecided(&self) -> Vec<Refusal> {
        self.refused_for(&Arc::new(RefusalCause::BudgetExceeded))
    }
}
