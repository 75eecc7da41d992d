//! The optimum for requests that are known in advance.

use std::collections::HashMap;
use std::sync::Arc;

use tessera_allocator::topology::{DeviceSet, LinkMatrix, Score};

use super::MAX_ENUMERATED;
use super::policies::subsets;

/// Computes the optimum for requests that are known in advance.
pub struct Clairvoyant {
    matrix: Arc<LinkMatrix>,
    /// Best sum of scores for each set of free GPUs (by its bits), by remaining sizes, largest
    /// first.
    sums: HashMap<Vec<usize>, Vec<Option<Score>>>,
}

impl Clairvoyant {
    /// Returns the clairvoyant of a machine with at most [`MAX_ENUMERATED`] GPUs.
    pub fn new(matrix: Arc<LinkMatrix>) -> Option<Self> {
        (matrix.len() <= MAX_ENUMERATED).then(|| Self { matrix, sums: HashMap::new() })
    }

    /// Returns the highest sum of scores of disjoint sets of these sizes on the free machine. The
    /// sizes must fit on the machine.
    pub fn best(&mut self, sizes: &[usize]) -> Score {
        // A single GPU scores zero and can always take a remaining one.
        let mut sizes: Vec<usize> = sizes.iter().copied().filter(|size| *size > 1).collect();
        sizes.sort_unstable_by(|a, b| b.cmp(a));
        self.sum(self.matrix.devices(), &sizes)
    }

    fn sum(&mut self, free: DeviceSet, sizes: &[usize]) -> Score {
        let Some((&size, rest)) = sizes.split_first() else { return 0 };
        let free = self.canonical(free);
        let states = 1 << self.matrix.len();
        let cache = self.sums.entry(sizes.to_vec()).or_insert_with(|| vec![None; states]);
        if let Some(sum) = cache[free.bits() as usize] {
            return sum;
        }
        let sets = subsets(free, size).into_iter();
        // The choice among equivalent GPUs makes no difference.
        let different: Vec<DeviceSet> = sets.filter(|set| self.lowest_twins(*set, free)).collect();
        let best = different
            .into_iter()
            .map(|set| self.matrix.score(set) + self.sum(free - set, rest))
            .max();
        let best = best.unwrap_or(0);
        if let Some(cache) = self.sums.get_mut(sizes) {
            cache[free.bits() as usize] = Some(best);
        }
        best
    }

    /// Returns the set with the same number of GPUs of each equivalence group, those with the
    /// lowest indexes.
    fn canonical(&self, set: DeviceSet) -> DeviceSet {
        let lowest =
            |group: &DeviceSet| group.iter().take((*group & set).len()).collect::<DeviceSet>();
        self.matrix.twins().iter().map(lowest).fold(DeviceSet::EMPTY, |all, group| all | group)
    }

    fn lowest_twins(&self, set: DeviceSet, free: DeviceSet) -> bool {
        self.matrix.twins().iter().all(|group| {
            let (taken, left) = (*group & set, *group & (free - set));
            taken.iter().last() < left.iter().next() || taken.is_empty() || left.is_empty()
        })
    }
}
