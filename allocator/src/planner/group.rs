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

use super::group_kinds::RefusedGroup;
use super::group_topology::PlaceableGroup;
use super::pass::{Mark, PlanningPass, Refused};
use crate::model::PendingPod;
use crate::outcome::{Decision, GroupShortfall, Refusal, RefusalCause};
use crate::quota::QuotaState;

/// The most orders in which the pods of a group are tried.
const MAX_ORDERS: usize = 4;

/// The cause for which a group is not placed.
pub(super) enum GroupFailure {
    /// The steps were spent.
    Undecided,
    /// It does not fit, nor do equal groups.
    DoesNotFit(Box<RefusedGroup>),
}

impl GroupFailure {
    /// Returns that a group does not fit. `own` are the causes of the first pod that does not fit.
    pub(super) fn does_not_fit(
        group: &PendingPod,
        shortfall: GroupShortfall,
        own: Vec<(usize, Arc<RefusalCause>)>,
    ) -> Self {
        Self::DoesNotFit(Box::new(RefusedGroup::new(group, shortfall, own)))
    }
}

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
        let kind = self.planner.kind_of(group, self.settings.policy);
        let kind = kind.filter(|_| !group.members().any(|pod| self.is_partly_decided(pod)));
        let known = kind.as_ref().and_then(|kind| self.refused_groups.get(kind));
        if let Some(like) = known.map(|known| known.like.clone())
            && self.open_window(group).is_none()
        {
            return Err(self.refuse_group(group, &like).into());
        }
        self.try_group(group, steps).map_err(|failure| match failure {
            GroupFailure::Undecided => self.undecided_group(group),
            GroupFailure::DoesNotFit(like) => {
                let refusals = self.refuse_group(group, &like);
                if let Some(kind) = kind {
                    self.note_refused_kind(kind, *like, refusals.clone());
                }
                refusals.into()
            }
        })
    }

    /// Places all pods of a group.
    ///
    /// # Errors
    /// One does not fit beside the others.
    fn try_group(
        &mut self,
        group: &'p PendingPod,
        steps: &mut u64,
    ) -> Result<Vec<Decision>, GroupFailure> {
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
            return Err(GroupFailure::Undecided);
        }
        if !self.keeps_what_fits(group) {
            self.roll_back_group(&start, &placed);
        }
        let first = order[at].name.clone();
        let shortfall = GroupShortfall { pods: order.len(), placed: most, first, topology: None };
        let pending = self.undecided_part(order[at]).pending;
        let cause = |refusal: Refusal| {
            let place = pending.iter().position(|claim| claim.uid == refusal.claim)?;
            Some((place, refusal.cause))
        };
        let own = refused.claims.into_iter().filter_map(cause).collect();
        Err(GroupFailure::does_not_fit(group, shortfall, own))
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

    /// Returns the refusals of a group like one that was tried.
    fn refuse_group(&mut self, group: &PendingPod, like: &RefusedGroup) -> Vec<Refusal> {
        let cause = self.group_cause(like.shortfall_of(group));
        like.refusals(group, &cause, |pod| self.undecided_part(pod))
    }

    /// Returns the cause with this shortfall: the object of the plan before, if it had the same, so
    /// that its reader can tell at once that nothing has changed.
    fn group_cause(&mut self, shortfall: GroupShortfall) -> Arc<RefusalCause> {
        let before = self.group_causes_before.remove(&shortfall);
        let causes = &mut self.planner.group_causes;
        let cause = causes.entry(shortfall).or_insert_with_key(|shortfall| {
            let new = || Arc::new(RefusalCause::GroupDoesNotFit(shortfall.clone()));
            before.unwrap_or_else(new)
        });
        Arc::clone(cause)
    }

    /// Refuses all pods of a group because the steps were spent.
    fn undecided_group(&self, group: &PendingPod) -> Refused {
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
