//! The object of a claim, as the index keeps it.
//!
//! A claim that is not allocated is kept as it is: its allocation is written from it. Of an
//! allocated one only what a release or a repair needs is kept, the allocation as JSON. A whole
//! object has 3.5 KiB, and most claims of a cluster are allocated.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use k8s_openapi::api::resource::v1::{
    AllocatedDeviceStatus, AllocationResult, ResourceClaim, ResourceClaimConsumerReference,
    ResourceClaimStatus,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use tessera_allocator::model::Claim;
use tessera_api::resize::{apply_sizes, changed_size};

use crate::barrier::BarrierState;
use crate::generated::{GeneratedFor, generated_for};
use crate::pod_groups::PodGroupApi;

/// The object of a claim as last seen.
#[derive(Debug, Clone)]
pub(crate) struct StoredClaim {
    version: Box<str>,
    is_deleting: bool,
    /// The UID of the controlling owner.
    controller: Option<Box<str>>,
    generated_for: Option<Box<GeneratedFor>>,
    /// The PodGroup that is the controlling owner (KEP-5729).
    pod_group: Option<Box<str>>,
    /// A digest of labels and annotations.
    metadata_digest: u64,
    content: Content,
}

#[derive(Debug, Clone)]
enum Content {
    /// The claim is not allocated.
    Whole(Arc<ResourceClaim>),
    /// It is.
    Allocated(Box<Allocated>),
}

#[derive(Debug, Clone)]
struct Allocated {
    allocation: StoredAllocation,
    /// Seconds since the epoch; 0 = unknown.
    at: i64,
    reserved_for: Box<[ResourceClaimConsumerReference]>,
    barrier: BarrierState,
    /// The shares whose size was changed, as in `status.devices`.
    resized: Box<[AllocatedDeviceStatus]>,
}

/// An allocation as JSON.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct StoredAllocation(Box<[u8]>);

impl StoredAllocation {
    fn new(allocation: &AllocationResult) -> Self {
        let json = serde_json::to_vec(allocation);
        Self(json.expect("invariant: API objects can be written as JSON").into_boxed_slice())
    }

    /// Returns the allocation.
    pub(crate) fn get(&self) -> AllocationResult {
        serde_json::from_slice(&self.0).expect("invariant: it was written from an allocation")
    }
}

/// Returns the entries of `status.devices` that change the size of a share.
fn resized_shares(status: &ResourceClaimStatus) -> Box<[AllocatedDeviceStatus]> {
    let devices = status.devices.as_deref().unwrap_or_default();
    let allocation = status.allocation.as_ref().and_then(|one| one.devices.as_ref());
    let results = allocation.and_then(|one| one.results.as_deref()).unwrap_or_default();
    let is_resized = |device: &&AllocatedDeviceStatus| {
        results.iter().any(|result| changed_size(std::slice::from_ref(device), result).is_some())
    };
    devices.iter().filter(is_resized).cloned().collect()
}

/// Returns true if the owner is a PodGroup of Kubernetes, of any version
/// (`resourceclaim.isForPodGroupByPod` of `k8s.io/dynamic-resource-allocation`).
fn is_pod_group(owner: &OwnerReference) -> bool {
    let group = owner.api_version.split_once('/').map(|(group, _)| group);
    owner.kind == "PodGroup" && group == Some(PodGroupApi::Kubernetes.name())
}

fn metadata_digest(metadata: &ObjectMeta) -> u64 {
    let mut digest = DefaultHasher::new();
    (&metadata.labels, &metadata.annotations).hash(&mut digest);
    digest.finish()
}

impl StoredClaim {
    pub(crate) fn new(object: &Arc<ResourceClaim>) -> Self {
        let status = object.status.as_ref();
        let content = match status.and_then(|status| status.allocation.as_ref()) {
            None => Content::Whole(Arc::clone(object)),
            Some(allocation) => Content::Allocated(Box::new(Allocated {
                allocation: StoredAllocation::new(allocation),
                at: allocation.allocation_timestamp.as_ref().map_or(0, |time| time.0.as_second()),
                reserved_for: status
                    .and_then(|s| s.reserved_for.as_deref())
                    .unwrap_or_default()
                    .into(),
                barrier: status.map(BarrierState::of).unwrap_or_default(),
                resized: status.map(resized_shares).unwrap_or_default(),
            })),
        };
        let mut owners = object.metadata.owner_references.iter().flatten();
        let controller = owners.find(|owner| owner.controller == Some(true));
        Self {
            version: object.metadata.resource_version.as_deref().unwrap_or_default().into(),
            is_deleting: object.metadata.deletion_timestamp.is_some(),
            controller: controller.map(|owner| owner.uid.as_str().into()),
            generated_for: generated_for(object).map(Box::new),
            pod_group: controller
                .filter(|owner| is_pod_group(owner))
                .map(|owner| owner.name.as_str().into()),
            metadata_digest: metadata_digest(&object.metadata),
            content,
        }
    }

    /// Returns the object that a write of `claim` is based on. Of an allocated claim it has name,
    /// UID, version, allocation, `reservedFor` and changed sizes.
    pub(crate) fn object(&self, claim: &Claim) -> Arc<ResourceClaim> {
        let stored = match &self.content {
            Content::Whole(object) => return Arc::clone(object),
            Content::Allocated(stored) => stored,
        };
        Arc::new(ResourceClaim {
            metadata: ObjectMeta {
                name: Some(claim.name.to_string()),
                namespace: Some(claim.namespace.to_string()),
                uid: Some(claim.uid.to_string()),
                resource_version: Some(self.version.to_string()),
                ..ObjectMeta::default()
            },
            status: Some(ResourceClaimStatus {
                allocation: Some(stored.allocation.get()),
                reserved_for: Some(stored.reserved_for.to_vec()),
                devices: (!stored.resized.is_empty()).then(|| stored.resized.to_vec()),
            }),
            ..ResourceClaim::default()
        })
    }

    pub(crate) fn metadata_digest(&self) -> u64 {
        self.metadata_digest
    }

    pub(crate) fn allocation(&self) -> Option<&StoredAllocation> {
        self.allocated().map(|stored| &stored.allocation)
    }

    /// Returns the allocation with the sizes of shares that count in place of the allocated ones.
    pub(crate) fn sized_allocation(&self) -> Option<StoredAllocation> {
        let stored = self.allocated()?;
        if stored.resized.is_empty() {
            return Some(stored.allocation.clone());
        }
        let mut status = ResourceClaimStatus {
            allocation: Some(stored.allocation.get()),
            devices: Some(stored.resized.to_vec()),
            ..ResourceClaimStatus::default()
        };
        apply_sizes(&mut status);
        status.allocation.as_ref().map(StoredAllocation::new)
    }

    /// Returns the time of the allocation in seconds since the epoch.
    pub(crate) fn allocated_at(&self) -> i64 {
        self.allocated().map_or(0, |stored| stored.at)
    }

    pub(crate) fn reserved_for(&self) -> &[ResourceClaimConsumerReference] {
        match &self.content {
            Content::Whole(object) => {
                let status = object.status.as_ref();
                status.and_then(|status| status.reserved_for.as_deref()).unwrap_or_default()
            }
            Content::Allocated(stored) => &stored.reserved_for,
        }
    }

    /// Returns the state of the allocation at the barrier of its group.
    pub(crate) fn barrier(&self) -> BarrierState {
        self.allocated().map(|stored| stored.barrier).unwrap_or_default()
    }

    pub(crate) fn is_deleting(&self) -> bool {
        self.is_deleting
    }

    /// Returns true if the object of this UID is the controlling owner.
    pub(crate) fn is_controlled_by(&self, uid: &str) -> bool {
        self.controller.as_deref() == Some(uid)
    }

    /// Returns the PodGroup that is the controlling owner, by its name: pods do not know its UID.
    pub(crate) fn pod_group(&self) -> Option<&str> {
        self.pod_group.as_deref()
    }

    /// Returns the pod and the entry that the claim was generated for.
    pub(crate) fn generated_for(&self) -> Option<&GeneratedFor> {
        self.generated_for.as_deref()
    }

    fn allocated(&self) -> Option<&Allocated> {
        match &self.content {
            Content::Whole(_) => None,
            Content::Allocated(stored) => Some(stored),
        }
    }
}
