//! Demand for nodes: the number of nodes of a group that a cluster autoscaler has to add, so that
//! pods get devices that fit on no node.
//!
//! The pods are planned on the nodes of the group and on unused copies of one of them, its
//! template. Copies that get a pod are the demand.

use std::collections::BTreeSet;
use std::sync::Arc;

use tessera_api::names::{HOST_NAME_LABEL, NodeName, PoolName};

use crate::features::FeatureGates;
use crate::model::{
    ClusterSnapshot, Device, Node, NodeChoice, NodeTaint, PendingPod, PodUid, PoolId, Slice,
};
use crate::outcome::Decision;
use crate::planner::Planner;
use crate::policy::Policy;
use crate::settings::PlanSettings;

/// Prefixes of the keys of taints that a new node does not have: those that Kubernetes sets for
/// conditions of a node, and those that Cluster Autoscaler sets before it removes one.
const TRANSIENT_TAINTS: [&str; 3] = [
    "node.kubernetes.io/",
    "ToBeDeletedByClusterAutoscaler",
    "DeletionCandidateOfClusterAutoscaler",
];

/// Prefix of the names of copies. They come after all others, so a node that exists is chosen
/// before an equal copy.
const COPY_PREFIX: &str = "zz-new-node";

/// The nodes to add for a group of nodes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NodeDemand {
    /// Number of nodes.
    pub nodes: usize,
    /// Pods that would get their devices on these nodes.
    pub pods: BTreeSet<PodUid>,
    /// Pods that would get their devices on nodes of the group that exist.
    pub on_existing: BTreeSet<PodUid>,
}

/// Returns how many copies of node `template`, at most `maximum`, these pods need.
///
/// `snapshot` has the nodes of the group, with what is free on them. A copy has the template's
/// devices without taints and the requests of the template's pods without devices. It has neither
/// taints for the condition of a node nor those of an autoscaler. Without the template in the
/// snapshot there is no demand.
pub fn node_demand(
    snapshot: &ClusterSnapshot,
    template: &NodeName,
    maximum: usize,
    pods: &[PendingPod],
    settings: PlanSettings,
) -> NodeDemand {
    let Some(node) = snapshot.nodes.get(template) else { return NodeDemand::default() };
    let template = Template::of(snapshot, node);
    let mut extended = snapshot.clone();
    let mut copies = BTreeSet::new();
    for number in 0..maximum {
        if let Some(name) = template.copy_to(&mut extended, number) {
            copies.insert(name);
        }
    }
    // Few nodes with many pods instead of many with few.
    let settings = PlanSettings { policy: Policy::Binpack, reservation_delay: None, ..settings };
    let mut planner = Planner::from_snapshot(&extended, FeatureGates::default());
    // The planner of the cluster has them compiled.
    planner.leave_long_selectors();
    let mut demand = NodeDemand::default();
    let mut nodes = BTreeSet::new();
    for Decision { pod, node, .. } in planner.plan(pods, settings).decisions {
        if copies.contains(&node) {
            nodes.insert(node);
            demand.pods.insert(pod);
        } else {
            demand.on_existing.insert(pod);
        }
    }
    demand.nodes = nodes.len();
    demand
}

/// The node that copies are made of.
struct Template<'s> {
    node: Node,
    /// Its slices; the devices have no taints.
    slices: Vec<Slice>,
    snapshot: &'s ClusterSnapshot,
}

impl<'s> Template<'s> {
    fn of(snapshot: &'s ClusterSnapshot, node: &Node) -> Self {
        let is_own = |slice: &&Arc<Slice>| slice.nodes == NodeChoice::Node(node.name.clone());
        let slices = snapshot.slices.values().filter(is_own).map(|slice| untainted(slice));
        let slices = slices.collect();
        let mut used = node.used.clone();
        for (name, amount) in &node.releasable {
            let left = used.get(name).and_then(|sum| sum.checked_sub(*amount));
            used.insert(name.clone(), left.unwrap_or_default());
        }
        let is_lasting = |taint: &&NodeTaint| {
            !TRANSIENT_TAINTS.iter().any(|prefix| taint.key.starts_with(prefix))
        };
        let node = Node {
            ready: true,
            cordoned: false,
            taints: node.taints.iter().filter(is_lasting).cloned().collect(),
            used,
            releasable: Default::default(),
            ..node.clone()
        };
        Self { node, slices, snapshot }
    }

    /// Adds a copy to the cluster. Returns its name; none if a node has that name.
    fn copy_to(&self, cluster: &mut ClusterSnapshot, number: usize) -> Option<NodeName> {
        let name = NodeName::new(format!("{COPY_PREFIX}-{number}")).ok()?;
        if cluster.nodes.contains_key(&name) {
            return None;
        }
        let mut node = Node { name: name.clone(), ..self.node.clone() };
        node.labels.insert(HOST_NAME_LABEL.to_owned(), name.to_string());
        cluster.nodes.insert(name.clone(), Arc::new(node));
        for slice in &self.slices {
            let pool = self.pool_of(&name, &slice.pool);
            if let Some(links) = self.snapshot.topology.get(&slice.pool) {
                Arc::make_mut(&mut cluster.topology).insert(pool.clone(), Arc::clone(links));
            }
            let object = format!("{}-{name}", slice.name);
            let nodes = NodeChoice::Node(name.clone());
            let copy = Slice { name: object.clone(), pool, nodes, ..slice.clone() };
            cluster.slices.insert(object, Arc::new(copy));
        }
        Some(name)
    }

    /// Returns the pool of the copy that corresponds to one of the template.
    fn pool_of(&self, copy: &NodeName, pool: &PoolId) -> PoolId {
        let named_after_node = PoolName::of_node(&self.node.name);
        let name = if pool.pool == named_after_node {
            PoolName::of_node(copy)
        } else {
            PoolName::new(format!("{copy}/{}", pool.pool))
                .unwrap_or_else(|_| PoolName::of_node(copy))
        };
        PoolId { driver: pool.driver.clone(), pool: name }
    }
}

fn untainted(slice: &Slice) -> Slice {
    let without = |device: &Arc<Device>| {
        if device.taints.is_empty() {
            return Arc::clone(device);
        }
        Arc::new(Device { taints: Vec::new(), ..(**device).clone() })
    };
    Slice { devices: slice.devices.iter().map(without).collect(), ..slice.clone() }
}
