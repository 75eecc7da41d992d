//! Decides what preparing a claim takes: pure, from the claim, the hardware and the journal.

use tessera_api::{
    Inventory, Quantity,
    names::{DeviceName, GpuUuid, NameError},
};

use super::claim::{AllocatedClaim, AllocatedShare};
use crate::intercept::Stand;
use crate::state::journal::{ClaimRecord, Journal, ShareRecord, State};

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
    /// It is prepared in another way: deallocated and allocated anew, and not unprepared in between.
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
    /// Its memory is taken.
    #[error(
        "memory of GPU {gpu}: {asked} do not fit beside {taken} of claims prepared before, the GPU has {total}",
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
        /// Bytes of the GPU.
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
    /// Whether it can pass while this claim is waited for: what is taken is given back when the kubelet unprepares another claim.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        match self {
            // More than the whole GPU fits never.
            Self::Memory { asked_bytes, total_bytes, .. } => asked_bytes <= total_bytes,
            Self::Cores { asked, .. } => *asked <= WHOLE_GPU_PERCENT,
            // What it waits for is the claim's own Unprepare, and that ends this Prepare too.
            Self::PreparedDifferently => false,
            Self::NotAGpu { .. } | Self::Gone { .. } => false,
        }
    }
}

const WHOLE_GPU_PERCENT: u32 = 100;

/// Decides.
///
/// The last line of defence against two allocators: whatever the allocation says, the shares prepared on a GPU never add up to
/// more than the GPU.
///
/// # Errors
/// [`PlanError`].
pub fn plan(
    claim: &AllocatedClaim,
    inventory: &Inventory,
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
        fits(claim, &record, share, inventory, journal)?;
    }
    Ok(Decision::Prepare(record))
}

/// The record of a claim, whatever there is on the node: planning a claim begins with it, and a lost journal is rebuilt from it.
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
    })
}

fn fits(
    claim: &AllocatedClaim,
    record: &ClaimRecord,
    share: &ShareRecord,
    inventory: &Inventory,
    journal: &Journal,
) -> Result<(), PlanError> {
    let gpu = &share.gpu;
    let Some(hardware) = inventory.gpu(gpu) else {
        let known = inventory.unpublished.iter().find(|unpublished| unpublished.uuid.as_ref() == Some(gpu));
        let reason =
            known.map_or_else(|| "no such GPU is known".to_owned(), |known| known.reason.to_string());
        return Err(PlanError::Gone { gpu: gpu.clone(), reason });
    };
    // As published: whole MiB.
    let total_bytes = hardware.memory_mib() << 20;
    let own = record.shares.iter().filter(|other| other.gpu == *gpu);
    let (asked_bytes, asked) = own.fold((0_u128, 0), |(memory, cores), own| {
        (memory + u128::from(own.memory_bytes), cores + u32::from(own.cores_percent))
    });
    let (taken_bytes, taken) = journal.taken_by_others(&claim.uid, gpu);
    if asked_bytes + taken_bytes > u128::from(total_bytes) {
        let saturated = |bytes: u128| u64::try_from(bytes).unwrap_or(u64::MAX);
        let (asked_bytes, taken_bytes) = (saturated(asked_bytes), saturated(taken_bytes));
        return Err(PlanError::Memory { gpu: gpu.clone(), asked_bytes, taken_bytes, total_bytes });
    }
    if asked + taken > WHOLE_GPU_PERCENT {
        return Err(PlanError::Cores { gpu: gpu.clone(), asked, taken });
    }
    Ok(())
}

#[cfg(test)]
mod tests;
