//! Results of the node predicates, which pods with equal scheduling constraints share.

use std::collections::HashMap;
use std::sync::Arc;

use tessera_api::reason::NodeReason;

use crate::cluster::{Cluster, NodeIndex};
use crate::model::SchedulingConstraints;

/// Maximum number of results of all constraints, of about 32 bytes each. Tenants choose the
/// constraints; beyond it all are dropped.
const MAX_RESULTS: usize = 400_000;

/// Results per node, by scheduling constraints.
#[derive(Debug, Default)]
pub(super) struct NodeTests {
    of: HashMap<Arc<SchedulingConstraints>, NodeRejections>,
}

/// The first predicate that rejects each node.
#[derive(Debug, Default)]
pub(super) struct NodeRejections {
    /// Time up to which all changes of nodes are included; `None` if no node is tested.
    until: Option<u64>,
    of_node: Vec<Option<NodeReason>>,
}

impl NodeTests {
    /// Takes out the results for these constraints.
    pub(super) fn take(&mut self, constraints: &SchedulingConstraints) -> NodeRejections {
        self.of.remove(constraints).unwrap_or_default()
    }

    /// Puts the results back.
    pub(super) fn put(&mut self, constraints: &Arc<SchedulingConstraints>, of: NodeRejections) {
        let results: usize = self.of.values().map(|of| of.of_node.len()).sum();
        if results > MAX_RESULTS {
            self.of.clear();
        }
        self.of.insert(Arc::clone(constraints), of);
    }
}

impl NodeRejections {
    /// Tests the nodes that have changed.
    pub(super) fn refresh(
        &mut self,
        cluster: &Cluster,
        test: impl Fn(NodeIndex) -> Option<NodeReason>,
    ) {
        let count = cluster.nodes.len();
        let touched = self.until.and_then(|until| cluster.touched_since(until));
        self.of_node.resize(count, None);
        match touched {
            Some(touched) => {
                touched.iter().for_each(|node| self.of_node[*node] = test(*node));
            }
            None => (0..count).for_each(|node| self.of_node[node] = test(node)),
        }
        self.until = Some(cluster.last_touch());
    }

    /// Returns the first predicate that rejects the node.
    pub(super) fn get(&self, node: NodeIndex) -> Option<&NodeReason> {
        self.of_node[node].as_ref()
    }
}
