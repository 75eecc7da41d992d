//! Search for a single device, the most common case.
//!
//! Devices pass the same checks, in the same order, as in the general search. Backtracking is not
//! needed.

use super::outcome::{SearchFailure, SearchOutcome};
use super::run::{Progress, Search, Stop};
use super::sets;
use crate::cluster::{CounterAmount, ReachableDevices};
use crate::features::FeatureGates;
use crate::policy::{Policy, Rank, Ranking};
use crate::shape::{AlternativeShape, Chosen, ProfileDemand, Selects, Shape};

/// Returns the only alternative of a shape that requests one device without constraints.
pub(super) fn alternative(shape: &Shape) -> Option<&AlternativeShape> {
    let ([claim], [alternative]) = (shape.claims.as_slice(), shape.alternatives.as_slice()) else {
        return None;
    };
    let is_single =
        alternative.count() == Some(1) && claim.len() == 1 && claim.constraints.is_empty();
    is_single.then_some(alternative)
}

impl Search<'_> {
    /// Searches for the device of the only alternative.
    pub(super) fn single(&mut self, alternative: &AlternativeShape) -> SearchOutcome {
        let resolved = match &alternative.resolved {
            Ok(resolved) => resolved,
            Err(cause) => return SearchOutcome::Failed(0, SearchFailure::Request(cause.clone())),
        };
        let policy = resolved.device;
        let mut passing = Vec::new();
        for i in 0..self.reachable.candidates.len() {
            if *self.steps == 0 {
                return SearchOutcome::OutOfSteps;
            }
            *self.steps -= 1;
            match self.passes(alternative, i) {
                Ok(true) => passing.push(i),
                Ok(false) => {}
                Err(Stop::OutOfSteps) => return SearchOutcome::OutOfSteps,
                // Upstream takes the first device that passes, so it never sees this error.
                Err(Stop::Failed(..)) if !passing.is_empty() => {}
                Err(Stop::Failed(claim, failure)) => return SearchOutcome::Failed(claim, failure),
            }
            if policy.keeps_order() && !passing.is_empty() {
                break;
            }
        }
        let chosen = |candidate| vec![vec![Chosen { request: 0, alternative: 0, candidate }]];
        self.best(alternative, policy, &passing)
            .map_or(SearchOutcome::Infeasible, |best| SearchOutcome::Found(chosen(best)))
    }

    /// Returns the device that the policy ranks first; of equal ones the one that leaves the most
    /// topology sets for later requests.
    fn best(
        &self,
        alternative: &AlternativeShape,
        policy: Policy,
        passing: &[usize],
    ) -> Option<usize> {
        let ranking = Ranking::new(
            self.reachable,
            self.interner,
            &self.reachable.left,
            self.seed,
            self.forecast_view,
        );
        let rank = |i: &usize| policy.rank_device(&ranking, alternative, *i);
        let ranks: Vec<Option<Rank>> = passing.iter().map(rank).collect();
        let best = ranks.iter().min()?;
        let mut equals =
            passing.iter().zip(&ranks).filter(|(_, rank)| *rank == best).map(|(i, _)| *i);
        let first = equals.next()?;
        let set = policy
            .uses_forecast()
            .then(|| sets::least_disruptive(self.reachable, std::iter::once(first).chain(equals)));
        Some(set.flatten().unwrap_or(first))
    }

    fn passes(&mut self, alternative: &AlternativeShape, i: usize) -> Progress {
        let reachable = self.reachable;
        if reachable.exclusive[i] > 0 && alternative.request.admin != Some(true) {
            return Ok(false);
        }
        let candidate = &reachable.candidates[i];
        let Ok(resolved) = &alternative.resolved else { return Ok(false) };
        if !self.features.binding_conditions && candidate.device().binding.is_some() {
            return Ok(false);
        }
        let failed = |failure| Err(Stop::Failed(0, failure));
        match self.selections.selects(resolved.selection, candidate, self.interner, self.steps) {
            Selects::Yes if candidate.is_reachable => {}
            Selects::Yes | Selects::No => return Ok(false),
            Selects::Failed(error) => return failed(SearchFailure::Selector(error)),
            Selects::OutOfSteps => return Err(Stop::OutOfSteps),
        }
        let Some(answer) = alternative.profile_match(candidate.profile) else { return Ok(false) };
        let has_capacity = match &answer.demand {
            ProfileDemand::Takes(demand, _) => {
                demand.iter().zip(reachable.left(i)).all(|(wanted, left)| wanted <= left)
            }
            ProfileDemand::Never => false,
            ProfileDemand::Error(error) => return failed(SearchFailure::Capacity(error.clone())),
        };
        let is_sharing_compatible = alternative
            .required_sharing()
            .is_none_or(|own| reachable.conflicting_sharing(i, own).is_none());
        Ok(has_capacity
            && answer.usable
            && is_sharing_compatible
            && has_counters(reachable, i, self.features))
    }
}

/// Returns true if enough counters are free to allocate the device.
fn has_counters(reachable: &ReachableDevices, i: usize, features: &FeatureGates) -> bool {
    if !features.partitionable {
        return reachable.candidates[i].device().consumes.is_empty();
    }
    let Some(consumes) = reachable.consumes.get(i).filter(|list| !list.is_empty()) else {
        return true;
    };
    let is_shared = features.consumable_capacity && reachable.candidates[i].device().shared;
    if is_shared && reachable.shares[i] > 0 {
        return true;
    }
    let of_pool = &reachable.counters_left[reachable.counters_of(reachable.candidates[i].pool)];
    of_pool.iter().all(|left| *left >= 0)
        && CounterAmount::all_left(consumes, &reachable.counters_left)
}
