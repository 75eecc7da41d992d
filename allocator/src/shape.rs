//! Shape: the resolved requests of a pod's pending claims, without names and UIDs.
//!
//! DeviceClasses are looked up, configurations merged and equal requests shared. Pods of one
//! workload have one shape, and a search result for a shape and node is valid until the node
//! changes.

mod selection;

use std::collections::BTreeSet;
use std::sync::Arc;

use tessera_api::config::{
    ConfigEntry, GpuConfig, MemoryPercent, RequestedCapacity, Sharing, merged_config,
};
use tessera_api::names::capacity::{CORES, MEMORY};
use tessera_api::names::{DRIVER_NAME, RequestName};
use tessera_api::quantity::Quantity;

use crate::capacity::{self, CapacityError, Demand};
use crate::cluster::{Candidate, Cluster, Interner, NameId, ProfileId};
use crate::features::FeatureGates;
use crate::model::{
    AllocationMode, Alternative, Claim, Constraint, ConstraintKind, Device, DeviceClass,
    DeviceSelector, NameMap,
};
use crate::outcome::{RefusalCause, UnsupportedFeature};
use crate::policy::Policy;
use crate::topology::TopologyPreferences;

pub(crate) use selection::{Selection, Selections, Selects};

/// Resolved pending claims of a pod.
#[derive(Debug)]
pub(crate) struct Shape {
    pub(crate) claims: Vec<ClaimShape>,
    /// Alternatives of all requests of all claims, concatenated.
    pub(crate) alternatives: Vec<AlternativeShape>,
    /// CPU request of the pod in millicores, rounded. 0 if no policy uses it.
    pub(crate) cpu_milli: u64,
}

/// A claim of a shape.
#[derive(Debug)]
pub(crate) struct ClaimShape {
    /// A claim with these requests, as an example.
    pub(crate) claim: Arc<Claim>,
    /// Index in [`Shape::alternatives`] at which each request starts, and the end.
    pub(crate) requests: Vec<usize>,
    pub(crate) constraints: Vec<ConstraintShape>,
}

/// Constraint of a claim.
#[derive(Debug)]
pub(crate) struct ConstraintShape {
    pub(crate) constraint: Constraint,
    /// True for each alternative of the claim that it applies to.
    pub(crate) applies_to: Vec<bool>,
}

/// An alternative of a request.
#[derive(Debug)]
pub(crate) struct AlternativeShape {
    pub(crate) request: Alternative,
    /// References of the alternative, or the reason why it can never be allocated.
    pub(crate) resolved: Result<Resolved, RefusalCause>,
    /// Result per device profile.
    profile_matches: Vec<Option<ProfileMatch>>,
}

/// Objects and configuration that an alternative refers to.
#[derive(Debug, Clone)]
pub(crate) struct Resolved {
    pub(crate) class: Arc<DeviceClass>,
    /// Selectors of class and request.
    pub(crate) selection: Selection,
    /// Selectors of the class alone.
    pub(crate) class_selection: Selection,
    pub(crate) node: Policy,
    pub(crate) device: Policy,
    /// Required and preferred topology of the devices.
    pub(crate) topology: TopologyPreferences,
    memory_percent: Option<MemoryPercent>,
    /// All of each device is reserved.
    exclusive: bool,
    /// The memory may be oversubscribed.
    pub(crate) oversubscribe: bool,
    pub(crate) sharing: Sharing,
    /// The class selects no devices of other drivers.
    is_tessera_only: bool,
}

/// Match between an alternative and the devices of one profile.
#[derive(Debug)]
pub(crate) struct ProfileMatch {
    pub(crate) demand: ProfileDemand,
    /// The devices are managed, and the request tolerates their taints.
    pub(crate) usable: bool,
}

/// Capacity that an alternative consumes on a device.
#[derive(Debug)]
pub(crate) enum ProfileDemand {
    /// Amount per capacity, in nano-units in the order of names; true if an unused device suffices.
    Takes(Box<[i128]>, bool),
    /// The request is invalid for this device.
    Never,
    /// The amount cannot be computed; the search stops.
    Error(CapacityError),
}

/// A device chosen for a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Chosen {
    /// Index of the request in the claim.
    pub(crate) request: usize,
    /// Index of the alternative in the request.
    pub(crate) alternative: usize,
    /// Index of the device in the candidates.
    pub(crate) candidate: usize,
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
            for request in claim.requests.iter() {
                for alternative in &request.alternatives {
                    let resolved = resolve(alternative, claim, cluster, selections, policy);
                    let request = alternative.clone();
                    shape.alternatives.push(AlternativeShape {
                        request,
                        resolved,
                        profile_matches: Vec::new(),
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

    /// Returns true if a policy uses the forecast.
    pub(crate) fn uses_forecast(&self) -> bool {
        self.has_policy(Policy::uses_forecast)
    }

    /// Returns true if a policy uses the measured load of devices.
    pub(crate) fn uses_load(&self) -> bool {
        self.has_policy(Policy::uses_load)
    }

    /// Returns true if a policy of nodes or devices has the property.
    fn has_policy(&self, property: fn(Policy) -> bool) -> bool {
        let mut resolved = self.alternatives.iter().filter_map(|a| a.resolved.as_ref().ok());
        resolved.any(|resolved| property(resolved.node) || property(resolved.device))
    }

    /// Returns true if the links between devices matter.
    pub(crate) fn uses_topology(&self) -> bool {
        self.alternatives.iter().any(|alternative| {
            let resolved = alternative.resolved.as_ref().ok();
            resolved.is_some_and(|r| {
                r.device.uses_forecast() || r.topology != TopologyPreferences::default()
            })
        })
    }

    /// Returns the attributes that decide about the results of a node, in order; `None` if they are
    /// not known, or if names of devices decide too.
    pub(crate) fn decisive_attributes(
        &self,
        selections: &Selections,
        interner: &mut Interner,
    ) -> Option<Arc<[NameId]>> {
        let mut names = BTreeSet::new();
        for alternative in &self.alternatives {
            let resolved = alternative.resolved.as_ref().ok()?;
            if resolved.node.is_randomized() || resolved.device.is_randomized() {
                return None;
            }
            names.extend(selections.attributes(resolved.selection)?);
        }
        let constraints = self.claims.iter().flat_map(|claim| &claim.constraints);
        names.extend(constraints.filter_map(|c| c.attribute()).map(|name| interner.name(name)));
        Some(names.into_iter().collect())
    }

    /// Returns each chosen device with the alternative that it serves.
    pub(crate) fn chosen<'s>(
        &'s self,
        chosen: &'s [Vec<Chosen>],
    ) -> impl Iterator<Item = (&'s AlternativeShape, usize)> {
        self.claims.iter().zip(chosen).flat_map(|(claim, devices)| {
            devices.iter().map(|chosen| {
                let index = claim.alternatives(chosen.request).start + chosen.alternative;
                (&self.alternatives[index], chosen.candidate)
            })
        })
    }

    /// Returns the first claim that can never be allocated, and the cause.
    pub(crate) fn defect(&self) -> Option<(usize, &RefusalCause)> {
        self.claims.iter().enumerate().find_map(|(c, claim)| {
            let own = claim.requests[0]..*claim.requests.last().unwrap_or(&0);
            let cause = self.alternatives[own].iter().find_map(|a| a.resolved.as_ref().err())?;
            Some((c, cause))
        })
    }

    /// Returns the number of devices of all requests, by the first alternative of each.
    pub(crate) fn device_count(&self) -> u64 {
        let requests = self.claims.iter().flat_map(|claim| &claim.requests[..claim.len()]);
        let first = requests.filter_map(|&index| self.alternatives.get(index));
        first.map(|a| a.count().unwrap_or(u64::MAX)).fold(0, u64::saturating_add)
    }

    /// Returns true if an alternative can use the candidate when it is free. The profile must be
    /// resolved. The result is not to be used if no steps are left.
    pub(crate) fn may_serve(
        &self,
        candidate: &Candidate,
        selections: &mut Selections,
        interner: &mut Interner,
        steps: &mut u64,
    ) -> bool {
        self.alternatives.iter().any(|alternative| {
            let Ok(resolved) = &alternative.resolved else { return false };
            alternative.profile_match(candidate.profile).is_some_and(ProfileMatch::is_sufficient)
                && selections.selects(resolved.selection, candidate, interner, steps)
                    == Selects::Yes
        })
    }

    /// Returns the policy for choosing the node: that of the first request.
    pub(crate) fn node_policy(&self) -> Policy {
        let first = self.alternatives.first().and_then(|a| a.resolved.as_ref().ok());
        first.map(|resolved| resolved.node).unwrap_or_default()
    }

    /// Computes the matches of new device profiles.
    pub(crate) fn resolve_profiles(
        &mut self,
        profiles: impl Iterator<Item = ProfileId>,
        interner: &Interner,
        features: &FeatureGates,
    ) {
        for profile in profiles {
            let device = &interner.profile(profile).device;
            for alternative in &mut self.alternatives {
                if alternative.profile_matches.len() <= profile.index() {
                    alternative.profile_matches.resize_with(profile.index() + 1, || None);
                }
                if alternative.profile_matches[profile.index()].is_none() {
                    alternative.profile_matches[profile.index()] =
                        Some(alternative.match_profile(device, features));
                }
            }
        }
    }
}

impl ProfileMatch {
    /// Returns true if an unused device suffices.
    fn is_sufficient(&self) -> bool {
        self.usable && matches!(self.demand, ProfileDemand::Takes(_, true))
    }
}

impl ClaimShape {
    /// Returns the number of requests.
    pub(crate) fn len(&self) -> usize {
        self.requests.len() - 1
    }

    /// Returns the indices of the alternatives of a request.
    pub(crate) fn alternatives(&self, request: usize) -> std::ops::Range<usize> {
        self.requests[request]..self.requests[request + 1]
    }
}

impl ConstraintShape {
    fn new(constraint: &Constraint, alternatives: &[AlternativeShape]) -> Self {
        let applies_to = |a: &AlternativeShape| {
            constraint.requests.is_empty() || a.request.name.is_named_by_any(&constraint.requests)
        };
        Self {
            constraint: constraint.clone(),
            applies_to: alternatives.iter().map(applies_to).collect(),
        }
    }

    /// Returns the attribute of the constraint; `None` for an unknown constraint.
    pub(crate) fn attribute(&self) -> Option<&str> {
        match &self.constraint.kind {
            ConstraintKind::Match(name) | ConstraintKind::Distinct(name) => Some(name),
            ConstraintKind::Unknown => None,
        }
    }
}

impl AlternativeShape {
    /// Returns the match with a device profile, if it is resolved.
    pub(crate) fn profile_match(&self, profile: ProfileId) -> Option<&ProfileMatch> {
        self.profile_matches.get(profile.index())?.as_ref()
    }

    /// Returns true if it needs several devices with a required topology.
    pub(crate) fn requires_topology(&self) -> bool {
        let resolved = self.resolved.as_ref().ok();
        self.count() != Some(1) && resolved.is_some_and(|r| r.topology.required().next().is_some())
    }

    /// Returns the number of devices; `None` for "all".
    pub(crate) fn count(&self) -> Option<u64> {
        match self.request.mode {
            AllocationMode::Exact(count) => Some(count),
            AllocationMode::All | AllocationMode::Unknown => None,
        }
    }

    /// Returns true if the device is not oversubscribed, or the claim allows oversubscription.
    pub(crate) fn accepts_oversubscription_of(&self, device: &Device) -> bool {
        !device.oversubscribed
            || self.resolved.as_ref().is_ok_and(|resolved| resolved.oversubscribe)
    }

    /// Returns true if its class selects no devices of other drivers.
    pub(crate) fn selects_tessera_only(&self) -> bool {
        self.resolved.as_ref().is_ok_and(|resolved| resolved.is_tessera_only)
    }

    /// Returns the mechanism by which the devices are shared.
    pub(crate) fn sharing(&self) -> Sharing {
        self.resolved.as_ref().map_or(Sharing::Intercept, |resolved| resolved.sharing)
    }

    /// Returns the sharing mechanism that existing allocations must use.
    ///
    /// `None` for administrative access, which is compatible with all.
    pub(crate) fn required_sharing(&self) -> Option<Sharing> {
        (self.request.admin != Some(true)).then(|| self.sharing())
    }

    /// Returns true if the device supports the sharing mechanism of the claim.
    pub(crate) fn can_share(&self, device: &Device) -> bool {
        device.supports_mps || device.is_foreign || self.sharing() != Sharing::Mps
    }

    /// Returns the requested capacities, with a memory percentage resolved for this device.
    fn amounts(&self, device: &Device) -> std::borrow::Cow<'_, NameMap<Quantity>> {
        let resolved = self.resolved.as_ref().ok().filter(|_| !device.is_foreign);
        let percent = resolved.and_then(|resolved| resolved.memory_percent);
        let Some((percent, memory)) = percent.zip(device.capacity.get(MEMORY)) else {
            return std::borrow::Cow::Borrowed(&self.request.capacity);
        };
        let mut amounts = self.request.capacity.clone();
        // Rounded to whole MiB, as published memory is.
        let share = percent.of_mib(memory.value.floor_mib().unwrap_or(0));
        amounts.insert(MEMORY.to_owned(), Quantity::from_mib(share));
        std::borrow::Cow::Owned(amounts)
    }

    /// Returns the amounts consumed on a device, by name.
    pub(crate) fn demand(
        &self,
        device: &Device,
        features: &FeatureGates,
    ) -> Result<Demand, CapacityError> {
        let is_exclusive = self.resolved.as_ref().is_ok_and(|resolved| resolved.exclusive);
        if is_exclusive && !device.is_foreign {
            // All that is published, also where one request could not name as much: of cores that
            // are oversubscribed, it has those of one GPU at most.
            let all = device.capacity.iter().map(|(name, capacity)| (name.clone(), capacity.value));
            return Ok(Demand::Takes(all.collect()));
        }
        capacity::demand(&self.amounts(device), device, features)
    }

    fn match_profile(&self, device: &Device, features: &FeatureGates) -> ProfileMatch {
        let demand = match self.demand(device, features) {
            _ if !features.consumable_capacity => ProfileDemand::Takes(Box::default(), true),
            Ok(Demand::Takes(amounts)) => {
                let fits =
                    device.capacity.iter().zip(amounts.values()).all(|((_, c), a)| *a <= c.value);
                ProfileDemand::Takes(amounts.values().map(Quantity::nano).collect(), fits)
            }
            Ok(Demand::UnknownCapacity(_) | Demand::AgainstPolicy(_)) => ProfileDemand::Never,
            Err(error) => ProfileDemand::Error(error),
        };
        let tolerated =
            !features.taints || device.untolerated_taint(&self.request.tolerations).is_none();
        let gated = device.binding.is_some() && !features.binding_conditions;
        let fitting = self.accepts_oversubscription_of(device) && self.can_share(device);
        let usable = device.is_allocatable() && fitting && tolerated && !gated;
        ProfileMatch { demand, usable }
    }
}

/// Resolves the references of an alternative. The first error is the one that upstream reports.
fn resolve(
    alternative: &Alternative,
    claim: &Claim,
    cluster: &Cluster,
    selections: &mut Selections,
    policy: Policy,
) -> Result<Resolved, RefusalCause> {
    let features = cluster.features();
    let request = || alternative.name.clone();
    let refuse =
        |what: UnsupportedFeature| Err(RefusalCause::NotSupported { request: request(), what });
    if alternative.name.subrequest().is_some() && !features.prioritized_list {
        return refuse(UnsupportedFeature::Gate("DRAPrioritizedList"));
    }
    if !alternative.capacity.is_empty() && !features.consumable_capacity {
        return refuse(UnsupportedFeature::Gate("DRAConsumableCapacity"));
    }
    if let Some(feature) = alternative.unsupported {
        return refuse(UnsupportedFeature::Field(feature));
    }
    if alternative.selectors.iter().any(crate::model::DeviceSelector::is_unknown) {
        return refuse(UnsupportedFeature::Selector);
    }
    if alternative.admin.is_some() && !features.admin_access {
        return refuse(UnsupportedFeature::Gate("DRAAdminAccess"));
    }
    let Some(class) = &alternative.class else { return refuse(UnsupportedFeature::NoClass) };
    let Some(class) = cluster.classes.get(class) else {
        return Err(RefusalCause::UnknownClass { request: request(), class: class.clone() });
    };
    if alternative.mode == AllocationMode::Unknown {
        return refuse(UnsupportedFeature::Mode);
    }
    let mut config = config(class, claim, &alternative.name)?;
    let requested = RequestedCapacity {
        memory: alternative.capacity.get(MEMORY).copied(),
        cores: alternative.capacity.get(CORES).copied(),
    };
    if let Err(error) = config.check_request(requested) {
        return Err(RefusalCause::Config { request: request(), error });
    }
    if let Some(defaults) = &claim.defaults {
        let completion = config.completion(defaults, requested, claim.is_for_one_gpu());
        config = completion.overridden_by(&config);
    }
    let sharing = config.sharing.unwrap_or(Sharing::Intercept);
    // A CUDA process connects to one MPS control daemon, and each GPU that is shared by MPS has its
    // own daemon.
    if sharing == Sharing::Mps
        && (claim.requests.len() > 1 || alternative.mode != AllocationMode::Exact(1))
    {
        return refuse(UnsupportedFeature::MpsWithSeveralGpus);
    }
    let choice = |chosen: Option<_>| chosen.map_or(policy, Policy::from);
    Ok(Resolved {
        class: Arc::clone(class),
        class_selection: selections.of(class.selectors.iter()),
        selection: selections.of(class.selectors.iter().chain(&alternative.selectors)),
        node: choice(config.placement.node),
        device: choice(config.placement.device),
        topology: TopologyPreferences::new(config.topology.as_deref().unwrap_or_default()),
        memory_percent: config.memory.percent,
        exclusive: config.exclusive == Some(true),
        oversubscribe: config.memory.oversubscribe == Some(true),
        sharing,
        is_tessera_only: class.selectors.iter().any(names_tessera_only),
    })
}

/// Returns true if the selector selects no devices of other drivers.
fn names_tessera_only(selector: &DeviceSelector) -> bool {
    selector.compiled().is_ok_and(|compiled| {
        let drivers = compiled.drivers();
        !drivers.matches_unnamed() && drivers.named().all(|driver| driver == DRIVER_NAME)
    })
}

/// Merges the configurations of class and claim for the request.
fn config(
    class: &DeviceClass,
    claim: &Claim,
    request: &RequestName,
) -> Result<GpuConfig, RefusalCause> {
    if class.configs.is_empty() && claim.configs.is_empty() {
        return Ok(GpuConfig::default());
    }
    let of_class =
        class.configs.iter().enumerate().map(|(i, config)| ConfigEntry::of_class(i, config));
    let of_claim =
        claim.configs.iter().enumerate().map(|(i, config)| ConfigEntry::of_claim(i, config));
    merged_config(of_class.chain(of_claim), request)
        .map_err(|error| RefusalCause::Config { request: request.clone(), error })
}
