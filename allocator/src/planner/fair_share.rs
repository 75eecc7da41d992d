//! Order of pods while plans end before all pods are reached: namespaces share the steps fairly.

use std::collections::BTreeMap;
use std::sync::Arc;

use tessera_api::names::Namespace;
use tessera_api::reason::NodeReason;

use super::shapes::ShapeId;
use crate::model::{PendingPod, PodUid, Scheduling};
use crate::outcome::Cause;

/// The share of a namespace is one part in so many of a plan's steps.
const PART: u64 = 4;

/// An explanation for all pods of one shape and the same demands.
#[derive(Debug)]
pub(super) struct CommonExplanation {
    pub(super) shape: ShapeId,
    pub(super) scheduling: Arc<Scheduling>,
    /// The reason that the pods are given for the node that is kept free.
    pub(super) kept_off: Option<NodeReason>,
    /// Per claim.
    pub(super) causes: Vec<Arc<Cause>>,
}

impl CommonExplanation {
    /// Returns `true` if it holds for pods of this shape, with these demands and this reason.
    pub(super) fn is_for(
        &self,
        shape: ShapeId,
        scheduling: &Arc<Scheduling>,
        kept_off: Option<&NodeReason>,
    ) -> bool {
        self.shape == shape && self.scheduling == *scheduling && self.kept_off.as_ref() == kept_off
    }
}

/// Steps spent and pods refused since the last plan that reached all pods; empty after such a plan.
/// Priority and age alone decide as long as there are steps for all pods.
#[derive(Debug, Default)]
pub(super) struct FairShare {
    /// The steps that each namespace has spent.
    spent: BTreeMap<Namespace, u64>,
    /// Pods that were refused, with the time of the cluster then.
    refused: BTreeMap<PodUid, u64>,
    /// Explanations of the plans so far: plans that go on do not make them again.
    explained: Vec<CommonExplanation>,
}

impl FairShare {
    /// Resets the steps spent if all of the pods are of namespaces that exceed their share.
    pub(super) fn begin_plan(&mut self, pods: &[&PendingPod], budget: u64) {
        if pods.iter().all(|pod| self.exceeds_share(&pod.namespace, 0, budget)) {
            self.spent.clear();
        }
    }

    /// Returns `true` if the namespace, which has spent `more` in the plan under way, exceeds its
    /// share of a plan's steps.
    pub(super) fn exceeds_share(&self, namespace: &Namespace, more: u64, budget: u64) -> bool {
        let before = self.spent.get(namespace).copied().unwrap_or(0);
        !self.spent.is_empty() && before.saturating_add(more) >= budget / PART
    }

    /// Returns `true` if the pod was refused.
    pub(super) fn was_refused(&self, pod: &PodUid) -> bool {
        self.refused.contains_key(pod)
    }

    /// Returns `true` if the pod was refused and the cluster has not changed since.
    pub(super) fn is_answered(&self, pod: &PodUid, now: u64) -> bool {
        self.refused.get(pod) == Some(&now)
    }

    /// Returns the explanations of the plans so far.
    pub(super) fn explained(&self) -> &[CommonExplanation] {
        &self.explained
    }

    /// Ends a plan in which the namespaces have spent so much, and which has refused these pods at
    /// the time `now` of the cluster. `explained`: its explanations, if the next plan goes on
    /// with it.
    pub(super) fn end_plan<'r>(
        &mut self,
        spent: BTreeMap<Namespace, u64>,
        refused: impl Iterator<Item = &'r PodUid>,
        now: u64,
        explained: Option<Vec<CommonExplanation>>,
    ) {
        let Some(explained) = explained else {
            *self = Self::default();
            return;
        };
        for (namespace, steps) in spent {
            let sum = self.spent.entry(namespace).or_default();
            *sum = sum.saturating_add(steps);
        }
        self.refused.extend(refused.map(|pod| (pod.clone(), now)));
        self.explained.extend(explained);
    }
}
