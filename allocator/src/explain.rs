//! Why a pod has to wait: for each claim, every device of the cluster and the test it fell to.

use std::collections::BTreeMap;

use tessera_api::names::NodeName;
use tessera_api::quantity::Quantity;
use tessera_api::reason::{Explanation, Reason};

use crate::capacity::{self, Demand};
use crate::model::{Mode, Node, Usage};
use crate::outcome::{Cause, Refusal};
use crate::plan::{Planner, Reach, ToPlace};
use crate::pools::{Candidate, PoolState};
use crate::predicate;
use crate::request::PodTask;
use crate::search::{AlternativeTask, ClaimTask, Failure};

/// Explains why no node was found for the pending claims of a pod. `failures` are the nodes on which the search had to be
/// stopped, with the claim at which it was.
pub(crate) fn refusals<'s>(
    planner: &mut Planner<'s>,
    place: &ToPlace<'s>,
    task: &PodTask<'s>,
    failures: &BTreeMap<NodeName, (usize, Failure)>,
) -> Vec<Refusal> {
    let nodes: Vec<Node> = planner.nodes().cloned().collect();
    let mut counts: Vec<Vec<Vec<RequestCount>>> =
        task.claims().iter().map(|c| RequestCount::of_claim(c)).collect();
    for node in &nodes {
        let reach = planner.reach(&node.name);
        if let Some(fault) = predicate::fault(place.pod, &place.bounds, node) {
            let devices: u64 = reach.pools.iter().map(|p| p.devices.len() as u64).sum();
            for count in counts.iter_mut().flatten().flatten().filter(|_| devices > 0) {
                count.explanation.count(Reason::Node(fault.clone()), &node.name, devices);
            }
            continue;
        }
        for (c, claim) in task.claims().iter().enumerate() {
            let failed = failures.get(&node.name).filter(|(at, _)| *at == c).map(|(_, failure)| failure);
            let alternatives = claim.requests.iter().flatten();
            for (alternative, count) in alternatives.zip(counts[c].iter_mut().flatten()) {
                count.node(alternative, &reach, planner.usage(), &node.name, failed);
            }
        }
    }
    place.refused(|c| Cause::NoFit(decisive(&counts[c])))
}

/// The count of the request that cannot be served even by itself; if all can, that of the first. Of a request with
/// alternatives it is the count of the last: the one that was to be the way out.
fn decisive(counts: &[Vec<RequestCount>]) -> Explanation {
    let decisive = counts.iter().find(|alternatives| !alternatives.iter().any(|a| a.served));
    let decisive = decisive.or_else(|| counts.first()).and_then(|alternatives| alternatives.last());
    decisive.map(|c| c.explanation.clone()).unwrap_or_default()
}

/// The devices counted for one alternative of a request.
struct RequestCount {
    explanation: Explanation,
    wanted: u64,
    /// Some node has enough devices for the request by itself.
    served: bool,
}

impl RequestCount {
    fn of_claim(claim: &ClaimTask<'_>) -> Vec<Vec<Self>> {
        let count = |r: &AlternativeTask<'_>| Self {
            explanation: Explanation::new(),
            wanted: r.count,
            served: false,
        };
        claim.requests.iter().map(|alternatives| alternatives.iter().map(count).collect()).collect()
    }

    fn node(
        &mut self,
        request: &AlternativeTask<'_>,
        reach: &Reach<'_>,
        usage: &Usage,
        node: &NodeName,
        failed: Option<&Failure>,
    ) {
        for pool in &reach.pools {
            let reason = match pool.state {
                PoolState::Complete => continue,
                PoolState::Incomplete => Reason::PoolIncomplete,
                PoolState::Invalid => Reason::PoolInvalid,
                PoolState::Counters => unsupported(crate::model::SHARED_COUNTERS),
            };
            self.explanation.count(reason, node, pool.devices.len().max(1) as u64);
        }
        let fatal = failed.and_then(of_failure);
        let mut usable = 0;
        for (i, candidate) in reach.candidates.iter().enumerate() {
            let (reason, missing) = match &fatal {
                Some(reason) => (reason.clone(), None),
                None => device(request, candidate, i, usage),
            };
            usable += u64::from(reason == Reason::Together);
            match missing {
                Some(missing) => self.explanation.count_short(reason, node, missing),
                None => self.explanation.count(reason, node, 1),
            }
        }
        self.served |= usable >= self.wanted.max(1);
    }
}

/// The first test that the device falls to, in the order of the search, and how much it is short of.
fn device(
    request: &AlternativeTask<'_>,
    candidate: &Candidate<'_>,
    i: usize,
    usage: &Usage,
) -> (Reason, Option<Quantity>) {
    let device = candidate.device;
    let used = usage.of(&candidate.id);
    let reason = match request.selects(candidate, i) {
        Err(error) => Some(Reason::SelectorError { message: error.to_string() }),
        Ok(false) => Some(request.unselected(candidate)),
        Ok(true) if !candidate.reachable => Some(Reason::RequestSelector),
        Ok(true) if device.foreign => Some(Reason::NotManaged),
        Ok(true) if used.is_some_and(|u| u.exclusive > 0) => Some(Reason::InUse),
        Ok(true) => device.unsupported.map(unsupported),
    };
    if let Some(reason) = reason {
        return (reason, None);
    }
    let demand = match capacity::demand(&request.amounts(device), device) {
        Err(error) => return (Reason::RequestRefused { message: error.to_string() }, None),
        Ok(Demand::UnknownCapacity(capacity)) => return (Reason::NoSuchCapacity { capacity }, None),
        Ok(Demand::AgainstPolicy(capacity)) => return (Reason::AgainstPolicy { capacity }, None),
        Ok(Demand::Takes(amounts)) => amounts,
    };
    if let Some((name, missing)) = capacity::exceeded(&demand, device, None, None) {
        return (Reason::TooSmall { capacity: name.to_owned() }, Some(missing));
    }
    if let Some((name, missing)) = capacity::exceeded(&demand, device, used.map(|u| &u.consumed), None) {
        return (Reason::Short { capacity: name.to_owned() }, Some(missing));
    }
    if let Some(taint) = device.untolerated_taint(request.tolerations()) {
        return (Reason::Tainted { key: taint.key.clone() }, None);
    }
    (if request.mode == Mode::All { Reason::NotAll } else { Reason::Together }, None)
}

fn unsupported(feature: &'static str) -> Reason {
    Reason::Unsupported { feature: feature.to_owned() }
}

/// What a stopped search says about every device of its node; nothing where it is told per device.
fn of_failure(failure: &Failure) -> Option<Reason> {
    let message = match failure {
        Failure::Selector(_) | Failure::Capacity(_) | Failure::AllButPoolNotReady(_) => return None,
        Failure::AllAgainstConstraint(attribute) => {
            return Some(Reason::Constraint { attribute: attribute.clone() });
        }
        Failure::TooManyDevices(count) => format!("it comes to {count} devices, a claim can have 32"),
        Failure::UnknownConstraint => "a constraint of this kind is not supported in this version".to_owned(),
        Failure::NodeSelector(problem) => format!("a ResourceSlice is broken: {problem}"),
    };
    Some(Reason::RequestRefused { message })
}
