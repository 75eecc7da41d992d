//! The cheap node predicates: what kube-scheduler would refuse anyway is not planned. Everything
//! else is left to it.

use tessera_api::names::ClaimName;
use tessera_api::quantity::Quantity;
use tessera_api::reason::NodeReason;

use std::sync::LazyLock;

use crate::model::{Node, NodeSelector, NodeTaint, PendingPod, Scheduling};

/// The taint that a cordon puts on a node; tolerating it is tolerating the cordon.
static CORDON: LazyLock<NodeTaint> = LazyLock::new(|| NodeTaint {
    key: "node.kubernetes.io/unschedulable".to_owned(),
    value: String::new(),
    effect: "NoSchedule".to_owned(),
});

/// Where a claim of the pod is allocated: the pod can go nowhere else.
#[derive(Clone)]
pub(crate) struct Bound {
    pub(crate) claim: ClaimName,
    pub(crate) nodes: NodeSelector,
}

/// What of a node's own resources counts as used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Room {
    /// All that is.
    Now,
    /// What is left in use once the pods are gone that hold devices of ours there.
    GivenBack,
}

/// The first predicate that keeps `pod` from `node`, given where its other claims are.
pub(crate) fn fault(
    pod: &PendingPod,
    bounds: &[Bound],
    node: &Node,
    room: Room,
) -> Option<NodeReason> {
    if let Some(bound) = bounds.iter().find(|bound| !bound.nodes.matches(node)) {
        return Some(NodeReason::ClaimElsewhere { claim: bound.claim.to_string() });
    }
    if pod.excluded.contains(&node.name) {
        return Some(NodeReason::BackedOff);
    }
    if !node.ready {
        return Some(NodeReason::NotReady);
    }
    let demands = &pod.scheduling;
    let tolerated = |taint| demands.tolerations.iter().any(|t| t.tolerates(taint));
    if node.cordoned && !tolerated(&CORDON) {
        return Some(NodeReason::Cordoned);
    }
    let hard = |effect: &str| effect == "NoSchedule" || effect == "NoExecute";
    if let Some(taint) = node.taints.iter().find(|t| hard(&t.effect) && !tolerated(t)) {
        return Some(NodeReason::Tainted { key: taint.key.clone() });
    }
    if !is_selected(demands, node) {
        return Some(NodeReason::NotSelected);
    }
    let lacking = demands.requests.iter().find(|(name, amount)| {
        let of = |map: &std::collections::BTreeMap<String, Quantity>| {
            map.get(*name).copied().unwrap_or_default()
        };
        let used = match room {
            Room::Now => of(&node.used),
            Room::GivenBack => of(&node.used).saturating_sub(of(&node.held)),
        };
        !amount.is_zero()
            && used.checked_add(**amount).is_none_or(|total| total > of(&node.allocatable))
    });
    lacking.map(|(name, _)| NodeReason::ResourceShort { resource: name.clone() })
}

/// Whether node selector and required affinity select the node.
pub(crate) fn is_selected(demands: &Scheduling, node: &Node) -> bool {
    let labelled =
        demands.node_selector.iter().all(|(key, value)| node.labels.get(key) == Some(value));
    labelled && demands.affinity.as_ref().is_none_or(|affinity| affinity.matches(node))
}
