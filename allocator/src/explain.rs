//! Why claims do not fit: each device and the first test that it fell to, in the order of the
//! search.

use tessera_api::names::NodeName;
use tessera_api::quantity::Quantity;
use tessera_api::reason::{Explanation, NearestMiss, NodeReason, Reason};

use crate::capacity::Demand;
use crate::cluster::{Interner, PoolState, ReachableDevices};
use crate::model::Mode;
use crate::outcome::Cause;
use crate::search::{Failure, sets};
use crate::selector::SelectorError;
use crate::shape::{AlternativeShape, ProfileDemand, Selections, Shape};

/// Adds up, node by node, why the claims of a shape do not fit.
pub(crate) struct Explainer {
    /// Per claim, per request, per alternative.
    counts: Vec<Vec<Vec<Count>>>,
}

/// The devices counted for one alternative of a request.
#[derive(Clone)]
struct Count {
    explanation: Explanation,
    wanted: u64,
    /// Some node has enough devices for the request by itself.
    served: bool,
}

/// A node that is explained.
pub(crate) struct OnNode<'a> {
    pub(crate) name: &'a NodeName,
    pub(crate) shape: &'a Shape,
    pub(crate) reach: &'a ReachableDevices,
    pub(crate) interner: &'a mut Interner,
    pub(crate) selections: &'a mut Selections,
    /// Why the pod cannot go there, whatever its devices.
    pub(crate) fault: Option<NodeReason>,
    /// Why the search had to be stopped, and at which claim.
    pub(crate) failed: Option<(usize, &'a Failure)>,
    /// Evaluating selectors takes of them; what the search has found out is known.
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

    /// Per claim the cause that its pod is told.
    pub(crate) fn causes(self) -> Vec<Cause> {
        self.counts.into_iter().map(|claim| Cause::NoFit(decisive(claim))).collect()
    }
}

/// The count of the request that cannot be served even by itself; if all can, that of the first. Of
/// a request with alternatives it is the count of the last: the one that was to be the way out.
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
        let mut fates: Vec<Fate> = (0..on.reach.candidates.len())
            .map(|i| match &fatal {
                Some(reason) => (reason.clone(), None),
                None => on.device(alternative, i),
            })
            .collect();
        on.require(alternative, self.wanted, &mut fates);
        let usable = fates.iter().filter(|(reason, _)| *reason == Reason::Together).count() as u64;
        self.served |= usable >= self.wanted.max(1);
        self.near_miss(name, usable, &fates);
        for (reason, missing) in fates {
            match missing {
                Some(missing) => self.explanation.count_short(reason, name, missing),
                None => self.explanation.count(reason, name, 1),
            }
        }
    }
}

impl Count {
    /// What would have to change on the node for the request to be served there: the devices that
    /// come nearest to it.
    fn near_miss(&mut self, node: &NodeName, usable: u64, fates: &[Fate]) {
        let next = self.too_few_joined(fates).or_else(|| self.next_device(usable, fates));
        if let Some((lacking, reason, missing)) = next {
            let (node, wanted, reason) = (node.clone(), self.wanted, std::cmp::Reverse(reason));
            self.explanation.near_miss(NearestMiss { lacking, reason, missing, node, wanted });
        }
    }

    fn too_few_joined(&self, fates: &[Fate]) -> Option<(u64, Reason, Option<Quantity>)> {
        let (reason, missing) =
            fates.iter().find(|(reason, _)| matches!(reason, Reason::Scattered { .. }))?;
        Some((u64::try_from(missing.as_ref()?.value()).ok()?, reason.clone(), None))
    }

    /// How many more devices would have to do, and what the last of those falls to that come
    /// nearest.
    fn next_device(&self, usable: u64, fates: &[Fate]) -> Option<(u64, Reason, Option<Quantity>)> {
        let lacking = self.wanted.checked_sub(usable).filter(|lacking| *lacking > 0)?;
        let may_pass = fates.iter().filter(|(reason, _)| reason.may_pass());
        let mut near: Vec<_> =
            may_pass.map(|(reason, missing)| (std::cmp::Reverse(reason), missing)).collect();
        near.sort_unstable();
        let (reason, missing) = near.get(usize::try_from(lacking - 1).ok()?)?;
        Some((lacking, reason.0.clone(), **missing))
    }
}

/// The test that a device falls to, and how much it is short of.
type Fate = (Reason, Option<Quantity>);

impl OnNode<'_> {
    /// Of devices that would do, tells those that are too few to share what the request requires of
    /// its devices.
    fn require(&self, alternative: &AlternativeShape, wanted: u64, fates: &mut [Fate]) {
        let Ok(resolved) = &alternative.resolved else { return };
        if !alternative.requires_topology() {
            return;
        }
        let would_do =
            |(i, (reason, _)): (usize, &Fate)| (*reason == Reason::Together).then_some(i);
        let usable: Vec<usize> = fates.iter().enumerate().filter_map(would_do).collect();
        let most = sets::largest_joint_set(self.reach, &usable, resolved.topology) as u64;
        if most >= wanted || wanted > usable.len() as u64 {
            return;
        }
        let scopes = resolved.topology.required().collect();
        let missing = Quantity::from_integer(i64::try_from(wanted - most).unwrap_or(i64::MAX));
        let scattered = (Reason::Scattered { scopes }, Some(missing));
        usable.into_iter().for_each(|i| fates[i] = scattered.clone());
    }

    /// The first test that the device falls to, and how much it is short of.
    fn device(&mut self, alternative: &AlternativeShape, i: usize) -> Fate {
        let device = self.reach.candidates[i].device();
        if let Some(reason) = self.unselected(alternative, i) {
            return (reason, None);
        }
        if device.foreign {
            return (Reason::NotManaged, None);
        }
        if !alternative.accepts_oversubscription_of(device) {
            return (Reason::Oversubscribed, None);
        }
        if !alternative.can_share(device) {
            return (Reason::NoMps, None);
        }
        if self.reach.exclusive[i] > 0 && alternative.request.admin != Some(true) {
            return (Reason::InUse, None);
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
            return (Reason::CountersSpent, None);
        }
        if let Some(taint) = device.untolerated_taint(&alternative.request.tolerations) {
            return (Reason::Tainted { key: taint.key.clone() }, None);
        }
        (
            if alternative.request.mode == Mode::All { Reason::NotAll } else { Reason::Together },
            None,
        )
    }

    /// Who does not select the device: its class, the request, or one of them with an error.
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

    /// Which capacity is in the way, and how much of it is missing.
    fn short(&self, alternative: &AlternativeShape, i: usize) -> Option<Fate> {
        let candidate = &self.reach.candidates[i];
        let device = candidate.device();
        let features = crate::features::Features::default();
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
                return Some((Reason::TooSmall { capacity: name.clone() }, Some(missing)));
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
        Some((Reason::Short { capacity: name.clone() }, Some(missing)))
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

/// What a stopped search says about every device of its node; nothing where it is told per device.
fn of_failure(failure: &Failure) -> Option<Reason> {
    let message = match failure {
        Failure::Selector(_)
        | Failure::Capacity(_)
        | Failure::AllButPoolIncomplete(_)
        | Failure::AllButPoolInvalid(_)
        | Failure::Request(_) => return None,
        Failure::AllAgainstConstraint(attribute) => {
            return Some(Reason::Constraint { attribute: attribute.clone() });
        }
        Failure::TooManyDevices(count) => {
            format!("it comes to {count} devices, a claim can have 32")
        }
        Failure::UnknownConstraint => {
            "a constraint of this kind is not supported in this version".to_owned()
        }
        Failure::NodeSelector(problem) => format!("a ResourceSlice is broken: {problem}"),
    };
    Some(Reason::RequestRefused { message })
}
