//! Classes that are refused as before: their pods have no turn.
//!
//! Only nodes that have changed since a class was refused are examined. A plan that leaves a class
//! out has no refusals for its pods, unless their reasons were renewed.

use super::budget::Budget;
use super::classes::ClassId;
use super::pass::PlanningPass;
use super::pod_to_place::PodToPlace;
use super::turns::Turn;
use crate::backlog::{OrderedPod, PlanOrder, Queue};
use crate::model::{PendingPod, PodClaim};

/// A class that is refused as before.
pub(super) struct UnchangedClass<'p> {
    pub(super) id: ClassId,
    /// The last pod of its queue, which has the reasons of all.
    pub(super) last: OrderedPod<'p>,
}

impl<'p> PlanningPass<'p> {
    /// Refuses the pods of a queue as before, so that none of them has a turn. Returns false if
    /// they need one. `turn` is that of the first pod.
    pub(super) fn refuse_as_before(
        &mut self,
        turn: &Turn<'p>,
        queue: Option<&'p Queue>,
        budget: &mut Budget,
    ) -> bool {
        let Some((id, queue)) = turn.class.zip(queue) else { return false };
        let Some(last) = queue.last().filter(|_| queue.is_first(turn.pod)) else { return false };
        let is_unchanged = self.settings.steps_for_reasons.is_some()
            && self.planner.classes.keep(id, self.settings.policy)
            && !self.is_partly_decided(turn.pod)
            && ![turn.pod, last.1].iter().any(|pod| self.planner.forecast.lacks_refusal(&pod.uid))
            && self.confirm_refusal(turn.pod, id, budget)
            && !self.may_reserve_for(turn.pod, queue, &turn.order, id);
        if is_unchanged {
            self.unchanged.push(UnchangedClass { id, last });
        }
        is_unchanged
    }

    /// Returns true if this pass has decided on a claim of the pod.
    pub(super) fn is_partly_decided(&self, pod: &PendingPod) -> bool {
        let is_decided = |claim: &PodClaim| match claim {
            PodClaim::Pending(claim) => self.decided.contains_key(&claim.uid),
            PodClaim::Allocated { .. } => false,
        };
        !self.decided.is_empty() && pod.claims.iter().any(is_decided)
    }

    /// Examines the nodes that have changed since the class was refused. Returns true if none is
    /// usable for `pod`, which is one of its pods. False also means that the steps did not suffice.
    fn confirm_refusal(&mut self, pod: &PendingPod, id: ClassId, budget: &mut Budget) -> bool {
        let class = self.planner.classes.get(id);
        let (Some(until), Some(shape)) = (class.refused_until, class.shape) else { return false };
        if class.reasons.known_causes().is_none() || !self.planner.shapes.reuse(shape) {
            return false;
        }
        if until == self.planner.cluster.last_touch() {
            return true;
        }
        // In a plan that continues, searches take turns by namespace.
        let needed = self.planner.shapes.get(shape).feasibility.needed_steps();
        if !self.planner.fair_share.is_idle() {
            return false;
        }
        let Ok(given) = budget.for_pod(&pod.namespace, needed) else { return false };
        let mut steps = given;
        self.explained_steps = 0;
        self.begin_pod(pod);
        let (shapes, mut context) = self.planner.search_context();
        let entry = shapes.get_mut(shape);
        let of_pod = self.settings.steps_per_pod;
        entry.feasibility.refresh(&mut entry.shape, &mut context, &mut steps, of_pod);
        self.charge(pod, needed, given - steps, budget);
        let to_place = PodToPlace::without_claims(pod);
        self.check_still_refused(&to_place, id, shape)
    }

    /// Returns true if a node may be reserved for a pod of the queue, of which `first` is the
    /// first one.
    fn may_reserve_for(
        &mut self,
        first: &PendingPod,
        queue: &Queue,
        order: &PlanOrder,
        id: ClassId,
    ) -> bool {
        self.planner.classes.get(id).reasons.lacks_held_capacity()
            && (self.open_window(first).is_some()
                || self.next_to_reserve_for(queue, order, id).is_some())
    }
}
