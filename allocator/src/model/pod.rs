//! Pods that wait for devices.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use tessera_api::names::{ClaimName, ClaimUid, Namespace, NodeName, PodName};
use tessera_api::quantity::Quantity;

use super::claim::Claim;
use super::node::{NodeSelector, PodToleration};

/// A pod's UID.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PodUid(Arc<str>);

impl PodUid {
    /// A UID as the API server made it.
    pub fn new(uid: &str) -> Self {
        Self(uid.into())
    }

    /// The UID as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl std::fmt::Display for PodUid {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

/// A pod that is not bound, with at least one claim for us to allocate.
#[derive(Debug, Clone)]
pub struct PendingPod {
    /// Its UID.
    pub uid: PodUid,
    /// Its namespace.
    pub namespace: Namespace,
    /// Its name.
    pub name: PodName,
    /// `spec.priority`: higher is planned first.
    pub priority: i32,
    /// Creation in seconds since the epoch: older is planned first among equals.
    pub created: i64,
    /// Its claims, in pod order, without those that other drivers are asked for and are not
    /// allocated yet.
    pub claims: Vec<PodClaim>,
    /// What it demands of its node.
    pub scheduling: Arc<Scheduling>,
    /// `status.nominatedNodeName`: preemption has just made room there, so it is tried first.
    pub nominated: Option<NodeName>,
    /// Nodes on which it could not run although its devices were there; not tried until the caller
    /// takes them off.
    pub excluded: BTreeSet<NodeName>,
}

impl PendingPod {
    /// Its claims to be allocated, in pod order.
    pub fn pending_claims(&self) -> impl Iterator<Item = &Arc<Claim>> {
        self.claims.iter().filter_map(|claim| match claim {
            PodClaim::Pending(claim) => Some(claim),
            PodClaim::Allocated { .. } => None,
        })
    }
}

/// A claim of a pending pod.
#[derive(Debug, Clone)]
pub enum PodClaim {
    /// To be allocated.
    Pending(Arc<Claim>),
    /// Allocated, by whomever: the pod has to go where it is.
    Allocated {
        /// The claim.
        uid: ClaimUid,
        /// Its name.
        name: ClaimName,
        /// `status.allocation.nodeSelector`; none = usable everywhere.
        nodes: Option<NodeSelector>,
    },
}

/// What a pod demands of its node.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Scheduling {
    /// `spec.nodeSelector`.
    pub node_selector: BTreeMap<String, String>,
    /// `requiredDuringSchedulingIgnoredDuringExecution` of the node affinity.
    pub affinity: Option<NodeSelector>,
    /// Tolerations of node taints.
    pub tolerations: Vec<PodToleration>,
    /// What it requests in all, `pods: 1` included.
    pub requests: BTreeMap<String, Quantity>,
}
