//! Plans a Prepare from the claim, the hardware and the journal. Pure functions.

use tessera_api::{
    Gpu, Inventory, Quantity,
    config::Sharing,
    gpu::UnpublishedReason,
    names::{ClaimUid, DeviceName, GpuUuid, MigDeviceName, NameError},
    slice::{CoresRatio, MemoryRatio},
};

use super::claim::{AllocatedMigDevice, AllocatedShare, PreparableClaim};
use crate::intercept::Injection;
use crate::state::journal::{
    ClaimRecord, ComputeCap, GpuUsage, Journal, MigDeviceRecord, RecordState, ShareRecord,
};

/// Decision about a claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PrepareDecision {
    /// The claim is prepared with this record: restore its files and repeat the answer.
    Repeat(ClaimRecord),
    /// Prepare the claim with this record.
    Prepare(ClaimRecord),
}

/// Reasons why a claim cannot be prepared now.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// The claim was deallocated and allocated again, and not unprepared in between.
    #[error(
        "the claim is still prepared on this node for an earlier allocation; it is prepared again after the kubelet has unprepared that"
    )]
    PreparedDifferently,
    /// The name of the device is not that of a GPU.
    #[error("device `{device}` is not a GPU")]
    NotAGpu {
        /// The name of the device.
        device: DeviceName,
        /// The cause.
        source: NameError,
    },
    /// The GPU is missing or not shared.
    #[error("GPU {gpu} is not available on this node: {reason}")]
    Gone {
        /// The GPU.
        gpu: GpuUuid,
        /// The reason.
        reason: String,
    },
    /// MIG mode is off.
    #[error(
        "GPU {gpu} is not in MIG mode: enable it (nvidia-smi -i {gpu} -mig 1), or delete the pod, so that its claim is allocated again"
    )]
    NotInMigMode {
        /// The GPU.
        gpu: GpuUuid,
    },
    /// The GPU does not offer the profile at the placement.
    #[error(
        "there is no MIG device `{device}`: delete the pod, so that its claim is allocated again"
    )]
    NoSuchProfile {
        /// The device.
        device: MigDeviceName,
    },
    /// An instance that no claim of this node has is in the way of the MIG device.
    #[error(
        "MIG device `{device}` cannot be created: its memory slices are in use by an instance {profile} that no claim of this node has; destroy it, or delete the pod"
    )]
    MigTaken {
        /// The device.
        device: MigDeviceName,
        /// Profile of the instance.
        profile: String,
    },
    /// Another claim has memory slices of the MIG device.
    #[error(
        "MIG device `{device}` cannot be created: its memory slices are in use by the prepared claim {claim}"
    )]
    MigInUse {
        /// The device.
        device: MigDeviceName,
        /// UID of the other claim.
        claim: ClaimUid,
    },
    /// The GPU is shared with another mode.
    #[error(
        "GPU {gpu} is already in use with sharing {used}; sharing modes cannot be mixed on one GPU"
    )]
    Sharing {
        /// The GPU.
        gpu: GpuUuid,
        /// The present sharing mode.
        used: Sharing,
    },
    /// The memory of the GPU is insufficient.
    #[error(
        "insufficient memory on GPU {gpu}: {asked} requested, {taken} of {total} used by prepared claims{}",
        advice(.asked_bytes > .total_bytes, "--memory-percent"),
        asked = Quantity::from_bytes(*.asked_bytes), total = Quantity::from_bytes(*.total_bytes),
        taken = Quantity::from_bytes(*.taken_bytes)
    )]
    Memory {
        /// The GPU.
        gpu: GpuUuid,
        /// Bytes requested by this claim.
        asked_bytes: u64,
        /// Bytes of other claims.
        taken_bytes: u64,
        /// Bytes that can be allocated.
        total_bytes: u64,
    },
    /// The compute of the GPU is insufficient.
    #[error(
        "insufficient cores on GPU {gpu}: {asked} of {total} percent requested, {taken} percent used by prepared claims{}",
        advice(.asked > .total, "--cores-percent")
    )]
    Cores {
        /// The GPU.
        gpu: GpuUuid,
        /// Percent requested by this claim.
        asked: u32,
        /// Percent of other claims.
        taken: u32,
        /// Percent that can be allocated.
        total: u32,
    },
}

impl PlanError {
    /// Returns true if another attempt may succeed: the kubelet may unprepare another claim
    /// meanwhile.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        match self {
            // More than the whole GPU never fits.
            Self::Memory { asked_bytes, total_bytes, .. } => asked_bytes <= total_bytes,
            Self::Cores { asked, total, .. } => asked <= total,
            // The claim's own Unprepare, which it would wait for, also ends this Prepare.
            Self::PreparedDifferently => false,
            Self::Sharing { .. } | Self::MigInUse { .. } => true,
            Self::NotAGpu { .. }
            | Self::Gone { .. }
            | Self::NotInMigMode { .. }
            | Self::MigTaken { .. }
            | Self::NoSuchProfile { .. } => false,
        }
    }
}

/// Returns an advice if the claim never fits: more was published when it was allocated. `flag` is
/// the driver's, by which more is published.
fn advice(is_too_much: bool, flag: &str) -> String {
    if is_too_much {
        format!(
            ": delete the pod, so that its claim is allocated again, or increase {flag} of the driver"
        )
    } else {
        String::new()
    }
}

/// Published part of each GPU.
#[derive(Clone, Copy, Debug, Default)]
pub struct PublishedRatios {
    /// Memory.
    pub memory: MemoryRatio,
    /// Cores.
    pub cores: CoresRatio,
}

/// Decides how to prepare a claim.
///
/// Guards against two allocators: whatever the allocation says, the prepared shares of a GPU never
/// exceed the GPU, or its published memory if all of them may be oversubscribed, nor its published
/// cores, and all of them use the same sharing mode.
///
/// # Errors
/// [`PlanError`].
pub fn plan(
    claim: &PreparableClaim,
    inventory: &Inventory,
    published: PublishedRatios,
    journal: &Journal,
    installed: &Installed<'_>,
) -> Result<PrepareDecision, PlanError> {
    let record = record(claim, installed)?;
    if let Some(prepared) =
        journal.claims.get(&claim.uid).filter(|prepared| prepared.state == RecordState::Completed)
    {
        let record = with_sizes_of(with_policy_of(record, claim, prepared), prepared);
        // Also if the GPU is missing since: a prepared claim does not change.
        return if prepared.shares == record.shares && has_same_mig_devices(prepared, &record) {
            Ok(PrepareDecision::Repeat(prepared.clone()))
        } else {
            Err(PlanError::PreparedDifferently)
        };
    }
    for share in &record.shares {
        fits(&claim.uid, &record, find(&share.gpu, inventory)?, published, journal)?;
    }
    for device in &record.mig_devices {
        mig_fits(&claim.uid, &device.device, inventory, journal)?;
    }
    Ok(PrepareDecision::Prepare(record))
}

/// Settings of this driver that become part of a record.
#[derive(Clone, Copy, Debug)]
pub struct Installed<'a> {
    /// The hash of the interceptor library.
    pub library: &'a str,
    /// The enforcement of `cores` without a policy.
    pub default_compute: ComputeCap,
}

/// Takes what the driver's settings determined from the record of the prepared claim: the settings
/// may have changed since.
fn with_policy_of(
    mut record: ClaimRecord,
    claim: &PreparableClaim,
    prepared: &ClaimRecord,
) -> ClaimRecord {
    let is_unset = |share: &ShareRecord| {
        claim.shares.iter().any(|asked| asked.index == share.index && asked.compute.is_none())
    };
    for share in record.shares.iter_mut().filter(|share| is_unset(share)) {
        let same = prepared.shares.iter().find(|prepared| prepared.index == share.index);
        share.compute = same.map_or(share.compute, |same| same.compute);
    }
    record
}

/// Takes the sizes of shares from the record of the prepared claim: only [`LocalNode::resize`]
/// changes these while a claim is prepared. The ID of a share names one allocation.
///
/// [`LocalNode::resize`]: super::LocalNode::resize
fn with_sizes_of(mut record: ClaimRecord, prepared: &ClaimRecord) -> ClaimRecord {
    for share in &mut record.shares {
        let is_same = |other: &&ShareRecord| {
            share.share_id.is_some()
                && (&other.share_id, &other.gpu) == (&share.share_id, &share.gpu)
        };
        if let Some(same) = prepared.shares.iter().find(is_same) {
            share.take_size(same);
            share.compute = same.compute;
        }
    }
    record
}

/// Returns the record of a claim, without regard to the hardware. Used to plan a claim and to
/// rebuild a lost journal.
///
/// # Errors
/// [`PlanError::NotAGpu`].
pub fn record(
    claim: &PreparableClaim,
    installed: &Installed<'_>,
) -> Result<ClaimRecord, PlanError> {
    let record_of = |share| record_of(share, installed.default_compute);
    Ok(ClaimRecord {
        namespace: claim.namespace.clone(),
        name: claim.name.clone(),
        state: RecordState::Started,
        library: installed.library.to_owned(),
        intercept: Injection::default(),
        context_bytes: 0,
        shares: claim.shares.iter().map(record_of).collect::<Result<_, _>>()?,
        mig_devices: claim.mig_devices.iter().map(mig_record_of).collect(),
    })
}

fn mig_record_of(device: &AllocatedMigDevice) -> MigDeviceRecord {
    let AllocatedMigDevice { index, request, pool, device } = device.clone();
    let (gpu_instance, compute_instance) = (None, None);
    MigDeviceRecord { index, request, pool, device, gpu_instance, compute_instance }
}

/// Returns true if both records have the same MIG devices, whatever instances these have.
fn has_same_mig_devices(prepared: &ClaimRecord, record: &ClaimRecord) -> bool {
    let identity = |device: &MigDeviceRecord| (device.index, device.device.clone());
    prepared.mig_devices.iter().map(identity).eq(record.mig_devices.iter().map(identity))
}

fn record_of(
    share: &AllocatedShare,
    default_compute: ComputeCap,
) -> Result<ShareRecord, PlanError> {
    let gpu = GpuUuid::from_device_name(&share.device)
        .map_err(|source| PlanError::NotAGpu { device: share.device.clone(), source })?;
    Ok(ShareRecord {
        index: share.index,
        request: share.request.clone(),
        pool: share.pool.clone(),
        device: share.device.clone(),
        share_id: share.share_id.clone(),
        gpu,
        memory_bytes: share.memory_bytes,
        cores_percent: share.cores_percent,
        reserved: share.reserved,
        compute: share.compute.unwrap_or(default_compute),
        limit_percent: share.limit_percent,
        priority: share.priority,
        oversubscribe: share.oversubscribe,
        mps: share.mps,
    })
}

/// Returns the GPU, if it exists and is shared.
///
/// # Errors
/// [`PlanError::Gone`].
pub(super) fn find<'i>(gpu: &GpuUuid, inventory: &'i Inventory) -> Result<&'i Gpu, PlanError> {
    let found = find_any(gpu, inventory)?;
    if found.mig.is_some() {
        let reason = UnpublishedReason::MigEnabled.to_string();
        return Err(PlanError::Gone { gpu: gpu.clone(), reason });
    }
    Ok(found)
}

/// Checks that a MIG device can be created beside the instances that exist, and those of other
/// claims.
///
/// # Errors
/// [`PlanError::Gone`], [`PlanError::NotInMigMode`], [`PlanError::NoSuchProfile`],
/// [`PlanError::MigTaken`] or [`PlanError::MigInUse`].
fn mig_fits(
    claim: &ClaimUid,
    device: &MigDeviceName,
    inventory: &Inventory,
    journal: &Journal,
) -> Result<(), PlanError> {
    let gpu = device.gpu();
    let found = find_any(gpu, inventory)?;
    let Some(mig) = &found.mig else { return Err(PlanError::NotInMigMode { gpu: gpu.clone() }) };
    let Some(placement) = mig.placement(device.profile(), device.start()) else {
        return Err(PlanError::NoSuchProfile { device: device.clone() });
    };
    if let Some(instance) = mig.instance_at(&placement) {
        let profile = mig.profile(instance.profile).map_or("unknown", |known| &known.name);
        return Err(PlanError::MigTaken { device: device.clone(), profile: profile.to_owned() });
    }
    let others =
        journal.mig_devices().filter(|(uid, other)| *uid != claim && other.device.gpu() == gpu);
    for (uid, other) in others {
        let other = mig.placement(other.device.profile(), other.device.start());
        if other.is_some_and(|other| other.overlaps(&placement)) {
            return Err(PlanError::MigInUse { device: device.clone(), claim: uid.clone() });
        }
    }
    Ok(())
}

/// Returns the GPU, if it exists and is published.
///
/// # Errors
/// [`PlanError::Gone`].
fn find_any<'i>(gpu: &GpuUuid, inventory: &'i Inventory) -> Result<&'i Gpu, PlanError> {
    inventory.gpu(gpu).ok_or_else(|| {
        let known =
            inventory.unpublished.iter().find(|unpublished| unpublished.uuid.as_ref() == Some(gpu));
        let reason = known
            .map_or_else(|| "there is no such GPU".to_owned(), |known| known.reason.to_string());
        PlanError::Gone { gpu: gpu.clone(), reason }
    })
}

/// Checks that the shares of the claim fit on a GPU beside those of other claims.
///
/// # Errors
/// [`PlanError::Sharing`], [`PlanError::Memory`] or [`PlanError::Cores`].
pub(super) fn fits(
    claim: &ClaimUid,
    record: &ClaimRecord,
    hardware: &Gpu,
    published: PublishedRatios,
    journal: &Journal,
) -> Result<(), PlanError> {
    let gpu = || hardware.uuid.clone();
    let asked = GpuUsage::on(&hardware.uuid, &record.shares);
    let taken = journal.used_by_others(claim, &hardware.uuid);
    if asked.by_mps && taken.by_intercept {
        return Err(PlanError::Sharing { gpu: gpu(), used: Sharing::Intercept });
    }
    if asked.by_intercept && taken.by_mps {
        return Err(PlanError::Sharing { gpu: gpu(), used: Sharing::Mps });
    }
    // The published memory, in whole MiB, considering this claim's shares.
    let total_bytes = published.memory.of_gpu(hardware, asked.is_fixed || taken.is_fixed) << 20;
    if asked.memory_bytes + taken.memory_bytes > u128::from(total_bytes) {
        let (asked_bytes, taken_bytes) =
            (saturating(asked.memory_bytes), saturating(taken.memory_bytes));
        return Err(PlanError::Memory { gpu: gpu(), asked_bytes, taken_bytes, total_bytes });
    }
    let (asked, taken) = (asked.cores_percent, taken.cores_percent);
    let total = u32::from(published.cores.percent());
    if asked + taken > total {
        return Err(PlanError::Cores { gpu: gpu(), asked, taken, total });
    }
    Ok(())
}

fn saturating(bytes: u128) -> u64 {
    u64::try_from(bytes).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests;
