//! From where an allocation can be used.

use std::collections::BTreeSet;

use tessera_api::names::NodeName;

use crate::cluster::{Candidate, Reach};
use crate::model::{NodeAffinityTerm, NodeChoice, NodeSelector, Requirement};
use crate::search::Chosen;

/// Where an allocation of these devices, chosen on `node`, can be used from; `None` = everywhere.
pub(crate) fn of(chosen: &[Chosen], reach: &Reach, node: &NodeName) -> Option<NodeSelector> {
    let mut merged = NodeAffinityTerm::default();
    for candidate in chosen.iter().map(|c| &reach.candidates[c.candidate]) {
        let choice = choice(candidate);
        if matches!(choice, NodeChoice::Node(_)) || candidate.device().binds_to_node {
            return Some(NodeSelector::of_node(node));
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

/// Adds the requirements that are not there yet; the order of values does not matter.
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
