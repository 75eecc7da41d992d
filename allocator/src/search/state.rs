//! What the search has taken so far.

use tessera_api::config::Sharing;

use super::held::Held;
use super::{At, Chosen};
use crate::cluster::{Interner, Reach};
use crate::features::Features;
use crate::model::differing;
use crate::shape::Shape;

/// What is taken of each candidate, on top of what allocated claims take.
pub(super) struct State<'a> {
    shape: &'a Shape,
    reach: &'a Reach,
    /// As [`Reach::left`].
    left: Vec<i128>,
    /// Exclusive devices: the claims of this pod that have taken it, one bit each.
    holders: Vec<u128>,
    /// Shares that this search has taken.
    shares: Vec<u32>,
    /// How often this search has taken it to be shared by Intercept, and by MPS; not counting
    /// those who administer it.
    ways: Vec<[u32; 2]>,
    /// As [`Reach::counters_left`].
    counters_left: Vec<i128>,
    /// Per pool: more of some counter is taken than there is, so that upstream hands out nothing
    /// that draws on counters.
    overdrawn: Vec<bool>,
    /// Per claim its constraints.
    held: Vec<Vec<Held<'a>>>,
    chosen: Vec<Vec<Chosen>>,
}

impl<'a> State<'a> {
    pub(super) fn new(shape: &'a Shape, reach: &'a Reach) -> Self {
        let count = reach.candidates.len();
        let overdrawn =
            |pool| reach.counters_left[reach.counters_of(pool)].iter().any(|left| *left < 0);
        let pools = if reach.counters_left.is_empty() { 0 } else { reach.pools.len() };
        Self {
            shape,
            reach,
            left: reach.left.clone(),
            holders: vec![0; count],
            shares: vec![0; count],
            ways: vec![[0; 2]; count],
            counters_left: reach.counters_left.clone(),
            overdrawn: (0..pools).map(|pool| overdrawn(pool as u32)).collect(),
            held: Vec::new(),
            chosen: vec![Vec::new(); shape.claims.len()],
        }
    }

    /// Looks up what constraints look at, on every candidate.
    pub(super) fn prepare_constraints(&mut self, interner: &mut Interner) {
        if self.shape.claims.iter().all(|claim| claim.constraints.is_empty()) {
            return;
        }
        let of_claim = |claim: &'a crate::shape::ClaimShape| {
            claim.constraints.iter().map(|c| Held::new(c, self.reach, interner)).collect()
        };
        self.held = self.shape.claims.iter().map(of_claim).collect();
    }

    pub(super) fn into_chosen(self) -> Vec<Vec<Chosen>> {
        self.chosen
    }

    /// How many devices the claim has so far.
    pub(super) fn results(&self, claim: usize) -> usize {
        self.chosen[claim].len()
    }

    pub(super) fn left(&self) -> &[i128] {
        &self.left
    }

    /// Exclusive devices that this search holds, by candidate: not 0.
    pub(super) fn holders(&self) -> &[u128] {
        &self.holders
    }

    /// What the claim has so far.
    pub(super) fn chosen(&self, claim: usize) -> &[Chosen] {
        &self.chosen[claim]
    }

    /// Whether nothing at all is taken of the candidate.
    pub(super) fn is_untouched(&self, i: usize) -> bool {
        let reach = self.reach;
        reach.exclusive[i] == 0
            && reach.shares[i] == 0
            && self.holders[i] == 0
            && self.shares[i] == 0
    }

    /// What is left of a candidate.
    pub(super) fn left_of(&self, i: usize) -> &[i128] {
        &self.left[self.range(i)]
    }

    fn range(&self, i: usize) -> std::ops::Range<usize> {
        self.reach.offset[i] as usize..self.reach.offset[i + 1] as usize
    }

    /// Whether the whole device is taken. Those who administer it do not mind, but for themselves.
    pub(super) fn in_use(&self, claim: usize, i: usize, is_admin: bool) -> bool {
        if is_admin {
            return self.holders[i] & bit(claim) != 0;
        }
        self.holders[i] != 0 || self.reach.exclusive[i] > 0
    }

    /// Whether nobody shares the candidate in another way than `own`; whatever is said if there is
    /// none.
    pub(super) fn agrees(&self, i: usize, own: Option<Sharing>) -> bool {
        let [by_intercept, by_mps] = self.ways[i];
        own.is_none_or(|own| {
            differing(by_intercept + by_mps, by_mps, own).or(self.reach.differing(i, own)).is_none()
        })
    }

    pub(super) fn has_room(&self, i: usize, demand: &[i128]) -> bool {
        demand.iter().zip(self.left_of(i)).all(|(wanted, left)| wanted <= left)
    }

    fn is_shared(&self, i: usize, features: &Features) -> bool {
        features.consumable_capacity && self.reach.candidates[i].device().shared
    }

    /// Whether the counters that an allocation of the device takes are there. A share of a device
    /// that is shared already takes none.
    pub(super) fn has_counters(&self, i: usize, features: &Features) -> bool {
        let Some(consumes) = self.reach.consumes.get(i).filter(|list| !list.is_empty()) else {
            return true;
        };
        if self.charges_nothing(i, features) {
            return true;
        }
        let pool = self.reach.candidates[i].pool as usize;
        !self.overdrawn[pool]
            && consumes.iter().all(|c| self.counters_left[c.counter as usize] >= c.amount)
    }

    /// Whether it is shared already, so that another share of it takes no counters.
    pub(super) fn charges_nothing(&self, i: usize, features: &Features) -> bool {
        self.is_shared(i, features) && (self.shares[i] > 0 || self.reach.shares[i] > 0)
    }

    /// Adds the device to the constraints that bind the alternative; otherwise changes nothing and
    /// names the attribute.
    pub(super) fn hold(
        &mut self,
        at: At,
        i: usize,
        interner: &Interner,
        features: &Features,
    ) -> Result<(), String> {
        let Some(held) = self.held.get_mut(at.claim) else { return Ok(()) };
        let place = at.place - self.shape.claims[at.claim].requests[0];
        let refused = held.iter_mut().position(|held| !held.add(place, i, interner, features));
        let Some(refused) = refused else { return Ok(()) };
        held[..refused].iter_mut().for_each(|held| held.remove(place));
        Err(held[refused].attribute().to_owned())
    }

    /// Takes back the last device added for this alternative.
    pub(super) fn release(&mut self, at: At, _i: usize) {
        let Some(held) = self.held.get_mut(at.claim) else { return };
        let place = at.place - self.shape.claims[at.claim].requests[0];
        held.iter_mut().for_each(|held| held.remove(place));
    }

    /// Takes the device, or a share of it.
    pub(super) fn take(
        &mut self,
        claim: usize,
        i: usize,
        demand: &[i128],
        chosen: Chosen,
        features: &Features,
    ) {
        self.chosen[claim].push(chosen);
        if let Some(way) = self.way(claim, chosen) {
            self.ways[i][way] += 1;
        }
        if !self.charges_nothing(i, features) {
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

    /// Takes back what was taken last.
    pub(super) fn give_back(
        &mut self,
        claim: usize,
        i: usize,
        demand: &[i128],
        features: &Features,
    ) {
        let chosen = self.chosen[claim].pop();
        if let Some(way) = chosen.and_then(|chosen| self.way(claim, chosen)) {
            self.ways[i][way] -= 1;
        }
        if self.is_shared(i, features) {
            let range = self.range(i);
            self.left[range].iter_mut().zip(demand).for_each(|(left, amount)| *left += amount);
            self.shares[i] -= 1;
        } else {
            self.holders[i] &= !bit(claim);
        }
        if !self.charges_nothing(i, features) {
            self.charge(i, -1);
        }
    }

    /// Which of the ways of sharing a device it is that was chosen.
    fn way(&self, claim: usize, chosen: Chosen) -> Option<usize> {
        let place =
            self.shape.claims[claim].alternatives(chosen.request).start + chosen.alternative;
        self.shape.alternatives[place].agrees_on().map(|own| usize::from(own == Sharing::Mps))
    }

    fn charge(&mut self, i: usize, sign: i128) {
        for used in self.reach.consumes.get(i).into_iter().flatten() {
            self.counters_left[used.counter as usize] -= sign * used.amount;
        }
    }

    /// How many of these candidates, which draw on the same counters, can be taken together at
    /// most: of each counter the least demanding come first.
    pub(super) fn bound_by_counters(&self, members: &[usize]) -> usize {
        let counters =
            members.iter().flat_map(|&i| &self.reach.consumes[i]).map(|used| used.counter);
        let counters: std::collections::BTreeSet<u32> = counters.collect();
        let bounds = counters.into_iter().map(|counter| {
            let amount = |i: &usize| {
                let uses = self.reach.consumes[*i].iter().filter(|used| used.counter == counter);
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

    /// What distinguishes the candidate from others of its kind now, besides what is left of it.
    pub(super) fn marks(&self, i: usize) -> (u128, [bool; 4]) {
        let is_shared = self.shares[i] > 0 || self.reach.shares[i] > 0;
        let [no_intercept, no_mps] =
            [Sharing::Intercept, Sharing::Mps].map(|own| !self.agrees(i, Some(own)));
        (self.holders[i], [self.reach.exclusive[i] > 0, is_shared, no_intercept, no_mps])
    }

    pub(super) fn counter_left(&self, counter: u32) -> i128 {
        self.counters_left[counter as usize]
    }

    /// Constraints of a claim.
    pub(super) fn held(&self, claim: usize) -> &[Held<'a>] {
        self.held.get(claim).map_or(&[], Vec::as_slice)
    }
}

fn bit(claim: usize) -> u128 {
    1 << (claim % 128)
}
