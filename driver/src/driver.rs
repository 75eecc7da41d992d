//! The driver as a whole: its parts, wired, started in order and stopped in the opposite one.

use std::{
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::Context;
use kube::Client;
use tessera_api::{
    names::{DRIVER_NAME, NodeName, PoolName},
    slice::{DeviceOrder, MemoryRatio},
};
use tessera_cdi::SpecStore;
use tessera_gpu::GpuLibrary;
use tokio::{
    sync::{mpsc, watch},
    task::JoinHandle,
};
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::{
    arbitration::Arbitration,
    audit::Audit,
    base_spec::{BaseSpec, DriverRoot},
    context_memory::ContextMemory,
    events::Events,
    host_pids,
    http::Endpoints,
    intercept::Intercept,
    inventory::{Inlets, Outlets, Watcher, WatcherHandle},
    kubelet::{
        registration::Registered,
        server::KubeletServers,
        socket::{self, SocketPaths},
    },
    metrics::Metrics,
    mode::Mode,
    mps::{Mps, watch::MpsWatch},
    other_allocators::{self, OnOtherAllocator},
    prepare::{DetachedClaims, Node, Preparer, execute::Executor, repair, source::ClaimSource},
    publisher::Publisher,
    slices::SliceSource,
    state::{
        StatePaths,
        journal::{Journal, JournalStore},
        library::InstalledLibrary,
        mounts::Mounts,
        shares::ShareFiles,
    },
    usage::{Ledgers, audit::UsageAudit, collector::ShareCollector, process::ProcFs},
};

/// Where the driver works.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The node.
    pub node: NodeName,
    /// The kubelet's root directory.
    pub kubelet_root: PathBuf,
    /// The pod that this is, for sockets of its own.
    pub pod_uid: Option<String>,
    /// Where CDI specs are written.
    pub cdi_dir: PathBuf,
    /// Where state is kept.
    pub state_dir: PathBuf,
    /// Where the NVIDIA driver's files are.
    pub driver_root: DriverRoot,
    /// The interceptor library to install.
    pub intercept_library: PathBuf,
    /// Where it is to stand in containers.
    pub intercept: Intercept,
    /// What a CUDA context is charged.
    pub context_memory: ContextMemory,
    /// How much of the GPUs' memory is published.
    pub memory_ratio: MemoryRatio,
    /// Whether claims can share a GPU by MPS.
    pub mps: bool,
    /// In which order slices list the GPUs.
    pub device_order: DeviceOrder,
    /// Who allocates the GPUs.
    pub mode: Mode,
    /// How long a GPU is nobody's between kube-scheduler and our controller.
    pub stock_drain: Duration,
    /// What to do with GPUs that somebody else hands out too.
    pub on_other_allocator: OnOtherAllocator,
    /// A `/proc` that shows the machine's processes.
    pub proc: PathBuf,
}

/// What the driver works with: the seams to the world outside.
pub struct Edges {
    /// The API server.
    pub client: Client,
    /// The GPUs.
    pub gpus: Arc<dyn GpuLibrary>,
    /// The kernel's mounts.
    pub mounts: Arc<dyn Mounts>,
}

impl std::fmt::Debug for Edges {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Edges")
    }
}

/// A driver that serves, until it is stopped or dropped.
#[derive(Debug)]
pub struct Driver {
    servers: KubeletServers,
    stop: CancellationToken,
    /// Cancels it. The thread that answers for PIDs outlives the runtime otherwise, and makes the
    /// state directory anew where it is gone.
    stop_on_drop: DropGuard,
    sockets: SocketPaths,
    metrics: Arc<Metrics>,
    journal: Arc<JournalStore>,
    claims: Arc<DetachedClaims>,
    publisher: JoinHandle<()>,
    _watcher: WatcherHandle,
}

impl Driver {
    /// Repairs the node, then serves it. The GPUs are looked at meanwhile: the kubelet is not kept
    /// waiting for them.
    ///
    /// # Errors
    /// What keeps it from starting. Missing GPUs and an unreachable API server do not.
    pub async fn start(settings: Settings, edges: Edges) -> anyhow::Result<Self> {
        let begun = Instant::now();
        let Settings { node: node_name, kubelet_root, pod_uid, cdi_dir, state_dir, .. } = settings;
        let Edges { client, gpus, mounts } = edges;
        let pool = PoolName::of_node(&node_name);
        let sockets = SocketPaths::new(&kubelet_root, DRIVER_NAME, pod_uid.as_deref())?;

        let paths = StatePaths::new(state_dir);
        let state_paths = paths.clone();
        let journal = Arc::new(JournalStore::new(paths.clone()));
        let ledgers = Ledgers::new(paths.clone(), journal.watch());
        let metrics = Arc::new(Metrics::default().of_shares(ShareCollector(ledgers.clone())));
        let library = InstalledLibrary::install(
            &settings.intercept_library,
            settings.intercept,
            &paths,
            &journal,
            &*mounts,
        )?;
        let base = Arc::new(BaseSpec::new(SpecStore::new(&cdi_dir), settings.driver_root));
        let Settings { intercept, context_memory, memory_ratio, .. } = settings;
        let files = ShareFiles::new(paths.clone(), mounts);
        let executor = Executor::new(files, SpecStore::new(&cdi_dir), Arc::clone(&base));
        let mps = Mps::new(&paths, settings.mps);
        let node = Arc::new(Node {
            paths,
            journal: Arc::clone(&journal),
            executor,
            library,
            intercept,
            context_memory,
            memory_ratio,
            mps: mps.clone(),
        });
        let source = ClaimSource::new(client.clone());
        host_pids::make_directory(&state_paths)?;
        repair_node(&node, &source, &pool).await?;
        // Also for containers of claims that were prepared under another setting, when they
        // restart.
        if intercept.replaces() || journal.watch().borrow().has_proxies() {
            base.put_the_real_behind_proxies();
        }

        let (hardware_sender, hardware) = watch::channel(Arc::default());
        let (health_sender, health) = watch::channel(Arc::default());
        let (news_sender, news) = mpsc::unbounded_channel();
        let stop = CancellationToken::new();
        let stop_on_drop = stop.clone().drop_guard();
        let processes = ProcFs::new(settings.proc);
        let usage = UsageAudit::new(
            ledgers,
            Arc::clone(&gpus),
            processes,
            Arc::clone(&metrics),
            news_sender.clone(),
            mps.clone(),
        );
        tokio::spawn(usage.run(stop.clone()));
        let mps_watch =
            MpsWatch::new(mps, journal.watch(), Arc::clone(&metrics), news_sender.clone());
        tokio::spawn(mps_watch.run(stop.clone()));
        let outlets =
            Outlets { hardware: hardware_sender, health: health_sender, news: news_sender };
        let on_other = settings.on_other_allocator;
        let others = other_allocators::watch(client.clone(), &node_name, on_other, stop.clone());
        let inlets = Inlets { journal: journal.watch(), others };
        let watcher = Watcher::new(gpus, pool.clone(), base, inlets, Arc::clone(&metrics), outlets);
        let watcher =
            watcher.spawn().context("the thread that watches the GPUs cannot be started")?;

        let events = Events::new(client.clone(), node_name.clone());
        tokio::spawn(events.clone().tell_of_node(news));
        let preparer =
            Preparer::new(node, pool, hardware.clone(), source, events, Arc::clone(&metrics));
        let claims = Arc::new(DetachedClaims(Arc::new(preparer.in_mode(settings.mode))));
        for path in socket::remove_abandoned(&kubelet_root, DRIVER_NAME) {
            tracing::info!(path = %path.display(), "an abandoned socket is removed");
        }
        let servers = KubeletServers::start(&sockets, DRIVER_NAME, Arc::clone(&claims), health)?;
        tokio::spawn(keep_gauges(
            journal.watch(),
            servers.registered(),
            Arc::clone(&metrics),
            begun,
        ));

        host_pids::spawn(state_paths.clone(), stop.clone()).context(
            "the thread that tells processes what the host calls them cannot be started",
        )?;
        let arbitration = Arbitration::new(state_paths, journal.watch());
        tokio::spawn(arbitration.run(stop.clone()));
        let slices = SliceSource::new(node_name, settings.device_order, settings.mode);
        let slices = slices.with_memory_ratio(memory_ratio).with_mps(settings.mps);
        let (orphaned_sender, orphaned) = watch::channel(None);
        let audit = Audit::new(
            ClaimSource::new(client.clone()),
            journal.watch(),
            Arc::clone(&metrics),
            orphaned_sender,
        );
        tokio::spawn(audit.run(stop.clone()));
        let publisher = Publisher::new(
            client,
            slices,
            hardware,
            journal.watch(),
            orphaned,
            Arc::clone(&metrics),
        );
        let publisher = tokio::spawn(publisher.draining(settings.stock_drain).run(stop.clone()));
        Ok(Self {
            servers,
            stop,
            stop_on_drop,
            sockets,
            metrics,
            journal,
            claims,
            publisher,
            _watcher: watcher,
        })
    }

    /// Its sockets.
    #[must_use]
    pub fn sockets(&self) -> &SocketPaths {
        &self.sockets
    }

    /// What `/metrics` and `/healthz` look at.
    #[must_use]
    pub fn endpoints(&self) -> Endpoints {
        Endpoints {
            metrics: Arc::clone(&self.metrics),
            sockets: self.sockets.clone(),
            journal: Arc::clone(&self.journal),
        }
    }

    /// Its metrics.
    #[must_use]
    pub fn metrics(&self) -> &Arc<Metrics> {
        &self.metrics
    }

    /// What answers the kubelet's calls.
    #[must_use]
    pub fn claims(&self) -> &Arc<DetachedClaims> {
        &self.claims
    }

    /// Cancelled when the driver stops.
    #[must_use]
    pub fn stopping(&self) -> CancellationToken {
        self.stop.clone()
    }

    /// Ends, with the reason, when the driver cannot go on.
    pub async fn failed(&mut self) -> String {
        tokio::select! {
            failure = self.servers.failed() => failure,
            // It ends by itself too when nobody watches the GPUs any more.
            result = &mut self.publisher => match result {
                Ok(()) => "the thread that watches the GPUs ended: see the log before this".to_owned(),
                Err(error) => format!("publishing ResourceSlices failed: {error}"),
            },
        }
    }

    /// Stops: the kubelet is let go first, its sockets are removed. Slices and everything prepared
    /// stay: running pods are not touched.
    pub async fn stop(self) {
        self.servers.stop().await;
        drop(self.stop_on_drop);
    }
}

async fn repair_node(
    node: &Arc<Node>,
    source: &ClaimSource,
    pool: &PoolName,
) -> anyhow::Result<()> {
    let repaired =
        repair::repair(node, source, pool).await.context("the node's state cannot be repaired")?;
    tracing::info!(
        kept = repaired.kept.len(),
        rolled_back = repaired.rolled_back.len(),
        removed = repaired.removed.len(),
        "the node's state is in line with the journal"
    );
    Ok(())
}

/// Keeps the metrics that follow a state.
async fn keep_gauges(
    mut journal: watch::Receiver<Arc<Journal>>,
    mut registered: watch::Receiver<Registered>,
    metrics: Arc<Metrics>,
    begun: Instant,
) {
    let mut said = false;
    loop {
        metrics.prepared(journal.borrow_and_update().claims.len());
        let is_registered = *registered.borrow_and_update() == Registered::Yes;
        metrics.registered(is_registered);
        if is_registered && !said {
            said = true;
            tracing::info!(milliseconds = begun.elapsed().as_millis(), "from start to registered");
        }
        tokio::select! {
            Ok(()) = journal.changed() => {}
            Ok(()) = registered.changed() => {}
            else => return,
        }
    }
}
