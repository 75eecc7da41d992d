//! Errors of Prepare and Unprepare.

use tessera_api::names::NameError;
use tessera_gpu::MigLibraryError;

use super::{
    claim::ClaimError, execute::StepError, plan::PlanError, source::ReadError, step::GrantTextError,
};
use crate::{
    mps::MpsError,
    state::{attempts::AttemptError, journal::JournalError, library::InstallError},
};

/// Errors of Prepare.
#[derive(Debug, thiserror::Error)]
pub enum PrepareError {
    /// The kubelet sent a malformed name or UID.
    #[error("invalid claim reference from kubelet")]
    Name(#[from] NameError),
    /// The claim could not be read.
    #[error("cannot get ResourceClaim from the API server")]
    Read(#[from] ReadError),
    /// The claim is not allocated to this node, or its allocation is malformed.
    #[error("invalid ResourceClaim allocation")]
    Claim(#[from] ClaimError),
    /// The inventory of GPUs is not known.
    #[error("inventory of GPUs is not available: {reason}")]
    NoHardware {
        /// The reason.
        reason: String,
    },
    /// The claim does not fit beside the claims prepared here.
    #[error("cannot prepare claim on this node")]
    Plan(#[from] PlanError),
    /// The kubelet canceled this Prepare, or unprepared the claim during it.
    #[error("prepare canceled: kubelet canceled the call or unprepared the claim meanwhile")]
    Canceled,
    /// The attempt could not be recorded or checked.
    #[error("cannot record prepare attempt")]
    Attempt(#[from] AttemptError),
    /// The journal could not be read or written.
    #[error("cannot access the journal")]
    Journal(#[from] JournalError),
    /// A share does not fit a grant.
    #[error("cannot encode the grant")]
    Grant(#[from] GrantTextError),
    /// The interceptor library could not be installed.
    #[error("interceptor library is not installed")]
    Library(#[from] InstallError),
    /// The claim shares a GPU by MPS, which is not possible now.
    #[error("cannot share GPU by MPS")]
    Mps(#[source] MpsError),
    /// The claim has a MIG device that cannot be created now.
    #[error("cannot create MIG device")]
    Mig(#[source] MigLibraryError),
    /// A proxy needs the libcuda.so.1 that it replaces.
    #[error(
        "libcuda.so.1 not found in the NVIDIA driver root (required by --intercept=proxy and both)"
    )]
    NoDriverLibrary,
    /// A step failed. Steps before it were undone, or the journal says that they are to be.
    #[error("cannot prepare the node")]
    Step(#[source] StepError),
    /// A defect of the driver.
    #[error("internal error of the driver: see its log")]
    Panicked(#[from] tokio::task::JoinError),
}

impl From<MpsError> for PrepareError {
    fn from(error: MpsError) -> Self {
        Self::Mps(error)
    }
}

impl From<MigLibraryError> for PrepareError {
    fn from(error: MigLibraryError) -> Self {
        Self::Mig(error)
    }
}

impl From<StepError> for PrepareError {
    fn from(error: StepError) -> Self {
        match error {
            StepError::Mps(error) => Self::Mps(error),
            StepError::Mig(error) => Self::Mig(error),
            error => Self::Step(error),
        }
    }
}

impl PrepareError {
    /// Returns true if another attempt may succeed soon.
    pub(super) fn is_transient(&self) -> bool {
        match self {
            Self::Read(error) => error.is_transient(),
            Self::Plan(error) => error.is_transient(),
            Self::Mps(error) => error.is_transient(),
            Self::NoHardware { .. }
            | Self::NoDriverLibrary
            | Self::Journal(JournalError::Busy { .. }) => true,
            _ => false,
        }
    }

    /// Returns true if the claim keeps its record in the journal, as `Started`, until it is
    /// prepared or unprepared: its daemon would not stay requested without the record, and another
    /// claim could take its share.
    pub(super) fn keeps_record(&self) -> bool {
        matches!(self, Self::Mps(error) if error.is_transient())
    }
}

/// Errors of Unprepare. The kubelet calls again after each of them.
#[derive(Debug, thiserror::Error)]
pub enum UnprepareError {
    /// The journal could not be read or written.
    #[error("cannot access the journal")]
    Journal(#[from] JournalError),
    /// Attempts to prepare the claim could not be ended.
    #[error("cannot cancel attempts to prepare the claim")]
    Attempt(#[from] AttemptError),
    /// A step could not be undone.
    #[error("cannot clean up the node")]
    Step(#[from] StepError),
    /// A defect of the driver.
    #[error("internal error of the driver: see its log")]
    Panicked(#[from] tokio::task::JoinError),
}
