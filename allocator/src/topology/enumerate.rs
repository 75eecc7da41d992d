//! Enumeration of all sets of a size, up to twins.

use super::matrix::Score;
use super::request::SetRequest;
use super::value::Remaining;
use super::{DeviceSet, LinkMatrix, TopologyPreferences};

/// A set with its score.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ScoredSet {
    pub(super) set: DeviceSet,
    pub(super) score: Score,
    /// Number of pairs that share preferred scopes.
    pub(super) preferred: u32,
    /// Decrease of the state number if the set is taken (see [`Remaining::stride`]).
    pub(super) number: u32,
}

const EMPTY: ScoredSet = ScoredSet { set: DeviceSet::EMPTY, score: 0, preferred: 0, number: 0 };

/// Candidates by kind: twins that are all free or all not free. Members of a kind are
/// interchangeable, so one set represents all sets with equal counts per kind.
pub(super) struct Kinds {
    /// Members of each kind.
    pub(super) members: Vec<DeviceSet>,
    count: usize,
}

impl Kinds {
    pub(super) fn of(matrix: &LinkMatrix, request: &SetRequest) -> Self {
        let split = |group: &DeviceSet| {
            let candidates = *group & request.candidates;
            [candidates & request.free, candidates - request.free]
        };
        let members =
            matrix.twins().iter().flat_map(split).filter(|kind| !kind.is_empty()).collect();
        Self { members, count: request.count }
    }

    /// Returns the number of sets up to twins, regardless of requirements.
    pub(super) fn sets(&self) -> u64 {
        let mut ways = vec![0u64; self.count + 1];
        ways[0] = 1;
        for kind in &self.members {
            for taken in (1..=self.count).rev() {
                let most = kind.len().min(taken);
                ways[taken] =
                    (taken - most..=taken).fold(0, |sum: u64, rest| sum.saturating_add(ways[rest]));
            }
        }
        ways[self.count]
    }

    /// Returns the sets that meet the requirements.
    ///
    /// They have the lowest members of each kind and are in lexicographic order of the kinds.
    pub(super) fn enumerate(
        &self,
        matrix: &LinkMatrix,
        preferences: &TopologyPreferences,
        remaining: &Remaining<'_>,
    ) -> Vec<ScoredSet> {
        if self.count == 0 {
            return vec![EMPTY];
        }
        let together =
            |a: usize, b: usize| preferences.companions(matrix, a, DeviceSet::one(b)).contains(b);
        let bits = |row: &[bool]| {
            row.iter().rev().fold(0, |bits, allowed| bits << 1 | u64::from(*allowed))
        };
        let lowest = self.members.iter().filter_map(|kind| kind.iter().next());
        let mut enumeration = Enumeration {
            matrix,
            preferences,
            count: self.count,
            pairs: self.table(|a, b| matrix.pair(a, b), 0),
            together: self.table(together, true).iter().map(|row| bits(row)).collect(),
            strides: lowest.map(|device| remaining.stride(device)).collect(),
            left: self.members.clone(),
            after: (1..=self.members.len())
                .map(|kind| self.members[kind..].iter().map(|m| m.len()).sum())
                .collect(),
            gains: vec![vec![0; self.members.len()]; self.count],
            found: Vec::with_capacity(self.sets() as usize),
        };
        enumeration.take(0, 0, EMPTY, u64::MAX);
        enumeration.found
    }

    /// Evaluates `of` for a member of one kind and another device of the other.
    ///
    /// `alone` is used for a kind with one device and itself.
    fn table<T: Copy>(&self, of: impl Fn(usize, usize) -> T, alone: T) -> Vec<Vec<T>> {
        let between = |one: &DeviceSet, other: &DeviceSet| {
            let mut members = one.iter();
            let first = members.next();
            let second = if one == other { members.next() } else { other.iter().next() };
            first.zip(second).map_or(alone, |(a, b)| of(a, b))
        };
        self.members
            .iter()
            .map(|one| self.members.iter().map(|other| between(one, other)).collect())
            .collect()
    }
}

struct Enumeration<'e> {
    matrix: &'e LinkMatrix,
    preferences: &'e TopologyPreferences,
    count: usize,
    pairs: Vec<Vec<Score>>,
    /// Kinds that can be in one set with each kind, as bits.
    together: Vec<u64>,
    /// Contribution of a member of each kind to the state number.
    strides: Vec<u32>,
    /// Members of each kind that are not taken.
    left: Vec<DeviceSet>,
    /// Number of members of the later kinds.
    after: Vec<usize>,
    /// Score gain of one more device of each kind, by number of taken devices.
    gains: Vec<Vec<Score>>,
    found: Vec<ScoredSet>,
}

impl Enumeration<'_> {
    /// Takes one more device, of kind `from` or later. `allowed` are the kinds compatible with all
    /// taken devices.
    fn take(&mut self, from: usize, taken: usize, current: ScoredSet, allowed: u64) {
        for kind in from..self.left.len() {
            if taken + self.left[kind].len() + self.after[kind] < self.count {
                return;
            }
            let Some(device) = self.left[kind].iter().next().filter(|_| allowed >> kind & 1 == 1)
            else {
                continue;
            };
            let now = ScoredSet {
                set: current.set | DeviceSet::one(device),
                score: current.score + self.gains[taken][kind],
                number: current.number + self.strides[kind],
                preferred: 0,
            };
            if taken + 1 == self.count {
                let preferred = self.preferences.preferred_pairs(self.matrix, now.set);
                self.found.push(ScoredSet { preferred, ..now });
                continue;
            }
            let (done, next) = self.gains.split_at_mut(taken + 1);
            for ((gain, next), pair) in
                done[taken].iter().zip(&mut next[0]).zip(&self.pairs[kind]).skip(kind)
            {
                *next = gain + pair;
            }
            let allowed = allowed & self.together[kind];
            self.left[kind] = self.left[kind] - DeviceSet::one(device);
            self.take(kind, taken + 1, now, allowed);
            self.left[kind] = self.left[kind] | DeviceSet::one(device);
        }
    }
}

/// Iterator over the sets with the same counts per kind as a given set, lowest members first.
pub(super) struct Expansion {
    /// Members of each kind, and the chosen ones as bits over the list.
    kinds: Vec<(Vec<usize>, u64)>,
    done: bool,
}

impl Expansion {
    pub(super) fn new(kinds: &Kinds, set: DeviceSet) -> Self {
        let taken = kinds.members.iter().map(|kind| (kind.iter().collect(), (*kind & set).len()));
        let lowest =
            |(members, count): (Vec<usize>, usize)| (members, DeviceSet::first(count).bits());
        Self { kinds: taken.map(lowest).filter(|(_, chosen)| *chosen != 0).collect(), done: false }
    }
}

impl Iterator for Expansion {
    type Item = DeviceSet;

    fn next(&mut self) -> Option<DeviceSet> {
        if self.done {
            return None;
        }
        let devices = |(members, chosen): &(Vec<usize>, u64)| -> DeviceSet {
            DeviceSet::from_bits(*chosen).iter().map(|at| members[at]).collect()
        };
        let set = self.kinds.iter().map(devices).fold(DeviceSet::EMPTY, |all, kind| all | kind);
        self.done = !self.kinds.iter_mut().rev().any(|(members, chosen)| {
            let next = next_combination(*chosen).filter(|next| {
                DeviceSet::from_bits(*next).is_subset(DeviceSet::first(members.len()))
            });
            *chosen = next.unwrap_or_else(|| DeviceSet::first(chosen.count_ones() as usize).bits());
            next.is_some()
        });
        Some(set)
    }
}

/// Returns the next larger number with the same number of bits; `None` if there is none.
fn next_combination(bits: u64) -> Option<u64> {
    let lowest = bits & bits.wrapping_neg();
    let raised = bits.checked_add(lowest)?;
    Some((((raised ^ bits) >> 2) / lowest) | raised)
}
