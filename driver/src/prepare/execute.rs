//! Executes and undoes steps.

use std::sync::Arc;

use tessera_cdi::{SpecFile, SpecStore, StoreError};
use tessera_gpu::{MigLibrary, MigLibraryError};

use super::mig;
use super::step::{Step, UndoStep, claim_kind};
use crate::{
    base_spec::BaseSpec,
    fault,
    mps::{Mps, MpsError},
    state::shares::{ShareError, ShareFiles},
};

/// Errors of taking or undoing a step.
#[derive(Debug, thiserror::Error)]
pub enum StepError {
    /// A grant or ledger could not be changed.
    #[error("cannot change files of a share")]
    Share(#[from] ShareError),
    /// A CDI spec could not be changed.
    #[error("cannot change CDI spec")]
    Spec(#[from] StoreError),
    /// An MPS control daemon could not be requested or released, or is not ready.
    #[error("cannot share GPU by MPS")]
    Mps(#[from] MpsError),
    /// The instances of a MIG device could not be created or destroyed.
    #[error("cannot change MIG device")]
    Mig(#[from] MigLibraryError),
}

/// Takes and undoes steps. Callers hold the journal's lock.
#[derive(Clone)]
pub struct Executor {
    files: ShareFiles,
    specs: SpecStore,
    base: Arc<BaseSpec>,
    mps: Mps,
    mig: Arc<dyn MigLibrary>,
}

impl std::fmt::Debug for Executor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Executor").field("files", &self.files).finish_non_exhaustive()
    }
}

impl Executor {
    /// Returns an executor that changes these files and MIG devices.
    #[must_use]
    pub fn new(
        files: ShareFiles,
        specs: SpecStore,
        base: Arc<BaseSpec>,
        mps: Mps,
        mig: Arc<dyn MigLibrary>,
    ) -> Self {
        Self { files, specs, base, mps, mig }
    }

    /// Returns the library that creates MIG devices.
    #[must_use]
    pub fn mig(&self) -> &dyn MigLibrary {
        &*self.mig
    }

    /// Returns the base spec.
    #[must_use]
    pub fn base(&self) -> &BaseSpec {
        &self.base
    }

    /// Returns the files of shares.
    #[must_use]
    pub fn files(&self) -> &ShareFiles {
        &self.files
    }

    /// Returns the CDI specs.
    #[must_use]
    pub fn specs(&self) -> &SpecStore {
        &self.specs
    }

    /// Returns the MPS control daemons.
    #[must_use]
    pub fn mps(&self) -> &Mps {
        &self.mps
    }

    /// Takes steps in order, up to the first that fails. Steps before it are not undone: containers
    /// of a claim that is already prepared may be running.
    ///
    /// # Errors
    /// The error of the step that failed. The step may be executed in part.
    pub fn execute(&self, steps: &[Step]) -> Result<(), StepError> {
        steps.iter().try_for_each(|step| self.take(step))
    }

    /// Takes one step.
    ///
    /// # Errors
    /// [`StepError`].
    pub fn take(&self, step: &Step) -> Result<(), StepError> {
        match step {
            Step::RequestMpsDaemons { gpus } => {
                self.mps.request(gpus)?;
                fault::point("prepare-mps-wanted");
            }
            // Without a fault point: it changes nothing.
            Step::AwaitMpsDaemon { gpu } => self.mps.check(gpu)?,
            Step::EnsureBaseSpec => {
                self.base.ensure()?;
                fault::point("prepare-base-spec");
            }
            Step::WriteGrant { share, grant } => {
                self.files.write_grant(share, grant)?;
                fault::point("prepare-grant");
            }
            Step::MakeLedger { share } => {
                self.files.make_ledger(share)?;
                fault::point("prepare-ledger");
            }
            Step::WriteClaimSpec { claim, spec } => {
                self.specs.write(&SpecFile::for_id(claim_kind(), claim.as_str()), spec)?;
                fault::point("prepare-claim-spec");
            }
        }
        Ok(())
    }

    /// Undoes steps in order. Steps after one that fails are undone nevertheless, except the
    /// release of the MPS control daemon.
    ///
    /// # Errors
    /// The first error. Undo is idempotent.
    pub fn undo(&self, steps: &[UndoStep]) -> Result<(), StepError> {
        let mut first = None;
        for step in steps {
            if first.is_some() && matches!(step, UndoStep::ReleaseMpsDaemon { .. }) {
                continue;
            }
            if let Err(error) = self.undo_one(step) {
                first.get_or_insert(error);
            }
        }
        first.map_or(Ok(()), Err)
    }

    fn undo_one(&self, step: &UndoStep) -> Result<(), StepError> {
        match step {
            UndoStep::RemoveGrant(share) => {
                self.files.remove_grant(share)?;
                fault::point("unprepare-grant");
            }
            UndoStep::RemoveLedger(share) => {
                self.files.remove_ledger(share)?;
                fault::point("unprepare-ledger");
            }
            UndoStep::RemoveClaimSpec(claim) => {
                self.specs.remove(&SpecFile::for_id(claim_kind(), claim.as_str()))?;
                fault::point("unprepare-claim-spec");
            }
            // Without a fault point: tests/mig.rs interrupts each call of the library.
            UndoStep::DestroyMigDevice(record) => mig::destroy(self.mig(), record)?,
            UndoStep::ReleaseMpsDaemon { remaining } => {
                self.mps.request(remaining)?;
                fault::point("unprepare-mps-released");
            }
        }
        Ok(())
    }
}
