//! Evictions after which a pod would fit.

use std::collections::BTreeMap;

use serde::Serialize;
use tessera_allocator::model::{ClusterSnapshot, PendingPod, PodUid};
use tessera_allocator::preemption::{NodeHolders, preempt};
use tessera_api::names::NodeName;
use tessera_index::Index;

use super::{SimulatedOutcome, SimulatedPod};
use crate::explain::PlanView;

/// Evictions of pods of lower priority, and the node where the pod would then fit.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SimulatedPreemption {
    /// The node.
    pub node: String,
    /// The pods to evict, the least important first; none if pods that are being deleted make the
    /// room.
    pub victims: Vec<Victim>,
}

/// A pod to evict.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Victim {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub pod: String,
    /// Its priority.
    pub priority: i32,
}

/// The search for evictions, in the cluster after a plan.
pub(super) struct Preemptions<'v> {
    view: &'v PlanView<'v>,
    cluster: ClusterSnapshot,
    holders: BTreeMap<NodeName, NodeHolders>,
}

impl<'v> Preemptions<'v> {
    /// Returns the search. `after` is the index after the view's plan.
    pub(super) fn new(view: &'v PlanView<'v>, after: &Index) -> Self {
        Self { view, cluster: after.snapshot(), holders: after.holders() }
    }

    /// Returns the evictions for a pod that does not fit; `None` if none help, or the pod does not
    /// preempt others.
    pub(super) fn of(&self, pod: &SimulatedPod) -> Option<SimulatedPreemption> {
        if pod.result != SimulatedOutcome::DoesNotFit {
            return None;
        }
        let is_it = |pending: &&PendingPod| {
            pending.namespace.as_str() == pod.namespace && pending.name.as_str() == pod.pod
        };
        let pending = self.view.work.pending.iter().find(is_it)?;
        if self.never_preempts(&pending.uid) {
            return None;
        }
        let found = preempt(&self.cluster, pending, &self.holders, self.view.settings)?;
        let node = found.decision.node;
        let holders = &self.holders.get(&node)?.pods;
        let victim = |uid: &PodUid| {
            let (namespace, name) = self.view.index.pod_name(uid)?;
            let priority = holders.iter().find(|holder| holder.pod == *uid)?.priority;
            Some(Victim { namespace: namespace.to_string(), pod: name.to_string(), priority })
        };
        let victims = found.victims.iter().filter_map(victim).collect();
        Some(SimulatedPreemption { node: node.to_string(), victims })
    }

    fn never_preempts(&self, uid: &PodUid) -> bool {
        let pods = &self.view.snapshot.pods;
        let pod = pods.iter().find(|pod| pod.metadata.uid.as_deref() == Some(uid.as_str()));
        let policy = pod.and_then(|pod| pod.spec.as_ref()?.preemption_policy.as_deref());
        policy == Some("Never")
    }
}

impl SimulatedPreemption {
    /// Returns the evictions in one sentence.
    pub(super) fn text(&self) -> String {
        let name = |victim: &Victim| {
            format!("{}/{} (priority {})", victim.namespace, victim.pod, victim.priority)
        };
        let victims: Vec<String> = self.victims.iter().map(name).collect();
        match victims.as_slice() {
            [] => format!("It fits on node {} once pods there have ended.", self.node),
            _ => format!(
                "It would fit on node {} if these pods were evicted: {}. Tessera does not evict \
                 them.",
                self.node,
                victims.join(", ")
            ),
        }
    }
}
