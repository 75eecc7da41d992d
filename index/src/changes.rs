//! Changes of the cluster since they were last taken, for an allocator that plans on it.
//!
//! The allocator keeps what it has found out about each node until the node changes, so it gets
//! changes instead of a snapshot for each plan.

use std::collections::BTreeSet;
use std::sync::Arc;

use tessera_allocator::model::{
    DeviceClass, DeviceId, DeviceLoad, DeviceUsage, Node, PoolId, PoolTopology, Slice,
};
use tessera_allocator::{Planner, QuotaState};
use tessera_api::names::{DeviceClassName, Namespace, NodeName};

use crate::index::Index;

/// Names of the objects that have changed since [`Index::take_changes`].
#[derive(Debug, Default)]
pub(crate) struct Changed {
    pub(crate) slices: BTreeSet<String>,
    pub(crate) nodes: BTreeSet<NodeName>,
    pub(crate) classes: BTreeSet<DeviceClassName>,
}

/// Objects that have changed, each as it is now; none = it does not exist any more.
#[derive(Debug, Default)]
pub struct ClusterChanges {
    classes: Vec<(DeviceClassName, Option<Arc<DeviceClass>>)>,
    slices: Vec<(String, Option<Arc<Slice>>)>,
    topologies: Vec<(PoolId, Option<Arc<PoolTopology>>)>,
    usage: Vec<(DeviceId, Option<DeviceUsage>)>,
    loads: Vec<(DeviceId, Option<DeviceLoad>)>,
    nodes: Vec<(NodeName, Option<Arc<Node>>)>,
    quotas: Vec<(Namespace, Vec<QuotaState>)>,
}

impl ClusterChanges {
    /// Updates a planner. It has to get all changes, in order.
    pub fn apply_to(self, planner: &mut Planner) {
        for (name, class) in self.classes {
            match class {
                Some(class) => planner.set_class(&class),
                None => planner.remove_class(&name),
            }
        }
        for (name, slice) in self.slices {
            match slice {
                Some(slice) => planner.set_slice(&slice),
                None => planner.remove_slice(&name),
            }
        }
        for (pool, topology) in self.topologies {
            planner.set_topology(&pool, topology.as_ref());
        }
        for (device, used) in self.usage {
            planner.set_device_use(&device, used.as_ref());
        }
        for (device, load) in self.loads {
            planner.set_device_load(&device, load);
        }
        for (name, node) in self.nodes {
            match node {
                Some(node) => planner.set_node(&node),
                None => planner.remove_node(&name),
            }
        }
        for (namespace, quotas) in self.quotas {
            planner.set_quotas(&namespace, quotas);
        }
    }
}

impl Index {
    /// Returns what has changed since the last call. The first call returns everything.
    pub fn take_changes(&mut self) -> ClusterChanges {
        let Changed { slices, nodes, classes } = std::mem::take(&mut self.changed);
        let loads = self.take_changed_loads();
        let class = |name: DeviceClassName| {
            let class = self.classes.get(&name).map(|(class, _)| Arc::clone(class));
            (name, class)
        };
        let slice = |name: String| {
            let slice = self.slices.get(&name).cloned();
            (name, slice)
        };
        let node = |name: NodeName| {
            let node = self.nodes.get(&name).and_then(|entry| entry.node.clone());
            (name, node)
        };
        let used = std::mem::take(&mut self.sums.unplanned);
        let usage: Vec<_> = used
            .into_iter()
            .map(|device| {
                let used = self.usage_with_room(&device);
                (device, used)
            })
            .collect();
        let namespaces = std::mem::take(&mut self.quotas.unplanned);
        let quotas = namespaces.into_iter().map(|namespace| {
            let states = self.quota_states(&namespace);
            (namespace, states)
        });
        ClusterChanges {
            quotas: quotas.collect(),
            classes: classes.into_iter().map(class).collect(),
            slices: slices.into_iter().map(slice).collect(),
            usage,
            loads,
            nodes: nodes.into_iter().map(node).collect(),
            topologies: self.topologies.take_changed(),
        }
    }
}
