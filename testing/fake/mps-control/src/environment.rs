//! The variables that NVIDIA's program reads, and those of this stand-in.

use std::{
    env,
    path::{Path, PathBuf},
};

/// Where a daemon and its clients meet: <https://docs.nvidia.com/deploy/mps/appendix-tools-and-interface-reference.html>.
pub const PIPE_DIRECTORY: &str = "CUDA_MPS_PIPE_DIRECTORY";
/// Where the daemon writes its log.
pub const LOG_DIRECTORY: &str = "CUDA_MPS_LOG_DIRECTORY";
/// The GPUs of the daemon.
pub const VISIBLE_DEVICES: &str = "CUDA_VISIBLE_DEVICES";
/// How the daemon is to fail.
pub const FAIL: &str = "FAKE_MPS_FAIL";

const DEFAULT_PIPE_DIRECTORY: &str = "/tmp/nvidia-mps";
const DEFAULT_LOG_DIRECTORY: &str = "/var/log/nvidia-mps";

/// How the daemon fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// It ends at once.
    Start,
    /// It answers nobody.
    Hang,
}

/// A failure that there is not.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{FAIL} is `{0}`: it is `start` or `hang`, if it is set")]
pub struct UnknownFailure(String);

/// What the environment says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Environment {
    /// Where a daemon and its clients meet.
    pub pipe: PathBuf,
    /// Where the daemon writes its log.
    pub log: PathBuf,
    /// The GPUs of the daemon; empty where nothing is said.
    pub devices: String,
    /// How the daemon is to fail.
    pub failure: Option<Failure>,
}

impl Environment {
    /// That of this process.
    ///
    /// # Errors
    /// [`UnknownFailure`].
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

    /// The socket that a daemon listens on.
    #[must_use]
    pub fn socket(&self) -> PathBuf {
        socket_in(&self.pipe)
    }

    /// Where the daemon says which process it is.
    #[must_use]
    pub fn pid_file(&self) -> PathBuf {
        self.pipe.join("nvidia-cuda-mps-control.pid")
    }
}

/// The socket of the daemon whose pipe directory that is.
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
