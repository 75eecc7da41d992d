//! The MPS control daemons of this node, as far as the driver has to do with them.
//!
//! ```text
//! journal --[Mps::want]--> wanted GPUs --> tessera-mps, which runs the daemons --> their statuses
//!                                                                                   |       |
//!                                            Prepare of a claim waits <--[Mps::check]       [watch]--> metrics, events
//! ```
//!
//! Daemons are no children of the driver, or a restart of it would end what runs on their GPUs
//! (`docs/adr/0090-sharing-by-mps.md`). What is wanted follows from the journal alone, and is
//! written under its lock.

pub mod watch;

use std::io;

use tessera_api::names::{ClaimUid, GpuUuid};
use tessera_mps_protocol::{
    MpsPaths, State, Status, keeper_is_alive, keeper_pid, status::StatusError, want,
};

use crate::state::{
    StatePaths,
    journal::{ClaimRecord, Journal},
};

/// Why a claim that shares by MPS cannot be prepared.
#[derive(Debug, thiserror::Error)]
pub enum MpsError {
    /// It is not installed so.
    #[error(
        "this node does not share GPUs by MPS: install Tessera with mps.enabled=true, or leave `sharing: MPS` out of the claim's GpuConfig"
    )]
    Off,
    /// There is no keeper.
    #[error(
        "nobody runs MPS control daemons on this node: see why the pod of the DaemonSet tessera-mps is not running here"
    )]
    NoKeeper,
    /// The daemon is not up.
    #[error("the MPS control daemon of GPU {gpu} is not ready: {why}")]
    NotReady {
        /// The GPU.
        gpu: GpuUuid,
        /// As its keeper says.
        why: String,
    },
    /// The files cannot be written or read.
    #[error("the files by which MPS control daemons are asked for cannot be used")]
    Io(#[from] io::Error),
    /// Its keeper's word on it cannot be read.
    #[error("how the MPS control daemon is cannot be read")]
    Status(#[from] StatusError),
}

impl MpsError {
    /// Whether it may pass by itself.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        matches!(self, Self::NoKeeper | Self::NotReady { .. } | Self::Status(_))
    }
}

/// Asks for control daemons, and looks how they are.
#[derive(Clone, Debug)]
pub struct Mps {
    paths: MpsPaths,
    is_on: bool,
}

impl Mps {
    /// Below the driver's own state; `is_on`: new claims may share by MPS.
    #[must_use]
    pub fn new(paths: &StatePaths, is_on: bool) -> Self {
        Self { paths: MpsPaths::new(paths.root()), is_on }
    }

    /// Has a daemon for each GPU that claims of the journal share by MPS, but for one claim, which
    /// is leaving. Callers hold the journal's lock.
    ///
    /// # Idempotency
    /// Doing it again changes nothing.
    ///
    /// # Errors
    /// What the file system says; doing it again is right.
    pub fn want(&self, journal: &Journal, except: Option<&ClaimUid>) -> io::Result<()> {
        let gpus = journal.gpus_by_mps(except);
        // Where nobody ever shared by MPS nothing is made, and nothing of it can fail.
        if gpus.is_empty() && !self.paths.wanted().exists() {
            Ok(())
        } else {
            want(&self.paths, &gpus)
        }
    }

    /// Whether the claim may be prepared at all, as far as it shares by MPS.
    ///
    /// # Errors
    /// [`MpsError::Off`].
    pub fn admit(&self, record: &ClaimRecord) -> Result<(), MpsError> {
        if self.is_on || record.gpu_by_mps().is_none() { Ok(()) } else { Err(MpsError::Off) }
    }

    /// Whether the daemon that the claim needs is ready: a process that begins before it is would
    /// do without MPS.
    ///
    /// # Errors
    /// [`MpsError`].
    pub fn check(&self, record: &ClaimRecord) -> Result<(), MpsError> {
        let Some(gpu) = record.gpu_by_mps() else { return Ok(()) };
        if !keeper_is_alive(&self.paths)? {
            return Err(MpsError::NoKeeper);
        }
        let why = match Status::read(&self.paths, gpu)? {
            Some(Status { state: State::Ready, .. }) => return Ok(()),
            Some(Status { state: State::Starting, .. }) => "it is starting".to_owned(),
            Some(Status { message, .. }) => message,
            None => "tessera-mps has not begun with it".to_owned(),
        };
        Err(MpsError::NotReady { gpu: gpu.clone(), why })
    }

    /// How the daemon of a GPU is; none where nothing is known of it.
    #[must_use]
    pub fn status(&self, gpu: &GpuUuid) -> Option<Status> {
        Status::read(&self.paths, gpu).ok().flatten()
    }

    /// The process that runs the daemons; none where nobody does.
    #[must_use]
    pub fn keeper_pid(&self) -> Option<u32> {
        keeper_pid(&self.paths).ok().flatten()
    }

    /// Whether anybody runs the daemons.
    #[must_use]
    pub fn has_keeper(&self) -> bool {
        keeper_is_alive(&self.paths).unwrap_or(false)
    }
}
