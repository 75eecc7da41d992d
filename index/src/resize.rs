//! Changes of the size of a claim's shares: what the GPUs and the quotas have room for (ADR 137).

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::resource::v1::{
    DeviceAllocationConfiguration, DeviceRequestAllocationResult, ResourceClaimStatus,
};
use tessera_allocator::model::{Device, DeviceId, DeviceResult, NameMap};
use tessera_allocator::{QuotaState, ShareSizeError, charges, resized};
use tessera_api::config::{ConfigError, EffectiveConfig, Sharing, effective_config};
use tessera_api::names::capacity::{CORES, MEMORY};
use tessera_api::names::{ClaimName, ClaimUid, DRIVER_NAME, Namespace, QuotaName};
use tessera_api::quantity::Quantity;
use tessera_api::quota::{QuotaAmounts, QuotaResource};
use tessera_api::resize::{ShareSize, SizedShare, resize_results};

use crate::claims::{ClaimEntry, raise};
use crate::convert;
use crate::index::Index;
use crate::stored::StoredClaim;

/// The sizes of a claim's shares on Tessera's GPUs, in the order of the allocation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ResizePlan {
    /// Pool of the shares, which is the node's name.
    pub pool: String,
    /// The sizes that count now.
    pub current: Vec<SizedShare>,
    /// The wanted sizes, rounded as the devices require.
    pub wanted: Vec<SizedShare>,
    /// The larger of both in each amount: what must count while one becomes the other.
    pub most: Vec<SizedShare>,
}

/// Reasons why the shares of a claim cannot have other sizes.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ResizeRefusal {
    /// There is no such claim.
    #[error("there is no ResourceClaim of this name")]
    NoClaim,
    /// The claim has no devices yet.
    #[error("the ResourceClaim is not allocated; its shares change once they exist")]
    NotAllocated,
    /// The request has no share.
    #[error("request `{request}` has no device of this claim; its requests are {requests}")]
    UnknownRequest {
        /// The request.
        request: String,
        /// The requests that have one.
        requests: String,
    },
    /// The device is allocated as a whole.
    #[error("request `{request}` has a whole device, and only shares of a GPU can be changed")]
    NotAShare {
        /// The request.
        request: String,
    },
    /// MPS limits its clients by what they were started with.
    #[error("request `{request}` uses sharing Mps, whose limits are set when a container starts")]
    Mps {
        /// The request.
        request: String,
    },
    /// An exclusive share has all cores of its GPU.
    #[error("request `{request}` is exclusive, so its share has all cores of the GPU")]
    Exclusive {
        /// The request.
        request: String,
    },
    /// The parameters of the claim contradict the size.
    #[error("request `{request}`: the parameters of the claim do not allow it")]
    Config {
        /// The request.
        request: String,
        /// The cause.
        source: ConfigError,
    },
    /// The device is not published now.
    #[error("device {device} is not published now")]
    NotPublished {
        /// The device.
        device: String,
    },
    /// The device does not allow the size.
    #[error("device {device}: {source}")]
    Size {
        /// The device.
        device: String,
        /// The cause.
        source: ShareSizeError,
    },
    /// The other shares of the device leave too little.
    #[error("device {device} has {free} of `{capacity}` for this share, {wanted} is wanted")]
    NoRoom {
        /// The device.
        device: String,
        /// Capacity name.
        capacity: String,
        /// The amount that the share could have.
        free: Quantity,
        /// The wanted amount.
        wanted: Quantity,
    },
    /// A quota leaves too little.
    #[error("GpuQuota `{quota}` leaves {left} of {resource}, {asked} more is wanted")]
    Quota {
        /// The quota.
        quota: QuotaName,
        /// The resource.
        resource: &'static str,
        /// The amount that is left.
        left: Quantity,
        /// The further amount.
        asked: Quantity,
    },
}

impl ResizeRefusal {
    /// Returns true if the same sizes may be possible later, without a change of the claim.
    pub fn may_end(&self) -> bool {
        matches!(
            self,
            Self::NoClaim
                | Self::NotAllocated
                | Self::NotPublished { .. }
                | Self::NoRoom { .. }
                | Self::Quota { .. }
        )
    }

    /// Returns the reason in a condition.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::NoClaim => "NoClaim",
            Self::NotAllocated => "NotAllocated",
            Self::NotPublished { .. } => "DeviceNotPublished",
            Self::NoRoom { .. } => "NoRoom",
            Self::Quota { .. } => "QuotaExceeded",
            Self::UnknownRequest { .. }
            | Self::NotAShare { .. }
            | Self::Mps { .. }
            | Self::Exclusive { .. }
            | Self::Config { .. }
            | Self::Size { .. } => "Invalid",
        }
    }
}

/// One share of a claim, as its allocation and the plans describe it.
struct Share<'a> {
    api: &'a DeviceRequestAllocationResult,
    result: &'a DeviceResult,
}

impl Share<'_> {
    fn sized(&self, consumed: &NameMap<Quantity>) -> SizedShare {
        let amount = |name| consumed.get(name).copied().unwrap_or_default().to_string();
        SizedShare {
            request: self.api.request.clone(),
            pool: self.api.pool.clone(),
            device: self.api.device.clone(),
            share_id: self.api.share_id.clone().unwrap_or_default(),
            memory: amount(MEMORY),
            cores: amount(CORES),
        }
    }
}

impl Index {
    /// Returns the UID of the claim of this name.
    pub fn claim_of_name(&self, namespace: &Namespace, name: &ClaimName) -> Option<&ClaimUid> {
        self.claim_names.get(&(namespace.clone(), name.clone()))
    }

    /// Returns the sizes of a claim's shares, now and with these changes by request, if GPUs and
    /// quotas have room for them.
    ///
    /// # Errors
    /// [`ResizeRefusal`].
    pub fn plan_resize(
        &self,
        claim: &ClaimUid,
        sizes: &BTreeMap<String, ShareSize>,
    ) -> Result<ResizePlan, ResizeRefusal> {
        let entry = self.claims.get(claim).ok_or(ResizeRefusal::NoClaim)?;
        let object = entry.object.as_ref().ok_or(ResizeRefusal::NoClaim)?;
        let observed = entry.observed.as_ref().ok_or(ResizeRefusal::NotAllocated)?;
        let allocation = object.allocation().ok_or(ResizeRefusal::NotAllocated)?.get();
        let devices = allocation.devices.unwrap_or_default();
        let configs = devices.config.unwrap_or_default();
        let results = devices.results.unwrap_or_default();
        let is_ours = |share: &Share<'_>| share.api.driver == DRIVER_NAME && !share.result.admin;
        let pairs = results.iter().zip(observed.results.iter());
        let shares: Vec<Share<'_>> =
            pairs.map(|(api, result)| Share { api, result }).filter(is_ours).collect();
        check_requests(&shares, sizes)?;
        let (mut wanted, mut most) = (Vec::new(), Vec::new());
        for share in &shares {
            let result = match sizes.get(&share.api.request) {
                Some(size) => self.resized_share(share, *size, &configs)?,
                None => share.result.clone(),
            };
            most.push(larger(share.result, &result));
            wanted.push(result);
        }
        let current: Vec<DeviceResult> = shares.iter().map(|share| share.result.clone()).collect();
        self.check_room(&current, &most)?;
        self.check_quotas(entry, &current, &most)?;
        // Whole devices have no size.
        let sized = |results: &[DeviceResult]| -> Vec<SizedShare> {
            let pairs = shares.iter().zip(results).filter(|(_, result)| result.shared);
            pairs.map(|(share, result)| share.sized(&result.consumed)).collect()
        };
        let (current, wanted, most) = (sized(&current), sized(&wanted), sized(&most));
        let pool = current.first().map(|share| share.pool.clone()).unwrap_or_default();
        Ok(ResizePlan { pool, current, wanted, most })
    }

    /// Counts the shares with the larger of these sizes and those that count now, before the sizes
    /// are stored.
    pub fn assume_sizes(&mut self, claim: &ClaimUid, sizes: &[SizedShare]) {
        let Some(entry) = self.claims.get_mut(claim) else { return };
        let stored = entry.object.as_ref().and_then(StoredClaim::sized_allocation);
        let allocation = stored.map(|stored| stored.get());
        let mut status = ResourceClaimStatus { allocation, ..ResourceClaimStatus::default() };
        resize_results(&mut status, sizes);
        let read =
            status.allocation.map(|a| convert::allocated(entry.claim.name.as_str(), &a, &[]));
        // What was read before can be read again.
        entry.assumed = read.and_then(Result::ok);
        let key = (entry.claim.namespace.clone(), entry.claim.name.clone());
        self.update_claim(claim, &key);
    }

    fn resized_share(
        &self,
        share: &Share<'_>,
        size: ShareSize,
        configs: &[DeviceAllocationConfiguration],
    ) -> Result<DeviceResult, ResizeRefusal> {
        let request = || share.api.request.clone();
        let device = || share.api.device.clone();
        if !share.result.shared {
            return Err(ResizeRefusal::NotAShare { request: request() });
        }
        let invalid = |source| ResizeRefusal::Config { request: request(), source };
        let config = effective_config(configs, &share.result.request).map_err(invalid)?;
        if config.sharing == Sharing::Mps {
            return Err(ResizeRefusal::Mps { request: request() });
        }
        let published = self.published_device(&share.result.device);
        let published = published.ok_or(ResizeRefusal::NotPublished { device: device() })?;
        let result = resized(share.result, size, published)
            .map_err(|source| ResizeRefusal::Size { device: device(), source })?;
        check_config(share, &result, &config)?;
        Ok(result)
    }

    /// Checks that the shares fit on their devices beside all others. Amounts that do not grow are
    /// not checked: the device may be overcommitted already.
    fn check_room(
        &self,
        current: &[DeviceResult],
        most: &[DeviceResult],
    ) -> Result<(), ResizeRefusal> {
        for (now, new) in current.iter().zip(most).filter(|(now, new)| now != new) {
            let id: &DeviceId = &now.device;
            let device = || id.device.to_string();
            let published = self.published_device(id);
            let published = published.ok_or(ResizeRefusal::NotPublished { device: device() })?;
            let used = self.usage_with_room(id).unwrap_or_default();
            let after = used.minus(id, current).plus(id, most);
            for (capacity, amount) in new.consumed.iter() {
                let grows = now.consumed.get(capacity).is_none_or(|old| amount > old);
                let all = published.capacity.get(capacity).map(|c| c.value).unwrap_or_default();
                let sum = after.consumed.get(capacity).copied().unwrap_or_default();
                if grows && sum > all {
                    let (capacity, wanted) = (capacity.clone(), *amount);
                    let free = all.saturating_sub(sum.saturating_sub(wanted));
                    let free = if free.is_negative() { Quantity::ZERO } else { free };
                    return Err(ResizeRefusal::NoRoom { device: device(), capacity, free, wanted });
                }
            }
        }
        Ok(())
    }

    /// Checks that the quotas of the namespace have room for what the claim counts more than now.
    fn check_quotas(
        &self,
        entry: &ClaimEntry,
        current: &[DeviceResult],
        most: &[DeviceResult],
    ) -> Result<(), ResizeRefusal> {
        let published: Vec<Option<&Device>> =
            current.iter().map(|result| self.published_device(&result.device)).collect();
        let counted = |results| charges(&entry.claim, results, published.iter().copied());
        let (now, then) = (counted(current), counted(most));
        for standing in self.quotas_of(&entry.claim.namespace) {
            let QuotaState { quota, .. } = standing.state;
            let amounts = |charges| {
                let mut sum = QuotaState { quota: Arc::clone(quota), used: QuotaAmounts::new() };
                sum.add(charges);
                sum.used
            };
            let (now, then) = (amounts(&now), amounts(&then));
            let further = |(resource, amount): (&QuotaResource, &Quantity)| {
                let before = now.get(resource).copied().unwrap_or_default();
                (*amount > before).then(|| (*resource, amount.saturating_sub(before)))
            };
            let further: QuotaAmounts = then.iter().filter_map(further).collect();
            if let Some(shortfall) = standing.state.shortfall(&further) {
                let (quota, resource) = (shortfall.quota, shortfall.resource.name());
                let left = shortfall.hard.saturating_sub(shortfall.used);
                let left = if left.is_negative() { Quantity::ZERO } else { left };
                let asked = shortfall.asked;
                return Err(ResizeRefusal::Quota { quota, resource, left, asked });
            }
        }
        Ok(())
    }
}

/// Checks that each of these requests has a share.
fn check_requests(
    shares: &[Share<'_>],
    sizes: &BTreeMap<String, ShareSize>,
) -> Result<(), ResizeRefusal> {
    let unknown = sizes.keys().find(|name| !shares.iter().any(|s| s.api.request == **name));
    let Some(request) = unknown.cloned() else { return Ok(()) };
    let mut requests: Vec<&str> = shares.iter().map(|share| share.api.request.as_str()).collect();
    requests.dedup();
    Err(ResizeRefusal::UnknownRequest { request, requests: requests.join(", ") })
}

/// Checks a size against the parameters of the claim.
fn check_config(
    share: &Share<'_>,
    new: &DeviceResult,
    config: &EffectiveConfig,
) -> Result<(), ResizeRefusal> {
    let request = || share.api.request.clone();
    let cores = |result: &DeviceResult| result.consumed.get(CORES).copied().unwrap_or_default();
    if config.exclusive && cores(new) != cores(share.result) {
        return Err(ResizeRefusal::Exclusive { request: request() });
    }
    let percent = cores(new).as_exact_i64().and_then(|percent| u64::try_from(percent).ok());
    let checked = config.compute.check_cores(percent.unwrap_or(u64::MAX));
    checked.map_err(|source| ResizeRefusal::Config { request: request(), source })
}

/// Returns the share with the larger of both amounts of each capacity.
fn larger(a: &DeviceResult, b: &DeviceResult) -> DeviceResult {
    let mut most = a.clone();
    raise(&mut most.consumed, &b.consumed);
    most
}
