//! Renewal of the reasons of refused classes at the end of a plan.
//!
//! A change of one node may change the reasons of every class, so the plan may limit the steps for
//! them. Classes then take turns over several plans, and keep their earlier reasons until then.

use std::collections::HashMap;
use std::sync::Arc;

use super::budget::Budget;
use super::pass::PlanningPass;
use super::refusals::RefusedClass;
use crate::outcome::{AllocationPlan, Refusal, RefusalCause};

/// Indexes of the refusals with each cause.
type RefusalsByCause = HashMap<*const RefusalCause, Vec<usize>>;

impl PlanningPass<'_> {
    /// Renews the causes of refusals that are of an earlier plan, or that later decisions of this
    /// pass have changed, once for each class.
    pub(super) fn renew_causes(&mut self, plan: &mut AllocationPlan, budget: &mut Budget) {
        let decisions = self.decisions;
        let mut refused = std::mem::take(&mut self.refused).into_all();
        refused.retain(|old| old.explained_at != Some(decisions) && !self.is_current(old));
        if refused.is_empty() {
            return;
        }
        let last = self.planner.classes.last_renewed;
        refused.sort_by_key(|old| (last.is_some_and(|last| old.class <= last), old.class));
        let mut refusals = RefusalsByCause::new();
        for (at, refusal) in plan.refusals.iter().enumerate() {
            refusals.entry(Arc::as_ptr(&refusal.cause)).or_default().push(at);
        }
        let mut left = self.settings.steps_for_reasons.unwrap_or(u64::MAX);
        // For selectors that no search has evaluated.
        let mut steps = self.settings.steps_per_plan;
        for old in refused {
            if left == 0 || steps == 0 {
                plan.has_old_reasons = true;
                return;
            }
            (self.explained_steps, self.max_explained_steps) = (0, left);
            let given = steps.min(self.settings.steps_per_pod);
            let namespace = old.to_place.pod.namespace.clone();
            let is_complete = self.renew(old, &refusals, &mut plan.refusals, given);
            let spent = self.planner.selections.charged();
            budget.charge_selectors(&namespace, spent);
            (left, steps) =
                (left.saturating_sub(self.explained_steps), steps.saturating_sub(spent));
            // A namespace without steps for selectors keeps its reasons until it has some.
            plan.has_old_reasons |= !is_complete && !self.planner.selections.was_withheld();
        }
    }

    /// Returns true if the causes are those of the present state of the cluster.
    fn is_current(&self, old: &RefusedClass<'_>) -> bool {
        let reserved = self.reserved_for(old.reserved_reason.as_ref());
        let reasons = &self.planner.classes.get(old.class).reasons;
        reasons.are_current(&self.planner.cluster, &reserved)
            && reasons.known_causes().is_some_and(|known| {
                known.iter().zip(&old.causes).all(|(known, given)| Arc::ptr_eq(known, given))
            })
    }

    /// Renews the causes of one class. Returns false if the steps did not suffice.
    fn renew(
        &mut self,
        old: RefusedClass<'_>,
        by_cause: &RefusalsByCause,
        refusals: &mut [Refusal],
        mut steps: u64,
    ) -> bool {
        let RefusedClass { class, to_place, reserved_reason, causes, .. } = old;
        let reserved_reason = reserved_reason.as_ref();
        let of_claims: Vec<&[usize]> =
            causes.iter().map(|c| by_cause.get(&Arc::as_ptr(c)).map_or(&[][..], |at| at)).collect();
        let shape = self.cached_shape(&to_place, class);
        let mut reasons = std::mem::take(&mut self.planner.classes.get_mut(class).reasons);
        reasons.collect_outdated(&self.planner.cluster, self.reserved_for(reserved_reason));
        let are_few = reasons.are_few_outdated();
        if are_few {
            reasons.release_causes();
            let released = Arc::new(RefusalCause::BudgetExceeded);
            for at in of_claims.iter().copied().flatten() {
                refusals[*at].cause = Arc::clone(&released);
            }
            drop(causes);
            self.max_explained_steps = u64::MAX;
        }
        self.begin_pod(to_place.pod);
        let is_complete = self.update(&mut reasons, &to_place, shape, reserved_reason, &mut steps);
        if is_complete || are_few {
            let renewed = self.make_causes(&mut reasons, shape);
            for (of_claim, cause) in of_claims.into_iter().zip(renewed) {
                of_claim.iter().for_each(|at| refusals[*at].cause = Arc::clone(&cause));
            }
        }
        self.planner.classes.get_mut(class).reasons = reasons;
        self.note_progress(class, is_complete);
        if is_complete {
            self.planner.classes.last_renewed = Some(class);
        }
        is_complete
    }
}
