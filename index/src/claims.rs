//! Claims and what they take.

use std::collections::BTreeSet;
use std::sync::Arc;

use k8s_openapi::api::resource::v1::ResourceClaim;
use tessera_allocator::model::{Claim, DeviceResult, NodeSelector, PodUid, Usage};
use tessera_api::names::DRIVER_NAME;

use crate::convert::{self, AllocatedClaim, ConvertError};

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
    /// Bound pods that refer to it.
    pub(crate) users: BTreeSet<PodUid>,
    /// What is booked for it in the usage.
    booked: Vec<DeviceResult>,
}

impl ClaimEntry {
    pub(crate) fn new(object: &Arc<ResourceClaim>) -> Result<Self, ConvertError> {
        Ok(Self {
            object: None,
            claim: Arc::new(convert::claim(object)?),
            version: 0,
            observed: None,
            assumed: None,
            users: BTreeSet::new(),
            booked: Vec::new(),
        })
    }

    /// Takes over a newer state of the object. `false` = it is older than what is known.
    pub(crate) fn observe(&mut self, object: &Arc<ResourceClaim>) -> Result<bool, ConvertError> {
        let version = resource_version(object);
        if version < self.version {
            return Ok(false);
        }
        let allocation = object.status.as_ref().and_then(|s| s.allocation.as_ref());
        let name = object.metadata.name.as_deref().unwrap_or_default();
        let observed = allocation.map(|a| convert::allocated(name, a)).transpose()?;
        self.version = version;
        self.object = Some(Arc::clone(object));
        self.observed = observed;
        Ok(true)
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

    /// Whether somebody has reserved it.
    pub(crate) fn is_reserved(&self) -> bool {
        let status = self.object.as_ref().and_then(|o| o.status.as_ref());
        status.and_then(|s| s.reserved_for.as_ref()).is_some_and(|r| !r.is_empty())
    }

    pub(crate) fn is_deleting(&self) -> bool {
        self.object.as_ref().is_none_or(|o| o.metadata.deletion_timestamp.is_some())
    }

    /// What has to count as taken now: both the state that is seen and the one that is assumed, and while a bound pod uses
    /// the claim also what was booked when it came.
    fn due(&self) -> Vec<DeviceResult> {
        let mut due: Vec<DeviceResult> = Vec::new();
        let held = if self.users.is_empty() { &[] } else { self.booked.as_slice() };
        let stated = [&self.observed, &self.assumed].into_iter().flatten().flat_map(|a| &a.results);
        for result in stated.chain(held) {
            // The same device for the same request is the same grant, told twice.
            let known = due.iter().any(|d| d.device == result.device && d.request == result.request);
            if !known && result.device.pool.driver.as_str() == DRIVER_NAME {
                due.push(result.clone());
            }
        }
        due
    }

    /// Brings the usage up to date with this claim.
    pub(crate) fn book(&mut self, usage: &mut Usage) {
        let due = self.due();
        if due != self.booked {
            usage.remove(&self.booked);
            usage.add(&due);
            self.booked = due;
        }
    }

    /// What is booked.
    pub(crate) fn booked(&self) -> &[DeviceResult] {
        &self.booked
    }
}

/// The version as a number: since 1.35 the API promises that they can be compared. Text that is no number is taken for new.
pub(crate) fn resource_version(object: &ResourceClaim) -> u64 {
    object.metadata.resource_version.as_deref().and_then(|v| v.parse().ok()).unwrap_or(u64::MAX)
}
