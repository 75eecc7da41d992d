//! The algorithm of NVIDIA's `bestEffort` policy (github.com/NVIDIA/go-gpuallocator).
//!
//! The free GPUs are partitioned into sets of the requested size, with the remainder in one smaller
//! set. The best full set of the partition with the highest sum of scores is chosen. Ties go to the
//! first, with sets in ascending order.
//!
//! NVIDIA's code enumerates partitions; here each set of free GPUs is partitioned once, with the
//! same result.

use std::collections::HashMap;
use std::sync::Arc;

use tessera_allocator::topology::{DeviceSet, LinkMatrix, Score};

use super::policies::{SetPolicy, subsets};

pub(super) struct BestEffort {
    matrix: Arc<LinkMatrix>,
    /// Best partition by free GPUs and size. The number of free GPUs determines whether the
    /// smaller set is still to be formed.
    partitions: HashMap<(DeviceSet, usize), (Score, DeviceSet)>,
}

impl BestEffort {
    pub(super) fn new(matrix: Arc<LinkMatrix>) -> Self {
        Self { matrix, partitions: HashMap::new() }
    }

    /// Returns the best sum of scores, and that partition's set with the lowest GPU index.
    fn partition(&mut self, free: DeviceSet, size: usize) -> (Score, DeviceSet) {
        let smaller = free.len() % size;
        if let Some(known) = self.partitions.get(&(free, size)) {
            return *known;
        }
        let Some(lowest) = free.iter().next() else { return (0, DeviceSet::EMPTY) };
        let lowest = DeviceSet::one(lowest);
        let mut best = None;
        // The smaller set is padded with indexes after every GPU, so it comes last among sets with
        // the same beginning.
        for set in sets_with(lowest, free, size, smaller) {
            let sum = self.matrix.score(set) + self.partition(free - set, size).0;
            if best.is_none_or(|(highest, _)| sum > highest) {
                best = Some((sum, set));
            }
        }
        let best = best.unwrap_or((0, free));
        self.partitions.insert((free, size), best);
        best
    }
}

/// Returns the full and smaller sets that contain the lowest GPU, in ascending order with the
/// padding last.
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
            let (_, set) = self.partition(left, count);
            let score = self.matrix.score(set);
            if set.len() == count && best.is_none_or(|(highest, _)| score > highest) {
                best = Some((score, set));
            }
            left = left - set;
        }
        best.expect("enough GPUs are free").1
    }
}
