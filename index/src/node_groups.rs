//! Groups of equal nodes, which a cluster autoscaler extends.

use std::collections::BTreeSet;

use tessera_allocator::model::{ClusterSnapshot, DeviceId, Node, PendingPod, PoolId};
use tessera_api::names::{DriverName, Namespace, NodeName, PoolName};
use tessera_api::quantity::Quantity;

use crate::index::Index;

/// The most nodes with free devices in a snapshot of a group.
const MAX_WITH_ROOM: usize = 32;

impl Index {
    /// Returns true if the node has GPUs, and all ResourceSlices of them are published. The driver
    /// publishes an empty slice on a node on which it finds none yet.
    pub fn publishes_gpus(&self, node: &NodeName) -> bool {
        let id = PoolId { driver: DriverName::ours(), pool: PoolName::of_node(node) };
        let slices = || self.slices_of.get(&id).filter_map(|name| self.published.get(name));
        let Some(newest) = slices().map(|slice| slice.generation).max() else { return false };
        let of_newest = || slices().filter(|slice| slice.generation == newest);
        let published = i64::try_from(of_newest().count()).unwrap_or(i64::MAX);
        of_newest().all(|slice| slice.slice_count == published)
            && of_newest().any(|slice| !slice.devices.is_empty())
    }

    /// Returns the node that new nodes of its group are taken to equal: among those that publish
    /// GPUs, the one with the most CPU that pods without devices leave. A new node has the pods of
    /// DaemonSets only.
    pub fn template_of_group<'n>(
        &self,
        nodes: impl Iterator<Item = &'n NodeName>,
    ) -> Option<&'n NodeName> {
        let cpu_left = |name: &NodeName| {
            let node = self.nodes.get(name)?.node.as_deref()?;
            self.publishes_gpus(name).then(|| cpu_without_devices(node))
        };
        nodes.filter_map(|node| Some((cpu_left(node)?, node))).max().map(|(_, node)| node)
    }

    /// Returns a snapshot with a group's template and some of its `nodes` with free devices, to
    /// plan these pods.
    pub fn snapshot_of_group<'n>(
        &self,
        template: &NodeName,
        nodes: impl Iterator<Item = &'n NodeName>,
        pods: &[PendingPod],
    ) -> ClusterSnapshot {
        let with_room = nodes.filter(|node| *node != template && self.has_free_device(node));
        let mut part = vec![template.clone()];
        part.extend(with_room.take(MAX_WITH_ROOM).cloned());
        let namespaces: BTreeSet<&Namespace> = pods.iter().map(|pod| &pod.namespace).collect();
        self.part_with_nodes(&part, |device| self.usage_with_room(device), namespaces)
    }

    /// Returns true if a GPU of the node has capacity left.
    fn has_free_device(&self, node: &NodeName) -> bool {
        self.devices_on(node).iter().any(|device| self.is_free(device))
    }

    fn is_free(&self, device: &DeviceId) -> bool {
        let Some(used) = self.usage_with_room(device) else { return true };
        let Some(published) = self.published_device(device) else { return false };
        let has_left = |(name, sum): (&String, &Quantity)| {
            published.capacity.get(name).is_some_and(|capacity| *sum < capacity.value)
        };
        used.exclusive == 0 && used.consumed.iter().all(has_left)
    }
}

/// Returns the CPU that pods without devices leave on a node.
fn cpu_without_devices(node: &Node) -> Quantity {
    let cpu = |resources: &tessera_allocator::model::NameMap<Quantity>| {
        resources.get("cpu").copied().unwrap_or_default()
    };
    let with_devices = cpu(&node.allocatable).checked_add(cpu(&node.releasable));
    with_devices.and_then(|sum| sum.checked_sub(cpu(&node.used))).unwrap_or_default()
}
