//! The pools that a node can reach, as upstream gathers them (`pools_incubating.go`): the newest generation that the node
//! sees, complete or not, valid or not, in upstream's order.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use tessera_api::names::NodeName;

use crate::model::{Device, DeviceId, Node, NodeChoice, NodeSelector, PoolId, Requirement, Slice, Snapshot};

/// All slices of a snapshot, sorted by who can reach them.
pub(crate) struct Catalogue<'s> {
    by_node: BTreeMap<&'s NodeName, Vec<&'s Arc<Slice>>>,
    elsewhere: Vec<&'s Arc<Slice>>,
    by_pool: BTreeMap<&'s PoolId, Vec<&'s Arc<Slice>>>,
}

/// A pool as one node sees it.
#[derive(Debug)]
pub(crate) struct NodePool<'s> {
    pub(crate) id: &'s PoolId,
    pub(crate) state: PoolState,
    /// Devices of the slices that target the node, in upstream's order; also those of them that do not target it
    /// themselves (per-device node selection), which [`Candidate::reachable`] tells.
    pub(crate) devices: Vec<Candidate<'s>>,
}

/// Whether devices may be taken from a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PoolState {
    /// Yes.
    Complete,
    /// Its slices are being replaced.
    Incomplete,
    /// Two devices have the same name.
    Invalid,
    /// It is partitioned by shared counters, which are not accounted for in this version.
    Counters,
}

/// A device that a node might use.
#[derive(Debug, Clone)]
pub(crate) struct Candidate<'s> {
    pub(crate) id: DeviceId,
    pub(crate) slice: &'s Slice,
    pub(crate) device: &'s Device,
    pub(crate) reachable: bool,
}

/// A node selector of a slice or device that upstream cannot parse: an error for every claim on that node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct BadNodeSelector {
    pub(crate) slice: String,
    pub(crate) problem: String,
}

impl<'s> Catalogue<'s> {
    pub(crate) fn new(snapshot: &'s Snapshot) -> Self {
        let mut catalogue =
            Self { by_node: BTreeMap::new(), elsewhere: Vec::new(), by_pool: BTreeMap::new() };
        for slice in snapshot.slices.values() {
            catalogue.by_pool.entry(&slice.pool).or_default().push(slice);
            match &slice.nodes {
                NodeChoice::Node(node) => catalogue.by_node.entry(node).or_default().push(slice),
                _ => catalogue.elsewhere.push(slice),
            }
        }
        catalogue
    }

    /// The pools that `node` reaches, sorted by driver and name, those with binding conditions last.
    pub(crate) fn gather(&self, node: &Node) -> Result<Vec<NodePool<'s>>, BadNodeSelector> {
        let own = self.by_node.get(&node.name).map(Vec::as_slice).unwrap_or_default();
        let mut seen: BTreeMap<&PoolId, Vec<&'s Arc<Slice>>> = BTreeMap::new();
        for slice in own.iter().chain(&self.elsewhere).copied() {
            if !slice.ignored && reaches(slice, node)? {
                keep_newest(seen.entry(&slice.pool).or_default(), slice);
            }
        }
        let mut pools: Vec<NodePool<'s>> =
            seen.into_iter().filter_map(|(id, slices)| self.pool(id, slices, node)).collect();
        pools.sort_by_key(NodePool::has_binding_conditions);
        Ok(pools)
    }

    fn pool(&self, id: &'s PoolId, mut slices: Vec<&'s Arc<Slice>>, node: &Node) -> Option<NodePool<'s>> {
        let first = slices.first()?;
        let (generation, expected) = (first.generation, first.slice_count);
        // Upstream goes by whichever slice it meets first; slices that disagree are not a pool to take from.
        if slices.iter().any(|s| s.slice_count != expected) {
            return Some(NodePool { id, state: PoolState::Incomplete, devices: Vec::new() });
        }
        if slices.len() as i64 != expected {
            let all = self.by_pool.get(id).map(Vec::as_slice).unwrap_or_default();
            if all.iter().any(|s| s.generation > generation) {
                return None;
            }
            let present = all.iter().filter(|s| s.generation == generation && !s.ignored).count();
            if present as i64 != expected {
                return Some(NodePool { id, state: PoolState::Incomplete, devices: Vec::new() });
            }
        }
        let all = self.by_pool.get(id).map(Vec::as_slice).unwrap_or_default();
        let counters = all.iter().any(|s| s.generation == generation && s.counters);
        slices.sort_by(|a, b| a.name.cmp(&b.name));
        let mut names = BTreeSet::new();
        let mut devices = Vec::new();
        let mut state = if counters { PoolState::Counters } else { PoolState::Complete };
        for slice in slices {
            for device in &slice.devices {
                if !names.insert(&device.name) {
                    state = PoolState::Invalid;
                }
                let reachable = slice.nodes != NodeChoice::PerDevice || chosen(&device.nodes, node);
                let id = DeviceId { pool: id.clone(), device: device.name.clone() };
                devices.push(Candidate { id, slice, device, reachable });
            }
        }
        Some(NodePool { id, state, devices })
    }
}

impl NodePool<'_> {
    fn has_binding_conditions(&self) -> bool {
        self.devices.iter().any(|c| c.device.unsupported == Some(crate::model::BINDING_CONDITIONS))
    }
}

fn keep_newest<'s>(slices: &mut Vec<&'s Arc<Slice>>, slice: &'s Arc<Slice>) {
    let newest = slices.first().map(|s| s.generation);
    match newest.map(|generation| slice.generation.cmp(&generation)) {
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

fn chosen(choice: &NodeChoice, node: &Node) -> bool {
    match choice {
        NodeChoice::Node(name) => *name == node.name,
        NodeChoice::All => true,
        NodeChoice::Selector(selector) => selector.matches(node),
        NodeChoice::PerDevice | NodeChoice::Unknown => false,
    }
}

/// Where an allocation of `results` on `node` can be used from; `None` = everywhere.
pub(crate) fn node_selector(chosen: &[Candidate<'_>], node: &NodeName) -> Option<NodeSelector> {
    let mut merged = crate::model::NodeAffinityTerm::default();
    for candidate in chosen {
        let choice = match candidate.slice.nodes {
            NodeChoice::PerDevice => &candidate.device.nodes,
            _ => &candidate.slice.nodes,
        };
        if matches!(choice, NodeChoice::Node(_)) || candidate.device.binds_to_node {
            return Some(NodeSelector::of_node(node));
        }
        if let NodeChoice::Selector(selector) = choice
            && let [term] = selector.terms.as_slice()
        {
            merge(&mut merged.fields, &term.fields);
            merge(&mut merged.labels, &term.labels);
        }
    }
    let nothing = merged.fields.is_empty() && merged.labels.is_empty();
    (!nothing).then(|| NodeSelector { terms: vec![merged] })
}

/// Adds the requirements that are not there yet; the order of values does not matter.
fn merge(into: &mut Vec<Requirement>, from: &[Requirement]) {
    let values = |r: &Requirement| r.values.iter().cloned().collect::<BTreeSet<_>>();
    for item in from {
        let same =
            |r: &Requirement| r.key == item.key && r.operator == item.operator && values(r) == values(item);
        if !into.iter().any(same) {
            into.push(item.clone());
        }
    }
}
