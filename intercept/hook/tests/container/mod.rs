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
use std::mem::offset_of;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Output, Stdio};
use std::sync::OnceLock;

#[allow(unused_imports, reason = "every test file uses its own part of it")]
pub(crate) use arbiter::{arbitrate, monotonic_ns};
#[allow(unused_imports, reason = "every test file uses its own part of it")]
pub(crate) use mode::{Mode, REAL, intercept_for_hami, proxies};
#[allow(unused_imports, reason = "every test file uses its own part of it")]
pub(crate) use mps_daemon::{MpsDaemon, ask_mps};
use serde_json::Value;
use tempfile::TempDir;
use tessera_fake_world::{artifact, shipped};
use tessera_intercept_abi::{
    ComputePolicy, GRANTS_TMPFS_INODES, Grant, LEDGER_LEN, LEDGER_TMPFS_INODES, LedgerPage,
    LedgerReport, PublishedPage, Text, grant_offset, ledger, ledger::Total, mps,
};
use tessera_intercept_limiter::compute::{Contention, Gain, Published, Rate};
use tessera_intercept_symbols::SymbolVersion;
use tessera_test_support::report_skip;

pub(crate) const MIB: u64 = 1 << 20;
pub(crate) const GIB: u64 = 1 << 30;

/// Returns the library as it ships.
pub(crate) fn intercept() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        build("tessera-intercept", &["--profile", "intercept"], "intercept/libtessera_intercept.so")
    })
}

/// Returns the output of a tool of binutils for a file.
pub(crate) fn inspect(tool: &str, arguments: &[&str], file: &Path) -> String {
    let output = Command::new(tool).args(arguments).arg(file).output().expect("binutils are there");
    assert!(output.status.success(), "{tool}");
    String::from_utf8(output.stdout).expect("text")
}

/// Returns the names that the preload library exports.
pub(crate) fn exported() -> &'static BTreeSet<String> {
    static NAMES: OnceLock<BTreeSet<String>> = OnceLock::new();
    NAMES.get_or_init(|| exported_by(intercept()))
}

/// Returns the names that a library exports.
pub(crate) fn exported_by(library: &Path) -> BTreeSet<String> {
    let symbols = inspect("nm", &["--dynamic", "--defined-only"], library);
    symbols.lines().filter_map(|line| line.split(' ').nth(2)).map(str::to_owned).collect()
}

/// Returns the probe.
pub(crate) fn probe() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| build("tessera-probe", &[], "debug/tessera-probe"))
}

/// Returns the fake MPS control daemon.
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

/// Returns the C compiler.
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

/// Returns the directory of the fake driver's libraries, under NVIDIA's names.
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

/// Creates a link, unless another test has created it.
fn link(to: &Path, at: &Path) {
    match std::os::unix::fs::symlink(to, at) {
        Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
            panic!("{}: {error}", at.display())
        }
        _ => assert_eq!(fs::read_link(at).expect("a link"), to),
    }
}

/// Returns the reason why containers cannot run here, if any.
pub(crate) fn namespaces_error() -> Option<String> {
    let tried = Command::new("unshare")
        .args(["--user", "--map-root-user", "--mount", "--pid", "--fork", "true"])
        .output();
    match tried {
        Ok(output) if output.status.success() => None,
        Ok(output) => Some(String::from_utf8_lossy(&output.stderr).trim().to_owned()),
        Err(error) => Some(format!("unshare: {error}")),
    }
}

/// Returns true if containers can run here. Otherwise reports `test` as skipped.
pub(crate) fn containers_available(test: &str) -> bool {
    let reason = namespaces_error();
    if let Some(reason) = &reason {
        report_skip(test, reason);
    }
    reason.is_none()
}

/// Returns the node that `make` creates, or `None` if containers cannot run here, which is reported
/// as a skip of `test`.
pub(crate) fn set_up(test: &str, make: impl FnOnce() -> Node) -> Option<Node> {
    containers_available(test).then(make)
}

/// Driver that containers use.
enum Driver {
    /// Fake driver.
    Fake,
    /// Driver of this machine, with its device files.
    Machine(Vec<PathBuf>),
}

impl Driver {
    /// Returns NVIDIA's device files of this machine, if any.
    fn of_machine() -> Self {
        let files = fs::read_dir("/dev").expect("a directory").flatten();
        let is_device = |path: &PathBuf| {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            name.starts_with("nvidia") && !path.is_dir()
        };
        Self::Machine(files.map(|entry| entry.path()).filter(is_device).collect())
    }

    /// Returns the script that copies more of `/etc` for programs that were not written for tests.
    /// `$etc` is the copy, which is not mounted yet.
    fn etc_script(&self) -> &str {
        match self {
            Self::Fake => "",
            Self::Machine(_) => {
                "for known in alternatives passwd group; do\n\
                 [ ! -e \"/etc/$known\" ] || cp --archive --no-preserve=ownership \"/etc/$known\" \"$etc/\"\ndone\n"
            }
        }
    }

    /// Returns the device files of a container.
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
    /// Preload library that replaces the clock of programs, if any.
    clock: Option<PathBuf>,
}

/// The namespaces of the node's mounts, held by a process that exits with the test.
struct Machine(Child);

impl Machine {
    /// Starts the process, and mounts the directories of grants and of the driver's socket as the
    /// driver does.
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

    /// Returns a command that runs a program on the node.
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

    /// Returns the path by which the test can access a file of the node.
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

/// Kind of mount of a share in a container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mount {
    /// As by the driver.
    Real,
    /// The grant is writable.
    WritableGrant,
    /// The files are plain files that the tenant created.
    Plain,
    /// The grant is a file of a volume.
    GrantOfVolume(Volume),
    /// The ledger is a file of a volume.
    LedgerOfVolume(Volume),
}

/// Storage of a pod's volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Volume {
    /// A directory of the node's disk.
    Disk,
    /// A tmpfs as large as a ledger.
    Memory,
}

impl Volume {
    /// Returns the script that creates a volume at `$volume`.
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
    /// Paths of its files on the node: grant and ledger.
    inside: [PathBuf; 2],
    /// Paths of the same files for the test.
    outside: [PathBuf; 2],
    node: PathBuf,
}

/// Indexes of a share's files.
const GRANT: usize = 0;
const LEDGER: usize = 1;

/// Returns a world of eight H100 with a driver for this version of CUDA.
fn world_of(version: SymbolVersion) -> String {
    let (theirs, world) = ("cuda: \"13.0\"", shipped::H100_8_NVSWITCH);
    assert!(world.contains(theirs), "the world is for another version");
    world.replace(theirs, &format!("cuda: \"{version}\""))
}

impl Node {
    /// Returns a node with eight H100.
    pub(crate) fn new() -> Self {
        Self::with_world(shipped::H100_8_NVSWITCH)
    }

    /// Returns such a node with a driver for this version of CUDA.
    pub(crate) fn with_cuda(version: SymbolVersion) -> Self {
        Self::with_world(&world_of(version))
    }

    /// Returns a node with GPUs that cannot migrate managed memory while kernels run.
    pub(crate) fn before_pascal() -> Self {
        let (theirs, world) = ("computeCapability: \"9.0\"", shipped::H100_8_NVSWITCH);
        assert!(world.contains(theirs), "the world has other GPUs");
        Self::with_world(&world.replace(theirs, "computeCapability: \"5.2\""))
    }

    /// Returns a node on which GPU work takes its modelled time.
    pub(crate) fn in_real_time() -> Self {
        Self::at_scale(shipped::H100_8_NVSWITCH, 1.0)
    }

    /// Returns a node whose clock advances only while the program waits, so that the load of the
    /// machine has no effect. Only for programs whose threads do not wait for each other.
    pub(crate) fn with_paused_clock() -> Self {
        let clock = artifact::paused_clock().expect("the clock builds");
        Self { clock: Some(clock), ..Self::in_real_time() }
    }

    /// Returns such a node with a driver for this version of CUDA.
    pub(crate) fn with_paused_clock_and_cuda(version: SymbolVersion) -> Self {
        let clock = artifact::paused_clock().expect("the clock builds");
        Self { clock: Some(clock), ..Self::at_scale(&world_of(version), 1.0) }
    }

    fn with_world(world: &str) -> Self {
        // GPU work takes no time.
        Self::at_scale(world, 0.0)
    }

    fn at_scale(world: &str, scale: f64) -> Self {
        let directory = TempDir::new().expect("a directory");
        let world = format!("{world}\ntime: {{scale: {scale:.1}}}\n");
        fs::write(directory.path().join("world.yaml"), &world).expect("written");
        let parsed = tessera_fake_world::World::parse(&world, "test").expect("a world");
        let uuids = parsed.gpus.iter().map(|gpu| gpu.uuid.clone()).collect();
        let machine = Machine::start(directory.path());
        Self { driver: Driver::Fake, directory, uuids, machine, clock: None }
    }

    /// Returns this machine with its own driver, if any. Its shares are created from grants
    /// (`share_of`).
    pub(crate) fn of_this_machine() -> Self {
        let directory = TempDir::new().expect("a directory");
        let machine = Machine::start(directory.path());
        Self { driver: Driver::of_machine(), directory, uuids: Vec::new(), machine, clock: None }
    }

    pub(crate) fn path(&self) -> &Path {
        self.directory.path()
    }

    /// Returns a command that runs a program on the node, outside of containers.
    pub(crate) fn command(&self, program: &str) -> Command {
        self.machine.command(program)
    }

    /// Runs a program on the node, outside of containers, with the driver.
    pub(crate) fn run(&self, program: &Path, arguments: &[&str]) -> Output {
        let mut command = self.machine.command(program.to_str().expect("text"));
        command.args(arguments);
        self.use_driver(&mut command);
        command.output().expect("it runs")
    }

    fn use_driver(&self, command: &mut Command) {
        if let Driver::Fake = self.driver {
            command
                .env("LD_LIBRARY_PATH", libraries())
                .env("TESSERA_FAKE_WORLD", self.path().join("world.yaml"))
                .env("TESSERA_FAKE_STATE", self.path().join("state"));
        }
    }

    /// Returns the UUIDs of the GPUs.
    pub(crate) fn uuids(&self) -> &[String] {
        &self.uuids
    }

    /// Returns the UUID of the first GPU.
    pub(crate) fn first_uuid(&self) -> &str {
        &self.uuids[0]
    }

    /// Returns the directory of the driver's socket.
    pub(crate) fn host(&self) -> PathBuf {
        self.machine.path(&self.path().join("host"))
    }

    /// Returns the memory of a context on the first GPU.
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

    /// Returns the arguments of programs that compare the ledger with the driver: a plugin that
    /// calls the driver directly, and the position of the used bytes in the ledger.
    pub(crate) fn comparison_arguments(&self) -> [String; 3] {
        let total_at = std::mem::offset_of!(LedgerPage, total);
        let shift = Total { used_bytes: 1, slot: 0, change: 0 }.pack().trailing_zeros();
        [self.plugin("bare").display().to_string(), total_at.to_string(), shift.to_string()]
    }

    /// Creates a share of the first GPU that is charged for contexts.
    pub(crate) fn share_with_contexts(&self, bytes: u64) -> NodeShare {
        self.share_with_contexts_of(0, bytes)
    }

    /// Creates a share of a GPU that charges contexts.
    pub(crate) fn share_with_contexts_of(&self, gpu: usize, bytes: u64) -> NodeShare {
        self.share_of(Grant {
            context_bytes: self.context_bytes(),
            ..self.grant(&format!("claim-{gpu}"), gpu, bytes)
        })
    }

    /// Creates an oversubscribed share of the first GPU.
    pub(crate) fn oversubscribed_share(&self, id: &str, bytes: u64) -> NodeShare {
        self.share_of(Grant { oversubscribe: true, ..self.grant(id, 0, bytes) })
    }

    /// Creates a share of a GPU.
    pub(crate) fn share(&self, id: &str, gpu: usize, bytes: u64) -> NodeShare {
        self.share_of(self.grant(id, gpu, bytes))
    }

    /// Returns the grant of a share.
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

    /// Creates a share of 1 GiB with this part of the first GPU's time.
    pub(crate) fn share_of_time(&self, id: &str, policy: ComputePolicy, percent: u32) -> NodeShare {
        let grant = self.share(&format!("{id}-as-usual"), 0, GIB).grant;
        let id = Text::new(id).expect("short");
        self.share_of(Grant { policy, cores_percent: percent, id, ..grant })
    }

    /// Creates a share from a grant.
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

    /// Returns a container without the library.
    pub(crate) fn container_without_library(&self) -> Container<'_> {
        Container { node: self, script: LAST.to_owned() }
    }

    /// Returns a container with these shares, mounted as given.
    pub(crate) fn container_with_mounts<'a>(
        &'a self,
        shares: &[(&NodeShare, Mount)],
    ) -> Container<'a> {
        self.container_with(Mode::Preload, shares)
    }

    /// Returns a container with these shares and this injection mode.
    pub(crate) fn container_in<'a>(&'a self, mode: Mode, shares: &[&NodeShare]) -> Container<'a> {
        let real: Vec<_> = shares.iter().map(|share| (*share, Mount::Real)).collect();
        self.container_with(mode, &real)
    }

    fn container_with<'a>(&'a self, mode: Mode, shares: &[(&NodeShare, Mount)]) -> Container<'a> {
        let mut script = format!("set -eu\ndev=$(mktemp -d -p {})\n", self.path().display());
        // A tmpfs, as in every container. In a sticky directory such as /tmp, newer kernels refuse
        // `>/dev/null` in the container of an ordinary user, in which the device's owner is
        // unmapped.
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
        // As in a pod, /etc/ld.so.preload injects the library into every program.
        script.push_str("etc=$(mktemp -d -p /dev)\ncp /etc/ld.so.cache \"$etc/\"\n");
        script.push_str(self.driver.etc_script());
        script.push_str(&mode.script());
        script.push_str("mount --bind \"$etc\" /etc\n");
        script.push_str(&glibc::script());
        script.push_str(LAST);
        Container { node: self, script }
    }

    /// Returns a container with these shares, mounted as by the driver.
    pub(crate) fn container<'a>(&'a self, shares: &[&NodeShare]) -> Container<'a> {
        self.container_in(Mode::Preload, shares)
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

    /// Returns the paths of its files on the node: grant and ledger.
    pub(crate) fn paths(&self) -> &[PathBuf; 2] {
        &self.inside
    }

    /// Publishes a rate in the grant, as the driver does.
    pub(crate) fn publish(&self, published: &Published) {
        let [word, others_busy_ns, scale] = published.words();
        let scale_at = grant_offset::PUBLISHED + offset_of!(PublishedPage, scale);
        self.overwrite_grant(scale_at, &scale.to_le_bytes());
        self.overwrite_grant(grant_offset::PUBLISHED + 8, &others_busy_ns.to_le_bytes());
        self.overwrite_grant(grant_offset::PUBLISHED, &word.to_le_bytes());
    }

    /// Publishes the memory of the CUDA driver beyond the slots, as the driver does.
    pub(crate) fn publish_overhead(&self, bytes: i64) {
        let at = grant_offset::PUBLISHED + offset_of!(PublishedPage, overhead_bytes);
        self.overwrite_grant(at, &bytes.to_le_bytes());
    }

    /// Publishes a correction of charged GPU time, as the driver does at that time.
    pub(crate) fn publish_gain(&self, gain: Gain, now_ns: u64) {
        let at = grant_offset::PUBLISHED + offset_of!(PublishedPage, gain);
        self.overwrite_grant(at, &gain.word(0, now_ns).to_le_bytes());
    }

    /// Publishes that launches are not metered, and the utilization that NVML reports to the host
    /// at that time.
    pub(crate) fn publish_unmetered(&self, percent: u8, now_ns: u64) {
        let (rate, others, stamp_ms) = (Rate::FULL, Contention::NONE, 0);
        let is_metered = false;
        let scale = Rate::FULL;
        self.publish(&Published { rate, others, others_busy_ns: 0, stamp_ms, is_metered, scale });
        let at = grant_offset::PUBLISHED + offset_of!(PublishedPage, gain);
        self.overwrite_grant(at, &Gain::ONE.word(percent, now_ns).to_le_bytes());
    }

    /// Returns true if a process holds the lock of a slot.
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
        assert_eq!(code, 0, "the system call succeeds");
        i32::from(lock.l_type) != libc::F_UNLCK
    }

    /// Reads the ledger.
    pub(crate) fn ledger<T>(&self, read: impl FnOnce(&LedgerReport<'_>) -> T) -> T {
        let bytes = fs::read(&self.outside[LEDGER]).expect("a ledger");
        read(&LedgerReport::parse(&bytes).expect("a good ledger"))
    }

    /// Overwrites bytes of the grant.
    pub(crate) fn overwrite_grant(&self, at: usize, bytes: &[u8]) {
        self.overwrite(GRANT, at, bytes);
    }

    /// Overwrites bytes of the ledger.
    pub(crate) fn overwrite_ledger(&self, at: usize, bytes: &[u8]) {
        self.overwrite(LEDGER, at, bytes);
    }

    fn overwrite(&self, file: usize, at: usize, bytes: &[u8]) {
        use std::os::unix::fs::FileExt as _;
        let file = fs::OpenOptions::new().write(true).open(&self.outside[file]).expect("opens");
        file.write_all_at(bytes, at as u64).expect("written");
    }

    /// Changes the grant in place, as the driver does.
    pub(crate) fn change(&self, grant: Grant) {
        use tessera_intercept_abi::GrantUpdate;
        let now = fs::read(&self.outside[GRANT]).expect("a grant");
        let update = grant.update(&now).expect("the same share");
        self.overwrite_grant(GrantUpdate::SEQUENCE_OFFSET, &update.begin);
        self.overwrite_grant(GrantUpdate::BODY_OFFSET, &update.body);
        self.overwrite_grant(GrantUpdate::SEQUENCE_OFFSET, &update.end);
    }
}

/// End of a container's script, after all mounts.
const LAST: &str = "exec \"$@\"\n";

/// Mounts a `/dev` over that of the machine, which the container without the library shares.
const OWN_DEVICES: &str = "\
if [ ! -e /dev/nvidiactl ]; then
  mount -t tmpfs -o size=64k tmpfs /mnt
  for name in null zero random urandom; do
    : >/mnt/$name
    mount --bind /dev/$name /mnt/$name
  done
  mkdir /mnt/shm
  mount --rbind /dev/shm /mnt/shm
  mount --move /mnt /dev
fi
";

/// A container that is not running yet.
pub(crate) struct Container<'a> {
    node: &'a Node,
    script: String,
}

impl Container<'_> {
    /// Adds the pipes of an MPS daemon and environment variables, as the driver does for a claim
    /// that shares by MPS.
    pub(crate) fn with_mps(self, pipes: &Path, variables: &[(&str, &str)]) -> Self {
        self.and(&format!("mkdir {0}; mount --bind {1} {0}\n", mps::DIR, pipes.display()))
            .with_variables(variables)
    }

    /// Sets environment variables of the program.
    pub(crate) fn with_variables(self, variables: &[(&str, &str)]) -> Self {
        let mut more = String::new();
        for (name, value) in variables {
            writeln!(more, "export {name}={value}").expect("a string");
        }
        self.and(&more)
    }

    /// Mounts a directory of the node as `/dev/shm`.
    pub(crate) fn with_shared_memory(self, directory: &Path) -> Self {
        self.and(&format!("mount --bind {} /dev/shm\n", directory.display()))
    }

    /// Mounts the proxies over these two files of the driver, as the driver's CDI spec does.
    pub(crate) fn with_proxies(self, driver: &[PathBuf; 2]) -> Self {
        self.and(&mode::mount_script(driver))
    }

    /// Gives a container without the library a `/dev` of its own, unless the machine has GPUs.
    pub(crate) fn with_own_devices(self) -> Self {
        self.and(OWN_DEVICES)
    }

    /// Adds the device node by which programs detect a GPU. Nothing opens it. The container has a
    /// `/dev` of its own.
    pub(crate) fn with_device_node(self) -> Self {
        self.and("[ -e /dev/nvidiactl ] || touch /dev/nvidiactl\n")
    }

    /// Limits the run time of the program.
    pub(crate) fn with_timeout(self, seconds: u32) -> Self {
        self.and(&format!("set -- timeout {seconds} \"$@\"\n"))
    }

    /// Adds lines to the script.
    fn and(mut self, more: &str) -> Self {
        self.script.truncate(self.script.len() - LAST.len());
        self.script.push_str(more);
        self.script.push_str(LAST);
        self
    }

    fn command(&self, program: &Path, arguments: &[&str]) -> Command {
        let mut command = self.node.machine.command("unshare");
        // A PID namespace of its own, whose processes are killed with the first.
        command.args(["--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]);
        command.args(["sh", "-c", &self.script, "sh"]);
        if let Some(clock) = &self.node.clock {
            command.arg("env").arg(format!("LD_PRELOAD={}", clock.display()));
        }
        command.arg(program).args(arguments);
        self.node.use_driver(&mut command);
        command
    }

    /// Runs a program to its end.
    pub(crate) fn run(&self, program: impl AsRef<OsStr>, arguments: &[&str]) -> Output {
        self.command(Path::new(program.as_ref()), arguments).output().expect("unshare runs")
    }

    /// Runs a C program to its end and returns its lines.
    pub(crate) fn run_c(&self, name: &str, linked: bool, arguments: &[&str]) -> Vec<Value> {
        let output = self.run(program(name, linked, self.node.path()), arguments);
        let lines = lines_of(&output);
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{name}: {}, after {lines:?}; {error}", output.status);
        lines
    }

    /// Runs the probe to its end and returns its lines.
    pub(crate) fn probe(&self, arguments: &[&str]) -> Vec<Value> {
        lines_of(&self.run(probe(), arguments))
    }

    /// Starts the probe and waits until it holds that much memory of the first GPU.
    pub(crate) fn hold(&self, size: &str) -> Running {
        let mut running = self.start(probe(), &["hold", "--take", size]);
        running.wait_for_event("holding");
        running
    }

    /// Starts a program.
    pub(crate) fn start(&self, program: impl AsRef<OsStr>, arguments: &[&str]) -> Running {
        let mut command = self.command(Path::new(program.as_ref()), arguments);
        let mut child = command.stdout(Stdio::piped()).spawn().expect("unshare runs");
        let lines = BufReader::new(child.stdout.take().expect("piped")).lines();
        Running { child, lines }
    }
}

/// Returns the lines of JSON on a program's standard output.
pub(crate) fn lines_of(output: &Output) -> Vec<Value> {
    let text = String::from_utf8_lossy(&output.stdout);
    let error = String::from_utf8_lossy(&output.stderr);
    let parse = |line: &str| {
        serde_json::from_str(line).unwrap_or_else(|_| panic!("`{line}` is JSON; {error}"))
    };
    let lines: Vec<Value> = text.lines().map(parse).collect();
    assert!(!lines.is_empty(), "no output: {} {error}", output.status);
    lines
}

/// Returns the last line of a program's errors, or else of its output.
pub(crate) fn last_line(output: &Output) -> String {
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
        let line = self.lines.next().expect("the program still runs").expect("text");
        serde_json::from_str(&line).unwrap_or_else(|_| panic!("`{line}` is JSON"))
    }

    /// Waits for its end and returns all lines that have this field.
    pub(crate) fn lines_with(&mut self, field: &str) -> Vec<Value> {
        let text = self.lines.by_ref().map(|line| line.expect("text"));
        let lines = text.map(|line| serde_json::from_str::<Value>(&line).expect("JSON"));
        lines.filter(|line| line.get(field).is_some()).collect()
    }

    /// Waits for a line that has this field.
    pub(crate) fn wait_for_field(&mut self, field: &str) -> Value {
        loop {
            let line = self.next();
            if line.get(field).is_some() {
                return line;
            }
        }
    }

    /// Waits for an event of the probe.
    pub(crate) fn wait_for_event(&mut self, name: &str) -> Value {
        loop {
            let line = self.next();
            assert_ne!(line["event"], "error", "{line}");
            if line["event"] == name {
                return line;
            }
        }
    }

    /// Kills all its processes and waits for their end.
    pub(crate) fn kill(&mut self) {
        self.end();
        // The container's processes are killed with its first one; the last one closes the pipe.
        self.lines.by_ref().for_each(drop);
    }

    /// Kills the container's first process, whose end `unshare` waits for, or `unshare` if there is
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
