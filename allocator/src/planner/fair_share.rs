//! Fair order of pods while plans run out of steps: namespaces share the steps.

use std::collections::BTreeMap;

use tessera_api::names::Namespace;

use crate::model::{PendingPod, PodUid};

/// A namespace's share is this fraction of the steps of a plan.
const STEP_FRACTION: u64 = 4;

/// Steps spent and pods refused since the last plan that reached all pods.
///
/// It is empty after such a plan. As long as the steps suffice for all pods, only priority and age
/// decide.
#[derive(Debug, Default)]
pub(super) struct FairShare {
    /// Steps spent per namespace.
    spent: BTreeMap<Namespace, u64>,
    /// Refused pods, with the cluster time of the refusal.
    refused: BTreeMap<PodUid, u64>,
}

impl FairShare {
    /// Resets the steps if all pods belong to namespaces that exceed their share.
    pub(super) fn begin_plan<'p>(
        &mut self,
        pods: impl FnOnce() -> Vec<&'p PendingPod>,
        budget: u64,
    ) {
        if self.spent.is_empty() {
            return;
        }
        if pods().iter().all(|pod| self.exceeds_share(&pod.namespace, 0, budget)) {
            self.spent.clear();
        }
    }

    /// Returns true if the namespace exceeds its share of the steps. `more` are the steps that it
    /// has spent in the current plan.
    pub(super) fn exceeds_share(&self, namespace: &Namespace, more: u64, budget: u64) -> bool {
        let before = self.spent.get(namespace).copied().unwrap_or(0);
        !self.spent.is_empty() && before.saturating_add(more) >= budget / STEP_FRACTION
    }

    /// Returns true if the last plan reached all pods.
    pub(super) fn is_idle(&self) -> bool {
        self.spent.is_empty() && self.refused.is_empty()
    }

    /// Returns true if the pod was refused.
    pub(super) fn was_refused(&self, pod: &PodUid) -> bool {
        self.refused.contains_key(pod)
    }

    /// Returns true if the pod was refused and the cluster has not changed since.
    pub(super) fn was_refused_at(&self, pod: &PodUid, now: u64) -> bool {
        self.refused.get(pod) == Some(&now)
    }

    /// Ends a plan: records the steps per namespace, and the pods refused at the cluster time
    /// `now`. All is forgotten if the plan reached all pods.
    pub(super) fn end_plan<'r>(
        &mut self,
        spent: BTreeMap<Namespace, u64>,
        refused: impl Iterator<Item = &'r PodUid>,
        now: u64,
        is_partial: bool,
    ) {
        if !is_partial {
            *self = Self::default();
            return;
        }
        for (namespace, steps) in spent {
            let sum = self.spent.entry(namespace).or_default();
            *sum = sum.saturating_add(steps);
        }
        self.refused.extend(refused.map(|pod| (pod.clone(), now)));
    }
}
