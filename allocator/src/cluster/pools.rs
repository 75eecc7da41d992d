//! The pools that a node can reach, as upstream gathers them (`pools_incubating.go`): the newest
//! generation that the node sees, complete or not, valid or not, in upstream's order.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use tessera_api::names::NodeName;

use crate::features::Features;
use crate::model::{Device, Node, NodeChoice, PoolId, Slice};

use super::CompiledSlice;

/// A pool as one node sees it.
#[derive(Debug)]
pub(crate) struct NodePool {
    pub(crate) id: PoolId,
    pub(crate) state: PoolState,
    /// Slices that target the node and have devices, in upstream's order.
    pub(crate) slices: Vec<Arc<CompiledSlice>>,
    /// The other slices of its generation with devices: of interest for the counters that these
    /// take.
    pub(crate) elsewhere: Vec<Arc<CompiledSlice>>,
    /// Slices with counter sets.
    pub(crate) counters: Vec<Arc<CompiledSlice>>,
}

/// Whether devices may be taken from a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PoolState {
    /// Yes.
    Complete,
    /// Its slices are being replaced.
    Incomplete,
    /// It contradicts itself.
    Invalid,
}

/// A node selector of a slice or device that upstream cannot parse: an error for every claim on
/// that node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct BadNodeSelector {
    pub(crate) slice: String,
    pub(crate) problem: String,
}

/// All slices, sorted by who can reach them.
#[derive(Debug, Default)]
pub(crate) struct Catalogue {
    pub(crate) by_name: BTreeMap<String, Arc<CompiledSlice>>,
    /// By the node they name.
    by_node: BTreeMap<String, BTreeSet<String>>,
    /// Those that name none.
    elsewhere: BTreeSet<String>,
    by_pool: BTreeMap<PoolId, BTreeSet<String>>,
}

impl Catalogue {
    pub(crate) fn insert(&mut self, slice: Arc<CompiledSlice>) {
        let name = slice.slice.name.clone();
        match &slice.slice.nodes {
            NodeChoice::Node(node) => {
                self.by_node.entry(node.to_string()).or_default().insert(name.clone());
            }
            _ => {
                self.elsewhere.insert(name.clone());
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
                self.elsewhere.remove(name);
            }
        }
        forget(&mut self.by_pool, &slice.slice.pool, name);
        Some(slice)
    }

    /// All slices of a pool.
    pub(crate) fn of_pool(&self, pool: &PoolId) -> impl Iterator<Item = &Arc<CompiledSlice>> {
        let names = self.by_pool.get(pool).into_iter().flatten();
        names.filter_map(|name| self.by_name.get(name))
    }

    /// Whether some slices do not name their node.
    pub(crate) fn has_slices_elsewhere(&self) -> bool {
        !self.elsewhere.is_empty()
    }

    /// The pools that `node` reaches, sorted by driver and name, those with binding conditions
    /// last.
    pub(crate) fn gather(
        &self,
        node: &Node,
        features: &Features,
    ) -> Result<Vec<NodePool>, BadNodeSelector> {
        let own = self.by_node.get(node.name.as_str()).into_iter().flatten();
        let mut seen: BTreeMap<&PoolId, Vec<&Arc<CompiledSlice>>> = BTreeMap::new();
        for name in own.chain(&self.elsewhere) {
            let Some(compiled) = self.by_name.get(name) else { continue };
            let slice = &compiled.slice;
            if !is_ignored(slice, features) && reaches(slice, node)? {
                keep_newest(seen.entry(&slice.pool).or_default(), compiled);
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
        features: &Features,
    ) -> Option<NodePool> {
        // Upstream takes those that name the node before the others.
        let rank = |s: &&&Arc<CompiledSlice>| {
            (!matches!(s.slice.nodes, NodeChoice::Node(_)), s.slice.listed)
        };
        let first = &slices.iter().min_by_key(rank)?.slice;
        let (generation, expected) = (first.generation, first.slice_count);
        if first.listed.is_none() && slices.iter().any(|s| s.slice.slice_count != expected) {
            return Some(NodePool::empty(id, PoolState::Incomplete));
        }
        let mut elsewhere = Vec::new();
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
            elsewhere.extend(present.into_iter().filter(|s| !is_seen(&s.slice.name)));
        }
        let mut slices = slices;
        slices.sort_by(|a, b| a.slice.name.cmp(&b.slice.name));
        Some(NodePool::build(id, &slices, &elsewhere, features))
    }
}

impl NodePool {
    fn empty(id: &PoolId, state: PoolState) -> Self {
        Self {
            id: id.clone(),
            state,
            slices: Vec::new(),
            elsewhere: Vec::new(),
            counters: Vec::new(),
        }
    }

    fn build(
        id: &PoolId,
        slices: &[&Arc<CompiledSlice>],
        elsewhere: &[&Arc<CompiledSlice>],
        features: &Features,
    ) -> Self {
        let has_counters =
            |s: &&Arc<CompiledSlice>| features.partitionable && !s.slice.counter_sets.is_empty();
        let with = |list: &[&Arc<CompiledSlice>], counters: bool| -> Vec<Arc<CompiledSlice>> {
            list.iter().filter(|s| has_counters(s) == counters).map(|s| Arc::clone(s)).collect()
        };
        let mut pool = Self {
            slices: with(slices, false),
            elsewhere: with(elsewhere, false),
            counters: with(slices, true).into_iter().chain(with(elsewhere, true)).collect(),
            ..Self::empty(id, PoolState::Complete)
        };
        if !pool.has_distinct_names() || (features.partitionable && !pool.counters_add_up()) {
            pool.state = PoolState::Invalid;
        }
        pool
    }

    fn has_distinct_names(&self) -> bool {
        let mut names = BTreeSet::new();
        self.slices.iter().flat_map(|s| &s.slice.devices).all(|device| names.insert(&device.name))
    }

    /// Whether each counter set is there once, and all that devices take of exists.
    fn counters_add_up(&self) -> bool {
        let mut sets = BTreeMap::new();
        for set in self.counters.iter().flat_map(|s| &s.slice.counter_sets) {
            if sets.insert(&set.name, &set.counters).is_some() {
                return false;
            }
        }
        let devices = self.slices.iter().chain(&self.elsewhere).flat_map(|s| &s.slice.devices);
        let mut uses = devices.flat_map(|device| &device.consumes);
        uses.all(|used| {
            sets.get(&used.set).is_some_and(|counters| {
                used.counters.keys().all(|name| counters.contains_key(name))
            })
        })
    }

    /// How many devices it shows to the node.
    pub(crate) fn devices(&self) -> u64 {
        self.slices.iter().map(|s| s.slice.devices.len() as u64).sum()
    }

    /// Whether nobody but this node can use it.
    pub(crate) fn is_only_of(&self, node: &NodeName) -> bool {
        let is_of = |slice: &Arc<CompiledSlice>| matches!(&slice.slice.nodes, NodeChoice::Node(name) if name == node);
        self.slices.iter().chain(&self.elsewhere).chain(&self.counters).all(is_of)
    }

    /// Its devices, those that the node cannot use too.
    pub(crate) fn all_devices(&self) -> impl Iterator<Item = &Arc<Device>> {
        self.slices.iter().chain(&self.elsewhere).flat_map(|slice| &slice.slice.devices)
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

/// Slices that upstream looks past.
fn is_ignored(slice: &Slice, features: &Features) -> bool {
    let partitions = slice.nodes == NodeChoice::PerDevice || !slice.counter_sets.is_empty();
    slice.ignored || (!features.partitionable && partitions)
}

fn keep_newest<'s>(slices: &mut Vec<&'s Arc<CompiledSlice>>, slice: &'s Arc<CompiledSlice>) {
    let newest = slices.first().map(|s| s.slice.generation);
    match newest.map(|generation| slice.slice.generation.cmp(&generation)) {
        Some(std::cmp::Ordering::Less) => return,
        Some(std::cmp::Ordering::Greater) => slices.clear(),
        _ => {}
    }
    slices.push(slice);
}

fn reaches(slice: &Slice, node: &Node) -> Result<bool, BadNodeSelector> {
    if slice.nodes != NodeChoice::PerDevice {
        check(&slice.nodes, slice)?;
        return Ok(chosen(&slice.nodes, node));
    }
    for device in &slice.devices {
        check(&device.nodes, slice)?;
        if chosen(&device.nodes, node) {
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

/// Whether a choice of nodes has this one in it.
pub(crate) fn chosen(choice: &NodeChoice, node: &Node) -> bool {
    match choice {
        NodeChoice::Node(name) => *name == node.name,
        NodeChoice::All => true,
        NodeChoice::Selector(selector) => selector.matches(node),
        NodeChoice::PerDevice | NodeChoice::Unknown => false,
    }
}
