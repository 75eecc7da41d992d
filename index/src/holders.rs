//! The pods that hold devices, by node: the candidates of preemptions.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;
use std::sync::Arc;

use tessera_allocator::model::{
    ClusterSnapshot, Device, DeviceId, DeviceUsage, PendingPod, PodUid, PoolId, Slice, Usage,
};
use tessera_allocator::preemption::{HeldClaim, Holder, HolderGroup, NodeHolders};
use tessera_api::names::{ClaimUid, DriverName, Namespace, NodeName, PoolName};

use crate::claims::ClaimEntry;
use crate::groups::GroupKey;
use crate::index::Index;
use crate::pods::PodEntry;

impl Index {
    /// Returns the [holders](Self::holders_on) of all nodes that have any.
    pub fn holders(&self) -> BTreeMap<NodeName, NodeHolders> {
        let of = |node: &NodeName| (node.clone(), self.holders_on(node));
        let nodes = self.nodes.keys().map(of);
        nodes.filter(|(_, holders)| !holders.claims.is_empty()).collect()
    }

    /// Returns the pods on a node with devices of ours, and their claims. Pods that wait for a
    /// claim, or use it on another node, are among its users only.
    ///
    /// The cost is that of the node's devices and their claims.
    pub fn holders_on(&self, node: &NodeName) -> NodeHolders {
        let mut holders = NodeHolders::default();
        let mut seen: BTreeSet<&PodUid> = BTreeSet::new();
        let mut groups = BTreeMap::new();
        for entry in self.claims_on(node) {
            let users: Vec<&PodEntry> =
                self.pods_of(entry).filter_map(|uid| self.pods.get(uid)).collect();
            let users = || users.iter().filter(|pod| pod.is_running() || pod.is_waiting());
            holders.claims.push(HeldClaim {
                claim: entry.claim.uid.clone(),
                users: users().map(|pod| pod.uid.clone()).collect(),
                // A PodGroup's reservation ends with the PodGroup (KEP-5729).
                is_kept: entry.reserved_for().iter().any(|consumer| consumer.resource != "pods"),
                results: entry.counted().to_vec(),
            });
            for pod in users().filter(|pod| pod.node.as_ref() == Some(node)) {
                if seen.insert(&pod.uid) {
                    let group = self.group_of(&pod.uid).and_then(|key| {
                        let group = || self.holder_group(key).map(Arc::new);
                        groups.entry(key).or_insert_with(group).clone()
                    });
                    holders.pods.push(Holder { group, ..holder(pod) });
                }
            }
        }
        holders
    }

    /// Returns the pods of a group that hold devices; none if that is one at most.
    fn holder_group(&self, key: &GroupKey) -> Option<HolderGroup> {
        let holding =
            || self.members_of(key).filter(|pod| pod.is_running() && pod.counted_as_holder);
        let members: BTreeSet<PodUid> = holding().map(|pod| pod.uid.clone()).collect();
        let priority = holding().map(|pod| pod.priority).max()?;
        let created = holding().map(|pod| pod.created).min()?;
        (members.len() > 1).then_some(HolderGroup { members, priority, created })
    }

    /// Returns the claims that hold devices of the node's pools.
    fn claims_on(&self, node: &NodeName) -> impl Iterator<Item = &ClaimEntry> {
        let claims: BTreeSet<&ClaimUid> =
            self.devices_on(node).iter().flat_map(|id| self.sums.holders.get(id)).collect();
        claims.into_iter().filter_map(|claim| self.claims.get(claim).map(Box::as_ref))
    }

    /// Returns the names of the slices of the node's pools: those that are named after the node.
    /// Pools of other drivers may have other names, and are not evicted from.
    fn slices_on(&self, node: &NodeName) -> impl Iterator<Item = &String> {
        self.slices_in(PoolName::of_node(node))
    }

    /// Returns the published devices of the node's pools.
    pub(crate) fn devices_on(&self, node: &NodeName) -> Vec<DeviceId> {
        let slices = self.slices_on(node).filter_map(|name| self.slices.get(name));
        let devices = slices.flat_map(|slice| slice.devices.iter().map(move |d| (slice, d)));
        let id = |(slice, device): (&Arc<Slice>, &Arc<Device>)| DeviceId {
            pool: slice.pool.clone(),
            device: device.name.clone(),
        };
        devices.map(id).collect()
    }

    /// Returns the number of nodes, with those that only pods, claims or slices refer to.
    pub fn node_count(&self) -> usize {
        self.nodes.len()
    }

    /// Returns the nodes after this one, or all, in order.
    pub fn nodes_after(&self, node: Option<&NodeName>) -> impl Iterator<Item = &NodeName> {
        let from = node.map_or(Bound::Unbounded, Bound::Excluded);
        self.nodes.range::<NodeName, _>((from, Bound::Unbounded)).map(|(name, _)| name)
    }

    /// Returns a snapshot with these nodes only, as far as they exist, to plan a pod and its group.
    /// Room that is kept for other pods counts as taken if they have at least this priority.
    pub fn snapshot_of_nodes(
        &self,
        nodes: &[NodeName],
        pod: &PendingPod,
        room_from: i32,
    ) -> ClusterSnapshot {
        let usage_of = |id: &DeviceId| self.usage_with_room_for(id, &pod.uid, room_from);
        self.part_with_nodes(nodes, usage_of, [&pod.namespace])
    }

    /// Returns a snapshot with these nodes only, as far as they exist, with the quotas of these
    /// namespaces and this usage of devices.
    pub(crate) fn part_with_nodes<'n>(
        &self,
        nodes: &[NodeName],
        usage_of: impl Fn(&DeviceId) -> Option<DeviceUsage>,
        namespaces: impl IntoIterator<Item = &'n Namespace>,
    ) -> ClusterSnapshot {
        let mut usage = Usage::default();
        for id in nodes.iter().flat_map(|node| self.devices_on(node)) {
            usage.set(&id, usage_of(&id));
        }
        let object = |node: &NodeName| Some((node.clone(), self.nodes.get(node)?.node.clone()?));
        let pool = |node| PoolId { driver: DriverName::ours(), pool: PoolName::of_node(node) };
        let slices = nodes.iter().flat_map(|node| self.slices_on(node));
        let slice = |name: &String| Some((name.clone(), Arc::clone(self.slices.get(name)?)));
        let class =
            |(name, (class, _)): (&_, &(Arc<_>, _))| (Clone::clone(name), Arc::clone(class));
        let quotas = |namespace: &Namespace| (namespace.clone(), self.quota_states(namespace));
        ClusterSnapshot {
            nodes: nodes.iter().filter_map(object).collect(),
            slices: slices.filter_map(slice).collect(),
            classes: self.classes.iter().map(class).collect(),
            usage,
            quotas: namespaces.into_iter().map(quotas).collect(),
            topology: self.topologies.of(nodes.iter().map(pool)),
        }
    }

    /// Returns the lowest priority of the pods that have devices on a node.
    pub fn lowest_priority(&self) -> Option<i32> {
        self.holder_priorities.first_key_value().map(|(priority, _)| *priority)
    }

    /// Returns `spec.priority` of a pod; none if it does not exist.
    pub fn pod_priority(&self, pod: &PodUid) -> Option<i32> {
        self.pods.get(pod).map(|pod| pod.priority)
    }

    /// Returns true if the claim has devices.
    pub fn has_devices(&self, claim: &ClaimUid) -> bool {
        self.claims.get(claim).is_some_and(|entry| !entry.counted().is_empty())
    }

    /// Returns true if the pod, and each of its group, evicts others: `preemptionPolicy` is not
    /// `Never`.
    pub fn is_preempting(&self, pod: &PendingPod) -> bool {
        let mut pods = pod.members().map(|pod| self.pods.get(&pod.uid));
        pods.all(|pod| pod.is_some_and(|pod| pod.is_preempting))
    }
}

fn holder(pod: &PodEntry) -> Holder {
    let counted = pod.counted.as_ref().map(|counted| counted.requests.clone());
    Holder {
        pod: pod.uid.clone(),
        priority: pod.priority,
        created: pod.created,
        is_ending: pod.deleting,
        is_fixed: pod.is_mirror,
        requests: counted.unwrap_or_default(),
        group: None,
    }
}
