//! Evictions after which a pod would fit.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;
use tessera_allocator::PlanSettings;
use tessera_allocator::model::{ClusterSnapshot, PendingPod, PodUid};
use tessera_allocator::preemption::{NodeHolders, preempt};
use tessera_api::names::NodeName;
use tessera_index::Index;

/// Evictions of pods of lower priority, and the nodes where the pod and its group would then fit.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PossiblePreemption {
    /// The nodes; more than one only for the pods of a group.
    pub nodes: Vec<String>,
    /// The number of pods that would fit together.
    pub pods: usize,
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

/// The search for evictions in a cluster.
pub(crate) struct Preemptions<'v> {
    index: &'v Index,
    cluster: ClusterSnapshot,
    holders: BTreeMap<NodeName, NodeHolders>,
    settings: PlanSettings,
}

impl<'v> Preemptions<'v> {
    /// Returns the search in the cluster of an index.
    pub(crate) fn new(index: &'v Index, settings: PlanSettings) -> Self {
        Self { index, cluster: index.snapshot(), holders: index.holders(), settings }
    }

    /// Returns the evictions for a pod that does not fit; `None` if none help, or the pod does not
    /// preempt others.
    pub(crate) fn of(&self, pending: &PendingPod) -> Option<PossiblePreemption> {
        if !self.index.is_preempting(pending) {
            return None;
        }
        let found = preempt(&self.cluster, pending, &self.holders, self.settings)?;
        let nodes: BTreeSet<&NodeName> = found.decisions.iter().map(|one| &one.node).collect();
        let nodes = nodes.into_iter().map(ToString::to_string).collect();
        let victim = |uid: &PodUid| {
            let (namespace, name) = self.index.pod_name(uid)?;
            let priority = self.index.pod_priority(uid)?;
            Some(Victim { namespace: namespace.to_string(), pod: name.to_string(), priority })
        };
        let victims = found.victims.iter().filter_map(victim).collect();
        Some(PossiblePreemption { nodes, pods: pending.members().count(), victims })
    }
}

impl PossiblePreemption {
    /// Returns the evictions in one sentence.
    pub(crate) fn text(&self) -> String {
        let name = |victim: &Victim| {
            format!("{}/{} (priority {})", victim.namespace, victim.pod, victim.priority)
        };
        let victims: Vec<String> = self.victims.iter().map(name).collect();
        let what = match self.pods {
            0 | 1 => "It".to_owned(),
            pods => format!("The group of {pods} pods"),
        };
        let node = if self.nodes.len() == 1 { "node" } else { "nodes" };
        let nodes = self.nodes.join(", ");
        if victims.is_empty() {
            let fits = if self.pods > 1 { "would fit" } else { "fits" };
            return format!("{what} {fits} on {node} {nodes} once pods there have ended.");
        }
        let victims = victims.join(", ");
        format!("{what} would fit on {node} {nodes} if these pods were evicted: {victims}.")
    }

    /// Returns advice for the user of the pod.
    pub(crate) fn hint(&self) -> &'static str {
        match self.victims.is_empty() {
            true => "wait until they have ended: the controller keeps their devices for the pod",
            false => {
                "wait: the controller evicts them, unless `controller.preemption` is `never` or a \
                 PodDisruptionBudget refuses; the pod's events tell"
            }
        }
    }
}
