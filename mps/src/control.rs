//! Commands that run NVIDIA's MPS control program, as a GPU's daemon or as its client.

use std::{
    ffi::OsString,
    io,
    path::PathBuf,
    process::{Output, Stdio},
    time::Duration,
};

use tessera_api::names::GpuUuid;
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWriteExt},
    process::{Child, Command},
    time::timeout,
};

use crate::{
    cleanup,
    enter::{ENTER, LOG, PIPE},
};
use tessera_mps_protocol::layout::MpsPaths;

/// Command that a serving daemon answers; it changes nothing. NVIDIA's device plugin reads the
/// health of its daemon from the exit code of the same command (`AssertHealthy` in
/// cmd/mps-control-daemon/mps/daemon.go of NVIDIA/k8s-device-plugin).
pub(crate) const HEALTH_CHECK: &str = "get_default_active_thread_percentage\n";
/// Command that stops the daemon and its servers.
pub(crate) const QUIT: &str = "quit\n";

/// Bytes read of each output of the control program. An answer has less than 100.
const MAX_OUTPUT: u64 = 64 << 10;

/// Error of a command that was sent to a daemon.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ControlError {
    /// The program cannot be executed.
    #[error("cannot execute the MPS control program")]
    Io(#[from] io::Error),
    /// The program exited with an error.
    #[error("the MPS control program exited with {status}: {output}")]
    Refused {
        /// Exit status.
        status: std::process::ExitStatus,
        /// Standard output and standard error.
        output: String,
    },
    /// The daemon did not answer in time.
    #[error("the MPS control daemon did not answer within {0:?}")]
    Timeout(Duration),
}

/// Configuration of NVIDIA's program.
#[derive(Clone, Debug)]
pub(crate) struct Control {
    pub(crate) paths: MpsPaths,
    pub(crate) program: OsString,
    pub(crate) driver_root: PathBuf,
    pub(crate) multi_user: bool,
    /// Timeout of an answer.
    pub(crate) answer_timeout: Duration,
}

impl Control {
    /// Returns the command of a GPU's daemon in the foreground. The daemon and its servers inherit
    /// the mark.
    pub(crate) fn daemon(&self, gpu: &GpuUuid, mark: &str) -> Command {
        let mut command = self.enter(gpu);
        command.arg("-f");
        if self.multi_user {
            command.arg("-M");
        }
        command.env(cleanup::MARK, mark).stdin(Stdio::null()).process_group(0);
        command
    }

    /// Sends a command to the daemon of a GPU and waits for the answer.
    pub(crate) async fn send(&self, gpu: &GpuUuid, text: &str) -> Result<(), ControlError> {
        let mut command = self.enter(gpu);
        command.kill_on_drop(true);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let output = timeout(self.answer_timeout, run_with_input(command.spawn()?, text)).await;
        let Output { status, stdout, stderr } =
            output.map_err(|_| ControlError::Timeout(self.answer_timeout))??;
        if status.success() {
            return Ok(());
        }
        let output = String::from_utf8_lossy(&[stdout, stderr].concat()).trim().to_owned();
        Err(ControlError::Refused { status, output })
    }

    /// Daemon and client each run in a mount namespace of their own and meet at the mounted paths.
    fn enter(&self, gpu: &GpuUuid) -> Command {
        let mut command = Command::new("/proc/self/exe");
        command.arg(ENTER).arg("--supervisor").arg(std::process::id().to_string());
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

async fn run_with_input(mut child: Child, text: &str) -> io::Result<Output> {
    if let Some(mut input) = child.stdin.take() {
        // A program that does not read its input explains why when it exits.
        let _ = input.write_all(text.as_bytes()).await;
    }
    // The program prints what it reads from a socket that tenants can replace. It is ended by
    // SIGPIPE if it prints more.
    let stdout = read_start(child.stdout.take());
    let stderr = read_start(child.stderr.take());
    let (stdout, stderr) = tokio::try_join!(stdout, stderr)?;
    Ok(Output { status: child.wait().await?, stdout, stderr })
}

/// Returns the first bytes of an output, at most [`MAX_OUTPUT`].
async fn read_start(output: Option<impl AsyncRead + Unpin>) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    if let Some(output) = output {
        output.take(MAX_OUTPUT).read_to_end(&mut bytes).await?;
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn endless_output_is_cut() {
        let mut command = Command::new("sh");
        command.args(["-c", "cat; cat /dev/zero"]).kill_on_drop(true);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let output = run_with_input(command.spawn().expect("sh"), "quit\n").await.expect("read");
        assert_eq!(output.stdout.len() as u64, MAX_OUTPUT);
        assert!(output.stdout.starts_with(b"quit\n\0") && !output.status.success());
    }
}
