//! Measurements of the driver on this machine: duration of Prepare with 200 prepared claims,
//! memory, and time from start to registration.
//!
//! `cargo build --release -p tessera-fake-nvml && cargo bench -p tessera-driver`. The driver is the
//! release binary, over real sockets, with an API server in this process behind HTTP, 8 GPUs of the
//! fake NVML (or `TESSERA_NVML_LIBRARY`), and real tmpfs mounts in namespaces of its own. The bench
//! asserts nothing: results depend on the machine, which it reports, too.

#[path = "../tests/fakes/mod.rs"]
mod fakes;

use std::{
    fs,
    net::SocketAddr,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::Context;
use fakes::{
    api::Api,
    gpus,
    kubelet::Kubelet,
    mounts::RecordedMounts,
    node::{asked, claim, uid},
};
use serde_json::json;
use tessera_api::{
    Inventory,
    names::{ClaimName, ClaimUid, GpuUuid, Namespace, PoolName},
};
use tessera_cdi::SpecStore;
use tessera_driver::{
    base_spec::{BaseSpec, DriverRoot},
    intercept::InterceptMode,
    inventory::HardwareState,
    mps::Mps,
    prepare::{LocalNode, claim::PreparableClaim, execute::Executor},
    state::{
        StatePaths,
        attempts::Attempt,
        journal::JournalStore,
        library::InstalledLibrary,
        mounts::{KernelMounts, Mounts, Tmpfs},
        shares::ShareFiles,
    },
};
use tokio_util::sync::CancellationToken;

const GPUS: u32 = 8;
const PREPARED: usize = 200;
const ROUNDS: usize = 1000;
const STARTS: usize = 10;

/// Set in the copy that runs in namespaces of its own.
const INSIDE: &str = "TESSERA_BENCH_IN_NAMESPACE";

fn main() -> anyhow::Result<()> {
    if std::env::var_os(INSIDE).is_none() {
        let own = std::env::current_exe()?;
        let mut inside = Command::new("unshare");
        inside.args(["--user", "--map-root-user", "--mount"]).arg(own).env(INSIDE, "1");
        anyhow::ensure!(
            inside.status().context("unshare")?.success(),
            "the copy in namespaces failed"
        );
        return Ok(());
    }
    machine();
    without_api(Arc::new(KernelMounts), "Prepare without API and gRPC")?;
    without_api(Arc::new(RecordedMounts::default()), "  without the mount (mounts only recorded)")?;
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    runtime.block_on(whole())
}

fn machine() {
    let cpu = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = cpu
        .lines()
        .find_map(|line| line.strip_prefix("model name"))
        .unwrap_or(" ?")
        .trim_start_matches([' ', '\t', ':']);
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    println!("machine: {cores} x {model}, Linux {}", kernel.trim());
    println!("{PREPARED} claims prepared on {GPUS} GPUs, {ROUNDS} rounds");
}

/// Prints the median and the 99th percentile.
fn report(what: &str, mut times: Vec<Duration>) {
    times.sort_unstable();
    let at = |percent: usize| times[(times.len() - 1) * percent / 100].as_secs_f64() * 1e3;
    println!("{what:<60} p50 {:7.3} ms   p99 {:7.3} ms   max {:7.3} ms", at(50), at(99), at(100));
}

/// Returns a directory on a tmpfs, as on a node. The mount ends with the namespace.
fn tmpfs() -> anyhow::Result<tempfile::TempDir> {
    let directory = tempfile::tempdir()?;
    let tmpfs = Tmpfs { size_bytes: 1 << 30, inodes: 1 << 20, executable: true };
    KernelMounts.mount_tmpfs(directory.path(), tmpfs)?;
    Ok(directory)
}

/// Measures the part of Prepare that changes the node, in this process.
fn without_api(mounts: Arc<dyn Mounts>, what: &str) -> anyhow::Result<()> {
    let directory = tmpfs()?;
    let paths = StatePaths::new(directory.path().join("state"));
    let source = directory.path().join("intercept.so");
    fs::write(&source, vec![0; 200_000])?;
    let journal = Arc::new(JournalStore::new(paths.clone()));
    let library =
        InstalledLibrary::install(&source, InterceptMode::Preload, &paths, &journal, &*mounts)?;
    let specs = SpecStore::new(directory.path().join("cdi"));
    let base = Arc::new(BaseSpec::new(specs.clone(), DriverRoot::new("/nonexistent", "/")));
    let mps = Mps::new(&paths, false);
    let mig = Arc::new(fakes::gpus::FakeGpus::default());
    let executor = Executor::new(ShareFiles::new(paths.clone(), mounts), specs, base, mps, mig);
    let context_memory = Default::default();
    let node = LocalNode {
        journal,
        paths,
        executor,
        library,
        intercept: InterceptMode::Preload,
        context_memory,
        published: Default::default(),
        default_compute: tessera_driver::state::journal::ComputeCap::Balance,
    };
    let prepare = |claim: &PreparableClaim, hardware| {
        let attempt = Attempt::begin(&node.paths, &claim.uid, CancellationToken::new())?;
        node.prepare(claim, hardware, &attempt)
    };
    let gpus = (0..GPUS).map(gpus::gpu).collect();
    let hardware = HardwareState::Known(Inventory::new(gpus, vec![], vec![]));

    let allocated = |name: &str, number: usize| -> anyhow::Result<PreparableClaim> {
        let mut object = claim(name, &[(u32::try_from(number)? % GPUS, 1, 1)]);
        object["status"]["allocation"]["devices"]["results"][0]["consumedCapacity"]["memory"] =
            json!("512Mi");
        let object = serde_json::from_value(object)?;
        let uid = ClaimUid::new(uid(name))?;
        let (namespace, name) = (Namespace::new("ns")?, ClaimName::new(name)?);
        Ok(PreparableClaim::check(&object, &uid, &namespace, &name, &PoolName::new("node-a")?)?)
    };
    for number in 0..PREPARED {
        prepare(&allocated(&format!("prepared-{number}"), number)?, &hardware)?;
    }
    let mut times = Vec::new();
    for round in 0..ROUNDS {
        let claim = allocated("measured", round)?;
        let begun = Instant::now();
        prepare(&claim, &hardware)?;
        times.push(begun.elapsed());
        node.unprepare(&claim.uid)?;
    }
    report(what, times);
    for number in 0..PREPARED {
        node.unprepare(&ClaimUid::new(uid(&format!("prepared-{number}")))?)?;
    }
    Ok(())
}

/// A driver process that is killed when dropped.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        // Both calls fail if it has exited already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Directories and flags of the driver.
struct Site {
    directory: tempfile::TempDir,
    nvml: PathBuf,
    world: PathBuf,
}

impl Site {
    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn start(&self) -> anyhow::Result<Process> {
        let mut driver = Command::new(env!("CARGO_BIN_EXE_tessera-driver"));
        driver.args(["--node-name", "node-a", "--metrics-address", ""]);
        for (flag, value) in [
            ("--kubeconfig", self.path("kubeconfig")),
            ("--kubelet-root", self.path("kubelet")),
            ("--cdi-dir", self.path("cdi")),
            ("--state-dir", self.path("state")),
            ("--driver-root", self.path("root")),
            ("--sysfs-root", self.path("sys")),
            ("--intercept-library", self.path("intercept.so")),
            ("--nvml-library", self.nvml.clone()),
        ] {
            driver.arg(flag).arg(value);
        }
        driver.env("TESSERA_FAKE_WORLD", &self.world).env("RUST_LOG", "warn").stdin(Stdio::null());
        Ok(Process(driver.spawn()?))
    }
}

async fn whole() -> anyhow::Result<()> {
    let api = Api::new();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    let server = axum::serve(listener, api.router());
    tokio::spawn(async move { server.await });
    let site = site(address)?;

    let mut starts = Vec::new();
    for _ in 0..STARTS {
        let begun = Instant::now();
        let driver = site.start()?;
        wait_for(&site.path("kubelet/plugins_registry")).await;
        Kubelet::register(&site.path("kubelet")).await;
        starts.push(begun.elapsed());
        drop(driver);
        fs::remove_dir_all(site.path("kubelet"))?;
    }
    report("start to registered", starts);

    let driver = site.start()?;
    wait_for(&site.path("kubelet/plugins_registry")).await;
    let kubelet = Kubelet::register(&site.path("kubelet")).await;
    let gpus = published(&api).await;
    let allocate = |name: &str, number: usize| {
        let mut object = claim(name, &[(0, 1, 1)]);
        let result = &mut object["status"]["allocation"]["devices"]["results"][0];
        result["device"] = json!(gpus[number % gpus.len()].device_name());
        result["consumedCapacity"]["memory"] = json!("512Mi");
        api.put_claim(object);
        asked(name)
    };
    for number in 0..PREPARED {
        let claim = allocate(&format!("prepared-{number}"), number);
        kubelet.prepare(claim).await.map_err(anyhow::Error::msg)?;
    }
    let (mut prepares, mut unprepares, mut repeats) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..ROUNDS {
        let claim = allocate("measured", round);
        for times in [&mut prepares, &mut repeats] {
            let begun = Instant::now();
            kubelet.prepare(claim.clone()).await.map_err(anyhow::Error::msg)?;
            times.push(begun.elapsed());
        }
        let begun = Instant::now();
        kubelet.unprepare(claim).await.map_err(anyhow::Error::msg)?;
        unprepares.push(begun.elapsed());
    }
    report("NodePrepareResources, whole (gRPC, API read over HTTP)", prepares);
    report("NodePrepareResources of a prepared claim", repeats);
    report("NodeUnprepareResources, whole", unprepares);
    memory(driver.0.id())
}

fn site(address: SocketAddr) -> anyhow::Result<Site> {
    let directory = tmpfs()?;
    let beside = Path::new(env!("CARGO_BIN_EXE_tessera-driver")).with_file_name("libnvidia_ml.so");
    let nvml = std::env::var_os("TESSERA_NVML_LIBRARY").map_or(beside, PathBuf::from);
    anyhow::ensure!(
        nvml.exists(),
        "{} is missing: cargo build --release -p tessera-fake-nvml, or set TESSERA_NVML_LIBRARY",
        nvml.display()
    );
    let world = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../testing/fake/world/worlds/h100-8-nvswitch.yaml");
    let site = Site { directory, nvml, world };
    fs::write(site.path("intercept.so"), vec![0; 200_000])?;
    let kubeconfig = json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "bench",
        "clusters": [{"name": "bench", "cluster": {"server": format!("http://{address}")}}],
        "users": [{"name": "bench", "user": {}}],
        "contexts": [{"name": "bench", "context": {"cluster": "bench", "user": "bench"}}],
    });
    fs::write(site.path("kubeconfig"), kubeconfig.to_string())?;
    let world = tessera_fake_world::World::load(&site.world)?;
    tessera_fake_world::tree::write_sysfs(&world, &site.path("sys"))?;
    Ok(site)
}

/// Returns the published GPUs.
async fn published(api: &Api) -> Vec<GpuUuid> {
    let devices = api
        .wait_for("the GPUs", |api| {
            let slices = api.slices();
            let devices = slices.first()?["spec"]["devices"].as_array().cloned()?;
            (devices.len() == GPUS as usize).then_some(devices)
        })
        .await;
    let names = devices.iter().filter_map(|device| device["attributes"]["uuid"]["string"].as_str());
    names.filter_map(|name| GpuUuid::new(name).ok()).collect()
}

/// Waits for the registration socket by polling every millisecond, which adds 0.5 ms on average.
async fn wait_for(directory: &Path) {
    while !fs::read_dir(directory).is_ok_and(|mut entries| entries.next().is_some()) {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

fn memory(pid: u32) -> anyhow::Result<()> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    for field in ["VmRSS", "VmHWM"] {
        let line = status.lines().find(|line| line.starts_with(field)).unwrap_or_default();
        let kib: f64 = line.split_whitespace().nth(1).unwrap_or("0").parse()?;
        println!("{:<60} {:.1} MiB", format!("driver {field}"), kib / 1024.0);
    }
    Ok(())
}
