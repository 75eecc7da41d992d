//! Decides what preparing a claim takes: pure, from the claim, the hardware and the journal.

use tessera_api::{
    Gpu, Inventory, Quantity,
    config::Sharing,
    names::{DeviceName, GpuUuid, NameError},
    slice::MemoryRatio,
};

use super::claim::{AllocatedClaim, AllocatedShare};
use crate::intercept::Stand;
use crate::state::journal::{ClaimRecord, Journal, ShareRecord, State, Taken};

/// What is to be done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decision {
    /// The claim is prepared just so: make sure that everything is there, and give the same answer.
    Repeat(ClaimRecord),
    /// Prepare this.
    Prepare(ClaimRecord),
}

/// Why a claim cannot be prepared now.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// It is prepared in another way: deallocated and allocated anew, and not unprepared in
    /// between.
    #[error(
        "the claim is still prepared on this node for an earlier allocation; it is prepared anew once the kubelet has unprepared that"
    )]
    PreparedDifferently,
    /// Not named as our devices are.
    #[error("device `{device}` is no GPU")]
    NotAGpu {
        /// The device.
        device: DeviceName,
        /// Why its name is none of a GPU.
        source: NameError,
    },
    /// The GPU is not there, or not for us.
    #[error("GPU {gpu} is not available on this node: {reason}")]
    Gone {
        /// The GPU.
        gpu: GpuUuid,
        /// Why, as far as it is known.
        reason: String,
    },
    /// It is shared in another way.
    #[error("GPU {gpu} is in use with sharing {used}: it is shared in one way at a time")]
    Sharing {
        /// The GPU.
        gpu: GpuUuid,
        /// How it is shared now.
        used: Sharing,
    },
    /// Its memory is taken.
    #[error(
        "memory of GPU {gpu}: {asked} do not fit beside {taken} of claims prepared before, {total} can be given out{}",
        advice(*.asked_bytes, *.total_bytes),
        asked = Quantity::from_bytes(*.asked_bytes), total = Quantity::from_bytes(*.total_bytes),
        taken = Quantity::from_bytes(*.taken_bytes)
    )]
    Memory {
        /// The GPU.
        gpu: GpuUuid,
        /// Bytes of this claim.
        asked_bytes: u64,
        /// Bytes of the others.
        taken_bytes: u64,
        /// Bytes that can be given out.
        total_bytes: u64,
    },
    /// Its compute is taken.
    #[error(
        "cores of GPU {gpu}: {asked} percent do not fit beside {taken} percent of claims prepared before"
    )]
    Cores {
        /// The GPU.
        gpu: GpuUuid,
        /// Percent of this claim.
        asked: u32,
        /// Percent of the others.
        taken: u32,
    },
}

impl PlanError {
    /// Whether it can pass while this claim is waited for: what is taken is given back when the
    /// kubelet unprepares another claim.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        match self {
            // More than the whole GPU fits never.
            Self::Memory { asked_bytes, total_bytes, .. } => asked_bytes <= total_bytes,
            Self::Cores { asked, .. } => *asked <= WHOLE_GPU_PERCENT,
            // What it waits for is the claim's own Unprepare, and that ends this Prepare too.
            Self::PreparedDifferently => false,
            Self::Sharing { .. } => true,
            Self::NotAGpu { .. } | Self::Gone { .. } => false,
        }
    }
}

/// What to do where it will never fit: it was allocated when more was given out.
fn advice(asked_bytes: u64, total_bytes: u64) -> &'static str {
    if asked_bytes > total_bytes {
        ": delete the pod, so that it is allocated anew, or have the driver give out more again (--memory-percent)"
    } else {
        ""
    }
}

const WHOLE_GPU_PERCENT: u32 = 100;

/// Decides.
///
/// The last line of defence against two allocators: whatever the allocation says, the shares
/// prepared on a GPU never add up to more than the GPU has, or is published of it where all of them
/// may spill to the host; and all of them share it in the same way.
///
/// # Errors
/// [`PlanError`].
pub fn plan(
    claim: &AllocatedClaim,
    inventory: &Inventory,
    ratio: MemoryRatio,
    journal: &Journal,
    library: &str,
) -> Result<Decision, PlanError> {
    let record = record(claim, library)?;
    if let Some(prepared) =
        journal.claims.get(&claim.uid).filter(|prepared| prepared.state == State::Completed)
    {
        // Also where the GPU is gone since: the claim keeps what it has.
        return if prepared.shares == record.shares {
            Ok(Decision::Repeat(prepared.clone()))
        } else {
            Err(PlanError::PreparedDifferently)
        };
    }
    for share in &record.shares {
        fits(claim, &record, find(&share.gpu, inventory)?, ratio, journal)?;
    }
    Ok(Decision::Prepare(record))
}

/// The record of a claim, whatever there is on the node: planning a claim begins with it, and a
/// lost journal is rebuilt from it.
///
/// # Errors
/// [`PlanError::NotAGpu`].
pub fn record(claim: &AllocatedClaim, library: &str) -> Result<ClaimRecord, PlanError> {
    Ok(ClaimRecord {
        namespace: claim.namespace.clone(),
        name: claim.name.clone(),
        state: State::Started,
        library: library.to_owned(),
        intercept: Stand::default(),
        context_bytes: 0,
        shares: claim.shares.iter().map(record_of).collect::<Result<_, _>>()?,
    })
}

fn record_of(share: &AllocatedShare) -> Result<ShareRecord, PlanError> {
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
        compute: share.compute,
        priority: share.priority,
        oversubscribe: share.oversubscribe,
        mps: share.mps,
    })
}

/// The GPU, if it is there and for us.
fn find<'i>(gpu: &GpuUuid, inventory: &'i Inventory) -> Result<&'i Gpu, PlanError> {
    inventory.gpu(gpu).ok_or_else(|| {
        let known =
            inventory.unpublished.iter().find(|unpublished| unpublished.uuid.as_ref() == Some(gpu));
        let reason = known
            .map_or_else(|| "no such GPU is known".to_owned(), |known| known.reason.to_string());
        PlanError::Gone { gpu: gpu.clone(), reason }
    })
}

/// Whether what the claim is to have of a GPU fits beside what others have.
fn fits(
    claim: &AllocatedClaim,
    record: &ClaimRecord,
    hardware: &Gpu,
    ratio: MemoryRatio,
    journal: &Journal,
) -> Result<(), PlanError> {
    let gpu = || hardware.uuid.clone();
    let asked = Taken::on(&hardware.uuid, &record.shares);
    let taken = journal.taken_by_others(&claim.uid, &hardware.uuid);
    if asked.by_mps && taken.by_intercept {
        return Err(PlanError::Sharing { gpu: gpu(), used: Sharing::Intercept });
    }
    if asked.by_intercept && taken.by_mps {
        return Err(PlanError::Sharing { gpu: gpu(), used: Sharing::Mps });
    }
    // As published, and with this claim's shares: whole MiB.
    let total_bytes = ratio.of_gpu(hardware, asked.is_fixed || taken.is_fixed) << 20;
    if asked.memory_bytes + taken.memory_bytes > u128::from(total_bytes) {
        let (asked_bytes, taken_bytes) =
            (saturated(asked.memory_bytes), saturated(taken.memory_bytes));
        return Err(PlanError::Memory { gpu: gpu(), asked_bytes, taken_bytes, total_bytes });
    }
    let (asked, taken) = (asked.cores_percent, taken.cores_percent);
    if asked + taken > WHOLE_GPU_PERCENT {
        return Err(PlanError::Cores { gpu: gpu(), asked, taken });
    }
    Ok(())
}

fn saturated(bytes: u128) -> u64 {
    u64::try_from(bytes).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests;
