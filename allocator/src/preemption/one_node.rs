//! The part of a cluster that one node can reach.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use tessera_api::names::NodeName;

use crate::model::{ClusterSnapshot, DeviceId, Node, NodeChoice, PendingPod, PoolId, Slice, Usage};

/// Slices by the node that they belong to.
pub(super) struct SlicesByNode<'s> {
    of_node: BTreeMap<&'s NodeName, Vec<(&'s String, &'s Arc<Slice>)>>,
    others: Vec<(&'s String, &'s Arc<Slice>)>,
}

impl<'s> SlicesByNode<'s> {
    pub(super) fn new(snapshot: &'s ClusterSnapshot) -> Self {
        let mut sorted = Self { of_node: BTreeMap::new(), others: Vec::new() };
        for (name, slice) in &snapshot.slices {
            match &slice.nodes {
                NodeChoice::Node(node) => {
                    sorted.of_node.entry(node).or_default().push((name, slice));
                }
                _ => sorted.others.push((name, slice)),
            }
        }
        sorted
    }

    fn reachable_from(&self, node: &NodeName) -> BTreeMap<String, Arc<Slice>> {
        let own = self.of_node.get(node).into_iter().flatten();
        let all = own.chain(&self.others);
        all.map(|(name, slice)| ((*name).clone(), Arc::clone(slice))).collect()
    }
}

/// Returns the cluster with this node only.
pub(super) fn one_node(
    snapshot: &ClusterSnapshot,
    slices: &SlicesByNode<'_>,
    node: &Arc<Node>,
    pod: &PendingPod,
) -> ClusterSnapshot {
    let slices = slices.reachable_from(&node.name);
    let mut usage = Usage::default();
    for slice in slices.values() {
        for device in &slice.devices {
            let id = DeviceId { pool: slice.pool.clone(), device: device.name.clone() };
            if let Some(used) = snapshot.usage.get(&id) {
                usage.set(&id, Some(used.clone()));
            }
        }
    }
    let quotas = snapshot.quotas.get_key_value(&pod.namespace);
    let pools: BTreeSet<&PoolId> = slices.values().map(|slice| &slice.pool).collect();
    let topology = pools.into_iter().filter_map(|pool| snapshot.topology.get_key_value(pool));
    let topology = topology.map(|(pool, one)| (pool.clone(), Arc::clone(one))).collect();
    ClusterSnapshot {
        nodes: [(node.name.clone(), Arc::clone(node))].into(),
        slices,
        classes: snapshot.classes.clone(),
        usage,
        quotas: quotas.map(|(name, states)| (name.clone(), states.clone())).into_iter().collect(),
        topology: Arc::new(topology),
    }
}
