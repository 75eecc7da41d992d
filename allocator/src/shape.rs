//! What the pending claims of a pod ask for, apart from who asks: classes looked up, configurations
//! merged, requests that read the same recognised as one. Pods of one workload have one shape, and
//! what has been found out about a node for a shape holds until the node changes.

mod selection;

use std::sync::Arc;

use tessera_api::ConfigError;
use tessera_api::config::{ConfigEntry, GpuConfig, Percent, Sharing, merged_config};
use tessera_api::names::RequestName;
use tessera_api::names::capacity::MEMORY;
use tessera_api::quantity::Quantity;

use crate::capacity::{self, CapacityError, Demand};
use crate::cluster::{Candidate, Cluster, Interner, OfferId};
use crate::features::Features;
use crate::model::{Alternative, Claim, Constraint, ConstraintKind, Device, DeviceClass, Mode};
use crate::outcome::{Cause, NotSupported};
use crate::policy::Policy;
use crate::search::Chosen;
use crate::topology::Wishes;

pub(crate) use selection::{Selection, Selections};

/// The pending claims of a pod, ready to be placed on any node.
#[derive(Debug)]
pub(crate) struct Shape {
    pub(crate) claims: Vec<ClaimShape>,
    /// All alternatives of all requests of all claims, one after the other.
    pub(crate) alternatives: Vec<AlternativeShape>,
    /// CPU that the pod takes of its node, in thousandths of a core, roughly. 0 where no policy
    /// looks at it.
    pub(crate) cpu_milli: u64,
}

/// One claim of a shape.
#[derive(Debug)]
pub(crate) struct ClaimShape {
    /// One of the claims that look like this.
    pub(crate) claim: Arc<Claim>,
    /// Per request where its alternatives begin in [`Shape::alternatives`]; one more at the end.
    pub(crate) requests: Vec<usize>,
    pub(crate) constraints: Vec<ConstraintShape>,
}

/// A constraint of a claim.
#[derive(Debug)]
pub(crate) struct ConstraintShape {
    pub(crate) constraint: Constraint,
    /// Whether it binds an alternative, by place in [`Shape::alternatives`] from the claim's first
    /// on.
    pub(crate) binds: Vec<bool>,
}

/// One way to serve a request.
#[derive(Debug)]
pub(crate) struct AlternativeShape {
    pub(crate) request: Alternative,
    /// What keeps it from being served at all.
    pub(crate) resolved: Result<Resolved, Cause>,
    /// Per offer what is asked of it.
    answers: Vec<Option<OfferAnswer>>,
}

/// What an alternative refers to.
#[derive(Debug, Clone)]
pub(crate) struct Resolved {
    pub(crate) class: Arc<DeviceClass>,
    /// The selectors of class and request.
    pub(crate) selection: Selection,
    pub(crate) node: Policy,
    pub(crate) device: Policy,
    /// How its devices are to belong together.
    pub(crate) wishes: Wishes,
    memory_percent: Option<Percent>,
    /// Its memory may spill to the host.
    pub(crate) oversubscribe: bool,
    pub(crate) sharing: Sharing,
}

/// What an alternative comes to on devices of one offer.
#[derive(Debug)]
pub(crate) struct OfferAnswer {
    pub(crate) demand: OfferDemand,
    /// We may hand the devices out to it, and the request tolerates their taints.
    pub(crate) usable: bool,
}

/// How much is asked of a device.
#[derive(Debug)]
pub(crate) enum OfferDemand {
    /// So much of each of its capacities, in nanounits, in the order of their names; whether it has
    /// so much at all.
    Takes(Box<[i128]>, bool),
    /// It cannot be asked.
    Never,
    /// It cannot be computed: an end to the search.
    Error(CapacityError),
}

impl Shape {
    /// Resolves the claims of a pod.
    pub(crate) fn new(
        claims: &[Arc<Claim>],
        cluster: &Cluster,
        selections: &mut Selections,
        policy: Policy,
    ) -> Self {
        let mut shape = Self { claims: Vec::new(), alternatives: Vec::new(), cpu_milli: 0 };
        for claim in claims {
            let first = shape.alternatives.len();
            let mut requests = vec![first];
            for request in &claim.requests {
                for alternative in &request.alternatives {
                    let resolved = resolve(alternative, claim, cluster, selections, policy);
                    let request = alternative.clone();
                    shape.alternatives.push(AlternativeShape {
                        request,
                        resolved,
                        answers: Vec::new(),
                    });
                }
                requests.push(shape.alternatives.len());
            }
            let own = &shape.alternatives[first..];
            let constraints =
                claim.constraints.iter().map(|c| ConstraintShape::new(c, own)).collect();
            shape.claims.push(ClaimShape { claim: Arc::clone(claim), requests, constraints });
        }
        shape
    }

    /// Whether a policy goes by what is expected of the requests to come.
    pub(crate) fn looks_ahead(&self) -> bool {
        let mut resolved = self.alternatives.iter().filter_map(|a| a.resolved.as_ref().ok());
        resolved.any(|resolved| resolved.node.looks_ahead() || resolved.device.looks_ahead())
    }

    /// Whether it matters how devices are joined.
    pub(crate) fn asks_for_places(&self) -> bool {
        self.alternatives.iter().any(|alternative| {
            let resolved = alternative.resolved.as_ref().ok();
            resolved.is_some_and(|r| r.device.looks_ahead() || r.wishes != Wishes::default())
        })
    }

    /// Each device that was chosen, with what it was chosen for.
    pub(crate) fn chosen<'s>(
        &'s self,
        chosen: &'s [Vec<Chosen>],
    ) -> impl Iterator<Item = (&'s AlternativeShape, usize)> {
        self.claims.iter().zip(chosen).flat_map(|(claim, devices)| {
            devices.iter().map(|chosen| {
                let place = claim.alternatives(chosen.request).start + chosen.alternative;
                (&self.alternatives[place], chosen.candidate)
            })
        })
    }

    /// What keeps the claims from being served on any node: the first of it, with its claim.
    pub(crate) fn defect(&self) -> Option<(usize, &Cause)> {
        self.claims.iter().enumerate().find_map(|(c, claim)| {
            let own = claim.requests[0]..*claim.requests.last().unwrap_or(&0);
            let cause = self.alternatives[own].iter().find_map(|a| a.resolved.as_ref().err())?;
            Some((c, cause))
        })
    }

    /// How many devices all requests want, by the first alternative of each.
    pub(crate) fn wanted(&self) -> u64 {
        let requests = self.claims.iter().flat_map(|claim| &claim.requests[..claim.len()]);
        let first = requests.filter_map(|&place| self.alternatives.get(place));
        first.map(|a| a.count().unwrap_or(u64::MAX)).fold(0, u64::saturating_add)
    }

    /// Whether a request may be served by a device of an offer that has been met, if nothing were
    /// taken of it.
    pub(crate) fn may_take(
        &self,
        candidate: &Candidate,
        selections: &mut Selections,
        interner: &mut Interner,
        steps: &mut u64,
    ) -> bool {
        self.alternatives.iter().any(|alternative| {
            let Ok(resolved) = &alternative.resolved else { return false };
            alternative.on(candidate.offer).is_some_and(OfferAnswer::would_do)
                && selections.selects(resolved.selection, candidate, interner, steps) == Ok(true)
        })
    }

    /// The policy for choosing the node: that of the first request.
    pub(crate) fn node_policy(&self) -> Policy {
        let first = self.alternatives.first().and_then(|a| a.resolved.as_ref().ok());
        first.map(|resolved| resolved.node).unwrap_or_default()
    }

    /// Works out what is asked of the offers that are not known yet.
    pub(crate) fn meet_offers(
        &mut self,
        offers: impl Iterator<Item = OfferId>,
        interner: &Interner,
        features: &Features,
    ) {
        for offer in offers {
            let device = &interner.offer(offer).device;
            for alternative in &mut self.alternatives {
                if alternative.answers.len() <= offer.index() {
                    alternative.answers.resize_with(offer.index() + 1, || None);
                }
                if alternative.answers[offer.index()].is_none() {
                    alternative.answers[offer.index()] = Some(alternative.answer(device, features));
                }
            }
        }
    }
}

impl OfferAnswer {
    /// Whether it would be enough, if nothing were taken of it.
    fn would_do(&self) -> bool {
        self.usable && matches!(self.demand, OfferDemand::Takes(_, true))
    }
}

impl ClaimShape {
    /// How many requests.
    pub(crate) fn len(&self) -> usize {
        self.requests.len() - 1
    }

    /// The alternatives of a request, by place.
    pub(crate) fn alternatives(&self, request: usize) -> std::ops::Range<usize> {
        self.requests[request]..self.requests[request + 1]
    }
}

impl ConstraintShape {
    fn new(constraint: &Constraint, alternatives: &[AlternativeShape]) -> Self {
        let binds = |a: &AlternativeShape| {
            constraint.requests.is_empty() || a.request.name.is_named_by_any(&constraint.requests)
        };
        Self { constraint: constraint.clone(), binds: alternatives.iter().map(binds).collect() }
    }

    /// The attribute it is about; none for a constraint of the future.
    pub(crate) fn attribute(&self) -> Option<&str> {
        match &self.constraint.kind {
            ConstraintKind::Match(name) | ConstraintKind::Distinct(name) => Some(name),
            ConstraintKind::Unknown => None,
        }
    }
}

impl AlternativeShape {
    /// What it comes to on devices of an offer that has been met.
    pub(crate) fn on(&self, offer: OfferId) -> Option<&OfferAnswer> {
        self.answers.get(offer.index())?.as_ref()
    }

    /// Whether it requires something of how its devices are joined, and has more than one.
    pub(crate) fn must_be_joined(&self) -> bool {
        let resolved = self.resolved.as_ref().ok();
        self.count() != Some(1) && resolved.is_some_and(|r| r.wishes.required().next().is_some())
    }

    /// How many devices; none for "all".
    pub(crate) fn count(&self) -> Option<u64> {
        match self.request.mode {
            Mode::Exact(count) => Some(count),
            Mode::All | Mode::Unknown => None,
        }
    }

    /// Whether the claim says what is to be said of memory that is not all there.
    pub(crate) fn has_leave_for(&self, device: &Device) -> bool {
        !device.oversubscribed
            || self.resolved.as_ref().is_ok_and(|resolved| resolved.oversubscribe)
    }

    /// How its devices are shared with others.
    pub(crate) fn sharing(&self) -> Sharing {
        self.resolved.as_ref().map_or(Sharing::Intercept, |resolved| resolved.sharing)
    }

    /// How its devices have to be in use, if they are; none for those who administer them, who do
    /// not mind and do not count.
    pub(crate) fn agrees_on(&self) -> Option<Sharing> {
        (self.request.admin != Some(true)).then(|| self.sharing())
    }

    /// Whether the device can be shared as the claim says.
    pub(crate) fn can_share(&self, device: &Device) -> bool {
        device.mps || self.sharing() != Sharing::Mps
    }

    /// What is asked of the device's capacities, a percentage of memory resolved on this very
    /// device.
    fn amounts(
        &self,
        device: &Device,
    ) -> std::borrow::Cow<'_, std::collections::BTreeMap<String, Quantity>> {
        let percent = self.resolved.as_ref().ok().and_then(|r| r.memory_percent);
        let Some((percent, memory)) = percent.zip(device.capacity.get(MEMORY)) else {
            return std::borrow::Cow::Borrowed(&self.request.capacity);
        };
        let mut amounts = self.request.capacity.clone();
        // In whole MiB, as published memory is too.
        let share = percent.of_mib(memory.value.floor_mib().unwrap_or(0));
        amounts.insert(MEMORY.to_owned(), Quantity::from_mib(share));
        std::borrow::Cow::Owned(amounts)
    }

    /// What it comes to on a device, by name.
    pub(crate) fn demand(
        &self,
        device: &Device,
        features: &Features,
    ) -> Result<Demand, CapacityError> {
        capacity::demand(&self.amounts(device), device, features)
    }

    fn answer(&self, device: &Device, features: &Features) -> OfferAnswer {
        let demand = match self.demand(device, features) {
            _ if !features.consumable_capacity => OfferDemand::Takes(Box::default(), true),
            Ok(Demand::Takes(amounts)) => {
                let fits =
                    device.capacity.iter().zip(amounts.values()).all(|((_, c), a)| *a <= c.value);
                OfferDemand::Takes(amounts.values().map(Quantity::nano).collect(), fits)
            }
            Ok(Demand::UnknownCapacity(_) | Demand::AgainstPolicy(_)) => OfferDemand::Never,
            Err(error) => OfferDemand::Error(error),
        };
        let tolerated =
            !features.taints || device.untolerated_taint(&self.request.tolerations).is_none();
        let gated = device.binding.is_some() && !features.binding_conditions;
        let fitting = self.has_leave_for(device) && self.can_share(device);
        let usable = device.is_ours() && fitting && tolerated && !gated;
        OfferAnswer { demand, usable }
    }
}

/// Finds what an alternative refers to, or what is wrong with it: the first thing that upstream
/// would find.
fn resolve(
    alternative: &Alternative,
    claim: &Claim,
    cluster: &Cluster,
    selections: &mut Selections,
    policy: Policy,
) -> Result<Resolved, Cause> {
    let features = cluster.features();
    let request = || alternative.name.clone();
    let refuse = |what: NotSupported| Err(Cause::NotSupported { request: request(), what });
    if alternative.name.subrequest().is_some() && !features.prioritized_list {
        return refuse(NotSupported::Gate("DRAPrioritizedList"));
    }
    if !alternative.capacity.is_empty() && !features.consumable_capacity {
        return refuse(NotSupported::Gate("DRAConsumableCapacity"));
    }
    if let Some(feature) = alternative.unsupported {
        return refuse(NotSupported::Field(feature));
    }
    if alternative.selectors.iter().any(crate::model::Selector::is_unknown) {
        return refuse(NotSupported::Selector);
    }
    if alternative.admin.is_some() && !features.admin_access {
        return refuse(NotSupported::Gate("DRAAdminAccess"));
    }
    let Some(class) = &alternative.class else { return refuse(NotSupported::NoClass) };
    let Some(class) = cluster.classes.get(class) else {
        return Err(Cause::UnknownClass { request: request(), class: class.clone() });
    };
    if alternative.mode == Mode::Unknown {
        return refuse(NotSupported::Mode);
    }
    let config = config(class, claim, &alternative.name)?;
    if let Some(percent) =
        config.memory.percent.filter(|_| alternative.capacity.contains_key(MEMORY))
    {
        let error = ConfigError::Excluded {
            path: "memory.percent".to_owned(),
            value: percent.get().to_string(),
            by: "capacity.requests.memory of the request",
            instead: "one of the two",
        };
        return Err(Cause::Config { request: request(), error });
    }
    let sharing = config.sharing.unwrap_or(Sharing::Intercept);
    // A process of CUDA talks to one MPS control daemon, and each GPU that is shared so has its
    // own.
    if sharing == Sharing::Mps && (claim.requests.len() > 1 || alternative.mode != Mode::Exact(1)) {
        return refuse(NotSupported::MpsOfSeveral);
    }
    let choice = |chosen: Option<_>| chosen.map_or(policy, Policy::from);
    Ok(Resolved {
        class: Arc::clone(class),
        selection: selections.of(class.selectors.iter().chain(&alternative.selectors)),
        node: choice(config.placement.node),
        device: choice(config.placement.device),
        wishes: Wishes::new(config.topology.as_deref().unwrap_or_default()),
        memory_percent: config.memory.percent,
        oversubscribe: config.memory.oversubscribe == Some(true),
        sharing,
    })
}

/// What the configurations of class and claim say about the request.
fn config(class: &DeviceClass, claim: &Claim, request: &RequestName) -> Result<GpuConfig, Cause> {
    if class.configs.is_empty() && claim.configs.is_empty() {
        return Ok(GpuConfig::default());
    }
    let of_class =
        class.configs.iter().enumerate().map(|(i, config)| ConfigEntry::of_class(i, config));
    let of_claim =
        claim.configs.iter().enumerate().map(|(i, config)| ConfigEntry::of_claim(i, config));
    merged_config(of_class.chain(of_claim), request)
        .map_err(|error| Cause::Config { request: request.clone(), error })
}
