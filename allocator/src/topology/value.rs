//! Residual value of free devices for future requests.

use super::matrix::Score;
use super::{DeviceSet, LinkMatrix, SizeMix};

/// Residual value of each set of free devices.
///
/// It is the expected sum of the scores that requests of one size mix achieve on the devices, one
/// after the other, until the first one that does not fit. It is exact if the machine has few
/// states; then no policy without knowledge of future requests achieves a higher sum of scores.
/// Otherwise it is an estimate: a fixed fraction of the score among the free devices, which prefers
/// sets that cut few links.
#[derive(Debug)]
pub struct ResidualValue {
    table: Option<Table>,
}

/// A value in fixed-point points.
pub(super) type Value = u64;

/// Number of fractional bits of a value.
pub(super) const POINT_BITS: u32 = 16;

/// Minimum score of a set, as a fraction of the best current score.
pub(super) const FLOOR: (u64, u64) = (4, 5);

/// Estimated residual value, as a fraction of the score of the remaining devices. Of the fractions
/// from 1/20 to 1/2, this one loses little on all known machines (docs/benchmarks/topology.md).
pub(super) const ESTIMATE: (u64, u64) = (2, 7);

#[derive(Debug)]
struct Table {
    /// Contribution of each device to the state number.
    strides: Vec<u32>,
    /// Value per state number.
    values: Vec<Value>,
}

/// Residual values of one set of free devices, without different sets.
pub(super) struct Remaining<'v> {
    matrix: &'v LinkMatrix,
    free: DeviceSet,
    table: Option<(&'v Table, u32)>,
    /// Without a table: the score of the free devices, and of each device with the free ones.
    score: Score,
    degrees: Vec<Score>,
}

impl ResidualValue {
    /// Maximum number of states for exact values: sixteen devices without twins. The table takes
    /// less than 0.2 s for requests of up to four devices, and 0.5 MiB.
    pub const MAX_STATES: usize = 1 << 16;

    /// Computes the values of a machine for requests of these sizes.
    pub fn new(matrix: &LinkMatrix, mix: &SizeMix) -> Self {
        Self { table: States::of(matrix).map(|states| Tabulation::new(matrix, mix, states).run()) }
    }

    /// Creates estimates, as used for machines with too many states.
    pub fn estimated() -> Self {
        Self { table: None }
    }

    /// Returns true if the values are exact.
    pub fn is_exact(&self) -> bool {
        self.table.is_some()
    }

    /// Returns the value of free devices, in points.
    ///
    /// # Panics
    /// Panics if a position of `free` is not below the length of `matrix`.
    pub fn points(&self, matrix: &LinkMatrix, free: DeviceSet) -> f64 {
        self.remaining(matrix, free).without(DeviceSet::EMPTY, 0, 0) as f64
            / f64::from(1 << POINT_BITS)
    }

    pub(super) fn remaining<'v>(
        &'v self,
        matrix: &'v LinkMatrix,
        free: DeviceSet,
    ) -> Remaining<'v> {
        let table = self.table.as_ref().map(|table| (table, table.number(free)));
        let (score, degrees) = match table {
            Some(_) => (0, Vec::new()),
            None => {
                (matrix.score(free), (0..matrix.len()).map(|d| matrix.degree(d, free)).collect())
            }
        };
        Remaining { matrix, free, table, score, degrees }
    }
}

impl Table {
    fn number(&self, set: DeviceSet) -> u32 {
        set.iter().map(|device| self.strides[device]).sum()
    }
}

impl Remaining<'_> {
    /// Returns the contribution of the device to the state number.
    ///
    /// 0 if it is not free or there is no table.
    pub(super) fn stride(&self, device: usize) -> u32 {
        match self.table {
            Some((table, _)) if self.free.contains(device) => table.strides[device],
            _ => 0,
        }
    }

    /// Returns the value that remains without `set`.
    ///
    /// `score` is the score of the set and `number` the sum of its strides.
    pub(super) fn without(&self, set: DeviceSet, score: Score, number: u32) -> Value {
        if let Some((table, all)) = self.table {
            return table.values[(all - number) as usize];
        }
        let taken = set & self.free;
        let within = if taken == set { score } else { self.matrix.score(taken) };
        let cut: Score = taken.iter().map(|device| self.degrees[device]).sum();
        let left = u64::from(self.score + within - cut);
        (left << POINT_BITS) * ESTIMATE.0 / ESTIMATE.1
    }
}

/// States of a machine: counts of free twins per group, numbered in mixed radix.
struct States {
    /// Size of each group, and the contribution of one member to the state number.
    groups: Vec<(u32, u32)>,
    count: usize,
}

impl States {
    /// Returns `None` if there are too many states.
    fn of(matrix: &LinkMatrix) -> Option<Self> {
        let mut count: usize = 1;
        let mut groups = Vec::new();
        for group in matrix.twins() {
            groups.push((group.len() as u32, count as u32));
            count *= group.len() + 1;
            if count > ResidualValue::MAX_STATES {
                return None;
            }
        }
        Some(Self { groups, count })
    }
}

/// Computation of a table, in ascending order of states.
struct Tabulation {
    states: States,
    /// Contribution of each device to the state number.
    strides: Vec<u32>,
    /// Score of a member of one group with another device of the other.
    pairs: Vec<Vec<Score>>,
    shares: Vec<(usize, u32)>,
    largest: usize,
    /// Best score by size and state.
    best: Vec<Vec<Score>>,
    values: Vec<Value>,
}

/// State that is being computed.
struct Current {
    number: usize,
    /// Free members of each group that are not taken.
    left: Vec<u32>,
    /// Best sum of score and residual value, by size.
    top: Vec<Value>,
    /// Score gain of one device of each group, by number of taken devices.
    gains: Vec<Vec<Score>>,
}

impl Tabulation {
    fn new(matrix: &LinkMatrix, mix: &SizeMix, states: States) -> Self {
        let twins = matrix.twins();
        let mut strides = vec![0; matrix.len()];
        for (group, (_, stride)) in twins.iter().zip(&states.groups) {
            group.iter().for_each(|device| strides[device] = *stride);
        }
        let pair = |one: &DeviceSet, other: &DeviceSet| {
            let mut members = one.iter();
            let first = members.next();
            let second = if one == other { members.next() } else { other.iter().next() };
            first.zip(second).map_or(0, |(a, b)| matrix.pair(a, b))
        };
        let largest = mix.largest().min(matrix.len());
        Self {
            strides,
            pairs: twins
                .iter()
                .map(|one| twins.iter().map(|other| pair(one, other)).collect())
                .collect(),
            shares: mix.shares().filter(|(size, _)| *size <= largest).collect(),
            largest,
            best: vec![Vec::with_capacity(states.count); largest + 1],
            values: Vec::with_capacity(states.count),
            states,
        }
    }

    fn run(mut self) -> Table {
        let groups = self.states.groups.len();
        let mut current = Current {
            number: 0,
            left: vec![0; groups],
            top: vec![0; self.largest + 1],
            gains: vec![vec![0; groups]; self.largest + 1],
        };
        for number in 0..self.states.count {
            current.number = number;
            let free: u32 = current.left.iter().sum();
            self.extend_best(&current, free as usize);
            current.top.fill(0);
            if free > 0 && self.largest > 0 {
                self.take(&mut current, 0, 0, 0, 0);
            }
            let expected: Value = self
                .shares
                .iter()
                .map(|(size, share)| u64::from(*share) * current.top[*size])
                .sum();
            self.values.push(expected / u64::from(SizeMix::WHOLE));
            self.advance(&mut current.left);
        }
        Table { strides: self.strides, values: self.values }
    }

    /// Advances to the next state; the first group changes fastest.
    fn advance(&self, free: &mut [u32]) {
        for (count, (size, _)) in free.iter_mut().zip(&self.states.groups) {
            if *count < *size {
                *count += 1;
                return;
            }
            *count = 0;
        }
    }

    /// Appends the best scores of a state, derived from the states with one device less.
    fn extend_best(&mut self, current: &Current, free: usize) {
        for size in 0..=self.largest {
            let best = match size.cmp(&free) {
                std::cmp::Ordering::Greater => 0,
                std::cmp::Ordering::Equal => self.score(&current.left),
                std::cmp::Ordering::Less => {
                    let occupied =
                        current.left.iter().zip(&self.states.groups).filter(|(left, _)| **left > 0);
                    let one_less = |(_, (_, stride)): (_, &(u32, u32))| {
                        self.best[size][current.number - *stride as usize]
                    };
                    occupied.map(one_less).max().unwrap_or(0)
                }
            };
            self.best[size].push(best);
        }
    }

    fn score(&self, counts: &[u32]) -> Score {
        let mut score = 0;
        for (g, &count) in counts.iter().enumerate() {
            score += self.pairs[g][g] * (count * count.saturating_sub(1) / 2);
            for (h, &other) in counts.iter().enumerate().skip(g + 1) {
                score += self.pairs[g][h] * count * other;
            }
        }
        score
    }

    /// Takes one more device, of group `from` or later, in all ways, and rates each resulting set.
    fn take(&self, current: &mut Current, from: usize, taken: usize, score: Score, number: usize) {
        let size = taken + 1;
        let floor = u64::from(self.best[size][current.number]) * FLOOR.0;
        for g in from..current.left.len() {
            if current.left[g] == 0 {
                continue;
            }
            let score = score + current.gains[taken][g];
            let number = number + self.states.groups[g].1 as usize;
            if u64::from(score) * FLOOR.1 >= floor {
                let total = (u64::from(score) << POINT_BITS) + self.values[current.number - number];
                current.top[size] = current.top[size].max(total);
            }
            if size < self.largest {
                let (done, next) = current.gains.split_at_mut(size);
                for ((gain, next), pair) in
                    done[taken].iter().zip(&mut next[0]).zip(&self.pairs[g]).skip(g)
                {
                    *next = gain + pair;
                }
                current.left[g] -= 1;
                self.take(current, g, size, score, number);
                current.left[g] += 1;
            }
        }
    }
}
