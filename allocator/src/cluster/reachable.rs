//! Devices that a node can reach, in upstream's order, and their free capacity.

use std::cell::OnceCell;
use std::collections::BTreeMap;
use std::sync::Arc;

use tessera_api::config::Sharing;
use tessera_api::quantity::Quantity;

use super::pools::{BadNodeSelector, NodePool, PoolState, includes};
use super::states::NodeState;
use super::{CompiledDevice, CompiledSlice, FastMap, Interner, MatrixPositions, ProfileId};
use crate::features::FeatureGates;
use crate::model::{
    CounterUse, Device, DeviceId, DeviceLoad, DeviceUsage, Node, NodeChoice, Slice, Usage,
    conflicting_sharing,
};

/// Candidate devices of a node in all complete pools, and their consumption.
///
/// Element `i` of each per-candidate list describes candidate `i`.
#[derive(Debug, Default)]
pub(crate) struct ReachableDevices {
    pub(crate) pools: Vec<NodePool>,
    /// True for each pool that only this node can use.
    pub(crate) is_own: Box<[bool]>,
    pub(crate) candidates: Vec<Candidate>,
    /// Number of exclusive allocations per candidate.
    pub(crate) exclusive: Vec<u32>,
    /// Number of shares per candidate.
    pub(crate) shares: Vec<u32>,
    /// Number of allocations of both kinds shared by MPS, per candidate.
    pub(super) by_mps: Vec<u32>,
    /// Measured load per candidate; empty while no policy uses it.
    pub(crate) loads: Vec<Option<DeviceLoad>>,
    /// Free amount per capacity and candidate, in nano-units; negative if overcommitted.
    pub(crate) left: Vec<i128>,
    /// Start of each candidate's part of `left`, and the end.
    pub(crate) offset: Vec<u32>,
    /// Counters that a candidate consumes; empty if no candidate consumes any.
    pub(crate) consumes: Vec<Vec<CounterAmount>>,
    /// Free amount of each counter of each pool.
    pub(crate) counters_left: Vec<i128>,
    /// Start of each pool's counters, and the end; empty without counters.
    pub(crate) counters_of: Vec<u32>,
    /// Devices that consume counters but that the node cannot use.
    unreachable: Vec<UnreachableDevice>,
    /// Matrix positions of the candidates; `None` until first used.
    pub(crate) matrix_positions: Option<MatrixPositions>,
    pub(crate) defect: Option<BadNodeSelector>,
    /// Computed when it is first read after a change.
    state: OnceCell<NodeState>,
}

/// A device that the node might use.
#[derive(Debug, Clone)]
pub(crate) struct Candidate {
    slice: Arc<CompiledSlice>,
    at: u32,
    pub(crate) pool: u32,
    pub(crate) profile: ProfileId,
    /// Interned driver name.
    pub(crate) driver: u32,
    /// True if the device can be used on the node.
    pub(crate) is_reachable: bool,
}

/// Amount of a counter, by its index in [`ReachableDevices::counters_left`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct CounterAmount {
    pub(crate) counter: u32,
    pub(crate) amount: i128,
}

impl CounterAmount {
    /// Returns true if all of these amounts are left.
    pub(crate) fn all_left(consumes: &[Self], left: &[i128]) -> bool {
        consumes.iter().all(|used| left[used.counter as usize] >= used.amount)
    }
}

#[derive(Debug)]
struct UnreachableDevice {
    id: DeviceId,
    consumes: Vec<CounterAmount>,
    allocated: bool,
}

impl Candidate {
    pub(crate) fn compiled(&self) -> &CompiledDevice {
        &self.slice.devices[self.at as usize]
    }

    pub(crate) fn device(&self) -> &Arc<Device> {
        &self.compiled().device
    }

    pub(crate) fn slice(&self) -> &Slice {
        &self.slice.slice
    }

    pub(crate) fn id(&self) -> DeviceId {
        DeviceId { pool: self.slice().pool.clone(), device: self.device().name.clone() }
    }

    fn is(&self, id: &DeviceId) -> bool {
        self.device().name == id.device && self.slice().pool == id.pool
    }
}

impl ReachableDevices {
    pub(super) fn new(
        pools: Vec<NodePool>,
        node: &Node,
        interner: &Interner,
        usage: &Usage,
        features: &FeatureGates,
    ) -> Self {
        let is_own = pools.iter().map(|pool| pool.is_only_of(&node.name)).collect();
        let mut reachable = Self { pools, is_own, offset: vec![0], ..Self::default() };
        reachable.add_candidates(node, interner, usage);
        if features.partitionable {
            reachable.add_counters(usage);
        }
        reachable
    }

    pub(super) fn defective(defect: BadNodeSelector) -> Self {
        Self { defect: Some(defect), ..Self::default() }
    }

    fn add_candidates(&mut self, node: &Node, interner: &Interner, usage: &Usage) {
        let complete =
            self.pools.iter().enumerate().filter(|(_, p)| p.state == PoolState::Complete);
        let slices = complete.flat_map(|(p, pool)| pool.slices.iter().map(move |slice| (p, slice)));
        for (p, slice) in slices {
            let per_device = slice.slice.nodes == NodeChoice::PerDevice;
            for (at, compiled) in slice.devices.iter().enumerate() {
                let is_reachable = !per_device || includes(&compiled.device.nodes, node);
                let (pool, at, profile) = (p as u32, at as u32, compiled.profile);
                let driver = slice.driver;
                let candidate =
                    Candidate { slice: Arc::clone(slice), at, pool, profile, driver, is_reachable };
                let used = if usage.is_empty() { None } else { usage.get(&candidate.id()) };
                self.exclusive.push(used.map_or(0, |u| u.exclusive));
                self.shares.push(used.map_or(0, |u| u.shares));
                self.by_mps.push(used.map_or(0, |u| u.mps_allocations));
                self.left.extend_from_slice(&interner.profile(profile).capacity);
                let from = *self.offset.last().unwrap_or(&0) as usize;
                if let Some(used) = used {
                    subtract(&mut self.left[from..], &compiled.device, used);
                }
                self.offset.push(self.left.len() as u32);
                self.candidates.push(candidate);
            }
        }
    }

    fn add_counters(&mut self, usage: &Usage) {
        let complete = |pool: &NodePool| pool.state == PoolState::Complete;
        if !self.pools.iter().any(|pool| complete(pool) && !pool.counters.is_empty()) {
            return;
        }
        let mut counter_indices: Vec<BTreeMap<(&str, &str), u32>> = Vec::new();
        for pool in &self.pools {
            self.counters_of.push(self.counters_left.len() as u32);
            let mut names = BTreeMap::new();
            for set in
                pool.counters.iter().filter(|_| complete(pool)).flat_map(|s| &s.slice.counter_sets)
            {
                for (name, value) in &set.counters {
                    names.insert(
                        (set.name.as_str(), name.as_str()),
                        self.counters_left.len() as u32,
                    );
                    self.counters_left.push(value.nano());
                }
            }
            counter_indices.push(names);
        }
        self.counters_of.push(self.counters_left.len() as u32);
        for candidate in &self.candidates {
            self.consumes.push(amounts(
                &candidate.device().consumes,
                &counter_indices[candidate.pool as usize],
            ));
        }
        for (pool, counter_indices) in self.pools.iter().zip(&counter_indices) {
            for slice in &pool.other_slices {
                for device in
                    slice.slice.devices.iter().filter(|device| !device.consumes.is_empty())
                {
                    let id = DeviceId { pool: pool.id.clone(), device: device.name.clone() };
                    let allocated = usage.get(&id).is_some();
                    self.unreachable.push(UnreachableDevice {
                        id,
                        consumes: amounts(&device.consumes, counter_indices),
                        allocated,
                    });
                }
            }
        }
        let allocated = |i: &usize| self.exclusive[*i] > 0 || self.shares[*i] > 0;
        let here = (0..self.candidates.len()).filter(allocated).flat_map(|i| &self.consumes[i]);
        let unreachable = self.unreachable.iter().filter(|e| e.allocated).flat_map(|e| &e.consumes);
        for used in here.chain(unreachable) {
            self.counters_left[used.counter as usize] -= used.amount;
        }
    }

    /// Returns the state of the node.
    pub(super) fn state(&self) -> &NodeState {
        self.state.get_or_init(|| NodeState::of(self))
    }

    /// Sets the positions of the candidates in the matrices.
    pub(super) fn set_positions(&mut self, positions: MatrixPositions) {
        self.matrix_positions = Some(positions);
        self.state.take();
    }

    /// Sets the measured loads of all candidates.
    pub(super) fn set_loads(&mut self, loads: &FastMap<DeviceId, DeviceLoad>) {
        let load = |candidate: &Candidate| loads.get(&candidate.id()).copied();
        self.loads = self.candidates.iter().map(load).collect();
        self.state.take();
    }

    /// Sets the measured load of a device. Returns false if the device is no candidate.
    pub(super) fn set_load(&mut self, id: &DeviceId, load: Option<DeviceLoad>) -> bool {
        let candidate = self.candidates.iter().position(|c| c.is(id));
        if let Some(known) = candidate.and_then(|i| self.loads.get_mut(i)) {
            *known = load;
            self.state.take();
        }
        candidate.is_some()
    }

    /// Sets the consumption of a device. Returns false if the device is not in the lists.
    pub(super) fn set_use(&mut self, id: &DeviceId, used: Option<&DeviceUsage>) -> bool {
        self.state.take();
        let is_allocated = used.is_some();
        let mut is_known = false;
        // A name can occur twice: here, and on another node of the pool.
        for device in self.unreachable.iter_mut().filter(|e| e.id == *id) {
            charge(&mut self.counters_left, &device.consumes, device.allocated, is_allocated);
            device.allocated = is_allocated;
            is_known = true;
        }
        if let Some(i) = self.candidates.iter().position(|c| c.is(id)) {
            let was_allocated = self.exclusive[i] > 0 || self.shares[i] > 0;
            self.exclusive[i] = used.map_or(0, |u| u.exclusive);
            self.shares[i] = used.map_or(0, |u| u.shares);
            self.by_mps[i] = used.map_or(0, |u| u.mps_allocations);
            let device = Arc::clone(self.candidates[i].device());
            let left = &mut self.left[self.offset[i] as usize..self.offset[i + 1] as usize];
            for (left, capacity) in left.iter_mut().zip(device.capacity.values()) {
                *left = capacity.value.nano();
            }
            if let Some(used) = used {
                subtract(left, &device, used);
            }
            if let Some(consumes) = self.consumes.get(i) {
                charge(&mut self.counters_left, consumes, was_allocated, is_allocated);
            }
            is_known = true;
        }
        is_known
    }

    /// Returns the conflicting sharing mechanism of other allocations, if any.
    pub(crate) fn conflicting_sharing(&self, i: usize, own: Sharing) -> Option<Sharing> {
        conflicting_sharing(self.exclusive[i] + self.shares[i], self.by_mps[i], own)
    }

    /// Returns the free amounts of the candidate, in the order of capacity names.
    pub(crate) fn left(&self, i: usize) -> &[i128] {
        &self.left[self.offset[i] as usize..self.offset[i + 1] as usize]
    }

    /// Returns the counters of a pool, as indices in [`counters_left`](Self::counters_left).
    pub(crate) fn counters_of(&self, pool: u32) -> std::ops::Range<usize> {
        match (self.counters_of.get(pool as usize), self.counters_of.get(pool as usize + 1)) {
            (Some(from), Some(to)) => *from as usize..*to as usize,
            _ => 0..0,
        }
    }

    /// Returns true if a pool is invalid.
    pub(crate) fn has_invalid_pool(&self) -> bool {
        self.pools.iter().any(|pool| pool.state == PoolState::Invalid)
    }
}

fn subtract(left: &mut [i128], device: &Device, used: &DeviceUsage) {
    for (left, name) in left.iter_mut().zip(device.capacity.keys()) {
        let taken = used.consumed.get(name).map_or(0, Quantity::nano);
        *left = left.saturating_sub(taken);
    }
}

fn charge(left: &mut [i128], consumes: &[CounterAmount], before: bool, after: bool) {
    let sign = i128::from(before) - i128::from(after);
    for used in consumes {
        left[used.counter as usize] += sign * used.amount;
    }
}

fn amounts(
    uses: &[CounterUse],
    counter_indices: &BTreeMap<(&str, &str), u32>,
) -> Vec<CounterAmount> {
    let counters = uses
        .iter()
        .flat_map(|used| used.counters.iter().map(|(name, q)| (used.set.as_str(), name, q)));
    let amount = |(set, name, amount): (&str, &String, &Quantity)| {
        let counter = *counter_indices.get(&(set, name.as_str()))?;
        Some(CounterAmount { counter, amount: amount.nano() })
    };
    counters.filter_map(amount).collect()
}
