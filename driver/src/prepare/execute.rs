//! Takes steps, and takes them back.

use std::sync::Arc;

use tessera_cdi::{SpecFile, SpecStore, StoreError};

use super::step::{Step, Undo, claim_kind};
use crate::{
    base_spec::BaseSpec,
    fault,
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

    /// The base spec.
    #[must_use]
    pub fn base(&self) -> &BaseSpec {
        &self.base
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

    /// Takes all steps. Those that were taken stay so on an error: of a claim that is prepared,
    /// containers may be running.
    ///
    /// # Errors
    /// The first step's that failed; it may have done a part of its work.
    pub fn execute(&self, steps: &[Step]) -> Result<(), StepError> {
        steps.iter().try_for_each(|step| self.take(step))
    }

    /// Takes one step.
    ///
    /// # Errors
    /// [`StepError`].
    pub fn take(&self, step: &Step) -> Result<(), StepError> {
        match step {
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
                self.specs.write(&SpecFile::of(claim_kind(), claim.as_str()), spec)?;
                fault::point("prepare-claim-spec");
            }
        }
        Ok(())
    }

    /// Takes back steps, in the order given. One that cannot be taken back keeps none after it from
    /// being.
    ///
    /// # Errors
    /// The first that failed; doing all of it again is right.
    pub fn undo(&self, steps: &[Undo]) -> Result<(), StepError> {
        let failed = steps.iter().filter_map(|step| self.take_back(step).err());
        // All of them, not only up to the first.
        failed.collect::<Vec<_>>().into_iter().next().map_or(Ok(()), Err)
    }

    fn take_back(&self, step: &Undo) -> Result<(), StepError> {
        match step {
            Undo::RemoveGrant(share) => {
                self.files.remove_grant(share)?;
                fault::point("unprepare-grant");
            }
            Undo::RemoveLedger(share) => {
                self.files.remove_ledger(share)?;
                fault::point("unprepare-ledger");
            }
            Undo::RemoveClaimSpec(claim) => {
                self.specs.remove(&SpecFile::of(claim_kind(), claim.as_str()))?;
                fault::point("unprepare-claim-spec");
            }
        }
        Ok(())
    }
}
