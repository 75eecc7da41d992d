//! The search for the devices of a request among which it matters how they are joined: whole sets
//! of one machine, the best first, for as long as what comes after them does not fit.

use std::collections::BTreeSet;

use super::{At, MAX_RESULTS, Progress, Run, Stop};
use crate::cluster::{Machine, Places, Reach};
use crate::topology::{DeviceSet, SetRequest, Wishes};

/// After so many sets devices are tried one by one, unless something is required of them together.
const MAX_SETS: usize = 64;

impl Run<'_> {
    /// The size of the sets that an alternative gets; none where its devices are chosen one by one.
    ///
    /// Where an error is possible the order is upstream's, and what is required of a set is asked
    /// of each device that is added.
    pub(super) fn set_sizes(&self, place: usize, count: u64) -> Option<usize> {
        let alternative = &self.search.shape.alternatives[place];
        let resolved = alternative.resolved.as_ref().ok()?;
        self.search.reach.places.as_ref()?;
        let matters = resolved.wishes != Wishes::default()
            || resolved.device.looks_ahead()
                && self.usable(place, 0).all(|i| self.state.is_untouched(i));
        let count =
            usize::try_from(count).ok().filter(|count| (2..=DeviceSet::MAX).contains(count))?;
        (self.is_plain && matters && !resolved.device.keeps_order()).then_some(count)
    }

    /// Chooses all devices of the request at once.
    pub(super) fn sets(&mut self, at: At, count: usize) -> Progress {
        if count > MAX_RESULTS - self.state.results(at.claim) {
            return Ok(false);
        }
        let reach = self.search.reach;
        let Some(places) = &reach.places else { return self.one_by_one(at, count as u64) };
        let usable: Vec<usize> = self.usable(at.place, 0).collect();
        for pool in 0..reach.pools.len() as u32 {
            let Some(machine) = places.machine(pool) else { continue };
            let members: Vec<usize> =
                of_machine(reach, places, pool, usable.iter().copied()).collect();
            if self.sets_of(at, count, pool, machine, &members)? {
                return Ok(true);
            }
            if members.len() == usable.len() {
                return Ok(false);
            }
        }
        // Devices of different machines share nothing.
        if self.must_be_joined(at.place) {
            return Ok(false);
        }
        self.one_by_one(at, count as u64)
    }

    /// The same on one machine, of which these are usable.
    fn sets_of(
        &mut self,
        at: At,
        count: usize,
        pool: u32,
        machine: &Machine,
        usable: &[usize],
    ) -> Progress {
        let Ok(resolved) = &self.search.shape.alternatives[at.place].resolved else {
            return Ok(false);
        };
        let reach = self.search.reach;
        let Some(places) = &reach.places else { return Ok(false) };
        let all = of_machine(reach, places, pool, 0..reach.candidates.len());
        let request = SetRequest {
            count,
            candidates: places.set(usable.iter().copied()),
            free: places.set(all.filter(|&i| self.state.is_untouched(i))),
            wishes: resolved.wishes,
        };
        let mut sets = machine.chooser().sets(&request);
        let mut failed = BTreeSet::new();
        let mut given = 0;
        while let Some(choice) = sets.next(self.search.steps).map_err(|_| Stop::OutOfSteps)? {
            // The order was a wish, and the search device by device knows more of what cannot be.
            if given == MAX_SETS && !self.must_be_joined(at.place) {
                return self.one_by_one(at, count as u64);
            }
            given += 1;
            let is_in =
                |i: &usize| places.position(*i).is_some_and(|at| choice.devices.contains(at));
            let devices: Vec<usize> = usable.iter().copied().filter(is_in).collect();
            let signature = self.symmetry.as_ref().map(|symmetry| symmetry.signature(&devices));
            if signature.is_some_and(|signature| failed.contains(&signature)) {
                continue;
            }
            if self.take_set(at, &devices, 0)? {
                return Ok(true);
            }
            failed.extend(signature);
        }
        Ok(false)
    }

    /// Takes the devices from number `n` on, and serves what comes after.
    fn take_set(&mut self, at: At, devices: &[usize], n: usize) -> Progress {
        let Some(&i) = devices.get(n) else { return self.request(at.claim, at.request + 1) };
        if !self.take(at, i)? {
            return Ok(false);
        }
        let done = self.take_set(at, devices, n + 1);
        if !matches!(done, Ok(true)) {
            self.give_back(at, i);
        }
        done
    }

    pub(super) fn must_be_joined(&self, place: usize) -> bool {
        self.search.shape.alternatives[place].must_be_joined()
    }

    /// Whether the candidate shares what is required with every device that the request has so far.
    pub(super) fn joins(&self, at: At, i: usize) -> bool {
        if !self.must_be_joined(at.place) {
            return true;
        }
        let (reach, shape) = (self.search.reach, self.search.shape);
        let Ok(resolved) = &shape.alternatives[at.place].resolved else { return true };
        let of_request = |chosen: &&super::Chosen| chosen.request == at.request;
        let mut others = self.state.chosen(at.claim).iter().rev().take_while(of_request);
        others.all(|other| share(reach, &resolved.wishes, i, other.candidate))
    }
}

/// Whether two candidates share what is required.
fn share(reach: &Reach, wishes: &Wishes, one: usize, other: usize) -> bool {
    let Some(places) = &reach.places else { return false };
    let pool = reach.candidates[one].pool;
    let position = |i: usize| places.position(i).filter(|_| reach.candidates[i].pool == pool);
    let pair = position(one).zip(position(other)).zip(places.machine(pool));
    pair.is_some_and(|((one, other), machine)| {
        wishes.required().all(|scope| machine.matrix().sharing(scope, one).contains(other))
    })
}

/// Which of these candidates, equally good otherwise, later sets will miss least; none where that
/// is not known.
pub(super) fn least_missed(reach: &Reach, equals: impl Iterator<Item = usize>) -> Option<usize> {
    let places = reach.places.as_ref()?;
    let mut equals = equals.peekable();
    let pool = reach.candidates[*equals.peek()?].pool;
    let equals: Vec<usize> = of_machine(reach, places, pool, equals).collect();
    let machine = places.machine(pool)?;
    let is_free = |&i: &usize| reach.exclusive[i] == 0 && reach.shares[i] == 0;
    let all = of_machine(reach, places, pool, 0..reach.candidates.len());
    let request = SetRequest {
        count: 1,
        candidates: places.set(equals.iter().copied()),
        free: places.set(all.filter(is_free)),
        wishes: Wishes::default(),
    };
    let choice = machine.chooser().choose(&request, &mut (DeviceSet::MAX as u64)).ok()??;
    equals.into_iter().find(|&i| places.position(i).is_some_and(|at| choice.devices.contains(at)))
}

/// How many of these candidates share, every two of them, what is required: the most of any
/// machine.
pub(crate) fn most_joined(reach: &Reach, usable: &[usize], wishes: Wishes) -> usize {
    let Some(places) = &reach.places else { return 0 };
    let of_pool = |pool: u32| {
        let machine = places.machine(pool)?;
        let candidates = places.set(of_machine(reach, places, pool, usable.iter().copied()));
        let request = SetRequest { count: candidates.len(), candidates, free: candidates, wishes };
        Some(machine.chooser().shortfall(&request).together)
    };
    let alone = usize::from(!usable.is_empty());
    (0..reach.pools.len() as u32).filter_map(of_pool).max().unwrap_or(0).max(alone)
}

/// Those of the candidates that have a place in the machine of the pool.
fn of_machine(
    reach: &Reach,
    places: &Places,
    pool: u32,
    candidates: impl Iterator<Item = usize>,
) -> impl Iterator<Item = usize> {
    candidates.filter(move |&i| reach.candidates[i].pool == pool && places.position(i).is_some())
}
