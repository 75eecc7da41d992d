//! Pools that a node can reach, as upstream gathers them (`pools_incubating.go`).
//!
//! The newest generation that the node sees is used, in upstream's order, with a state for
//! incomplete and invalid pools.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use tessera_api::names::NodeName;

use crate::features::FeatureGates;
use crate::model::{Device, Node, NodeChoice, PoolId, Slice};

use super::CompiledSlice;

/// A pool from the view of one node.
#[derive(Debug)]
pub(crate) struct NodePool {
    pub(crate) id: PoolId,
    pub(crate) state: PoolState,
    /// Slices with devices for the node, in upstream's order.
    pub(crate) slices: Vec<Arc<CompiledSlice>>,
    /// Other slices with devices in the same generation; their devices may consume shared
    /// counters.
    pub(crate) other_slices: Vec<Arc<CompiledSlice>>,
    /// Slices with counter sets.
    pub(crate) counters: Vec<Arc<CompiledSlice>>,
}

/// State of a pool: devices are allocated only from complete ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PoolState {
    /// All slices of the generation are present.
    Complete,
    /// Slices are missing, for example while they are being replaced.
    Incomplete,
    /// The slices contradict each other.
    Invalid,
}

/// A node selector in a slice or device that upstream cannot parse. It is an error for every claim
/// on the node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct BadNodeSelector {
    pub(crate) slice: String,
    pub(crate) problem: String,
}

/// Index of all slices by name, node and pool.
#[derive(Debug, Default)]
pub(crate) struct SliceIndex {
    pub(crate) by_name: BTreeMap<String, Arc<CompiledSlice>>,
    /// Names of slices by the node that they name.
    by_node: BTreeMap<String, BTreeSet<String>>,
    /// Names of slices that name no node.
    without_node: BTreeSet<String>,
    by_pool: BTreeMap<PoolId, BTreeSet<String>>,
}

impl SliceIndex {
    pub(crate) fn insert(&mut self, slice: Arc<CompiledSlice>) {
        let name = slice.slice.name.clone();
        match &slice.slice.nodes {
            NodeChoice::Node(node) => {
                self.by_node.entry(node.to_string()).or_default().insert(name.clone());
            }
            _ => {
                self.without_node.insert(name.clone());
            }
        }
        self.by_pool.entry(slice.slice.pool.clone()).or_default().insert(name.clone());
        self.by_name.insert(name, slice);
    }

    pub(crate) fn remove(&mut self, name: &str) -> Option<Arc<CompiledSlice>> {
        let slice = self.by_name.remove(name)?;
        match &slice.slice.nodes {
            NodeChoice::Node(node) => forget(&mut self.by_node, node.as_str(), name),
            _ => {
                self.without_node.remove(name);
            }
        }
        forget(&mut self.by_pool, &slice.slice.pool, name);
        Some(slice)
    }

    /// Returns all slices of a pool.
    pub(crate) fn of_pool(&self, pool: &PoolId) -> impl Iterator<Item = &Arc<CompiledSlice>> {
        let names = self.by_pool.get(pool).into_iter().flatten();
        names.filter_map(|name| self.by_name.get(name))
    }

    /// Returns true if some slices name no node.
    pub(crate) fn has_slices_without_node(&self) -> bool {
        !self.without_node.is_empty()
    }

    /// Returns the pools that `node` reaches, by driver and name, those with binding conditions
    /// last.
    pub(crate) fn gather(
        &self,
        node: &Node,
        features: &FeatureGates,
    ) -> Result<Vec<NodePool>, BadNodeSelector> {
        let own = self.by_node.get(node.name.as_str()).into_iter().flatten();
        let mut seen: BTreeMap<&PoolId, Vec<&Arc<CompiledSlice>>> = BTreeMap::new();
        for name in own.chain(&self.without_node) {
            let Some(compiled) = self.by_name.get(name) else { continue };
            let slice = &compiled.slice;
            if !is_ignored(slice, features) && is_available_on(slice, node)? {
                push_if_newest(seen.entry(&slice.pool).or_default(), compiled);
            }
        }
        let pools = seen.into_iter().filter_map(|(id, slices)| self.pool(id, slices, features));
        let mut pools: Vec<NodePool> = pools.collect();
        pools.sort_by_key(NodePool::has_binding_conditions);
        Ok(pools)
    }

    fn pool(
        &self,
        id: &PoolId,
        slices: Vec<&Arc<CompiledSlice>>,
        features: &FeatureGates,
    ) -> Option<NodePool> {
        // Upstream visits the slices that name the node first.
        let rank = |s: &&&Arc<CompiledSlice>| {
            (!matches!(s.slice.nodes, NodeChoice::Node(_)), s.slice.list_position)
        };
        let first = &slices.iter().min_by_key(rank)?.slice;
        let (generation, expected) = (first.generation, first.slice_count);
        if first.list_position.is_none() && slices.iter().any(|s| s.slice.slice_count != expected) {
            return Some(NodePool::empty(id, PoolState::Incomplete));
        }
        let mut other_slices = Vec::new();
        if slices.len() as i64 != expected {
            if self.of_pool(id).any(|s| s.slice.generation > generation) {
                return None;
            }
            let present =
                self.of_pool(id).filter(|s| s.slice.generation == generation && !s.slice.ignored);
            let present: Vec<&Arc<CompiledSlice>> = present.collect();
            if present.len() as i64 != expected {
                return Some(NodePool::empty(id, PoolState::Incomplete));
            }
            let is_seen = |name: &str| slices.iter().any(|s| s.slice.name == name);
            other_slices.extend(present.into_iter().filter(|s| !is_seen(&s.slice.name)));
        }
        let mut slices = slices;
        slices.sort_by(|a, b| a.slice.name.cmp(&b.slice.name));
        Some(NodePool::build(id, &slices, &other_slices, features))
    }
}

impl NodePool {
    fn empty(id: &PoolId, state: PoolState) -> Self {
        Self {
            id: id.clone(),
            state,
            slices: Vec::new(),
            other_slices: Vec::new(),
            counters: Vec::new(),
        }
    }

    fn build(
        id: &PoolId,
        slices: &[&Arc<CompiledSlice>],
        other_slices: &[&Arc<CompiledSlice>],
        features: &FeatureGates,
    ) -> Self {
        let has_counters =
            |s: &&Arc<CompiledSlice>| features.partitionable && !s.slice.counter_sets.is_empty();
        let with = |list: &[&Arc<CompiledSlice>], counters: bool| -> Vec<Arc<CompiledSlice>> {
            list.iter().filter(|s| has_counters(s) == counters).map(|s| Arc::clone(s)).collect()
        };
        let mut pool = Self {
            slices: with(slices, false),
            other_slices: with(other_slices, false),
            counters: with(slices, true).into_iter().chain(with(other_slices, true)).collect(),
            ..Self::empty(id, PoolState::Complete)
        };
        if !pool.has_distinct_names() || (features.partitionable && !pool.has_consistent_counters())
        {
            pool.state = PoolState::Invalid;
        }
        pool
    }

    fn has_distinct_names(&self) -> bool {
        let mut names = BTreeSet::new();
        self.slices.iter().flat_map(|s| &s.slice.devices).all(|device| names.insert(&device.name))
    }

    /// Returns true if each counter set is defined once, and all consumed counters exist.
    fn has_consistent_counters(&self) -> bool {
        let mut sets = BTreeMap::new();
        for set in self.counters.iter().flat_map(|s| &s.slice.counter_sets) {
            if sets.insert(&set.name, &set.counters).is_some() {
                return false;
            }
        }
        let devices = self.slices.iter().chain(&self.other_slices).flat_map(|s| &s.slice.devices);
        let mut uses = devices.flat_map(|device| &device.consumes);
        uses.all(|used| {
            sets.get(&used.set).is_some_and(|counters| {
                used.counters.keys().all(|name| counters.contains_key(name))
            })
        })
    }

    /// Returns the number of devices visible to the node.
    pub(crate) fn devices(&self) -> u64 {
        self.slices.iter().map(|s| s.slice.devices.len() as u64).sum()
    }

    /// Returns true if only this node can use the pool.
    pub(crate) fn is_only_of(&self, node: &NodeName) -> bool {
        let is_of = |slice: &Arc<CompiledSlice>| match &slice.slice.nodes {
            NodeChoice::Node(name) => name == node,
            _ => false,
        };
        self.slices.iter().chain(&self.other_slices).chain(&self.counters).all(is_of)
    }

    /// Returns all devices, including those that the node cannot use.
    pub(crate) fn all_devices(&self) -> impl Iterator<Item = &Arc<Device>> {
        self.slices.iter().chain(&self.other_slices).flat_map(|slice| &slice.slice.devices)
    }

    fn has_binding_conditions(&self) -> bool {
        let mut devices = self.slices.iter().flat_map(|s| &s.slice.devices);
        self.state == PoolState::Complete && devices.any(|device| device.binding.is_some())
    }
}

fn forget<K, Q>(map: &mut BTreeMap<K, BTreeSet<String>>, key: &Q, name: &str)
where
    K: Ord + std::borrow::Borrow<Q>,
    Q: Ord + ?Sized,
{
    if let Some(names) = map.get_mut(key) {
        names.remove(name);
        if names.is_empty() {
            map.remove(key);
        }
    }
}

/// Returns true if upstream ignores the slice.
fn is_ignored(slice: &Slice, features: &FeatureGates) -> bool {
    let partitions = slice.nodes == NodeChoice::PerDevice || !slice.counter_sets.is_empty();
    slice.ignored || (!features.partitionable && partitions)
}

fn push_if_newest<'s>(slices: &mut Vec<&'s Arc<CompiledSlice>>, slice: &'s Arc<CompiledSlice>) {
    let newest = slices.first().map(|s| s.slice.generation);
    match newest.map(|generation| slice.slice.generation.cmp(&generation)) {
        Some(std::cmp::Ordering::Less) => return,
        Some(std::cmp::Ordering::Greater) => slices.clear(),
        _ => {}
    }
    slices.push(slice);
}

fn is_available_on(slice: &Slice, node: &Node) -> Result<bool, BadNodeSelector> {
    if slice.nodes != NodeChoice::PerDevice {
        check(&slice.nodes, slice)?;
        return Ok(includes(&slice.nodes, node));
    }
    for device in &slice.devices {
        check(&device.nodes, slice)?;
        if includes(&device.nodes, node) {
            return Ok(true);
        }
    }
    Ok(false)
}

fn check(choice: &NodeChoice, slice: &Slice) -> Result<(), BadNodeSelector> {
    match choice {
        NodeChoice::Selector(selector) => match selector.defect() {
            Some(problem) => Err(BadNodeSelector { slice: slice.name.clone(), problem }),
            None => Ok(()),
        },
        _ => Ok(()),
    }
}

/// Returns true if the choice includes the node.
pub(crate) fn includes(choice: &NodeChoice, node: &Node) -> bool {
    match choice {
        NodeChoice::Node(name) => *name == node.name,
        NodeChoice::All => true,
        NodeChoice::Selector(selector) => selector.matches(node),
        NodeChoice::PerDevice | NodeChoice::Unknown => false,
    }
}
