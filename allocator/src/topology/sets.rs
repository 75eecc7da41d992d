//! Sets of devices for a request, best first.

use std::collections::BTreeSet;

use super::branch_and_bound::BranchAndBound;
use super::chooser::SetChooser;
use super::enumerate::{Expansion, Kinds, ScoredSet};
use super::matrix::Score;
use super::request::{OutOfSteps, SetChoice, SetRequest};
use super::value::{FLOOR, POINT_BITS, Remaining};
use super::{DeviceSet, LinkMatrix};

/// Maximum number of sets (up to twins) times devices that is ranked. Beyond it the best set is
/// found by branch and bound, and the others are not ranked. Eight of sixteen devices are 12,870
/// sets.
const MAX_RANKED: u64 = 1 << 18;

/// Sets of devices for a request, best first. See [`SetChooser::sets`].
pub struct RankedSets<'c> {
    chooser: &'c SetChooser,
    request: SetRequest,
    kinds: Kinds,
    stage: Stage,
}

enum Stage {
    /// No set was requested yet.
    Fresh,
    /// All sets up to twins, of which those before `at` were returned. The twins of the set at `at`
    /// come next.
    Ranked { sets: Vec<ScoredSet>, at: usize, sorted: bool, twins: Expansion },
    /// Too many sets to rank.
    Listed { given: BTreeSet<DeviceSet>, list: Lexicographic },
    /// No more sets.
    SearchOutcome,
}

impl<'c> RankedSets<'c> {
    pub(super) fn new(chooser: &'c SetChooser, request: &SetRequest) -> Self {
        let all = chooser.matrix().devices();
        let request = SetRequest {
            candidates: request.candidates & all,
            free: request.free & all,
            ..*request
        };
        let kinds = Kinds::of(chooser.matrix(), &request);
        let stage = if request.count > request.candidates.len() {
            Stage::SearchOutcome
        } else {
            Stage::Fresh
        };
        Self { chooser, request, kinds, stage }
    }

    /// Returns the next best set; `None` if there is none. The steps spent are subtracted from
    /// `steps`.
    ///
    /// # Errors
    /// Returns [`OutOfSteps`] if the steps are spent; the next call continues.
    pub fn next(&mut self, steps: &mut u64) -> Result<Option<SetChoice>, OutOfSteps> {
        match &mut self.stage {
            Stage::Fresh => self.begin(steps),
            Stage::Ranked { .. } => self.next_ranked(steps),
            Stage::Listed { given, list } => loop {
                let matrix = self.chooser.matrix();
                let Some(set) = list.next(matrix, &self.request, steps)? else {
                    self.stage = Stage::SearchOutcome;
                    return Ok(None);
                };
                if !given.contains(&set) {
                    return Ok(Some(self.chooser.choice(set, matrix.score(set), false)));
                }
            },
            Stage::SearchOutcome => Ok(None),
        }
    }

    fn begin(&mut self, steps: &mut u64) -> Result<Option<SetChoice>, OutOfSteps> {
        let count = self.kinds.sets();
        if count.saturating_mul(self.request.count as u64) > MAX_RANKED {
            return self.search(steps);
        }
        *steps = steps.checked_sub(count).ok_or(OutOfSteps)?;
        let (matrix, preferences) = (self.chooser.matrix(), &self.request.preferences);
        let remaining = self.chooser.value().remaining(matrix, self.request.free);
        let mut sets = self.kinds.enumerate(matrix, preferences, &remaining);
        let Some(best) = Ranking::new(matrix, remaining, &sets).best(&sets) else {
            self.stage = Stage::SearchOutcome;
            return Ok(None);
        };
        sets.swap(0, best);
        let twins = Expansion::new(&self.kinds, sets[0].set);
        self.stage = Stage::Ranked { sets, at: 0, sorted: false, twins };
        self.next_ranked(steps)
    }

    fn next_ranked(&mut self, steps: &mut u64) -> Result<Option<SetChoice>, OutOfSteps> {
        let Stage::Ranked { sets, at, sorted, twins } = &mut self.stage else { return Ok(None) };
        loop {
            if let Some(set) = twins.next() {
                *steps = steps.checked_sub(1).ok_or(OutOfSteps)?;
                return Ok(Some(self.chooser.choice(set, sets[*at].score, true)));
            }
            if !*sorted {
                let matrix = self.chooser.matrix();
                let remaining = self.chooser.value().remaining(matrix, self.request.free);
                let ranking = Ranking::new(matrix, remaining, sets);
                sets[1..].sort_by_cached_key(|scored| std::cmp::Reverse(ranking.rank(scored)));
                *sorted = true;
            }
            *at += 1;
            let Some(next) = sets.get(*at) else {
                self.stage = Stage::SearchOutcome;
                return Ok(None);
            };
            *twins = Expansion::new(&self.kinds, next.set);
        }
    }

    fn search(&mut self, steps: &mut u64) -> Result<Option<SetChoice>, OutOfSteps> {
        let Some((set, proven)) =
            BranchAndBound::new(self.chooser.matrix(), &self.request).search(steps)?
        else {
            self.stage = Stage::SearchOutcome;
            return Ok(None);
        };
        self.stage = Stage::Listed {
            given: BTreeSet::from([set]),
            list: Lexicographic::new(self.request.candidates),
        };
        Ok(Some(self.chooser.choice(set, self.chooser.matrix().score(set), proven)))
    }
}

/// Ranking of the sets of one request.
struct Ranking<'c> {
    matrix: &'c LinkMatrix,
    remaining: Remaining<'c>,
    /// Maximum number of preferred pairs, and the score floor among the sets with that number.
    preferred: u32,
    floor: u64,
}

impl<'c> Ranking<'c> {
    fn new(matrix: &'c LinkMatrix, remaining: Remaining<'c>, sets: &[ScoredSet]) -> Self {
        let (preferred, best) =
            sets.iter().map(|s| (s.preferred, s.score)).max().unwrap_or_default();
        Self { matrix, remaining, preferred, floor: (u64::from(best) * FLOOR.0).div_ceil(FLOOR.1) }
    }

    /// Returns the index of the best set.
    fn best(&self, sets: &[ScoredSet]) -> Option<usize> {
        let mut top = (0, 0);
        let mut equal = Vec::new();
        for (at, scored) in sets.iter().enumerate().filter(|(_, scored)| self.meets_floor(scored)) {
            let value = (self.total(scored), scored.score);
            if value > top {
                top = value;
                equal.clear();
            }
            if value == top {
                equal.push(at);
            }
        }
        equal.into_iter().max_by_key(|at| self.rank(&sets[*at]))
    }

    fn meets_floor(&self, scored: &ScoredSet) -> bool {
        scored.preferred == self.preferred && u64::from(scored.score) >= self.floor
    }

    /// Returns score plus residual value in whole points; smaller differences do not count.
    fn total(&self, scored: &ScoredSet) -> u64 {
        let value = self.remaining.without(scored.set, scored.score, scored.number);
        u64::from(scored.score) + ((value + (1 << (POINT_BITS - 1))) >> POINT_BITS)
    }

    fn rank(&self, scored: &ScoredSet) -> Rank {
        Rank {
            preferred: scored.preferred,
            meets_floor: self.meets_floor(scored),
            total: self.total(scored),
            score: scored.score,
            weakest: self.matrix.weakest_pair(scored.set).unwrap_or(0),
            first: scored.set.bits().reverse_bits(),
        }
    }
}

/// Rank of a set; greater is better. Ties are resolved by the lowest positions.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Rank {
    preferred: u32,
    /// True if the score is at least the floor.
    meets_floor: bool,
    total: u64,
    score: Score,
    weakest: Score,
    /// Greater for lower positions.
    first: u64,
}

/// Iterator over all sets that meet the requirements, in lexicographic order of positions.
struct Lexicographic {
    chosen: Vec<usize>,
    /// Possible next devices, by number of chosen devices.
    left: Vec<DeviceSet>,
}

impl Lexicographic {
    fn new(candidates: DeviceSet) -> Self {
        Self { chosen: Vec::new(), left: vec![candidates] }
    }

    fn next(
        &mut self,
        matrix: &LinkMatrix,
        request: &SetRequest,
        steps: &mut u64,
    ) -> Result<Option<DeviceSet>, OutOfSteps> {
        loop {
            let Some(left) = self.left.last_mut() else { return Ok(None) };
            let short = self.chosen.len() + left.len() < request.count;
            let Some(device) = left.iter().next().filter(|_| !short) else {
                self.left.pop();
                self.chosen.pop();
                continue;
            };
            *steps = steps.checked_sub(1).ok_or(OutOfSteps)?;
            *left = *left - DeviceSet::one(device);
            if self.chosen.len() + 1 == request.count {
                let set = self.chosen.iter().copied().chain([device]).collect();
                return Ok(Some(set));
            }
            let next = request.preferences.companions(matrix, device, *left);
            self.chosen.push(device);
            self.left.push(next);
        }
    }
}
