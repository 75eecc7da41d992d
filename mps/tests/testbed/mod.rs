//! A test bed for supervisors: a state directory, supervisors that run the fake of NVIDIA's
//! program, and observations of both.

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
use tessera_mps_protocol::{MpsDaemonState, MpsDaemonStatus, MpsPaths, set_wanted_gpus};
use tessera_test_support::report_skip;

const SUPERVISOR: &str = env!("CARGO_BIN_EXE_tessera-mps");

/// Timeout that is far longer than any test step.
const TIMEOUT: Duration = Duration::from_secs(300);

/// Environment variable of the mark of a daemon's processes.
const MARK: &str = "TESSERA_MPS_DAEMON=";

/// Returns the UUID of a test GPU.
pub(crate) fn gpu(digit: u8) -> GpuUuid {
    GpuUuid::new(format!("GPU-{digit}f0c2d3e-9a41-7c3b-8e55-0d6f2b1a4c77")).expect("a UUID")
}

/// Path of the fake program, built for the profile of this test: cargo builds a program only for
/// the tests of its own package.
static FAKE_MPS_CONTROL: LazyLock<PathBuf> = LazyLock::new(|| {
    let directory = Path::new(SUPERVISOR).parent().expect("a program has a directory");
    let profile = match directory.file_name().and_then(|name| name.to_str()) {
        Some("debug") | None => "dev",
        Some(name) => name,
    };
    let target = directory.parent().expect("the profile's directory has a parent");
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let status = Command::new(cargo)
        .args(["build", "--quiet", "--package", "tessera-fake-mps-control", "--profile", profile])
        .arg("--target-dir")
        .arg(target)
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .status();
    assert!(status.expect("cargo runs").success(), "the fake builds");
    directory.join("fake-mps-control")
});

/// Returns a path of the fake program that is valid in daemons, wherever it is built. Each daemon
/// has its own /tmp, which may hide the target directory; this path leads to the mounts of the test
/// itself (`/proc/PID/root` in proc(5)).
fn fake_path_in_daemon() -> PathBuf {
    let below_root = FAKE_MPS_CONTROL.strip_prefix("/").expect("cargo returns an absolute path");
    Path::new("/proc").join(std::process::id().to_string()).join("root").join(below_root)
}

/// A state directory. Its remaining processes and mounts are removed on drop.
pub(crate) struct TestBed {
    directory: tempfile::TempDir,
    pub(crate) paths: MpsPaths,
}

impl TestBed {
    /// Returns `None` and reports the test as skipped if mounting is not permitted.
    pub(crate) fn new(test: &str) -> Option<Self> {
        let mounts = ["--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"];
        let allowed = Command::new("unshare").args(mounts).output();
        // In a user namespace, mounts of the supervisor would not be visible to others.
        if !allowed.is_ok_and(|output| output.status.success())
            || !rustix::process::geteuid().is_root()
        {
            report_skip(test, "mounting is not permitted");
            return None;
        }
        let directory = tempfile::tempdir().expect("a directory");
        let paths = MpsPaths::new(directory.path());
        Some(Self { directory, paths })
    }

    /// Starts a supervisor with short intervals, configured by `change`.
    pub(crate) fn supervisor_with(&self, change: impl FnOnce(&mut Command)) -> Supervisor {
        self.run(Command::new(SUPERVISOR), change)
    }

    /// Starts a supervisor that is root without capabilities, as in an unprivileged container.
    pub(crate) fn supervisor_without_privileges(&self) -> Supervisor {
        let mut command = Command::new("setpriv");
        command.args(["--bounding-set", "-sys_admin", "--inh-caps", "-all", "--"]).arg(SUPERVISOR);
        self.run(command, |_| {})
    }

    /// Redirects the log of a supervisor to a file.
    pub(crate) fn redirect_log(&self, supervisor: &mut Command) {
        supervisor.stderr(File::create(self.directory.path().join("log")).expect("made"));
    }

    /// Returns the log of that supervisor.
    pub(crate) fn log(&self) -> String {
        fs::read_to_string(self.directory.path().join("log")).expect("readable")
    }

    fn run(&self, mut command: Command, change: impl FnOnce(&mut Command)) -> Supervisor {
        command.arg("--state-dir").arg(self.directory.path());
        command.env("TESSERA_MPS_POLL_INTERVAL", "10ms");
        command.env("TESSERA_MPS_CONTROL", fake_path_in_daemon()).stdin(Stdio::null());
        change(&mut command);
        Supervisor(command.spawn().expect("the supervisor starts"))
    }

    pub(crate) fn supervisor(&self) -> Supervisor {
        self.supervisor_with(|_| {})
    }

    pub(crate) fn want(&self, gpus: &[u8]) {
        set_wanted_gpus(&self.paths, &gpus.iter().copied().map(gpu).collect::<BTreeSet<_>>())
            .expect("written");
    }

    /// Waits for a status of the GPU's daemon that satisfies `holds`, and returns it.
    pub(crate) fn status(
        &self,
        of: u8,
        what: &str,
        holds: impl Fn(&MpsDaemonStatus) -> bool,
    ) -> MpsDaemonStatus {
        let mut last = None;
        eventually(
            || {
                last = MpsDaemonStatus::read(&self.paths, &gpu(of)).expect("a status is valid");
                last.as_ref().is_some_and(&holds)
            },
            || format!("GPU {of} {what}"),
        );
        last.expect("it holds for one")
    }

    pub(crate) fn ready(&self, of: u8) -> MpsDaemonStatus {
        self.status(of, "is ready", |status| status.state == MpsDaemonState::Ready)
    }

    /// Waits until nothing is left of the GPU's daemon.
    pub(crate) fn gone(&self, of: u8) {
        eventually(
            || !self.paths.daemon(&gpu(of)).exists(),
            || format!("GPU {of} has no directory"),
        );
        assert_eq!((self.processes(), self.mounts()), (vec![], vec![]));
    }

    /// Returns the GPU's daemon process, from its PID file.
    pub(crate) fn daemon(&self, of: u8) -> Process {
        let file = self.paths.pipe(&gpu(of)).join("nvidia-cuda-mps-control.pid");
        let pid = fs::read_to_string(file).expect("a daemon that is ready writes its PID");
        Process(Pid::from_raw(pid.trim().parse().expect("a PID")).expect("a PID"))
    }

    /// Returns true if the GPU's daemon answers a command.
    pub(crate) fn answers(&self, of: u8) -> bool {
        let mut command = Command::new(&*FAKE_MPS_CONTROL);
        command.env("CUDA_MPS_PIPE_DIRECTORY", self.paths.pipe(&gpu(of)));
        let mut command =
            command.stdin(Stdio::piped()).stdout(Stdio::null()).spawn().expect("started");
        // The program may have exited already, without an answer.
        let _ = command.stdin.take().expect("piped").write_all(b"get_server_list\n");
        command.wait().expect("it ends").success()
    }

    /// Returns the processes of this state directory's daemons.
    pub(crate) fn processes(&self) -> Vec<i32> {
        let mark = format!("{MARK}{}", self.directory.path().display());
        let pids = fs::read_dir("/proc")
            .expect("/proc")
            .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
        pids.filter(|pid| environment(*pid).iter().any(|variable| variable.starts_with(&mark)))
            .collect()
    }

    /// Returns the mounts of a daemon.
    pub(crate) fn mounts_of(&self, of: u8) -> Vec<PathBuf> {
        let gpu = gpu(of);
        vec![self.paths.log(&gpu), self.paths.pipe(&gpu), self.paths.shm(&gpu)]
    }

    /// Returns the mounts below the state directory, sorted.
    pub(crate) fn mounts(&self) -> Vec<PathBuf> {
        let mounts = fs::read_to_string("/proc/self/mountinfo").expect("mounts");
        let targets = mounts.lines().filter_map(|line| line.split(' ').nth(4)).map(PathBuf::from);
        let mut mounts: Vec<_> =
            targets.filter(|target| target.starts_with(self.directory.path())).collect();
        mounts.sort();
        mounts
    }
}

impl Drop for TestBed {
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

/// A process that is not a child of the test.
pub(crate) struct Process(pub(crate) Pid);

impl Process {
    pub(crate) fn kill(&self) {
        kill_process(self.0, Signal::KILL).expect("running");
    }

    pub(crate) fn suspend(&self) {
        kill_process(self.0, Signal::STOP).expect("running");
    }

    /// Returns device and inode of a path as the process resolves it.
    pub(crate) fn sees(&self, path: &str) -> (u64, u64) {
        identity(Path::new(&format!("/proc/{}/root{path}", self.0)))
    }

    pub(crate) fn is_gone(&self) -> bool {
        environment(self.0.as_raw_nonzero().get())
            .iter()
            .all(|variable| !variable.starts_with(MARK))
    }
}

/// Path of NVIDIA's program in a driver root.
pub(crate) const PROGRAM: &str = "/usr/bin/nvidia-cuda-mps-control";

/// Returns a driver root with only the fake program and its libraries.
pub(crate) fn driver_root() -> tempfile::TempDir {
    let root = tempfile::tempdir().expect("a directory");
    for directory in ["tmp", "dev/shm"] {
        fs::create_dir_all(root.path().join(directory)).expect("made");
    }
    let output = Command::new("ldd").arg(&*FAKE_MPS_CONTROL).output().expect("ldd runs");
    let text = String::from_utf8(output.stdout).expect("text");
    let libraries = text.split_whitespace().filter(|word| word.starts_with('/')).map(Path::new);
    for (from, to) in libraries
        .map(|library| (library, library))
        .chain([(&**FAKE_MPS_CONTROL, Path::new(PROGRAM))])
    {
        let to = root.path().join(to.strip_prefix("/").expect("a absolute path"));
        fs::create_dir_all(to.parent().expect("a directory")).expect("made");
        // Copied by a child process: a child of another thread could inherit a file that is open
        // for writing, and executing it would fail.
        assert!(Command::new("cp").args([from, &to]).status().expect("cp runs").success());
    }
    root
}

/// Creates nested directories until the file system is full, and returns their number. Paths would
/// be too long for so many.
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

/// Returns device and inode of a path.
pub(crate) fn identity(path: &Path) -> (u64, u64) {
    let metadata = fs::metadata(path).expect("there");
    (metadata.dev(), metadata.ino())
}

/// A running supervisor, killed on drop.
pub(crate) struct Supervisor(Child);

impl Supervisor {
    pub(crate) fn pid(&self) -> u32 {
        self.0.id()
    }

    /// Stops the supervisor by SIGTERM.
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

impl Drop for Supervisor {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Waits until `holds` returns true; panics with the message `what` after the timeout.
pub(crate) fn eventually(mut holds: impl FnMut() -> bool, what: impl Fn() -> String) {
    let deadline = Instant::now() + TIMEOUT;
    while !holds() {
        assert!(Instant::now() < deadline, "timed out waiting until {}", what());
        thread::park_timeout(Duration::from_millis(5));
    }
}
