//! The scheduler's own device allocator: structured parameters, first fit, from its own view.
//!
//! It does not know other allocators of a pool, like the real one. Only the managed taint, in
//! slices or in a DeviceTaintRule, and the admission policy keep it from Tessera's devices.
//!
//! The search is `tessera-allocator` with its policy `FirstFit`, which is tested against upstream's
//! results (`index/tests/conformance.rs`). Configurations are removed first, since they are opaque
//! to kube-scheduler. Taints of DeviceTaintRules are merged into slices, as upstream's tracker
//! does.

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::{
    AllocationResult, DeviceClass as ApiClass, DeviceTaintRule, ResourceClaim, ResourceSlice,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt;
use tessera_allocator::model::{
    self, Claim, ClusterSnapshot, DeviceClass, PendingPod, PodClaim, PodUid, SchedulingConstraints,
    Slice, Usage,
};
use tessera_allocator::{Decision, PlanSettings, Policy, plan};
use tessera_api::names::{DeviceClassName, Namespace, PodName, ShareId};
use tessera_index::convert::{self, ConvertError, DeviceFilter};

use crate::pod_claim;

/// Allocations of the unallocated claims of one pod, by their index.
pub(super) type Allocations = BTreeMap<usize, AllocationResult>;

/// Devices seen by the scheduler. Their use follows from the claims.
#[derive(Default)]
pub(super) struct Devices {
    published: BTreeMap<String, ResourceSlice>,
    rules: BTreeMap<String, DeviceTaintRule>,
    /// The slices with the taints of the rules. An invalid slice provides no devices.
    slices: BTreeMap<String, Arc<Slice>>,
    classes: BTreeMap<String, (Arc<DeviceClass>, Arc<ApiClass>)>,
}

impl Devices {
    /// Stores a new or changed slice.
    pub(super) fn put_slice(&mut self, slice: &ResourceSlice) {
        let name = slice.name_any();
        self.published.insert(name.clone(), slice.clone());
        self.merge_rules(&name);
    }

    pub(super) fn remove_slice(&mut self, name: &str) {
        self.published.remove(name);
        self.slices.remove(name);
    }

    /// Stores a new or changed DeviceTaintRule.
    pub(super) fn put_rule(&mut self, rule: &DeviceTaintRule) {
        self.rules.insert(rule.name_any(), rule.clone());
        self.merge_all_rules();
    }

    pub(super) fn remove_rule(&mut self, name: &str) {
        self.rules.remove(name);
        self.merge_all_rules();
    }

    fn merge_all_rules(&mut self) {
        for name in self.published.keys().cloned().collect::<Vec<_>>() {
            self.merge_rules(&name);
        }
    }

    fn merge_rules(&mut self, name: &str) {
        let Some(mut slice) = self.published.get(name).cloned() else { return };
        for device in slice.spec.devices.iter_mut().flatten() {
            let rules = self.rules.values().filter(|rule| {
                selects(rule, &slice.spec.driver, &slice.spec.pool.name, &device.name)
            });
            let taints: Vec<_> = rules.map(|rule| rule.spec.taint.clone()).collect();
            device.taints.get_or_insert_default().extend(taints);
        }
        match convert::slice(&slice, DeviceFilter::None) {
            Ok(slice) => drop(self.slices.insert(name.to_owned(), Arc::new(slice))),
            Err(_) => drop(self.slices.remove(name)),
        }
    }

    /// Stores a new or changed class.
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

/// Returns true if the rule taints the device. A rule without a selector taints none.
fn selects(rule: &DeviceTaintRule, driver: &str, pool: &str, device: &str) -> bool {
    rule.spec.device_selector.as_ref().is_some_and(|selector| {
        let is = |wanted: &Option<String>, name: &str| wanted.as_deref().is_none_or(|w| w == name);
        is(&selector.driver, driver) && is(&selector.pool, pool) && is(&selector.device, device)
    })
}

/// Allocator for one pod, created in each PreFilter as upstream.
pub(super) struct Allocator<'a> {
    devices: &'a Devices,
    claims: &'a [Arc<ResourceClaim>],
    snapshot: ClusterSnapshot,
    wanted: Vec<(usize, Arc<Claim>)>,
}

impl<'a> Allocator<'a> {
    /// Creates an allocator for a pod's claims, given all claims of the cluster. Returns `None` if
    /// all are allocated.
    ///
    /// # Errors
    /// Returns an error if a claim is invalid.
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
        let snapshot = ClusterSnapshot {
            slices: devices.slices.clone(),
            classes: classes
                .filter_map(|(name, (class, _))| {
                    Some((DeviceClassName::new(name).ok()?, class.clone()))
                })
                .collect(),
            usage: usage(all)?,
            ..ClusterSnapshot::default()
        };
        Ok(Some(Self { devices, claims, snapshot, wanted }))
    }

    /// Allocates all unallocated claims of the pod on this node, or returns `None`.
    pub(super) fn allocate(&self, node: &Node) -> Option<Allocations> {
        // Other filters check whether the pod may run on the node.
        let node = convert::node(node).ok()?;
        let node = model::Node { ready: true, cordoned: false, taints: Vec::new(), ..node };
        let name = node.name.clone();
        let snapshot =
            ClusterSnapshot { nodes: [(name, Arc::new(node))].into(), ..self.snapshot.clone() };
        let settings = PlanSettings { policy: Policy::FirstFit, ..PlanSettings::default() };
        let decision = plan(&snapshot, &[self.pod()?], settings).decisions.pop()?;
        Some(self.results(&decision))
    }

    /// Returns a pod with these claims only.
    fn pod(&self) -> Option<PendingPod> {
        Some(PendingPod {
            uid: PodUid::new("pod"),
            namespace: Namespace::new("default").ok()?,
            name: PodName::new("pod").ok()?,
            priority: 0,
            created: 0,
            claims: self.wanted.iter().map(|(_, claim)| PodClaim::Pending(claim.clone())).collect(),
            scheduling: Arc::new(SchedulingConstraints::default()),
            nominated_node: None,
            excluded_nodes: Default::default(),
            together_with: Vec::new(),
            topology: None,
        })
    }

    fn results(&self, decision: &Decision) -> Allocations {
        let classes = self.devices.objects();
        let mut allocations = Allocations::new();
        for (index, claim) in &self.wanted {
            if let Some(allocated) =
                decision.claims.iter().find(|allocated| allocated.claim == claim.uid)
            {
                let object = &self.claims[*index];
                let allocation =
                    convert::allocation(allocated, object, &classes, None, now(), fresh_share);
                allocations.insert(*index, allocation);
            }
        }
        allocations
    }
}

/// Returns the capacity used by allocated claims.
fn usage<'c>(claims: impl Iterator<Item = &'c Arc<ResourceClaim>>) -> Result<Usage, ConvertError> {
    let mut usage = Usage::default();
    for claim in claims {
        if let Some(allocation) =
            claim.status.as_ref().and_then(|status| status.allocation.as_ref())
        {
            // kube-scheduler knows no changed sizes.
            usage.add(&convert::allocated(&claim.name_any(), allocation, &[])?.results);
        }
    }
    Ok(usage)
}

/// Returns the current time in whole seconds, as in `metav1.Time`.
fn now() -> Time {
    let now = Timestamp::now();
    Time(Timestamp::from_second(now.as_second()).unwrap_or(now))
}

fn fresh_share() -> ShareId {
    ShareId::new(uuid::Uuid::new_v4().to_string())
        .expect("invariant: a UUID is formatted in lower case")
}
