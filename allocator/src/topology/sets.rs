//! The sets that serve a request, best first.

use std::collections::BTreeSet;

use super::bound::Bound;
use super::chooser::{Choice, OutOfSteps, SetChooser, SetRequest};
use super::enumerate::{Expansion, Kinds, Scored};
use super::matrix::Score;
use super::value::{FLOOR, POINT_BITS, Remaining};
use super::{DeviceSet, LinkMatrix};

/// With more sets (up to twins) times devices than this, the best is searched by branch and bound
/// and the others are not ranked. Any eight of sixteen devices are 12,870 sets.
const MAX_RANKED: u64 = 1 << 18;

/// The sets that serve a request. See [`SetChooser::sets`].
pub struct Sets<'c> {
    chooser: &'c SetChooser,
    request: SetRequest,
    kinds: Kinds,
    stage: Stage,
}

enum Stage {
    /// Nothing was asked yet.
    Fresh,
    /// All sets up to twins, of which those before `at` were given; all twins of the one at `at`
    /// come next.
    Ranked { sets: Vec<Scored>, at: usize, sorted: bool, twins: Expansion },
    /// Too many to rank.
    Listed { given: BTreeSet<DeviceSet>, list: Lexicographic },
    /// There are no more.
    Ended,
}

impl<'c> Sets<'c> {
    pub(super) fn new(chooser: &'c SetChooser, request: &SetRequest) -> Self {
        let all = chooser.matrix().devices();
        let request = SetRequest {
            candidates: request.candidates & all,
            free: request.free & all,
            ..*request
        };
        let kinds = Kinds::of(chooser.matrix(), &request);
        let stage =
            if request.count > request.candidates.len() { Stage::Ended } else { Stage::Fresh };
        Self { chooser, request, kinds, stage }
    }

    /// The next best set; `None` when there is no other. `steps` is reduced by what was spent.
    ///
    /// # Errors
    /// The steps are spent. The next call goes on.
    pub fn next(&mut self, steps: &mut u64) -> Result<Option<Choice>, OutOfSteps> {
        match &mut self.stage {
            Stage::Fresh => self.begin(steps),
            Stage::Ranked { .. } => self.next_ranked(steps),
            Stage::Listed { given, list } => loop {
                let matrix = self.chooser.matrix();
                let Some(set) = list.next(matrix, &self.request, steps)? else {
                    self.stage = Stage::Ended;
                    return Ok(None);
                };
                if !given.contains(&set) {
                    return Ok(Some(self.chooser.choice(set, matrix.score(set), false)));
                }
            },
            Stage::Ended => Ok(None),
        }
    }

    fn begin(&mut self, steps: &mut u64) -> Result<Option<Choice>, OutOfSteps> {
        let count = self.kinds.sets();
        if count.saturating_mul(self.request.count as u64) > MAX_RANKED {
            return self.search(steps);
        }
        *steps = steps.checked_sub(count).ok_or(OutOfSteps)?;
        let (matrix, wishes) = (self.chooser.matrix(), &self.request.wishes);
        let remaining = self.chooser.value().remaining(matrix, self.request.free);
        let mut sets = self.kinds.enumerate(matrix, wishes, &remaining);
        let Some(best) = Ranking::new(matrix, remaining, &sets).best(&sets) else {
            self.stage = Stage::Ended;
            return Ok(None);
        };
        sets.swap(0, best);
        let twins = Expansion::new(&self.kinds, sets[0].set);
        self.stage = Stage::Ranked { sets, at: 0, sorted: false, twins };
        self.next_ranked(steps)
    }

    fn next_ranked(&mut self, steps: &mut u64) -> Result<Option<Choice>, OutOfSteps> {
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
                self.stage = Stage::Ended;
                return Ok(None);
            };
            *twins = Expansion::new(&self.kinds, next.set);
        }
    }

    fn search(&mut self, steps: &mut u64) -> Result<Option<Choice>, OutOfSteps> {
        let Some((set, proven)) = Bound::new(self.chooser.matrix(), &self.request).search(steps)?
        else {
            self.stage = Stage::Ended;
            return Ok(None);
        };
        self.stage = Stage::Listed {
            given: BTreeSet::from([set]),
            list: Lexicographic::new(self.request.candidates),
        };
        Ok(Some(self.chooser.choice(set, self.chooser.matrix().score(set), proven)))
    }
}

/// How the sets of one request are ranked.
struct Ranking<'c> {
    matrix: &'c LinkMatrix,
    remaining: Remaining<'c>,
    /// The most preferred pairs, and the least that the best score among the sets that have so
    /// many allows.
    preferred: u32,
    floor: u64,
}

impl<'c> Ranking<'c> {
    fn new(matrix: &'c LinkMatrix, remaining: Remaining<'c>, sets: &[Scored]) -> Self {
        let (preferred, best) =
            sets.iter().map(|s| (s.preferred, s.score)).max().unwrap_or_default();
        Self { matrix, remaining, preferred, floor: (u64::from(best) * FLOOR.0).div_ceil(FLOOR.1) }
    }

    /// Where the best set is.
    fn best(&self, sets: &[Scored]) -> Option<usize> {
        let mut top = (0, 0);
        let mut equal = Vec::new();
        for (at, scored) in sets.iter().enumerate().filter(|(_, scored)| self.is_fair(scored)) {
            let worth = (self.total(scored), scored.score);
            if worth > top {
                top = worth;
                equal.clear();
            }
            if worth == top {
                equal.push(at);
            }
        }
        equal.into_iter().max_by_key(|at| self.rank(&sets[*at]))
    }

    fn is_fair(&self, scored: &Scored) -> bool {
        scored.preferred == self.preferred && u64::from(scored.score) >= self.floor
    }

    /// Score and residual value together, in whole points: less is no difference.
    fn total(&self, scored: &Scored) -> u64 {
        let value = self.remaining.without(scored.set, scored.score, scored.number);
        u64::from(scored.score) + ((value + (1 << (POINT_BITS - 1))) >> POINT_BITS)
    }

    fn rank(&self, scored: &Scored) -> Rank {
        Rank {
            preferred: scored.preferred,
            fair: self.is_fair(scored),
            total: self.total(scored),
            score: scored.score,
            weakest: self.matrix.weakest_pair(scored.set).unwrap_or(0),
            first: scored.set.bits().reverse_bits(),
        }
    }
}

/// How good a set is; greater is better. Of equal ones the one that a person would list first.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Rank {
    preferred: u32,
    /// Whether the score is near enough to the best that is possible.
    fair: bool,
    total: u64,
    score: Score,
    weakest: Score,
    /// Greater = lower positions.
    first: u64,
}

/// All sets that hold what is required, by their positions: lowest first.
struct Lexicographic {
    chosen: Vec<usize>,
    /// By how many are chosen: what may come next.
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
            let next = request.wishes.companions(matrix, device, *left);
            self.chosen.push(device);
            self.left.push(next);
        }
    }
}
