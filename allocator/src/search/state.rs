//! State of a search: the devices taken so far.

use tessera_api::config::Sharing;

use super::constraints::ConstraintState;
use crate::cluster::{CounterAmount, Interner, ReachableDevices};
use crate::features::FeatureGates;
use crate::model::conflicting_sharing;
use crate::shape::{Chosen, Shape};

/// Alternative that is being served.
#[derive(Debug, Clone, Copy)]
pub(super) struct Target {
    pub(super) claim: usize,
    pub(super) request: usize,
    /// Index in [`Shape::alternatives`].
    pub(super) index: usize,
}

/// Consumption of each candidate by the search, on top of existing allocations.
pub(super) struct SearchState<'a> {
    shape: &'a Shape,
    reachable: &'a ReachableDevices,
    /// [`ReachableDevices::left`], minus the consumption of the search.
    left: Vec<i128>,
    /// Claims of this pod that hold the device exclusively, one bit each.
    holders: Vec<u128>,
    /// Shares taken by this search.
    shares: Vec<u32>,
    /// Allocations of this search per sharing mechanism (interceptor, MPS).
    ///
    /// Administrative access is not included.
    by_sharing: Vec<[u32; 2]>,
    /// [`ReachableDevices::counters_left`], minus the consumption of the search.
    counters_left: Vec<i128>,
    /// Pools with an overcommitted counter; upstream allocates no device that consumes counters
    /// there.
    overcommitted: Vec<bool>,
    /// Constraints per claim.
    constraints: Vec<Vec<ConstraintState<'a>>>,
    chosen: Vec<Vec<Chosen>>,
}

impl<'a> SearchState<'a> {
    pub(super) fn new(shape: &'a Shape, reachable: &'a ReachableDevices) -> Self {
        let count = reachable.candidates.len();
        let overcommitted = |pool| {
            reachable.counters_left[reachable.counters_of(pool)].iter().any(|left| *left < 0)
        };
        let pools = if reachable.counters_left.is_empty() { 0 } else { reachable.pools.len() };
        Self {
            shape,
            reachable,
            left: reachable.left.clone(),
            holders: vec![0; count],
            shares: vec![0; count],
            by_sharing: vec![[0; 2]; count],
            counters_left: reachable.counters_left.clone(),
            overcommitted: (0..pools).map(|pool| overcommitted(pool as u32)).collect(),
            constraints: Vec::new(),
            chosen: vec![Vec::new(); shape.claims.len()],
        }
    }

    /// Looks up the constrained attributes of every candidate.
    pub(super) fn prepare_constraints(&mut self, interner: &mut Interner) {
        if self.shape.claims.iter().all(|claim| claim.constraints.is_empty()) {
            return;
        }
        let of_claim = |claim: &'a crate::shape::ClaimShape| {
            claim
                .constraints
                .iter()
                .map(|c| ConstraintState::new(c, self.reachable, interner))
                .collect()
        };
        self.constraints = self.shape.claims.iter().map(of_claim).collect();
    }

    pub(super) fn into_chosen(self) -> Vec<Vec<Chosen>> {
        self.chosen
    }

    /// Returns the number of devices of the claim so far.
    pub(super) fn results(&self, claim: usize) -> usize {
        self.chosen[claim].len()
    }

    pub(super) fn left(&self) -> &[i128] {
        &self.left
    }

    /// Returns, by candidate, the claims of this search that hold it exclusively, as a bit set.
    pub(super) fn holders(&self) -> &[u128] {
        &self.holders
    }

    /// Returns the devices of the claim so far.
    pub(super) fn chosen(&self, claim: usize) -> &[Chosen] {
        &self.chosen[claim]
    }

    /// Returns true if no part of the candidate is allocated.
    pub(super) fn is_unused(&self, i: usize) -> bool {
        let reachable = self.reachable;
        reachable.exclusive[i] == 0
            && reachable.shares[i] == 0
            && self.holders[i] == 0
            && self.shares[i] == 0
    }

    /// Returns the free capacity of a candidate.
    pub(super) fn left_of(&self, i: usize) -> &[i128] {
        &self.left[self.range(i)]
    }

    fn range(&self, i: usize) -> std::ops::Range<usize> {
        self.reachable.offset[i] as usize..self.reachable.offset[i + 1] as usize
    }

    /// Returns true if the device is held exclusively. Administrative access conflicts only within
    /// one claim.
    pub(super) fn is_in_use(&self, claim: usize, i: usize, is_admin: bool) -> bool {
        if is_admin {
            return self.holders[i] & bit(claim) != 0;
        }
        self.holders[i] != 0 || self.reachable.exclusive[i] > 0
    }

    /// Returns true if no allocation of the candidate uses another mechanism than `own`.
    ///
    /// Always true for `None`.
    pub(super) fn is_sharing_compatible(&self, i: usize, own: Option<Sharing>) -> bool {
        let [by_intercept, by_mps] = self.by_sharing[i];
        own.is_none_or(|own| {
            conflicting_sharing(by_intercept + by_mps, by_mps, own)
                .or(self.reachable.conflicting_sharing(i, own))
                .is_none()
        })
    }

    pub(super) fn has_capacity(&self, i: usize, demand: &[i128]) -> bool {
        demand.iter().zip(self.left_of(i)).all(|(wanted, left)| wanted <= left)
    }

    fn is_shared(&self, i: usize, features: &FeatureGates) -> bool {
        features.consumable_capacity && self.reachable.candidates[i].device().shared
    }

    /// Returns true if enough counters are free to allocate the device. Further shares of a shared
    /// device need none.
    pub(super) fn has_counters(&self, i: usize, features: &FeatureGates) -> bool {
        let Some(consumes) = self.reachable.consumes.get(i).filter(|list| !list.is_empty()) else {
            return true;
        };
        if self.needs_no_counters(i, features) {
            return true;
        }
        let pool = self.reachable.candidates[i].pool as usize;
        !self.overcommitted[pool] && CounterAmount::all_left(consumes, &self.counters_left)
    }

    /// Returns true if the device has a share already, so that another one needs no counters.
    pub(super) fn needs_no_counters(&self, i: usize, features: &FeatureGates) -> bool {
        self.is_shared(i, features) && (self.shares[i] > 0 || self.reachable.shares[i] > 0)
    }

    /// Adds the device to the constraints of the alternative.
    ///
    /// # Errors
    /// Returns the attribute of the violated constraint; nothing has changed then.
    pub(super) fn add_to_constraints(
        &mut self,
        target: Target,
        i: usize,
        interner: &Interner,
        features: &FeatureGates,
    ) -> Result<(), String> {
        let Some(constraints) = self.constraints.get_mut(target.claim) else { return Ok(()) };
        let index = target.index - self.shape.claims[target.claim].requests[0];
        let refused = constraints
            .iter_mut()
            .position(|constraint| !constraint.add(index, i, interner, features));
        let Some(refused) = refused else { return Ok(()) };
        constraints[..refused].iter_mut().for_each(|constraint| constraint.remove(index));
        Err(constraints[refused].attribute().to_owned())
    }

    /// Removes the last device of this alternative from its constraints.
    pub(super) fn remove_from_constraints(&mut self, target: Target, _i: usize) {
        let Some(constraints) = self.constraints.get_mut(target.claim) else { return };
        let index = target.index - self.shape.claims[target.claim].requests[0];
        constraints.iter_mut().for_each(|constraint| constraint.remove(index));
    }

    /// Takes the device, or a share of it.
    pub(super) fn take(
        &mut self,
        claim: usize,
        i: usize,
        demand: &[i128],
        chosen: Chosen,
        features: &FeatureGates,
    ) {
        self.chosen[claim].push(chosen);
        if let Some(sharing_index) = self.sharing_index(claim, chosen) {
            self.by_sharing[i][sharing_index] += 1;
        }
        if !self.needs_no_counters(i, features) {
            self.charge(i, 1);
        }
        if self.is_shared(i, features) {
            let range = self.range(i);
            self.left[range].iter_mut().zip(demand).for_each(|(left, amount)| *left -= amount);
            self.shares[i] += 1;
        } else {
            self.holders[i] |= bit(claim);
        }
    }

    /// Undoes the last [`take`](Self::take).
    pub(super) fn undo_take(
        &mut self,
        claim: usize,
        i: usize,
        demand: &[i128],
        features: &FeatureGates,
    ) {
        let chosen = self.chosen[claim].pop();
        if let Some(sharing_index) = chosen.and_then(|chosen| self.sharing_index(claim, chosen)) {
            self.by_sharing[i][sharing_index] -= 1;
        }
        if self.is_shared(i, features) {
            let range = self.range(i);
            self.left[range].iter_mut().zip(demand).for_each(|(left, amount)| *left += amount);
            self.shares[i] -= 1;
        } else {
            self.holders[i] &= !bit(claim);
        }
        if !self.needs_no_counters(i, features) {
            self.charge(i, -1);
        }
    }

    /// Returns the index of the sharing mechanism of a chosen device.
    fn sharing_index(&self, claim: usize, chosen: Chosen) -> Option<usize> {
        let index =
            self.shape.claims[claim].alternatives(chosen.request).start + chosen.alternative;
        self.shape.alternatives[index]
            .required_sharing()
            .map(|own| usize::from(own == Sharing::Mps))
    }

    fn charge(&mut self, i: usize, sign: i128) {
        for used in self.reachable.consumes.get(i).into_iter().flatten() {
            self.counters_left[used.counter as usize] -= sign * used.amount;
        }
    }

    /// Returns the maximum number of these candidates that can be taken together.
    ///
    /// It is an upper bound. The candidates consume the same counters; per counter the smallest
    /// amounts come first.
    pub(super) fn counter_bound(&self, members: &[usize]) -> usize {
        let counters =
            members.iter().flat_map(|&i| &self.reachable.consumes[i]).map(|used| used.counter);
        let counters: std::collections::BTreeSet<u32> = counters.collect();
        let bounds = counters.into_iter().map(|counter| {
            let amount = |i: &usize| {
                let uses =
                    self.reachable.consumes[*i].iter().filter(|used| used.counter == counter);
                uses.map(|used| used.amount).sum::<i128>()
            };
            let mut amounts: Vec<i128> = members.iter().map(amount).collect();
            amounts.sort_unstable();
            let mut left = self.counters_left[counter as usize];
            let fits = |amount: &&i128| {
                left -= **amount;
                left >= 0
            };
            amounts.iter().take_while(fits).count()
        });
        bounds.min().unwrap_or(members.len()).min(members.len())
    }

    /// Returns the state that distinguishes the candidate from others of its kind.
    ///
    /// Free capacity is not included.
    pub(super) fn distinguishing_state(&self, i: usize) -> (u128, [bool; 4]) {
        let is_shared = self.shares[i] > 0 || self.reachable.shares[i] > 0;
        let [no_intercept, no_mps] =
            [Sharing::Intercept, Sharing::Mps].map(|own| !self.is_sharing_compatible(i, Some(own)));
        (self.holders[i], [self.reachable.exclusive[i] > 0, is_shared, no_intercept, no_mps])
    }

    pub(super) fn counter_left(&self, counter: u32) -> i128 {
        self.counters_left[counter as usize]
    }

    /// Returns the constraints of a claim.
    pub(super) fn constraints(&self, claim: usize) -> &[ConstraintState<'a>] {
        self.constraints.get(claim).map_or(&[], Vec::as_slice)
    }
}

fn bit(claim: usize) -> u128 {
    1 << (claim % 128)
}
