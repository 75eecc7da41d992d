//! Claims and what they take.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use k8s_openapi::api::resource::v1::{
    AllocationResult, ResourceClaim, ResourceClaimConsumerReference,
};
use tessera_allocator::model::{Claim, DeviceId, DeviceResult, NodeSelector, PodUid, Usage};
use tessera_api::names::{ClaimUid, DRIVER_NAME, NodeName};

use crate::convert::{self, AllocatedClaim, ConvertError};
use crate::multimap;
use crate::scope::Scope;

/// The running sums.
#[derive(Debug, Default)]
pub(crate) struct Books {
    pub(crate) usage: Usage,
    /// Devices of which something has changed and that have not been looked at since.
    pub(crate) touched: BTreeSet<DeviceId>,
    /// The same, for the planner to be told.
    pub(crate) unplanned: BTreeSet<DeviceId>,
    /// The claims that hold each device.
    pub(crate) holders: Holders,
}

/// The claims that hold each device; no entry for a device that no claim holds.
pub(crate) type Holders = BTreeMap<DeviceId, BTreeSet<ClaimUid>>;

/// Adds a claim to the holders of its devices.
pub(crate) fn hold(holders: &mut Holders, claim: &ClaimUid, devices: &[DeviceResult]) {
    for result in devices {
        holders.entry(result.device.clone()).or_default().insert(claim.clone());
    }
}

/// Removes a claim from the holders of these devices.
fn let_go(holders: &mut Holders, claim: &ClaimUid, devices: &[DeviceResult]) {
    for result in devices {
        multimap::remove(holders, &result.device, claim);
    }
}

/// One claim, by UID. It stays after the object is gone for as long as a bound pod refers to it.
#[derive(Debug)]
pub(crate) struct ClaimEntry {
    /// The object as last seen; none once it is deleted.
    pub(crate) object: Option<Arc<ResourceClaim>>,
    /// What it asks for.
    pub(crate) claim: Arc<Claim>,
    /// `resourceVersion` of the object: older news of it is not news.
    pub(crate) version: u64,
    /// What its status says.
    pub(crate) observed: Option<AllocatedClaim>,
    /// What we have decided and not seen yet.
    pub(crate) assumed: Option<AllocatedClaim>,
    /// Bound pods that refer to it, and where they are.
    pub(crate) users: BTreeMap<PodUid, NodeName>,
    /// What is booked for it in the usage.
    booked: Vec<DeviceResult>,
    /// Its scope, and the version of the classes for which it was determined.
    pub(crate) scope: Cell<Option<(u64, Scope)>>,
    /// The object as it was before its allocation changed under the bound pods that use it.
    lost: Option<(AllocatedClaim, Arc<ResourceClaim>)>,
}

impl ClaimEntry {
    pub(crate) fn new(object: &Arc<ResourceClaim>) -> Result<Self, ConvertError> {
        Ok(Self {
            object: None,
            claim: Arc::new(within_limits(without_admin_access(convert::claim(object)?))),
            version: 0,
            observed: None,
            assumed: None,
            users: BTreeMap::new(),
            booked: Vec::new(),
            scope: Cell::new(None),
            lost: None,
        })
    }

    /// Takes over a newer state of the object. `false` = it is no newer than what is known.
    pub(crate) fn observe(&mut self, object: &Arc<ResourceClaim>) -> Result<bool, ConvertError> {
        let version = resource_version(object);
        if version < self.version
            || (version == self.version && version != u64::MAX && self.object.is_some())
        {
            return Ok(false);
        }
        let allocation = object.status.as_ref().and_then(|s| s.allocation.as_ref());
        let name = object.metadata.name.as_deref().unwrap_or_default();
        let observed = allocation.map(|a| convert::allocated(name, a)).transpose()?;
        self.version = version;
        let before = self.object.replace(Arc::clone(object));
        let before = std::mem::replace(&mut self.observed, observed).zip(before);
        if self.lost.is_none() && !self.users.is_empty() {
            self.lost = before;
        }
        if self.lost.as_ref().is_some_and(|(lost, _)| self.observed.as_ref() == Some(lost)) {
            self.lost = None;
        }
        Ok(true)
    }

    /// Nobody is bound with the claim any more.
    pub(crate) fn remove_user(&mut self, pod: &PodUid) {
        self.users.remove(pod);
        if self.users.is_empty() {
            self.lost = None;
        }
    }

    /// The allocation that was there when a pod was bound and was changed since.
    pub(crate) fn lost_allocation(&self) -> Option<(&AllocatedClaim, &AllocationResult)> {
        let (known, object) = self.lost.as_ref()?;
        Some((known, object.status.as_ref()?.allocation.as_ref()?))
    }

    /// Where the claim is or is about to be.
    pub(crate) fn allocation(&self) -> Option<&AllocatedClaim> {
        self.assumed.as_ref().or(self.observed.as_ref())
    }

    pub(crate) fn nodes(&self) -> Option<&NodeSelector> {
        self.allocation().and_then(|a| a.nodes.as_ref())
    }

    /// Whether anything still depends on it.
    pub(crate) fn is_alive(&self) -> bool {
        self.object.is_some() || self.assumed.is_some() || !self.users.is_empty()
    }

    /// Who has reserved it.
    pub(crate) fn reserved_for(&self) -> &[ResourceClaimConsumerReference] {
        let status = self.object.as_ref().and_then(|o| o.status.as_ref());
        status.and_then(|s| s.reserved_for.as_deref()).unwrap_or_default()
    }

    /// When it was allocated, in seconds since the epoch.
    pub(crate) fn allocated_at(&self) -> i64 {
        let status = self.object.as_ref().and_then(|o| o.status.as_ref());
        let allocation = status.and_then(|s| s.allocation.as_ref());
        allocation.and_then(|a| a.allocation_timestamp.as_ref()).map_or(0, |t| t.0.as_second())
    }

    /// Whether it is allocated, nobody has reserved it or is bound with it, and nobody is writing
    /// or deleting it.
    pub(crate) fn is_idle(&self) -> bool {
        self.observed.is_some()
            && self.assumed.is_none()
            && self.users.is_empty()
            && self.reserved_for().is_empty()
            && !self.is_deleting()
    }

    pub(crate) fn is_deleting(&self) -> bool {
        self.object.as_ref().is_none_or(|o| o.metadata.deletion_timestamp.is_some())
    }

    /// What has to count as taken now: both the state that is seen and the one that is assumed, and
    /// while a bound pod uses the claim also what was booked on its node when it came. (Our
    /// pools are named after their nodes.)
    fn due(&self) -> Vec<DeviceResult> {
        let mut due: Vec<DeviceResult> = Vec::new();
        let is_held = |r: &&DeviceResult| {
            self.users.values().any(|n| n.as_str() == r.device.pool.pool.as_str())
        };
        for stated in [&self.observed, &self.assumed].into_iter().flatten() {
            include(&mut due, stated.results.iter());
        }
        include(&mut due, self.booked.iter().filter(is_held));
        due
    }

    /// Brings the usage up to date with this claim.
    pub(crate) fn book(&mut self, books: &mut Books) {
        let due = self.due();
        if due != self.booked {
            books.touched.extend(self.booked.iter().chain(&due).map(|r| r.device.clone()));
            books.unplanned.extend(self.booked.iter().chain(&due).map(|r| r.device.clone()));
            books.usage.remove(&self.booked);
            books.usage.add(&due);
            let_go(&mut books.holders, &self.claim.uid, &self.booked);
            hold(&mut books.holders, &self.claim.uid, &due);
            self.booked = due;
        }
    }

    /// What is booked.
    pub(crate) fn booked(&self) -> &[DeviceResult] {
        &self.booked
    }
}

/// Our driver has no access for administrators yet: a claim that asks for it is told so before
/// anything is allocated.
fn without_admin_access(mut claim: Claim) -> Claim {
    let alternatives = claim.requests.iter_mut().flat_map(|request| &mut request.alternatives);
    for alternative in alternatives.filter(|a| a.admin == Some(true)) {
        alternative.unsupported = Some("adminAccess");
    }
    claim
}

/// The most bytes of selectors that a claim may have. The API server takes 32 requests of 32
/// selectors of 10 KiB, and compiling 10 KiB takes 25 ms of the one thread that plans for
/// everybody.
const MAX_SELECTOR_BYTES: usize = 64 << 10;

/// Refuses a claim with too many bytes of selectors, and drops them: they are never compiled.
fn within_limits(mut claim: Claim) -> Claim {
    if claim.selector_bytes() > MAX_SELECTOR_BYTES {
        for alternative in claim.requests.iter_mut().flat_map(|request| &mut request.alternatives) {
            alternative.selectors.clear();
            alternative.unsupported = Some("a claim with more than 64 KiB of selectors");
        }
    }
    claim
}

/// Adds what is stated of our devices to what is due. The same device for the same request is the
/// same grant, told twice; but told twice in one statement it is two: kube-scheduler gives a
/// request several shares of one device.
fn include<'r>(due: &mut Vec<DeviceResult>, stated: impl Iterator<Item = &'r DeviceResult>) {
    let mut told: Vec<bool> = vec![false; due.len()];
    for result in stated.filter(|r| r.device.pool.driver.as_str() == DRIVER_NAME) {
        let is_it = |(d, told): (&DeviceResult, &bool)| {
            !told && d.device == result.device && d.request == result.request
        };
        let known = due.iter().zip(&told).position(is_it);
        let at = known.unwrap_or(due.len());
        if known.is_none() {
            due.push(result.clone());
            told.push(true);
        }
        told[at] = true;
    }
}

/// The version as a number: since 1.35 the API promises that they can be compared. Text that is no
/// number is taken for new.
pub(crate) fn resource_version(object: &ResourceClaim) -> u64 {
    object.metadata.resource_version.as_deref().and_then(|v| v.parse().ok()).unwrap_or(u64::MAX)
}
