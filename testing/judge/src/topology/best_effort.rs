//! The algorithm of NVIDIA's `bestEffort` policy (github.com/NVIDIA/go-gpuallocator): the free GPUs
//! are divided into sets of the size asked for, what is left over forming one smaller set; of the
//! division with the highest sum of scores, the best full set is taken. The first counts where
//! several are equal, sets being formed in ascending order.
//!
//! It enumerates divisions; here each set of free GPUs is divided once, with the same result.

use std::collections::HashMap;
use std::sync::Arc;

use tessera_allocator::topology::{DeviceSet, LinkMatrix, Score};

use super::policies::{SetPolicy, subsets};

pub(super) struct BestEffort {
    matrix: Arc<LinkMatrix>,
    /// By free GPUs and size. Whether the smaller set is still to be formed, their number tells.
    divided: HashMap<(DeviceSet, usize), (Score, DeviceSet)>,
}

impl BestEffort {
    pub(super) fn new(matrix: Arc<LinkMatrix>) -> Self {
        Self { matrix, divided: HashMap::new() }
    }

    /// The best sum of scores, and the set with the lowest GPU in that division.
    fn divide(&mut self, free: DeviceSet, size: usize) -> (Score, DeviceSet) {
        let smaller = free.len() % size;
        if let Some(known) = self.divided.get(&(free, size)) {
            return *known;
        }
        let Some(lowest) = free.iter().next() else { return (0, DeviceSet::EMPTY) };
        let lowest = DeviceSet::one(lowest);
        let mut best = None;
        // The smaller set is padded with places that come after every GPU, so it is the last of
        // those that begin alike.
        for set in sets_with(lowest, free, size, smaller) {
            let sum = self.matrix.score(set) + self.divide(free - set, size).0;
            if best.is_none_or(|(highest, _)| sum > highest) {
                best = Some((sum, set));
            }
        }
        let best = best.unwrap_or((0, free));
        self.divided.insert((free, size), best);
        best
    }
}

/// The sets that the lowest GPU can be in, full ones and the smaller one, in ascending order with
/// the padding last.
fn sets_with(lowest: DeviceSet, free: DeviceSet, size: usize, smaller: usize) -> Vec<DeviceSet> {
    let others = free - lowest;
    let with = |count: usize| subsets(others, count - 1).into_iter().map(move |set| set | lowest);
    let mut sets: Vec<DeviceSet> =
        if free.len() >= size { with(size).collect() } else { Vec::new() };
    if smaller > 0 {
        sets.extend(with(smaller));
        let padded = |set: &DeviceSet| {
            let positions = set.iter().chain(std::iter::repeat(DeviceSet::MAX));
            positions.take(size).collect::<Vec<usize>>()
        };
        sets.sort_by_key(padded);
    }
    sets
}

impl SetPolicy for BestEffort {
    fn choose(&mut self, free: DeviceSet, count: usize) -> DeviceSet {
        if count == 1 {
            return free.iter().take(1).collect();
        }
        let mut best: Option<(Score, DeviceSet)> = None;
        let mut left = free;
        while !left.is_empty() {
            let (_, set) = self.divide(left, count);
            let score = self.matrix.score(set);
            if set.len() == count && best.is_none_or(|(highest, _)| score > highest) {
                best = Some((score, set));
            }
            left = left - set;
        }
        best.expect("as many GPUs are free as are asked for").1
    }
}
