//! Which devices can stand for each other.
//!
//! Two devices can when every selector of the pod says the same about them, they offer the same,
//! constraints see the same on them, and the same is left of them. Devices that draw on common
//! counters (partitions of one GPU) are looked at together, as a group: two groups can stand for
//! each other when they are built alike, device by device and counter by counter, and the same is
//! left of everything in them; and then each device of the one can stand for its counterpart in the
//! other.
//!
//! A state of the search is then known by how many groups of each kind are in which state,
//! whichever groups they are. It is kept as a sum of hashes of 128 bits, one for each group, which
//! a change of one device changes in one place.

use std::collections::BTreeMap;

use super::prepare::Verdict;
use super::state::State;
use crate::cluster::{CounterAmount, Reach, ValueId};
use crate::shape::Shape;

/// A hash that is taken for what it stands for: of a search's states no two of 2^18 meet by chance
/// in 2^128.
pub(super) type Hash = u128;

/// Which devices can stand for each other, and the state that all of them are in.
pub(super) struct Symmetry {
    /// Per candidate what never changes: its kind, and its place in its group.
    kinds: Vec<u32>,
    /// Per candidate its group.
    group_of: Vec<usize>,
    groups: Vec<Group>,
    /// Per candidate the hash of what is taken of it.
    devices: Vec<Hash>,
    total: Hash,
}

/// Devices that draw on common counters, or a device by itself.
struct Group {
    members: Vec<usize>,
    /// The counters they draw on.
    counters: Vec<u32>,
    /// What never changes of it.
    kind: Hash,
    /// Its state, with its kind.
    hash: Hash,
}

impl Symmetry {
    pub(super) fn new(
        shape: &Shape,
        reach: &Reach,
        state: &State<'_>,
        verdicts: &[Verdict],
    ) -> Self {
        let own = own_kinds(shape, reach, state, verdicts);
        let (group_of, mut groups) = groups(reach);
        let mut kinds = vec![0; own.len()];
        let mut known: BTreeMap<(u32, Vec<(usize, i128)>), u32> = BTreeMap::new();
        for group in &mut groups {
            let mut structure = Vec::new();
            for &i in &group.members {
                let local = |used: &CounterAmount| {
                    (group.counters.binary_search(&used.counter).unwrap_or(usize::MAX), used.amount)
                };
                let consumes = reach.consumes.get(i).into_iter().flatten().map(local).collect();
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

    /// Takes in that something else is taken of a candidate.
    pub(super) fn update(&mut self, state: &State<'_>, i: usize) {
        self.devices[i] = self.device_hash(state, i);
        self.rehash(state, self.group_of[i]);
    }

    /// Whether one can stand for the other in everything that is still to be decided.
    pub(super) fn same(&self, a: usize, b: usize) -> bool {
        let hash = |i: usize| self.groups[self.group_of[i]].hash;
        self.kinds[a] == self.kinds[b] && self.devices[a] == self.devices[b] && hash(a) == hash(b)
    }

    /// What is the same of two sets of devices if each device of the one can stand for one of the
    /// other.
    pub(super) fn signature(&self, devices: &[usize]) -> Hash {
        let of_device = |&i: &usize| mix(self.devices[i], self.groups[self.group_of[i]].hash);
        devices.iter().map(of_device).fold(0, Hash::wrapping_add)
    }

    /// The state of everything that decides how the search goes on within the claim.
    pub(super) fn hash(&self, state: &State<'_>, claim: usize) -> Hash {
        let mut hash = mix(self.total, state.results(claim) as u128);
        for held in state.held(claim) {
            let number = |value: &ValueId| u128::from(value.number());
            let values = held.values();
            hash = match values.first() {
                None => mix(hash, 1),
                // With lists as sets it matters which came before; otherwise the first says all
                // there is to say.
                Some(_) => {
                    let in_any_order =
                        values.iter().map(|v| mix(7, number(v))).fold(0, Hash::wrapping_add);
                    mix(mix(hash, number(&values[0])), in_any_order)
                }
            };
        }
        hash
    }

    /// The group of a candidate that draws on counters.
    pub(super) fn counter_group(&self, i: usize) -> Option<usize> {
        let group = self.group_of[i];
        (!self.groups[group].counters.is_empty()).then_some(group)
    }

    fn device_hash(&self, state: &State<'_>, i: usize) -> Hash {
        let (holders, marks) = state.marks(i);
        let marks = marks.into_iter().fold(0, |marks, mark| marks * 2 + u128::from(mark));
        let marks = mix(mix(u128::from(self.kinds[i]), holders), marks);
        state.left_of(i).iter().fold(marks, |hash, left| mix(hash, left.cast_unsigned()))
    }

    fn rehash(&mut self, state: &State<'_>, g: usize) {
        let group = &mut self.groups[g];
        let devices =
            group.members.iter().map(|&i| self.devices[i]).fold(group.kind, Hash::wrapping_add);
        let counters = group.counters.iter().map(|&c| state.counter_left(c).cast_unsigned());
        let fresh = counters.fold(mix(devices, 3), mix);
        self.total = self.total.wrapping_sub(group.hash).wrapping_add(fresh);
        group.hash = fresh;
    }
}

/// Numbers what candidates have in common, whatever is taken of them and without their counters.
fn own_kinds(shape: &Shape, reach: &Reach, state: &State<'_>, verdicts: &[Verdict]) -> Vec<u32> {
    let count = reach.candidates.len();
    // Then twins can stand for each other, which are joined to every other device alike.
    let must_be_joined =
        (0..shape.alternatives.len()).any(|place| shape.alternatives[place].must_be_joined());
    let mut known: BTreeMap<Vec<u32>, u32> = BTreeMap::new();
    let mut key = Vec::new();
    let kind = |i: usize| {
        let candidate = &reach.candidates[i];
        key.clear();
        key.extend([
            candidate.offer.number(),
            candidate.pool * u32::from(!reach.counters_left.is_empty()),
        ]);
        key.extend((0..shape.alternatives.len()).map(|place| verdicts[place * count + i] as u32));
        let held = (0..shape.claims.len()).flat_map(|claim| state.held(claim));
        key.extend(held.map(|held| held.value(i).number()));
        if must_be_joined {
            key.extend(
                reach
                    .places
                    .as_ref()
                    .map_or([i as u32, 0], |places| places.twins(candidate.pool, i)),
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

/// Puts candidates that draw on common counters together.
fn groups(reach: &Reach) -> (Vec<usize>, Vec<Group>) {
    let count = reach.candidates.len();
    let mut group_of: Vec<usize> = vec![usize::MAX; count];
    let mut groups: Vec<Group> = Vec::new();
    // Which counters hang together: those that one device draws on.
    let mut parent: Vec<u32> = (0..reach.counters_left.len() as u32).collect();
    for consumes in &reach.consumes {
        for pair in consumes.windows(2) {
            let (a, b) = (root(&mut parent, pair[0].counter), root(&mut parent, pair[1].counter));
            parent[a.max(b) as usize] = a.min(b);
        }
    }
    let mut by_root: BTreeMap<u32, usize> = BTreeMap::new();
    for (i, group) in group_of.iter_mut().enumerate() {
        let first = reach.consumes.get(i).and_then(|list| list.first()).map(|used| used.counter);
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
            .extend(reach.consumes.get(i).into_iter().flatten().map(|used| used.counter));
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

fn hash_all(values: impl Iterator<Item = u128>) -> Hash {
    values.fold(11, mix)
}

/// Mixes a value into a hash: two rounds of multiplication over both halves (as in wyhash and
/// foldhash).
fn mix(hash: Hash, value: u128) -> Hash {
    const K: [u64; 4] = [
        0x9e37_79b9_7f4a_7c15,
        0xbf58_476d_1ce4_e5b9,
        0x94d0_49bb_1331_11eb,
        0xd6e8_feb8_6659_fd93,
    ];
    let halves = |wide: u128| (wide as u64, (wide >> 64) as u64);
    let fold = |a: u64, b: u64| {
        let (low, high) = halves(u128::from(a) * u128::from(b));
        low ^ high
    };
    let ((h0, h1), (v0, v1)) = (halves(hash), halves(value));
    let a = fold(h0 ^ v0 ^ K[0], h1.rotate_left(23) ^ v1 ^ K[1]);
    let b = fold(h1 ^ v0.rotate_left(32) ^ K[2], h0.rotate_left(41) ^ v1 ^ K[3]);
    let c = fold(a ^ K[3], b ^ K[0]);
    let d = fold(b.rotate_left(17) ^ K[1] ^ h1, a ^ K[2] ^ v0);
    u128::from(c.wrapping_add(h0.rotate_left(7))) | (u128::from(d ^ a) << 64)
}
