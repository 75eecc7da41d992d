//! Validates a claim from the API server and extracts the shares to prepare on this node.

use k8s_openapi::api::resource::v1::{
    AllocationResult, DeviceAllocationConfiguration, DeviceRequestAllocationResult, ResourceClaim,
    ResourceClaimConsumerReference,
};
use tessera_api::{
    ConfigError, Quantity,
    config::{
        ComputePriority, EffectiveConfig, Percent, Sharing, allocated_config, effective_config,
    },
    names::{
        ClaimName, ClaimUid, DRIVER_NAME, DeviceName, MigDeviceName, NameError, Namespace, PodName,
        PoolName, RequestName, ShareId, capacity,
    },
    quantity::QuantityError,
    resize::apply_sizes,
    slice::CoresRatio,
};

use crate::state::journal;
use crate::state::journal::{ComputeCap, Reserved};

/// A validated claim with shares of this node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PreparableClaim {
    /// The UID of the claim.
    pub uid: ClaimUid,
    /// The namespace of the claim.
    pub namespace: Namespace,
    /// The name of the claim.
    pub name: ClaimName,
    /// The shares of this node's GPUs.
    pub shares: Vec<AllocatedShare>,
    /// The MIG devices of this node's GPUs.
    pub mig_devices: Vec<AllocatedMigDevice>,
}

/// A result of this driver that is a MIG device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AllocatedMigDevice {
    /// The index in the allocation's results.
    pub index: usize,
    /// The request for which it was allocated.
    pub request: RequestName,
    /// The pool of this node.
    pub pool: PoolName,
    /// The device.
    pub device: MigDeviceName,
}

/// A result of this driver in the allocation of a claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AllocatedShare {
    /// The index in the allocation's results.
    pub index: usize,
    /// The request for which it was allocated.
    pub request: RequestName,
    /// The pool of this node.
    pub pool: PoolName,
    /// The device.
    pub device: DeviceName,
    /// The share of the device.
    pub share_id: Option<ShareId>,
    /// Memory that its containers are held to, in bytes.
    pub memory_bytes: u64,
    /// Compute in percent of the GPU.
    pub cores_percent: u8,
    /// Reservation on the GPU, if that is more.
    pub reserved: Option<Reserved>,
    /// The enforcement of the percentage; `None` if the driver's settings determine it.
    pub compute: Option<ComputeCap>,
    /// The ceiling in percent of the GPU, if it has one of its own.
    pub limit_percent: Option<u8>,
    /// The priority for spare compute.
    pub priority: journal::ComputePriority,
    /// True if its device memory may be moved to the host.
    pub oversubscribe: bool,
    /// True if it shares the GPU by MPS.
    pub mps: bool,
}

/// A pod that has reserved a claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReservingPod {
    /// The namespace, which is that of the claim.
    pub namespace: Namespace,
    /// The name of the pod.
    pub name: PodName,
    /// The UID of the pod.
    pub uid: String,
}

/// Errors of validating a claim. Field paths are those of the ResourceClaim.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ClaimError {
    /// The configuration needs the controller, and kube-scheduler has allocated the claim.
    #[error(
        "request {request}: `{field}` of its GpuConfig needs tessera-controller, and this cluster runs Tessera in mode stock: {instead}, or \
         install Tessera with mode=managed"
    )]
    NeedsController {
        /// The request.
        request: RequestName,
        /// The field.
        field: &'static str,
        /// The advice to the user.
        instead: &'static str,
    },
    /// The claim was deleted and created again.
    #[error(
        "ResourceClaim {namespace}/{name} was replaced: the kubelet requests UID {requested}, the API server has {found}"
    )]
    Replaced {
        /// The namespace of the claim.
        namespace: Namespace,
        /// The name of the claim.
        name: ClaimName,
        /// The requested UID.
        requested: ClaimUid,
        /// The UID in the API server.
        found: String,
    },
    /// The claim is not allocated.
    #[error("ResourceClaim {namespace}/{name} is not allocated (status.allocation is not set)")]
    NotAllocated {
        /// The namespace of the claim.
        namespace: Namespace,
        /// The name of the claim.
        name: ClaimName,
    },
    /// The allocation has no device of this driver.
    #[error("the claim has no device of driver {DRIVER_NAME} in status.allocation.devices.results")]
    NothingOfOurs,
    /// The device is on another node.
    #[error(
        "status.allocation.devices.results[{index}].pool: `{pool}` is not the pool `{own_pool}` of this node: the claim is allocated to another node"
    )]
    OtherPool {
        /// The index of the result.
        index: usize,
        /// The pool of the result.
        pool: String,
        /// The pool of this node.
        own_pool: PoolName,
    },
    /// A name is malformed.
    #[error("status.allocation.devices.results[{index}].{field} is malformed")]
    Name {
        /// The index of the result.
        index: usize,
        /// The field.
        field: &'static str,
        /// The cause.
        source: NameError,
    },
    /// Admin access is not supported.
    #[error(
        "status.allocation.devices.results[{index}].adminAccess: true is not supported in this version"
    )]
    AdminAccess {
        /// The index of the result.
        index: usize,
    },
    /// The consumed capacity is missing.
    #[error(
        "status.allocation.devices.results[{index}].consumedCapacity.{capacity} is not set: enable the feature gate DRAConsumableCapacity in API server and kube-scheduler"
    )]
    NoCapacity {
        /// The index of the result.
        index: usize,
        /// The capacity.
        capacity: &'static str,
    },
    /// The consumed capacity is malformed.
    #[error("status.allocation.devices.results[{index}].consumedCapacity.{capacity} is malformed")]
    Quantity {
        /// The index of the result.
        index: usize,
        /// The capacity.
        capacity: &'static str,
        /// The cause.
        source: QuantityError,
    },
    /// The consumed capacity is out of range.
    #[error(
        "status.allocation.devices.results[{index}].consumedCapacity.{capacity}: {value} is not {expected}"
    )]
    Amount {
        /// The index of the result.
        index: usize,
        /// The capacity.
        capacity: &'static str,
        /// The amount.
        value: Quantity,
        /// The valid range.
        expected: &'static str,
    },
    /// A claim that shares by MPS has several devices; a process can use one control daemon.
    #[error(
        "request {request}: sharing: MPS needs a claim of exactly one GPU, and this one was allocated {devices}: request count 1 in a claim \
         of its own"
    )]
    SeveralByMps {
        /// The request.
        request: RequestName,
        /// The number of allocated devices.
        devices: usize,
    },
    /// The GpuConfig is invalid.
    #[error("invalid GpuConfig of request `{request}`")]
    Config {
        /// The request.
        request: RequestName,
        /// The cause.
        source: ConfigError,
    },
}

impl PreparableClaim {
    /// Validates `claim` for preparation on the node of pool `own_pool`. Its shares have the sizes
    /// that count, which may be others than the allocated ones. Results and parameters of other
    /// drivers are ignored.
    ///
    /// # Errors
    /// [`ClaimError`]: the first error, with its field.
    pub fn check(
        claim: &ResourceClaim,
        uid: &ClaimUid,
        namespace: &Namespace,
        name: &ClaimName,
        own_pool: &PoolName,
    ) -> Result<Self, ClaimError> {
        let found = claim.metadata.uid.as_deref().unwrap_or_default();
        if found != uid.as_str() {
            return Err(ClaimError::Replaced {
                namespace: namespace.clone(),
                name: name.clone(),
                requested: uid.clone(),
                found: found.to_owned(),
            });
        }
        let mut status = claim.status.clone().unwrap_or_default();
        apply_sizes(&mut status);
        let not_allocated =
            || ClaimError::NotAllocated { namespace: namespace.clone(), name: name.clone() };
        let allocation = status.allocation.ok_or_else(not_allocated)?;
        let mig_devices = mig_devices(&allocation, own_pool)?;
        let shares = shares(&allocation, own_pool)?;
        let devices = shares.len() + mig_devices.len();
        if devices == 0 {
            return Err(ClaimError::NothingOfOurs);
        }
        if let Some(share) = shares.iter().find(|share| share.mps).filter(|_| devices > 1) {
            return Err(ClaimError::SeveralByMps { request: share.request.clone(), devices });
        }
        let (uid, namespace, name) = (uid.clone(), namespace.clone(), name.clone());
        Ok(Self { uid, namespace, name, shares, mig_devices })
    }
}

/// Returns the pods that have reserved `claim`. Other consumers are ignored.
#[must_use]
pub fn reserving_pods(claim: &ResourceClaim) -> Vec<ReservingPod> {
    let reserved =
        claim.status.as_ref().and_then(|status| status.reserved_for.as_deref()).unwrap_or_default();
    let namespace = claim.metadata.namespace.as_deref().and_then(|text| Namespace::new(text).ok());
    let pod = |consumer: &ResourceClaimConsumerReference| {
        let is_pod = consumer.resource == "pods"
            && consumer.api_group.as_deref().unwrap_or_default().is_empty();
        let name = PodName::new(&consumer.name).ok().filter(|_| is_pod)?;
        Some(ReservingPod { namespace: namespace.clone()?, name, uid: consumer.uid.clone() })
    };
    reserved.iter().filter_map(pod).collect()
}

/// Checks that the claim uses no feature that needs the controller.
///
/// # Errors
/// [`ClaimError::NeedsController`], for the first field.
pub fn check_without_controller(claim: &ResourceClaim) -> Result<(), ClaimError> {
    let allocation = claim.status.as_ref().and_then(|status| status.allocation.as_ref());
    let Some(allocation) = allocation else { return Ok(()) };
    let configs = configs(allocation);
    for (index, result) in own_results(allocation) {
        if mig_device(result).is_some() {
            continue;
        }
        let request = name(index, "request", RequestName::new(&result.request))?;
        let config = allocated_config(configs, &request)
            .map_err(|source| ClaimError::Config { request: request.clone(), source })?;
        if let Some((field, instead)) = config.needs_controller() {
            return Err(ClaimError::NeedsController { request, field, instead });
        }
    }
    Ok(())
}

fn shares(
    allocation: &AllocationResult,
    own_pool: &PoolName,
) -> Result<Vec<AllocatedShare>, ClaimError> {
    let configs = configs(allocation);
    let mut shares = Vec::new();
    for (index, result) in own_results(allocation) {
        if mig_device(result).is_some() {
            continue;
        }
        let request = name(index, "request", RequestName::new(&result.request))?;
        let config = effective_config(configs, &request)
            .map_err(|source| ClaimError::Config { request: request.clone(), source })?;
        let priority = match config.compute_priority {
            ComputePriority::High => journal::ComputePriority::High,
            ComputePriority::Normal => journal::ComputePriority::Normal,
            ComputePriority::Low => journal::ComputePriority::Low,
        };
        let share = share(index, result, request.clone(), own_pool, config.exclusive)?;
        let share =
            held(share, &config).map_err(|source| ClaimError::Config { request, source })?;
        let (oversubscribe, mps) = (config.oversubscribe, config.sharing == Sharing::Mps);
        let compute = compute_cap(&config, share.cores_percent);
        let limit_percent = config.compute.limit.map(Percent::get);
        shares.push(AllocatedShare {
            compute,
            limit_percent,
            priority,
            oversubscribe,
            mps,
            ..share
        });
    }
    Ok(shares)
}

/// Returns the results of this driver that are MIG devices. A GpuConfig does not apply to them:
/// the hardware holds their limits.
fn mig_devices(
    allocation: &AllocationResult,
    own_pool: &PoolName,
) -> Result<Vec<AllocatedMigDevice>, ClaimError> {
    let mut devices = Vec::new();
    for (index, result) in own_results(allocation) {
        let Some(device) = mig_device(result) else { continue };
        check_result(index, result, own_pool)?;
        let request = name(index, "request", RequestName::new(&result.request))?;
        devices.push(AllocatedMigDevice { index, request, pool: own_pool.clone(), device });
    }
    Ok(devices)
}

/// Returns the MIG device of a result, or `None` if it is a GPU.
fn mig_device(result: &DeviceRequestAllocationResult) -> Option<MigDeviceName> {
    MigDeviceName::of_device(&DeviceName::new(&result.device).ok()?)
}

/// Returns the parameters of the allocation, of all drivers.
fn configs(allocation: &AllocationResult) -> &[DeviceAllocationConfiguration] {
    let devices = allocation.devices.as_ref();
    devices.and_then(|devices| devices.config.as_deref()).unwrap_or_default()
}

/// Returns the results of this driver, with their indexes.
fn own_results(
    allocation: &AllocationResult,
) -> impl Iterator<Item = (usize, &DeviceRequestAllocationResult)> {
    let results = allocation.devices.iter().flat_map(|devices| devices.results.iter().flatten());
    results.enumerate().filter(|(_, result)| result.driver == DRIVER_NAME)
}

/// Checks that the result is one of this node, and no admin access.
fn check_result(
    index: usize,
    result: &DeviceRequestAllocationResult,
    own_pool: &PoolName,
) -> Result<(), ClaimError> {
    if *own_pool != result.pool.as_str() {
        return Err(ClaimError::OtherPool {
            index,
            pool: result.pool.clone(),
            own_pool: own_pool.clone(),
        });
    }
    if result.admin_access == Some(true) {
        return Err(ClaimError::AdminAccess { index });
    }
    Ok(())
}

const WHOLE_GPU_PERCENT: u8 = CoresRatio::WHOLE.percent();

/// Returns the share with the amounts that its containers are held to: `memory.limit`, and
/// `compute.limit` of an exclusive share, whose reservation says nothing about its use.
///
/// # Errors
/// As [`Compute::check_cores`](tessera_api::config::Compute::check_cores).
fn held(share: AllocatedShare, config: &EffectiveConfig) -> Result<AllocatedShare, ConfigError> {
    let limit = config.memory_limit.and_then(|limit| limit.bytes()).unwrap_or(u64::MAX);
    let memory_bytes = share.memory_bytes.min(limit);
    let ceiling = config.compute.limit.filter(|_| config.exclusive).map(Percent::get);
    // An exclusive share reserves all published cores, which may be more than a GPU has.
    let cores_percent = share.cores_percent.min(ceiling.unwrap_or(WHOLE_GPU_PERCENT));
    config.compute.check_cores(cores_percent.into())?;
    let reserved =
        Reserved { memory_bytes: share.memory_bytes, cores_percent: share.cores_percent };
    let is_held_to_less = reserved != Reserved { memory_bytes, cores_percent };
    let reserved = is_held_to_less.then_some(reserved);
    Ok(AllocatedShare { memory_bytes, cores_percent, reserved, ..share })
}

/// Returns the enforcement of a share's `cores`, or `None` if the driver's settings determine it:
/// there are `cores`, and neither a policy nor a limit.
fn compute_cap(config: &EffectiveConfig, cores_percent: u8) -> Option<ComputeCap> {
    match config.compute.policy {
        Some(policy) => Some(policy.into()),
        None if config.compute.limit.is_some() => Some(ComputeCap::Balance),
        None if cores_percent == 0 || config.sharing != Sharing::Intercept => {
            Some(ComputeCap::None)
        }
        None => None,
    }
}

fn share(
    index: usize,
    result: &DeviceRequestAllocationResult,
    request: RequestName,
    own_pool: &PoolName,
    is_exclusive: bool,
) -> Result<AllocatedShare, ClaimError> {
    check_result(index, result, own_pool)?;
    let share_id =
        result.share_id.as_deref().map(|text| name(index, "shareID", ShareId::new(text)));
    let memory = amount(index, result, capacity::MEMORY)?;
    let cores = amount(index, result, capacity::CORES)?;
    let (most_cores, expected_cores) = if is_exclusive {
        (CoresRatio::MAX_PERCENT, "a whole number from 0 to 200")
    } else {
        (WHOLE_GPU_PERCENT, "a whole number from 0 to 100")
    };
    let wrong = |capacity, value, expected| ClaimError::Amount { index, capacity, value, expected };
    Ok(AllocatedShare {
        index,
        request,
        pool: own_pool.clone(),
        device: name(index, "device", DeviceName::new(&result.device))?,
        share_id: share_id.transpose()?,
        memory_bytes: memory
            .bytes()
            .filter(|bytes| *bytes > 0)
            .ok_or_else(|| wrong(capacity::MEMORY, memory, "a positive number of bytes"))?,
        cores_percent: cores
            .as_exact_i64()
            .and_then(|percent| u8::try_from(percent).ok())
            .filter(|percent| *percent <= most_cores)
            .ok_or_else(|| wrong(capacity::CORES, cores, expected_cores))?,
        reserved: None,
        compute: None,
        limit_percent: None,
        priority: journal::ComputePriority::default(),
        oversubscribe: false,
        mps: false,
    })
}

fn amount(
    index: usize,
    result: &DeviceRequestAllocationResult,
    capacity: &'static str,
) -> Result<Quantity, ClaimError> {
    let consumed = result.consumed_capacity.as_ref().and_then(|consumed| consumed.get(capacity));
    let text = &consumed.ok_or(ClaimError::NoCapacity { index, capacity })?.0;
    Quantity::parse(text).map_err(|source| ClaimError::Quantity { index, capacity, source })
}

fn name<T>(
    index: usize,
    field: &'static str,
    parsed: Result<T, NameError>,
) -> Result<T, ClaimError> {
    parsed.map_err(|source| ClaimError::Name { index, field, source })
}

#[cfg(test)]
mod tests;
