//! NVIDIA's program: as the daemon of a GPU, and as the command that speaks to it.

use std::{
    ffi::OsString,
    io,
    path::PathBuf,
    process::{Output, Stdio},
    time::Duration,
};

use tessera_api::names::GpuUuid;
use tokio::{
    io::AsyncWriteExt,
    process::{Child, Command},
    time::timeout,
};

use crate::{
    enter::{ENTER, LOG, PIPE},
    remnants,
};
use tessera_mps_protocol::layout::MpsPaths;

/// Answered by a daemon that serves; changes nothing. NVIDIA's device plugin takes the exit code of
/// the same question for its daemon's health (`AssertHealthy` in
/// cmd/mps-control-daemon/mps/daemon.go of NVIDIA/k8s-device-plugin).
pub(crate) const QUESTION: &str = "get_default_active_thread_percentage\n";
/// Ends the daemon and its servers.
pub(crate) const QUIT: &str = "quit\n";

/// Why a daemon did not answer.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ControlError {
    /// The command cannot be run.
    #[error("the MPS control command cannot be run")]
    Io(#[from] io::Error),
    /// It failed.
    #[error("the MPS control command ended with {status}: {said}")]
    Refused {
        /// How it ended.
        status: std::process::ExitStatus,
        /// What it said.
        said: String,
    },
    /// It took too long.
    #[error("the MPS control daemon did not answer within {0:?}")]
    Silent(Duration),
}

/// How to run NVIDIA's program.
#[derive(Clone, Debug)]
pub(crate) struct Control {
    pub(crate) paths: MpsPaths,
    pub(crate) program: OsString,
    pub(crate) driver_root: PathBuf,
    pub(crate) multi_user: bool,
    /// How long an answer may take.
    pub(crate) patience: Duration,
}

impl Control {
    /// The daemon of a GPU, in the foreground. It and its servers have the mark.
    pub(crate) fn daemon(&self, gpu: &GpuUuid, mark: &str) -> Command {
        let mut command = self.enter(gpu);
        command.arg("-f");
        if self.multi_user {
            command.arg("-M");
        }
        command.env(remnants::MARK, mark).stdin(Stdio::null()).process_group(0);
        command
    }

    /// Says something to the daemon of a GPU, and waits for the answer.
    pub(crate) async fn say(&self, gpu: &GpuUuid, words: &str) -> Result<(), ControlError> {
        let mut command = self.enter(gpu);
        command.kill_on_drop(true);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let output = timeout(self.patience, converse(command.spawn()?, words)).await;
        let Output { status, stdout, stderr } =
            output.map_err(|_| ControlError::Silent(self.patience))??;
        if status.success() {
            return Ok(());
        }
        let said = String::from_utf8_lossy(&[stdout, stderr].concat()).trim().to_owned();
        Err(ControlError::Refused { status, said })
    }

    /// Both are in a namespace of their own, and find each other by what is mounted there.
    fn enter(&self, gpu: &GpuUuid) -> Command {
        let mut command = Command::new("/proc/self/exe");
        command.arg(ENTER).arg("--keeper").arg(std::process::id().to_string());
        command.arg("--root").arg(&self.driver_root);
        command.arg("--pipe").arg(self.paths.pipe(gpu));
        command.arg("--log").arg(self.paths.log(gpu));
        command.arg("--shm").arg(self.paths.shm(gpu));
        command.arg("--").arg(&self.program);
        command.env("CUDA_VISIBLE_DEVICES", gpu.as_str());
        command.env("CUDA_MPS_PIPE_DIRECTORY", PIPE).env("CUDA_MPS_LOG_DIRECTORY", LOG);
        command
    }
}

async fn converse(mut child: Child, words: &str) -> io::Result<Output> {
    if let Some(mut input) = child.stdin.take() {
        // Where it does not read, its end says why.
        let _ = input.write_all(words.as_bytes()).await;
    }
    child.wait_with_output().await
}
