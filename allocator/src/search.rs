//! Search for devices on one node: depth first over claims, requests and devices.
//!
//! The first complete solution is the result. With [`Policy::FirstFit`](crate::Policy::FirstFit)
//! devices are visited in upstream's order, so the result equals upstream's. Other policies change
//! the order of devices within a request, but not feasibility.
//!
//! The search is exhaustive up to symmetry. It avoids upstream's exponential time by
//!
//! - *counting*: a request for more devices than pass all individual tests fails before anything is
//!   tried;
//! - *symmetry*: after a device has failed, an interchangeable device is not tried at the same
//!   place ([`symmetry`]);
//! - *sets*: if the topology of a request matters, whole sets are tried, the best first ([`sets`]);
//! - *memoization*: a state without solution is not searched again, nor a state that differs only
//!   by exchanging interchangeable devices.
//!
//! Errors occur as in upstream: a failing selector counts only on a device that upstream would have
//! reached. So where an error is possible, nothing is counted in advance, and no device is skipped
//! by symmetry.

mod constraints;
mod outcome;
mod prepare;
mod run;
pub(crate) mod sets;
mod single;
mod state;
mod symmetry;

pub use outcome::SearchFailure;
pub(crate) use outcome::{MAX_RESULTS, SearchOutcome};
pub(crate) use run::Search;

use crate::model::AllocationMode;
use crate::policy::Ranking;
use crate::selector::SelectorError;
use crate::shape::{Chosen, ProfileDemand, Selects};
use crate::wide_hash::WideHash;

use run::{Progress, Run, Stop};
use state::Target;
use symmetry::Verdict;

/// Maximum number of memoized states per search; beyond it the search continues without.
const MAX_MEMOIZED: usize = 200_000;

impl Search<'_> {
    /// Runs the search. The shape must have resolved all device profiles of the node.
    pub(crate) fn run(mut self) -> SearchOutcome {
        if let Some(defect) = &self.reachable.defect {
            return SearchOutcome::Failed(0, SearchFailure::NodeSelector(defect.problem.clone()));
        }
        if let Some(alternative) = single::alternative(self.shape) {
            return self.single(alternative);
        }
        let mut run = Run::new(self);
        let found =
            run.prepare().and_then(|may_fit| if may_fit { run.request(0, 0) } else { Ok(false) });
        match found {
            Ok(true) => SearchOutcome::Found(run.state.into_chosen()),
            Ok(false) => SearchOutcome::Infeasible,
            Err(Stop::Failed(claim, failure)) => SearchOutcome::Failed(claim, failure),
            Err(Stop::OutOfSteps) => SearchOutcome::OutOfSteps,
        }
    }
}

impl Run<'_> {
    /// Serves request `r` of claim `c` and all requests after it. Alternatives are tried in order.
    fn request(&mut self, c: usize, r: usize) -> Progress {
        let shape = self.search.shape;
        let Some(claim) = shape.claims.get(c) else { return Ok(true) };
        if r >= claim.len() {
            return self.request(c + 1, 0);
        }
        let here = self
            .symmetry
            .as_ref()
            .map(|s| (claim.alternatives(r).start, u64::MAX, 0, s.hash(&self.state, c)));
        if here.is_some_and(|here| self.unsolvable.contains(&here)) {
            return Ok(false);
        }
        for index in claim.alternatives(r) {
            let target = Target { claim: c, request: r, index };
            let done = match shape.alternatives[index].request.mode {
                AllocationMode::All => self.take_all_from(target, 0)?,
                _ => self.choose_exact_count(target)?,
            };
            if done {
                return Ok(true);
            }
        }
        self.memoize(here);
        Ok(false)
    }

    fn memoize(&mut self, state: Option<(usize, u64, usize, WideHash)>) {
        if self.unsolvable.len() < MAX_MEMOIZED {
            self.unsolvable.extend(state);
        }
    }

    fn choose_exact_count(&mut self, target: Target) -> Progress {
        let count = self.search.shape.alternatives[target.index].count().unwrap_or(0);
        match self.set_size(target.index, count) {
            Some(count) => self.choose_sets(target, count),
            None => self.choose_individually(target, count),
        }
    }

    fn choose_individually(&mut self, target: Target, count: u64) -> Progress {
        self.rank_candidates(target.index);
        self.choose_exact(target, count, 0)
    }

    /// Chooses the last `wanted` devices of the request among the positions from `from` on.
    fn choose_exact(&mut self, target: Target, wanted: u64, from: usize) -> Progress {
        if wanted == 0 {
            return self.request(target.claim, target.request + 1);
        }
        if wanted > (MAX_RESULTS - self.state.results(target.claim)) as u64 {
            return Ok(false);
        }
        let count = self.search.reachable.candidates.len();
        if self.is_plain && wanted > 1 && !self.may_find(target, wanted, from) {
            return Ok(false);
        }
        // The start of a request is memoized in `request`. Within a request, a position has the
        // same meaning in all states only with a fixed order. With a required topology the state is
        // incomplete: it does not include the links to the devices chosen so far.
        let is_inside = from > 0
            && self.orders[target.index].is_none()
            && !self.requires_topology(target.index);
        let here = self.symmetry.as_ref().filter(|_| is_inside);
        let here = here.map(|s| (target.index, wanted, from, s.hash(&self.state, target.claim)));
        if here.is_some_and(|here| self.unsolvable.contains(&here)) {
            return Ok(false);
        }
        let mut failed: Vec<usize> = Vec::new();
        for position in from..count {
            let i = self.candidate(target.index, position);
            if self
                .symmetry
                .as_ref()
                .is_some_and(|s| failed.iter().any(|&f| s.are_interchangeable(f, i)))
            {
                continue;
            }
            if !self.try_take(target, i)? {
                continue;
            }
            let done = self.choose_exact(target, wanted - 1, position + 1);
            if matches!(done, Ok(true)) {
                return done;
            }
            self.undo_take(target, i);
            done?;
            failed.push(i);
        }
        self.memoize(here);
        Ok(false)
    }

    /// Takes all devices of the request, from the `n`th on.
    fn take_all_from(&mut self, target: Target, n: usize) -> Progress {
        let total = self.all_candidates[target.index].len();
        if total == 0 {
            return Ok(false);
        }
        let Some(&i) = self.all_candidates[target.index].get(n) else {
            return self.request(target.claim, target.request + 1);
        };
        if total - n > MAX_RESULTS - self.state.results(target.claim)
            || !self.try_take_all(target, i)?
        {
            return Ok(false);
        }
        let done = self.take_all_from(target, n + 1);
        if !matches!(done, Ok(true)) {
            self.undo_take(target, i);
        }
        done
    }

    /// Returns the candidate at a position in the order of the alternative.
    fn candidate(&self, index: usize, position: usize) -> usize {
        self.orders[index].as_ref().map_or(position, |order| order[position])
    }

    fn rank_candidates(&mut self, index: usize) {
        let alternative = &self.search.shape.alternatives[index];
        let Ok(resolved) = &alternative.resolved else { return };
        if !self.is_plain {
            return;
        }
        let Search { reachable, ref interner, seed, forecast_view, .. } = self.search;
        let ranking = Ranking::new(reachable, interner, self.state.left(), seed, forecast_view);
        let ranking = ranking.with_holders(self.state.holders());
        self.orders[index] = resolved.device.order(&ranking, alternative);
    }

    /// Takes candidate `i` if it passes all tests, in upstream's order of tests.
    fn try_take(&mut self, target: Target, i: usize) -> Progress {
        self.step()?;
        let alternative = &self.search.shape.alternatives[target.index];
        let is_admin = alternative.request.admin == Some(true);
        if self.state.is_in_use(target.claim, i, is_admin) {
            return Ok(false);
        }
        if !self.selects(target, i)? {
            return Ok(false);
        }
        let profile = self.search.reachable.candidates[i].profile;
        let Some(answer) = alternative.profile_match(profile) else { return Ok(false) };
        let demand = match &answer.demand {
            ProfileDemand::Takes(demand, _) => demand,
            ProfileDemand::Never => return Ok(false),
            ProfileDemand::Error(error) => {
                return Err(Stop::Failed(target.claim, SearchFailure::Capacity(error.clone())));
            }
        };
        let is_sharing_compatible =
            self.state.is_sharing_compatible(i, alternative.required_sharing());
        let has_capacity = self.state.has_capacity(i, demand);
        if !has_capacity
            || !answer.usable
            || !is_sharing_compatible
            || !self.has_counters(i)
            || !self.satisfies_topology(target, i)
        {
            return Ok(false);
        }
        if self
            .state
            .add_to_constraints(target, i, self.search.interner, self.search.features)
            .is_err()
        {
            return Ok(false);
        }
        self.record(target, i, demand);
        Ok(true)
    }

    /// Takes a candidate for an `All` request; its selectors were evaluated before. A violated
    /// constraint is fatal.
    fn try_take_all(&mut self, target: Target, i: usize) -> Progress {
        self.step()?;
        let alternative = &self.search.shape.alternatives[target.index];
        let is_admin = alternative.request.admin == Some(true);
        let profile = self.search.reachable.candidates[i].profile;
        let Some(answer) = alternative.profile_match(profile) else { return Ok(false) };
        if self.state.is_in_use(target.claim, i, is_admin)
            || !self.has_counters(i)
            || !answer.usable
            || !self.state.is_sharing_compatible(i, alternative.required_sharing())
            || !self.satisfies_topology(target, i)
        {
            return Ok(false);
        }
        if let Err(attribute) =
            self.state.add_to_constraints(target, i, self.search.interner, self.search.features)
        {
            return Err(Stop::Failed(
                target.claim,
                SearchFailure::AllViolatesConstraint(attribute),
            ));
        }
        // Upstream tests constraints before the remaining capacity.
        match &answer.demand {
            ProfileDemand::Takes(demand, _) if self.state.has_capacity(i, demand) => {
                self.record(target, i, demand);
                Ok(true)
            }
            _ => {
                self.state.remove_from_constraints(target, i);
                Ok(false)
            }
        }
    }

    fn has_counters(&self, i: usize) -> bool {
        let features = self.search.features;
        if !features.partitionable {
            return self.search.reachable.candidates[i].device().consumes.is_empty();
        }
        self.state.has_counters(i, features)
    }

    fn record(&mut self, target: Target, i: usize, demand: &[i128]) {
        let request = target.request;
        let first = self.search.shape.claims[target.claim].alternatives(request).start;
        let chosen = Chosen { request, alternative: target.index - first, candidate: i };
        self.state.take(target.claim, i, demand, chosen, self.search.features);
        if let Some(symmetry) = &mut self.symmetry {
            symmetry.update(&self.state, i);
        }
    }

    /// Undoes the last step, which took candidate `i`.
    fn undo_take(&mut self, target: Target, i: usize) {
        let profile = self.search.reachable.candidates[i].profile;
        if let Some(ProfileDemand::Takes(demand, _)) = self.search.shape.alternatives[target.index]
            .profile_match(profile)
            .map(|answer| &answer.demand)
        {
            self.state.undo_take(target.claim, i, demand, self.search.features);
        }
        self.state.remove_from_constraints(target, i);
        if let Some(symmetry) = &mut self.symmetry {
            symmetry.update(&self.state, i);
        }
    }

    /// Returns true if class and request select the candidate on this node.
    fn selects(&mut self, target: Target, i: usize) -> Progress {
        match self.verdict(target.index, i) {
            Verdict::Selected => Ok(true),
            Verdict::Failed => {
                let error = match self.select(target.index, i) {
                    Selects::Failed(error) => error,
                    _ => SelectorError::NotBoolean,
                };
                Err(Stop::Failed(target.claim, SearchFailure::Selector(error)))
            }
            Verdict::NotSelected => Ok(false),
            Verdict::Unknown => Err(Stop::OutOfSteps),
        }
    }

    fn step(&mut self) -> Result<(), Stop> {
        *self.search.steps = self.search.steps.checked_sub(1).ok_or(Stop::OutOfSteps)?;
        Ok(())
    }
}
