//! The last plan of a backlog, which is the next one too until something changes.

use super::Planner;
use crate::outcome::{AllocationPlan, PlanWork, Refusal};
use crate::settings::PlanSettings;

/// A plan that decided nothing, and of what it was made.
#[derive(Debug)]
pub(crate) struct LastPlan {
    plan: AllocationPlan,
    inputs: PlanInputs,
    /// Time of the plan, in seconds since the epoch.
    made_at: i64,
}

/// Inputs of a plan, apart from the pods. Equal inputs with the same pods lead to the same
/// plan until its [`replan_at`](AllocationPlan::replan_at).
#[derive(Debug, PartialEq)]
pub(super) struct PlanInputs {
    /// Without the time and the number of steps for reasons.
    settings: PlanSettings,
    /// Times of the last changes of nodes, of their devices and of the reachable pools.
    changes: [u64; 4],
    /// Number of changes of all else: classes, topologies, namespaces without selectors.
    others: u64,
}

impl LastPlan {
    /// Keeps a plan, unless it can differ from the next one although nothing changes.
    pub(super) fn keep(plan: &AllocationPlan, inputs: PlanInputs, now: i64) -> Option<Box<Self>> {
        let is_final = plan.decisions.is_empty()
            && plan.unreached.is_empty()
            && plan.to_compile.is_empty()
            && !plan.has_old_reasons
            && !plan.refusals.iter().any(Refusal::is_undecided);
        is_final.then(|| {
            let mut plan = AllocationPlan {
                steps: 0,
                selector_steps: Default::default(),
                long_search_steps: Default::default(),
                to_compile: Default::default(),
                work: PlanWork::default(),
                ..plan.clone()
            };
            plan.alike.iter_mut().for_each(|alike| alike.is_news = false);
            Box::new(Self { plan, inputs, made_at: now })
        })
    }

    /// Returns the plan for these inputs at this time; `None` if another one has to be made.
    pub(super) fn for_inputs(&self, inputs: &PlanInputs, now: i64) -> Option<AllocationPlan> {
        let is_valid = now >= self.made_at && self.plan.replan_at.is_none_or(|until| now < until);
        (is_valid && self.inputs == *inputs).then(|| self.plan.clone())
    }
}

impl Planner {
    /// Returns what a plan with these settings depends on now.
    pub(super) fn inputs(&self, settings: PlanSettings) -> PlanInputs {
        let cluster = &self.cluster;
        let changes = [cluster.last_touch(), cluster.now(), cluster.layout(), cluster.reordered()];
        // A plan with old reasons is not kept.
        let steps_for_reasons = settings.steps_for_reasons.map(|_| 0);
        let settings = PlanSettings { now: 0, steps_for_reasons, ..settings };
        PlanInputs { settings, changes, others: self.other_changes }
    }
}
