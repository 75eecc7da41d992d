//! A state directory, keepers that run on it with the stand-in of NVIDIA's program, and what can be
//! seen of both.

use std::{
    collections::BTreeSet,
    fs::{self, File},
    io::Write as _,
    os::{fd::OwnedFd, unix::fs::MetadataExt},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::LazyLock,
    thread,
    time::{Duration, Instant},
};

use rustix::{
    fs::{Mode, OFlags, mkdirat, openat},
    io::Errno,
    process::{Pid, Signal, kill_process},
};
use tessera_api::names::GpuUuid;
use tessera_mps_protocol::{MpsPaths, State, Status, want};
use tessera_test_support::report_skip;

const KEEPER: &str = env!("CARGO_BIN_EXE_tessera-mps");

/// Far longer than anything takes here.
const PATIENCE: Duration = Duration::from_secs(300);

/// Where processes have the mark of their daemon's directory.
const MARK: &str = "TESSERA_MPS_DAEMON=";

/// A GPU that there might be.
pub(crate) fn gpu(digit: u8) -> GpuUuid {
    GpuUuid::new(format!("GPU-{digit}f0c2d3e-9a41-7c3b-8e55-0d6f2b1a4c77")).expect("a UUID")
}

/// The stand-in, built for the profile that this test runs in: cargo builds a program only for the
/// tests of its own package.
static STAND_IN: LazyLock<PathBuf> = LazyLock::new(|| {
    let directory = Path::new(KEEPER).parent().expect("a program lies in a directory");
    let profile = match directory.file_name().and_then(|name| name.to_str()) {
        Some("debug") | None => "dev",
        Some(name) => name,
    };
    let target = directory.parent().expect("a profile's directory lies in the target directory");
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let status = Command::new(cargo)
        .args(["build", "--quiet", "--package", "tessera-fake-mps-control", "--profile", profile])
        .arg("--target-dir")
        .arg(target)
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .status();
    assert!(status.expect("cargo runs").success(), "the stand-in builds");
    directory.join("fake-mps-control")
});

/// The stand-in by a path that daemons have, too, wherever it is built. Each has a /tmp of its own,
/// which may hide the target directory; this path leads to what the test itself has mounted
/// (`/proc/PID/root` in proc(5)).
fn stand_in_of_daemons() -> PathBuf {
    let below_root = STAND_IN.strip_prefix("/").expect("cargo gives a whole path");
    Path::new("/proc").join(std::process::id().to_string()).join("root").join(below_root)
}

/// A state directory. Whatever is left of it at the end is ended and unmounted.
pub(crate) struct Bench {
    directory: tempfile::TempDir,
    pub(crate) paths: MpsPaths,
}

impl Bench {
    /// `None` where mounts are not to be had; said on standard error, for the list of skipped
    /// tests.
    pub(crate) fn set_up(test: &str) -> Option<Self> {
        let mounts = ["--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"];
        let allowed = Command::new("unshare").args(mounts).output();
        // In a user namespace, the keeper could not mount where others see it.
        if !allowed.is_ok_and(|output| output.status.success())
            || !rustix::process::geteuid().is_root()
        {
            report_skip(test, "no right to mount here");
            return None;
        }
        let directory = tempfile::tempdir().expect("a directory");
        let paths = MpsPaths::new(directory.path());
        Some(Self { directory, paths })
    }

    /// A keeper that looks often, and is told how else by `change`.
    pub(crate) fn keeper_with(&self, change: impl FnOnce(&mut Command)) -> Keeper {
        self.run(Command::new(KEEPER), change)
    }

    /// A keeper that is root, as in a container that is not privileged.
    pub(crate) fn keeper_without_privileges(&self) -> Keeper {
        let mut command = Command::new("setpriv");
        command.args(["--bounding-set", "-sys_admin", "--inh-caps", "-all", "--"]).arg(KEEPER);
        self.run(command, |_| {})
    }

    /// Has a keeper log to a file in place of standard error.
    pub(crate) fn log_of(&self, keeper: &mut Command) {
        keeper.stderr(File::create(self.directory.path().join("log")).expect("made"));
    }

    /// What that keeper has logged.
    pub(crate) fn log(&self) -> String {
        fs::read_to_string(self.directory.path().join("log")).expect("readable")
    }

    fn run(&self, mut command: Command, change: impl FnOnce(&mut Command)) -> Keeper {
        command.arg("--state-dir").arg(self.directory.path());
        command.env("TESSERA_MPS_POLL_INTERVAL", "10ms");
        command.env("TESSERA_MPS_CONTROL", stand_in_of_daemons()).stdin(Stdio::null());
        change(&mut command);
        Keeper(command.spawn().expect("the keeper starts"))
    }

    pub(crate) fn keeper(&self) -> Keeper {
        self.keeper_with(|_| {})
    }

    pub(crate) fn want(&self, gpus: &[u8]) {
        want(&self.paths, &gpus.iter().copied().map(gpu).collect::<BTreeSet<_>>())
            .expect("written");
    }

    /// The first status of the GPU's daemon that is as asked for.
    pub(crate) fn status(&self, of: u8, what: &str, holds: impl Fn(&Status) -> bool) -> Status {
        let mut last = None;
        eventually(
            || {
                last = Status::read(&self.paths, &gpu(of)).expect("a status is whole");
                last.as_ref().is_some_and(&holds)
            },
            || format!("GPU {of} {what}"),
        );
        last.expect("it holds for one")
    }

    pub(crate) fn ready(&self, of: u8) -> Status {
        self.status(of, "is ready", |status| status.state == State::Ready)
    }

    /// Waits until nothing is left of the GPU's daemon.
    pub(crate) fn gone(&self, of: u8) {
        eventually(
            || !self.paths.daemon(&gpu(of)).exists(),
            || format!("GPU {of} has no directory"),
        );
        assert_eq!((self.processes(), self.mounts()), (vec![], vec![]));
    }

    /// The PID of the GPU's daemon, as it says itself.
    pub(crate) fn daemon(&self, of: u8) -> Process {
        let file = self.paths.pipe(&gpu(of)).join("nvidia-cuda-mps-control.pid");
        let pid = fs::read_to_string(file).expect("a daemon that is ready says its PID");
        Process(Pid::from_raw(pid.trim().parse().expect("a PID")).expect("a PID"))
    }

    /// Whether the GPU's daemon answers a command.
    pub(crate) fn answers(&self, of: u8) -> bool {
        let mut command = Command::new(&*STAND_IN);
        command.env("CUDA_MPS_PIPE_DIRECTORY", self.paths.pipe(&gpu(of)));
        let mut command =
            command.stdin(Stdio::piped()).stdout(Stdio::null()).spawn().expect("started");
        // It may be gone already: nobody answered.
        let _ = command.stdin.take().expect("piped").write_all(b"get_server_list\n");
        command.wait().expect("it ends").success()
    }

    /// Processes of daemons of this state directory.
    pub(crate) fn processes(&self) -> Vec<i32> {
        let mark = format!("{MARK}{}", self.directory.path().display());
        let pids = fs::read_dir("/proc")
            .expect("/proc")
            .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
        pids.filter(|pid| environment(*pid).iter().any(|variable| variable.starts_with(&mark)))
            .collect()
    }

    /// What is mounted for a daemon.
    pub(crate) fn mounts_of(&self, of: u8) -> Vec<PathBuf> {
        let gpu = gpu(of);
        vec![self.paths.log(&gpu), self.paths.pipe(&gpu), self.paths.shm(&gpu)]
    }

    /// What is mounted below the state directory, in order of name.
    pub(crate) fn mounts(&self) -> Vec<PathBuf> {
        let mounts = fs::read_to_string("/proc/self/mountinfo").expect("mounts");
        let targets = mounts.lines().filter_map(|line| line.split(' ').nth(4)).map(PathBuf::from);
        let mut mounts: Vec<_> =
            targets.filter(|target| target.starts_with(self.directory.path())).collect();
        mounts.sort();
        mounts
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        for pid in self.processes() {
            let _ = Pid::from_raw(pid).map(|pid| kill_process(pid, Signal::KILL));
        }
        for target in self.mounts() {
            let _ = rustix::mount::unmount(&target, rustix::mount::UnmountFlags::DETACH);
        }
    }
}

fn environment(pid: i32) -> Vec<String> {
    let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
    environment
        .split(|byte| *byte == 0)
        .map(|variable| String::from_utf8_lossy(variable).into_owned())
        .collect()
}

/// A process that is no child of the test.
pub(crate) struct Process(pub(crate) Pid);

impl Process {
    pub(crate) fn kill(&self) {
        kill_process(self.0, Signal::KILL).expect("it is there");
    }

    pub(crate) fn suspend(&self) {
        kill_process(self.0, Signal::STOP).expect("it is there");
    }

    /// Device and inode of a path, as the process sees it.
    pub(crate) fn sees(&self, path: &str) -> (u64, u64) {
        identity(Path::new(&format!("/proc/{}/root{path}", self.0)))
    }

    pub(crate) fn is_gone(&self) -> bool {
        environment(self.0.as_raw_nonzero().get())
            .iter()
            .all(|variable| !variable.starts_with(MARK))
    }
}

/// Where a driver root has NVIDIA's program.
pub(crate) const PROGRAM: &str = "/usr/bin/nvidia-cuda-mps-control";

/// A driver root: the stand-in, with the libraries that it needs, and nothing else.
pub(crate) fn driver_root() -> tempfile::TempDir {
    let root = tempfile::tempdir().expect("a directory");
    for directory in ["tmp", "dev/shm"] {
        fs::create_dir_all(root.path().join(directory)).expect("made");
    }
    let output = Command::new("ldd").arg(&*STAND_IN).output().expect("ldd runs");
    let text = String::from_utf8(output.stdout).expect("text");
    let libraries = text.split_whitespace().filter(|word| word.starts_with('/')).map(Path::new);
    for (from, to) in
        libraries.map(|library| (library, library)).chain([(&**STAND_IN, Path::new(PROGRAM))])
    {
        let to = root.path().join(to.strip_prefix("/").expect("a whole path"));
        fs::create_dir_all(to.parent().expect("a directory")).expect("made");
        // Not by this process: another thread's child may hold the file open for writing when it is
        // to be executed.
        assert!(Command::new("cp").args([from, &to]).status().expect("cp runs").success());
    }
    root
}

/// Makes directories in each other, as many as there is room for, and says how many that were.
/// Paths would be too long for so many.
pub(crate) fn nest(directory: &Path, count: usize) -> usize {
    let mut innermost = OwnedFd::from(File::open(directory).expect("there"));
    for made in 0..count {
        let flags = OFlags::DIRECTORY | OFlags::CLOEXEC;
        match mkdirat(&innermost, "nested", Mode::RWXU) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(Errno::NOSPC) => return made,
            Err(error) => panic!("{error}"),
        }
        innermost = openat(&innermost, "nested", flags, Mode::empty()).expect("made");
    }
    count
}

/// Device and inode.
pub(crate) fn identity(path: &Path) -> (u64, u64) {
    let metadata = fs::metadata(path).expect("there");
    (metadata.dev(), metadata.ino())
}

/// A keeper that runs. Killed at the end, if it still does.
pub(crate) struct Keeper(Child);

impl Keeper {
    pub(crate) fn pid(&self) -> u32 {
        self.0.id()
    }

    /// By SIGTERM.
    pub(crate) fn stop(self) -> ExitStatus {
        self.end(Signal::TERM)
    }

    pub(crate) fn kill(self) -> ExitStatus {
        self.end(Signal::KILL)
    }

    fn end(mut self, signal: Signal) -> ExitStatus {
        let pid = Pid::from_child(&self.0);
        kill_process(pid, signal).expect("it runs");
        self.0.wait().expect("it ends")
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Waits until something holds; `what` that is, for the message if it never does.
pub(crate) fn eventually(mut holds: impl FnMut() -> bool, what: impl Fn() -> String) {
    let deadline = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < deadline, "not in time: {}", what());
        thread::park_timeout(Duration::from_millis(5));
    }
}
