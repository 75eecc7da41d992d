//! The last plan of a backlog, which is the next one too until something changes.

use super::Planner;
use crate::outcome::{AllocationPlan, PlanWork, Refusal};
use crate::settings::PlanSettings;

/// A plan that decided nothing, and of what it was made.
#[derive(Debug)]
pub(crate) struct LastPlan {
    plan: AllocationPlan,
    inputs: PlanInputs,
}

/// Inputs of a plan, apart from the pods. Equal inputs with the same pods lead to the same
/// plan until its [`replan_at`](AllocationPlan::replan_at).
#[derive(Debug, PartialEq)]
pub(super) struct PlanInputs {
    settings: PlanSettings,
    /// Times of the last changes of nodes, of their devices and of the reachable pools.
    changes: [u64; 4],
    /// Number of changes of all else: classes, topologies, namespaces without selectors.
    others: u64,
}

impl LastPlan {
    /// Keeps a plan, unless it can differ from the next one although nothing changes.
    pub(super) fn keep(plan: &AllocationPlan, inputs: PlanInputs) -> Option<Box<Self>> {
        let is_final = plan.decisions.is_empty()
            && plan.unreached.is_empty()
            && !plan.has_old_reasons
            && !plan.refusals.iter().any(Refusal::is_undecided);
        is_final.then(|| {
            let plan = plan.clone();
            let plan = AllocationPlan {
                steps: 0,
                selector_steps: Default::default(),
                work: PlanWork::default(),
                ..plan
            };
            Box::new(Self { plan, inputs })
        })
    }

    /// Returns the plan for these inputs; `None` if another one has to be made.
    pub(super) fn for_inputs(&self, inputs: &PlanInputs) -> Option<AllocationPlan> {
        let (now, made_at) = (inputs.settings.now, self.inputs.settings.now);
        let is_valid = now >= made_at && self.plan.replan_at.is_none_or(|until| now < until);
        let at_that_time = PlanSettings { now: made_at, ..inputs.settings };
        let is_same = at_that_time == self.inputs.settings
            && inputs.changes == self.inputs.changes
            && inputs.others == self.inputs.others;
        (is_valid && is_same).then(|| self.plan.clone())
    }
}

impl Planner {
    /// Returns what a plan with these settings depends on now.
    pub(super) fn inputs(&self, settings: PlanSettings) -> PlanInputs {
        let cluster = &self.cluster;
        let changes = [cluster.last_touch(), cluster.now(), cluster.layout(), cluster.reordered()];
        PlanInputs { settings, changes, others: self.other_changes }
    }
}
