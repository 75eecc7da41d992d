//! Cluster state for planning, interned once and updated by changes.
//!
//! The objects are those of a [`Snapshot`](crate::model::Snapshot).
//!
//! ```text
//! slices --Interner--> CompiledSlice --SliceIndex::gather--> ReachableDevices   per node
//! usage ------------------------------------------------------^
//!
//! An allocation changes the nodes that reach its device.
//! ```
//!
//! Every change of a node's devices gives the node a new *stamp*. Caches store the stamp with each
//! result. Results of unchanged nodes stay valid.

mod change_log;
mod intern;
mod machine_topology;
mod pools;
mod reachable;
mod states;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use tessera_api::names::{DeviceClassName, NodeName};

use crate::features::FeatureGates;
use crate::model::{
    DeviceClass, DeviceId, DeviceLoad, DeviceUsage, Node, NodeChoice, PoolId, PoolTopology, Slice,
    Usage,
};

pub(crate) use intern::{
    CompiledDevice, CompiledSlice, FastMap, Interner, NameId, ProfileId, ValueId,
};
pub(crate) use machine_topology::{MachineTopology, MatrixPositions};
pub(crate) use pools::{NodePool, PoolState};
pub(crate) use reachable::{Candidate, CounterAmount, ReachableDevices};
pub(crate) use states::StateKey;

use change_log::ChangeLog;
use machine_topology::MachineTopologies;
use pools::SliceIndex;
use states::NodeContents;

/// Maximum number of interned values. Beyond it the cluster is renumbered, since most of them must
/// belong to removed devices.
const MAX_VALUES: usize = 2_000_000;

/// Initial distance between the order numbers of neighboring nodes.
const ORDER_GAP: u64 = 1 << 32;

/// Index in [`Cluster::nodes`].
pub(crate) type NodeIndex = usize;

/// A node and its reachable devices.
#[derive(Debug)]
pub(crate) struct NodeEntry {
    pub(crate) name: NodeName,
    /// The Node object; `None` if it was removed.
    pub(crate) node: Option<Arc<Node>>,
    /// Reachable devices; `None` until first used.
    reachable: Option<ReachableDevices>,
    /// Cluster time of the last change of its devices.
    pub(crate) stamp: u64,
    /// Number of changes of the set of reachable devices.
    pub(crate) layout: u64,
    /// Free CPU, in millicores.
    pub(crate) cpu_milli: u64,
}

/// Names of the nodes, by index.
#[derive(Debug, Clone, Default)]
pub(crate) struct NodeNames {
    names: Vec<NodeName>,
    /// Order by name: smaller than that of all nodes with later names. Comparing it is faster than
    /// comparing names.
    order: Vec<u64>,
}

impl NodeNames {
    /// Returns the name of a node.
    pub(crate) fn get(&self, node: NodeIndex) -> &NodeName {
        &self.names[node]
    }

    /// Returns the first of these nodes by name.
    pub(crate) fn first(&self, nodes: impl Iterator<Item = NodeIndex>) -> Option<&NodeName> {
        nodes.min_by_key(|node| self.order[*node]).map(|node| &self.names[node])
    }

    fn set(&mut self, node: NodeIndex, name: NodeName, order: u64) {
        if node == self.names.len() {
            self.names.push(name.clone());
            self.order.push(order);
        }
        (self.names[node], self.order[node]) = (name, order);
    }
}

/// Interned cluster state. See the module documentation.
#[derive(Debug, Default)]
pub(crate) struct Cluster {
    features: FeatureGates,
    pub(crate) interner: Interner,
    slice_index: SliceIndex,
    machines: MachineTopologies,
    pub(crate) nodes: Vec<NodeEntry>,
    by_name: BTreeMap<NodeName, NodeIndex>,
    /// Indexes of removed nodes, for new ones.
    free: Vec<NodeIndex>,
    /// Names of the nodes. Explanations share them.
    names: Arc<NodeNames>,
    pub(crate) classes: BTreeMap<DeviceClassName, Arc<DeviceClass>>,
    usage: Usage,
    loads: FastMap<DeviceId, DeviceLoad>,
    /// Nodes that reach a pool and have their devices collected.
    nodes_by_pool: HashMap<PoolId, BTreeSet<NodeIndex>>,
    reordered: u64,
    /// Number of changes of reachable devices or labels of nodes.
    layout: u64,
    /// True if a policy ranks nodes by free CPU.
    is_cpu_ranked: bool,
    /// True if a policy ranks devices by their measured load.
    is_load_ranked: bool,
    /// Values of attributes that shapes read, per node.
    contents: NodeContents,
    /// Nodes with changed devices.
    changes: ChangeLog,
    /// Nodes with changed devices, or a changed Node object.
    touches: ChangeLog,
}

impl Cluster {
    pub(crate) fn new(features: FeatureGates) -> Self {
        Self { features, ..Self::default() }
    }

    pub(crate) fn features(&self) -> &FeatureGates {
        &self.features
    }

    /// Adds or replaces a slice.
    pub(crate) fn set_slice(&mut self, slice: &Arc<Slice>) {
        self.remove_slice(&slice.name);
        let compiled = self.compile(slice);
        self.slice_index.insert(Arc::new(compiled));
        self.invalidate_nodes_of(slice);
    }

    /// Removes a slice.
    pub(crate) fn remove_slice(&mut self, name: &str) {
        if let Some(old) = self.slice_index.remove(name) {
            self.invalidate_nodes_of(&old.slice);
        }
    }

    fn compile(&mut self, slice: &Arc<Slice>) -> CompiledSlice {
        let mut devices: Vec<CompiledDevice> = Vec::with_capacity(slice.devices.len());
        for device in &slice.devices {
            let compiled = self.interner.device(&slice.pool.driver, device, devices.last());
            devices.push(compiled);
        }
        let driver = self.interner.driver(&slice.pool.driver);
        CompiledSlice { slice: Arc::clone(slice), driver, devices }
    }

    /// Returns true if most interned values must belong to removed devices.
    pub(crate) fn is_full(&self) -> bool {
        self.interner.size() > MAX_VALUES
    }

    /// Interns everything again. All ids handed out before become invalid.
    pub(crate) fn renumber(&mut self) {
        self.interner = Interner::default();
        self.contents = NodeContents::default();
        let slices: Vec<Arc<Slice>> =
            self.slice_index.by_name.values().map(|s| Arc::clone(&s.slice)).collect();
        self.slice_index = SliceIndex::default();
        for slice in &slices {
            let compiled = self.compile(slice);
            self.slice_index.insert(Arc::new(compiled));
        }
        (0..self.nodes.len()).for_each(|node| self.invalidate(node));
    }

    /// Invalidates all nodes that reach the slice's pool, or can reach it now.
    fn invalidate_nodes_of(&mut self, slice: &Slice) {
        let everywhere = |nodes: &NodeChoice| !matches!(nodes, NodeChoice::Node(_));
        if everywhere(&slice.nodes)
            || self.slice_index.of_pool(&slice.pool).any(|s| everywhere(&s.slice.nodes))
        {
            (0..self.nodes.len()).for_each(|node| self.invalidate(node));
            return;
        }
        let mut nodes = self.nodes_by_pool.get(&slice.pool).cloned().unwrap_or_default();
        let of_pool = self.slice_index.of_pool(&slice.pool).map(|s| &s.slice.nodes);
        for choice in of_pool.chain([&slice.nodes]) {
            if let NodeChoice::Node(name) = choice {
                nodes.extend(self.by_name.get(name));
            }
        }
        nodes.into_iter().for_each(|node| self.invalidate(node));
    }

    /// Drops the reachable devices of a node.
    fn invalidate(&mut self, node: NodeIndex) {
        if let Some(reachable) = self.nodes[node].reachable.take() {
            for pool in &reachable.pools {
                if let Some(seen) = self.nodes_by_pool.get_mut(&pool.id) {
                    seen.remove(&node);
                    if seen.is_empty() {
                        self.nodes_by_pool.remove(&pool.id);
                    }
                }
            }
        }
        self.layout += 1;
        self.nodes[node].layout += 1;
        self.mark_changed(node);
    }

    /// Sets the topology of a pool; `None` means unknown.
    pub(crate) fn set_topology(&mut self, pool: &PoolId, topology: Option<&Arc<PoolTopology>>) {
        self.machines.set(pool, topology);
        self.nodes_reaching(pool).into_iter().for_each(|node| self.invalidate(node));
    }

    /// Returns a number that changes when a node reaches other devices or gets other labels.
    pub(crate) fn layout(&self) -> u64 {
        self.layout
    }

    /// Gives the node a new stamp.
    fn mark_changed(&mut self, node: NodeIndex) {
        self.nodes[node].stamp = self.changes.push(node, self.nodes.len());
        self.touch(node);
    }

    /// Records that the node's devices or its Node object have changed.
    pub(crate) fn touch(&mut self, node: NodeIndex) {
        self.touches.push(node, self.nodes.len());
    }

    /// Returns the time of the last change of devices.
    pub(crate) fn now(&self) -> u64 {
        self.changes.now()
    }

    /// Returns the nodes whose devices changed after `then`; `None` if that is too long ago, so any
    /// may have changed.
    pub(crate) fn changed_since(&self, then: u64) -> Option<&[NodeIndex]> {
        self.changes.since(then)
    }

    /// Returns the time of the last change of devices or Node objects.
    pub(crate) fn last_touch(&self) -> u64 {
        self.touches.now()
    }

    /// Returns the nodes touched after `then`; `None` if that is too long ago, so any may have
    /// changed.
    pub(crate) fn touched_since(&self, then: u64) -> Option<&[NodeIndex]> {
        self.touches.since(then)
    }

    /// Returns the names of the nodes.
    pub(crate) fn names(&self) -> &Arc<NodeNames> {
        &self.names
    }

    /// Returns the order of a node by name: smaller than that of all nodes with later names.
    pub(crate) fn order(&self, node: NodeIndex) -> u64 {
        self.names.order[node]
    }

    /// Adds or replaces a node.
    pub(crate) fn set_node(&mut self, node: &Arc<Node>) {
        let Some(&index) = self.by_name.get(&node.name) else {
            self.add_node(node);
            return;
        };
        self.set_cpu(index, node.cpu_milli_left());
        let old = self.nodes[index].node.replace(Arc::clone(node));
        if old.as_ref().is_none_or(|old| old != node) {
            self.touch(index);
        }
        match old {
            // Labels decide which slices the node can reach.
            Some(old)
                if old.labels != node.labels && self.slice_index.has_slices_without_node() =>
            {
                self.invalidate(index)
            }
            // Predicates are evaluated again for each pod.
            Some(old) => self.layout += u64::from(old.labels != node.labels),
            None => {}
        }
    }

    /// Sets the free CPU of a node, in millicores.
    pub(crate) fn set_cpu(&mut self, node: NodeIndex, cpu_milli: u64) {
        let before = std::mem::replace(&mut self.nodes[node].cpu_milli, cpu_milli);
        if self.is_cpu_ranked && before != cpu_milli {
            self.mark_changed(node);
        }
    }

    /// From now on, a change of free CPU gives a node a new stamp.
    pub(crate) fn rank_by_cpu(&mut self) {
        if !self.is_cpu_ranked {
            self.is_cpu_ranked = true;
            (0..self.nodes.len()).for_each(|node| self.mark_changed(node));
        }
    }

    /// Returns true if a policy ranks nodes by free CPU.
    pub(crate) fn is_cpu_ranked(&self) -> bool {
        self.is_cpu_ranked
    }

    fn add_node(&mut self, node: &Arc<Node>) {
        let (name, order) = (node.name.clone(), self.order_between(&node.name));
        let index = self.free.pop().unwrap_or(self.nodes.len());
        Arc::make_mut(&mut self.names).set(index, name.clone(), order);
        if index == self.nodes.len() {
            self.nodes.push(NodeEntry {
                name: name.clone(),
                node: None,
                reachable: None,
                stamp: 0,
                layout: 0,
                cpu_milli: 0,
            });
        }
        let entry = &mut self.nodes[index];
        entry.name = name.clone();
        (entry.node, entry.cpu_milli) = (Some(Arc::clone(node)), node.cpu_milli_left());
        entry.layout += 1;
        self.by_name.insert(name, index);
        self.layout += 1;
        self.mark_changed(index);
    }

    /// Returns a number between those of the neighbors by name. If there is none, all nodes are
    /// renumbered.
    fn order_between(&mut self, name: &NodeName) -> u64 {
        use std::ops::Bound::{Excluded, Unbounded};
        let earlier = self.by_name.range::<NodeName, _>((Unbounded, Excluded(name))).next_back();
        let later = self.by_name.range::<NodeName, _>((Excluded(name), Unbounded)).next();
        let before = earlier.map_or(0, |(_, node)| self.order(*node));
        match later.map(|(_, node)| self.order(*node)) {
            None if before < u64::MAX - ORDER_GAP => before + ORDER_GAP,
            Some(after) if after - before > 1 => before + (after - before) / 2,
            _ => {
                let names = Arc::make_mut(&mut self.names);
                let mut next = 0;
                for &node in self.by_name.values() {
                    next += ORDER_GAP;
                    names.order[node] = next;
                }
                self.reordered += 1;
                self.order_between(name)
            }
        }
    }

    /// Returns the number of renumberings. A sort by older numbers is invalid.
    pub(crate) fn reordered(&self) -> u64 {
        self.reordered
    }

    /// Removes a node. Its index is given to the next new node.
    pub(crate) fn remove_node(&mut self, name: &NodeName) {
        if let Some(index) = self.by_name.remove(name) {
            self.nodes[index].node = None;
            self.invalidate(index);
            self.free.push(index);
        }
    }

    pub(crate) fn node_index(&self, name: &NodeName) -> Option<NodeIndex> {
        self.by_name.get(name).copied()
    }

    /// Returns the existing nodes, by name.
    pub(crate) fn by_name(&self) -> impl Iterator<Item = (NodeIndex, &Arc<Node>)> {
        self.by_name.values().filter_map(|&index| Some((index, self.nodes[index].node.as_ref()?)))
    }

    /// Returns the consumption of a device.
    pub(crate) fn used(&self, device: &DeviceId) -> Option<&DeviceUsage> {
        self.usage.get(device)
    }

    /// Sets the consumption of a device.
    pub(crate) fn set_use(&mut self, device: &DeviceId, used: Option<&DeviceUsage>) {
        if self.usage.get(device) == used {
            return;
        }
        self.usage.set(device, used.cloned());
        for node in self.nodes_reaching(&device.pool) {
            if let Some(reachable) = &mut self.nodes[node].reachable
                && reachable.set_use(device, used)
            {
                self.mark_changed(node);
            }
        }
    }

    /// Returns the nodes that reach the pool and have their devices collected.
    fn nodes_reaching(&self, pool: &PoolId) -> Vec<NodeIndex> {
        self.nodes_by_pool.get(pool).into_iter().flatten().copied().collect()
    }

    /// Sets the measured load of a device; `None` means unknown.
    pub(crate) fn set_load(&mut self, device: &DeviceId, load: Option<DeviceLoad>) {
        let before = match load {
            Some(load) => self.loads.insert(device.clone(), load),
            None => self.loads.remove(device),
        };
        if !self.is_load_ranked || before == load {
            return;
        }
        for node in self.nodes_reaching(&device.pool) {
            let reachable = self.nodes[node].reachable.as_mut();
            if reachable.is_some_and(|reachable| reachable.set_load(device, load)) {
                self.mark_changed(node);
            }
        }
    }

    /// From now on, a change of the measured load of a device gives its nodes new stamps.
    pub(crate) fn rank_by_load(&mut self) {
        if self.is_load_ranked {
            return;
        }
        self.is_load_ranked = true;
        for node in 0..self.nodes.len() {
            if let Some(reachable) = &mut self.nodes[node].reachable {
                reachable.set_loads(&self.loads);
                self.mark_changed(node);
            }
        }
    }

    /// Sets the consumption of all devices.
    pub(crate) fn set_usage(&mut self, usage: &Usage) {
        self.usage = usage.clone();
        (0..self.nodes.len()).for_each(|node| self.invalidate(node));
    }

    /// Collects the reachable devices of the node, unless they are up to date.
    pub(crate) fn gather(&mut self, node: NodeIndex) {
        if self.nodes[node].reachable.is_some() {
            return;
        }
        let Some(object) = self.nodes[node].node.clone() else { return };
        let mut reachable = match self.slice_index.gather(&object, &self.features) {
            Ok(pools) => {
                ReachableDevices::new(pools, &object, &self.interner, &self.usage, &self.features)
            }
            Err(defect) => ReachableDevices::defective(defect),
        };
        if self.is_load_ranked {
            reachable.set_loads(&self.loads);
        }
        for pool in &reachable.pools {
            self.nodes_by_pool.entry(pool.id.clone()).or_default().insert(node);
        }
        self.nodes[node].reachable = Some(reachable);
    }

    /// Returns the reachable devices as if all managed allocations in the node's own pools were
    /// released.
    ///
    /// Matrix positions are included. The second element is true if no other allocation remains
    /// that can be released.
    fn drained(&self, node: NodeIndex) -> Option<(ReachableDevices, bool)> {
        let object = self.nodes[node].node.as_ref()?;
        let pools = self.slice_index.gather(object, &self.features).ok()?;
        let mut stays = Usage::default();
        let mut is_final = true;
        for pool in &pools {
            let is_own = pool.is_only_of(&object.name);
            for device in pool.all_devices().filter(|device| !(is_own && device.is_allocatable())) {
                is_final = false;
                let id = DeviceId { pool: pool.id.clone(), device: device.name.clone() };
                stays.set(&id, self.usage.get(&id).cloned());
            }
        }
        let mut reachable =
            ReachableDevices::new(pools, object, &self.interner, &stays, &self.features);
        let positions = MatrixPositions::new(&reachable, &self.machines);
        reachable.set_positions(positions);
        Some((reachable, is_final))
    }

    /// Returns the inputs of a search on the [drained](Self::drained) node.
    pub(crate) fn drained_search_inputs(
        &mut self,
        node: NodeIndex,
    ) -> Option<((ReachableDevices, bool), &mut Interner, &FeatureGates)> {
        Some((self.drained(node)?, &mut self.interner, &self.features))
    }

    /// Collects the reachable devices and their matrix positions.
    pub(crate) fn gather_positions(&mut self, node: NodeIndex) {
        self.gather(node);
        if let Some(reachable) = self.nodes[node]
            .reachable
            .as_mut()
            .filter(|reachable| reachable.matrix_positions.is_none())
        {
            let positions = MatrixPositions::new(reachable, &self.machines);
            reachable.set_positions(positions);
        }
    }

    /// Returns the inputs of a search on the node; `None` if it was removed.
    pub(crate) fn search_inputs(
        &mut self,
        node: NodeIndex,
    ) -> Option<(&ReachableDevices, &mut Interner, &FeatureGates)> {
        self.gather(node);
        Some((self.nodes[node].reachable.as_ref()?, &mut self.interner, &self.features))
    }

    /// Returns the inputs of a search on the node, with its state for shapes that read these
    /// attributes if there are any; `None` if the node was removed.
    pub(crate) fn search_inputs_with_state(
        &mut self,
        node: NodeIndex,
        names: Option<&[NameId]>,
    ) -> Option<(&ReachableDevices, Option<StateKey<'_>>, &mut Interner, &FeatureGates)> {
        self.gather(node);
        let entry = &self.nodes[node];
        let reachable = entry.reachable.as_ref()?;
        let contents = &mut self.contents;
        let state = names.map(|names| contents.state_key(names, node, entry.layout, reachable));
        Some((reachable, state, &mut self.interner, &self.features))
    }

    /// Returns the reachable devices if they are collected.
    pub(crate) fn reachable(&self, node: NodeIndex) -> Option<&ReachableDevices> {
        self.nodes[node].reachable.as_ref()
    }
}
