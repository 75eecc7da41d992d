//! Step budget of a plan.

use std::collections::BTreeMap;

use tessera_api::names::Namespace;

use crate::settings::PlanSettings;

/// Step budget of a plan.
pub(super) struct Budget {
    /// Steps of the whole plan.
    pub(super) of_plan: u64,
    /// Largest number of steps for one pod.
    pub(super) of_pod: u64,
    /// Steps of the plan that are not spent yet.
    pub(super) left: u64,
    /// Steps spent per namespace.
    pub(super) spent: BTreeMap<Namespace, u64>,
}

impl Budget {
    pub(super) fn new(settings: PlanSettings) -> Self {
        let of_pod = settings.steps_per_pod;
        let of_plan = settings.steps_per_plan.max(of_pod);
        Self { of_plan, of_pod, left: of_plan, spent: BTreeMap::new() }
    }

    pub(super) fn spent_by(&self, namespace: &Namespace) -> u64 {
        self.spent.get(namespace).copied().unwrap_or(0)
    }

    pub(super) fn spend(&mut self, namespace: &Namespace, steps: u64) {
        if steps > 0 {
            self.left = self.left.saturating_sub(steps);
            *self.spent.entry(namespace.clone()).or_default() += steps;
        }
    }
}
