//! What one node reaches: devices in upstream's order, and what is left of each.

use std::collections::BTreeMap;
use std::sync::Arc;

use tessera_api::config::Sharing;
use tessera_api::quantity::Quantity;

use super::pools::{BadNodeSelector, NodePool, PoolState, chosen};
use super::{CompiledDevice, CompiledSlice, Interner, OfferId, Places};
use crate::features::Features;
use crate::model::{
    CounterUse, Device, DeviceId, DeviceUse, Node, NodeChoice, Slice, Usage, differing,
};

/// Devices that a node might use, of all complete pools, and what is taken of them. Lists of the
/// same length go together: candidate `i` is described by element `i` of each.
#[derive(Debug, Default)]
pub(crate) struct Reach {
    pub(crate) pools: Vec<NodePool>,
    pub(crate) candidates: Vec<Candidate>,
    /// How often each is allocated as a whole.
    pub(crate) exclusive: Vec<u32>,
    /// How many shares there are of each.
    pub(crate) shares: Vec<u32>,
    /// How many of both are shared by MPS.
    by_mps: Vec<u32>,
    /// What is left of each capacity of each candidate, in nanounits; below zero where too much
    /// was given out.
    pub(crate) left: Vec<i128>,
    /// Where a candidate's part of `left` begins; one more at the end.
    pub(crate) offset: Vec<u32>,
    /// Which counters a candidate takes when it is allocated; empty unless some take any.
    pub(crate) consumes: Vec<Vec<CounterAmount>>,
    /// What is left of each counter of each pool.
    pub(crate) counters_left: Vec<i128>,
    /// Per pool where its counters begin; one more at the end. Empty where there are none.
    pub(crate) counters_of: Vec<u32>,
    /// Devices that take counters and that the node cannot use, and whether they are allocated.
    elsewhere: Vec<Elsewhere>,
    /// Where the candidates are in their machines; none until somebody asks.
    pub(crate) places: Option<Places>,
    pub(crate) defect: Option<BadNodeSelector>,
}

/// A device that a node might use.
#[derive(Debug, Clone)]
pub(crate) struct Candidate {
    slice: Arc<CompiledSlice>,
    at: u32,
    pub(crate) pool: u32,
    pub(crate) offer: OfferId,
    /// The number of its driver.
    pub(crate) driver: u32,
    /// The node is among those that may use it.
    pub(crate) reachable: bool,
}

/// So much of a counter, by its place in [`Reach::counters_left`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct CounterAmount {
    pub(crate) counter: u32,
    pub(crate) amount: i128,
}

#[derive(Debug)]
struct Elsewhere {
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

impl Reach {
    pub(super) fn new(
        pools: Vec<NodePool>,
        node: &Node,
        interner: &Interner,
        usage: &Usage,
        features: &Features,
    ) -> Self {
        let mut reach = Self { pools, offset: vec![0], ..Self::default() };
        reach.add_candidates(node, interner, usage);
        if features.partitionable {
            reach.add_counters(usage);
        }
        reach
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
                let reachable = !per_device || chosen(&compiled.device.nodes, node);
                let (pool, at, offer) = (p as u32, at as u32, compiled.offer);
                let driver = slice.driver;
                let candidate =
                    Candidate { slice: Arc::clone(slice), at, pool, offer, driver, reachable };
                let used = if usage.is_empty() { None } else { usage.of(&candidate.id()) };
                self.exclusive.push(used.map_or(0, |u| u.exclusive));
                self.shares.push(used.map_or(0, |u| u.shares));
                self.by_mps.push(used.map_or(0, |u| u.by_mps));
                self.left.extend_from_slice(&interner.offer(offer).capacity);
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
        let mut places: Vec<BTreeMap<(&str, &str), u32>> = Vec::new();
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
            places.push(names);
        }
        self.counters_of.push(self.counters_left.len() as u32);
        for candidate in &self.candidates {
            self.consumes
                .push(amounts(&candidate.device().consumes, &places[candidate.pool as usize]));
        }
        for (pool, places) in self.pools.iter().zip(&places) {
            for slice in &pool.elsewhere {
                for device in
                    slice.slice.devices.iter().filter(|device| !device.consumes.is_empty())
                {
                    let id = DeviceId { pool: pool.id.clone(), device: device.name.clone() };
                    let allocated = usage.of(&id).is_some();
                    self.elsewhere.push(Elsewhere {
                        id,
                        consumes: amounts(&device.consumes, places),
                        allocated,
                    });
                }
            }
        }
        let allocated = |i: &usize| self.exclusive[*i] > 0 || self.shares[*i] > 0;
        let here = (0..self.candidates.len()).filter(allocated).flat_map(|i| &self.consumes[i]);
        let elsewhere = self.elsewhere.iter().filter(|e| e.allocated).flat_map(|e| &e.consumes);
        for used in here.chain(elsewhere) {
            self.counters_left[used.counter as usize] -= used.amount;
        }
    }

    /// Says what is taken of a device. `false` = it is none of these.
    pub(super) fn set_use(&mut self, id: &DeviceId, used: Option<&DeviceUse>) -> bool {
        let is_allocated = used.is_some();
        let mut is_known = false;
        // A name may be there twice: here, and on another node of the pool.
        for device in self.elsewhere.iter_mut().filter(|e| e.id == *id) {
            charge(&mut self.counters_left, &device.consumes, device.allocated, is_allocated);
            device.allocated = is_allocated;
            is_known = true;
        }
        if let Some(i) = self.candidates.iter().position(|c| c.is(id)) {
            let was_allocated = self.exclusive[i] > 0 || self.shares[i] > 0;
            self.exclusive[i] = used.map_or(0, |u| u.exclusive);
            self.shares[i] = used.map_or(0, |u| u.shares);
            self.by_mps[i] = used.map_or(0, |u| u.by_mps);
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

    /// How others share the candidate, if that is not `own`.
    pub(crate) fn differing(&self, i: usize, own: Sharing) -> Option<Sharing> {
        differing(self.exclusive[i] + self.shares[i], self.by_mps[i], own)
    }

    /// What is left of the candidate's capacities, in the order of their names.
    pub(crate) fn left(&self, i: usize) -> &[i128] {
        &self.left[self.offset[i] as usize..self.offset[i + 1] as usize]
    }

    /// The counters of a pool, as places in [`counters_left`](Self::counters_left).
    pub(crate) fn counters_of(&self, pool: u32) -> std::ops::Range<usize> {
        match (self.counters_of.get(pool as usize), self.counters_of.get(pool as usize + 1)) {
            (Some(from), Some(to)) => *from as usize..*to as usize,
            _ => 0..0,
        }
    }

    /// Some pool contradicts itself.
    pub(crate) fn has_invalid_pool(&self) -> bool {
        self.pools.iter().any(|pool| pool.state == PoolState::Invalid)
    }
}

fn subtract(left: &mut [i128], device: &Device, used: &DeviceUse) {
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

fn amounts(uses: &[CounterUse], places: &BTreeMap<(&str, &str), u32>) -> Vec<CounterAmount> {
    let counters = uses
        .iter()
        .flat_map(|used| used.counters.iter().map(|(name, q)| (used.set.as_str(), name, q)));
    let amount = |(set, name, amount): (&str, &String, &Quantity)| {
        let counter = *places.get(&(set, name.as_str()))?;
        Some(CounterAmount { counter, amount: amount.nano() })
    };
    counters.filter_map(amount).collect()
}
