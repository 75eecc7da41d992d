//! Branch and bound for the best set where there are too many to look at each.
//!
//! With the estimated residual value, score and value together are a sum over pairs and devices of
//! the set, up to a constant: `Σ pairs (7 w, or 9 w where both are free) - Σ free devices 2 (links
//! to free devices)`. A partial set is bounded by what it has, plus the best devices, each with
//! what it adds to the set and half of its best links to others.

use super::chooser::{OutOfSteps, SetRequest};
use super::value::{ESTIMATE, FLOOR};
use super::{DeviceSet, LinkMatrix};

/// Steps after which the best set found so far is taken.
const PATIENCE: u64 = 4_000;

/// Twice what a set is worth: halves of links stay whole.
type Worth = i64;

pub(super) struct Bound<'m> {
    matrix: &'m LinkMatrix,
    request: &'m SetRequest,
}

/// What is maximised.
struct Objective {
    /// Twice what each pair adds, by device and device.
    pairs: Vec<Vec<Worth>>,
    /// Twice what each device adds.
    devices: Vec<Worth>,
    /// By device and number: the sum of its so many best pairs.
    best_pairs: Vec<Vec<Worth>>,
}

struct Search<'m> {
    bound: &'m Bound<'m>,
    objective: &'m Objective,
    best: Option<(Worth, DeviceSet)>,
    spent: u64,
    /// What the caller grants in all.
    limit: u64,
}

/// Why a search ends early.
enum Stop {
    /// There is a set, and it was looked long enough for a better one.
    Patience,
    OutOfSteps,
}

impl<'m> Bound<'m> {
    pub(super) fn new(matrix: &'m LinkMatrix, request: &'m SetRequest) -> Self {
        Self { matrix, request }
    }

    /// The best set found, and whether none is better; `None` if none holds what is required.
    pub(super) fn search(&self, steps: &mut u64) -> Result<Option<(DeviceSet, bool)>, OutOfSteps> {
        let Some((set, proven)) = self.maximise(&self.objective(true), steps)? else {
            return Ok(None);
        };
        // What is fair is known only where the best score is.
        let Ok(Some((highest, found))) = self.maximise(&self.objective(false), steps) else {
            return Ok(Some((set, false)));
        };
        let wished = |set| self.request.wishes.preferred_pairs(self.matrix, set);
        let score = |set| u64::from(self.matrix.score(set));
        let fair =
            wished(set) == wished(highest) && score(set) * FLOOR.1 >= score(highest) * FLOOR.0;
        Ok(Some(if fair { (set, proven && found) } else { (highest, false) }))
    }

    /// The score alone, or with the residual value.
    fn objective(&self, with_value: bool) -> Objective {
        let (part, whole) =
            if with_value { (ESTIMATE.0 as Worth, ESTIMATE.1 as Worth) } else { (0, 1) };
        let count = self.matrix.len();
        let free = |d: usize| self.request.free.contains(d);
        let points = |a: usize, b: usize| Worth::from(self.matrix.pair(a, b));
        // A preferred pair counts for more than any other difference can.
        let total: Worth = (0..count)
            .flat_map(|a| (0..count).map(move |b| (a, b)))
            .map(|(a, b)| points(a, b))
            .sum();
        let bonus = 4 * (whole + part) * (total + 1);
        let pair = |a: usize, b: usize| {
            let factor = if free(a) && free(b) { whole + part } else { whole };
            let preferred = self.request.wishes.preferred_with(self.matrix, a, DeviceSet::one(b));
            2 * factor * points(a, b) + bonus * Worth::from(preferred)
        };
        let device = |d: usize| match free(d) {
            true => -2 * part * Worth::from(self.matrix.degree(d, self.request.free)),
            false => 0,
        };
        let pairs: Vec<Vec<Worth>> =
            (0..count).map(|a| (0..count).map(|b| pair(a, b)).collect()).collect();
        let best_pairs = pairs.iter().enumerate().map(|(a, row)| self.best_pairs(a, row)).collect();
        Objective { pairs, devices: (0..count).map(device).collect(), best_pairs }
    }

    fn best_pairs(&self, device: usize, row: &[Worth]) -> Vec<Worth> {
        let others = self.request.candidates - DeviceSet::one(device);
        let mut links: Vec<Worth> = others.iter().map(|other| row[other]).collect();
        links.sort_unstable_by(|a, b| b.cmp(a));
        let sums = links.into_iter().scan(0, |sum, link| {
            *sum += link;
            Some(*sum)
        });
        std::iter::once(0).chain(sums).collect()
    }

    fn maximise(
        &self,
        objective: &Objective,
        steps: &mut u64,
    ) -> Result<Option<(DeviceSet, bool)>, OutOfSteps> {
        let mut search = Search { bound: self, objective, best: None, spent: 0, limit: *steps };
        let ended = search.extend(DeviceSet::EMPTY, 0, self.request.candidates);
        *steps -= search.spent;
        match (ended, search.best) {
            (Ok(()), None) => Ok(None),
            (Err(Stop::OutOfSteps), None) => Err(OutOfSteps),
            (ended, Some((_, set))) => Ok(Some((set, ended.is_ok()))),
            (Err(Stop::Patience), None) => Ok(None),
        }
    }
}

impl Search<'_> {
    /// Adds devices of `left`, which all go with `set`, in all ways that may beat the best.
    fn extend(&mut self, set: DeviceSet, worth: Worth, left: DeviceSet) -> Result<(), Stop> {
        let missing = self.bound.request.count - set.len();
        if missing == 0 {
            if self.best.is_none_or(|(best, _)| worth > best) {
                self.best = Some((worth, set));
            }
            return Ok(());
        }
        let mut ranked = self.rank(set, left, missing)?;
        ranked.sort_unstable_by_key(|(promise, _, device)| (std::cmp::Reverse(*promise), *device));
        let mut left = left;
        for (at, &(_, gain, device)) in ranked.iter().enumerate() {
            if ranked.len() - at < missing {
                return Ok(());
            }
            let promise: Worth =
                ranked[at..at + missing].iter().map(|(promise, _, _)| promise).sum();
            if self.best.is_some_and(|(best, _)| worth + promise <= best) {
                return Ok(());
            }
            left = left - DeviceSet::one(device);
            let next = self.bound.request.wishes.companions(self.bound.matrix, device, left);
            self.extend(set | DeviceSet::one(device), worth + gain, next)?;
        }
        Ok(())
    }

    /// For each device what it may add at most, what it adds now, and its position.
    fn rank(
        &mut self,
        set: DeviceSet,
        left: DeviceSet,
        missing: usize,
    ) -> Result<Vec<(Worth, Worth, usize)>, Stop> {
        self.spent += left.len() as u64;
        if self.spent > self.limit {
            self.spent = self.limit;
            return Err(Stop::OutOfSteps);
        }
        if self.best.is_some() && self.spent > PATIENCE {
            return Err(Stop::Patience);
        }
        let rank = |device: usize| {
            let row = &self.objective.pairs[device];
            let gain =
                self.objective.devices[device] + set.iter().map(|other| row[other]).sum::<Worth>();
            let sums = &self.objective.best_pairs[device];
            let links = sums[(missing - 1).min(sums.len() - 1)];
            // Each link to another device to come is counted at both ends; pairs are even numbers.
            (gain + links / 2, gain, device)
        };
        Ok(left.iter().map(rank).collect())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tessera_api::config::TopologyScope;
    use tessera_api::gpu::PcieLevel;

    use super::*;
    use crate::topology::{Pair, Place, Wishes};

    proptest! {
        #[test]
        fn the_best_set_is_found_and_no_other(
            links in prop::collection::vec(0u32..3, 100), count in 1usize..6, free in 0u64..1024, wish in 0usize..4,
        ) {
            let place = |at: usize| Place { pcie_root: None, numa_node: Some(at as u32 % 3) };
            let places: Vec<Place> = (0..10).map(place).collect();
            let pair = |a: usize, b: usize| Pair { nvlinks: links[a * 10 + b], pcie: PcieLevel::ALL[(a + b) % 6] };
            let matrix = LinkMatrix::new(&places, pair).unwrap();
            let wishes = match wish {
                0 => Wishes::default(),
                1 => Wishes::default().prefer(TopologyScope::Numa),
                2 => Wishes::default().require(TopologyScope::NvLink),
                _ => Wishes::default().require(TopologyScope::Numa),
            };
            let request =
                SetRequest { count, candidates: matrix.devices(), free: DeviceSet::from_bits(free), wishes };
            let bound = Bound::new(&matrix, &request);
            for with_value in [false, true] {
                let objective = bound.objective(with_value);
                let worth = |set: DeviceSet| -> Worth {
                    let pairs = set.iter().flat_map(|a| set.above(a).iter().map(move |b| (a, b)));
                    let pairs: Worth = pairs.map(|(a, b)| objective.pairs[a][b]).sum();
                    pairs + set.iter().map(|d| objective.devices[d]).sum::<Worth>()
                };
                let sets = (0..1024).map(DeviceSet::from_bits).filter(|set| {
                    let together = |d: usize| *set - DeviceSet::one(d) == wishes.companions(&matrix, d, *set);
                    set.len() == count && set.iter().all(together)
                });
                let best = sets.map(worth).max();
                let found = bound.maximise(&objective, &mut u64::MAX.clone()).unwrap();
                prop_assert_eq!(found.map(|(set, proven)| (worth(set), proven)), best.map(|worth| (worth, true)));
            }
        }

        #[test]
        fn the_objective_orders_sets_as_score_and_estimated_value_do(
            links in prop::collection::vec(0u32..3, 64), free in 0u64..256, one in 0u64..256, other in 0u64..256,
        ) {
            let pair = |a: usize, b: usize| Pair { nvlinks: links[a * 8 + b], pcie: PcieLevel::System };
            let matrix = LinkMatrix::new(&[Place::default(); 8], pair).unwrap();
            let (free, one, other) =
                (DeviceSet::from_bits(free), DeviceSet::from_bits(one), DeviceSet::from_bits(other));
            let request =
                SetRequest { count: 0, candidates: matrix.devices(), free, wishes: Wishes::default() };
            let objective = Bound::new(&matrix, &request).objective(true);
            let worth = |set: DeviceSet| -> Worth {
                let pairs = set.iter().flat_map(|a| set.above(a).iter().map(move |b| (a, b)));
                let pairs: Worth = pairs.map(|(a, b)| objective.pairs[a][b]).sum();
                pairs + set.iter().map(|d| objective.devices[d]).sum::<Worth>()
            };
            let estimate = |set: DeviceSet| {
                let (part, whole) = (ESTIMATE.0 as Worth, ESTIMATE.1 as Worth);
                whole * Worth::from(matrix.score(set)) + part * Worth::from(matrix.score(free - set))
            };
            prop_assert_eq!(worth(one) - worth(other), 2 * (estimate(one) - estimate(other)));
        }
    }
}
