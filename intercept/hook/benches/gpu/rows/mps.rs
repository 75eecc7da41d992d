//! Sharing by MPS (ADR 90), where NVIDIA's control daemon is.

use std::fs::{self, File};
use std::io;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use tessera_intercept_abi::mps::{ACTIVE_THREAD_PERCENTAGE, DIR, PIPE_DIRECTORY};
use tessera_intercept_abi::{ComputePolicy, Grant};

use super::programs::MPS_CONTROL;
use super::{Kind, PATIENCE, Rig, absent, judged, mib, number, part};
use crate::container::{self, Container, MIB, Mode, NodeShare, Running};

pub(super) const CLIENTS: Kind = Kind {
    rows: &[
        ("MPS: multiprocessors that a client of 25 % sees", "a quarter of the GPU's"),
        ("MPS: small kernels of two clients of 50 %, together", "1.5 times those by turns at least"),
        ("MPS: filled to the client's own limit of memory, as it sees it", ""),
        ("MPS: in use on the GPU by the server and one client", ""),
    ],
    find: |rig| match &rig.programs.mps_control {
        Some(control) => clients(rig, control).into(),
        None => vec![absent(MPS_CONTROL); 4],
    },
};

pub(super) const NOBODY: Kind = Kind {
    rows: &[("MPS: asked after a daemon that there is not", "an error")],
    find: |rig| {
        let control = rig.programs.mps_control.as_ref();
        vec![control.map_or_else(|| absent(MPS_CONTROL), |control| asked_of_nobody(rig, control))]
    },
};

/// How long a daemon may take to be there, to answer, and to end.
const BRIEFLY: Duration = Duration::from_secs(30);

/// A control daemon of the GPU, on the node's machine, with what it shares with clients.
struct Daemon<'a> {
    rig: &'a Rig<'a>,
    control: &'a Path,
    process: Child,
    pipes: PathBuf,
    memory: PathBuf,
}

impl<'a> Daemon<'a> {
    fn start(rig: &'a Rig<'a>, control: &'a Path) -> Self {
        let directory = |name: &str| rig.node.path().join(name);
        let (pipes, memory) = (directory("mps"), directory("mps-shm"));
        for made in [&pipes, &memory] {
            fs::create_dir_all(made).expect("made");
        }
        let mut command = rig.node.on_the_machine("unshare");
        command.args(["--mount", "sh", "-c", "mount --bind \"$1\" /dev/shm; shift; exec \"$@\"", "sh"]);
        command.arg(&memory).arg(control).arg("-f");
        command.env(PIPE_DIRECTORY, &pipes).env("CUDA_MPS_LOG_DIRECTORY", rig.node.path());
        command.env("CUDA_VISIBLE_DEVICES", rig.gpu.uuid.to_string());
        // A group of its own, with the servers that it starts.
        command.stdin(Stdio::null()).stdout(Stdio::null()).process_group(0);
        let process = command.spawn().expect("it starts");
        let daemon = Self { rig, control, process, pipes, memory };
        let answers =
            || daemon.ask("get_default_active_thread_percentage").is_ok_and(|output| output.status.success());
        assert!(until(answers), "the MPS control daemon answers");
        daemon
    }

    fn ask(&self, command: &str) -> io::Result<Output> {
        ask(self.rig, self.control, &self.pipes, command)
    }

    /// A container that is a client of so many percent, as the driver makes it. Clients that a daemon does not take may wait for ever.
    fn client(&self, share: &NodeShare) -> Container<'_> {
        let percentage = share.grant.cores_percent.to_string();
        let memory = format!("0={}M", share.grant.memory_limit_bytes / MIB);
        let variables = [
            (PIPE_DIRECTORY, DIR),
            (ACTIVE_THREAD_PERCENTAGE, percentage.as_str()),
            ("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", memory.as_str()),
        ];
        let container = self.rig.contain(Mode::Preload, share).with_shared_memory(&self.memory);
        container.by_mps(&self.pipes, &variables).for_at_most(PATIENCE)
    }
}

impl Drop for Daemon<'_> {
    fn drop(&mut self) {
        let told = self.ask("quit -t 5").is_ok_and(|output| output.status.success());
        if told && until(|| matches!(self.process.try_wait(), Ok(Some(_)))) {
            return;
        }
        // Nobody has waited for it: the number of its group is nobody else's.
        let _ = Command::new("kill").args(["-9", "--", &format!("-{}", self.process.id())]).output();
        let _ = self.process.wait();
    }
}

/// Whether it comes true in time.
fn until(mut condition: impl FnMut() -> bool) -> bool {
    let end = Instant::now() + BRIEFLY;
    while Instant::now() < end {
        if condition() {
            return true;
        }
        thread::yield_now();
    }
    false
}

/// Has a command asked of the daemon at those pipes.
fn ask(rig: &Rig<'_>, control: &Path, pipes: &Path, command: &str) -> io::Result<Output> {
    let commands = rig.node.path().join("mps-commands");
    fs::write(&commands, format!("{command}\n"))?;
    let mut asking = rig.node.on_the_machine("timeout");
    asking.arg(BRIEFLY.as_secs().to_string()).arg(control);
    asking.env(PIPE_DIRECTORY, pipes).stdin(File::open(commands)?).output()
}

/// A share by MPS.
fn share(rig: &Rig<'_>, id: &str, percent: u32) -> NodeShare {
    let grant = rig.grant(id, rig.quarter(), percent);
    rig.node.share_of(Grant { mps: true, policy: ComputePolicy::Fixed, ..grant })
}

fn clients(rig: &Rig<'_>, control: &Path) -> [String; 4] {
    let by_turns = small(rig, [rig.node.without_the_library(), rig.node.without_the_library()]);
    let before = rig.used();
    let daemon = Daemon::start(rig, control);
    let halves = ["mps-one", "mps-other"].map(|id| share(rig, id, 50));
    let together = small(rig, halves.each_ref().map(|share| daemon.client(share)));
    [
        processors(rig, &daemon),
        compared(together, by_turns),
        filled(rig, &daemon),
        with_server(rig, &daemon, before),
    ]
}

fn processors(rig: &Rig<'_>, daemon: &Daemon<'_>) -> String {
    let all = number(&rig.bare(&["processors"]), "processors");
    let said = rig.run(&daemon.client(&share(rig, "mps-25", 25)), &["processors"]);
    let seen = number(&said, "processors");
    judged(&format!("{seen:.0} of {all:.0}"), (seen - all / 4.0).abs() <= 2.0)
}

/// Kernels of one block each that two containers get done at once, for each millisecond.
fn small(rig: &Rig<'_>, both: [Container<'_>; 2]) -> f64 {
    let windows = rig.effort.windows;
    let mut both = both.map(|container| rig.start_kernels("small", &container, windows + 1));
    both.iter_mut().map(|running: &mut Running| part(running, windows)).sum()
}

fn compared(together: f64, by_turns: f64) -> String {
    let times = together / by_turns;
    judged(&format!("{together:.2} for each ms, by turns {by_turns:.2} ({times:.2} times)"), times >= 1.5)
}

/// Whether the limit counts contexts is not documented.
fn filled(rig: &Rig<'_>, daemon: &Daemon<'_>) -> String {
    let share = share(rig, "mps-fill", 50);
    let said = daemon.client(&share).start(&rig.program, &["fill"]).with("taken");
    let [taken, used] = ["taken", "cudaUsed"].map(|field| mib(number(&said, field)));
    let limit = mib(share.grant.memory_limit_bytes as f64);
    format!("{taken} taken, {used} used of a limit of {limit}")
}

/// Beside what was in use before there was a daemon.
fn with_server(rig: &Rig<'_>, daemon: &Daemon<'_>, before: f64) -> String {
    let windows = 1_000;
    let mut client = rig.start(&daemon.client(&share(rig, "mps-served", 50)), windows);
    client.with("gpu");
    mib(rig.used() - before)
}

/// The keeper of daemons takes a failure for "there is none".
fn asked_of_nobody(rig: &Rig<'_>, control: &Path) -> String {
    let nobody = rig.node.path().join("mps-nobody");
    fs::create_dir_all(&nobody).expect("made");
    let output = ask(rig, control, &nobody, "get_default_active_thread_percentage").expect("it runs");
    let code = output.status.code().map_or_else(|| "none".to_owned(), |code| code.to_string());
    let figure = format!("{code} is its exit code: `{}`", container::last_words(&output));
    judged(&figure, !output.status.success())
}
