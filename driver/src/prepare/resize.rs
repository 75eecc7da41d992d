//! Changes the sizes of the shares of a prepared claim, in place (ADR 137).

use tessera_api::{
    Quantity,
    names::{ClaimDeviceName, ClaimUid},
};

use super::{
    LocalNode, PrepareError,
    claim::PreparableClaim,
    execute::StepError,
    plan::{self, PlanError},
    step::grant,
};
use crate::{
    fault,
    inventory::HardwareState,
    state::journal::{ClaimRecord, LockedJournal, RecordState, ShareRecord},
    usage::{self, UnreadableLedger},
};

/// Errors of changing the sizes of shares. Nothing is changed.
#[derive(Debug, thiserror::Error)]
pub enum ShareResizeError {
    /// The claim is not prepared, or for another allocation.
    #[error("the claim is not prepared on this node with these shares")]
    NotPrepared,
    /// A size is larger than what counts for the claim.
    #[error("share {share} may not become larger than what the claim counts")]
    NotCounted {
        /// The share.
        share: ClaimDeviceName,
    },
    /// The containers use more memory than the new limit.
    #[error("share {share} uses {used}, more than the new limit of {limit}",
        used = Quantity::from_bytes(*.used_bytes), limit = Quantity::from_bytes(*.limit_bytes))]
    InUse {
        /// The share.
        share: ClaimDeviceName,
        /// Bytes in use.
        used_bytes: u64,
        /// Bytes of the new limit.
        limit_bytes: u64,
    },
    /// The memory in use is not known, so the limit cannot become smaller.
    #[error("cannot read the memory in use of share {share}")]
    Unreadable {
        /// The share.
        share: ClaimDeviceName,
        /// The cause.
        #[source]
        source: UnreadableLedger,
    },
    /// The GPU has no room.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The GPUs are not known yet, or the journal or a grant cannot be written.
    #[error(transparent)]
    Prepare(#[from] PrepareError),
}

impl LocalNode {
    /// Gives the shares of a prepared claim the sizes of `wanted`. `counted` is the same claim with
    /// the sizes that count for it, which no size may exceed.
    ///
    /// # Guarantees
    /// The journal comes first, so that a driver that starts restores grants of the recorded sizes.
    /// If memory in use exceeds a smaller limit after it was written, because a program allocated
    /// meanwhile, the share gets back what counts.
    ///
    /// # Errors
    /// [`ShareResizeError`].
    pub fn resize(
        &self,
        counted: &PreparableClaim,
        wanted: &PreparableClaim,
        hardware: &HardwareState,
    ) -> Result<ClaimRecord, ShareResizeError> {
        let mut journal = self.journal.lock().map_err(PrepareError::from)?;
        let prepared = journal
            .get(&counted.uid)
            .filter(|record| record.state == RecordState::Completed)
            .cloned()
            .ok_or(ShareResizeError::NotPrepared)?;
        let counted = self.with_sizes(&prepared, counted)?;
        let wanted = self.with_sizes(&prepared, wanted)?;
        self.check_sizes(&prepared, &counted, &wanted, hardware, &journal)?;
        // Before it is written, so that a limit that cannot be held is not tried.
        self.check_in_use(&counted, &wanted)?;
        self.write_sizes(&wanted, &mut journal)?;
        if let Err(error) = self.check_in_use(&counted, &wanted) {
            self.write_sizes(&counted, &mut journal)?;
            return Err(error);
        }
        Ok(wanted.record)
    }

    /// Returns the prepared record with the sizes of `claim`.
    fn with_sizes(
        &self,
        prepared: &ClaimRecord,
        claim: &PreparableClaim,
    ) -> Result<SizedRecord, ShareResizeError> {
        let planned = plan::record(claim, &self.installed())?;
        let mut record = prepared.clone();
        for share in &mut record.shares {
            let is_it = |other: &&ShareRecord| {
                (&other.share_id, &other.gpu) == (&share.share_id, &share.gpu)
            };
            let size = planned.shares.iter().find(is_it).ok_or(ShareResizeError::NotPrepared)?;
            // The enforcement stays what it was prepared with, unless there was nothing to enforce.
            if (share.cores_percent == 0) != (size.cores_percent == 0) {
                share.compute = size.compute;
            }
            share.take_size(size);
        }
        Ok(SizedRecord { claim: claim.uid.clone(), record })
    }

    fn check_sizes(
        &self,
        prepared: &ClaimRecord,
        counted: &SizedRecord,
        wanted: &SizedRecord,
        hardware: &HardwareState,
        journal: &LockedJournal<'_>,
    ) -> Result<(), ShareResizeError> {
        let shares = wanted.record.shares.iter().zip(&counted.record.shares);
        for ((share, counted), before) in shares.zip(&prepared.shares) {
            let (asked, most) = (share.reservation(), counted.reservation());
            if asked.memory_bytes > most.memory_bytes || asked.cores_percent > most.cores_percent {
                return Err(ShareResizeError::NotCounted { share: share.id(&wanted.claim) });
            }
            let now = before.reservation();
            if asked.memory_bytes > now.memory_bytes || asked.cores_percent > now.cores_percent {
                let HardwareState::Known(inventory) = hardware else {
                    let reason = "the GPUs are not known".to_owned();
                    return Err(PrepareError::NoHardware { reason }.into());
                };
                let gpu = plan::find(&share.gpu, inventory)?;
                let (claim, journal) = (&wanted.claim, journal.journal());
                plan::fits(claim, &wanted.record, gpu, self.published, journal)?;
            }
        }
        Ok(())
    }

    /// Records the sizes and writes the grants.
    fn write_sizes(
        &self,
        sized: &SizedRecord,
        journal: &mut LockedJournal<'_>,
    ) -> Result<(), PrepareError> {
        let SizedRecord { claim, record } = sized;
        if journal.get(claim) != Some(record) {
            journal.put(claim.clone(), record.clone())?;
            fault::point("resize-recorded");
        }
        // Also without a change: an earlier attempt may have failed here.
        for share in &record.shares {
            let grant = grant(claim, share, record.context_bytes)?;
            let written = self.executor.files().write_grant(&share.id(claim), &grant);
            written.map_err(StepError::from)?;
        }
        fault::point("resize-granted");
        Ok(())
    }

    /// Checks that no share that became smaller than what counts has more in use.
    fn check_in_use(
        &self,
        counted: &SizedRecord,
        wanted: &SizedRecord,
    ) -> Result<(), ShareResizeError> {
        let shares = wanted.record.shares.iter().zip(&counted.record.shares);
        for (share, counted) in shares {
            let limit_bytes = share.memory_bytes;
            if limit_bytes >= counted.memory_bytes {
                continue;
            }
            let id = share.id(&wanted.claim);
            match usage::read_usage(&self.paths.ledger(&id)) {
                Ok(usage) if usage.used_bytes() > limit_bytes => {
                    let used_bytes = usage.used_bytes();
                    return Err(ShareResizeError::InUse { share: id, used_bytes, limit_bytes });
                }
                Ok(_) => {}
                Err(source) => return Err(ShareResizeError::Unreadable { share: id, source }),
            }
        }
        Ok(())
    }
}

/// The record of a prepared claim with certain sizes.
struct SizedRecord {
    claim: ClaimUid,
    record: ClaimRecord,
}
