//! Results of the node predicates, which pods with equal scheduling constraints share.

use std::collections::HashMap;
use std::sync::Arc;

use tessera_api::reason::NodeReason;

use super::pass::PlanningPass;
use super::pod_to_place::PodToPlace;
use crate::cluster::{Cluster, NodeIndex};
use crate::model::SchedulingConstraints;
use crate::predicate::{self, CountedUsage};

/// Maximum number of results of all constraints, of about 32 bytes each. Tenants choose the
/// constraints; beyond it all are dropped.
const MAX_RESULTS: usize = 400_000;

/// Minimum number of nodes for which results are shared.
const MIN_TESTED: usize = 64;

/// Results per node, by scheduling constraints and assumed usage.
#[derive(Debug, Default)]
pub(super) struct NodeTests {
    of: HashMap<TestKey, NodeRejections>,
}

type TestKey = (Arc<SchedulingConstraints>, CountedUsage);

/// The first predicate that rejects each node.
#[derive(Debug, Default)]
pub(super) struct NodeRejections {
    /// Time up to which all changes of nodes are included; `None` if no node is tested.
    until: Option<u64>,
    of_node: Vec<Option<NodeReason>>,
}

impl NodeTests {
    /// Takes out the results of these tests.
    fn take(&mut self, key: &TestKey) -> NodeRejections {
        self.of.remove(key).unwrap_or_default()
    }

    /// Puts the results back.
    fn put(&mut self, key: TestKey, of: NodeRejections) {
        let results: usize = self.of.values().map(|of| of.of_node.len()).sum();
        if results > MAX_RESULTS {
            self.of.clear();
        }
        self.of.insert(key, of);
    }
}

impl PlanningPass<'_> {
    /// Returns the first predicate that rejects each node for the pod, apart from reservations;
    /// `None` if few `nodes` are to be tested, or if the pod does not share results.
    pub(super) fn take_tested_nodes(
        &mut self,
        to_place: &PodToPlace<'_>,
        counted: CountedUsage,
        nodes: usize,
    ) -> Option<NodeRejections> {
        if nodes < MIN_TESTED || !to_place.has_shared_results() {
            return None;
        }
        let key = (Arc::clone(&to_place.pod.scheduling), counted);
        let mut tested = self.planner.node_tests.take(&key);
        let test = |node| {
            self.node(node).and_then(|n| predicate::rejection(to_place.pod, &[], n, counted))
        };
        tested.refresh(&self.planner.cluster, test);
        Some(tested)
    }

    /// Keeps the results for the next pod with equal constraints.
    pub(super) fn put_tested_nodes(
        &mut self,
        to_place: &PodToPlace<'_>,
        counted: CountedUsage,
        tested: Option<NodeRejections>,
    ) {
        if let Some(tested) = tested {
            let key = (Arc::clone(&to_place.pod.scheduling), counted);
            self.planner.node_tests.put(key, tested);
        }
    }
}

impl NodeRejections {
    /// Tests the nodes that have changed.
    fn refresh(&mut self, cluster: &Cluster, test: impl Fn(NodeIndex) -> Option<NodeReason>) {
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
