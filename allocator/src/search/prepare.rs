//! Before the search: what upstream checks beforehand, what "all" means on this node, and what can
//! be refuted by counting.

use super::{At, Failure, MAX_RESULTS, Progress, Run, Stop, Symmetry};
use crate::cluster::PoolState;
use crate::model::{ConstraintKind, Mode};
use crate::selector::SelectorError;
use crate::shape::OfferDemand;

/// What is known of a candidate for an alternative.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    /// It has not been asked.
    Unknown,
    /// Class and request select it.
    Selected,
    /// They do not.
    NotSelected,
    /// A selector fails on it.
    Failed,
}

impl Run<'_> {
    /// Checks what upstream checks before it searches; the first offender decides. `false` =
    /// nothing can be found.
    pub(super) fn prepare(&mut self) -> Progress {
        let shape = self.search.shape;
        for (c, claim) in shape.claims.iter().enumerate() {
            let mut least = 0u64;
            for request in 0..claim.len() {
                let mut fewest = u64::MAX;
                for place in claim.alternatives(request) {
                    fewest = fewest.min(self.count(c, place)?);
                }
                least = least.saturating_add(fewest);
                if least > MAX_RESULTS as u64 {
                    return Err(Stop::Failed(c, Failure::TooManyDevices(least)));
                }
            }
            if claim.constraints.iter().any(|c| c.constraint.kind == ConstraintKind::Unknown) {
                return Err(Stop::Failed(c, Failure::UnknownConstraint));
            }
        }
        self.state.prepare_constraints(self.search.interner);
        let wanted = (0..shape.alternatives.len()).map(|place| self.wanted(place));
        let wanted = wanted.fold(0, u64::saturating_add);
        self.judge_all()?;
        self.is_plain = !self.may_fail();
        // A search for a single device gains nothing from what follows.
        // And where an error is possible, a device that fails may be the reason why the next one,
        // its equal, gives one.
        if wanted <= 1 || !self.is_plain {
            return Ok(true);
        }
        self.symmetry = Some(Symmetry::new(shape, self.search.reach, &self.state, &self.verdicts));
        Ok(self.every_request_may_be_served())
    }

    fn wanted(&self, place: usize) -> u64 {
        let alternative = &self.search.shape.alternatives[place];
        alternative.count().unwrap_or(self.all[place].len() as u64)
    }

    /// How many devices an alternative wants, with what keeps it from being served.
    fn count(&mut self, claim: usize, place: usize) -> Result<u64, Stop> {
        let alternative = &self.search.shape.alternatives[place];
        if let Err(cause) = &alternative.resolved {
            return Err(Stop::Failed(claim, Failure::Request(cause.clone())));
        }
        if alternative.request.mode == Mode::All {
            self.count_all(claim, place)?;
        }
        Ok(self.wanted(place))
    }

    /// Finds out what "all" means on this node: pool by pool, since a device of one pool may give
    /// an error before the next pool turns out to be broken.
    fn count_all(&mut self, claim: usize, place: usize) -> Result<(), Stop> {
        let reach = self.search.reach;
        let at = At { claim, request: 0, place };
        let mut candidates = (0..reach.candidates.len()).peekable();
        for (p, pool) in reach.pools.iter().enumerate() {
            let name = || pool.id.pool.to_string();
            match pool.state {
                PoolState::Complete => {}
                PoolState::Incomplete => {
                    return Err(Stop::Failed(claim, Failure::AllButPoolIncomplete(name())));
                }
                PoolState::Invalid => {
                    return Err(Stop::Failed(claim, Failure::AllButPoolInvalid(name())));
                }
            }
            while let Some(i) = candidates.next_if(|&i| reach.candidates[i].pool as usize == p) {
                self.check_steps()?;
                if self.is_of_all(at, i)? {
                    self.all[place].push(i);
                }
            }
        }
        Ok(())
    }

    fn is_of_all(&mut self, at: At, i: usize) -> Progress {
        if !self.selects(at, i)? {
            return Ok(false);
        }
        let answer =
            self.search.shape.alternatives[at.place].on(self.search.reach.candidates[i].offer);
        match answer.map(|answer| &answer.demand) {
            // Only what the device has in all counts here: one that is merely full stays in the set
            // and makes "all" fail.
            Some(OfferDemand::Takes(_, true)) => Ok(true),
            Some(OfferDemand::Error(error)) => {
                Err(Stop::Failed(at.claim, Failure::Capacity(error.clone())))
            }
            _ => Ok(false),
        }
    }

    /// What class and request say about a candidate, asked once.
    pub(super) fn verdict(&mut self, place: usize, i: usize) -> Verdict {
        let at = place * self.search.reach.candidates.len() + i;
        if self.verdicts[at] == Verdict::Unknown {
            self.verdicts[at] = match self.select(place, i) {
                Ok(true) => Verdict::Selected,
                Ok(false) => Verdict::NotSelected,
                Err(_) => Verdict::Failed,
            };
        }
        self.verdicts[at]
    }

    pub(super) fn select(&mut self, place: usize, i: usize) -> Result<bool, SelectorError> {
        let Ok(resolved) = &self.search.shape.alternatives[place].resolved else {
            return Ok(false);
        };
        let candidate = &self.search.reach.candidates[i];
        if !self.search.features.binding_conditions && candidate.device().binding.is_some() {
            return Ok(false);
        }
        let selected = self.search.selections.selects(
            resolved.selection,
            candidate,
            self.search.interner,
            self.search.steps,
        )?;
        Ok(selected && candidate.reachable)
    }

    fn judge_all(&mut self) -> Result<(), Stop> {
        let count = self.search.reach.candidates.len();
        for place in 0..self.search.shape.alternatives.len() {
            for i in 0..count {
                self.verdict(place, i);
                self.check_steps()?;
            }
            // Asking what is known takes a part of what looking at a device does.
            *self.search.steps = self.search.steps.saturating_sub(count as u64 / 4);
        }
        Ok(())
    }

    /// Evaluating selectors may have taken all that was left.
    fn check_steps(&self) -> Result<(), Stop> {
        if *self.search.steps == 0 { Err(Stop::OutOfSteps) } else { Ok(()) }
    }

    /// Whether the search could come upon an error, so that upstream might give one where counting
    /// says there is nothing.
    fn may_fail(&self) -> bool {
        let count = self.search.reach.candidates.len();
        let shape = self.search.shape;
        let is_error = |(place, i): (usize, usize)| match self.verdicts[place * count + i] {
            Verdict::Failed => true,
            Verdict::Selected => {
                let answer = shape.alternatives[place].on(self.search.reach.candidates[i].offer);
                matches!(answer.map(|a| &a.demand), Some(OfferDemand::Error(_)))
            }
            _ => false,
        };
        let constrained_all = shape.claims.iter().any(|claim| {
            let own = claim.requests[0]..*claim.requests.last().unwrap_or(&0);
            !claim.constraints.is_empty()
                && shape.alternatives[own].iter().any(|a| a.request.mode == Mode::All)
        });
        let pairs = |place| (0..count).map(move |i| (place, i));
        constrained_all || (0..shape.alternatives.len()).flat_map(pairs).any(is_error)
    }

    /// Whether each request by itself has enough devices on this node, in one of its ways.
    fn every_request_may_be_served(&self) -> bool {
        self.search.shape.claims.iter().all(|claim| {
            (0..claim.len()).all(|request| {
                claim.alternatives(request).any(|place| {
                    let wanted = self.wanted(place);
                    let is_all = self.search.shape.alternatives[place].request.mode == Mode::All;
                    if is_all {
                        wanted > 0
                    } else {
                        wanted == 0 || self.usable(place, 0).nth(wanted as usize - 1).is_some()
                    }
                })
            })
        })
    }

    /// Candidates that could be taken for the alternative as things are, from a position on: upper
    /// bound of what will be.
    pub(super) fn usable(&self, place: usize, from: usize) -> impl Iterator<Item = usize> {
        let alternative = &self.search.shape.alternatives[place];
        let is_admin = alternative.request.admin == Some(true);
        let count = self.search.reach.candidates.len();
        (from..count).map(move |position| self.candidate(place, position)).filter(move |&i| {
            let answer = alternative.on(self.search.reach.candidates[i].offer);
            self.verdicts[place * count + i] == Verdict::Selected && answer.is_some_and(|a| {
                a.usable
                    && matches!(&a.demand, OfferDemand::Takes(demand, _) if self.state.has_room(i, demand))
            }) && (is_admin || !self.state.in_use(0, i, false))
                && self.state.agrees(i, alternative.agrees_on()) && self.has_counters(i)
        })
    }

    /// Whether so many devices may still be found for the request from a position on.
    ///
    /// Devices that draw on the same counters are bounded together: of each counter only so much is
    /// left.
    pub(super) fn may_find(&self, at: At, wanted: u64, from: usize) -> bool {
        let reach = self.search.reach;
        let limit = usize::try_from(wanted).unwrap_or(usize::MAX);
        if reach.consumes.is_empty() {
            return self.usable(at.place, from).take(limit).count() >= limit;
        }
        let mut free = 0usize;
        let mut groups: std::collections::BTreeMap<usize, Vec<usize>> = Default::default();
        let symmetry = self.symmetry.as_ref();
        for i in self.usable(at.place, from) {
            match symmetry.and_then(|s| s.counter_group(i)) {
                Some(group) if !self.state.charges_nothing(i, self.search.features) => {
                    groups.entry(group).or_default().push(i);
                }
                _ => free += 1,
            }
        }
        let bounds = groups.values().map(|members| self.state.bound_by_counters(members));
        free + bounds.sum::<usize>() >= limit
    }
}
