//! Claims and their usage of devices.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::sync::Arc;

use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceClaimConsumerReference};
use litemap::LiteMap;
use tessera_allocator::model::{
    Alternative, Claim, DeviceId, DeviceResult, NameMap, NodeSelector, PodUid, Request, Usage,
};
use tessera_api::names::{ClaimUid, DRIVER_NAME, ManagedDrivers, NodeName};
use tessera_api::quantity::Quantity;

use crate::barrier::BarrierState;
use crate::convert::{self, AllocatedClaim, ConvertError};
use crate::generated::GeneratedFor;
use crate::interner::Interner;
use crate::multimap::Multimap;
use crate::scope::Scope;
use crate::stored::{StoredAllocation, StoredClaim};

/// The running sums of allocated capacity.
#[derive(Debug, Default)]
pub(crate) struct UsageSums {
    pub(crate) usage: Usage,
    /// Devices that have changed since they were last checked for overcommitment.
    pub(crate) touched: BTreeSet<DeviceId>,
    /// Devices whose usage has changed since [`Index::take_changes`](crate::Index::take_changes).
    pub(crate) unplanned: BTreeSet<DeviceId>,
    /// The claims that hold each device.
    pub(crate) holders: Holders,
}

/// The claims that hold each device.
pub(crate) type Holders = Multimap<DeviceId, ClaimUid>;

/// Adds a claim to the holders of its devices.
pub(crate) fn add_holder(holders: &mut Holders, claim: &ClaimUid, devices: &[DeviceResult]) {
    for result in devices {
        holders.insert(result.device.clone(), claim.clone());
    }
}

/// Removes a claim from the holders of these devices.
fn remove_holder(holders: &mut Holders, claim: &ClaimUid, devices: &[DeviceResult]) {
    for result in devices {
        holders.remove(&result.device, claim);
    }
}

/// A claim. It stays after the object is deleted while a bound pod refers to it.
#[derive(Debug)]
pub(crate) struct ClaimEntry {
    /// The object as last seen; none after it is deleted.
    pub(crate) object: Option<StoredClaim>,
    /// Its requests.
    pub(crate) claim: Arc<Claim>,
    /// `resourceVersion` of the object: older versions are ignored.
    pub(crate) version: u64,
    /// The allocation in its status.
    pub(crate) observed: Option<AllocatedClaim>,
    /// The assumed allocation: decided, and not seen yet.
    pub(crate) assumed: Option<AllocatedClaim>,
    /// Bound pods that refer to it, with their nodes.
    pub(crate) users: LiteMap<PodUid, NodeName>,
    /// The devices that are counted for it in the usage.
    counted: Arc<[DeviceResult]>,
    /// Its scope, and the version of the classes that it was determined for.
    pub(crate) scope: Cell<Option<(u64, Scope)>>,
    /// The allocation before it was changed under the bound pods that use it.
    lost: Option<Box<(AllocatedClaim, StoredAllocation)>>,
}

impl ClaimEntry {
    pub(crate) fn new(
        object: &Arc<ResourceClaim>,
        requests: &mut Interner<[Request]>,
    ) -> Result<Self, ConvertError> {
        let mut claim = within_limits(without_admin_access(convert::claim(object)?));
        claim.requests = requests.intern(claim.requests);
        Ok(Self {
            object: None,
            claim: Arc::new(claim),
            version: 0,
            observed: None,
            assumed: None,
            // As a rule one pod uses a claim.
            users: LiteMap::with_capacity(1),
            counted: Arc::default(),
            scope: Cell::new(None),
            lost: None,
        })
    }

    /// Takes over a newer version of the object. Returns false if it is not newer.
    pub(crate) fn observe(&mut self, object: &Arc<ResourceClaim>) -> Result<bool, ConvertError> {
        let version = resource_version(object);
        if version < self.version
            || (version == self.version && version != u64::MAX && self.object.is_some())
        {
            return Ok(false);
        }
        let allocation = object.status.as_ref().and_then(|s| s.allocation.as_ref());
        let name = object.metadata.name.as_deref().unwrap_or_default();
        let devices = object.status.as_ref().and_then(|status| status.devices.as_deref());
        let read = |a| convert::allocated(name, a, devices.unwrap_or_default());
        let observed = allocation.map(read).transpose()?;
        self.version = version;
        let before = self.object.replace(StoredClaim::new(object));
        let known = std::mem::replace(&mut self.observed, observed);
        let allocation = |stored: &Option<StoredClaim>| stored.as_ref()?.allocation().cloned();
        // A changed size of a share is no other allocation.
        let is_other = allocation(&before) != allocation(&self.object);
        if self.lost.is_none() && !self.users.is_empty() && is_other {
            let allocation = before.as_ref().and_then(StoredClaim::sized_allocation);
            self.lost = known.zip(allocation).map(Box::new);
        }
        if self.lost.as_ref().is_some_and(|lost| self.observed.as_ref() == Some(&lost.0)) {
            self.lost = None;
        }
        Ok(true)
    }

    /// Removes a pod that is not bound with the claim any more.
    pub(crate) fn remove_user(&mut self, pod: &PodUid) {
        self.users.remove(pod);
        if self.users.is_empty() {
            self.lost = None;
        }
    }

    /// Returns the allocation that a pod was bound with and that was changed since.
    pub(crate) fn lost_allocation(&self) -> Option<&(AllocatedClaim, StoredAllocation)> {
        self.lost.as_deref()
    }

    /// Returns the assumed allocation, or the one in the status.
    pub(crate) fn allocation(&self) -> Option<&AllocatedClaim> {
        self.assumed.as_ref().or(self.observed.as_ref())
    }

    pub(crate) fn nodes(&self) -> Option<&NodeSelector> {
        self.allocation().and_then(|a| a.nodes.as_deref())
    }

    /// Returns true if anything still depends on the claim.
    pub(crate) fn is_alive(&self) -> bool {
        self.object.is_some() || self.assumed.is_some() || !self.users.is_empty()
    }

    /// Returns the pod and the entry that the claim was generated for.
    pub(crate) fn generated_for(&self) -> Option<GeneratedFor> {
        self.object.as_ref()?.generated_for().cloned()
    }

    /// Returns `reservedFor`.
    pub(crate) fn reserved_for(&self) -> &[ResourceClaimConsumerReference] {
        self.object.as_ref().map(StoredClaim::reserved_for).unwrap_or_default()
    }

    /// Returns the time of the allocation in seconds since the epoch.
    pub(crate) fn allocated_at(&self) -> i64 {
        self.object.as_ref().map_or(0, StoredClaim::allocated_at)
    }

    /// Returns the state of the allocation at the barrier of its group.
    pub(crate) fn barrier(&self) -> BarrierState {
        self.object.as_ref().map(StoredClaim::barrier).unwrap_or_default()
    }

    /// Returns true if the claim is allocated, not reserved, not in use by a bound pod, and not
    /// being written or deleted.
    pub(crate) fn is_idle(&self) -> bool {
        self.observed.is_some()
            && self.assumed.is_none()
            && self.users.is_empty()
            && self.reserved_for().is_empty()
            && !self.is_deleting()
    }

    pub(crate) fn is_deleting(&self) -> bool {
        self.object.as_ref().is_none_or(StoredClaim::is_deleting)
    }

    /// Returns the devices that have to count as taken: those of the status and the assumed ones,
    /// and while a bound pod uses the claim also those that were counted on its node before.
    /// (Our pools are named after their nodes; those of other drivers need not be.)
    fn due(&self, managed: &ManagedDrivers) -> Arc<[DeviceResult]> {
        let mut due: Vec<DeviceResult> = Vec::new();
        let is_held = |r: &&DeviceResult| {
            let is_on = |node: &NodeName| node.as_str() == r.device.pool.pool.as_str();
            let is_foreign = r.device.pool.driver.as_str() != DRIVER_NAME;
            self.users.values().any(|node| is_foreign || is_on(node))
        };
        for allocation in [&self.observed, &self.assumed].into_iter().flatten() {
            let results = allocation.results.iter();
            let is_managed = |r: &&DeviceResult| managed.contains(r.device.pool.driver.as_str());
            // A share that is being resized may have either size.
            include(&mut due, results.filter(is_managed), |known, other| {
                raise(&mut known.consumed, &other.consumed);
            });
        }
        include(&mut due, self.counted.iter().filter(is_held), |_, _| {});
        // As a rule it is the observed allocation, which is shared then.
        match &self.observed {
            Some(observed) if *observed.results == *due => Arc::clone(&observed.results),
            _ => due.into(),
        }
    }

    /// Updates the usage with this claim.
    pub(crate) fn count(&mut self, sums: &mut UsageSums, managed: &ManagedDrivers) {
        let due = self.due(managed);
        if due != self.counted {
            sums.touched.extend(self.counted.iter().chain(due.iter()).map(|r| r.device.clone()));
            sums.unplanned.extend(self.counted.iter().chain(due.iter()).map(|r| r.device.clone()));
            sums.usage.remove(&self.counted);
            sums.usage.add(&due);
            remove_holder(&mut sums.holders, &self.claim.uid, &self.counted);
            add_holder(&mut sums.holders, &self.claim.uid, &due);
        }
        self.counted = due;
    }

    /// Returns the request that got the device.
    pub(crate) fn request_of(&self, result: &DeviceResult) -> Option<&Alternative> {
        let mut alternatives = self.claim.requests.iter().flat_map(|request| &request.alternatives);
        alternatives.find(|one| one.name == result.request)
    }

    /// Returns the devices that are counted.
    pub(crate) fn counted(&self) -> &[DeviceResult] {
        &self.counted
    }
}

/// Marks requests with `adminAccess`, which our driver does not support yet, as unsupported.
fn without_admin_access(mut claim: Claim) -> Claim {
    let requests = Arc::make_mut(&mut claim.requests);
    let alternatives = requests.iter_mut().flat_map(|request| &mut request.alternatives);
    for alternative in alternatives.filter(|a| a.admin == Some(true)) {
        alternative.unsupported = Some("adminAccess");
    }
    claim
}

/// The most bytes of selectors that a claim may have. The API server accepts 32 requests of 32
/// selectors of 10 KiB, and compiling 10 KiB takes 25 ms of the one thread that plans all pods.
const MAX_SELECTOR_BYTES: usize = 64 << 10;

/// Marks a claim with too many bytes of selectors as unsupported, and drops the selectors, so that
/// they are never compiled.
fn within_limits(mut claim: Claim) -> Claim {
    if claim.selector_bytes() > MAX_SELECTOR_BYTES {
        let requests = Arc::make_mut(&mut claim.requests);
        for alternative in requests.iter_mut().flat_map(|request| &mut request.alternatives) {
            alternative.selectors.clear();
            alternative.unsupported = Some("a claim with more than 64 KiB of selectors");
        }
    }
    claim
}

/// Adds results to those that are due. A device for the same request in two
/// allocations is one result; twice in one allocation it is two, since kube-scheduler allocates
/// several shares of one device for a request. `merge` merges one into a result that is due.
fn include<'r>(
    due: &mut Vec<DeviceResult>,
    results: impl Iterator<Item = &'r DeviceResult>,
    merge: impl Fn(&mut DeviceResult, &DeviceResult),
) {
    let mut included: Vec<bool> = vec![false; due.len()];
    for result in results {
        let is_it = |(d, is_included): (&DeviceResult, &bool)| {
            !is_included && d.device == result.device && d.request == result.request
        };
        let known = due.iter().zip(&included).position(is_it);
        match known {
            Some(at) => {
                merge(&mut due[at], result);
                included[at] = true;
            }
            None => {
                due.push(result.clone());
                included.push(true);
            }
        }
    }
}

/// Raises amounts to those of another list, where these are larger.
pub(crate) fn raise(amounts: &mut NameMap<Quantity>, others: &NameMap<Quantity>) {
    for (name, other) in others.iter() {
        let amount = amounts.entry(name.clone()).or_default();
        *amount = (*amount).max(*other);
    }
}

/// Returns the version as a number: since 1.35 the API allows to compare versions. Text that is not
/// a number counts as new.
pub(crate) fn resource_version(object: &ResourceClaim) -> u64 {
    object.metadata.resource_version.as_deref().and_then(|v| v.parse().ok()).unwrap_or(u64::MAX)
}
