//! A control daemon of MPS on a node: NVIDIA's, or the stand-in for it.

use std::fs::{self, File};
use std::io;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use tessera_intercept_abi::mps::PIPE_DIRECTORY;

use super::Node;

/// How long a daemon may take at most to be there, to answer, and to end.
const PATIENCE: Duration = Duration::from_secs(300);

/// The daemon of one GPU, on the node's machine, with what it shares with clients.
pub(crate) struct MpsDaemon<'a> {
    node: &'a Node,
    control: &'a Path,
    process: Child,
    pub(crate) pipes: PathBuf,
    pub(crate) memory: PathBuf,
}

impl<'a> MpsDaemon<'a> {
    /// By that program; answers by the time this returns.
    pub(crate) fn start(node: &'a Node, control: &'a Path, gpu: &str) -> Self {
        let directory = |name: &str| node.path().join(name);
        let (pipes, memory) = (directory("mps"), directory("mps-shm"));
        for made in [&pipes, &memory] {
            fs::create_dir_all(made).expect("made");
        }
        let mut command = node.on_the_machine("unshare");
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
        // A group of its own, with the servers that it starts.
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
        // Nobody has waited for it: the number of its group is nobody else's.
        let _ =
            Command::new("kill").args(["-9", "--", &format!("-{}", self.process.id())]).output();
        let _ = self.process.wait();
    }
}

/// Has a command asked of the daemon at those pipes.
pub(crate) fn ask_mps(
    node: &Node,
    control: &Path,
    pipes: &Path,
    command: &str,
) -> io::Result<Output> {
    let commands = node.path().join("mps-commands");
    fs::write(&commands, format!("{command}\n"))?;
    let mut asking = node.on_the_machine("timeout");
    asking.arg(PATIENCE.as_secs().to_string()).arg(control);
    asking.env(PIPE_DIRECTORY, pipes).stdin(File::open(commands)?).output()
}

/// Whether it comes true in time.
fn until(mut condition: impl FnMut() -> bool) -> bool {
    let end = Instant::now() + PATIENCE;
    while Instant::now() < end {
        if condition() {
            return true;
        }
        thread::yield_now();
    }
    false
}
