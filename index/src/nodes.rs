//! Nodes, and the requests of pods that are counted on them.

use std::sync::Arc;

use k8s_openapi::api::core::v1::Node as ApiNode;
use tessera_allocator::model::{NameMap, Node};
use tessera_api::names::NodeName;
use tessera_api::quantity::Quantity;

use crate::convert::{self, ConvertError};
use crate::index::Index;

/// A node and the requests that are counted on it. They stay while the node object does not exist.
#[derive(Debug, Default)]
pub(crate) struct NodeEntry {
    pub(crate) node: Option<Arc<Node>>,
    pub(crate) used: NameMap<Quantity>,
    /// The part of it that pods request that hold devices of ours.
    pub(crate) held: NameMap<Quantity>,
}

impl Index {
    /// Takes over a Node. Returns true if anything changed that planning reads: most changes of
    /// nodes are heartbeats.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn apply_node(&mut self, object: &ApiNode) -> Result<bool, ConvertError> {
        let node = convert::node(object)?;
        let entry = self.nodes.entry(node.name.clone()).or_default();
        let node = Node { used: entry.used.clone(), releasable: entry.held.clone(), ..node };
        let is_news = entry.node.as_deref() != Some(&node);
        if is_news {
            self.changed.nodes.insert(node.name.clone());
            if entry.node.is_none() {
                self.waiting_changes.nodes.insert(node.name.clone());
            }
            entry.node = Some(Arc::new(node));
        }
        Ok(is_news)
    }

    /// Removes a deleted Node.
    pub fn remove_node(&mut self, object: &ApiNode) {
        let Some(name) = object.metadata.name.as_deref().and_then(|n| NodeName::new(n).ok()) else {
            return;
        };
        if let Some(entry) = self.nodes.get_mut(&name) {
            entry.node = None;
            if entry.used.is_empty() {
                self.nodes.remove(&name);
            }
        }
        self.waiting_changes.nodes.insert(name.clone());
        self.changed.nodes.insert(name);
    }

    /// Returns true if the node exists.
    pub(crate) fn has_node(&self, node: &NodeName) -> bool {
        self.nodes.get(node).is_some_and(|entry| entry.node.is_some())
    }
}
