//! The scheduler's own allocator of devices: structured parameters, first fit, from the scheduler's
//! own view.
//!
//! It knows nothing of who else allocates from a pool, no more than the real one does. What keeps
//! it off our devices is the fence alone, a taint like any other here, and the admission policy
//! when it writes all the same.
//!
//! The search is `tessera-allocator` with its policy `FirstFit`, which upstream's own results hold
//! to upstream (`index/tests/conformance.rs`). Configurations are taken out first: they are opaque
//! to kube-scheduler. DeviceTaintRules are not looked at: this API server does not serve them.

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::{
    AllocationResult, DeviceClass as ApiClass, ResourceClaim, ResourceSlice,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt;
use tessera_allocator::model::{
    self, Claim, DeviceClass, PendingPod, PodClaim, PodUid, Scheduling, Slice, Snapshot, Usage,
};
use tessera_allocator::{Decision, Policy, Settings, plan};
use tessera_api::names::{DeviceClassName, Namespace, PodName, ShareId};
use tessera_index::convert::{self, ConvertError, Fence};

use crate::pod_claim;

/// Allocations for the unallocated claims of one pod, by their index.
pub(super) type Allocations = BTreeMap<usize, AllocationResult>;

/// Which devices there are, as the scheduler has seen them. What is taken of them is in the claims.
#[derive(Default)]
pub(super) struct Devices {
    slices: BTreeMap<String, Arc<Slice>>,
    classes: BTreeMap<String, (Arc<DeviceClass>, Arc<ApiClass>)>,
}

impl Devices {
    /// A slice is there now, or is different. One that cannot be read offers nothing.
    pub(super) fn put_slice(&mut self, slice: &ResourceSlice) {
        let name = slice.name_any();
        match convert::slice(slice, Fence::None) {
            Ok(slice) => drop(self.slices.insert(name, Arc::new(slice))),
            Err(_) => drop(self.slices.remove(&name)),
        }
    }

    pub(super) fn remove_slice(&mut self, name: &str) {
        self.slices.remove(name);
    }

    /// A class is there now, or is different.
    pub(super) fn put_class(&mut self, class: &Arc<ApiClass>) {
        let name = class.name_any();
        match convert::class(class) {
            Ok(read) => {
                let read = DeviceClass { configs: Vec::new(), ..read };
                self.classes.insert(name, (Arc::new(read), class.clone()));
            }
            Err(_) => drop(self.classes.remove(&name)),
        }
    }

    pub(super) fn remove_class(&mut self, name: &str) {
        self.classes.remove(name);
    }

    pub(super) fn has_class(&self, name: &str) -> bool {
        self.classes.contains_key(name)
    }

    fn objects(&self) -> BTreeMap<String, &ApiClass> {
        self.classes.iter().map(|(name, (_, object))| (name.clone(), object.as_ref())).collect()
    }
}

/// The allocator for one pod: upstream's is made anew in each PreFilter.
pub(super) struct Allocator<'a> {
    devices: &'a Devices,
    claims: &'a [Arc<ResourceClaim>],
    snapshot: Snapshot,
    wanted: Vec<(usize, Arc<Claim>)>,
}

impl<'a> Allocator<'a> {
    /// For a pod's claims, given all claims of the cluster; none where nothing is to be allocated.
    ///
    /// # Errors
    /// A claim cannot be read.
    pub(super) fn new<'c>(
        devices: &'a Devices,
        claims: &'a [Arc<ResourceClaim>],
        all: impl Iterator<Item = &'c Arc<ResourceClaim>>,
    ) -> Result<Option<Self>, ConvertError> {
        let unallocated =
            claims.iter().enumerate().filter(|(_, claim)| !pod_claim::is_allocated(claim));
        let wanted: Vec<_> = unallocated
            .map(|(index, claim)| {
                Ok((index, Arc::new(Claim { configs: Vec::new(), ..convert::claim(claim)? })))
            })
            .collect::<Result<_, ConvertError>>()?;
        if wanted.is_empty() {
            return Ok(None);
        }
        let classes = devices.classes.iter();
        let snapshot = Snapshot {
            slices: devices.slices.clone(),
            classes: classes
                .filter_map(|(name, (class, _))| {
                    Some((DeviceClassName::new(name).ok()?, class.clone()))
                })
                .collect(),
            usage: usage(all)?,
            ..Snapshot::default()
        };
        Ok(Some(Self { devices, claims, snapshot, wanted }))
    }

    /// All unallocated claims of the pod on this node, or nothing.
    pub(super) fn allocate(&self, node: &Node) -> Option<Allocations> {
        // Whether the pod may go to the node has been asked by other filters.
        let node = convert::node(node).ok()?;
        let node = model::Node { ready: true, cordoned: false, taints: Vec::new(), ..node };
        let name = node.name.clone();
        let snapshot = Snapshot { nodes: [(name, Arc::new(node))].into(), ..self.snapshot.clone() };
        let settings = Settings { policy: Policy::FirstFit, ..Settings::default() };
        let decision = plan(&snapshot, &[self.pod()?], settings).decisions.pop()?;
        Some(self.results(&decision))
    }

    /// A pod that wants nothing but these claims.
    fn pod(&self) -> Option<PendingPod> {
        Some(PendingPod {
            uid: PodUid::new("pod"),
            namespace: Namespace::new("default").ok()?,
            name: PodName::new("pod").ok()?,
            priority: 0,
            created: 0,
            claims: self.wanted.iter().map(|(_, claim)| PodClaim::Pending(claim.clone())).collect(),
            scheduling: Arc::new(Scheduling::default()),
            nominated: None,
            excluded: Default::default(),
        })
    }

    fn results(&self, decision: &Decision) -> Allocations {
        let classes = self.devices.objects();
        let mut allocations = Allocations::new();
        for (index, claim) in &self.wanted {
            if let Some(allotment) =
                decision.claims.iter().find(|allotment| allotment.claim == claim.uid)
            {
                let object = &self.claims[*index];
                let allocation =
                    convert::allocation(allotment, object, &classes, now(), fresh_share);
                allocations.insert(*index, allocation);
            }
        }
        allocations
    }
}

/// What allocated claims take.
fn usage<'c>(claims: impl Iterator<Item = &'c Arc<ResourceClaim>>) -> Result<Usage, ConvertError> {
    let mut usage = Usage::default();
    for claim in claims {
        if let Some(allocation) =
            claim.status.as_ref().and_then(|status| status.allocation.as_ref())
        {
            usage.add(&convert::allocated(&claim.name_any(), allocation)?.results);
        }
    }
    Ok(usage)
}

/// `metav1.Time` has whole seconds.
fn now() -> Time {
    let now = Timestamp::now();
    Time(Timestamp::from_second(now.as_second()).unwrap_or(now))
}

fn fresh_share() -> ShareId {
    ShareId::new(uuid::Uuid::new_v4().to_string())
        .expect("invariant: a UUID prints as a lowercase UUID")
}
