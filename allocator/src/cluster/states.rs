//! States of nodes: two nodes in one state differ only by names, and in attributes that a shape
//! does not read. So they have equal results.

use super::{CompiledDevice, FastMap, NameId, NodeIndex, ReachableDevices};
use crate::wide_hash::{WideHash, hash_all, mix};

/// States of a node and its candidates, apart from attributes.
#[derive(Debug)]
pub(super) struct NodeState {
    devices: Box<[WideHash]>,
    node: WideHash,
}

/// Values of the attributes in a set, of a node and its candidates.
#[derive(Debug)]
struct NodeContent {
    /// [`NodeEntry::layout`](super::NodeEntry::layout) at the time.
    layout: u64,
    devices: Box<[WideHash]>,
    node: WideHash,
}

/// Values of attributes per node, for each set of attributes that some shape reads.
#[derive(Debug, Default)]
pub(super) struct NodeContents {
    of_set: FastMap<Box<[NameId]>, Vec<Option<NodeContent>>>,
}

/// Maximum number of nodes in all sets of attributes, of about 180 bytes each with eight devices.
/// Tenants choose the sets; beyond it all are dropped.
const MAX_CONTENTS: usize = 400_000;

/// State of a node and its candidates for the shapes that read a set of attributes.
pub(crate) struct StateKey<'c> {
    state: &'c NodeState,
    content: &'c NodeContent,
}

impl StateKey<'_> {
    /// Returns a number that is equal for nodes with equal states.
    pub(crate) fn node(&self) -> WideHash {
        mix(self.state.node, self.content.node)
    }

    /// Returns a number that is equal for candidates with equal states, also of other nodes. If
    /// candidates consume counters, it does not contain what is left of them.
    pub(crate) fn candidate(&self, candidate: usize) -> WideHash {
        mix(self.state.devices[candidate], self.content.devices[candidate])
    }
}

impl NodeState {
    pub(super) fn of(reachable: &ReachableDevices) -> Self {
        let count = reachable.candidates.len();
        let devices: Box<[WideHash]> = (0..count).map(|i| device_state(reachable, i)).collect();
        let pools = reachable.pools.iter();
        let pools = pools.flat_map(|pool| [pool.state as u128, u128::from(pool.devices())]);
        let counters = reachable.counters_left.iter().map(|left| left.cast_unsigned());
        let of_pools = reachable.counters_of.iter().map(|at| u128::from(*at));
        let parts = [
            hash_all(devices.iter().copied()),
            hash_all(pools),
            hash_all(counters),
            hash_all(of_pools),
            u128::from(reachable.defect.is_some()),
        ];
        Self { devices, node: hash_all(parts.into_iter()) }
    }
}

fn device_state(reachable: &ReachableDevices, i: usize) -> WideHash {
    let candidate = &reachable.candidates[i];
    let numbers = [
        candidate.pool,
        candidate.profile.number(),
        candidate.driver,
        u32::from(candidate.is_reachable),
        reachable.exclusive[i],
        reachable.shares[i],
        reachable.by_mps[i],
    ];
    let load = reachable.loads.get(i).copied().flatten();
    let load = load.map_or(0, |load| {
        1 + u128::from(load.busy_percent) + (u128::from(load.settled_cores_percent) << 8)
    });
    let left = reachable.left(i).iter().map(|left| left.cast_unsigned());
    let consumes = reachable.consumes.get(i).into_iter().flatten();
    let consumes =
        consumes.flat_map(|used| [u128::from(used.counter), used.amount.cast_unsigned()]);
    let known = reachable.matrix_positions.as_ref();
    let positions = known.map_or([0; 2], |known| known.identity(candidate.pool, i));
    let numbers = numbers.into_iter().chain(positions).map(u128::from);
    hash_all(numbers.chain([load]).chain(left).chain(consumes))
}

impl NodeContents {
    /// Returns the state of a node for shapes that read these attributes.
    pub(super) fn state_key<'c>(
        &'c mut self,
        names: &[NameId],
        node: NodeIndex,
        layout: u64,
        reachable: &'c ReachableDevices,
    ) -> StateKey<'c> {
        if !self.of_set.contains_key(names) {
            if self.of_set.values().map(Vec::len).sum::<usize>() > MAX_CONTENTS {
                self.of_set.clear();
            }
            self.of_set.insert(names.into(), Vec::new());
        }
        let of_nodes = self.of_set.get_mut(names).expect("invariant: inserted above");
        if of_nodes.len() <= node {
            of_nodes.resize_with(node + 1, || None);
        }
        let known = &mut of_nodes[node];
        if known.as_ref().is_none_or(|known| known.layout != layout) {
            *known = Some(NodeContent::of(names, node, layout, reachable));
        }
        let content = known.as_ref().expect("invariant: set above");
        StateKey { state: reachable.state(), content }
    }
}

impl NodeContent {
    fn of(names: &[NameId], node: NodeIndex, layout: u64, reachable: &ReachableDevices) -> Self {
        let content = |(i, compiled): (usize, &CompiledDevice)| {
            if compiled.is_irregular {
                // Equal to no other: its results are not shared.
                let own = [node as u128, i as u128, u128::from(layout)];
                return hash_all(own.into_iter());
            }
            hash_all(names.iter().map(|name| u128::from(compiled.attribute(*name).number())))
        };
        let compiled = reachable.candidates.iter().map(super::Candidate::compiled);
        let devices: Box<[WideHash]> = compiled.enumerate().map(content).collect();
        Self { layout, node: hash_all(devices.iter().copied()), devices }
    }
}
