//! Requests and checks of MPS control daemons.
//!
//! ```text
//! journal --[Mps::request]--> wanted GPUs --> tessera-mps, which runs the daemons --> status files
//!
//! status files --[Mps::check]--> Prepare of a claim
//!              --[watch]-------> metrics, events
//! ```
//!
//! Daemons are not children of the driver: a restart of the driver would end the CUDA programs on
//! their GPUs (`docs/adr/0090-sharing-by-mps.md`). The requested daemons follow from the journal
//! alone. They are written under its lock, as steps of Prepare and Unprepare.

pub mod watch;

use std::{collections::BTreeSet, io};

use tessera_api::names::GpuUuid;
use tessera_mps_protocol::{
    MpsDaemonState, MpsDaemonStatus, MpsPaths, set_wanted_gpus, status::MpsDaemonStatusError,
    supervisor_is_running, supervisor_pid,
};

use crate::state::{StatePaths, journal::ClaimRecord};

/// Errors of sharing a GPU by MPS.
#[derive(Debug, thiserror::Error)]
pub enum MpsError {
    /// The driver runs without `--mps`.
    #[error(
        "MPS is disabled on this node: install Tessera with mps.enabled=true, or remove `sharing: MPS` from the claim's GpuConfig"
    )]
    Off,
    /// tessera-mps is not running.
    #[error(
        "tessera-mps is not running on this node: see why its pod of the DaemonSet tessera-mps does not run here"
    )]
    NoSupervisor,
    /// The daemon is not ready.
    #[error("MPS control daemon of GPU {gpu} is not ready: {why}")]
    NotReady {
        /// The GPU.
        gpu: GpuUuid,
        /// The reason, as tessera-mps reports it.
        why: String,
    },
    /// The request files could not be read or written.
    #[error("cannot access MPS daemon request files")]
    Io(#[from] io::Error),
    /// The status file could not be read.
    #[error("cannot read MPS daemon status")]
    Status(#[from] MpsDaemonStatusError),
}

impl MpsError {
    /// Returns true if another attempt may succeed without any change by an operator.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        matches!(self, Self::NoSupervisor | Self::NotReady { .. } | Self::Status(_))
    }
}

/// The MPS control daemons of this node, as the driver requests and checks them.
#[derive(Clone, Debug)]
pub struct Mps {
    paths: MpsPaths,
    is_enabled: bool,
}

impl Mps {
    /// Returns the daemons of the state directory of `paths`. New claims may share by MPS if
    /// `is_enabled`.
    #[must_use]
    pub fn new(paths: &StatePaths, is_enabled: bool) -> Self {
        Self { paths: MpsPaths::new(paths.root()), is_enabled }
    }

    /// Requests daemons for exactly these GPUs. Callers hold the journal's lock.
    ///
    /// # Idempotency
    /// Doing it again changes nothing.
    ///
    /// # Errors
    /// [`MpsError::Io`]; doing it again is safe.
    pub fn request(&self, gpus: &BTreeSet<GpuUuid>) -> Result<(), MpsError> {
        // No directory is created, and no error possible, on nodes that never used MPS.
        if gpus.is_empty() && !self.paths.wanted().exists() {
            Ok(())
        } else {
            Ok(set_wanted_gpus(&self.paths, gpus)?)
        }
    }

    /// Checks that a claim may be prepared although it shares by MPS.
    ///
    /// # Errors
    /// [`MpsError::Off`].
    pub fn admit(&self, record: &ClaimRecord) -> Result<(), MpsError> {
        if self.is_enabled || record.mps_gpu().is_none() { Ok(()) } else { Err(MpsError::Off) }
    }

    /// Checks that the daemon of a GPU is ready. A process that starts earlier runs without MPS.
    ///
    /// # Errors
    /// [`MpsError`].
    pub fn check(&self, gpu: &GpuUuid) -> Result<(), MpsError> {
        if !supervisor_is_running(&self.paths)? {
            return Err(MpsError::NoSupervisor);
        }
        let why = match MpsDaemonStatus::read(&self.paths, gpu)? {
            Some(MpsDaemonStatus { state: MpsDaemonState::Ready, .. }) => return Ok(()),
            Some(MpsDaemonStatus { state: MpsDaemonState::Starting, .. }) => {
                "it is starting".to_owned()
            }
            Some(MpsDaemonStatus { message, .. }) => message,
            None => "tessera-mps has not started it yet".to_owned(),
        };
        Err(MpsError::NotReady { gpu: gpu.clone(), why })
    }

    /// Returns the status of the daemon of a GPU, or `None` if there is no readable status.
    #[must_use]
    pub fn status(&self, gpu: &GpuUuid) -> Option<MpsDaemonStatus> {
        MpsDaemonStatus::read(&self.paths, gpu).ok().flatten()
    }

    /// Returns the PID of tessera-mps, or `None` if it is not running.
    #[must_use]
    pub fn supervisor_pid(&self) -> Option<u32> {
        supervisor_pid(&self.paths).ok().flatten()
    }

    /// Returns true if tessera-mps is running.
    #[must_use]
    pub fn has_supervisor(&self) -> bool {
        supervisor_is_running(&self.paths).unwrap_or(false)
    }
}
