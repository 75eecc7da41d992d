//! Renewal of the reasons of refused classes at the end of a plan.
//!
//! A change of one node may change the reasons of every class, so the plan may limit the steps for
//! them. Classes then take turns over several plans, and keep their earlier reasons until then.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use super::budget::Budget;
use super::classes::ClassId;
use super::pass::PlanningPass;
use super::pod_to_place::PodToPlace;
use super::refusals::RefusedClass;
use super::unchanged::UnchangedClass;
use crate::backlog::PlanOrder;
use crate::model::PendingPod;
use crate::outcome::{AllocationPlan, Refusal, RefusalCause};

/// Indexes of the refusals with each cause.
type RefusalsByCause = HashMap<*const RefusalCause, Vec<usize>>;

/// A class with outdated causes.
enum Outdated<'p> {
    Refused(RefusedClass<'p>),
    Unchanged(UnchangedClass<'p>),
}

impl Outdated<'_> {
    fn class(&self) -> ClassId {
        match self {
            Self::Refused(old) => old.class,
            Self::Unchanged(old) => old.id,
        }
    }

    fn pod(&self) -> &PendingPod {
        match self {
            Self::Refused(old) => old.to_place.pod,
            Self::Unchanged(old) => old.last.1,
        }
    }
}

impl<'p> PlanningPass<'p> {
    /// Renews the causes of refusals that are of an earlier plan, or that later decisions of this
    /// pass have changed, once for each class.
    pub(super) fn renew_causes(&mut self, plan: &mut AllocationPlan, budget: &mut Budget) {
        let mut left = self.settings.steps_for_reasons.unwrap_or(u64::MAX);
        if left == 0 {
            plan.has_old_reasons = self.refused.all().iter().any(|old| self.is_outdated(old))
                || self.unchanged.iter().any(|old| !self.is_current_without_turn(old));
            return;
        }
        let outdated = self.outdated();
        if outdated.is_empty() {
            return;
        }
        let mut refusals = RefusalsByCause::new();
        for (at, refusal) in plan.refusals.iter().enumerate() {
            refusals.entry(Arc::as_ptr(&refusal.cause)).or_default().push(at);
        }
        // For selectors that no search has evaluated.
        let mut steps = self.settings.steps_per_plan;
        let mut lacked = BTreeMap::new();
        for old in outdated {
            if left == 0 || steps == 0 {
                plan.has_old_reasons = true;
                return;
            }
            let lacks = self.lacks_held_capacity(old.class());
            lacked.entry(old.class()).or_insert(lacks);
            (self.explained_steps, self.max_explained_steps) = (0, left);
            let given = steps.min(self.settings.steps_per_pod);
            let namespace = old.pod().namespace.clone();
            let is_complete = match old {
                Outdated::Refused(old) => self.renew(old, &refusals, &mut plan.refusals, given),
                Outdated::Unchanged(old) => self.renew_unchanged(&old, &mut plan.renewed, given),
            };
            let selections = &self.planner.selections;
            budget.charge_selectors(&namespace, selections);
            left = left.saturating_sub(self.explained_steps);
            steps = steps.saturating_sub(selections.charged());
            // A namespace without steps for selectors keeps its reasons until it has some.
            let is_withheld = selections.was_withheld() && selections.uncompiled().is_none();
            plan.has_old_reasons |= !is_complete && !is_withheld;
        }
        // A node may have been reserved, or not, because of reasons that no longer hold.
        plan.has_old_reasons |= self.settings.reservation_delay.is_some()
            && lacked.iter().any(|(class, lacked)| self.lacks_held_capacity(*class) != *lacked);
    }

    fn lacks_held_capacity(&self, class: ClassId) -> bool {
        self.planner.classes.get(class).reasons.lacks_held_capacity()
    }

    /// Returns the classes with outdated causes, beginning after the one that was renewed last.
    ///
    /// Pods of one class may have been refused before and after a reservation. All of them are
    /// returned in their order, so that the class keeps the causes of the last.
    fn outdated(&mut self) -> Vec<Outdated<'p>> {
        let refused = std::mem::take(&mut self.refused).into_all();
        let unchanged = std::mem::take(&mut self.unchanged);
        let mut all: Vec<Outdated<'p>> = refused.into_iter().map(Outdated::Refused).collect();
        all.extend(unchanged.into_iter().map(Outdated::Unchanged));
        let is_old = |entry: &&Outdated<'_>| match entry {
            Outdated::Refused(refused) => self.is_outdated(refused),
            Outdated::Unchanged(class) => !self.is_current_without_turn(class),
        };
        let old: BTreeSet<ClassId> = all.iter().filter(is_old).map(Outdated::class).collect();
        all.retain(|entry| old.contains(&entry.class()));
        let last = self.planner.classes.last_renewed;
        let turn = |old: &Outdated<'_>| (last.is_some_and(|last| old.class() <= last), old.class());
        let order = |old: &Outdated<'_>| PlanOrder::of(old.pod());
        all.sort_by(|a, b| turn(a).cmp(&turn(b)).then_with(|| order(a).cmp(&order(b))));
        all
    }

    /// Returns true if the causes are of an earlier plan, or from before a decision of this one,
    /// and not those of the present state.
    fn is_outdated(&self, refused: &RefusedClass<'_>) -> bool {
        refused.explained_at != Some(self.decisions) && !self.is_current(refused)
    }

    /// Returns true if the causes of a class without a turn are those of the present state.
    fn is_current_without_turn(&self, old: &UnchangedClass<'_>) -> bool {
        let reason = self.reservation.rejection_without_turn(old.last);
        let reasons = &self.planner.classes.get(old.id).reasons;
        reasons.are_current(&self.planner.cluster, self.reservation.node().zip(reason))
    }

    /// Renews the causes of a class without a turn. If they have changed, `renewed` gets those of
    /// its last pod. Returns false if the steps did not suffice.
    fn renew_unchanged(
        &mut self,
        old: &UnchangedClass<'p>,
        renewed: &mut Vec<Refusal>,
        steps: u64,
    ) -> bool {
        let version = self.planner.classes.get(old.id).reasons.version();
        let class = RefusedClass {
            class: old.id,
            to_place: PodToPlace::all_of(old.last.1),
            reserved_reason: self.reservation.rejection_without_turn(old.last).cloned(),
            causes: Vec::new(),
            explained_at: None,
        };
        let is_complete = self.renew(class, &RefusalsByCause::new(), &mut [], steps);
        let reasons = &self.planner.classes.get(old.id).reasons;
        if let Some(causes) = reasons.known_causes().filter(|_| reasons.version() != version) {
            renewed.extend(PodToPlace::all_of(old.last.1).refused(causes));
        }
        is_complete
    }

    /// Returns true if the causes are those of the present state of the cluster.
    fn is_current(&self, old: &RefusedClass<'_>) -> bool {
        let reserved = self.reservation.node().zip(old.reserved_reason.as_ref());
        let reasons = &self.planner.classes.get(old.class).reasons;
        reasons.are_current(&self.planner.cluster, reserved)
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
