//! The search for devices on one node: depth first over claims, requests and devices, the first complete solution wins.
//!
//! With [`Policy::FirstFit`] it visits devices in upstream's order and so finds upstream's result. With the others the order
//! of devices within a request changes, what is feasible does not: the search is exhaustive up to symmetry. Two devices are
//! interchangeable when every selector of the pod says the same about them, their capacities, taints and attributes under
//! constraints are equal, and the same is taken of them; after one of them has failed at a place, the other is not tried
//! there.

mod prepare;
mod state;

use std::collections::BTreeMap;
use std::rc::Rc;

use tessera_api::quantity::Quantity;

use crate::capacity::{self, CapacityError, Demand};
use crate::constraint::ConstraintSet;
use crate::model::{Mode, Usage};
use crate::policy::{self, Policy};
use crate::pools::Candidate;
use crate::selector::SelectorError;

pub(crate) use prepare::{AlternativeTask, ClaimTask, Placement};
use state::State;

/// More results than this a claim cannot hold (`AllocationResultsMaxSize`).
pub(crate) const MAX_RESULTS: usize = 32;

/// How a search on one node ended.
#[derive(Debug)]
pub(crate) enum Ended<'s> {
    /// A complete solution: per claim its devices, in order.
    Found(Vec<Vec<Chosen<'s>>>),
    /// There is none.
    None,
    /// It had to be stopped; the claim (by index) and the reason.
    Failed(usize, Failure),
    /// The step budget is spent.
    OutOfSteps,
}

/// Why a node has no answer: upstream gives up on the pod here too.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Failure {
    /// A selector on a device that was reached.
    Selector(SelectorError),
    /// An amount that cannot be computed.
    Capacity(CapacityError),
    /// "All" devices contradict a constraint on this attribute.
    AllAgainstConstraint(String),
    /// "All" devices, while this pool is being replaced or is invalid.
    AllButPoolNotReady(String),
    /// More than 32 devices in one claim.
    TooManyDevices(u64),
    /// A constraint of a kind we do not know.
    UnknownConstraint,
    /// A node selector in a slice that cannot be parsed.
    NodeSelector(String),
}

/// A device chosen for a request.
#[derive(Debug, Clone)]
pub(crate) struct Chosen<'s> {
    /// The request, by its place in the claim.
    pub(crate) request: usize,
    /// Which of its alternatives.
    pub(crate) alternative: usize,
    pub(crate) candidate: Candidate<'s>,
    pub(crate) consumed: BTreeMap<String, Quantity>,
}

/// What a search works on.
pub(crate) struct Search<'a, 's> {
    pub(crate) tasks: &'a [ClaimTask<'s>],
    /// All devices that may be taken, in upstream's order.
    pub(crate) candidates: &'a [Candidate<'s>],
    pub(crate) usage: &'a Usage,
}

/// Why the recursion unwinds before it has an answer.
enum Stop {
    Failed(usize, Failure),
    OutOfSteps,
}

impl<'a, 's> Search<'a, 's> {
    /// All alternatives of all requests.
    fn alternatives(&self) -> impl Iterator<Item = &AlternativeTask<'s>> {
        self.tasks.iter().flat_map(|task| task.requests.iter().flatten())
    }

    /// Runs the search. `steps` is what may still be spent and is reduced by what was: one step is one device looked at.
    pub(crate) fn run(&self, steps: &mut u64) -> Ended<'s> {
        let mut state = State::new(self);
        let mut run = Run { search: self, state: &mut state, steps };
        match run.request(0, 0) {
            Ok(true) => Ended::Found(state.into_chosen()),
            Ok(false) => Ended::None,
            Err(Stop::Failed(claim, failure)) => Ended::Failed(claim, failure),
            Err(Stop::OutOfSteps) => Ended::OutOfSteps,
        }
    }
}

/// Which alternative of which request of which claim is being served.
#[derive(Debug, Clone, Copy)]
struct At<'s> {
    claim: usize,
    request: usize,
    alternative: usize,
    /// Names of the request and the subrequest.
    name: (&'s str, Option<&'s str>),
}

struct Run<'r, 'a, 's> {
    search: &'r Search<'a, 's>,
    state: &'r mut State<'a, 's>,
    steps: &'r mut u64,
}

impl<'a, 's> Run<'_, 'a, 's> {
    /// Serves request `r` of claim `c` and everything after it: with its first alternative that leads to an end.
    fn request(&mut self, c: usize, r: usize) -> Result<bool, Stop> {
        let search = self.search;
        let Some(task) = search.tasks.get(c) else { return Ok(true) };
        let Some(alternatives) = task.requests.get(r) else { return self.request(c + 1, 0) };
        for (a, alternative) in alternatives.iter().enumerate() {
            let at = At { claim: c, request: r, alternative: a, name: alternative.name };
            let done = match alternative.mode {
                Mode::All => self.all(at, 0)?,
                _ => {
                    let order = self.order(alternative.policy);
                    self.exact(at, 0, &order, 0)?
                }
            };
            if done {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn task(&self, at: At<'s>) -> &'a AlternativeTask<'s> {
        &self.search.tasks[at.claim].requests[at.request][at.alternative]
    }

    /// Positions of candidates in the order in which the policy tries them.
    fn order(&self, policy: Policy) -> Rc<[usize]> {
        let search = self.search;
        let mut ranked: Vec<_> = search
            .candidates
            .iter()
            .enumerate()
            .map(|(i, candidate)| {
                let used = search.usage.of(&candidate.id);
                let taken = policy::taken(candidate.device, used, self.state.planned(i));
                let memory = candidate.device.capacity.get("memory").map(|m| m.value).unwrap_or_default();
                policy.rank_device(taken, memory, i)
            })
            .collect();
        ranked.sort_unstable();
        ranked.into_iter().map(|(_, _, i)| i).collect()
    }

    /// Chooses device number `n` of the request among `order[from..]`.
    fn exact(&mut self, at: At<'s>, n: u64, order: &Rc<[usize]>, from: usize) -> Result<bool, Stop> {
        let request = self.task(at);
        if n >= request.count {
            return self.request(at.claim, at.request + 1);
        }
        if request.count - n > (MAX_RESULTS - self.state.results(at.claim)) as u64 {
            return Ok(false);
        }
        let mut failed: Vec<usize> = Vec::new();
        for position in from..order.len() {
            let i = order[position];
            if failed.iter().any(|&f| self.state.interchangeable(f, i)) {
                continue;
            }
            if !self.take(at, i)? {
                continue;
            }
            let done = self.exact(at, n + 1, order, position + 1);
            if matches!(done, Ok(true)) {
                return done;
            }
            self.state.give_back(at, i);
            done?;
            failed.push(i);
        }
        Ok(false)
    }

    /// Takes all devices of the request, from number `n` on.
    fn all(&mut self, at: At<'s>, n: usize) -> Result<bool, Stop> {
        let request = self.task(at);
        if request.all.is_empty() {
            return Ok(false);
        }
        let Some(&i) = request.all.get(n) else { return self.request(at.claim, at.request + 1) };
        if request.all.len() - n > MAX_RESULTS - self.state.results(at.claim) {
            return Ok(false);
        }
        if !self.take_all(at, i)? {
            return Ok(false);
        }
        let done = self.all(at, n + 1);
        if !matches!(done, Ok(true)) {
            self.state.give_back(at, i);
        }
        done
    }

    /// Takes candidate `i` if it passes every test, in upstream's order of tests.
    fn take(&mut self, at: At<'s>, i: usize) -> Result<bool, Stop> {
        let request = self.task(at);
        let candidate = &self.search.candidates[i];
        self.step()?;
        if self.state.in_use(i) {
            return Ok(false);
        }
        let selected = request.selects(candidate, i);
        if !selected.map_err(|e| Stop::Failed(at.claim, Failure::Selector(e)))? || !candidate.reachable {
            return Ok(false);
        }
        let Some(demand) = self.demand(at.claim, request, candidate)? else { return Ok(false) };
        if !self.state.has_room(i, &demand) || !request.usable(candidate.device) {
            return Ok(false);
        }
        Ok(self.state.take(at, i, demand).is_ok())
    }

    /// The same for a device of an `All` request, which has been selected before; a constraint against it is fatal.
    fn take_all(&mut self, at: At<'s>, i: usize) -> Result<bool, Stop> {
        let request = self.task(at);
        let candidate = &self.search.candidates[i];
        self.step()?;
        if self.state.in_use(i) || !request.usable(candidate.device) {
            return Ok(false);
        }
        let Some(demand) = self.demand(at.claim, request, candidate)? else { return Ok(false) };
        let room = self.state.has_room(i, &demand);
        // Upstream looks at constraints before it looks at the room that is left.
        if let Err(attribute) = self.state.take(at, i, demand) {
            return Err(Stop::Failed(at.claim, Failure::AllAgainstConstraint(attribute.to_owned())));
        }
        if !room {
            self.state.give_back(at, i);
        }
        Ok(room)
    }

    fn demand(
        &self,
        c: usize,
        request: &AlternativeTask<'s>,
        candidate: &Candidate<'s>,
    ) -> Result<Option<BTreeMap<String, Quantity>>, Stop> {
        let demand = capacity::demand(&request.amounts(candidate.device), candidate.device);
        match demand.map_err(|e| Stop::Failed(c, Failure::Capacity(e)))? {
            Demand::Takes(amounts) => Ok(Some(amounts)),
            Demand::UnknownCapacity(_) | Demand::AgainstPolicy(_) => Ok(None),
        }
    }

    fn step(&mut self) -> Result<(), Stop> {
        *self.steps = self.steps.checked_sub(1).ok_or(Stop::OutOfSteps)?;
        Ok(())
    }
}

/// The constraints of each claim, empty.
fn constraint_sets<'s>(tasks: &[ClaimTask<'s>]) -> Vec<ConstraintSet<'s>> {
    tasks.iter().map(|task| ConstraintSet::new(task.claim)).collect()
}
