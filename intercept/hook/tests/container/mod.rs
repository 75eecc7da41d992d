//! Containers for tests: user and mount namespaces with shares at `/dev/tessera`, the fake driver,
//! and the library preloaded as it ships.
//!
//! Where namespaces are not allowed, tests that need them are skipped.
#![allow(dead_code, reason = "every test file uses its own part of it")]

mod arbiter;
mod glibc;
mod mode;
mod mps_daemon;

use std::collections::BTreeSet;
use std::env;
use std::ffi::{OsStr, OsString};
use std::fmt::Write as _;
use std::fs;
use std::io::{BufRead as _, BufReader, Lines};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Output, Stdio};
use std::sync::OnceLock;

#[allow(unused_imports, reason = "every test file uses its own part of it")]
pub(crate) use arbiter::{arbitrate, monotonic_ns};
#[allow(unused_imports, reason = "every test file uses its own part of it")]
pub(crate) use mode::{Mode, REAL, built_for_hami, proxies};
#[allow(unused_imports, reason = "every test file uses its own part of it")]
pub(crate) use mps_daemon::{MpsDaemon, ask_mps};
use serde_json::Value;
use tempfile::TempDir;
use tessera_fake_world::{artifact, shipped};
use tessera_intercept_abi::{
    ComputePolicy, GRANTS_TMPFS_INODES, Grant, LEDGER_LEN, LEDGER_TMPFS_INODES, LedgerPage,
    LedgerReport, Text, grant_offset, ledger, ledger::Total, mps,
};
use tessera_intercept_limiter::compute::Published;
use tessera_intercept_symbols::Version;
use tessera_test_support::report_skip;

pub(crate) const MIB: u64 = 1 << 20;
pub(crate) const GIB: u64 = 1 << 30;

/// The library as it ships.
pub(crate) fn intercept() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        build("tessera-intercept", &["--profile", "intercept"], "intercept/libtessera_intercept.so")
    })
}

/// What a tool of binutils, which every C compiler comes with, says of a file.
pub(crate) fn inspect(tool: &str, arguments: &[&str], file: &Path) -> String {
    let output = Command::new(tool).args(arguments).arg(file).output().expect("binutils are there");
    assert!(output.status.success(), "{tool}");
    String::from_utf8(output.stdout).expect("text")
}

/// The names that the library exports.
pub(crate) fn exported() -> &'static BTreeSet<String> {
    static NAMES: OnceLock<BTreeSet<String>> = OnceLock::new();
    NAMES.get_or_init(|| exported_by(intercept()))
}

/// The names that a library exports.
pub(crate) fn exported_by(library: &Path) -> BTreeSet<String> {
    let symbols = inspect("nm", &["--dynamic", "--defined-only"], library);
    symbols.lines().filter_map(|line| line.split(' ').nth(2)).map(str::to_owned).collect()
}

/// The probe.
pub(crate) fn probe() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| build("tessera-probe", &[], "debug/tessera-probe"))
}

/// The stand-in for NVIDIA's MPS control daemon.
pub(crate) fn control_daemon() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| build("tessera-fake-mps-control", &[], "debug/fake-mps-control"))
}

fn build(package: &'static str, profile: &[&str], file: &str) -> PathBuf {
    build_in("", package, profile, file)
}

/// Builds in a directory below cargo's.
fn build_in(directory: &str, package: &'static str, profile: &[&str], file: &str) -> PathBuf {
    artifact::package(directory, package, profile).expect("it builds").join(file)
}

/// The C compiler.
pub(crate) fn compiler() -> OsString {
    env::var_os("CC").unwrap_or_else(|| OsString::from("cc"))
}

/// Compiles `tests/programs/<name>.c`; links the fake libcuda where `linked`.
pub(crate) fn program(name: &str, linked: bool, directory: &Path) -> PathBuf {
    let out = directory.join(if linked { format!("{name}-linked") } else { name.to_owned() });
    compile("tests/programs", name, linked, &out);
    out
}

/// Compiles `benches/programs/<name>.c`.
pub(crate) fn bench_program(name: &str, directory: &Path) -> PathBuf {
    let out = directory.join(name);
    compile("benches/programs", name, false, &out);
    out
}

fn compile(directory: &str, name: &str, linked: bool, out: &Path) {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let source = here.join(directory).join(name).with_extension("c");
    let mut command = Command::new(compiler());
    command.args(["-std=gnu11", "-Wall", "-Werror", "-O1", "-pthread", "-o"]).arg(out).arg(&source);
    command.arg("-I").arg(here.join("tests/programs"));
    if linked {
        command.arg("-DLINKED").arg(libraries().join("libcuda.so.1"));
    }
    command.arg("-ldl");
    assert!(command.status().expect("a C compiler runs").success(), "{name} compiles");
}

/// The fake driver's libraries under their names.
pub(crate) fn libraries() -> &'static Path {
    static PLACE: OnceLock<PathBuf> = OnceLock::new();
    PLACE.get_or_init(|| {
        let cuda = artifact::cuda().expect("the fake CUDA builds");
        let nvml = artifact::nvml().expect("the fake NVML builds");
        // Each profile has libraries of its own.
        let profile = cuda.parent().and_then(Path::file_name).expect("target/<profile>");
        let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join("driver").join(profile);
        fs::create_dir_all(&directory).expect("made");
        link(&cuda, &directory.join("libcuda.so.1"));
        link(&nvml, &directory.join("libnvidia-ml.so.1"));
        directory
    })
}

/// Makes a link, unless another test has made it.
fn link(to: &Path, at: &Path) {
    match std::os::unix::fs::symlink(to, at) {
        Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
            panic!("{}: {error}", at.display())
        }
        _ => assert_eq!(fs::read_link(at).expect("a link"), to),
    }
}

/// Why containers cannot be made here.
pub(crate) fn no_namespaces() -> Option<String> {
    let tried = Command::new("unshare")
        .args(["--user", "--map-root-user", "--mount", "--pid", "--fork", "true"])
        .output();
    match tried {
        Ok(output) if output.status.success() => None,
        Ok(output) => Some(String::from_utf8_lossy(&output.stderr).trim().to_owned()),
        Err(error) => Some(format!("unshare: {error}")),
    }
}

/// Whether a test can have containers; says so where it cannot.
pub(crate) fn can_contain(test: &str) -> bool {
    let reason = no_namespaces();
    if let Some(reason) = &reason {
        report_skip(test, reason);
    }
    reason.is_none()
}

/// Whose driver containers find.
enum Driver {
    /// The fake one.
    Fake,
    /// The machine's, by those device files.
    Machine(Vec<PathBuf>),
}

impl Driver {
    /// NVIDIA's device files, where this machine has any.
    fn of_machine() -> Self {
        let files = fs::read_dir("/dev").expect("a directory").flatten();
        let is_device = |path: &PathBuf| {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            name.starts_with("nvidia") && !path.is_dir()
        };
        Self::Machine(files.map(|entry| entry.path()).filter(is_device).collect())
    }

    /// What a container has in `/etc` for programs that nobody made for tests, when `/etc` is a
    /// copy at `$etc` that is not mounted yet.
    fn known(&self) -> &str {
        match self {
            Self::Fake => "",
            Self::Machine(_) => {
                "for known in alternatives passwd group; do\n\
                 [ ! -e \"/etc/$known\" ] || cp --archive --no-preserve=ownership \"/etc/$known\" \"$etc/\"\ndone\n"
            }
        }
    }

    /// What a container has in `/dev` for it.
    fn devices(&self) -> &[PathBuf] {
        match self {
            Self::Fake => &[],
            Self::Machine(devices) => devices,
        }
    }
}

/// A node with a driver, on which containers run.
pub(crate) struct Node {
    driver: Driver,
    directory: TempDir,
    uuids: Vec<String>,
    machine: Machine,
    /// Preloaded into programs, if any: the clock that they have.
    clock: Option<PathBuf>,
}

/// The namespaces in which the node's mounts are, held by a process that ends with the test.
struct Machine(Child);

impl Machine {
    /// With a directory for grants, as the driver mounts it, and one for its socket.
    fn start(directory: &Path) -> Self {
        let script = "set -eu; mkdir grants ledgers host; mount -t tmpfs -o \"nr_inodes=$1\" tmpfs grants; \
                      mount -t tmpfs tmpfs host; echo ready; exec cat";
        let mut child = Command::new("unshare")
            .args(["--user", "--map-root-user", "--mount", "sh", "-c", script, "sh"])
            .arg(GRANTS_TMPFS_INODES.to_string())
            .current_dir(directory)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("unshare runs");
        let mut line = String::new();
        BufReader::new(child.stdout.as_mut().expect("piped")).read_line(&mut line).expect("text");
        assert_eq!(line, "ready\n", "the machine's file systems are mounted");
        Self(child)
    }

    /// A program on the machine.
    fn command(&self, program: &str) -> Command {
        let mut command = Command::new("nsenter");
        command.args([
            "--preserve-credentials",
            "--user",
            "--mount",
            "--target",
            &self.0.id().to_string(),
        ]);
        command.arg(program);
        command
    }

    /// Where the test finds a file of the machine.
    fn path(&self, path: &Path) -> PathBuf {
        let root = PathBuf::from(format!("/proc/{}/root", self.0.id()));
        root.join(path.strip_prefix("/").expect("an absolute path"))
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// How a share is put into a container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mount {
    /// As the driver does it.
    Real,
    /// The grant can be written.
    WritableGrant,
    /// Files that the tenant made.
    Plain,
    /// The grant is a file of a volume.
    GrantOfVolume(Volume),
    /// The ledger is a file of a volume.
    LedgerOfVolume(Volume),
}

/// What a pod's volume is on the node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Volume {
    /// A directory of the node's disk.
    Disk,
    /// A tmpfs of that size.
    Memory,
}

impl Volume {
    /// Makes one at `$volume`.
    fn script(self, node: &Path) -> String {
        let make = format!("volume=$(mktemp -d -p {})", node.display());
        match self {
            Self::Disk => make,
            Self::Memory => {
                format!("{make}; mount -t tmpfs -o size={LEDGER_LEN} tmpfs \"$volume\"")
            }
        }
    }
}

/// A share on the node.
#[derive(Clone)]
pub(crate) struct NodeShare {
    pub(crate) grant: Grant,
    /// Its files as programs of the node know them.
    inside: [PathBuf; 2],
    /// The same files as the test knows them.
    outside: [PathBuf; 2],
    node: PathBuf,
}

/// Which file of a share.
const GRANT: usize = 0;
const LEDGER: usize = 1;

/// Eight H100 with a driver for that version of CUDA.
fn world_of(version: Version) -> String {
    let (theirs, world) = ("cuda: \"13.0\"", shipped::H100_8_NVSWITCH);
    assert!(world.contains(theirs), "the world is for another version");
    world.replace(theirs, &format!("cuda: \"{version}\""))
}

impl Node {
    /// A node with eight H100.
    pub(crate) fn new() -> Self {
        Self::with_world(shipped::H100_8_NVSWITCH)
    }

    /// The same with a driver for that version of CUDA.
    pub(crate) fn with_cuda(version: Version) -> Self {
        Self::with_world(&world_of(version))
    }

    /// The same with GPUs whose managed memory does not move while kernels run.
    pub(crate) fn before_pascal() -> Self {
        let (theirs, world) = ("computeCapability: \"9.0\"", shipped::H100_8_NVSWITCH);
        assert!(world.contains(theirs), "the world has other GPUs");
        Self::with_world(&world.replace(theirs, "computeCapability: \"5.2\""))
    }

    /// The same, where GPU work takes the time it takes.
    pub(crate) fn in_real_time() -> Self {
        Self::at_scale(shipped::H100_8_NVSWITCH, 1.0)
    }

    /// The same, by a clock that goes only while the program waits, so that how busy the machine is
    /// makes no difference. For programs of one thread that wait for no other.
    pub(crate) fn with_paused_clock() -> Self {
        let clock = artifact::paused_clock().expect("the clock builds");
        Self { clock: Some(clock), ..Self::in_real_time() }
    }

    /// The same with a driver for that version of CUDA.
    pub(crate) fn with_paused_clock_and_cuda(version: Version) -> Self {
        let clock = artifact::paused_clock().expect("the clock builds");
        Self { clock: Some(clock), ..Self::at_scale(&world_of(version), 1.0) }
    }

    fn with_world(world: &str) -> Self {
        // The world's time costs only waiting.
        Self::at_scale(world, 0.0)
    }

    fn at_scale(world: &str, scale: f64) -> Self {
        let directory = TempDir::new().expect("a directory");
        let world = format!("{world}\ntime: {{scale: {scale:.1}, launchNanos: 0}}\n");
        fs::write(directory.path().join("world.yaml"), &world).expect("written");
        let parsed = tessera_fake_world::World::parse(&world, "test").expect("a world");
        let uuids = parsed.gpus.iter().map(|gpu| gpu.uuid.clone()).collect();
        let machine = Machine::start(directory.path());
        Self { driver: Driver::Fake, directory, uuids, machine, clock: None }
    }

    /// This machine with its own driver, if it has one. Its shares are made of grants (`share_of`).
    pub(crate) fn of_this_machine() -> Self {
        let directory = TempDir::new().expect("a directory");
        let machine = Machine::start(directory.path());
        Self { driver: Driver::of_machine(), directory, uuids: Vec::new(), machine, clock: None }
    }

    pub(crate) fn path(&self) -> &Path {
        self.directory.path()
    }

    /// A program on the machine itself.
    pub(crate) fn on_the_machine(&self, program: &str) -> Command {
        self.machine.command(program)
    }

    /// UUID of the first GPU.
    pub(crate) fn first_uuid(&self) -> &str {
        &self.uuids[0]
    }

    /// The directory of the driver's socket.
    pub(crate) fn host(&self) -> PathBuf {
        self.machine.path(&self.path().join("host"))
    }

    /// What the fake driver takes for a context on the first GPU.
    pub(crate) fn context_bytes(&self) -> u64 {
        let world = fs::read_to_string(self.directory.path().join("world.yaml")).expect("a world");
        tessera_fake_world::World::parse(&world, "test").expect("a world").gpus[0]
            .model
            .context_bytes()
    }

    /// Compiles `tests/programs/<name>.c` as a library to be loaded by a program.
    pub(crate) fn plugin(&self, name: &str) -> PathBuf {
        let source = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("tests/programs")
            .join(name)
            .with_extension("c");
        let out = self.directory.path().join(name).with_extension("so");
        let mut command = Command::new(compiler());
        command.args(["-shared", "-fPIC", "-o"]).arg(&out).arg(source).arg("-ldl");
        assert!(command.status().expect("a C compiler runs").success(), "{name} compiles");
        out
    }

    /// What programs are given that compare the ledger with the driver: a plugin that asks the
    /// driver past the library, and where in the ledger the bytes in use are.
    pub(crate) fn to_compare(&self) -> [String; 3] {
        let total_at = std::mem::offset_of!(LedgerPage, total);
        let shift = Total { used_bytes: 1, slot: 0, change: 0 }.pack().trailing_zeros();
        [self.plugin("bare").display().to_string(), total_at.to_string(), shift.to_string()]
    }

    /// A share of the first GPU that pays for contexts what the fake driver takes for them.
    pub(crate) fn share_with_contexts(&self, bytes: u64) -> NodeShare {
        self.share_of(Grant {
            context_bytes: self.context_bytes(),
            ..self.grant("claim-0", 0, bytes)
        })
    }

    /// A share of the first GPU from which plain memory may spill.
    pub(crate) fn spilling_share(&self, id: &str, bytes: u64) -> NodeShare {
        self.share_of(Grant { oversubscribe: true, ..self.grant(id, 0, bytes) })
    }

    /// Makes a share of a GPU.
    pub(crate) fn share(&self, id: &str, gpu: usize, bytes: u64) -> NodeShare {
        self.share_of(self.grant(id, gpu, bytes))
    }

    /// What such a share is granted.
    fn grant(&self, id: &str, gpu: usize, bytes: u64) -> Grant {
        Grant {
            gpu_uuid: self.uuids[gpu].parse().expect("a UUID"),
            memory_limit_bytes: bytes,
            context_bytes: 0,
            cores_percent: 25,
            policy: ComputePolicy::Fixed,
            oversubscribe: false,
            mps: false,
            claim_uid: Text::new("0b5f5c1e-9a61-4a0f-8d8c-52b0f2a6c7f1").expect("short"),
            id: Text::new(id).expect("short"),
            sequence: 0,
        }
    }

    /// Makes a share from a grant.
    pub(crate) fn share_of(&self, grant: Grant) -> NodeShare {
        let id = grant.id.as_str();
        let directories = ["grants", "ledgers"].map(|kind| self.path().join(kind).join(id));
        let outside = directories.each_ref().map(|directory| self.machine.path(directory));
        outside.iter().for_each(|directory| fs::create_dir_all(directory).expect("made"));
        let options = format!("size={LEDGER_LEN},nr_inodes={LEDGER_TMPFS_INODES}");
        let mut mount = self.machine.command("mount");
        mount.args(["-t", "tmpfs", "-o", &options, "tmpfs"]).arg(&directories[LEDGER]);
        assert!(
            mount.status().expect("nsenter runs").success(),
            "the ledger's file system is mounted"
        );
        let files = |[grant, ledger]: [PathBuf; 2]| [grant.join("grant"), ledger.join("ledger")];
        let share = NodeShare {
            grant,
            inside: files(directories),
            outside: files(outside),
            node: self.path().to_owned(),
        };
        fs::write(&share.outside[GRANT], grant.encode().expect("in range")).expect("written");
        let mut ledger = vec![0; LEDGER_LEN];
        ledger[..24].copy_from_slice(&ledger::initial());
        fs::write(&share.outside[LEDGER], ledger).expect("written");
        share
    }

    /// A container that the library is not in.
    pub(crate) fn without_the_library(&self) -> Container<'_> {
        Container { node: self, script: LAST.to_owned() }
    }

    /// A container with those shares.
    pub(crate) fn container<'a>(&'a self, shares: &[(&NodeShare, Mount)]) -> Container<'a> {
        self.container_in(Mode::Preload, shares)
    }

    /// The usual container, with the interceptor in that place.
    pub(crate) fn contain_in<'a>(&'a self, mode: Mode, shares: &[&NodeShare]) -> Container<'a> {
        let real: Vec<_> = shares.iter().map(|share| (*share, Mount::Real)).collect();
        self.container_in(mode, &real)
    }

    fn container_in<'a>(&'a self, mode: Mode, shares: &[(&NodeShare, Mount)]) -> Container<'a> {
        let mut script = format!("set -eu\ndev=$(mktemp -d -p {})\n", self.path().display());
        // As every container's: in a directory like /tmp, newer kernels refuse `>/dev/null` to an
        // ordinary user's container, to which the device's owner is nobody (O_CREAT in a
        // sticky directory).
        script.push_str("mount -t tmpfs -o mode=755 tmpfs \"$dev\"\n");
        let usual = ["null", "zero", "urandom"].map(|name| Path::new("/dev").join(name));
        for device in usual.iter().chain(self.driver.devices()) {
            let at = format!("\"$dev/{}\"", device.file_name().unwrap_or_default().display());
            writeln!(script, "touch {at}; mount --bind {} {at}", device.display())
                .expect("a string");
        }
        script.push_str("mkdir \"$dev/shm\"\n");
        if mode != Mode::Hami || !shares.is_empty() {
            script.push_str("mkdir \"$dev/tessera\"\n");
        }
        for (share, mount) in shares {
            share.write_mounts(*mount, &mut script);
        }
        if !shares.is_empty() {
            writeln!(
                script,
                "mkdir \"$dev/tessera/host\"; mount --bind {} \"$dev/tessera/host\"; \
                 mount -o remount,bind,ro \"$dev/tessera/host\"",
                self.path().join("host").display()
            )
            .expect("a string");
        }
        script.push_str("mount --rbind \"$dev\" /dev\n");
        // The library gets into every program as it does in a pod: by /etc/ld.so.preload.
        script.push_str("etc=$(mktemp -d -p /dev)\ncp /etc/ld.so.cache \"$etc/\"\n");
        script.push_str(self.driver.known());
        script.push_str(&mode.script());
        script.push_str("mount --bind \"$etc\" /etc\n");
        script.push_str(&glibc::script());
        script.push_str(LAST);
        Container { node: self, script }
    }

    /// The usual container: its shares as the driver makes them.
    pub(crate) fn contain<'a>(&'a self, shares: &[&NodeShare]) -> Container<'a> {
        self.contain_in(Mode::Preload, shares)
    }
}

impl NodeShare {
    fn write_mounts(&self, mount: Mount, script: &mut String) {
        let id = self.grant.id.as_str();
        let [grant, ledger] = self.inside.each_ref().map(|path| path.display().to_string());
        let to = format!("\"$dev/tessera/{id}\"");
        writeln!(script, "mkdir {to}; touch {to}/grant {to}/ledger").expect("a string");
        let copied = |volume: Volume, file: &str| {
            format!(
                "{}; cp {file} \"$volume/copy\"; chmod 666 \"$volume/copy\"\n",
                volume.script(&self.node)
            )
        };
        let (made, grant, ledger, read_only) = match mount {
            Mount::Plain => {
                return writeln!(script, "cp {grant} {ledger} {to}/").expect("a string");
            }
            Mount::Real => (String::new(), grant, ledger, true),
            Mount::WritableGrant => (String::new(), grant, ledger, false),
            Mount::GrantOfVolume(volume) => {
                (copied(volume, &grant), "\"$volume/copy\"".to_owned(), ledger, true)
            }
            Mount::LedgerOfVolume(volume) => {
                (copied(volume, &ledger), grant, "\"$volume/copy\"".to_owned(), true)
            }
        };
        script.push_str(&made);
        writeln!(script, "mount --bind {grant} {to}/grant; mount --bind {ledger} {to}/ledger")
            .expect("a string");
        if read_only {
            writeln!(script, "mount -o remount,bind,ro {to}/grant").expect("a string");
        }
    }

    /// Its files, as programs of the node know them: grant and ledger.
    pub(crate) fn paths(&self) -> &[PathBuf; 2] {
        &self.inside
    }

    /// What the host publishes, as the driver writes it.
    pub(crate) fn publish(&self, published: &Published) {
        let [word, others_busy_ns] = published.words();
        self.scribble_grant(grant_offset::PUBLISHED + 8, &others_busy_ns.to_le_bytes());
        self.scribble_grant(grant_offset::PUBLISHED, &word.to_le_bytes());
    }

    /// Whether a process holds the lock of a slot.
    pub(crate) fn is_alive(&self, slot: usize) -> bool {
        use std::os::fd::AsRawFd as _;
        let file = fs::File::open(&self.outside[LEDGER]).expect("opens");
        // SAFETY: plain data, for which zeroes are valid; `l_pid` must be 0 for this kind of lock.
        let mut lock: libc::flock64 = unsafe { std::mem::zeroed() };
        lock.l_type = libc::F_WRLCK as _;
        lock.l_start = (ledger::LOCK_OFFSET + slot as u64) as _;
        lock.l_len = 1;
        // SAFETY: the descriptor is open, and `lock` is ours.
        let code = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, &raw mut lock) };
        assert_eq!(code, 0, "the kernel says");
        i32::from(lock.l_type) != libc::F_UNLCK
    }

    /// What the ledger says.
    pub(crate) fn ledger<T>(&self, read: impl FnOnce(&LedgerReport<'_>) -> T) -> T {
        let bytes = fs::read(&self.outside[LEDGER]).expect("a ledger");
        read(&LedgerReport::parse(&bytes).expect("a good ledger"))
    }

    /// Overwrites bytes of the grant.
    pub(crate) fn scribble_grant(&self, at: usize, bytes: &[u8]) {
        self.scribble(GRANT, at, bytes);
    }

    /// Overwrites bytes of the ledger.
    pub(crate) fn scribble_ledger(&self, at: usize, bytes: &[u8]) {
        self.scribble(LEDGER, at, bytes);
    }

    fn scribble(&self, file: usize, at: usize, bytes: &[u8]) {
        use std::os::unix::fs::FileExt as _;
        let file = fs::OpenOptions::new().write(true).open(&self.outside[file]).expect("opens");
        file.write_all_at(bytes, at as u64).expect("written");
    }

    /// Changes the grant in place, as the driver does.
    pub(crate) fn change(&self, grant: Grant) {
        use tessera_intercept_abi::GrantUpdate;
        let now = fs::read(&self.outside[GRANT]).expect("a grant");
        let update = grant.update(&now).expect("the same share");
        self.scribble_grant(GrantUpdate::SEQUENCE_OFFSET, &update.begin);
        self.scribble_grant(GrantUpdate::BODY_OFFSET, &update.body);
        self.scribble_grant(GrantUpdate::SEQUENCE_OFFSET, &update.end);
    }
}

/// What a container does once all is mounted.
const LAST: &str = "exec \"$@\"\n";

/// A container that is not running yet.
pub(crate) struct Container<'a> {
    node: &'a Node,
    script: String,
}

impl Container<'_> {
    /// The same as the driver makes it for a claim that shares by MPS: with the pipes of a daemon,
    /// and those variables.
    pub(crate) fn by_mps(self, pipes: &Path, variables: &[(&str, &str)]) -> Self {
        let mut more = format!("mkdir {0}; mount --bind {1} {0}\n", mps::DIR, pipes.display());
        for (name, value) in variables {
            writeln!(more, "export {name}={value}").expect("a string");
        }
        self.and(&more)
    }

    /// The same with that directory of the node as the memory that its programs share.
    pub(crate) fn with_shared_memory(self, directory: &Path) -> Self {
        self.and(&format!("mount --bind {} /dev/shm\n", directory.display()))
    }

    /// The same with proxies in the place of those two files, which are the driver's, as the
    /// driver's CDI spec mounts them.
    pub(crate) fn by_proxies(self, driver: &[PathBuf; 2]) -> Self {
        self.and(&mode::mounted(driver))
    }

    /// The same, whose program is ended after so many seconds.
    pub(crate) fn for_at_most(self, seconds: u32) -> Self {
        self.and(&format!("set -- timeout {seconds} \"$@\"\n"))
    }

    /// The same after those lines.
    fn and(mut self, more: &str) -> Self {
        self.script.truncate(self.script.len() - LAST.len());
        self.script.push_str(more);
        self.script.push_str(LAST);
        self
    }

    fn command(&self, program: &Path, arguments: &[&str]) -> Command {
        let mut command = self.node.machine.command("unshare");
        // Own PIDs, and everything dies with the first of them.
        command.args(["--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]);
        command.args(["sh", "-c", &self.script, "sh"]);
        if let Some(clock) = &self.node.clock {
            command.arg("env").arg(format!("LD_PRELOAD={}", clock.display()));
        }
        command.arg(program).args(arguments);
        if let Driver::Fake = self.node.driver {
            command
                .env("LD_LIBRARY_PATH", libraries())
                .env("TESSERA_FAKE_WORLD", self.node.path().join("world.yaml"))
                .env("TESSERA_FAKE_STATE", self.node.path().join("state"));
        }
        command
    }

    /// Runs a program to its end.
    pub(crate) fn run(&self, program: impl AsRef<OsStr>, arguments: &[&str]) -> Output {
        self.command(Path::new(program.as_ref()), arguments).output().expect("unshare runs")
    }

    /// Runs a C program to its end; its lines.
    pub(crate) fn run_c(&self, name: &str, linked: bool, arguments: &[&str]) -> Vec<Value> {
        let output = self.run(program(name, linked, self.node.path()), arguments);
        let lines = lines_of(&output);
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{name}: {}, after {lines:?}; {error}", output.status);
        lines
    }

    /// Runs the probe to its end; its lines.
    pub(crate) fn probe(&self, arguments: &[&str]) -> Vec<Value> {
        lines_of(&self.run(probe(), arguments))
    }

    /// Starts a program.
    pub(crate) fn start(&self, program: impl AsRef<OsStr>, arguments: &[&str]) -> Running {
        let mut command = self.command(Path::new(program.as_ref()), arguments);
        let mut child = command.stdout(Stdio::piped()).spawn().expect("unshare runs");
        let lines = BufReader::new(child.stdout.take().expect("piped")).lines();
        Running { child, lines }
    }
}

/// The lines of JSON on a program's standard output.
pub(crate) fn lines_of(output: &Output) -> Vec<Value> {
    let text = String::from_utf8_lossy(&output.stdout);
    let error = String::from_utf8_lossy(&output.stderr);
    let parse = |line: &str| {
        serde_json::from_str(line).unwrap_or_else(|_| panic!("`{line}` is JSON; {error}"))
    };
    let lines: Vec<Value> = text.lines().map(parse).collect();
    assert!(!lines.is_empty(), "the program says something: {} {error}", output.status);
    lines
}

/// The last line that a program said, of errors if there is one.
pub(crate) fn last_words(output: &Output) -> String {
    let text =
        [&output.stderr, &output.stdout].map(|bytes| String::from_utf8_lossy(bytes).into_owned());
    let last = text.iter().find_map(|text| text.trim().lines().next_back());
    last.map_or_else(|| output.status.to_string(), str::to_owned)
}

/// A running container.
pub(crate) struct Running {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Running {
    /// Waits for the next line.
    pub(crate) fn next(&mut self) -> Value {
        let line = self.lines.next().expect("the program goes on").expect("text");
        serde_json::from_str(&line).unwrap_or_else(|_| panic!("`{line}` is JSON"))
    }

    /// Waits for its end; all lines that have such a field.
    pub(crate) fn all(&mut self, field: &str) -> Vec<Value> {
        let text = self.lines.by_ref().map(|line| line.expect("text"));
        let lines = text.map(|line| serde_json::from_str::<Value>(&line).expect("JSON"));
        lines.filter(|line| line.get(field).is_some()).collect()
    }

    /// Waits for a line that has such a field.
    pub(crate) fn with(&mut self, field: &str) -> Value {
        loop {
            let line = self.next();
            if line.get(field).is_some() {
                return line;
            }
        }
    }

    /// Waits for an event of the probe.
    pub(crate) fn event(&mut self, name: &str) -> Value {
        loop {
            let line = self.next();
            assert_ne!(line["event"], "error", "{line}");
            if line["event"] == name {
                return line;
            }
        }
    }

    /// Kills it; it does nothing more.
    pub(crate) fn kill(&mut self) {
        self.end();
        // The container's processes die with its first; the last one to go closes the pipe.
        self.lines.by_ref().for_each(drop);
    }

    /// Kills the container's first process, whose end `unshare` waits for; itself where there is
    /// none yet.
    fn end(&mut self) {
        let id = self.child.id();
        let children =
            fs::read_to_string(format!("/proc/{id}/task/{id}/children")).unwrap_or_default();
        let killed = children
            .split_whitespace()
            .next()
            .map(|first| Command::new("kill").args(["-9", first]).status());
        if !matches!(killed, Some(Ok(status)) if status.success()) {
            let _ = self.child.kill();
        }
        let _ = self.child.wait();
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.end();
    }
}
