//! The driver as a whole: settings, parts, and orderly stop.

mod startup;

use std::{
    collections::BTreeSet,
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use anyhow::Context;
use kube::Client;
use tessera_api::{
    config::ComputePolicy,
    names::{ExtendedResourceName, NodeName},
    slice::{CoresRatio, DeviceOrder, MaxShares, MemoryRatio},
};
use tessera_gpu::{GpuLibrary, MigLibrary};
use tessera_runtime::{
    server::{health::HealthSocket, http::HttpServer},
    supervisor::{Supervisor, TaskFailure},
};
use tokio_util::sync::{CancellationToken, DropGuard};

use self::startup::Startup;
use crate::{
    base_spec::DriverRoot,
    context_memory::ContextMemory,
    http::{self, Endpoints},
    intercept::InterceptMode,
    inventory::InventoryWatcherHandle,
    kubelet::{server::KubeletServers, socket::SocketPaths},
    metrics::DriverMetrics,
    mode::{DriverMode, FenceKind},
    other_allocators::OtherAllocatorPolicy,
    prepare::DetachedClaims,
    state::{journal::JournalStore, mounts::Mounts},
    usage::load::LoadReader,
};

/// Time for which tasks may finish when the driver stops.
const GRACE: Duration = Duration::from_secs(5);

/// Settings of the driver: its flags, validated.
#[derive(Clone, Debug)]
pub struct DriverSettings {
    /// The name of the Node.
    pub node: NodeName,
    /// The kubelet's root directory.
    pub kubelet_root: PathBuf,
    /// The UID of the driver's pod, for sockets of its own.
    pub pod_uid: Option<String>,
    /// The directory of CDI specs.
    pub cdi_dir: PathBuf,
    /// The state directory.
    pub state_dir: PathBuf,
    /// The root of the NVIDIA driver's files.
    pub driver_root: DriverRoot,
    /// The interceptor library to install.
    pub intercept_library: PathBuf,
    /// The injection mode of the interceptor.
    pub intercept: InterceptMode,
    /// The memory charged for each CUDA context.
    pub context_memory: ContextMemory,
    /// The enforcement of `cores` of claims without a policy.
    pub default_compute: ComputePolicy,
    /// The published part of the GPUs' memory.
    pub memory_ratio: MemoryRatio,
    /// The published cores of a GPU.
    pub cores_ratio: CoresRatio,
    /// The maximum number of shares of a GPU.
    pub max_shares: MaxShares,
    /// True if charged GPU time is corrected by what NVML reports.
    pub correct_gpu_time: bool,
    /// True if claims may share a GPU by MPS.
    pub mps: bool,
    /// The order of GPUs in slices.
    pub device_order: DeviceOrder,
    /// The allocator of the GPUs.
    pub mode: DriverMode,
    /// The object with the managed taint.
    pub fence: FenceKind,
    /// Time between the end of stock mode and the first allocation by the controller.
    pub stock_drain: Duration,
    /// The policy for GPUs that another allocator publishes.
    pub on_other_allocator: OtherAllocatorPolicy,
    /// Extended resources of GPUs besides those of common device plugins.
    pub other_resources: BTreeSet<ExtendedResourceName>,
    /// A `/proc` that shows the processes of the host.
    pub proc: PathBuf,
}

/// Interfaces to the world outside of the driver, which tests replace.
pub struct DriverDependencies {
    /// The API server.
    pub client: Client,
    /// The GPUs.
    pub gpus: Arc<dyn GpuLibrary>,
    /// Creates MIG devices.
    pub mig: Arc<dyn MigLibrary>,
    /// The mounts of the kernel.
    pub mounts: Arc<dyn Mounts>,
}

impl std::fmt::Debug for DriverDependencies {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("DriverDependencies")
    }
}

/// A driver that serves, until it is stopped or dropped.
#[derive(Debug)]
pub struct Driver {
    servers: KubeletServers,
    tasks: Supervisor,
    stop: CancellationToken,
    /// Cancels `stop`. The thread `host-pids` would otherwise outlive the runtime, and recreate a
    /// removed state directory.
    stop_on_drop: DropGuard,
    sockets: SocketPaths,
    metrics: Arc<DriverMetrics>,
    load: LoadReader,
    journal: Arc<JournalStore>,
    claims: Arc<DetachedClaims>,
    _watcher: InventoryWatcherHandle,
}

impl Driver {
    /// Repairs the node, then serves the kubelet and publishes the GPUs.
    ///
    /// The order matters in three places:
    ///
    /// 1. Repair comes before the kubelet's servers: files of prepared claims must be complete, and
    ///    those of interrupted Prepares removed, before a claim is prepared.
    /// 2. The look at the GPUs begins before the servers and is not awaited: the kubelet must not
    ///    wait for NVML.
    /// 3. The publisher comes last: kube-scheduler sends pods as soon as slices are published.
    ///
    /// # Errors
    /// The reason why the driver cannot start. Missing GPUs and an unreachable API server are no
    /// errors.
    pub async fn start(
        settings: DriverSettings,
        dependencies: DriverDependencies,
    ) -> anyhow::Result<Self> {
        let mut startup = Startup::prepare_files(settings, dependencies)?;
        startup.repair_node().await?;
        let hardware = startup.watch_hardware()?;
        let (claims, servers) = startup.serve_kubelet(&hardware)?;
        startup.watch_claims(servers.registered(), &hardware)?;
        let load = startup.measure_load(&hardware);
        startup.publish(&hardware);
        Ok(startup.into_driver(claims, servers, load, hardware.watcher))
    }

    /// Returns the paths of its sockets.
    #[must_use]
    pub fn sockets(&self) -> &SocketPaths {
        &self.sockets
    }

    /// Returns the parts that `/metrics`, `/load` and `/healthz` read.
    #[must_use]
    pub fn endpoints(&self) -> Endpoints {
        let (sockets, journal) = (self.sockets.clone(), Arc::clone(&self.journal));
        Endpoints::new(Arc::clone(&self.metrics), self.load.clone(), sockets, journal)
    }

    /// Serves `/metrics`, `/load` and `/healthz` until the driver stops, on a thread of its own.
    /// Returns the bound address.
    ///
    /// # Errors
    /// The address cannot be bound, or the thread cannot be started.
    pub fn serve_http(&mut self, address: SocketAddr) -> anyhow::Result<SocketAddr> {
        let server = HttpServer::bind(address);
        let server = server.with_context(|| format!("cannot serve --metrics-address {address}"))?;
        let (bound, endpoints, stop) = (server.address(), self.endpoints(), self.stop.clone());
        self.tasks
            .spawn_thread("http", move || http::serve(server, &endpoints, &stop))
            .context("cannot start the thread http")?;
        Ok(bound)
    }

    /// Serves the health socket `path` until the driver stops, on a thread of its own.
    ///
    /// # Errors
    /// The socket cannot be bound, or the thread cannot be started.
    pub fn serve_health(&mut self, path: &Path) -> anyhow::Result<()> {
        let socket = HealthSocket::bind(path)
            .with_context(|| format!("cannot serve --health-socket {}", path.display()))?;
        let (endpoints, stop) = (self.endpoints(), self.stop.clone());
        self.tasks
            .spawn_thread("health", move || http::serve_health(socket, &endpoints, &stop))
            .context("cannot start the thread health")
    }

    /// Returns its metrics.
    #[must_use]
    pub fn metrics(&self) -> &Arc<DriverMetrics> {
        &self.metrics
    }

    /// Returns the handler of the kubelet's calls.
    #[must_use]
    pub fn claims(&self) -> &Arc<DetachedClaims> {
        &self.claims
    }

    /// Returns a token that is cancelled when the driver stops.
    #[must_use]
    pub fn stopping(&self) -> CancellationToken {
        self.stop.clone()
    }

    /// Waits until a task or server of the driver ends unexpectedly: the driver must not continue
    /// then.
    pub async fn failed(&mut self) -> TaskFailure {
        tokio::select! {
            failure = self.servers.failed() => failure,
            failure = self.tasks.failed() => failure,
        }
    }

    /// Stops: first the servers, so that the kubelet sends nothing new, and their sockets are
    /// removed, then the tasks. Slices and prepared claims stay: running pods are not affected.
    pub async fn stop(self) {
        self.servers.stop().await;
        drop(self.stop_on_drop);
        self.tasks.shut_down(GRACE).await;
    }
}
