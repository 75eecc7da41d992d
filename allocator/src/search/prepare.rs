//! Preparation of the search: upstream's checks, the devices of "all" requests, and counting.

use super::outcome::{MAX_RESULTS, SearchFailure};
use super::run::{Progress, Run, Stop};
use super::state::Target;
use super::symmetry::{Symmetry, Verdict};
use crate::cluster::PoolState;
use crate::model::{AllocationMode, ConstraintKind};
use crate::shape::{ProfileDemand, Selects};

impl Run<'_> {
    /// Performs the checks that upstream performs before its search, in order. Returns false if no
    /// solution exists.
    pub(super) fn prepare(&mut self) -> Progress {
        let shape = self.search.shape;
        for (c, claim) in shape.claims.iter().enumerate() {
            let mut least = 0u64;
            for request in 0..claim.len() {
                let mut fewest = u64::MAX;
                for index in claim.alternatives(request) {
                    fewest = fewest.min(self.count(c, index)?);
                }
                least = least.saturating_add(fewest);
                if least > MAX_RESULTS as u64 {
                    return Err(Stop::Failed(c, SearchFailure::TooManyDevices(least)));
                }
            }
            if claim.constraints.iter().any(|c| c.constraint.kind == ConstraintKind::Unknown) {
                return Err(Stop::Failed(c, SearchFailure::UnknownConstraint));
            }
        }
        self.state.prepare_constraints(self.search.interner);
        let wanted = (0..shape.alternatives.len()).map(|index| self.wanted(index));
        let wanted = wanted.fold(0, u64::saturating_add);
        self.evaluate_all()?;
        self.is_plain = !self.may_fail();
        // A search for one device gains nothing from symmetry and counting. And where an error is
        // possible, an interchangeable device must not be skipped: the failure of one device can be
        // the reason why the next one causes the error.
        if wanted <= 1 || !self.is_plain {
            return Ok(true);
        }
        self.symmetry =
            Some(Symmetry::new(shape, self.search.reachable, &self.state, &self.verdicts));
        Ok(self.every_request_may_be_served())
    }

    fn wanted(&self, index: usize) -> u64 {
        let alternative = &self.search.shape.alternatives[index];
        alternative.count().unwrap_or(self.all_candidates[index].len() as u64)
    }

    /// Returns the number of devices of an alternative, or an error if it can never be served.
    fn count(&mut self, claim: usize, index: usize) -> Result<u64, Stop> {
        let alternative = &self.search.shape.alternatives[index];
        if let Err(cause) = &alternative.resolved {
            return Err(Stop::Failed(claim, SearchFailure::Request(cause.clone())));
        }
        if alternative.request.mode == AllocationMode::All {
            self.count_all(claim, index)?;
        }
        Ok(self.wanted(index))
    }

    /// Finds the devices of an "all" request, pool by pool.
    ///
    /// A device of one pool can cause an error before the next pool turns out to be invalid.
    fn count_all(&mut self, claim: usize, index: usize) -> Result<(), Stop> {
        let reachable = self.search.reachable;
        let target = Target { claim, request: 0, index };
        let mut candidates = (0..reachable.candidates.len()).peekable();
        for (p, pool) in reachable.pools.iter().enumerate() {
            let name = || pool.id.pool.to_string();
            match pool.state {
                PoolState::Complete => {}
                PoolState::Incomplete => {
                    return Err(Stop::Failed(claim, SearchFailure::AllWithIncompletePool(name())));
                }
                PoolState::Invalid => {
                    return Err(Stop::Failed(claim, SearchFailure::AllWithInvalidPool(name())));
                }
            }
            while let Some(i) = candidates.next_if(|&i| reachable.candidates[i].pool as usize == p)
            {
                self.check_steps()?;
                if self.belongs_to_all(target, i)? {
                    self.all_candidates[index].push(i);
                }
            }
        }
        Ok(())
    }

    fn belongs_to_all(&mut self, target: Target, i: usize) -> Progress {
        if !self.selects(target, i)? {
            return Ok(false);
        }
        let answer = self.search.shape.alternatives[target.index]
            .profile_match(self.search.reachable.candidates[i].profile);
        match answer.map(|answer| &answer.demand) {
            // Only the total capacity counts here: a device without free capacity stays in the set
            // and makes the request fail.
            Some(ProfileDemand::Takes(_, true)) => Ok(true),
            Some(ProfileDemand::Error(error)) => {
                Err(Stop::Failed(target.claim, SearchFailure::Capacity(error.clone())))
            }
            _ => Ok(false),
        }
    }

    /// Returns the cached result of the selectors for a candidate.
    pub(super) fn verdict(&mut self, index: usize, i: usize) -> Verdict {
        let at = index * self.search.reachable.candidates.len() + i;
        if self.verdicts[at] == Verdict::Unknown {
            self.verdicts[at] = match self.select(index, i) {
                Selects::Yes => Verdict::Selected,
                Selects::No => Verdict::NotSelected,
                Selects::Failed(_) => Verdict::Failed,
                Selects::OutOfSteps => Verdict::Unknown,
            };
        }
        self.verdicts[at]
    }

    pub(super) fn select(&mut self, index: usize, i: usize) -> Selects {
        let Ok(resolved) = &self.search.shape.alternatives[index].resolved else {
            return Selects::No;
        };
        let candidate = &self.search.reachable.candidates[i];
        if !self.search.features.binding_conditions && candidate.device().binding.is_some() {
            return Selects::No;
        }
        let selects = self.search.selections.selects(
            resolved.selection,
            candidate,
            self.search.interner,
            self.search.steps,
        );
        match selects {
            Selects::Yes if !candidate.is_reachable => Selects::No,
            selects => selects,
        }
    }

    fn evaluate_all(&mut self) -> Result<(), Stop> {
        let count = self.search.reachable.candidates.len();
        for index in 0..self.search.shape.alternatives.len() {
            for i in 0..count {
                if self.verdict(index, i) == Verdict::Unknown {
                    return Err(Stop::OutOfSteps);
                }
            }
            // A look-up of a cached result costs a fraction of the test of a device.
            *self.search.steps = self.search.steps.saturating_sub(count as u64 / 4);
            self.check_steps()?;
        }
        Ok(())
    }

    /// Selector evaluation may have spent the remaining steps.
    fn check_steps(&self) -> Result<(), Stop> {
        if *self.search.steps == 0 { Err(Stop::OutOfSteps) } else { Ok(()) }
    }

    /// Returns true if the search can encounter an error. Then upstream may report the error where
    /// counting would report infeasibility.
    fn may_fail(&self) -> bool {
        let count = self.search.reachable.candidates.len();
        let shape = self.search.shape;
        let is_error = |(index, i): (usize, usize)| match self.verdicts[index * count + i] {
            Verdict::Failed => true,
            Verdict::Selected => {
                let answer = shape.alternatives[index]
                    .profile_match(self.search.reachable.candidates[i].profile);
                matches!(answer.map(|a| &a.demand), Some(ProfileDemand::Error(_)))
            }
            _ => false,
        };
        let constrained_all = shape.claims.iter().any(|claim| {
            let own = claim.requests[0]..*claim.requests.last().unwrap_or(&0);
            !claim.constraints.is_empty()
                && shape.alternatives[own].iter().any(|a| a.request.mode == AllocationMode::All)
        });
        let pairs = |index| (0..count).map(move |i| (index, i));
        constrained_all || (0..shape.alternatives.len()).flat_map(pairs).any(is_error)
    }

    /// Returns true if each request alone has enough devices on this node, in one of its
    /// alternatives.
    fn every_request_may_be_served(&self) -> bool {
        self.search.shape.claims.iter().all(|claim| {
            (0..claim.len()).all(|request| {
                claim.alternatives(request).any(|index| {
                    let wanted = self.wanted(index);
                    let is_all =
                        self.search.shape.alternatives[index].request.mode == AllocationMode::All;
                    if is_all {
                        wanted > 0
                    } else {
                        wanted == 0 || self.usable(index, 0).nth(wanted as usize - 1).is_some()
                    }
                })
            })
        })
    }

    /// Returns the candidates from a position on that the alternative can use now. It is an upper
    /// bound for later states.
    pub(super) fn usable(&self, index: usize, from: usize) -> impl Iterator<Item = usize> {
        let alternative = &self.search.shape.alternatives[index];
        let is_admin = alternative.request.admin == Some(true);
        let count = self.search.reachable.candidates.len();
        let suffices = move |i: usize| {
            let profile = self.search.reachable.candidates[i].profile;
            alternative.profile_match(profile).is_some_and(|found| {
                let ProfileDemand::Takes(demand, _) = &found.demand else { return false };
                found.usable && self.state.has_capacity(i, demand)
            })
        };
        let is_usable = move |&i: &usize| {
            self.verdicts[index * count + i] == Verdict::Selected
                && suffices(i)
                && (is_admin || !self.state.is_in_use(0, i, false))
                && self.state.is_sharing_compatible(i, alternative.required_sharing())
                && self.has_counters(i)
        };
        (from..count).map(move |position| self.candidate(index, position)).filter(is_usable)
    }

    /// Returns true if the request may still find `wanted` devices from a position on.
    ///
    /// Devices that consume the same counters are bounded together by the free amount of each
    /// counter.
    pub(super) fn may_find(&self, target: Target, wanted: u64, from: usize) -> bool {
        let reachable = self.search.reachable;
        let limit = usize::try_from(wanted).unwrap_or(usize::MAX);
        if reachable.consumes.is_empty() {
            return self.usable(target.index, from).take(limit).count() >= limit;
        }
        let mut free = 0usize;
        let mut groups: std::collections::BTreeMap<usize, Vec<usize>> = Default::default();
        let symmetry = self.symmetry.as_ref();
        for i in self.usable(target.index, from) {
            match symmetry.and_then(|s| s.counter_group(i)) {
                Some(group) if !self.state.needs_no_counters(i, self.search.features) => {
                    groups.entry(group).or_default().push(i);
                }
                _ => free += 1,
            }
        }
        let bounds = groups.values().map(|members| self.state.counter_bound(members));
        free + bounds.sum::<usize>() >= limit
    }
}
