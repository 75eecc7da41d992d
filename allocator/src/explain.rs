//! Explanations of claims that fit nowhere: each device with the first check that excludes it, in
//! the order of the search.

mod by_node;
mod lazy;

use std::cmp::Reverse;
use std::sync::Arc;

use tessera_api::names::NodeName;
use tessera_api::quantity::Quantity;
use tessera_api::reason::{NearestMiss, NodeReason, NodeTally, Reason};

use crate::capacity::Demand;
use crate::cluster::{FastMap, Interner, NameId, NodeIndex, PoolState, ReachableDevices, StateKey};
use crate::model::AllocationMode;
use crate::search::{SearchFailure, sets};
use crate::shape::{AlternativeShape, ProfileDemand, Selections, Selects, Shape};
use crate::wide_hash::WideHash;

pub(crate) use by_node::ReasonsByNode;
pub use lazy::{ExplanationId, RefusalExplanation};

/// Reasons of the devices of one node, for each alternative of a shape.
#[derive(Debug, PartialEq, Eq, Hash)]
pub(crate) struct NodeReasons(Box<[AlternativeReasons]>);

/// Reasons of the devices of one node for one alternative.
#[derive(Debug, Default, PartialEq, Eq, Hash)]
struct AlternativeReasons {
    tallies: Vec<(Reason, NodeTally)>,
    nearest: Option<Box<NearMiss>>,
    /// True if the node has enough devices for the request by itself.
    served: bool,
}

/// The reason that excludes the next device which the request needs on the node.
#[derive(Debug, PartialEq, Eq, Hash)]
struct NearMiss {
    /// Number of devices that the node lacks.
    lacking: u64,
    reason: Reason,
    missing: Option<Quantity>,
    /// Number of devices that the request asks for.
    wanted: u64,
}

impl NearMiss {
    /// Returns the order of two nodes' reasons, from near to far.
    fn distance(&self) -> (u64, Reverse<&Reason>, Option<Quantity>) {
        (self.lacking, Reverse(&self.reason), self.missing)
    }

    /// Returns the miss as that of a node.
    fn on(&self, node: NodeName) -> NearestMiss {
        NearestMiss {
            lacking: self.lacking,
            reason: Reverse(self.reason.clone()),
            missing: self.missing,
            node,
            wanted: self.wanted,
        }
    }
}

/// Reasons that nodes and devices in equal states share, for one shape while nothing changes.
#[derive(Default)]
pub(crate) struct RejectionCache {
    /// Attributes that decide about reasons; `None` if they are not known, or names decide too.
    pub(crate) attributes: Option<Arc<[NameId]>>,
    /// A node that was explained, by state.
    pub(crate) nodes: FastMap<WideHash, NodeIndex>,
    /// Rejections by alternative and state of the device.
    devices: FastMap<(usize, WideHash), Rejection>,
    /// Rejections of devices that the selectors match, by alternative and numbers of which the
    /// rejection is made.
    selected: FastMap<Box<[i128]>, Rejection>,
    /// Buffer for one key of `selected`.
    key: Vec<i128>,
}

/// The node to explain.
pub(crate) struct OnNode<'a> {
    pub(crate) shape: &'a Shape,
    pub(crate) reach: &'a ReachableDevices,
    /// State of the node and its devices; `None` if results are not shared.
    pub(crate) state: Option<StateKey<'a>>,
    pub(crate) interner: &'a mut Interner,
    pub(crate) selections: &'a mut Selections,
    /// The reason why the pod cannot run there, regardless of devices.
    pub(crate) fault: Option<NodeReason>,
    /// The claim at which the search failed, and the failure.
    pub(crate) failed: Option<(usize, &'a SearchFailure)>,
    /// Remaining budget for the evaluation of selectors. Results of the search are cached.
    pub(crate) steps: &'a mut u64,
    pub(crate) cache: &'a mut RejectionCache,
}

impl NodeReasons {
    /// Counts the devices of a node by the reasons that exclude them.
    pub(crate) fn of(mut on: OnNode<'_>) -> Self {
        if let Some(fault) = on.fault.take() {
            let devices: u64 = on.reach.pools.iter().map(crate::cluster::NodePool::devices).sum();
            let of_alternative = |_: &AlternativeShape| {
                let mut reasons = AlternativeReasons::default();
                if devices > 0 {
                    reasons.count(&Reason::Node(fault.clone()), devices, None);
                }
                reasons
            };
            return Self(on.shape.alternatives.iter().map(of_alternative).collect());
        }
        let shape = on.shape;
        let claims = shape.claims.iter().enumerate();
        let places = claims.flat_map(|(c, claim)| {
            (0..claim.len())
                .flat_map(move |request| claim.alternatives(request).map(move |p| (c, p)))
        });
        Self(places.map(|(claim, place)| AlternativeReasons::of(&mut on, claim, place)).collect())
    }
}

impl AlternativeReasons {
    fn of(on: &mut OnNode<'_>, claim: usize, place: usize) -> Self {
        let mut reasons = Self::default();
        for pool in &on.reach.pools {
            let reason = match pool.state {
                PoolState::Complete => continue,
                PoolState::Incomplete => Reason::PoolIncomplete,
                PoolState::Invalid => Reason::PoolInvalid,
            };
            reasons.count(&reason, pool.devices().max(1), None);
        }
        let fatal =
            on.failed.filter(|(at, _)| *at == claim).and_then(|(_, failure)| of_failure(failure));
        let alternative = &on.shape.alternatives[place];
        let wanted = alternative.count().unwrap_or(0);
        let mut rejections: Vec<Rejection> = (0..on.reach.candidates.len())
            .map(|i| match &fatal {
                Some(reason) => (reason.clone(), None),
                None => on.device(alternative, place, i),
            })
            .collect();
        on.check_topology(alternative, wanted, &mut rejections);
        let usable =
            rejections.iter().filter(|(reason, _)| *reason == Reason::NoCombination).count();
        let usable = usable as u64;
        reasons.served = usable >= wanted.max(1);
        reasons.nearest = near_miss(usable, wanted, &rejections);
        let combined = on.combined(usable, wanted);
        for (reason, missing) in &rejections {
            let is_combined = missing.is_none() && *reason == Reason::NoCombination;
            reasons.count(if is_combined { &combined } else { reason }, 1, *missing);
        }
        reasons
    }

    fn count(&mut self, reason: &Reason, devices: u64, least_missing: Option<Quantity>) {
        let added = NodeTally { devices, least_missing };
        match self.tallies.iter_mut().find(|(known, _)| known == reason) {
            Some((_, tally)) => tally.add(added),
            None => self.tallies.push((reason.clone(), added)),
        }
    }
}

/// Returns the reason that excludes the next device which the request needs on the node.
fn near_miss(usable: u64, wanted: u64, rejections: &[Rejection]) -> Option<Box<NearMiss>> {
    let next = scattered(rejections).or_else(|| next_device(usable, wanted, rejections));
    let (lacking, reason, missing) = next?;
    Some(Box::new(NearMiss { lacking, reason, missing, wanted }))
}

/// Returns the number `n` of missing devices, and the rejection of the `n`-th nearest device
/// to a fit. Returns `None` if fewer devices can become usable.
fn next_device(
    usable: u64,
    wanted: u64,
    rejections: &[Rejection],
) -> Option<(u64, Reason, Option<Quantity>)> {
    let lacking = wanted.checked_sub(usable).filter(|lacking| *lacking > 0)?;
    let may_pass = rejections.iter().filter(|(reason, _)| reason.is_transient());
    let mut near: Vec<_> =
        may_pass.map(|(reason, missing)| (std::cmp::Reverse(reason), missing)).collect();
    near.sort_unstable();
    let (reason, missing) = near.get(usize::try_from(lacking - 1).ok()?)?;
    Some((lacking, reason.0.clone(), **missing))
}

/// Returns the near miss of a node on which too few usable devices share the required topology.
fn scattered(rejections: &[Rejection]) -> Option<(u64, Reason, Option<Quantity>)> {
    let is_scattered = |reason: &Reason| matches!(reason, Reason::TopologyTooSmall { .. });
    let (reason, missing) = rejections.iter().find(|(reason, _)| is_scattered(reason))?;
    Some((u64::try_from(missing.as_ref()?.value()).ok()?, reason.clone(), None))
}

/// The first check that excludes a device, and the amount that it is short of.
pub(crate) type Rejection = (Reason, Option<Quantity>);

impl OnNode<'_> {
    /// Returns the reason of devices that are usable individually, on a node with `usable` of them.
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
    fn device(&mut self, alternative: &AlternativeShape, place: usize, i: usize) -> Rejection {
        // Devices that share counters depend on each other.
        let state = self.state.as_ref().filter(|_| self.reach.consumes.is_empty());
        let Some(state) = state.map(|state| (place, state.candidate(i))) else {
            return self.rejection(alternative, place, i);
        };
        if let Some(known) = self.cache.devices.get(&state) {
            return known.clone();
        }
        let rejection = self.rejection(alternative, place, i);
        if *self.steps > 0 {
            self.cache.devices.insert(state, rejection.clone());
        }
        rejection
    }

    fn rejection(&mut self, alternative: &AlternativeShape, place: usize, i: usize) -> Rejection {
        if let Some(reason) = self.unselected(alternative, i) {
            return (reason, None);
        }
        let mut key = std::mem::take(&mut self.cache.key);
        self.set_key(&mut key, alternative, place, i);
        let known = self.cache.selected.get(key.as_slice()).cloned();
        let rejection = known.unwrap_or_else(|| {
            let rejection = self.unusable(alternative, i);
            self.cache.selected.insert(key.as_slice().into(), rejection.clone());
            rejection
        });
        self.cache.key = key;
        rejection
    }

    /// Sets the numbers of which the rejection of a device is made, apart from selectors.
    fn set_key(&self, key: &mut Vec<i128>, alternative: &AlternativeShape, place: usize, i: usize) {
        let reach = self.reach;
        let own = alternative.required_sharing();
        let conflict = own.and_then(|own| reach.conflicting_sharing(i, own));
        key.clear();
        key.extend([
            place as i128,
            reach.candidates[i].profile.index() as i128,
            i128::from(reach.exclusive[i] > 0),
            conflict.map_or(-1, |used| used as i128),
            i128::from(self.has_counters(i)),
        ]);
        key.extend_from_slice(reach.left(i));
    }

    /// Returns the first check that excludes a device that the selectors match.
    fn unusable(&self, alternative: &AlternativeShape, i: usize) -> Rejection {
        let device = self.reach.candidates[i].device();
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
        match self.selections.selects(resolved.selection, candidate, self.interner, self.steps) {
            Selects::Yes if candidate.is_reachable => None,
            Selects::Failed(error) => Some(Reason::SelectorError { message: error.to_string() }),
            // Without steps the caller drops the reason.
            Selects::Yes | Selects::OutOfSteps => Some(Reason::RequestSelector),
            Selects::No => {
                let of_class = resolved.class_selection;
                match self.selections.selects(of_class, candidate, self.interner, self.steps) {
                    Selects::Yes => Some(Reason::RequestSelector),
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
        let used = device.capacity.get(name)?.value.nano() - self.reach.left(i)[short];
        let used = Quantity::from_nano(used).in_format(amount.format());
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
