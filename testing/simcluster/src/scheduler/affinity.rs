//! Node selectors of pods and of allocated claims.

use k8s_openapi::api::core::v1::{
    Node, NodeSelector, NodeSelectorRequirement, NodeSelectorTerm, Pod,
};
use kube::ResourceExt;

/// Returns true if the node matches the pod's `nodeSelector` and required node affinity.
pub(super) fn pod_allows(pod: &Pod, node: &Node) -> bool {
    let Some(spec) = &pod.spec else { return true };
    let labels = node.labels();
    let simple =
        spec.node_selector.iter().flatten().all(|(key, value)| labels.get(key) == Some(value));
    let required =
        spec.affinity.as_ref().and_then(|affinity| affinity.node_affinity.as_ref()).and_then(
            |affinity| affinity.required_during_scheduling_ignored_during_execution.as_ref(),
        );
    simple && required.is_none_or(|selector| matches(selector, node))
}

/// Returns true if one of the selector's terms matches.
pub(super) fn matches(selector: &NodeSelector, node: &Node) -> bool {
    selector.node_selector_terms.iter().any(|term| term_matches(term, node))
}

fn term_matches(term: &NodeSelectorTerm, node: &Node) -> bool {
    let expressions = term.match_expressions.as_deref().unwrap_or_default();
    let fields = term.match_fields.as_deref().unwrap_or_default();
    // A term without any requirement matches nothing.
    (!expressions.is_empty() || !fields.is_empty())
        && expressions.iter().all(|requirement| {
            requirement_matches(
                requirement,
                node.labels().get(&requirement.key).map(String::as_str),
            )
        })
        && fields.iter().all(|requirement| {
            requirement.key == "metadata.name"
                && requirement_matches(requirement, node.metadata.name.as_deref())
        })
}

fn requirement_matches(requirement: &NodeSelectorRequirement, value: Option<&str>) -> bool {
    let values = requirement.values.as_deref().unwrap_or_default();
    let listed = value.is_some_and(|value| values.iter().any(|wanted| wanted == value));
    let numbers = || Some((value?.parse::<i64>().ok()?, values.first()?.parse::<i64>().ok()?));
    match requirement.operator.as_str() {
        "In" => listed,
        "NotIn" => !listed,
        "Exists" => value.is_some(),
        "DoesNotExist" => value.is_none(),
        "Gt" => numbers().is_some_and(|(have, bound)| have > bound),
        "Lt" => numbers().is_some_and(|(have, bound)| have < bound),
        _ => false,
    }
}
