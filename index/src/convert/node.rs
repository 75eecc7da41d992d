//! Nodes.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1 as api;
use tessera_allocator::model::{NameMap, Node, NodeTaint};
use tessera_api::names::NodeName;
use tessera_api::quantity::Quantity;

use super::{ConvertError, Subject};

/// Reads a Node, without usage.
///
/// # Errors
/// Its name is not one. A quantity that cannot be read counts as zero.
pub fn node(object: &api::Node) -> Result<Node, ConvertError> {
    let subject = Subject::new("Node", object.metadata.name.as_ref());
    let name = object.metadata.name.as_ref().ok_or_else(|| subject.missing("metadata.name"))?;
    let spec = object.spec.clone().unwrap_or_default();
    let status = object.status.as_ref();
    let conditions = status.and_then(|s| s.conditions.as_ref());
    let allocatable = status.and_then(|s| s.allocatable.as_ref());
    Ok(Node {
        name: NodeName::new(name).map_err(subject.field("metadata.name"))?,
        labels: object.metadata.labels.clone().unwrap_or_default(),
        ready: conditions.into_iter().flatten().any(|c| c.type_ == "Ready" && c.status == "True"),
        cordoned: spec.unschedulable == Some(true),
        taints: spec.taints.into_iter().flatten().map(taint).collect(),
        allocatable: amounts(allocatable),
        used: NameMap::new(),
        releasable: NameMap::new(),
    })
}

fn taint(taint: api::Taint) -> NodeTaint {
    NodeTaint { key: taint.key, value: taint.value.unwrap_or_default(), effect: taint.effect }
}

pub(super) fn amounts(
    list: Option<&BTreeMap<String, k8s_openapi::apimachinery::pkg::api::resource::Quantity>>,
) -> NameMap<Quantity> {
    let read = |(name, amount)| Some((String::clone(name), Quantity::try_from(amount).ok()?));
    list.into_iter().flatten().filter_map(read).collect()
}
