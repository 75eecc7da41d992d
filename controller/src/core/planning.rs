//! Planning: the allocator's view of the cluster, and its plans.

use std::collections::BTreeSet;
use std::time::Duration;

use tessera_allocator::model::{PendingPod, PodUid};
use tessera_allocator::{AllocationPlan, Backlog, PlanSettings, Planner, Refusal};
use tessera_api::names::{Namespace, NodeName};
use tessera_index::Index;

use super::clock::{Moment, Now};
use super::step_allowance::{Allowance, StepsByNamespace};

/// The steps of one plan: about 5 ms of CPU time. Decisions until then are written, and the next
/// plan continues with new events, so a pod of another namespace waits for one such plan.
const STEPS_PER_PLAN: u64 = 10_000;

/// Additional steps for each pod that every plan tries, so that most of the time of a plan is spent
/// on searches: a turn takes as long as ten steps.
const STEPS_PER_TURN: u64 = 20;

/// Steps of one plan to renew the reasons of pods that were refused before: 2 to 3 ms of CPU time.
const STEPS_FOR_REASONS: u64 = 2_000;

/// Time until a plan renews reasons, and between two such plans. Decisions come first: many events
/// in this time lead to as many plans.
const REASONS_PAUSE: Duration = Duration::from_millis(50);

/// The allocator, which gets the changes of the index before each plan, and the pods that it plans.
#[derive(Debug)]
pub(super) struct Planning {
    planner: Planner,
    settings: PlanSettings,
    /// Pods that wait for devices and that nothing keeps from being planned.
    pub(super) backlog: Backlog,
    /// The bound pod that was planned last; the next plan of bound pods begins after it.
    pub(super) last_bound: Option<PodUid>,
    /// Time at which the next plan renews reasons; `None` if all are new.
    reasons_due: Option<Moment>,
    selectors: StepsByNamespace,
    long_searches: StepsByNamespace,
    /// Namespaces with a selector that is being compiled.
    compiling: BTreeSet<Namespace>,
}

impl Planning {
    pub(super) fn new(settings: PlanSettings) -> Self {
        let mut planner = Planner::default();
        planner.leave_long_selectors();
        Self {
            planner,
            settings,
            backlog: Backlog::default(),
            last_bound: None,
            reasons_due: None,
            selectors: StepsByNamespace::new(Allowance::SELECTORS),
            long_searches: StepsByNamespace::new(Allowance::LONG_SEARCHES),
            compiling: BTreeSet::new(),
        }
    }

    /// Plans the pods of the backlog. Nothing counts as taken before it is
    /// [assumed](Index::assume).
    pub(super) fn plan(&mut self, index: &mut Index, now: Now) -> AllocationPlan {
        self.begin(index, now.monotonic);
        let turns = u64::try_from(self.backlog.turn_count()).unwrap_or(u64::MAX);
        let is_due = self.reasons_due.is_some_and(|due| due <= now.monotonic);
        let steps_for_reasons = Some(if is_due { STEPS_FOR_REASONS } else { 0 });
        let settings =
            PlanSettings { now: now.wall, steps_for_reasons, ..self.settings_for(turns) };
        let plan = self.planner.plan_backlog(&mut self.backlog, settings);
        self.spend(&plan, now.monotonic);
        // A plan that does not reach all pods renews no reasons.
        if plan.unreached.is_empty() {
            let due = self.reasons_due.filter(|_| !is_due);
            let due = due.unwrap_or(now.monotonic + REASONS_PAUSE);
            self.reasons_due = plan.has_old_reasons.then_some(due);
        }
        plan
    }

    /// Returns the time at which the next plan is due by itself.
    pub(super) fn next_plan(&self, plan: &AllocationPlan, now: Now) -> Option<Moment> {
        let at_once = (!plan.unreached.is_empty()).then_some(now.monotonic);
        let seconds = plan.replan_at.map(|again| again.saturating_sub(now.wall));
        let change = seconds.map(|seconds| in_seconds(now.monotonic, seconds));
        at_once.into_iter().chain(self.reasons_due).chain(change).min()
    }

    /// Brings the allocator up to date.
    fn begin(&mut self, index: &mut Index, now: Moment) {
        index.take_changes().apply_to(&mut self.planner);
        self.planner.withhold_selectors(self.selectors.exhausted(now));
        self.planner.withhold_long_searches(self.long_searches.exhausted(now));
    }

    /// Takes the steps of a plan from those of the namespaces.
    fn spend(&mut self, plan: &AllocationPlan, now: Moment) {
        for (namespace, steps) in &plan.selector_steps {
            self.selectors.spend(namespace, *steps, now);
        }
        for (namespace, steps) in &plan.long_search_steps {
            self.long_searches.spend(namespace, *steps, now);
        }
    }

    /// Takes the steps of a compilation from those of the namespace. Returns false, and takes none,
    /// while another selector of the namespace is being compiled.
    pub(super) fn begin_to_compile(
        &mut self,
        namespace: &Namespace,
        steps: u64,
        now: Moment,
    ) -> bool {
        let is_begun = self.compiling.insert(namespace.clone());
        if is_begun {
            self.selectors.spend(namespace, steps, now);
        }
        is_begun
    }

    /// Records that the selector of a namespace is compiled. Returns false if there is none.
    pub(super) fn compiled(&mut self, namespace: &Namespace) -> bool {
        self.compiling.remove(namespace)
    }

    /// Returns the settings of a plan with this number of turns.
    fn settings_for(&self, turns: u64) -> PlanSettings {
        let steps = STEPS_PER_PLAN.saturating_add(turns.saturating_mul(STEPS_PER_TURN));
        let steps_per_plan = self.settings.steps_per_plan.min(steps);
        PlanSettings { steps_per_plan, ..self.settings }
    }

    /// Returns the settings of the plans of one node for a preemption, with these steps.
    pub(super) fn settings_of_preemption(&self, steps: u64) -> PlanSettings {
        PlanSettings { steps_per_plan: steps, reservation_delay: None, ..self.settings }
    }

    /// Returns the refusals of a pod that is refused like others; none for other pods, or if the
    /// reasons are not kept.
    pub(super) fn refusals_of(&self, pod: &PodUid) -> Option<Vec<Refusal>> {
        self.planner.refusals_in(&self.backlog, pod)
    }

    /// Plans the pending claims of a pod that is bound to `node`, on this node only. The pod is
    /// unreached if the steps of one plan do not suffice.
    pub(super) fn plan_on(
        &mut self,
        index: &mut Index,
        node: &NodeName,
        pod: &PendingPod,
        now: Moment,
    ) -> AllocationPlan {
        self.begin(index, now);
        let plan = self.planner.plan_bound_pod(node, pod, self.settings_for(0));
        self.spend(&plan, now);
        plan
    }
}

/// Returns the number of claims of the pod that are to be allocated.
pub(super) fn pending_claims(pod: &PendingPod) -> i64 {
    super::gauge(pod.pending_claims().count())
}

/// Returns the moment this many seconds after `now`, a second later at least.
fn in_seconds(now: Moment, seconds: i64) -> Moment {
    now + Duration::from_secs(u64::try_from(seconds).unwrap_or(0).max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plan_with_old_reasons_continues_after_a_pause() {
        let monotonic = Moment::START + Duration::from_secs(9);
        let now = Now { monotonic, wall: 1_000 };
        let due = monotonic + REASONS_PAUSE;
        let mut planning = Planning::new(PlanSettings::default());
        planning.reasons_due = Some(due);
        let plan = AllocationPlan::default();
        assert_eq!(planning.next_plan(&plan, now), Some(due));
        let unreached = vec![PodUid::new("p")];
        let plan = AllocationPlan { unreached, replan_at: Some(1_300), ..plan };
        assert_eq!(planning.next_plan(&plan, now), Some(monotonic), "the earliest");
        planning.reasons_due = None;
        let plan = AllocationPlan { unreached: Vec::new(), ..plan };
        assert_eq!(planning.next_plan(&plan, now), Some(monotonic + Duration::from_secs(300)));
    }
}
