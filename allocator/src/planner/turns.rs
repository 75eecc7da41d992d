//! Which pods come first while plans end before all pods are reached.

use std::collections::{BTreeMap, BTreeSet};

use tessera_api::names::Namespace;

use crate::model::{PendingPod, PodUid};

/// A namespace that has spent this part of the steps of a plan comes after those that have not.
const PART: u64 = 4;

/// What has happened since the last plan that reached all pods; empty after such a plan. Priority and age alone decide as long as
/// there are steps for all pods.
#[derive(Debug, Default)]
pub(super) struct Turns {
    /// The steps that each namespace has spent.
    spent: BTreeMap<Namespace, u64>,
    /// Pods that were refused.
    refused: BTreeSet<PodUid>,
}

impl Turns {
    /// Resets what namespaces have spent where all of the pods are of namespaces that have had their part.
    pub(super) fn begin_plan(&mut self, pods: &[&PendingPod], budget: u64) {
        if pods.iter().all(|pod| self.has_had_its_part(&pod.namespace, 0, budget)) {
            self.spent.clear();
        }
    }

    /// Whether the namespace, which has spent `more` in the plan that is being made, comes after the others.
    pub(super) fn has_had_its_part(&self, namespace: &Namespace, more: u64, budget: u64) -> bool {
        let before = self.spent.get(namespace).copied().unwrap_or(0);
        !self.spent.is_empty() && before.saturating_add(more) >= budget / PART
    }

    /// Whether the pod was refused already.
    pub(super) fn was_refused(&self, pod: &PodUid) -> bool {
        self.refused.contains(pod)
    }

    /// Ends a plan in which the namespaces have spent so much, and which has refused these pods.
    pub(super) fn end_plan<'r>(
        &mut self,
        spent: BTreeMap<Namespace, u64>,
        refused: impl Iterator<Item = &'r PodUid>,
        all_reached: bool,
    ) {
        if all_reached {
            *self = Self::default();
            return;
        }
        for (namespace, steps) in spent {
            let sum = self.spent.entry(namespace).or_default();
            *sum = sum.saturating_add(steps);
        }
        self.refused.extend(refused.cloned());
    }
}
