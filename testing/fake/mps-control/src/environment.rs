//! Environment variables of NVIDIA's program and of this fake.

use std::{
    env,
    path::{Path, PathBuf},
};

/// Directory of the sockets: <https://docs.nvidia.com/deploy/mps/appendix-tools-and-interface-reference.html>.
pub const PIPE_DIRECTORY: &str = "CUDA_MPS_PIPE_DIRECTORY";
/// Directory of the daemon's log.
pub const LOG_DIRECTORY: &str = "CUDA_MPS_LOG_DIRECTORY";
/// GPUs of the daemon.
pub const VISIBLE_DEVICES: &str = "CUDA_VISIBLE_DEVICES";
/// Failure to simulate.
pub const FAIL: &str = "FAKE_MPS_FAIL";

const DEFAULT_PIPE_DIRECTORY: &str = "/tmp/nvidia-mps";
const DEFAULT_LOG_DIRECTORY: &str = "/var/log/nvidia-mps";

/// Failure that the daemon simulates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// The daemon exits at once.
    Start,
    /// The daemon answers no request.
    Hang,
}

/// Error of an unknown failure.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invalid {FAIL} `{0}`: expected `start` or `hang`")]
pub struct UnknownFailure(String);

/// Values of the environment variables.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Environment {
    /// Directory of the sockets.
    pub pipe: PathBuf,
    /// Directory of the daemon's log.
    pub log: PathBuf,
    /// GPUs of the daemon; empty if the variable is not set.
    pub devices: String,
    /// Failure to simulate.
    pub failure: Option<Failure>,
}

impl Environment {
    /// Reads the environment of this process.
    ///
    /// # Errors
    /// Returns [`UnknownFailure`] if the variable for the failure is invalid.
    pub fn of_this_process() -> Result<Self, UnknownFailure> {
        let directory = |name, default| {
            env::var_os(name)
                .filter(|value| !value.is_empty())
                .map_or_else(|| PathBuf::from(default), PathBuf::from)
        };
        Ok(Self {
            pipe: directory(PIPE_DIRECTORY, DEFAULT_PIPE_DIRECTORY),
            log: directory(LOG_DIRECTORY, DEFAULT_LOG_DIRECTORY),
            devices: env::var(VISIBLE_DEVICES).unwrap_or_default(),
            failure: failure(&env::var(FAIL).unwrap_or_default())?,
        })
    }

    /// Returns the path of the daemon's socket.
    #[must_use]
    pub fn socket(&self) -> PathBuf {
        socket_in(&self.pipe)
    }

    /// Returns the path of the daemon's PID file.
    #[must_use]
    pub fn pid_file(&self) -> PathBuf {
        self.pipe.join("nvidia-cuda-mps-control.pid")
    }
}

/// Returns the socket of the daemon with this pipe directory.
pub(crate) fn socket_in(pipe: &Path) -> PathBuf {
    pipe.join("control")
}

fn failure(text: &str) -> Result<Option<Failure>, UnknownFailure> {
    match text {
        "" => Ok(None),
        "start" => Ok(Some(Failure::Start)),
        "hang" => Ok(Some(Failure::Hang)),
        other => Err(UnknownFailure(other.to_owned())),
    }
}
