//! Explanations of claims that fit nowhere: each device with the first check that excludes it, in
//! the order of the search.

use tessera_api::names::NodeName;
use tessera_api::quantity::Quantity;
use tessera_api::reason::{Explanation, NearestMiss, NodeReason, Reason};

use crate::capacity::Demand;
use crate::cluster::{Interner, PoolState, ReachableDevices};
use crate::model::AllocationMode;
use crate::outcome::RefusalCause;
use crate::search::{SearchFailure, sets};
use crate::selector::SelectorError;
use crate::shape::{AlternativeShape, ProfileDemand, Selections, Shape};

/// Collects, node by node, the reasons why the claims of a shape do not fit.
pub(crate) struct Explainer {
    /// Per claim, per request, per alternative.
    counts: Vec<Vec<Vec<Count>>>,
}

/// The devices counted for one alternative of a request.
#[derive(Clone)]
struct Count {
    explanation: Explanation,
    wanted: u64,
    /// True if some node has enough devices for the request by itself.
    served: bool,
}

/// The node to explain.
pub(crate) struct OnNode<'a> {
    pub(crate) name: &'a NodeName,
    pub(crate) shape: &'a Shape,
    pub(crate) reach: &'a ReachableDevices,
    pub(crate) interner: &'a mut Interner,
    pub(crate) selections: &'a mut Selections,
    /// The reason why the pod cannot run there, regardless of devices.
    pub(crate) fault: Option<NodeReason>,
    /// The claim at which the search failed, and the failure.
    pub(crate) failed: Option<(usize, &'a SearchFailure)>,
    /// Remaining budget for the evaluation of selectors. Results of the search are cached.
    pub(crate) steps: &'a mut u64,
}

impl Explainer {
    pub(crate) fn new(shape: &Shape) -> Self {
        let count = |place: usize| Count {
            explanation: Explanation::new(),
            wanted: shape.alternatives[place].count().unwrap_or(0),
            served: false,
        };
        let of_claim = |claim: &crate::shape::ClaimShape| {
            (0..claim.len())
                .map(|request| claim.alternatives(request).map(count).collect())
                .collect()
        };
        Self { counts: shape.claims.iter().map(of_claim).collect() }
    }

    /// Counts the devices of a node.
    pub(crate) fn node(&mut self, on: &mut OnNode<'_>) {
        if let Some(fault) = on.fault.take() {
            let devices: u64 = on.reach.pools.iter().map(crate::cluster::NodePool::devices).sum();
            for count in self.counts.iter_mut().flatten().flatten().filter(|_| devices > 0) {
                count.explanation.count(Reason::Node(fault.clone()), on.name, devices);
            }
            return;
        }
        for (c, claim) in self.counts.iter_mut().enumerate() {
            for (request, alternatives) in claim.iter_mut().enumerate() {
                let places = on.shape.claims[c].alternatives(request);
                alternatives
                    .iter_mut()
                    .zip(places)
                    .for_each(|(count, place)| count.node(on, c, place));
            }
        }
    }

    /// Returns the cause to report for each claim.
    pub(crate) fn causes(self) -> Vec<RefusalCause> {
        self.counts.into_iter().map(|claim| RefusalCause::NoFit(decisive(claim))).collect()
    }
}

/// Returns the explanation of the first request that no node can serve by itself, or of the first
/// request if there is none.
///
/// Of a request with alternatives it is the explanation of the last one, the fallback.
fn decisive(mut counts: Vec<Vec<Count>>) -> Explanation {
    let decisive =
        counts.iter().position(|alternatives| !alternatives.iter().any(|a| a.served)).unwrap_or(0);
    let alternatives = (decisive < counts.len()).then(|| counts.swap_remove(decisive));
    alternatives.and_then(|mut a| a.pop()).map_or_else(Explanation::new, |count| count.explanation)
}

impl Count {
    fn node(&mut self, on: &mut OnNode<'_>, claim: usize, place: usize) {
        let name = on.name;
        for pool in &on.reach.pools {
            let reason = match pool.state {
                PoolState::Complete => continue,
                PoolState::Incomplete => Reason::PoolIncomplete,
                PoolState::Invalid => Reason::PoolInvalid,
            };
            self.explanation.count(reason, name, pool.devices().max(1));
        }
        let fatal =
            on.failed.filter(|(at, _)| *at == claim).and_then(|(_, failure)| of_failure(failure));
        let alternative = &on.shape.alternatives[place];
        let mut rejections: Vec<Rejection> = (0..on.reach.candidates.len())
            .map(|i| match &fatal {
                Some(reason) => (reason.clone(), None),
                None => on.device(alternative, i),
            })
            .collect();
        on.check_topology(alternative, self.wanted, &mut rejections);
        let usable =
            rejections.iter().filter(|(reason, _)| *reason == Reason::NoCombination).count();
        let usable = usable as u64;
        self.served |= usable >= self.wanted.max(1);
        self.near_miss(name, usable, &rejections);
        let combined = on.combined(usable, self.wanted);
        for (reason, missing) in rejections {
            match missing {
                Some(missing) => self.explanation.count_short(reason, name, missing),
                None if reason == Reason::NoCombination => {
                    self.explanation.count(combined.clone(), name, 1);
                }
                None => self.explanation.count(reason, name, 1),
            }
        }
    }

    /// Records the reason that excludes the next device which the request needs on the node.
    fn near_miss(&mut self, node: &NodeName, usable: u64, rejections: &[Rejection]) {
        let next = scattered(rejections).or_else(|| self.next_device(usable, rejections));
        if let Some((lacking, reason, missing)) = next {
            let (node, wanted, reason) = (node.clone(), self.wanted, std::cmp::Reverse(reason));
            self.explanation.near_miss(NearestMiss { lacking, reason, missing, node, wanted });
        }
    }

    /// Returns the number of lacking devices, and the rejection of the last of those that are
    /// nearest to a fit. None if fewer devices could become usable.
    fn next_device(
        &self,
        usable: u64,
        rejections: &[Rejection],
    ) -> Option<(u64, Reason, Option<Quantity>)> {
        let lacking = self.wanted.checked_sub(usable).filter(|lacking| *lacking > 0)?;
        let may_pass = rejections.iter().filter(|(reason, _)| reason.is_transient());
        let mut near: Vec<_> =
            may_pass.map(|(reason, missing)| (std::cmp::Reverse(reason), missing)).collect();
        near.sort_unstable();
        let (reason, missing) = near.get(usize::try_from(lacking - 1).ok()?)?;
        Some((lacking, reason.0.clone(), **missing))
    }
}

/// Returns the near miss of a node whose usable devices share too little topology.
fn scattered(rejections: &[Rejection]) -> Option<(u64, Reason, Option<Quantity>)> {
    let is_scattered = |reason: &Reason| matches!(reason, Reason::TopologyTooSmall { .. });
    let (reason, missing) = rejections.iter().find(|(reason, _)| is_scattered(reason))?;
    Some((u64::try_from(missing.as_ref()?.value()).ok()?, reason.clone(), None))
}

/// The first check that excludes a device, and the amount that it is short of.
type Rejection = (Reason, Option<Quantity>);

impl OnNode<'_> {
    /// Returns the reason of devices that are usable one by one, on a node with `usable` of them.
    ///
    /// A pod with one request has no other requests to conflict with: its devices are too few, or
    /// they contradict a constraint of the claim.
    fn combined(&self, usable: u64, wanted: u64) -> Reason {
        if usable < wanted {
            return Reason::TooFewOnNode { requested: wanted };
        }
        let [claim] = self.shape.claims.as_slice() else { return Reason::NoCombination };
        let attribute = claim.constraints.iter().find_map(|constraint| constraint.attribute());
        match attribute {
            Some(attribute) if claim.len() == 1 => {
                Reason::Constraint { attribute: attribute.to_owned() }
            }
            _ => Reason::NoCombination,
        }
    }

    /// Rejects usable devices if too few of them share the topology that the request requires.
    fn check_topology(
        &self,
        alternative: &AlternativeShape,
        wanted: u64,
        rejections: &mut [Rejection],
    ) {
        let Ok(resolved) = &alternative.resolved else { return };
        if !alternative.requires_topology() {
            return;
        }
        let usable =
            |(i, (reason, _)): (usize, &Rejection)| (*reason == Reason::NoCombination).then_some(i);
        let usable: Vec<usize> = rejections.iter().enumerate().filter_map(usable).collect();
        let most = sets::largest_joint_set(self.reach, &usable, resolved.topology) as u64;
        if most >= wanted || wanted > usable.len() as u64 {
            return;
        }
        let scopes = resolved.topology.required().collect();
        let missing = Quantity::from_integer(i64::try_from(wanted - most).unwrap_or(i64::MAX));
        let scattered = (Reason::TopologyTooSmall { scopes }, Some(missing));
        usable.into_iter().for_each(|i| rejections[i] = scattered.clone());
    }

    /// Returns the first check that excludes the device.
    fn device(&mut self, alternative: &AlternativeShape, i: usize) -> Rejection {
        let device = self.reach.candidates[i].device();
        if let Some(reason) = self.unselected(alternative, i) {
            return (reason, None);
        }
        if device.is_unmanaged {
            return (Reason::NotManaged, None);
        }
        if !alternative.accepts_oversubscription_of(device) {
            return (Reason::Oversubscribed, None);
        }
        if !alternative.can_share(device) {
            return (Reason::NoMps, None);
        }
        if self.reach.exclusive[i] > 0 && alternative.request.admin != Some(true) {
            return (Reason::AllocatedExclusively, None);
        }
        if let Some(used) =
            alternative.required_sharing().and_then(|own| self.reach.conflicting_sharing(i, own))
        {
            return (Reason::SharingDiffers { used }, None);
        }
        if let Some(feature) = device.unsupported {
            return (Reason::Unsupported { feature: feature.to_owned() }, None);
        }
        if let Some(reason) = self.short(alternative, i) {
            return reason;
        }
        if !self.has_counters(i) {
            return (Reason::InsufficientCounters, None);
        }
        if let Some(taint) = device.untolerated_taint(&alternative.request.tolerations) {
            return (Reason::Tainted { key: taint.key.clone() }, None);
        }
        (
            if alternative.request.mode == AllocationMode::All {
                Reason::NotAllAvailable
            } else {
                Reason::NoCombination
            },
            None,
        )
    }

    /// Returns the reason if the selectors of the class or of the request exclude the device.
    fn unselected(&mut self, alternative: &AlternativeShape, i: usize) -> Option<Reason> {
        let resolved = alternative.resolved.as_ref().ok()?;
        let candidate = &self.reach.candidates[i];
        let failed =
            |error: SelectorError| Some(Reason::SelectorError { message: error.to_string() });
        match self.selections.selects(resolved.selection, candidate, self.interner, self.steps) {
            Ok(true) if candidate.is_reachable => None,
            Ok(true) => Some(Reason::RequestSelector),
            Err(error) => failed(error),
            Ok(false) => {
                let of_class = self.selections.of(resolved.class.selectors.iter());
                match self.selections.selects(of_class, candidate, self.interner, self.steps) {
                    Ok(true) => Some(Reason::RequestSelector),
                    _ => Some(Reason::ClassSelector { class: resolved.class.name.to_string() }),
                }
            }
        }
    }

    /// Returns the first capacity that is insufficient, and the amount that is missing.
    fn short(&self, alternative: &AlternativeShape, i: usize) -> Option<Rejection> {
        let candidate = &self.reach.candidates[i];
        let device = candidate.device();
        let features = crate::features::FeatureGates::default();
        let amounts = match alternative.demand(device, &features) {
            Err(error) => {
                return Some((Reason::RequestRefused { message: error.to_string() }, None));
            }
            Ok(Demand::UnknownCapacity(capacity)) => {
                return Some((Reason::NoSuchCapacity { capacity }, None));
            }
            Ok(Demand::AgainstPolicy(capacity)) => {
                return Some((Reason::AgainstPolicy { capacity }, None));
            }
            Ok(Demand::Takes(amounts)) => amounts,
        };
        for ((name, amount), whole) in amounts.iter().zip(device.capacity.values()) {
            if *amount > whole.value {
                let missing = amount.saturating_sub(whole.value);
                return Some((Reason::InsufficientTotal { capacity: name.clone() }, Some(missing)));
            }
        }
        let ProfileDemand::Takes(demand, _) = &alternative.profile_match(candidate.profile)?.demand
        else {
            return None;
        };
        let short =
            demand.iter().zip(self.reach.left(i)).position(|(wanted, left)| wanted > left)?;
        let (name, amount) = amounts.iter().nth(short)?;
        let left = device.capacity.get(name)?.value.nano() - self.reach.left(i)[short];
        let used = Quantity::from_nano(left).in_format(amount.format());
        let whole = device.capacity.get(name)?.value;
        let missing = amount.checked_add(used).map_or(*amount, |total| total.saturating_sub(whole));
        Some((Reason::Insufficient { capacity: name.clone() }, Some(missing)))
    }

    fn has_counters(&self, i: usize) -> bool {
        let Some(consumes) = self.reach.consumes.get(i) else { return true };
        let is_shared = self.reach.candidates[i].device().shared && self.reach.shares[i] > 0;
        is_shared
            || consumes
                .iter()
                .all(|used| self.reach.counters_left[used.counter as usize] >= used.amount)
    }
}

/// Returns the reason that a failed search gives for every device of its node. None if the checks
/// of the single devices report the failure.
fn of_failure(failure: &SearchFailure) -> Option<Reason> {
    let message = match failure {
        SearchFailure::Selector(_)
        | SearchFailure::Capacity(_)
        | SearchFailure::AllWithIncompletePool(_)
        | SearchFailure::AllWithInvalidPool(_)
        | SearchFailure::Request(_) => return None,
        SearchFailure::AllViolatesConstraint(attribute) => {
            return Some(Reason::Constraint { attribute: attribute.clone() });
        }
        SearchFailure::TooManyDevices(count) => {
            format!("the claim needs {count} devices, the limit is 32")
        }
        SearchFailure::UnknownConstraint => {
            "this version does not support this kind of constraint".to_owned()
        }
        SearchFailure::NodeSelector(problem) => {
            format!("invalid node selector in a ResourceSlice: {problem}")
        }
    };
    Some(Reason::RequestRefused { message })
}
