//! Symmetry: groups of interchangeable devices.
//!
//! Two devices are interchangeable if all selectors of the pod give equal results, and profiles,
//! constrained attributes and free capacities are equal. Devices that consume common counters
//! (partitions of one GPU) form a group. Two groups are interchangeable if they have the same
//! structure, device by device and counter by counter, and the same free amounts. Then each device
//! of one group can replace its counterpart in the other.
//!
//! A state of the search is determined by the number of groups of each kind in each state. It is
//! stored as a sum of 128-bit hashes, one per group, so that a change of one device changes one
//! summand.

use std::collections::BTreeMap;

use super::state::SearchState;
use crate::cluster::{CounterAmount, ReachableDevices, ValueId};
use crate::shape::Shape;
use crate::wide_hash::{WideHash, hash_all, mix};

/// Result of the selectors of an alternative for a candidate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Not evaluated yet.
    Unknown,
    /// The class and the request select the candidate.
    Selected,
    /// The class or the request does not select the candidate.
    NotSelected,
    /// A selector failed.
    Failed,
}

/// Groups of interchangeable devices and a hash of their state.
pub(super) struct Symmetry {
    /// Constant properties of each candidate: its kind and its position in the group.
    kinds: Vec<u32>,
    /// Group of each candidate.
    group_of: Vec<usize>,
    groups: Vec<Group>,
    /// Hash of the consumption of each candidate.
    devices: Vec<WideHash>,
    total: WideHash,
}

/// Devices that consume common counters, or a single device.
struct Group {
    members: Vec<usize>,
    /// Counters that they consume.
    counters: Vec<u32>,
    /// Constant properties of the group.
    kind: WideHash,
    /// Hash of the state and the kind.
    hash: WideHash,
}

impl Symmetry {
    pub(super) fn new(
        shape: &Shape,
        reachable: &ReachableDevices,
        state: &SearchState<'_>,
        verdicts: &[Verdict],
    ) -> Self {
        let own = own_kinds(shape, reachable, state, verdicts);
        let (group_of, mut groups) = groups(reachable);
        let mut kinds = vec![0; own.len()];
        let mut known: BTreeMap<(u32, Vec<(usize, i128)>), u32> = BTreeMap::new();
        for group in &mut groups {
            let mut structure = Vec::new();
            for &i in &group.members {
                let local = |used: &CounterAmount| {
                    (group.counters.binary_search(&used.counter).unwrap_or(usize::MAX), used.amount)
                };
                let consumes = reachable.consumes.get(i).into_iter().flatten().map(local).collect();
                let next = known.len() as u32;
                kinds[i] = *known.entry((own[i], consumes)).or_insert(next);
                structure.push(u128::from(kinds[i]));
            }
            group.kind = hash_all(structure.into_iter());
        }
        let devices = vec![0; own.len()];
        let mut symmetry = Self { kinds, group_of, groups, devices, total: 0 };
        for i in 0..own.len() {
            symmetry.devices[i] = symmetry.device_hash(state, i);
        }
        for g in 0..symmetry.groups.len() {
            symmetry.rehash(state, g);
        }
        symmetry
    }

    /// Updates the hashes after a change of a candidate.
    pub(super) fn update(&mut self, state: &SearchState<'_>, i: usize) {
        self.devices[i] = self.device_hash(state, i);
        self.rehash(state, self.group_of[i]);
    }

    /// Returns true if the devices are interchangeable for all further decisions.
    pub(super) fn are_interchangeable(&self, a: usize, b: usize) -> bool {
        let hash = |i: usize| self.groups[self.group_of[i]].hash;
        self.kinds[a] == self.kinds[b] && self.devices[a] == self.devices[b] && hash(a) == hash(b)
    }

    /// Returns a hash that is equal for sets whose devices are pairwise interchangeable.
    pub(super) fn signature(&self, devices: &[usize]) -> WideHash {
        let of_device = |&i: &usize| mix(self.devices[i], self.groups[self.group_of[i]].hash);
        devices.iter().map(of_device).fold(0, WideHash::wrapping_add)
    }

    /// Returns a hash of everything that affects the rest of the search within the claim.
    pub(super) fn hash(&self, state: &SearchState<'_>, claim: usize) -> WideHash {
        let mut hash = mix(self.total, state.results(claim) as u128);
        for constraint in state.constraints(claim) {
            let number = |value: &ValueId| u128::from(value.number());
            let values = constraint.values();
            hash = match values.first() {
                None => mix(hash, 1),
                // With list attributes the order of the values matters; otherwise the first value
                // is sufficient.
                Some(_) => {
                    let in_any_order =
                        values.iter().map(|v| mix(7, number(v))).fold(0, WideHash::wrapping_add);
                    mix(mix(hash, number(&values[0])), in_any_order)
                }
            };
        }
        hash
    }

    /// Returns the group of a candidate that consumes counters.
    pub(super) fn counter_group(&self, i: usize) -> Option<usize> {
        let group = self.group_of[i];
        (!self.groups[group].counters.is_empty()).then_some(group)
    }

    fn device_hash(&self, state: &SearchState<'_>, i: usize) -> WideHash {
        let (holders, flags) = state.distinguishing_state(i);
        let flags = flags.into_iter().fold(0, |bits, flag| bits * 2 + u128::from(flag));
        let hash = mix(mix(u128::from(self.kinds[i]), holders), flags);
        state.left_of(i).iter().fold(hash, |hash, left| mix(hash, left.cast_unsigned()))
    }

    fn rehash(&mut self, state: &SearchState<'_>, g: usize) {
        let group = &mut self.groups[g];
        let devices =
            group.members.iter().map(|&i| self.devices[i]).fold(group.kind, WideHash::wrapping_add);
        let counters = group.counters.iter().map(|&c| state.counter_left(c).cast_unsigned());
        let fresh = counters.fold(mix(devices, 3), mix);
        self.total = self.total.wrapping_sub(group.hash).wrapping_add(fresh);
        group.hash = fresh;
    }
}

/// Numbers the kinds of candidates, regardless of consumption and counters.
fn own_kinds(
    shape: &Shape,
    reachable: &ReachableDevices,
    state: &SearchState<'_>,
    verdicts: &[Verdict],
) -> Vec<u32> {
    let count = reachable.candidates.len();
    // With a required topology, only devices with equal links to all others are interchangeable.
    let requires_topology =
        (0..shape.alternatives.len()).any(|index| shape.alternatives[index].requires_topology());
    let mut known: BTreeMap<Vec<u32>, u32> = BTreeMap::new();
    let mut key = Vec::new();
    let kind = |i: usize| {
        let candidate = &reachable.candidates[i];
        key.clear();
        key.extend([
            candidate.profile.number(),
            candidate.pool * u32::from(!reachable.counters_left.is_empty()),
        ]);
        key.extend((0..shape.alternatives.len()).map(|index| verdicts[index * count + i] as u32));
        let constraints = (0..shape.claims.len()).flat_map(|claim| state.constraints(claim));
        key.extend(constraints.map(|constraint| constraint.value(i).number()));
        if requires_topology {
            key.extend(
                reachable
                    .matrix_positions
                    .as_ref()
                    .map_or([i as u32, 0], |positions| positions.twin_group(candidate.pool, i)),
            );
        }
        let next = known.len() as u32;
        match known.get(&key) {
            Some(kind) => *kind,
            None => {
                known.insert(key.clone(), next);
                next
            }
        }
    };
    (0..count).map(kind).collect()
}

/// Groups the candidates that consume common counters.
fn groups(reachable: &ReachableDevices) -> (Vec<usize>, Vec<Group>) {
    let count = reachable.candidates.len();
    let mut group_of: Vec<usize> = vec![usize::MAX; count];
    let mut groups: Vec<Group> = Vec::new();
    // Union-find over counters: those consumed by one device are connected.
    let mut parent: Vec<u32> = (0..reachable.counters_left.len() as u32).collect();
    for consumes in &reachable.consumes {
        for pair in consumes.windows(2) {
            let (a, b) = (root(&mut parent, pair[0].counter), root(&mut parent, pair[1].counter));
            parent[a.max(b) as usize] = a.min(b);
        }
    }
    let mut by_root: BTreeMap<u32, usize> = BTreeMap::new();
    for (i, group) in group_of.iter_mut().enumerate() {
        let first =
            reachable.consumes.get(i).and_then(|list| list.first()).map(|used| used.counter);
        let at = match first {
            Some(counter) => *by_root.entry(root(&mut parent, counter)).or_insert(groups.len()),
            None => groups.len(),
        };
        if at == groups.len() {
            groups.push(Group { members: Vec::new(), counters: Vec::new(), kind: 0, hash: 0 });
        }
        groups[at].members.push(i);
        groups[at]
            .counters
            .extend(reachable.consumes.get(i).into_iter().flatten().map(|used| used.counter));
        *group = at;
    }
    for group in &mut groups {
        group.counters.sort_unstable();
        group.counters.dedup();
    }
    (group_of, groups)
}

fn root(parent: &mut [u32], mut counter: u32) -> u32 {
    while parent[counter as usize] != counter {
        parent[counter as usize] = parent[parent[counter as usize] as usize];
        counter = parent[counter as usize];
    }
    counter
}
