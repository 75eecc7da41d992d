//! Which claim belongs to which entry of a pod.

use k8s_openapi::api::core::v1::{Pod, PodResourceClaim};
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceClaimConsumerReference};
use kube::ResourceExt;

/// The finalizer that keeps an allocated claim.
pub(crate) const FINALIZER: &str = "resource.kubernetes.io/delete-protection";

/// The claim of one entry of `spec.resourceClaims`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum PodClaim {
    /// A claim that exists by itself.
    Named(String),
    /// A claim that was made for the pod, which must own it.
    Generated(String),
    /// The controller found that none is needed.
    NotNeeded,
    /// The controller has not made it yet.
    NotCreated,
}

impl PodClaim {
    /// Looks an entry up, as the claim helpers of Kubernetes do.
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

    /// The claim's name, where there is one.
    pub(crate) fn name(&self) -> Option<&str> {
        match self {
            Self::Named(name) | Self::Generated(name) => Some(name),
            Self::NotNeeded | Self::NotCreated => None,
        }
    }
}

/// The entries of a pod.
pub(crate) fn entries(pod: &Pod) -> &[PodResourceClaim] {
    pod.spec.as_ref().and_then(|spec| spec.resource_claims.as_deref()).unwrap_or_default()
}

/// Whether the pod is the controlling owner of the claim.
pub(crate) fn is_for_pod(pod: &Pod, claim: &ResourceClaim) -> bool {
    claim.owner_references().iter().any(|owner| {
        owner.controller == Some(true) && Some(&owner.uid) == pod.metadata.uid.as_ref()
    })
}

/// Whether the claim is reserved for the pod.
pub(crate) fn is_reserved_for(pod: &Pod, claim: &ResourceClaim) -> bool {
    let uid = pod.metadata.uid.as_deref().unwrap_or_default();
    reserved_for(claim).iter().any(|consumer| consumer.uid == uid)
}

/// The consumers of a claim.
pub(crate) fn reserved_for(claim: &ResourceClaim) -> &[ResourceClaimConsumerReference] {
    claim.status.as_ref().and_then(|status| status.reserved_for.as_deref()).unwrap_or_default()
}

/// Whether the claim is allocated.
pub(crate) fn is_allocated(claim: &ResourceClaim) -> bool {
    claim.status.as_ref().is_some_and(|status| status.allocation.is_some())
}

/// The node of a pod.
pub(crate) fn node_name(pod: &Pod) -> Option<&str> {
    pod.spec.as_ref()?.node_name.as_deref().filter(|node| !node.is_empty())
}

/// Whether the pod's containers have all ended for good.
pub(crate) fn is_terminal(pod: &Pod) -> bool {
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    matches!(phase, Some("Succeeded" | "Failed"))
}

/// Whether the pod will not run any more: it has ended, or was deleted before it had a node.
pub(crate) fn is_done(pod: &Pod) -> bool {
    is_terminal(pod) || (pod.metadata.deletion_timestamp.is_some() && node_name(pod).is_none())
}

/// The entry in `reservedFor` that stands for a pod.
pub(crate) fn consumer(pod: &Pod) -> ResourceClaimConsumerReference {
    ResourceClaimConsumerReference {
        api_group: None,
        resource: "pods".to_owned(),
        name: pod.name_any(),
        uid: pod.uid().unwrap_or_default(),
    }
}
