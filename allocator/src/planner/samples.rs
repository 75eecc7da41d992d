//! One sample device of each kind of device in the cluster, kept up to date by changed nodes.

use std::collections::{BTreeMap, BTreeSet};

use crate::cluster::{Cluster, NodeIndex, ProfileId};
use crate::fragmentation::GpuType;

/// Devices of one type with one profile are equal to every request, apart from their attributes.
pub(super) type DeviceKind = (GpuType, ProfileId);

/// A device that stands for all of its kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Sample {
    pub(super) node: NodeIndex,
    /// Index in the node's candidates.
    pub(super) candidate: usize,
    pub(super) kind: GpuType,
    pub(super) profile: ProfileId,
}

/// Kinds of devices, and the nodes that reach them.
#[derive(Debug, Default)]
pub(super) struct DeviceSamples {
    /// Cluster time up to which changed nodes are included.
    until: Option<u64>,
    /// By node index.
    of_node: Vec<NodeKinds>,
    nodes: BTreeMap<DeviceKind, BTreeSet<NodeIndex>>,
    /// One sample per kind, on the node with the lowest index.
    samples: Vec<Sample>,
}

/// Kinds of the allocatable devices that a node reaches, each with the first candidate.
#[derive(Debug, Default)]
struct NodeKinds {
    /// [`NodeEntry::layout`](crate::cluster::NodeEntry::layout) at the time.
    layout: u64,
    kinds: Vec<(DeviceKind, usize)>,
}

impl DeviceSamples {
    /// Includes the nodes that have changed since the last call.
    pub(super) fn refresh(&mut self, cluster: &mut Cluster) {
        let changed = self.until.and_then(|until| cluster.changed_since(until));
        let changed: Vec<NodeIndex> = match changed {
            Some(changed) => changed.to_vec(),
            None => (0..cluster.nodes.len()).collect(),
        };
        self.until = Some(cluster.now());
        self.of_node.resize_with(cluster.nodes.len(), NodeKinds::default);
        let mut is_outdated = false;
        for node in changed {
            is_outdated |= self.refresh_node(node, cluster);
        }
        if is_outdated {
            self.choose();
        }
    }

    /// Returns true if the node reaches other devices than before.
    fn refresh_node(&mut self, node: NodeIndex, cluster: &mut Cluster) -> bool {
        let layout = cluster.nodes[node].layout;
        if self.of_node[node].layout == layout {
            return false;
        }
        cluster.gather(node);
        let mut kinds: Vec<(DeviceKind, usize)> = Vec::new();
        let candidates = cluster.reachable(node).map_or(&[][..], |reachable| &reachable.candidates);
        for (candidate, found) in candidates.iter().enumerate() {
            let compiled = found.compiled();
            let kind = (compiled.kind, compiled.profile);
            let is_gpu = compiled.device.is_gpu();
            if is_gpu && !kinds.iter().any(|(known, _)| *known == kind) {
                kinds.push((kind, candidate));
            }
        }
        let old = std::mem::replace(&mut self.of_node[node], NodeKinds { layout, kinds });
        for (kind, _) in &old.kinds {
            if let Some(nodes) = self.nodes.get_mut(kind) {
                nodes.remove(&node);
                if nodes.is_empty() {
                    self.nodes.remove(kind);
                }
            }
        }
        for (kind, _) in &self.of_node[node].kinds {
            self.nodes.entry(*kind).or_default().insert(node);
        }
        true
    }

    fn choose(&mut self) {
        let sample = |(kind, nodes): (&DeviceKind, &BTreeSet<NodeIndex>)| {
            let node = *nodes.first()?;
            let (_, candidate) =
                self.of_node[node].kinds.iter().find(|(known, _)| known == kind)?;
            Some(Sample { node, candidate: *candidate, kind: kind.0, profile: kind.1 })
        };
        self.samples = self.nodes.iter().filter_map(sample).collect();
        self.samples.sort_unstable();
    }

    /// Returns one sample per kind, by node and candidate.
    pub(super) fn samples(&self) -> &[Sample] {
        &self.samples
    }

    /// Returns the GPU types that the node reaches.
    pub(super) fn types_of(&self, node: NodeIndex) -> impl Iterator<Item = GpuType> {
        let kinds = self.of_node.get(node).map_or(&[][..], |of_node| &of_node.kinds);
        kinds.iter().map(|((kind, _), _)| *kind)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use proptest::prelude::*;
    use tessera_api::names::{DeviceName, DriverName, NodeName, PoolName};

    use super::*;
    use crate::features::FeatureGates;
    use crate::model::{Attribute, Device, Node, NodeChoice, PoolId, Slice};

    const NODES: usize = 4;

    fn name(node: usize) -> NodeName {
        NodeName::new(format!("node-{node}")).expect("a name")
    }

    fn node_object(node: usize) -> Node {
        Node {
            name: name(node),
            labels: Default::default(),
            ready: true,
            cordoned: false,
            taints: Vec::new(),
            allocatable: Default::default(),
            used: Default::default(),
            releasable: Default::default(),
        }
    }

    fn slice(node: usize, products: &[u8]) -> Arc<Slice> {
        let device = |(index, product): (usize, &u8)| {
            let name = DeviceName::new(format!("gpu-{index}")).expect("a name");
            let product = Attribute::String(format!("product-{product}").into());
            let attributes = [("productName".to_owned(), product)].into_iter().collect();
            Arc::new(Device { attributes, shared: true, ..Device::new(name) })
        };
        let pool = PoolName::new(name(node).as_str()).expect("a name");
        Arc::new(Slice {
            name: format!("slice-{node}"),
            pool: PoolId { driver: DriverName::ours(), pool },
            generation: 1,
            slice_count: 1,
            list_position: None,
            nodes: NodeChoice::Node(name(node)),
            devices: products.iter().enumerate().map(device).collect(),
            counter_sets: Vec::new(),
            ignored: false,
        })
    }

    proptest! {
        #[test]
        fn changes_of_nodes_give_the_samples_of_a_new_list(
            changes in prop::collection::vec((0..NODES, prop::option::of(prop::collection::vec(0..3_u8, 0..4))), 1..30),
        ) {
            let mut cluster = Cluster::new(FeatureGates::default());
            let mut samples = DeviceSamples::default();
            for (node, products) in changes {
                match products {
                    Some(products) => {
                        cluster.set_node(&Arc::new(node_object(node)));
                        cluster.set_slice(&slice(node, &products));
                    }
                    None => cluster.remove_node(&name(node)),
                }
                samples.refresh(&mut cluster);
                let mut fresh = DeviceSamples::default();
                fresh.refresh(&mut cluster);
                prop_assert_eq!(samples.samples(), fresh.samples());
                for node in 0..cluster.nodes.len() {
                    prop_assert!(samples.types_of(node).eq(fresh.types_of(node)));
                }
            }
        }
    }
}
