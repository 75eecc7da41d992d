//! Node selectors, in both directions.

use k8s_openapi::api::core::v1 as api;
use tessera_allocator::model::{NodeAffinityTerm, NodeSelector, Requirement, SelectorOperator};

pub(super) fn node_selector(selector: &api::NodeSelector) -> NodeSelector {
    NodeSelector { terms: selector.node_selector_terms.iter().map(term).collect() }
}

fn term(term: &api::NodeSelectorTerm) -> NodeAffinityTerm {
    NodeAffinityTerm {
        labels: term.match_expressions.iter().flatten().map(requirement).collect(),
        fields: term.match_fields.iter().flatten().map(requirement).collect(),
    }
}

const OPERATORS: [(&str, SelectorOperator); 6] = [
    ("In", SelectorOperator::In),
    ("NotIn", SelectorOperator::NotIn),
    ("Exists", SelectorOperator::Exists),
    ("DoesNotExist", SelectorOperator::DoesNotExist),
    ("Gt", SelectorOperator::Gt),
    ("Lt", SelectorOperator::Lt),
];

fn requirement(requirement: &api::NodeSelectorRequirement) -> Requirement {
    let known = OPERATORS.iter().find(|(name, _)| *name == requirement.operator);
    Requirement {
        key: requirement.key.clone(),
        operator: known.map_or(SelectorOperator::Unknown, |(_, operator)| *operator),
        values: requirement.values.clone().unwrap_or_default(),
    }
}

pub(super) fn to_api(selector: &NodeSelector) -> api::NodeSelector {
    let requirements = |list: &[Requirement]| {
        let convert = |r: &Requirement| api::NodeSelectorRequirement {
            key: r.key.clone(),
            operator: OPERATORS
                .iter()
                .find(|(_, o)| *o == r.operator)
                .map_or("", |(name, _)| name)
                .to_owned(),
            values: (!r.values.is_empty()).then(|| r.values.clone()),
        };
        (!list.is_empty()).then(|| list.iter().map(convert).collect())
    };
    let term = |t: &NodeAffinityTerm| api::NodeSelectorTerm {
        match_expressions: requirements(&t.labels),
        match_fields: requirements(&t.fields),
    };
    api::NodeSelector { node_selector_terms: selector.terms.iter().map(term).collect() }
}
