//! The cluster as planning works on it: the objects of a [`Snapshot`](crate::model::Snapshot), put
//! into numbers once and kept up to date by what changes.
//!
//! ```text
//! slices --Interner--> CompiledSlice --Catalogue::gather--> Reach   per node: candidates, and what is left of each
//! usage ------------------------------------------------------^     an allocation changes the nodes that see its device
//! ```
//!
//! Every change of what a node offers gives that node a new *stamp*; whoever remembers something
//! about a node remembers the stamp with it. Nothing is thrown away for a node that did not change.

mod intern;
mod machines;
mod pools;
mod reach;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use tessera_api::names::{DeviceClassName, NodeName};

use crate::features::Features;
use crate::model::{
    DeviceClass, DeviceId, DeviceUse, Node, NodeChoice, PoolId, PoolTopology, Slice, Usage,
};

pub(crate) use intern::{CompiledDevice, FastMap, Interner, NameId, OfferId, ValueId};
pub(crate) use machines::{Machine, Places};
pub(crate) use pools::{NodePool, PoolState};
pub(crate) use reach::{Candidate, CounterAmount, Reach};

use machines::Machines;
use pools::Catalogue;

/// Beyond so many remembered values the numbers are given anew: those of devices that are long gone
/// are among them.
const MAX_VALUES: usize = 2_000_000;

/// How far the numbers of neighbours by name are apart at first.
const ORDER_GAP: u64 = 1 << 32;

/// A slice and its devices in numbers.
#[derive(Debug)]
pub(crate) struct CompiledSlice {
    pub(crate) slice: Arc<Slice>,
    /// The number of its driver.
    driver: u32,
    pub(crate) devices: Vec<CompiledDevice>,
}

/// A node, by its place in [`Cluster::nodes`].
pub(crate) type NodeIndex = usize;

/// A node and what it reaches.
#[derive(Debug)]
pub(crate) struct NodeEntry {
    pub(crate) name: NodeName,
    /// The object; none where it is gone.
    pub(crate) node: Option<Arc<Node>>,
    /// Smaller than that of every node whose name comes after.
    pub(crate) order: u64,
    /// What it reaches; none until somebody asks.
    reach: Option<Reach>,
    /// When what it offers changed last, on the cluster's own clock.
    pub(crate) stamp: u64,
    /// How often it came to reach other devices than before.
    pub(crate) layout: u64,
    /// What is left of its CPU, in thousandths of a core.
    pub(crate) cpu_milli: u64,
}

/// The cluster in numbers. See the module.
#[derive(Debug, Default)]
pub(crate) struct Cluster {
    features: Features,
    pub(crate) interner: Interner,
    catalogue: Catalogue,
    machines: Machines,
    pub(crate) nodes: Vec<NodeEntry>,
    by_name: BTreeMap<NodeName, NodeIndex>,
    pub(crate) classes: BTreeMap<DeviceClassName, Arc<DeviceClass>>,
    usage: Usage,
    /// The nodes of which [`NodeEntry::reach`] shows the pool.
    seen_by: HashMap<PoolId, BTreeSet<NodeIndex>>,
    reordered: u64,
    /// How often nodes came to reach other devices than before, or got other labels.
    layout: u64,
    /// Somebody ranks nodes by the CPU that they have left.
    is_cpu_ranked: bool,
    clock: u64,
    /// The nodes that changed last, one for each tick of the clock.
    changes: Vec<NodeIndex>,
}

impl Cluster {
    pub(crate) fn new(features: Features) -> Self {
        Self { features, ..Self::default() }
    }

    pub(crate) fn features(&self) -> &Features {
        &self.features
    }

    /// A slice was made or changed.
    pub(crate) fn set_slice(&mut self, slice: &Arc<Slice>) {
        self.remove_slice(&slice.name);
        let compiled = self.compile(slice);
        self.catalogue.insert(Arc::new(compiled));
        self.slice_changed(slice);
    }

    /// A slice is gone.
    pub(crate) fn remove_slice(&mut self, name: &str) {
        if let Some(old) = self.catalogue.remove(name) {
            self.slice_changed(&old.slice);
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

    /// Whether so many values are remembered that those of devices long gone must be most of them.
    pub(crate) fn is_full(&self) -> bool {
        self.interner.size() > MAX_VALUES
    }

    /// Gives all numbers anew: what others remember by number is worth nothing after it.
    pub(crate) fn renumber(&mut self) {
        self.interner = Interner::default();
        let slices: Vec<Arc<Slice>> =
            self.catalogue.by_name.values().map(|s| Arc::clone(&s.slice)).collect();
        self.catalogue = Catalogue::default();
        for slice in &slices {
            let compiled = self.compile(slice);
            self.catalogue.insert(Arc::new(compiled));
        }
        (0..self.nodes.len()).for_each(|node| self.regather(node));
    }

    /// All nodes that see the slice's pool, or might now.
    fn slice_changed(&mut self, slice: &Slice) {
        let everywhere = |nodes: &NodeChoice| !matches!(nodes, NodeChoice::Node(_));
        if everywhere(&slice.nodes)
            || self.catalogue.of_pool(&slice.pool).any(|s| everywhere(&s.slice.nodes))
        {
            (0..self.nodes.len()).for_each(|node| self.regather(node));
            return;
        }
        let mut nodes = self.seen_by.get(&slice.pool).cloned().unwrap_or_default();
        let of_pool = self.catalogue.of_pool(&slice.pool).map(|s| &s.slice.nodes);
        for choice in of_pool.chain([&slice.nodes]) {
            if let NodeChoice::Node(name) = choice {
                nodes.extend(self.by_name.get(name));
            }
        }
        nodes.into_iter().for_each(|node| self.regather(node));
    }

    /// Forgets what the node reaches.
    fn regather(&mut self, node: NodeIndex) {
        if let Some(reach) = self.nodes[node].reach.take() {
            for pool in &reach.pools {
                if let Some(seen) = self.seen_by.get_mut(&pool.id) {
                    seen.remove(&node);
                }
            }
        }
        self.layout += 1;
        self.nodes[node].layout += 1;
        self.touch(node);
    }

    /// Says how the devices of a pool are joined; none where that is not known.
    pub(crate) fn set_topology(&mut self, pool: &PoolId, topology: Option<&Arc<PoolTopology>>) {
        self.machines.set(pool, topology);
        let nodes: Vec<NodeIndex> = self.seen_by.get(pool).into_iter().flatten().copied().collect();
        nodes.into_iter().for_each(|node| self.regather(node));
    }

    /// As long as it stays, no node reaches other devices or has other labels.
    pub(crate) fn layout(&self) -> u64 {
        self.layout
    }

    /// The node is not what it was.
    fn touch(&mut self, node: NodeIndex) {
        self.clock += 1;
        self.nodes[node].stamp = self.clock;
        if self.changes.len() > 2 * self.nodes.len() + 1024 {
            self.changes.clear();
        }
        self.changes.push(node);
    }

    /// The time of the last change.
    pub(crate) fn now(&self) -> u64 {
        self.clock
    }

    /// The nodes that have changed after `then`; none if that is too long ago to be known: any may
    /// have.
    pub(crate) fn changed_since(&self, then: u64) -> Option<&[NodeIndex]> {
        let first = self.clock + 1 - self.changes.len() as u64;
        let from = usize::try_from((then + 1).checked_sub(first)?).ok()?;
        self.changes.get(from..)
    }

    /// A node was made or changed.
    pub(crate) fn set_node(&mut self, node: &Arc<Node>) {
        let Some(&index) = self.by_name.get(&node.name) else {
            self.add_node(node);
            return;
        };
        self.set_cpu(index, node.cpu_milli_left());
        match self.nodes[index].node.replace(Arc::clone(node)) {
            // Labels decide which slices are within reach.
            Some(old) if old.labels != node.labels && self.catalogue.has_slices_elsewhere() => {
                self.regather(index)
            }
            // Whether a pod may go there is asked for each pod anew.
            Some(old) => self.layout += u64::from(old.labels != node.labels),
            None => {
                self.layout += 1;
                self.touch(index);
            }
        }
    }

    /// Says what is left of a node's CPU, in thousandths of a core.
    pub(crate) fn set_cpu(&mut self, node: NodeIndex, cpu_milli: u64) {
        let before = std::mem::replace(&mut self.nodes[node].cpu_milli, cpu_milli);
        if self.is_cpu_ranked && before != cpu_milli {
            self.touch(node);
        }
    }

    /// From now on a node is not what it was when its CPU is not.
    pub(crate) fn rank_by_cpu(&mut self) {
        if !self.is_cpu_ranked {
            self.is_cpu_ranked = true;
            (0..self.nodes.len()).for_each(|node| self.touch(node));
        }
    }

    /// Whether somebody ranks nodes by the CPU that they have left.
    pub(crate) fn is_cpu_ranked(&self) -> bool {
        self.is_cpu_ranked
    }

    fn add_node(&mut self, node: &Arc<Node>) {
        let entry = NodeEntry {
            name: node.name.clone(),
            node: Some(Arc::clone(node)),
            order: self.order_between(&node.name),
            reach: None,
            stamp: 0,
            layout: 0,
            cpu_milli: node.cpu_milli_left(),
        };
        self.nodes.push(entry);
        self.by_name.insert(node.name.clone(), self.nodes.len() - 1);
        self.layout += 1;
        self.touch(self.nodes.len() - 1);
    }

    /// A number between those of the neighbours by name. Where there is none left, all are given
    /// anew.
    fn order_between(&mut self, name: &NodeName) -> u64 {
        use std::ops::Bound::{Excluded, Unbounded};
        let order = |nodes: &[NodeEntry], found: Option<(&NodeName, &NodeIndex)>| {
            found.map(|(_, &n)| nodes[n].order)
        };
        let before = order(
            &self.nodes,
            self.by_name.range::<NodeName, _>((Unbounded, Excluded(name))).next_back(),
        )
        .unwrap_or(0);
        match order(
            &self.nodes,
            self.by_name.range::<NodeName, _>((Excluded(name), Unbounded)).next(),
        ) {
            None if before < u64::MAX - ORDER_GAP => before + ORDER_GAP,
            Some(after) if after - before > 1 => before + (after - before) / 2,
            _ => {
                let mut next = 0;
                for &node in self.by_name.values() {
                    next += ORDER_GAP;
                    self.nodes[node].order = next;
                }
                self.reordered += 1;
                self.order_between(name)
            }
        }
    }

    /// How often nodes were given new numbers: what was sorted by the old ones is not sorted any
    /// more.
    pub(crate) fn reordered(&self) -> u64 {
        self.reordered
    }

    /// A node is gone. Its place stays, for it to come back.
    pub(crate) fn remove_node(&mut self, name: &NodeName) {
        if let Some(&index) = self.by_name.get(name) {
            self.nodes[index].node = None;
            self.regather(index);
        }
    }

    pub(crate) fn node_index(&self, name: &NodeName) -> Option<NodeIndex> {
        self.by_name.get(name).copied()
    }

    /// Nodes that exist, by name.
    pub(crate) fn by_name(&self) -> impl Iterator<Item = (NodeIndex, &Arc<Node>)> {
        self.by_name.values().filter_map(|&index| Some((index, self.nodes[index].node.as_ref()?)))
    }

    /// What is taken of a device.
    pub(crate) fn used(&self, device: &DeviceId) -> Option<&DeviceUse> {
        self.usage.of(device)
    }

    /// Says what is taken of a device.
    pub(crate) fn set_use(&mut self, device: &DeviceId, used: Option<&DeviceUse>) {
        if self.usage.of(device) == used {
            return;
        }
        self.usage.set(device, used.cloned());
        let nodes: Vec<NodeIndex> =
            self.seen_by.get(&device.pool).into_iter().flatten().copied().collect();
        for node in nodes {
            if let Some(reach) = &mut self.nodes[node].reach
                && reach.set_use(device, used)
            {
                self.touch(node);
            }
        }
    }

    /// Takes over what is taken of all devices.
    pub(crate) fn set_usage(&mut self, usage: &Usage) {
        self.usage = usage.clone();
        (0..self.nodes.len()).for_each(|node| self.regather(node));
    }

    /// What the node reaches, gathered once until something changes.
    pub(crate) fn gather(&mut self, node: NodeIndex) {
        if self.nodes[node].reach.is_some() {
            return;
        }
        let Some(object) = self.nodes[node].node.clone() else { return };
        let reach = match self.catalogue.gather(&object, &self.features) {
            Ok(pools) => Reach::new(pools, &object, &self.interner, &self.usage, &self.features),
            Err(defect) => Reach::defective(defect),
        };
        for pool in &reach.pools {
            self.seen_by.entry(pool.id.clone()).or_default().insert(node);
        }
        self.nodes[node].reach = Some(reach);
    }

    /// What the node reaches, as if all were given back that is held of its own pools and is ours
    /// to give; with the places of it. Whether nothing stays taken that others might give back
    /// comes with it.
    fn emptied(&self, node: NodeIndex) -> Option<(Reach, bool)> {
        let object = self.nodes[node].node.as_ref()?;
        let pools = self.catalogue.gather(object, &self.features).ok()?;
        let mut stays = Usage::default();
        let mut is_final = true;
        for pool in &pools {
            let is_own = pool.is_only_of(&object.name);
            for device in pool.all_devices().filter(|device| !(is_own && device.is_ours())) {
                is_final = false;
                let id = DeviceId { pool: pool.id.clone(), device: device.name.clone() };
                stays.set(&id, self.usage.of(&id).cloned());
            }
        }
        let mut reach = Reach::new(pools, object, &self.interner, &stays, &self.features);
        reach.places = Some(Places::new(&reach, &self.machines));
        Some((reach, is_final))
    }

    /// What a search on the node works with, once it is [emptied](Self::emptied).
    pub(crate) fn parts_emptied(
        &mut self,
        node: NodeIndex,
    ) -> Option<((Reach, bool), &mut Interner, &Features)> {
        Some((self.emptied(node)?, &mut self.interner, &self.features))
    }

    /// Gathers, with the places of what it reaches.
    pub(crate) fn gather_places(&mut self, node: NodeIndex) {
        self.gather(node);
        if let Some(reach) = self.nodes[node].reach.as_mut().filter(|reach| reach.places.is_none())
        {
            reach.places = Some(Places::new(reach, &self.machines));
        }
    }

    /// What a search on the node works with; none where the node is gone.
    pub(crate) fn parts(&mut self, node: NodeIndex) -> Option<(&Reach, &mut Interner, &Features)> {
        self.gather(node);
        Some((self.nodes[node].reach.as_ref()?, &mut self.interner, &self.features))
    }

    /// What the node reaches, once it has been gathered.
    pub(crate) fn reach(&self, node: NodeIndex) -> Option<&Reach> {
        self.nodes[node].reach.as_ref()
    }
}
