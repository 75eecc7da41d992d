//! Claims made ready for the search: classes looked up, configurations merged, "all" counted.

use std::cell::RefCell;
use std::collections::BTreeMap;

use tessera_api::config::Percent;
use tessera_api::names::capacity::MEMORY;
use tessera_api::quantity::Quantity;
use tessera_api::reason::Reason;

use super::{Failure, MAX_RESULTS};
use crate::capacity::{self, Demand};
use crate::model::{Alternative, Claim, ConstraintKind, Device, DeviceClass, Mode, Selector, Toleration};
use crate::policy::Policy;
use crate::pools::{Candidate, NodePool, PoolState};
use crate::selector::{DeviceView, SelectorError};

/// A claim of the pod, ready for one node.
#[derive(Debug)]
pub(crate) struct ClaimTask<'s> {
    pub(crate) claim: &'s Claim,
    /// Per request its alternatives.
    pub(crate) requests: Vec<Vec<AlternativeTask<'s>>>,
}

/// One way to serve a request, ready for one node.
#[derive(Debug)]
pub(crate) struct AlternativeTask<'s> {
    /// Name of the request, and of the subrequest in it.
    pub(crate) name: (&'s str, Option<&'s str>),
    pub(crate) mode: Mode,
    /// How many devices; for `All` so many as there are.
    pub(crate) count: u64,
    class: &'s DeviceClass,
    /// Those of the class, then those of the request.
    selectors: Vec<&'s Selector>,
    tolerations: &'s [Toleration],
    capacity: &'s BTreeMap<String, Quantity>,
    memory_percent: Option<Percent>,
    pub(crate) policy: Policy,
    /// Positions of the candidates that `All` means.
    pub(crate) all: Vec<usize>,
    /// What the selectors said about each candidate, once asked.
    memo: RefCell<Vec<Option<Result<bool, SelectorError>>>>,
}

/// What the configuration of a request means for its placement.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Placement {
    pub(crate) node: Policy,
    pub(crate) device: Policy,
    /// Share of each chosen GPU's memory, in place of `capacity.requests.memory`.
    pub(crate) memory_percent: Option<Percent>,
}

impl<'s> AlternativeTask<'s> {
    pub(crate) fn new(request: &'s Alternative, class: &'s DeviceClass, placement: Placement) -> Self {
        Self {
            name: (request.name.parent(), request.name.subrequest()),
            mode: request.mode,
            count: if let Mode::Exact(count) = request.mode { count } else { 0 },
            class,
            selectors: class.selectors.iter().chain(&request.selectors).collect(),
            tolerations: &request.tolerations,
            capacity: &request.capacity,
            memory_percent: placement.memory_percent,
            policy: placement.device,
            all: Vec::new(),
            memo: RefCell::default(),
        }
    }

    /// Whether class and request select the candidate at position `i`.
    pub(crate) fn selects(&self, candidate: &Candidate<'_>, i: usize) -> Result<bool, SelectorError> {
        if let Some(Some(known)) = self.memo.borrow().get(i) {
            return known.clone();
        }
        let answer = self.evaluate(candidate);
        let mut memo = self.memo.borrow_mut();
        if memo.len() <= i {
            memo.resize(i + 1, None);
        }
        memo[i] = Some(answer.clone());
        answer
    }

    fn evaluate(&self, candidate: &Candidate<'_>) -> Result<bool, SelectorError> {
        all_match(self.selectors.iter().copied(), candidate)
    }

    /// Who does not select the candidate: the class or the request.
    pub(crate) fn unselected(&self, candidate: &Candidate<'_>) -> Reason {
        match all_match(self.class.selectors.iter(), candidate) {
            Ok(true) => Reason::RequestSelector,
            _ => Reason::ClassSelector { class: self.class.name.to_string() },
        }
    }

    /// Whether we may hand out the device at all and the request tolerates its taints.
    pub(crate) fn usable(&self, device: &Device) -> bool {
        !device.foreign
            && device.unsupported.is_none()
            && device.untolerated_taint(self.tolerations).is_none()
    }

    pub(crate) fn tolerations(&self) -> &'s [Toleration] {
        self.tolerations
    }

    /// What is asked of the device's capacities, a percentage of memory resolved on this very device.
    pub(crate) fn amounts(&self, device: &Device) -> BTreeMap<String, Quantity> {
        let mut amounts = self.capacity.clone();
        if let (Some(percent), Some(memory)) = (self.memory_percent, device.capacity.get(MEMORY)) {
            amounts.insert(MEMORY.to_owned(), share_of_memory(memory.value, percent));
        }
        amounts
    }

    /// Finds out what "all" means on this node.
    fn count_all(&mut self, pools: &[NodePool<'s>], candidates: &[Candidate<'s>]) -> Result<(), Failure> {
        if let Some(pool) = pools.iter().find(|p| p.state != PoolState::Complete) {
            return Err(Failure::AllButPoolNotReady(pool.id.pool.to_string()));
        }
        for (i, candidate) in candidates.iter().enumerate() {
            if !self.selects(candidate, i).map_err(Failure::Selector)? || !candidate.reachable {
                continue;
            }
            // Only what the device has in all counts here: one that is merely full stays in the set and makes "all" fail.
            let demand = capacity::demand(&self.amounts(candidate.device), candidate.device);
            if let Demand::Takes(amounts) = demand.map_err(Failure::Capacity)?
                && capacity::exceeded(&amounts, candidate.device, None, None).is_none()
            {
                self.all.push(i);
            }
        }
        self.count = self.all.len() as u64;
        Ok(())
    }
}

fn all_match<'a>(
    selectors: impl Iterator<Item = &'a Selector>,
    candidate: &Candidate<'_>,
) -> Result<bool, SelectorError> {
    let device = candidate.device;
    for selector in selectors {
        let compiled = selector.compiled.as_ref().map_err(Clone::clone)?;
        let view = device.view.get_or_init(|| DeviceView::new(&candidate.id.pool.driver, device));
        if !compiled.matches(view)? {
            return Ok(false);
        }
    }
    Ok(true)
}

/// The percentage of `memory`, in whole MiB as published memory is too.
fn share_of_memory(memory: Quantity, percent: Percent) -> Quantity {
    Quantity::from_mib(percent.of_mib(memory.floor_mib().unwrap_or(0)))
}

impl<'s> ClaimTask<'s> {
    /// Counts devices and checks what upstream checks before it searches; the first offender decides.
    pub(crate) fn prepare(
        &mut self,
        pools: &[NodePool<'s>],
        candidates: &[Candidate<'s>],
    ) -> Result<(), Failure> {
        let mut least = 0u64;
        for alternatives in &mut self.requests {
            for alternative in alternatives.iter_mut().filter(|a| a.mode == Mode::All) {
                alternative.count_all(pools, candidates)?;
            }
            let fewest = alternatives.iter().map(|a| a.count).min();
            least = least.saturating_add(fewest.unwrap_or(0));
            if least > MAX_RESULTS as u64 {
                return Err(Failure::TooManyDevices(least));
            }
        }
        let unknown = self.claim.constraints.iter().any(|c| c.kind == ConstraintKind::Unknown);
        if unknown { Err(Failure::UnknownConstraint) } else { Ok(()) }
    }
}
