//! Pods that wait for devices.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use tessera_api::names::{ClaimName, ClaimUid, Namespace, NodeName, PodName};
use tessera_api::quantity::Quantity;

use super::NameMap;
use super::claim::Claim;
use super::node::{NodeSelector, PodToleration};

/// UID of a pod.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PodUid(Arc<str>);

impl PodUid {
    /// Creates a UID from the text that the API server assigned.
    pub fn new(uid: &str) -> Self {
        Self(uid.into())
    }

    /// Returns the UID as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl std::fmt::Display for PodUid {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

/// A pod with at least one claim that Tessera must allocate. It is unbound, except in
/// [`Planner::plan_bound_pod`](crate::Planner::plan_bound_pod).
#[derive(Debug, Clone, PartialEq)]
pub struct PendingPod {
    /// UID of the pod.
    pub uid: PodUid,
    /// Namespace of the pod.
    pub namespace: Namespace,
    /// Name of the pod.
    pub name: PodName,
    /// `spec.priority`; pods with a higher priority are planned first.
    pub priority: i32,
    /// Creation time, in seconds since the epoch; among equal priorities older pods come first.
    pub created: i64,
    /// Claims in pod order, without unallocated claims for other drivers.
    pub claims: Vec<PodClaim>,
    /// Scheduling constraints of the pod.
    pub scheduling: Arc<SchedulingConstraints>,
    /// `status.nominatedNodeName`. Preemption freed capacity there, so the node is tried first.
    pub nominated_node: Option<NodeName>,
    /// Nodes that are not tried: the pod could not run there although its devices were allocated.
    /// The caller removes them again.
    pub excluded_nodes: BTreeSet<NodeName>,
    /// The other pods of its group, in its namespace: all of them are decided in the same plan, or
    /// none. Theirs are empty. The group has the priority and the age of this pod.
    pub together_with: Vec<PendingPod>,
    /// Labels that restrict the nodes of the pods of its group; only of the first pod.
    pub topology: Option<Arc<GroupTopology>>,
}

/// The topology of a group: labels of nodes that have one value on the nodes of all of its pods.
/// Without a label that is required, a preferred one only decides which nodes are tried first.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct GroupTopology {
    /// The label that has one value, or the group gets no devices.
    pub required: Option<String>,
    /// The label that has one value if possible.
    pub preferred: Option<String>,
    /// Nodes of pods of the group that have devices already: the others join them.
    pub placed: BTreeSet<NodeName>,
}

impl GroupTopology {
    /// Returns the sets of labels to try, the most restrictive one first.
    pub(crate) fn levels(&self) -> Vec<Vec<&str>> {
        let required: Vec<&str> = self.required.iter().map(String::as_str).collect();
        let mut both = required.clone();
        both.extend(self.preferred.as_deref());
        both.dedup();
        let mut levels = vec![both, required];
        levels.dedup();
        levels.retain(|labels| !labels.is_empty());
        levels
    }
}

impl PendingPod {
    /// Returns the unallocated claims, in pod order.
    pub fn pending_claims(&self) -> impl Iterator<Item = &Arc<Claim>> {
        self.claims.iter().filter_map(|claim| match claim {
            PodClaim::Pending(claim) => Some(claim),
            PodClaim::Allocated { .. } => None,
        })
    }

    /// Returns this pod, and those that are decided together with it.
    pub fn members(&self) -> impl Iterator<Item = &Self> {
        std::iter::once(self).chain(&self.together_with)
    }

    /// Returns the lowest priority of its pods: others are evicted for the group only below it.
    pub fn lowest_priority(&self) -> i32 {
        self.members().map(|pod| pod.priority).min().unwrap_or(self.priority)
    }

    /// Returns true if other pods are decided together with this one, or with regard to a topology.
    pub fn is_group(&self) -> bool {
        !self.together_with.is_empty() || self.topology.is_some()
    }
}

/// A claim of a pending pod.
#[derive(Debug, Clone, PartialEq)]
pub enum PodClaim {
    /// A claim to allocate.
    Pending(Arc<Claim>),
    /// A claim that any allocator has allocated; it restricts the pod to its nodes.
    Allocated {
        /// UID of the claim.
        uid: ClaimUid,
        /// Name of the claim.
        name: ClaimName,
        /// `status.allocation.nodeSelector`; `None` means all nodes.
        nodes: Option<NodeSelector>,
    },
}

/// Scheduling constraints of a pod.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct SchedulingConstraints {
    /// `spec.nodeSelector`.
    pub node_selector: BTreeMap<String, String>,
    /// `requiredDuringSchedulingIgnoredDuringExecution` of the node affinity.
    pub affinity: Option<NodeSelector>,
    /// Tolerations of node taints.
    pub tolerations: Vec<PodToleration>,
    /// Total resource requests, including `pods: 1`.
    pub requests: NameMap<Quantity>,
}
