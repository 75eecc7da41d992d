//! What free devices are still worth to the requests to come.

use super::matrix::Score;
use super::{DeviceSet, LinkMatrix, SizeMix};

/// The residual value of each set of free devices: the expected sum of the scores that requests of
/// one size mix will reach on them, one after the other, until the first that does not fit.
///
/// Exact where the machine has few enough states, and then the sum of scores that follows from it
/// is the highest that any policy reaches which does not know the requests to come. Otherwise an
/// estimate: a fixed part of the score that the free devices have among themselves, so that sets
/// are preferred which cut few links.
#[derive(Debug)]
pub struct ResidualValue {
    table: Option<Table>,
}

/// A value in parts of a point.
pub(super) type Value = u64;

/// How many parts a point has, as a power of two.
pub(super) const POINT_BITS: u32 = 16;

/// A set is not taken if its score is below this part of the best that is possible now.
pub(super) const FLOOR: (u64, u64) = (4, 5);

/// The estimate: this part of the score of what is left. Of the parts from 1/20 to 1/2, one that
/// loses little on every known machine (docs/benchmarks/topology.md).
pub(super) const ESTIMATE: (u64, u64) = (2, 7);

#[derive(Debug)]
struct Table {
    /// What each device adds to the number of a state.
    strides: Vec<u32>,
    /// By the number of the state.
    values: Vec<Value>,
}

/// The values of what sets leave of the same free devices.
pub(super) struct Remaining<'v> {
    matrix: &'v LinkMatrix,
    free: DeviceSet,
    table: Option<(&'v Table, u32)>,
    /// Without a table: the score of the free devices, and of each with the free ones.
    score: Score,
    degrees: Vec<Score>,
}

impl ResidualValue {
    /// The most states for which exact values are computed: sixteen devices of which no two are
    /// alike. That takes below 0.2 s for requests of up to four devices, and half a MiB.
    pub const MAX_STATES: usize = 1 << 16;

    /// The values of a machine for requests of these sizes.
    pub fn new(matrix: &LinkMatrix, mix: &SizeMix) -> Self {
        Self { table: States::of(matrix).map(|states| Tabulation::new(matrix, mix, states).run()) }
    }

    /// Estimates for every machine, as those get that have too many states.
    pub fn estimated() -> Self {
        Self { table: None }
    }

    /// Whether the values are exact.
    pub fn is_exact(&self) -> bool {
        self.table.is_some()
    }

    /// The value of free devices, in points.
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
    /// What the device adds to the number of the state that is left when it is not taken; 0 where
    /// there is nothing to add.
    pub(super) fn stride(&self, device: usize) -> u32 {
        match self.table {
            Some((table, _)) if self.free.contains(device) => table.strides[device],
            _ => 0,
        }
    }

    /// The value of what is left when `set` is taken, which scores `score` and whose strides add up
    /// to `number`.
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

/// The states of a machine: how many of each group of twins are free, numbered with mixed radix.
struct States {
    /// Size of each group, and what one of its members adds to a state's number.
    groups: Vec<(u32, u32)>,
    count: usize,
}

impl States {
    /// `None` if they are too many.
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

/// Computes a table, from the fullest machine to the empty one.
struct Tabulation {
    states: States,
    /// What each device adds to a state's number.
    strides: Vec<u32>,
    /// Scores of a member of one group with another device of the other.
    pairs: Vec<Vec<Score>>,
    shares: Vec<(usize, u32)>,
    largest: usize,
    /// By size and state: the best score of that many free devices.
    best: Vec<Vec<Score>>,
    values: Vec<Value>,
}

/// The state that is being computed.
struct Current {
    number: usize,
    /// Free members of each group that are not taken.
    left: Vec<u32>,
    /// By size, the best sum of a set's score and the value of what it leaves.
    top: Vec<Value>,
    /// By how many are taken: what one of each group would add to the score.
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

    /// The next state: free devices of each group, the first group counting fastest.
    fn advance(&self, free: &mut [u32]) {
        for (count, (size, _)) in free.iter_mut().zip(&self.states.groups) {
            if *count < *size {
                *count += 1;
                return;
            }
            *count = 0;
        }
    }

    /// The best scores of a state follow from those of the states with one device less.
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

    /// Takes one more device, of group `from` or a later one, in all ways, and judges each set so
    /// made.
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
