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
    /// Steps for selectors per namespace.
    pub(super) selectors: BTreeMap<Namespace, u64>,
}

impl Budget {
    pub(super) fn new(settings: PlanSettings) -> Self {
        let (of_pod, of_plan) = (settings.steps_per_pod, settings.steps_per_plan);
        let (spent, selectors) = (BTreeMap::new(), BTreeMap::new());
        Self { of_plan, of_pod, left: of_plan, spent, selectors }
    }

    /// Returns the steps for a pod whose search gets further with at least `needed` steps; `None`
    /// if the plan has ended. One search may exceed the steps of the plan, which ends with it.
    pub(super) fn for_pod(&self, needed: u64) -> Option<u64> {
        (self.left > 0).then(|| self.left.max(needed).min(self.of_pod))
    }

    pub(super) fn spent_by(&self, namespace: &Namespace) -> u64 {
        self.spent.get(namespace).copied().unwrap_or(0)
    }

    pub(super) fn spend(&mut self, namespace: &Namespace, steps: u64) {
        self.left = self.left.saturating_sub(steps);
        self.charge(namespace, steps);
    }

    /// Charges a namespace with steps that are not part of the plan.
    pub(super) fn charge(&mut self, namespace: &Namespace, steps: u64) {
        add(&mut self.spent, namespace, steps);
    }

    /// Charges a namespace with steps for selectors, which its other steps contain.
    pub(super) fn charge_selectors(&mut self, namespace: &Namespace, steps: u64) {
        add(&mut self.selectors, namespace, steps);
    }
}

fn add(sums: &mut BTreeMap<Namespace, u64>, namespace: &Namespace, steps: u64) {
    if steps > 0 {
        *sums.entry(namespace.clone()).or_default() += steps;
    }
}
