//! From the claims of a pod to tasks for the search: what must be right before any node is looked at.

use tessera_api::config::{ConfigEntry, PlacementPolicy, merged_config};
use tessera_api::names::ClaimUid;

use crate::model::{Alternative, Claim, DeviceClass, Mode, Snapshot};
use crate::outcome::Cause;
use crate::policy::Policy;
use crate::search::{AlternativeTask, ClaimTask, Placement};

/// The claims of one pod with their classes and configurations.
pub(crate) struct PodTask<'s> {
    claims: Vec<ResolvedClaim<'s>>,
}

struct ResolvedClaim<'s> {
    claim: &'s Claim,
    /// Per request its alternatives.
    requests: Vec<Vec<Resolved<'s>>>,
}

type Resolved<'s> = (&'s Alternative, &'s DeviceClass, Placement);

impl<'s> PodTask<'s> {
    /// Resolves the claims. The error names the first claim that cannot be served by any node, and why.
    pub(crate) fn new(
        snapshot: &'s Snapshot,
        claims: &[&'s Claim],
        policy: Policy,
    ) -> Result<Self, (ClaimUid, Cause)> {
        let resolve = |claim: &&'s Claim| {
            let requests = claim.requests.iter().map(|request| {
                let alternatives = request.alternatives.iter();
                alternatives.map(|alternative| resolve(snapshot, claim, alternative, policy)).collect()
            });
            let requests =
                requests.collect::<Result<_, Cause>>().map_err(|cause| (claim.uid.clone(), cause))?;
            Ok(ResolvedClaim { claim, requests })
        };
        Ok(Self { claims: claims.iter().map(resolve).collect::<Result<_, _>>()? })
    }

    /// Fresh tasks for one node.
    pub(crate) fn claims(&self) -> Vec<ClaimTask<'s>> {
        let task = |resolved: &ResolvedClaim<'s>| ClaimTask {
            claim: resolved.claim,
            requests: resolved
                .requests
                .iter()
                .map(|alternatives| {
                    let task = |(alternative, class, placement): &Resolved<'s>| {
                        AlternativeTask::new(alternative, class, *placement)
                    };
                    alternatives.iter().map(task).collect()
                })
                .collect(),
        };
        self.claims.iter().map(task).collect()
    }

    /// Whether some request can be served in more than one way.
    pub(crate) fn has_alternatives(&self) -> bool {
        self.claims.iter().flat_map(|c| &c.requests).any(|alternatives| alternatives.len() > 1)
    }

    /// The policy for choosing the node: that of the first request.
    pub(crate) fn node_policy(&self) -> Policy {
        let alternatives = self.claims.iter().flat_map(|c| c.requests.iter().flatten());
        alternatives.map(|(_, _, placement)| placement.node).next().unwrap_or_default()
    }
}

fn resolve<'s>(
    snapshot: &'s Snapshot,
    claim: &'s Claim,
    request: &'s Alternative,
    policy: Policy,
) -> Result<Resolved<'s>, Cause> {
    let name = || request.name.clone();
    if let Some(feature) = request.unsupported {
        return Err(Cause::NotSupported { request: name(), feature: feature.to_owned() });
    }
    if request.mode == Mode::Unknown {
        return Err(Cause::NotSupported { request: name(), feature: "this allocation mode".to_owned() });
    }
    let Some(class) = &request.class else {
        return Err(Cause::NotSupported {
            request: name(),
            feature: "requests without a device class".to_owned(),
        });
    };
    let Some(class) = snapshot.classes.get(class) else {
        return Err(Cause::UnknownClass { request: name(), class: class.clone() });
    };
    Ok((request, class, placement(class, claim, request, policy)?))
}

/// What the configurations of class and claim say about the placement of the request.
fn placement(
    class: &DeviceClass,
    claim: &Claim,
    request: &Alternative,
    default: Policy,
) -> Result<Placement, Cause> {
    let of_class = class.configs.iter().enumerate().map(|(i, config)| ConfigEntry::of_class(i, config));
    let of_claim = claim.configs.iter().enumerate().map(|(i, config)| ConfigEntry::of_claim(i, config));
    let config = merged_config(of_class.chain(of_claim), &request.name)
        .map_err(|error| Cause::Config { request: request.name.clone(), error })?;
    Ok(Placement {
        node: config.placement.node.map_or(default, Policy::from),
        device: config.placement.device.map_or(default, Policy::from),
        memory_percent: config.memory.percent,
    })
}

impl From<PlacementPolicy> for Policy {
    fn from(policy: PlacementPolicy) -> Self {
        match policy {
            PlacementPolicy::Spread => Self::Spread,
            // The others are refused by name as long as this version does not have them.
            PlacementPolicy::Binpack | PlacementPolicy::LeastFragmentation | PlacementPolicy::Random => {
                Self::Binpack
            }
        }
    }
}
