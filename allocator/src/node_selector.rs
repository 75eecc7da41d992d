//! Node selector of an allocation.

use std::collections::BTreeSet;

use tessera_api::names::NodeName;

use crate::cluster::{Candidate, ReachableDevices};
use crate::model::{NodeAffinityTerm, NodeChoice, NodeSelector, Requirement};
use crate::shape::Chosen;

/// Returns the nodes on which devices chosen on `node` can be used; `None` means all nodes.
pub(crate) fn of(
    chosen: &[Chosen],
    reachable: &ReachableDevices,
    node: &NodeName,
) -> Option<NodeSelector> {
    let mut merged = NodeAffinityTerm::default();
    for candidate in chosen.iter().map(|c| &reachable.candidates[c.candidate]) {
        let choice = choice(candidate);
        if matches!(choice, NodeChoice::Node(_)) || candidate.device().binds_to_node {
            return Some(NodeSelector::for_node(node));
        }
        if let NodeChoice::Selector(selector) = choice
            && let [term] = selector.terms.as_slice()
        {
            merge(&mut merged.fields, &term.fields);
            merge(&mut merged.labels, &term.labels);
        }
    }
    let nothing = merged.fields.is_empty() && merged.labels.is_empty();
    (!nothing).then(|| NodeSelector { terms: vec![merged] })
}

fn choice(candidate: &Candidate) -> &NodeChoice {
    match candidate.slice().nodes {
        NodeChoice::PerDevice => &candidate.device().nodes,
        _ => &candidate.slice().nodes,
    }
}

/// Adds the requirements that are missing; the order of values does not matter.
fn merge(into: &mut Vec<Requirement>, from: &[Requirement]) {
    let values = |r: &Requirement| r.values.iter().cloned().collect::<BTreeSet<_>>();
    for item in from {
        let same = |r: &Requirement| {
            r.key == item.key && r.operator == item.operator && values(r) == values(item)
        };
        if !into.iter().any(same) {
            into.push(item.clone());
        }
    }
}
