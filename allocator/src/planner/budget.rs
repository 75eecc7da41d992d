//! Step budget of a plan.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use tessera_api::names::Namespace;

use crate::outcome::AllocationPlan;
use crate::settings::PlanSettings;
use crate::shape::Selections;

/// Steps beyond which the search of one node is long: about 20 ms of CPU time. It cannot be
/// interrupted, and all other pods wait for it.
pub const LONG_SEARCH: u64 = 40_000;

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
    selectors: BTreeMap<Namespace, u64>,
    /// Steps of long searches per namespace.
    long_searches: BTreeMap<Namespace, u64>,
    /// The first selector of each namespace that has to be compiled.
    to_compile: BTreeMap<Namespace, Arc<str>>,
    /// Namespaces for whose pods no long search begins.
    without_long: BTreeSet<Namespace>,
}

/// Reason why a pod is not searched for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NoSteps {
    /// The steps of the plan are spent.
    OfPlan,
    /// The search is long, and its namespace has no steps for long searches.
    OfNamespace,
}

impl Budget {
    pub(super) fn new(settings: PlanSettings, without_long: BTreeSet<Namespace>) -> Self {
        Self {
            of_plan: settings.steps_per_plan,
            of_pod: settings.steps_per_pod,
            left: settings.steps_per_plan,
            spent: BTreeMap::new(),
            selectors: BTreeMap::new(),
            long_searches: BTreeMap::new(),
            to_compile: BTreeMap::new(),
            without_long,
        }
    }

    /// Returns the steps for a pod whose search gets further with at least `needed` steps. One
    /// search may exceed the steps of the plan, which ends with it.
    ///
    /// # Errors
    /// Returns an error if the plan has ended, or if the namespace has no steps for this search.
    pub(super) fn for_pod(&self, namespace: &Namespace, needed: u64) -> Result<u64, NoSteps> {
        if self.left == 0 {
            return Err(NoSteps::OfPlan);
        }
        if needed > LONG_SEARCH && self.without_long.contains(namespace) {
            return Err(NoSteps::OfNamespace);
        }
        Ok(self.left.max(needed).min(self.of_pod))
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

    /// Charges a namespace with the steps for the selectors of its present pod, which its other
    /// steps contain, and notes the selector that has to be compiled for it.
    pub(super) fn charge_selectors(&mut self, namespace: &Namespace, selections: &Selections) {
        add(&mut self.selectors, namespace, selections.charged());
        if let Some(expression) = selections.uncompiled()
            && !self.to_compile.contains_key(namespace)
        {
            self.to_compile.insert(namespace.clone(), Arc::clone(expression));
        }
    }

    /// Charges a namespace with the steps of a search that needed `needed` steps to get further, if
    /// it was long. The other steps contain them.
    pub(super) fn charge_long(&mut self, namespace: &Namespace, needed: u64, steps: u64) {
        if needed > LONG_SEARCH {
            add(&mut self.long_searches, namespace, steps);
        }
    }

    /// Moves what the caller of the plan has to know into the plan.
    pub(super) fn report(&mut self, plan: &mut AllocationPlan) {
        plan.selector_steps = std::mem::take(&mut self.selectors);
        plan.long_search_steps = std::mem::take(&mut self.long_searches);
        plan.to_compile = std::mem::take(&mut self.to_compile);
    }
}

fn add(sums: &mut BTreeMap<Namespace, u64>, namespace: &Namespace, steps: u64) {
    if steps > 0 {
        *sums.entry(namespace.clone()).or_default() += steps;
    }
}
