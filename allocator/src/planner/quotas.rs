//! Quotas in a planning pass.
//!
//! A pod is refused without a search if its requests alone exceed a quota. What depends on the
//! devices (percent, exclusive use, defaults of the device, alternatives) is known once a node is
//! searched: then further nodes are tried, and after them the further alternatives.
//!
//! Pods of one class are in one namespace and have equal requests, so what a quota refuses to one
//! of them it refuses to all that come later.

use std::sync::Arc;

use tessera_api::names::capacity::{CORES, MEMORY, SHARES};
use tessera_api::quantity::Quantity;
use tessera_api::quota::{QuotaAmounts, QuotaResource};

use super::classes::ClassId;
use super::pass::{PlanningPass, Refused};
use super::pod_to_place::PodToPlace;
use super::shape_cache::ShapeId;
use crate::cluster::NodeIndex;
use crate::model::{AllocationMode, Claim, PendingPod};
use crate::outcome::{ClaimAllocation, Decision, Refusal, RefusalCause};
use crate::quota::{self, Charge, Quota, QuotaShortfall};
use crate::shape::{AlternativeShape, Chosen, Shape};

/// The most nodes on which a plan tries the same requests of a pod after a quota was exceeded on
/// another node. They differ only in the sizes of their GPUs.
const MAX_NODES: usize = 64;

/// Devices for the pending claims of a pod on one node.
pub(super) struct Solution {
    pub(super) claims: Vec<ClaimAllocation>,
    /// Amounts of each device; empty in a namespace without quotas.
    pub(super) charges: Vec<Charge>,
}

/// The reason why a pod is not placed.
pub(super) enum Unplaced {
    Refused(Refused),
    /// Nodes are usable, and a quota is exceeded on each.
    OverQuota {
        shortfall: Box<QuotaShortfall>,
        /// Alternatives that were chosen for the requests of each claim.
        chosen: Vec<Vec<Chosen>>,
    },
}

/// The nodes on which a quota is exceeded.
#[derive(Default)]
pub(super) struct OverQuota {
    nodes: usize,
    first: Option<(Box<QuotaShortfall>, Vec<Vec<Chosen>>)>,
}

impl OverQuota {
    pub(super) fn note(&mut self, shortfall: Box<QuotaShortfall>, chosen: &[Vec<Chosen>]) {
        self.nodes += 1;
        self.first.get_or_insert_with(|| (shortfall, chosen.to_vec()));
    }

    /// Returns true if no further node is tried.
    pub(super) fn is_final(&self) -> bool {
        self.nodes >= MAX_NODES
    }

    pub(super) fn into_unplaced(self) -> Option<Unplaced> {
        self.first.map(|(shortfall, chosen)| Unplaced::OverQuota { shortfall, chosen })
    }
}

impl From<Refused> for Unplaced {
    fn from(refused: Refused) -> Self {
        Self::Refused(refused)
    }
}

impl From<Vec<Refusal>> for Unplaced {
    fn from(claims: Vec<Refusal>) -> Self {
        Self::Refused(claims.into())
    }
}

impl<'p> PlanningPass<'p> {
    /// Returns true if the namespace of the pod has quotas.
    pub(super) fn has_quotas(&self, pod: &PendingPod) -> bool {
        self.planner.quotas.contains_key(&pod.namespace)
    }

    /// Places a pod if no quota of its namespace is exceeded. If one is by an alternative of a
    /// request, the further alternatives are tried.
    pub(super) fn place_within_quotas(
        &mut self,
        to_place: &PodToPlace<'p>,
        class: ClassId,
        shape: ShapeId,
        steps: &mut u64,
    ) -> Result<Decision, Refused> {
        let (mut tried, mut narrowed, mut exceeded) = ((class, shape), None, None);
        loop {
            let (tried_class, tried_shape) = tried;
            if let Some(shortfall) = self.least_shortfall(to_place.pod, tried_shape) {
                return Err(self.refuse_over_quota(to_place, class, shortfall));
            }
            let part = narrowed.as_ref().unwrap_or(to_place);
            let unplaced = match self.place(part, tried_class, tried_shape, steps) {
                Ok(decision) => return Ok(decision),
                Err(unplaced) => unplaced,
            };
            let (shortfall, chosen) = match (unplaced, exceeded.take()) {
                (Unplaced::Refused(refused), None) => return Err(refused),
                (Unplaced::Refused(refused), Some(_)) if refused.is_undecided() => {
                    return Err(to_place.undecided().into());
                }
                // The alternative that fits exceeds a quota, and the others do not fit.
                (Unplaced::Refused(_), Some(shortfall)) => {
                    return Err(self.refuse_over_quota(to_place, class, shortfall));
                }
                (Unplaced::OverQuota { shortfall, chosen }, _) => (shortfall, chosen),
            };
            let part = narrowed.get_or_insert_with(|| to_place.clone());
            if !leave_out_alternative(&mut part.pending, &chosen) {
                return Err(self.refuse_over_quota(to_place, class, shortfall));
            }
            exceeded = Some(shortfall);
            tried = self.shape_of(part)?;
        }
    }

    /// Refuses a pod because of a quota.
    pub(super) fn refuse_over_quota(
        &mut self,
        to_place: &PodToPlace<'_>,
        class: ClassId,
        shortfall: Box<QuotaShortfall>,
    ) -> Refused {
        let cause = RefusalCause::OverQuota(shortfall);
        if to_place.is_beside_others() {
            return to_place.refused_for(&Arc::new(cause)).into();
        }
        let of_class = self.planner.classes.get_mut(class);
        // The same object while it is equal, so that its text is rendered once.
        let known = of_class.over_quota.take().filter(|known| **known == cause);
        let cause = known.unwrap_or_else(|| Arc::new(cause));
        of_class.over_quota = Some(Arc::clone(&cause));
        // A refusal by the nodes must not leave the class out of the next plan.
        of_class.refused_until = None;
        let claims = to_place.refused_for(&cause);
        Refused { claims, class: to_place.has_shared_results().then_some(class) }
    }

    /// Returns what is missing for the pod's requests, whatever the devices are.
    pub(super) fn least_shortfall(
        &self,
        pod: &PendingPod,
        shape: ShapeId,
    ) -> Option<Box<QuotaShortfall>> {
        let quotas = self.planner.quotas.get(&pod.namespace)?;
        let shape = &self.planner.shapes.get(shape).shape;
        quotas.iter().find_map(|state| state.shortfall(&least_amounts(shape, &state.quota)))
    }

    /// Returns what is missing for these devices.
    pub(super) fn shortfall_of(
        &self,
        pod: &PendingPod,
        solution: &Solution,
    ) -> Option<Box<QuotaShortfall>> {
        let quotas = self.planner.quotas.get(&pod.namespace)?;
        quotas.iter().find_map(|state| state.shortfall_of(&solution.charges))
    }

    /// Returns what the chosen devices count.
    pub(super) fn charges(
        &self,
        to_place: &PodToPlace<'_>,
        claims: &[ClaimAllocation],
        node: NodeIndex,
        chosen: &[Vec<Chosen>],
    ) -> Vec<Charge> {
        let reachable = self.planner.cluster.reachable(node);
        let mut all = Vec::new();
        for ((claim, allocation), chosen) in to_place.pending.iter().zip(claims).zip(chosen) {
            let device = |chosen: &Chosen| {
                let candidate = reachable?.candidates.get(chosen.candidate)?;
                Some(&**candidate.device())
            };
            all.extend(quota::charges(claim, &allocation.results, chosen.iter().map(device)));
        }
        all
    }

    /// Counts the devices of a decision against the quotas until the pass ends.
    pub(super) fn count_against_quotas(&mut self, pod: &PendingPod, charges: &[Charge]) {
        let Some(quotas) = self.planner.quotas.get_mut(&pod.namespace) else { return };
        self.quotas_before.entry(pod.namespace.clone()).or_insert_with(|| quotas.clone());
        quotas.iter_mut().for_each(|state| state.add(charges));
    }
}

/// Leaves out the alternative that was chosen for the last request that has another one. Returns
/// false if none has.
fn leave_out_alternative(claims: &mut [Arc<Claim>], chosen: &[Vec<Chosen>]) -> bool {
    for (claim, chosen) in claims.iter_mut().zip(chosen).rev() {
        let has_other = |chosen: &&Chosen| claim.requests[chosen.request].alternatives.len() > 1;
        let Some(Chosen { request, alternative, .. }) = chosen.iter().rev().find(has_other) else {
            continue;
        };
        let requests = &mut Arc::make_mut(claim).requests;
        Arc::make_mut(requests)[*request].alternatives.remove(*alternative);
        return true;
    }
    false
}

/// Returns the amounts that an allocation of these requests counts at least, whatever the devices
/// are.
fn least_amounts(shape: &Shape, quota: &Quota) -> QuotaAmounts {
    let mut sum = QuotaAmounts::new();
    for claim in &shape.claims {
        for bounds in claim.requests.windows(2) {
            let alternatives = &shape.alternatives[bounds[0]..bounds[1]];
            let of_each = alternatives.iter().map(|a| least_of_alternative(a, quota));
            let least = of_each.reduce(least);
            quota::add(&mut sum, &least.unwrap_or_default());
        }
    }
    sum
}

/// Returns the smaller amount of each resource.
fn least(mut a: QuotaAmounts, b: QuotaAmounts) -> QuotaAmounts {
    a.retain(|resource, amount| {
        let other = b.get(resource);
        *amount = other.map_or(*amount, |other| (*amount).min(*other));
        other.is_some()
    });
    a
}

fn least_of_alternative(alternative: &AlternativeShape, quota: &Quota) -> QuotaAmounts {
    let request = &alternative.request;
    let AllocationMode::Exact(count) = request.mode else { return QuotaAmounts::new() };
    if request.admin == Some(true)
        || !quota.covers(request.class.as_ref())
        || !alternative.selects_tessera_only()
    {
        return QuotaAmounts::new();
    }
    // Percent and exclusive use exclude that a request names these amounts. Devices round up.
    let asked = |name: &str| request.capacity.get(name).copied();
    let of_device = [
        (QuotaResource::Memory, asked(MEMORY)),
        (QuotaResource::Cores, asked(CORES)),
        (QuotaResource::Shares, asked(SHARES).or(Some(Quantity::from_integer(1)))),
    ];
    let count = i64::try_from(count).unwrap_or(i64::MAX);
    let of_all = of_device.into_iter().filter_map(|(resource, amount)| {
        Some((resource, amount?.checked_mul(count).filter(|amount| !amount.is_zero())?))
    });
    of_all.collect()
}
