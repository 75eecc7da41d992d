//! An MPS control daemon on a node: NVIDIA's or the fake one.

use std::fs::{self, File};
use std::io;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use tessera_intercept_abi::mps::PIPE_DIRECTORY;

use super::Node;

/// Time limit for a daemon to start, to respond and to exit.
const TIMEOUT: Duration = Duration::from_secs(300);

/// The daemon of one GPU, and the directories that it shares with clients.
pub(crate) struct MpsDaemon<'a> {
    node: &'a Node,
    control: &'a Path,
    process: Child,
    pub(crate) pipes: PathBuf,
    pub(crate) memory: PathBuf,
}

impl<'a> MpsDaemon<'a> {
    /// Starts the program and waits until it responds.
    pub(crate) fn start(node: &'a Node, control: &'a Path, gpu: &str) -> Self {
        let directory = |name: &str| node.path().join(name);
        let (pipes, memory) = (directory("mps"), directory("mps-shm"));
        for made in [&pipes, &memory] {
            fs::create_dir_all(made).expect("made");
        }
        let mut command = node.command("unshare");
        command.args([
            "--mount",
            "sh",
            "-c",
            "mount --bind \"$1\" /dev/shm; shift; exec \"$@\"",
            "sh",
        ]);
        command.arg(&memory).arg(control).arg("-f");
        command.env(PIPE_DIRECTORY, &pipes).env("CUDA_MPS_LOG_DIRECTORY", node.path());
        command.env("CUDA_VISIBLE_DEVICES", gpu);
        // A process group of its own, with the servers that it starts.
        command.stdin(Stdio::null()).stdout(Stdio::null()).process_group(0);
        let process = command.spawn().expect("it starts");
        let daemon = Self { node, control, process, pipes, memory };
        let answers = || {
            daemon
                .ask("get_default_active_thread_percentage")
                .is_ok_and(|output| output.status.success())
        };
        assert!(until(answers), "the MPS control daemon answers");
        daemon
    }

    fn ask(&self, command: &str) -> io::Result<Output> {
        ask_mps(self.node, self.control, &self.pipes, command)
    }
}

impl Drop for MpsDaemon<'_> {
    fn drop(&mut self) {
        let told = self.ask("quit -t 5").is_ok_and(|output| output.status.success());
        if told && until(|| matches!(self.process.try_wait(), Ok(Some(_)))) {
            return;
        }
        // The process was not waited for, so its group ID is not reused.
        let _ =
            Command::new("kill").args(["-9", "--", &format!("-{}", self.process.id())]).output();
        let _ = self.process.wait();
    }
}

/// Sends a command to the daemon at these pipes.
pub(crate) fn ask_mps(
    node: &Node,
    control: &Path,
    pipes: &Path,
    command: &str,
) -> io::Result<Output> {
    let commands = node.path().join("mps-commands");
    fs::write(&commands, format!("{command}\n"))?;
    let mut asking = node.command("timeout");
    asking.arg(TIMEOUT.as_secs().to_string()).arg(control);
    asking.env(PIPE_DIRECTORY, pipes).stdin(File::open(commands)?).output()
}

/// Waits until the condition is true. Returns false after the time limit.
fn until(mut condition: impl FnMut() -> bool) -> bool {
    let end = Instant::now() + TIMEOUT;
    while Instant::now() < end {
        if condition() {
            return true;
        }
        thread::yield_now();
    }
    false
}
