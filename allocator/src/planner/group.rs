//! Groups of pods in a planning pass: all pods of a group are placed, or none.
//!
//! The pods are placed one after the other, each with what those before it have left. If one does
//! not fit, the pass is rolled back, and the group is tried again with this pod first: of pods with
//! unequal claims, the one that is hardest to place comes first. A pod that does not fit although
//! it is the first has the reasons of its class; the others of the group have
//! [`RefusalCause::GroupDoesNotFit`].
//!
//! A group whose reservation window is open keeps what fits for the rest of the pass, so pods that
//! come later do not take it.

use std::sync::Arc;

use tessera_api::names::Namespace;

use super::group_topology::PlaceableGroup;
use super::pass::{Mark, PlanningPass, Refused};
use crate::model::PendingPod;
use crate::outcome::{Decision, GroupShortfall, Refusal, RefusalCause};
use crate::quota::QuotaState;

/// The most orders in which the pods of a group are tried.
const MAX_ORDERS: usize = 4;

/// The state of a pass before the pods of a group.
pub(super) struct GroupStart {
    mark: Mark,
    /// Quotas of the namespace of the group.
    quotas: Option<(Namespace, Vec<QuotaState>)>,
}

/// A group of which a pod was refused.
pub(super) struct Shortfall {
    /// Decisions about the pods before it, which count in the pass.
    pub(super) placed: Vec<Decision>,
    /// The most pods that were placed in any order.
    pub(super) most: usize,
    /// Place of the refused pod in the order.
    at: usize,
    pub(super) refused: Refused,
}

impl<'p> PlanningPass<'p> {
    /// Places all pods of a group.
    ///
    /// # Errors
    /// One does not fit beside the others. The refusals are those of all pods of the group.
    pub(super) fn place_group(
        &mut self,
        group: &'p PendingPod,
        steps: &mut u64,
    ) -> Result<Vec<Decision>, Refused> {
        let mut order: Vec<&'p PendingPod> = group.members().collect();
        let start = self.start_of(group);
        let Shortfall { placed, most, at, refused } =
            match self.place_in_orders(&mut order, &start, steps) {
                Ok(decisions) => {
                    let Some(topology) = &group.topology else { return Ok(decisions) };
                    let (order, start) = (&order, &start);
                    let placeable = PlaceableGroup { group, topology, order, start };
                    return self.bring_together(&placeable, decisions, steps);
                }
                Err(shortfall) => shortfall,
            };
        if refused.is_undecided() {
            self.roll_back_group(&start, &placed);
            return Err(self.undecided_group(group));
        }
        if !self.keeps_what_fits(group) {
            self.roll_back_group(&start, &placed);
        }
        let refused_pod = order[at];
        let shortfall = GroupShortfall {
            pods: order.len(),
            placed: most,
            first: refused_pod.name.clone(),
            topology: None,
        };
        let own = Some((refused_pod, refused));
        Err(self.refuse_group(group, own, shortfall))
    }

    /// Returns the state before a group.
    fn start_of(&self, group: &PendingPod) -> GroupStart {
        let of_namespace = self.planner.quotas.get_key_value(&group.namespace);
        let quotas = of_namespace.map(|(name, quotas)| (name.clone(), quotas.clone()));
        GroupStart { mark: self.mark(), quotas }
    }

    /// Places the pods in the first of a few orders in which all of them fit; `order` is that one
    /// afterwards.
    ///
    /// # Errors
    /// None was found. What fits of the last order counts in the pass.
    pub(super) fn place_in_orders(
        &mut self,
        order: &mut [&'p PendingPod],
        start: &GroupStart,
        steps: &mut u64,
    ) -> Result<Vec<Decision>, Shortfall> {
        let (mut most, mut attempts) = (0, 0);
        loop {
            attempts += 1;
            let shortfall = match self.place_in_order(order, steps) {
                Ok(decisions) => return Ok(decisions),
                Err(shortfall) => shortfall,
            };
            let Shortfall { placed, at, refused, .. } = &shortfall;
            most = most.max(placed.len());
            let is_last = refused.is_undecided()
                || placed.is_empty()
                || attempts == MAX_ORDERS
                || self.compare_classes(order[0], order[*at]);
            if is_last {
                return Err(Shortfall { most, ..shortfall });
            }
            self.roll_back_group(start, placed);
            order[..=*at].rotate_right(1);
        }
    }

    /// Places the pods in this order.
    fn place_in_order(
        &mut self,
        order: &[&'p PendingPod],
        steps: &mut u64,
    ) -> Result<Vec<Decision>, Shortfall> {
        let mut placed = Vec::new();
        for (at, pod) in order.iter().enumerate() {
            // That a pod does not fit on some of the nodes is no fact about its class, either.
            let beside = placed.len() + usize::from(self.domain.is_some());
            match self.place_pod(pod, Some(beside), steps) {
                Ok(decision) => placed.extend(decision),
                Err(refused) => {
                    return Err(Shortfall { most: placed.len(), placed, at, refused });
                }
            }
        }
        Ok(placed)
    }

    /// Classifies two pods. Returns true if they have equal claims and constraints, so that their
    /// order does not matter.
    fn compare_classes(&mut self, a: &PendingPod, b: &PendingPod) -> bool {
        let policy = self.settings.policy;
        let [a, b] = [a, b].map(|pod| self.planner.class_of_all(pod, policy));
        a == b
    }

    /// Returns true if the reservation window of the group is open: what fits is kept for it.
    pub(super) fn keeps_what_fits(&mut self, group: &PendingPod) -> bool {
        let until = self.open_window(group);
        self.reservation.keep_for_group(until);
        until.is_some()
    }

    /// Returns the refusals of a group. One pod of it may have reasons of its own.
    pub(super) fn refuse_group(
        &self,
        group: &PendingPod,
        own: Option<(&PendingPod, Refused)>,
        shortfall: GroupShortfall,
    ) -> Refused {
        let cause = Arc::new(RefusalCause::GroupDoesNotFit(shortfall));
        let mut claims = Vec::new();
        for pod in group.members() {
            let own = own.as_ref().filter(|(one, _)| one.uid == pod.uid);
            match own.map(|(_, refused)| &refused.claims).filter(|own| !own.is_empty()) {
                Some(own) => claims.extend(own.iter().cloned()),
                None => claims.extend(self.undecided_part(pod).refused_for(&cause)),
            }
        }
        claims.into()
    }

    /// Refuses all pods of a group because the steps were spent.
    pub(super) fn undecided_group(&self, group: &PendingPod) -> Refused {
        let claims: Vec<Refusal> =
            group.members().flat_map(|pod| self.undecided_part(pod).undecided()).collect();
        claims.into()
    }

    /// Undoes these decisions, which are all since the start, with the quotas of the namespace.
    pub(super) fn roll_back_group(&mut self, start: &GroupStart, decisions: &[Decision]) {
        self.roll_back(start.mark);
        for allocation in decisions.iter().flat_map(|decision| &decision.claims) {
            self.decided.remove(&allocation.claim);
        }
        self.planner.quotas.extend(start.quotas.clone());
    }
}
