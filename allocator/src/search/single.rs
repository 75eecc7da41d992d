//! The search for one device: most claims ask for no more. The same tests in the same order,
//! without anything to go back on.

use super::{Chosen, Ended, Failure, Search, sets};
use crate::cluster::Reach;
use crate::features::Features;
use crate::policy::{Policy, Rank, Ranking};
use crate::shape::{AlternativeShape, OfferDemand, Shape};

/// The only alternative of a shape that asks for exactly one device and binds it by nothing.
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
    pub(super) fn single(&mut self, alternative: &AlternativeShape) -> Ended {
        let resolved = match &alternative.resolved {
            Ok(resolved) => resolved,
            Err(cause) => return Ended::Failed(0, Failure::Request(cause.clone())),
        };
        let policy = resolved.device;
        let mut passing = Vec::new();
        for i in 0..self.reach.candidates.len() {
            if *self.steps == 0 {
                return Ended::OutOfSteps;
            }
            *self.steps -= 1;
            match self.passes(alternative, i) {
                Ok(true) => passing.push(i),
                Ok(false) => {}
                // Upstream would have stopped at the device before.
                Err(_) if !passing.is_empty() => {}
                Err(failure) => return Ended::Failed(0, failure),
            }
            if policy.keeps_order() && !passing.is_empty() {
                break;
            }
        }
        let chosen = |candidate| vec![vec![Chosen { request: 0, alternative: 0, candidate }]];
        self.best(alternative, policy, &passing)
            .map_or(Ended::None, |best| Ended::Found(chosen(best)))
    }

    /// The best of the devices by the policy; of those that are equally good, the one that breaks
    /// the fewest sets.
    fn best(
        &self,
        alternative: &AlternativeShape,
        policy: Policy,
        passing: &[usize],
    ) -> Option<usize> {
        let ranking =
            Ranking::new(self.reach, self.interner, &self.reach.left, self.seed, self.outlook);
        let rank = |i: &usize| policy.rank_device(&ranking, alternative, *i);
        let ranks: Vec<Option<Rank>> = passing.iter().map(rank).collect();
        let best = ranks.iter().min()?;
        let mut equals =
            passing.iter().zip(&ranks).filter(|(_, rank)| *rank == best).map(|(i, _)| *i);
        let first = equals.next()?;
        let set = policy
            .looks_ahead()
            .then(|| sets::least_missed(self.reach, std::iter::once(first).chain(equals)));
        Some(set.flatten().unwrap_or(first))
    }

    fn passes(&mut self, alternative: &AlternativeShape, i: usize) -> Result<bool, Failure> {
        let reach = self.reach;
        if reach.exclusive[i] > 0 && alternative.request.admin != Some(true) {
            return Ok(false);
        }
        let candidate = &reach.candidates[i];
        let Ok(resolved) = &alternative.resolved else { return Ok(false) };
        if !self.features.binding_conditions && candidate.device().binding.is_some() {
            return Ok(false);
        }
        let selected =
            self.selections.selects(resolved.selection, candidate, self.interner, self.steps);
        if !selected.map_err(Failure::Selector)? || !candidate.reachable {
            return Ok(false);
        }
        let Some(answer) = alternative.on(candidate.offer) else { return Ok(false) };
        let has_room = match &answer.demand {
            OfferDemand::Takes(demand, _) => {
                demand.iter().zip(reach.left(i)).all(|(wanted, left)| wanted <= left)
            }
            OfferDemand::Never => false,
            OfferDemand::Error(error) => return Err(Failure::Capacity(error.clone())),
        };
        let agrees = alternative.agrees_on().is_none_or(|own| reach.differing(i, own).is_none());
        Ok(has_room && answer.usable && agrees && has_counters(reach, i, self.features))
    }
}

/// Whether the counters that an allocation of the device takes are there, nothing else being
/// allocated.
fn has_counters(reach: &Reach, i: usize, features: &Features) -> bool {
    if !features.partitionable {
        return reach.candidates[i].device().consumes.is_empty();
    }
    let Some(consumes) = reach.consumes.get(i).filter(|list| !list.is_empty()) else { return true };
    let is_shared = features.consumable_capacity && reach.candidates[i].device().shared;
    if is_shared && reach.shares[i] > 0 {
        return true;
    }
    let of_pool = &reach.counters_left[reach.counters_of(reach.candidates[i].pool)];
    of_pool.iter().all(|left| *left >= 0)
        && consumes.iter().all(|used| reach.counters_left[used.counter as usize] >= used.amount)
}
