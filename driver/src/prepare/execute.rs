//! Takes steps, and takes them back.

use std::sync::Arc;

use tessera_cdi::{SpecFile, SpecStore, StoreError};

use super::step::{Step, Undo, claim_kind};
use crate::{
    base_spec::BaseSpec,
    state::shares::{ShareError, ShareFiles},
};

/// Why a step could not be taken or taken back.
#[derive(Debug, thiserror::Error)]
pub enum StepError {
    /// A grant or a ledger.
    #[error("a share's files could not be changed")]
    Share(#[from] ShareError),
    /// A CDI spec.
    #[error("a CDI spec could not be changed")]
    Spec(#[from] StoreError),
}

/// Takes steps. Callers hold the journal's lock.
#[derive(Clone, Debug)]
pub struct Executor {
    files: ShareFiles,
    specs: SpecStore,
    base: Arc<BaseSpec>,
}

impl Executor {
    /// Works on these files.
    #[must_use]
    pub fn new(files: ShareFiles, specs: SpecStore, base: Arc<BaseSpec>) -> Self {
        Self { files, specs, base }
    }

    /// The files of shares.
    #[must_use]
    pub fn files(&self) -> &ShareFiles {
        &self.files
    }

    /// The CDI specs.
    #[must_use]
    pub fn specs(&self) -> &SpecStore {
        &self.specs
    }

    /// Takes all steps, or none: on an error those that were taken are taken back.
    ///
    /// # Errors
    /// The first step's that failed. Should taking back fail too, that is logged, and is done again at the next start.
    pub fn execute(&self, steps: &[Step]) -> Result<(), StepError> {
        for (done, step) in steps.iter().enumerate() {
            if let Err(error) = self.take(step) {
                // The failed step too: it may have done a part of its work.
                self.take_back(&steps[..=done]);
                return Err(error);
            }
        }
        Ok(())
    }

    /// Takes all steps of a claim that is prepared, so that what is missing is made again. Nothing is taken back on an error: its
    /// containers may be running.
    ///
    /// # Errors
    /// The first step's that failed.
    pub fn execute_again(&self, steps: &[Step]) -> Result<(), StepError> {
        steps.iter().try_for_each(|step| self.take(step))
    }

    /// Takes one step.
    ///
    /// # Errors
    /// [`StepError`].
    pub fn take(&self, step: &Step) -> Result<(), StepError> {
        match step {
            Step::EnsureBaseSpec => self.base.ensure()?,
            Step::WriteGrant { share, grant } => self.files.write_grant(share, grant)?,
            Step::MakeLedger { share } => self.files.make_ledger(share)?,
            Step::WriteClaimSpec { claim, spec } => {
                self.specs.write(&SpecFile::of(claim_kind(), claim.as_str()), spec)?;
            }
        }
        Ok(())
    }

    /// Takes back steps, in the order given.
    ///
    /// # Errors
    /// [`StepError`]; what came before it is done, and doing all of it again is right.
    pub fn undo(&self, steps: &[Undo]) -> Result<(), StepError> {
        for step in steps {
            match step {
                Undo::RemoveGrant(share) => self.files.remove_grant(share)?,
                Undo::RemoveLedger(share) => self.files.remove_ledger(share)?,
                Undo::RemoveClaimSpec(claim) => {
                    self.specs.remove(&SpecFile::of(claim_kind(), claim.as_str()))?;
                }
            }
        }
        Ok(())
    }

    fn take_back(&self, steps: &[Step]) {
        let undo: Vec<_> = steps.iter().rev().filter_map(Step::inverse).collect();
        for step in undo {
            if let Err(error) = self.undo(std::slice::from_ref(&step)) {
                tracing::error!(?step, error = %crate::report::chain(&error), "a step could not be taken back");
            }
        }
    }
}
