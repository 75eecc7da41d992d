//! Branch and bound for the best set if there are too many sets to enumerate.
//!
//! With the estimated residual value, the objective is a sum over pairs and devices of the set, up
//! to a constant: `Σ pairs (7 w, or 9 w where both are free) - Σ free devices 2 (links to free
//! devices)`. The upper bound of a partial set is its own value, plus the best devices, each with
//! its links to the set and half of its best links to others.

use super::request::{OutOfSteps, SetRequest};
use super::value::{ESTIMATE, FLOOR};
use super::{DeviceSet, LinkMatrix};

/// Steps after which the best set found so far is returned.
const MAX_IMPROVEMENT_STEPS: u64 = 4_000;

/// Twice the objective value, so that half links are integers.
type DoubledValue = i64;

pub(super) struct BranchAndBound<'m> {
    matrix: &'m LinkMatrix,
    request: &'m SetRequest,
}

/// Objective to maximize.
struct Objective {
    /// Twice the contribution of each pair of devices.
    pairs: Vec<Vec<DoubledValue>>,
    /// Twice the contribution of each device.
    devices: Vec<DoubledValue>,
    /// Sum of the `n` best pairs, by device and `n`.
    best_pairs: Vec<Vec<DoubledValue>>,
}

struct Search<'m> {
    bound: &'m BranchAndBound<'m>,
    objective: &'m Objective,
    best: Option<(DoubledValue, DeviceSet)>,
    spent: u64,
    /// Step limit of the caller.
    limit: u64,
}

/// Reason why a search ends early.
enum Stop {
    /// A set was found, and the steps for improvements are spent.
    ImprovementLimit,
    OutOfSteps,
}

impl<'m> BranchAndBound<'m> {
    pub(super) fn new(matrix: &'m LinkMatrix, request: &'m SetRequest) -> Self {
        Self { matrix, request }
    }

    /// Returns the best set found and true if it is proven optimal.
    ///
    /// `None` if no set meets the requirements.
    pub(super) fn search(&self, steps: &mut u64) -> Result<Option<(DeviceSet, bool)>, OutOfSteps> {
        let Some((set, proven)) = self.maximize(&self.objective(true), steps)? else {
            return Ok(None);
        };
        // The floor depends on the best score, so that is computed too.
        let Ok(Some((highest, found))) = self.maximize(&self.objective(false), steps) else {
            return Ok(Some((set, false)));
        };
        let preferred = |set| self.request.preferences.preferred_pairs(self.matrix, set);
        let score = |set| u64::from(self.matrix.score(set));
        let meets_floor = preferred(set) == preferred(highest)
            && score(set) * FLOOR.1 >= score(highest) * FLOOR.0;
        Ok(Some(if meets_floor { (set, proven && found) } else { (highest, false) }))
    }

    /// Returns the objective: the score, with or without the residual value.
    fn objective(&self, with_value: bool) -> Objective {
        let (part, whole) = if with_value {
            (ESTIMATE.0 as DoubledValue, ESTIMATE.1 as DoubledValue)
        } else {
            (0, 1)
        };
        let count = self.matrix.len();
        let free = |d: usize| self.request.free.contains(d);
        let score_of = |a: usize, b: usize| DoubledValue::from(self.matrix.pair(a, b));
        // A preferred pair outweighs all other differences.
        let total: DoubledValue = (0..count)
            .flat_map(|a| (0..count).map(move |b| (a, b)))
            .map(|(a, b)| score_of(a, b))
            .sum();
        let bonus = 4 * (whole + part) * (total + 1);
        let pair = |a: usize, b: usize| {
            let factor = if free(a) && free(b) { whole + part } else { whole };
            let preferred =
                self.request.preferences.preferred_with(self.matrix, a, DeviceSet::one(b));
            2 * factor * score_of(a, b) + bonus * DoubledValue::from(preferred)
        };
        let device = |d: usize| match free(d) {
            true => -2 * part * DoubledValue::from(self.matrix.degree(d, self.request.free)),
            false => 0,
        };
        let pairs: Vec<Vec<DoubledValue>> =
            (0..count).map(|a| (0..count).map(|b| pair(a, b)).collect()).collect();
        let best_pairs = pairs.iter().enumerate().map(|(a, row)| self.best_pairs(a, row)).collect();
        Objective { pairs, devices: (0..count).map(device).collect(), best_pairs }
    }

    fn best_pairs(&self, device: usize, row: &[DoubledValue]) -> Vec<DoubledValue> {
        let others = self.request.candidates - DeviceSet::one(device);
        let mut links: Vec<DoubledValue> = others.iter().map(|other| row[other]).collect();
        links.sort_unstable_by(|a, b| b.cmp(a));
        let sums = links.into_iter().scan(0, |sum, link| {
            *sum += link;
            Some(*sum)
        });
        std::iter::once(0).chain(sums).collect()
    }

    fn maximize(
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
            (Err(Stop::ImprovementLimit), None) => Ok(None),
        }
    }
}

impl Search<'_> {
    /// Adds devices of `left` in all ways that may improve the best set.
    ///
    /// All of them are compatible with `set`.
    fn extend(&mut self, set: DeviceSet, value: DoubledValue, left: DeviceSet) -> Result<(), Stop> {
        let missing = self.bound.request.count - set.len();
        if missing == 0 {
            if self.best.is_none_or(|(best, _)| value > best) {
                self.best = Some((value, set));
            }
            return Ok(());
        }
        let mut ranked = self.rank(set, left, missing)?;
        ranked.sort_unstable_by_key(|(upper_bound, _, device)| {
            (std::cmp::Reverse(*upper_bound), *device)
        });
        let mut left = left;
        for (at, &(_, gain, device)) in ranked.iter().enumerate() {
            if ranked.len() - at < missing {
                return Ok(());
            }
            let upper_bound: DoubledValue =
                ranked[at..at + missing].iter().map(|(upper_bound, _, _)| upper_bound).sum();
            if self.best.is_some_and(|(best, _)| value + upper_bound <= best) {
                return Ok(());
            }
            left = left - DeviceSet::one(device);
            let next = self.bound.request.preferences.companions(self.bound.matrix, device, left);
            self.extend(set | DeviceSet::one(device), value + gain, next)?;
        }
        Ok(())
    }

    /// Returns for each device its upper bound, its current gain and its position.
    fn rank(
        &mut self,
        set: DeviceSet,
        left: DeviceSet,
        missing: usize,
    ) -> Result<Vec<(DoubledValue, DoubledValue, usize)>, Stop> {
        self.spent += left.len() as u64;
        if self.spent > self.limit {
            self.spent = self.limit;
            return Err(Stop::OutOfSteps);
        }
        if self.best.is_some() && self.spent > MAX_IMPROVEMENT_STEPS {
            return Err(Stop::ImprovementLimit);
        }
        let rank = |device: usize| {
            let row = &self.objective.pairs[device];
            let gain = self.objective.devices[device]
                + set.iter().map(|other| row[other]).sum::<DoubledValue>();
            let sums = &self.objective.best_pairs[device];
            let links = sums[(missing - 1).min(sums.len() - 1)];
            // Each link to a later device is counted at both ends; pair values are even.
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
    use crate::topology::{DeviceLinks, DeviceLocation, TopologyPreferences};

    proptest! {
        #[test]
        fn finds_the_best_set(
            links in prop::collection::vec(0u32..3, 100),
            count in 1usize..6,
            free in 0u64..1024,
            preference in 0usize..4,
        ) {
            let place = |at: usize| DeviceLocation { pcie_root: None, numa_node: Some(at as u32 % 3) };
            let places: Vec<DeviceLocation> = (0..10).map(place).collect();
            let pair = |a: usize, b: usize| DeviceLinks {
                nvlinks: links[a * 10 + b],
                pcie: PcieLevel::ALL[(a + b) % 6],
            };
            let matrix = LinkMatrix::new(&places, pair).unwrap();
            let preferences = match preference {
                0 => TopologyPreferences::default(),
                1 => TopologyPreferences::default().prefer(TopologyScope::Numa),
                2 => TopologyPreferences::default().require(TopologyScope::NvLink),
                _ => TopologyPreferences::default().require(TopologyScope::Numa),
            };
            let request = SetRequest {
                count,
                candidates: matrix.devices(),
                free: DeviceSet::from_bits(free),
                preferences,
            };
            let bound = BranchAndBound::new(&matrix, &request);
            for with_value in [false, true] {
                let objective = bound.objective(with_value);
                let value = |set: DeviceSet| -> DoubledValue {
                    let pairs = set.iter().flat_map(|a| set.above(a).iter().map(move |b| (a, b)));
                    let pairs: DoubledValue = pairs.map(|(a, b)| objective.pairs[a][b]).sum();
                    pairs + set.iter().map(|d| objective.devices[d]).sum::<DoubledValue>()
                };
                let sets = (0..1024).map(DeviceSet::from_bits).filter(|set| {
                    let together =
                        |d: usize| *set - DeviceSet::one(d) == preferences.companions(&matrix, d, *set);
                    set.len() == count && set.iter().all(together)
                });
                let best = sets.map(value).max();
                let found = bound.maximize(&objective, &mut u64::MAX.clone()).unwrap();
                prop_assert_eq!(
                    found.map(|(set, proven)| (value(set), proven)),
                    best.map(|value| (value, true))
                );
            }
        }

        #[test]
        fn objective_equals_score_plus_estimated_value(
            links in prop::collection::vec(0u32..3, 64),
            free in 0u64..256,
            one in 0u64..256,
            other in 0u64..256,
        ) {
            let pair =
                |a: usize, b: usize| DeviceLinks { nvlinks: links[a * 8 + b], pcie: PcieLevel::System };
            let matrix = LinkMatrix::new(&[DeviceLocation::default(); 8], pair).unwrap();
            let (free, one, other) = (
                DeviceSet::from_bits(free),
                DeviceSet::from_bits(one),
                DeviceSet::from_bits(other),
            );
            let request = SetRequest {
                count: 0,
                candidates: matrix.devices(),
                free,
                preferences: TopologyPreferences::default(),
            };
            let objective = BranchAndBound::new(&matrix, &request).objective(true);
            let value = |set: DeviceSet| -> DoubledValue {
                let pairs = set.iter().flat_map(|a| set.above(a).iter().map(move |b| (a, b)));
                let pairs: DoubledValue = pairs.map(|(a, b)| objective.pairs[a][b]).sum();
                pairs + set.iter().map(|d| objective.devices[d]).sum::<DoubledValue>()
            };
            let estimate = |set: DeviceSet| {
                let (part, whole) = (ESTIMATE.0 as DoubledValue, ESTIMATE.1 as DoubledValue);
                whole * DoubledValue::from(matrix.score(set))
                    + part * DoubledValue::from(matrix.score(free - set))
            };
            prop_assert_eq!(value(one) - value(other), 2 * (estimate(one) - estimate(other)));
        }
    }
}
