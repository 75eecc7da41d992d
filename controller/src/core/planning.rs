//! Planning: the allocator's view of the cluster, and its plans.

use std::time::Duration;

use tessera_allocator::model::PendingPod;
use tessera_allocator::{AllocationPlan, PlanSettings, Planner};
use tessera_api::names::NodeName;
use tessera_index::Index;

use super::clock::Moment;

/// The steps of one plan: one to two seconds of CPU time. Decisions until then are written, and
/// the next plan continues.
const STEPS_PER_PLAN: u64 = 2_000_000;

/// The allocator, which gets the changes of the index before each plan.
#[derive(Debug)]
pub(super) struct Planning {
    planner: Planner,
    settings: PlanSettings,
}

impl Planning {
    pub(super) fn new(settings: PlanSettings) -> Self {
        let steps_per_plan = settings.steps_per_plan.min(STEPS_PER_PLAN);
        let settings = PlanSettings { steps_per_plan, ..settings };
        Self { planner: Planner::default(), settings }
    }

    /// Plans the pods. `wall` is the time in seconds since the epoch. Nothing counts as taken
    /// before it is [assumed](Index::assume).
    pub(super) fn plan(
        &mut self,
        index: &mut Index,
        pods: &[PendingPod],
        wall: i64,
    ) -> AllocationPlan {
        index.take_changes().apply_to(&mut self.planner);
        self.planner.plan(pods, PlanSettings { now: wall, ..self.settings })
    }

    /// Plans the pending claims of a pod that is bound to `node`, on this node only.
    pub(super) fn plan_on(
        &mut self,
        index: &mut Index,
        node: &NodeName,
        pod: &PendingPod,
    ) -> AllocationPlan {
        index.take_changes().apply_to(&mut self.planner);
        self.planner.plan_bound_pod(node, pod, self.settings)
    }
}

/// Returns the number of claims of the pod that are to be allocated.
pub(super) fn pending_claims(pod: &PendingPod) -> i64 {
    super::gauge(pod.pending_claims().count())
}

/// Returns the moment this many seconds after `now`, a second later at least.
pub(super) fn in_seconds(now: Moment, seconds: i64) -> Moment {
    now + Duration::from_secs(u64::try_from(seconds).unwrap_or(0).max(1))
}
