//! One node of the test bed: fake GPUs, fake kubelet and container runtime, the real driver.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::Context as _;
use rustix::mount::mount_bind;
use tessera_simcluster::api::User;
use tessera_simcluster::cluster::SimCluster;
use tessera_simcluster::node::container::{Image, ImageStore, Runtime, RuntimeOptions};
use tessera_simcluster::node::kubelet::{Kubelet, KubeletOptions};
use tessera_simcluster::node::namespaces;
use tokio::process::Command;

use super::process::{self, Process, ProcessSpec};
use super::programs::Programs;
use super::{NAMESPACE, chaos};

/// Name under which the driver registers.
pub(super) const DRIVER: &str = "gpu.tessera.dev";

/// Image of the scenarios.
const PROBE_IMAGE: &str = "tessera/probe:e2e";

/// Image for tests with thousands of pods: as above, but no process is started.
const UNSTARTED_IMAGE: &str = "tessera/probe-unstarted:e2e";

/// Time limit for a driver to register. It takes a fraction of a second, more on a busy machine.
const TIMEOUT: Duration = Duration::from_secs(300);

/// Time before the slices of a disconnected driver are deleted, as in production.
const SLICE_WIPE_DELAY: Duration = Duration::from_secs(30);

/// Settings shared by all nodes of a test bed.
pub(crate) struct NodeSettings<'a> {
    pub(crate) programs: &'a Programs,
    /// Parent of the nodes' directories.
    pub(crate) base: &'a Path,
    pub(crate) sync_period: Duration,
    /// True to give the driver an adjustable wall clock.
    pub(crate) clocks: bool,
    /// True to run the probe for every unknown image.
    pub(crate) any_image: bool,
    /// True to serve the driver's metrics.
    pub(crate) metrics: bool,
}

/// A node.
pub(crate) struct TestNode {
    name: String,
    directory: PathBuf,
    programs: Programs,
    runtime: Runtime,
    kubelet_options: KubeletOptions,
    kubelet: Option<Kubelet>,
    pub(crate) driver: Process,
    metrics: Option<SocketAddr>,
}

impl TestNode {
    pub(crate) async fn start(
        cluster: &SimCluster,
        settings: &NodeSettings<'_>,
        name: String,
        world: &Path,
    ) -> anyhow::Result<Self> {
        let NodeSettings { programs, base, sync_period, clocks, any_image, metrics } = *settings;
        let directory = base.join(&name);
        std::fs::create_dir_all(directory.join("run"))?;
        std::fs::create_dir_all(directory.join("cdi"))?;
        // As on a real machine, volatile state is on a tmpfs.
        namespaces::mount_tmpfs(&directory.join("run"), None)
            .context("cannot mount tmpfs for driver state")?;
        lay_out_gpus(programs, world, &directory).await?;
        let mut images = ImageStore::default();
        let probe =
            Image::of_programs(&[install(&programs.probe, &directory.join("image")).await?])?;
        if any_image {
            images.set_fallback(probe.clone().with_fixed_args(&["see"]));
        }
        images.insert(UNSTARTED_IMAGE, probe.clone().unstarted());
        images.insert(PROBE_IMAGE, probe);
        let runtime = Runtime::new(RuntimeOptions {
            directory: directory.join("containers"),
            cdi_directories: vec![directory.join("cdi")],
            images,
            init_program: programs.simcluster.clone(),
        });
        let allocatable =
            [("cpu", "32"), ("memory", "256Gi"), ("pods", "250"), ("ephemeral-storage", "100Gi")];
        let kubelet_options = KubeletOptions {
            node_name: name.clone(),
            labels: BTreeMap::new(),
            allocatable: allocatable
                .map(|(resource, amount)| (resource.to_owned(), amount.to_owned()))
                .into(),
            root: directory.join("kubelet"),
            client: cluster.api().client(&User::kubelet(&name)),
            runtime: runtime.clone(),
            sync_period,
            slice_wipe_delay: SLICE_WIPE_DELAY,
        };
        let kubelet = Kubelet::start(kubelet_options.clone()).await?;
        let user = User::service_account(NAMESPACE, "tessera-driver").on_node(&name);
        let kubeconfig = cluster.kubeconfig_for(&user)?;
        let metrics = metrics.then(process::free_address).transpose()?;
        let mut driver = driver_spec(programs, &kubeconfig, &name, &directory, metrics);
        if clocks {
            driver = chaos::with_clock(driver, programs, &directory.join("driver.clock"))?;
        }
        let driver = Process::start(driver).await?;
        let programs = programs.clone();
        Ok(Self {
            name,
            directory,
            programs,
            runtime,
            kubelet_options,
            kubelet: Some(kubelet),
            driver,
            metrics,
        })
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Returns the address of the driver's `/metrics`.
    pub(crate) fn metrics(&self) -> Option<SocketAddr> {
        self.metrics
    }

    /// Waits until the driver has registered. A driver that exits is an error.
    pub(crate) async fn wait_until_ready(&mut self) -> anyhow::Result<()> {
        let Some(kubelet) = &self.kubelet else { return Ok(()) };
        let registered = tokio::time::timeout(TIMEOUT, kubelet.registered(DRIVER));
        let log = self.driver.log().to_owned();
        tokio::select! {
            registered = registered => registered.with_context(|| {
                format!("the driver of {} did not register within the time limit; see {}", self.name, log.display())
            }),
            exited = self.driver.exited() => Err(exited),
        }
    }

    pub(crate) async fn stop_kubelet(&mut self) {
        if let Some(kubelet) = self.kubelet.take() {
            kubelet.stop().await;
        }
    }

    /// Starts the kubelet unless it runs, and waits for the driver's registration.
    pub(crate) async fn start_kubelet(&mut self) -> anyhow::Result<()> {
        self.driver.restart_if_exited()?;
        if self.kubelet.is_none() {
            self.kubelet = Some(Kubelet::start(self.kubelet_options.clone()).await?);
        }
        self.wait_until_ready().await
    }

    /// Returns the remains of claims on this node, one per line, as `e2e/cluster/node.sh residue`
    /// prints them.
    pub(crate) fn residue(&self) -> anyhow::Result<String> {
        let mut lines = Vec::new();
        let claim_spec = |name: &str| name.starts_with("k8s.gpu.tessera.dev-claim_");
        lines.extend(
            files(&self.directory.join("cdi"))?
                .iter()
                .filter(|name| claim_spec(name))
                .map(|name| format!("CDI file {name}")),
        );
        for kind in ["grants", "ledgers"] {
            lines.extend(
                files(&self.directory.join("run").join(kind))?
                    .iter()
                    .map(|name| format!("state {kind}/{name}")),
            );
        }
        let ledgers = self.directory.join("run/ledgers").display().to_string();
        let mounts = std::fs::read_to_string("/proc/self/mounts")?;
        lines.extend(
            mounts
                .lines()
                .filter(|line| line.contains(&ledgers))
                .map(|line| format!("mount {line}")),
        );
        lines.extend(self.journal()?.iter().map(|claim| format!("journal entry {claim}")));
        Ok(lines.into_iter().map(|line| line + "\n").collect())
    }

    /// Returns the claims in the driver's journal.
    fn journal(&self) -> anyhow::Result<Vec<String>> {
        let text = match std::fs::read_to_string(self.directory.join("run/journal.json")) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(error.into()),
        };
        let journal: serde_json::Value = serde_json::from_str(&text)?;
        let claims = journal["claims"].as_object().context("driver journal has no `claims`")?;
        Ok(claims.keys().cloned().collect())
    }

    /// Changes the state of the node's GPUs, with the arguments of `tessera-fake-world control`.
    pub(crate) async fn gpu(&self, arguments: &[String]) -> anyhow::Result<String> {
        let world = self.directory.join("driver-root/usr/share/nvidia/tessera-fake/world.yaml");
        let mut command = Command::new(&self.programs.fake_world);
        command.arg("control").arg(world).args(arguments).stdin(Stdio::null());
        output_of(command).await
    }

    /// Stops kubelet, containers and driver, in this order.
    pub(crate) async fn stop(mut self) -> anyhow::Result<()> {
        self.stop_kubelet().await;
        self.runtime.shut_down().await;
        self.driver.stop().await
    }
}

fn files(directory: &Path) -> anyhow::Result<Vec<String>> {
    match std::fs::read_dir(directory) {
        Ok(entries) => {
            entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect()
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(error).with_context(|| format!("cannot read `{}`", directory.display())),
    }
}

async fn lay_out_gpus(programs: &Programs, world: &Path, directory: &Path) -> anyhow::Result<()> {
    let mut root = Command::new(&programs.fake_world);
    root.arg("driver-root")
        .arg(world)
        .arg(&programs.fake_nvml)
        .arg(&programs.fake_cuda)
        .arg(directory.join("driver-root"));
    output_of(root).await?;
    let mut sysfs = Command::new(&programs.fake_world);
    sysfs.arg("sysfs").arg(world).arg(directory.join("sys"));
    output_of(sysfs).await?;
    make_device_nodes(world, &directory.join("driver-root/dev"))
}

/// Creates the device nodes of the driver and of each GPU.
///
/// Only root can create nodes, so they are bind mounts of `/dev/null`: a character device like the
/// real ones. The fake GPUs do not use the nodes.
fn make_device_nodes(world: &Path, directory: &Path) -> anyhow::Result<()> {
    let text = std::fs::read_to_string(world)
        .with_context(|| format!("cannot read `{}`", world.display()))?;
    let world: serde_json::Value = serde_saphyr::from_str(&text)?;
    let gpus = world["gpus"].as_array().map(Vec::as_slice).unwrap_or_default();
    let minors =
        gpus.iter().enumerate().map(|(index, gpu)| gpu["minor"].as_u64().unwrap_or(index as u64));
    let names = minors.map(|minor| format!("nvidia{minor}"));
    std::fs::create_dir_all(directory)?;
    for name in names.chain(["nvidiactl", "nvidia-uvm"].map(str::to_owned)) {
        let node = directory.join(name);
        std::fs::write(&node, "")?;
        mount_bind("/dev/null", &node)
            .with_context(|| format!("cannot create `{}`", node.display()))?;
    }
    Ok(())
}

/// Copies the program with execute permission for all users, as in an image, whatever the umask.
async fn install(program: &Path, directory: &Path) -> anyhow::Result<PathBuf> {
    let mut install = Command::new("install");
    install.args(["-D", "--mode=755", "--target-directory"]).arg(directory).arg(program);
    output_of(install).await?;
    Ok(directory.join(program.file_name().context("program path has no file name")?))
}

async fn output_of(mut command: Command) -> anyhow::Result<String> {
    let output = command.stdin(Stdio::null()).output().await?;
    let stderr = String::from_utf8_lossy(&output.stderr);
    let program = command.as_std().get_program().display();
    anyhow::ensure!(output.status.success(), "{program}: {}", stderr.trim());
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

fn driver_spec(
    programs: &Programs,
    kubeconfig: &Path,
    node: &str,
    directory: &Path,
    metrics: Option<SocketAddr>,
) -> ProcessSpec {
    ProcessSpec::new(&programs.driver, directory.join("driver.log"))
        .argument("--node-name", node)
        .argument("--kubeconfig", kubeconfig)
        .argument("--kubelet-root", directory.join("kubelet"))
        .argument("--cdi-dir", directory.join("cdi"))
        .argument("--state-dir", directory.join("run"))
        .argument("--driver-root", directory.join("driver-root"))
        .argument("--sysfs-root", directory.join("sys"))
        .argument("--intercept-library", &programs.intercept)
        .argument("--metrics-address", process::address_text(metrics))
        .argument("--health-socket", directory.join("health.sock"))
}
