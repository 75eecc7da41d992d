//! The part of Prepare and Unprepare that changes the node, under the journal's lock.

use std::{collections::BTreeSet, sync::Arc};

use tessera_api::{
    Inventory,
    names::{ClaimUid, GpuUuid},
};
use tessera_runtime::error_chain::chain;

use super::{
    claim::PreparableClaim,
    error::{PrepareError, UnprepareError},
    execute::{Executor, StepError},
    plan::{Installed, PrepareDecision, PublishedRatios, plan},
    step::{answer, file_steps, steps, undo_steps},
};
use crate::{
    context_memory::ContextMemory,
    fault,
    intercept::{Injection, InterceptMode},
    inventory::HardwareState,
    kubelet::plugin::PreparedDevice,
    state::{
        StatePaths,
        attempts::{self, Attempt},
        journal::{ClaimRecord, ComputeCap, JournalStore, LockedJournal, RecordState},
        library::InstalledLibrary,
    },
};

/// The local node: the journal, files and libraries that Prepare changes.
#[derive(Debug)]
pub struct LocalNode {
    /// The layout of the state directory.
    pub paths: StatePaths,
    /// The prepared claims.
    pub journal: Arc<JournalStore>,
    /// Takes and undoes steps.
    pub executor: Executor,
    /// The interceptor library that containers get.
    pub library: InstalledLibrary,
    /// The injection mode of claims that are prepared from now on.
    pub intercept: InterceptMode,
    /// The memory charged for each CUDA context of claims that are prepared from now on.
    pub context_memory: ContextMemory,
    /// The published part of the GPUs.
    pub published: PublishedRatios,
    /// The enforcement of `cores` of claims without a policy that are prepared from now on.
    pub default_compute: ComputeCap,
}

impl LocalNode {
    /// Returns what claims get that are prepared from now on.
    pub(super) fn installed(&self) -> Installed<'_> {
        Installed { library: &self.library.hash, default_compute: self.default_compute }
    }

    /// Prepares `claim`: plans and acts under the journal's lock.
    ///
    /// # Guarantees
    /// If it fails, the node is unchanged. If the process dies, or a step cannot be undone, the
    /// journal says `Started`, and repair, the next Prepare or Unprepare undoes the steps. A claim
    /// that waits for its MPS control daemon also stays `Started`: its share is not given to
    /// another claim, and the daemon stays requested.
    ///
    /// # Errors
    /// [`PrepareError`].
    pub fn prepare(
        &self,
        claim: &PreparableClaim,
        hardware: &HardwareState,
        attempt: &Attempt,
    ) -> Result<Vec<PreparedDevice>, PrepareError> {
        let mut journal = self.journal.lock()?;
        if !attempt.is_current()? {
            return Err(PrepareError::Canceled);
        }
        let nothing = Inventory::default();
        let inventory = match (hardware, journal.get(&claim.uid)) {
            (HardwareState::Known(inventory), _) => inventory,
            // The answer for a prepared claim does not depend on the hardware.
            (_, Some(record)) if record.state == RecordState::Completed => &nothing,
            (HardwareState::Unknown { reason, .. }, _) => {
                return Err(PrepareError::NoHardware { reason: reason.clone() });
            }
        };
        match plan(claim, inventory, self.published, journal.journal(), &self.installed())? {
            PrepareDecision::Repeat(record) => {
                // Another pod that shares the claim may begin now: it needs the MPS daemon, too.
                let mps_gpus = journal.journal().mps_gpus(None);
                let record = self.ensure_mig_devices(&claim.uid, record, &mut journal)?;
                self.executor.execute(&steps(&claim.uid, &record, mps_gpus, &self.paths)?)?;
                Ok(answer(&claim.uid, &record))
            }
            PrepareDecision::Prepare(record) => {
                let context_bytes = self.context_memory.bytes();
                let record = ClaimRecord { intercept: self.injection()?, context_bytes, ..record };
                self.prepare_new(&claim.uid, &record, attempt, &mut journal)
            }
        }
    }

    /// Prepares a claim that is not prepared yet, as `record` says.
    fn prepare_new(
        &self,
        claim: &ClaimUid,
        record: &ClaimRecord,
        attempt: &Attempt,
        journal: &mut LockedJournal<'_>,
    ) -> Result<Vec<PreparedDevice>, PrepareError> {
        let mut mps_gpus = journal.journal().mps_gpus(Some(claim));
        mps_gpus.extend(record.mps_gpu().cloned());
        // A `Started` record found under the lock was left by a dead process, or waits for its MPS
        // control daemon, which stays requested.
        if let Some(left) = journal.get(claim) {
            self.executor.undo(&undo_steps(claim, left, mps_gpus.clone()))?;
        }
        self.executor.mps().admit(record)?;
        self.library.ensure(&self.paths)?;
        self.check_mig_placements(record)?;
        // Not written again at each attempt to get the daemon: that would wake the journal's
        // watchers.
        if journal.get(claim) != Some(record) {
            journal.put(claim.clone(), record.clone())?;
        }
        fault::point("prepare-started");
        let result = self.complete(claim, record, mps_gpus, attempt, journal);
        if let Err(error) = &result
            && !error.keeps_record()
            && let Err(error) = self.roll_back(claim, journal)
        {
            tracing::error!(
                namespace = %record.namespace, claim = %record.name, uid = %claim,
                error = %chain(&error),
                "cannot roll back failed Prepare; the claim stays in the journal as Started"
            );
        }
        result
    }

    /// Creates the MIG devices, takes the steps and records that all of them were taken.
    fn complete(
        &self,
        claim: &ClaimUid,
        record: &ClaimRecord,
        mps_gpus: BTreeSet<GpuUuid>,
        attempt: &Attempt,
        journal: &mut LockedJournal<'_>,
    ) -> Result<Vec<PreparedDevice>, PrepareError> {
        let record = self.ensure_mig_devices(claim, record.clone(), journal)?;
        self.executor.execute(&steps(claim, &record, mps_gpus, &self.paths)?)?;
        // The steps may have taken seconds.
        if !attempt.is_current()? {
            return Err(PrepareError::Canceled);
        }
        let completed = ClaimRecord { state: RecordState::Completed, ..record };
        let devices = answer(claim, &completed);
        journal.put(claim.clone(), completed)?;
        fault::point("prepare-completed");
        Ok(devices)
    }

    /// Returns the injection of claims that are prepared now.
    ///
    /// # Errors
    /// [`PrepareError::NoDriverLibrary`].
    pub(super) fn injection(&self) -> Result<Injection, PrepareError> {
        let stand = self.intercept.injection(self.executor.base().replaceable());
        stand.ok_or(PrepareError::NoDriverLibrary)
    }

    /// Returns the devices of a prepared claim, after its files were restored, or `None` for a
    /// claim that is not prepared.
    ///
    /// # Errors
    /// [`PrepareError`].
    pub fn repeat(&self, claim: &ClaimUid) -> Result<Option<Vec<PreparedDevice>>, PrepareError> {
        let mut journal = self.journal.lock()?;
        let completed = |record: &&ClaimRecord| record.state == RecordState::Completed;
        let Some(record) = journal.get(claim).filter(completed).cloned() else { return Ok(None) };
        let record = self.restore(claim, record, &mut journal)?;
        // Another pod that shares the claim may begin now: it needs the MPS daemon, too.
        self.executor.mps().request(&journal.journal().mps_gpus(None)).map_err(StepError::from)?;
        Ok(Some(answer(claim, &record)))
    }

    /// Restores the MIG devices and files of a prepared claim. Returns its record, which says the
    /// present instances.
    pub(super) fn restore(
        &self,
        claim: &ClaimUid,
        record: ClaimRecord,
        journal: &mut LockedJournal<'_>,
    ) -> Result<ClaimRecord, PrepareError> {
        let record = self.ensure_mig_devices(claim, record, journal)?;
        self.executor.execute(&file_steps(claim, &record, &self.paths)?)?;
        Ok(record)
    }

    /// Unprepares a claim, with nothing but the journal, the file system and, for MIG devices, the
    /// GPU library. A claim that is not prepared is no error.
    ///
    /// # Errors
    /// [`UnprepareError`]; doing it again is safe.
    pub fn unprepare(&self, claim: &ClaimUid) -> Result<(), UnprepareError> {
        let mut journal = self.journal.lock()?;
        // First: an attempt that waits would otherwise prepare the claim after this.
        attempts::end(&self.paths, claim, &journal)?;
        if journal.get(claim).is_none() {
            return Ok(());
        }
        self.roll_back(claim, &mut journal)?;
        fault::point("unprepare-forgotten");
        Ok(())
    }

    /// Undoes all steps of a claim in the journal, whose record has the instances that were
    /// created, then removes it. The one rollback: of Unprepare, of a Prepare that failed, and of
    /// one whose process died.
    ///
    /// # Errors
    /// [`UnprepareError`]. The claim stays in the journal, so that it is rolled back again.
    pub(super) fn roll_back(
        &self,
        claim: &ClaimUid,
        journal: &mut LockedJournal<'_>,
    ) -> Result<(), UnprepareError> {
        let Some(record) = journal.get(claim) else { return Ok(()) };
        let remaining = journal.journal().mps_gpus(Some(claim));
        self.executor.undo(&undo_steps(claim, record, remaining))?;
        fault::point("unprepare-undone");
        Ok(journal.remove(claim)?)
    }
}
