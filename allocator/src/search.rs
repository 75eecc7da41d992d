//! The search for devices on one node: depth first over claims, requests and devices, the first
//! complete solution wins.
//!
//! With [`Policy::FirstFit`](crate::Policy::FirstFit) it visits devices in upstream's order and so
//! finds upstream's result. With the others the order of devices within a request changes, what is
//! feasible does not.
//!
//! It is exhaustive up to symmetry. What keeps it short, where upstream's takes exponential time:
//!
//! - *Counting*: a request that wants more devices than pass every test by themselves fails before
//!   anything is tried.
//! - *Symmetry*: after a device has failed at a place, one that can stand for it is not tried there
//!   ([`symmetry`]).
//! - *Sets*: where it matters how the devices of a request are joined, whole sets are tried, the
//!   best first ([`sets`]).
//! - *Memory*: a state out of which there was no way is not searched again, nor is one that differs
//!   from it by exchanging devices that can stand for each other.
//!
//! Errors surface as upstream's do: a selector that fails counts only on a device that upstream
//! would have reached. So nothing is counted beforehand, and no device is passed over for its
//! equal, where an error is possible.

mod held;
mod prepare;
pub(crate) mod sets;
mod single;
mod state;
mod symmetry;

use crate::capacity::CapacityError;
use crate::cluster::{Interner, Reach};
use crate::features::Features;
use crate::model::Mode;
use crate::outcome::Cause;
use crate::policy::{Outlook, Ranking};
use crate::selector::SelectorError;
use crate::shape::{OfferDemand, Selections, Shape};

use prepare::Verdict;
use state::State;
use symmetry::{Hash, Symmetry};

/// More results than this a claim cannot hold (`AllocationResultsMaxSize`).
pub(crate) const MAX_RESULTS: usize = 32;

/// States without a way out that are remembered in one search; beyond, the search goes on without.
const MAX_REMEMBERED: usize = 200_000;

/// How a search on one node ended.
#[derive(Debug)]
pub(crate) enum Ended {
    /// A complete solution: per claim its devices, in order.
    Found(Vec<Vec<Chosen>>),
    /// There is none.
    None,
    /// It had to be stopped; the claim (by place) and the reason.
    Failed(usize, Failure),
    /// The step budget is spent.
    OutOfSteps,
}

/// Why a node has no answer: upstream gives up on the pod here too.
#[derive(Debug, Clone, PartialEq)]
pub enum Failure {
    /// The request cannot be served anywhere.
    Request(Cause),
    /// A selector on a device that was reached.
    Selector(SelectorError),
    /// An amount that cannot be computed.
    Capacity(CapacityError),
    /// "All" devices contradict a constraint on this attribute.
    AllAgainstConstraint(String),
    /// "All" devices, while this pool is being replaced.
    AllButPoolIncomplete(String),
    /// "All" devices, while this pool contradicts itself.
    AllButPoolInvalid(String),
    /// More than 32 devices in one claim.
    TooManyDevices(u64),
    /// A constraint of a kind we do not know.
    UnknownConstraint,
    /// A node selector in a slice that cannot be parsed.
    NodeSelector(String),
}

/// A device chosen for a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Chosen {
    /// The request, by its place in the claim.
    pub(crate) request: usize,
    /// Which of its alternatives.
    pub(crate) alternative: usize,
    /// The device, by its place among the candidates.
    pub(crate) candidate: usize,
}

/// What a search works with.
pub(crate) struct Search<'a> {
    pub(crate) shape: &'a Shape,
    pub(crate) reach: &'a Reach,
    pub(crate) features: &'a Features,
    pub(crate) interner: &'a mut Interner,
    pub(crate) selections: &'a mut Selections,
    /// What may still be spent; one step is one device looked at.
    pub(crate) steps: &'a mut u64,
    /// For policies that draw lots.
    pub(crate) seed: u64,
    /// For policies that look ahead.
    pub(crate) outlook: Outlook<'a>,
}

/// Why the recursion unwinds before it has an answer.
enum Stop {
    Failed(usize, Failure),
    OutOfSteps,
}

type Progress = Result<bool, Stop>;

impl Search<'_> {
    /// Runs the search. Every offer of the node has been met by the shape.
    pub(crate) fn run(mut self) -> Ended {
        if let Some(defect) = &self.reach.defect {
            return Ended::Failed(0, Failure::NodeSelector(defect.problem.clone()));
        }
        if let Some(alternative) = single::alternative(self.shape) {
            return self.single(alternative);
        }
        let mut run = Run::new(self);
        let found =
            run.prepare().and_then(|may_fit| if may_fit { run.request(0, 0) } else { Ok(false) });
        match found {
            Ok(true) => Ended::Found(run.state.into_chosen()),
            Ok(false) => Ended::None,
            Err(Stop::Failed(claim, failure)) => Ended::Failed(claim, failure),
            Err(Stop::OutOfSteps) => Ended::OutOfSteps,
        }
    }
}

/// A search under way.
struct Run<'a> {
    search: Search<'a>,
    state: State<'a>,
    /// What is known of each candidate for each alternative: alternative by alternative.
    verdicts: Vec<Verdict>,
    /// Per alternative the candidates that "all" means.
    all: Vec<Vec<usize>>,
    /// Per alternative the order in which candidates are tried; none where it is upstream's.
    orders: Vec<Option<Vec<usize>>>,
    symmetry: Option<Symmetry>,
    /// No candidate can give an error: then what cannot be is known by counting, and the order is
    /// the policy's. Otherwise it is upstream's, which decides whether the search comes upon
    /// the error.
    is_plain: bool,
    hopeless: std::collections::HashSet<(usize, u64, usize, Hash), foldhash::fast::FixedState>,
}

/// Which alternative of which request of which claim is being served.
#[derive(Debug, Clone, Copy)]
struct At {
    claim: usize,
    request: usize,
    /// By its place in [`Shape::alternatives`].
    place: usize,
}

impl<'a> Run<'a> {
    fn new(search: Search<'a>) -> Self {
        let (shape, reach) = (search.shape, search.reach);
        let alternatives = shape.alternatives.len();
        Self {
            state: State::new(shape, reach),
            verdicts: vec![Verdict::Unknown; alternatives * reach.candidates.len()],
            all: vec![Vec::new(); alternatives],
            orders: vec![None; alternatives],
            symmetry: None,
            is_plain: false,
            hopeless: Default::default(),
            search,
        }
    }

    /// Serves request `r` of claim `c` and everything after it: with its first alternative that
    /// leads to an end.
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
        if here.is_some_and(|here| self.hopeless.contains(&here)) {
            return Ok(false);
        }
        for place in claim.alternatives(r) {
            let at = At { claim: c, request: r, place };
            let done = match shape.alternatives[place].request.mode {
                Mode::All => self.all(at, 0)?,
                _ => self.exact_of(at)?,
            };
            if done {
                return Ok(true);
            }
        }
        self.remember(here);
        Ok(false)
    }

    fn remember(&mut self, state: Option<(usize, u64, usize, Hash)>) {
        if self.hopeless.len() < MAX_REMEMBERED {
            self.hopeless.extend(state);
        }
    }

    fn exact_of(&mut self, at: At) -> Progress {
        let count = self.search.shape.alternatives[at.place].count().unwrap_or(0);
        match self.set_sizes(at.place, count) {
            Some(count) => self.sets(at, count),
            None => self.one_by_one(at, count),
        }
    }

    fn one_by_one(&mut self, at: At, count: u64) -> Progress {
        self.put_in_order(at.place);
        self.exact(at, count, 0)
    }

    /// Chooses the last `wanted` devices of the request among those from position `from` on.
    fn exact(&mut self, at: At, wanted: u64, from: usize) -> Progress {
        if wanted == 0 {
            return self.request(at.claim, at.request + 1);
        }
        if wanted > (MAX_RESULTS - self.state.results(at.claim)) as u64 {
            return Ok(false);
        }
        let count = self.search.reach.candidates.len();
        if self.is_plain && wanted > 1 && !self.may_find(at, wanted, from) {
            return Ok(false);
        }
        // The first device of a request is where the request begins, which is remembered there.
        // Inside, a position means the same in every state only where the order is always the same.
        // Who is joined to the devices so far is not part of a state.
        let is_inside =
            from > 0 && self.orders[at.place].is_none() && !self.must_be_joined(at.place);
        let here = self.symmetry.as_ref().filter(|_| is_inside);
        let here = here.map(|s| (at.place, wanted, from, s.hash(&self.state, at.claim)));
        if here.is_some_and(|here| self.hopeless.contains(&here)) {
            return Ok(false);
        }
        let mut failed: Vec<usize> = Vec::new();
        for position in from..count {
            let i = self.candidate(at.place, position);
            if self.symmetry.as_ref().is_some_and(|s| failed.iter().any(|&f| s.same(f, i))) {
                continue;
            }
            if !self.take(at, i)? {
                continue;
            }
            let done = self.exact(at, wanted - 1, position + 1);
            if matches!(done, Ok(true)) {
                return done;
            }
            self.give_back(at, i);
            done?;
            failed.push(i);
        }
        self.remember(here);
        Ok(false)
    }

    /// Takes all devices of the request, from number `n` on.
    fn all(&mut self, at: At, n: usize) -> Progress {
        let total = self.all[at.place].len();
        if total == 0 {
            return Ok(false);
        }
        let Some(&i) = self.all[at.place].get(n) else {
            return self.request(at.claim, at.request + 1);
        };
        if total - n > MAX_RESULTS - self.state.results(at.claim) || !self.take_all(at, i)? {
            return Ok(false);
        }
        let done = self.all(at, n + 1);
        if !matches!(done, Ok(true)) {
            self.give_back(at, i);
        }
        done
    }

    /// The candidate at a position of the order in which the alternative tries them.
    fn candidate(&self, place: usize, position: usize) -> usize {
        self.orders[place].as_ref().map_or(position, |order| order[position])
    }

    fn put_in_order(&mut self, place: usize) {
        let alternative = &self.search.shape.alternatives[place];
        let Ok(resolved) = &alternative.resolved else { return };
        if !self.is_plain {
            return;
        }
        let Search { reach, ref interner, seed, outlook, .. } = self.search;
        let ranking = Ranking::new(reach, interner, self.state.left(), seed, outlook);
        let ranking = ranking.with_holders(self.state.holders());
        self.orders[place] = resolved.device.order(&ranking, alternative);
    }

    /// Takes candidate `i` if it passes every test, in upstream's order of tests.
    fn take(&mut self, at: At, i: usize) -> Progress {
        self.step()?;
        let alternative = &self.search.shape.alternatives[at.place];
        let is_admin = alternative.request.admin == Some(true);
        if self.state.in_use(at.claim, i, is_admin) {
            return Ok(false);
        }
        if !self.selects(at, i)? {
            return Ok(false);
        }
        let offer = self.search.reach.candidates[i].offer;
        let Some(answer) = alternative.on(offer) else { return Ok(false) };
        let demand = match &answer.demand {
            OfferDemand::Takes(demand, _) => demand,
            OfferDemand::Never => return Ok(false),
            OfferDemand::Error(error) => {
                return Err(Stop::Failed(at.claim, Failure::Capacity(error.clone())));
            }
        };
        let agrees = self.state.agrees(i, alternative.agrees_on());
        let has_room = self.state.has_room(i, demand);
        if !has_room || !answer.usable || !agrees || !self.has_counters(i) || !self.joins(at, i) {
            return Ok(false);
        }
        if self.state.hold(at, i, self.search.interner, self.search.features).is_err() {
            return Ok(false);
        }
        self.book(at, i, demand);
        Ok(true)
    }

    /// The same for a device of an `All` request, which has been selected before; a constraint
    /// against it is fatal.
    fn take_all(&mut self, at: At, i: usize) -> Progress {
        self.step()?;
        let alternative = &self.search.shape.alternatives[at.place];
        let is_admin = alternative.request.admin == Some(true);
        let offer = self.search.reach.candidates[i].offer;
        let Some(answer) = alternative.on(offer) else { return Ok(false) };
        if self.state.in_use(at.claim, i, is_admin)
            || !self.has_counters(i)
            || !answer.usable
            || !self.state.agrees(i, alternative.agrees_on())
            || !self.joins(at, i)
        {
            return Ok(false);
        }
        if let Err(attribute) = self.state.hold(at, i, self.search.interner, self.search.features) {
            return Err(Stop::Failed(at.claim, Failure::AllAgainstConstraint(attribute)));
        }
        // Upstream looks at constraints before it looks at the room that is left.
        match &answer.demand {
            OfferDemand::Takes(demand, _) if self.state.has_room(i, demand) => {
                self.book(at, i, demand);
                Ok(true)
            }
            _ => {
                self.state.release(at, i);
                Ok(false)
            }
        }
    }

    fn has_counters(&self, i: usize) -> bool {
        let features = self.search.features;
        if !features.partitionable {
            return self.search.reach.candidates[i].device().consumes.is_empty();
        }
        self.state.has_counters(i, features)
    }

    fn book(&mut self, at: At, i: usize, demand: &[i128]) {
        let request = at.request;
        let first = self.search.shape.claims[at.claim].alternatives(request).start;
        let chosen = Chosen { request, alternative: at.place - first, candidate: i };
        self.state.take(at.claim, i, demand, chosen, self.search.features);
        if let Some(symmetry) = &mut self.symmetry {
            symmetry.update(&self.state, i);
        }
    }

    /// Takes back the device taken last, which is candidate `i`.
    fn give_back(&mut self, at: At, i: usize) {
        let offer = self.search.reach.candidates[i].offer;
        if let Some(OfferDemand::Takes(demand, _)) =
            self.search.shape.alternatives[at.place].on(offer).map(|answer| &answer.demand)
        {
            self.state.give_back(at.claim, i, demand, self.search.features);
        }
        self.state.release(at, i);
        if let Some(symmetry) = &mut self.symmetry {
            symmetry.update(&self.state, i);
        }
    }

    /// Whether class and request select the candidate, on this node.
    fn selects(&mut self, at: At, i: usize) -> Progress {
        match self.verdict(at.place, i) {
            Verdict::Selected => Ok(true),
            Verdict::Failed => {
                let error = self.select(at.place, i).err().unwrap_or(SelectorError::NotBoolean);
                Err(Stop::Failed(at.claim, Failure::Selector(error)))
            }
            _ => Ok(false),
        }
    }

    fn step(&mut self) -> Result<(), Stop> {
        *self.search.steps = self.search.steps.checked_sub(1).ok_or(Stop::OutOfSteps)?;
        Ok(())
    }
}
