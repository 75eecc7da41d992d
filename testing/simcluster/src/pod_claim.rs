//! Resolves the entries of a pod's `resourceClaims` to claims.

use k8s_openapi::api::core::v1::{Pod, PodResourceClaim};
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceClaimConsumerReference};
use kube::ResourceExt;

use crate::informer::Key;

/// Finalizer of an allocated claim.
pub(crate) const FINALIZER: &str = "resource.kubernetes.io/delete-protection";

/// The claim of one entry of `spec.resourceClaims`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum PodClaim {
    /// A claim that exists independently of the pod.
    Named(String),
    /// A claim generated for the pod, which must own it.
    Generated(String),
    /// The controller determined that no claim is needed.
    NotNeeded,
    /// The controller has not created the claim yet.
    NotCreated,
}

impl PodClaim {
    /// Resolves an entry, as the claim helpers of Kubernetes do.
    pub(crate) fn of(pod: &Pod, entry: &PodResourceClaim) -> Self {
        if let Some(name) = &entry.resource_claim_name {
            return Self::Named(name.clone());
        }
        let statuses =
            pod.status.as_ref().and_then(|status| status.resource_claim_statuses.as_ref());
        match statuses.into_iter().flatten().find(|status| status.name == entry.name) {
            Some(status) => {
                status.resource_claim_name.clone().map_or(Self::NotNeeded, Self::Generated)
            }
            None => Self::NotCreated,
        }
    }

    /// Returns the claim's name, if there is a claim.
    pub(crate) fn name(&self) -> Option<&str> {
        match self {
            Self::Named(name) | Self::Generated(name) => Some(name),
            Self::NotNeeded | Self::NotCreated => None,
        }
    }
}

/// Returns the entries of a pod.
pub(crate) fn entries(pod: &Pod) -> &[PodResourceClaim] {
    pod.spec.as_ref().and_then(|spec| spec.resource_claims.as_deref()).unwrap_or_default()
}

/// Returns true if an entry of the pod resolves to the claim.
pub(crate) fn uses(pod: &Pod, claim: &Key) -> bool {
    pod.namespace().as_ref() == Some(&claim.0)
        && entries(pod).iter().any(|entry| PodClaim::of(pod, entry).name() == Some(&claim.1))
}

/// Returns true if the pod is the controlling owner of the claim.
pub(crate) fn is_for_pod(pod: &Pod, claim: &ResourceClaim) -> bool {
    claim.owner_references().iter().any(|owner| {
        owner.controller == Some(true) && Some(&owner.uid) == pod.metadata.uid.as_ref()
    })
}

/// Returns true if the claim is reserved for the pod.
pub(crate) fn is_reserved_for(pod: &Pod, claim: &ResourceClaim) -> bool {
    let uid = pod.metadata.uid.as_deref().unwrap_or_default();
    reserved_for(claim).iter().any(|consumer| consumer.uid == uid)
}

/// Returns the consumers of a claim.
pub(crate) fn reserved_for(claim: &ResourceClaim) -> &[ResourceClaimConsumerReference] {
    claim.status.as_ref().and_then(|status| status.reserved_for.as_deref()).unwrap_or_default()
}

/// Returns true if the claim is allocated.
pub(crate) fn is_allocated(claim: &ResourceClaim) -> bool {
    claim.status.as_ref().is_some_and(|status| status.allocation.is_some())
}

/// Returns the node of a pod.
pub(crate) fn node_name(pod: &Pod) -> Option<&str> {
    pod.spec.as_ref()?.node_name.as_deref().filter(|node| !node.is_empty())
}

/// Returns true if the pod's phase is `Succeeded` or `Failed`.
pub(crate) fn is_terminal(pod: &Pod) -> bool {
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    matches!(phase, Some("Succeeded" | "Failed"))
}

/// Returns true if the pod will not run any more: it is terminal, or was deleted while unbound.
pub(crate) fn is_done(pod: &Pod) -> bool {
    is_terminal(pod) || (pod.metadata.deletion_timestamp.is_some() && node_name(pod).is_none())
}

/// Returns the pod's entry for `reservedFor`.
pub(crate) fn consumer(pod: &Pod) -> ResourceClaimConsumerReference {
    ResourceClaimConsumerReference {
        api_group: None,
        resource: "pods".to_owned(),
        name: pod.name_any(),
        uid: pod.uid().unwrap_or_default(),
    }
}
