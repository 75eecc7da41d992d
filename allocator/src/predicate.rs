//! Cheap node predicates of kube-scheduler.
//!
//! Pods are not planned on nodes that kube-scheduler would reject. It tests all other predicates
//! itself.

use tessera_api::names::ClaimName;
use tessera_api::quantity::Quantity;
use tessera_api::reason::NodeReason;

use std::sync::LazyLock;

use crate::model::{NameMap, Node, NodeSelector, NodeTaint, PendingPod, SchedulingConstraints};

/// Taint that Kubernetes sets on a cordoned node; a pod that tolerates it ignores the cordon.
static CORDON: LazyLock<NodeTaint> = LazyLock::new(|| NodeTaint {
    key: "node.kubernetes.io/unschedulable".to_owned(),
    value: String::new(),
    effect: "NoSchedule".to_owned(),
});

/// Nodes of an allocated claim, to which its pod is restricted.
#[derive(Clone)]
pub(crate) struct ClaimNodes {
    pub(crate) claim: ClaimName,
    pub(crate) nodes: NodeSelector,
}

/// Resource usage of a node that a predicate assumes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum CountedUsage {
    /// Current usage.
    Current,
    /// Usage after all pods with managed devices on the node have ended.
    AfterRelease,
}

/// Returns the first predicate that rejects `node` for `pod`.
pub(crate) fn rejection(
    pod: &PendingPod,
    claim_nodes: &[ClaimNodes],
    node: &Node,
    counted: CountedUsage,
) -> Option<NodeReason> {
    if let Some(allocated) = claim_nodes.iter().find(|allocated| !allocated.nodes.matches(node)) {
        return Some(NodeReason::ClaimNodeMismatch { claim: allocated.claim.to_string() });
    }
    if pod.excluded_nodes.contains(&node.name) {
        return Some(NodeReason::BackedOff);
    }
    if !node.ready {
        return Some(NodeReason::NotReady);
    }
    let constraints = &pod.scheduling;
    let tolerated = |taint| constraints.tolerations.iter().any(|t| t.tolerates(taint));
    if node.cordoned && !tolerated(&CORDON) {
        return Some(NodeReason::Cordoned);
    }
    let is_blocking = |effect: &str| effect == "NoSchedule" || effect == "NoExecute";
    if let Some(taint) = node.taints.iter().find(|t| is_blocking(&t.effect) && !tolerated(t)) {
        return Some(NodeReason::Tainted { key: taint.key.clone() });
    }
    if !is_selected(constraints, node) {
        return Some(NodeReason::NotSelected);
    }
    let missing = constraints.requests.iter().find(|(name, amount)| {
        let amount_of = |map: &NameMap<Quantity>| map.get(*name).copied().unwrap_or_default();
        let used = match counted {
            CountedUsage::Current => amount_of(&node.used),
            CountedUsage::AfterRelease => {
                amount_of(&node.used).saturating_sub(amount_of(&node.releasable))
            }
        };
        !amount.is_zero()
            && used.checked_add(**amount).is_none_or(|total| total > amount_of(&node.allocatable))
    });
    missing.map(|(name, _)| NodeReason::ResourceShort { resource: name.clone() })
}

/// Returns true if the node matches the node selector and the required affinity.
pub(crate) fn is_selected(constraints: &SchedulingConstraints, node: &Node) -> bool {
    let is_labeled =
        constraints.node_selector.iter().all(|(key, value)| node.labels.get(key) == Some(value));
    is_labeled && constraints.affinity.as_ref().is_none_or(|affinity| affinity.matches(node))
}
