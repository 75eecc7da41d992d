//! The stages of [`Driver::start`].

use std::{sync::Arc, time::Instant};

use anyhow::Context;
use tessera_api::names::{DRIVER_NAME, PoolName};
use tessera_cdi::SpecStore;
use tessera_runtime::supervisor::Supervisor;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::{CancellationToken, DropGuard};

use super::{Driver, DriverDependencies, DriverSettings};
use crate::{
    arbitration::Arbitration,
    audit::{AuditFindings, ClaimAudit},
    base_spec::BaseSpec,
    events::{ClaimEvent, EventRecorder, MAX_CLAIM_EVENTS, NodeEvent},
    host_pids,
    inventory::{
        HardwareState, InventoryInputs, InventoryOutputs, InventoryWatcher, InventoryWatcherHandle,
    },
    kubelet::{
        health::HealthReport,
        registration::RegistrationState,
        server::KubeletServers,
        socket::{self, SocketPaths},
    },
    metrics::DriverMetrics,
    mode::DriverMode,
    mps::{Mps, watch::MpsWatch},
    other_allocators,
    prepare::{
        DetachedClaims, LocalNode, Preparer, execute::Executor, plan::PublishedRatios, repair,
        source::ClaimSource,
    },
    publisher::Publisher,
    resize::Resizer,
    slices::SliceSource,
    state::{
        StatePaths,
        journal::{Journal, JournalStore},
        library::InstalledLibrary,
        shares::ShareFiles,
    },
    usage::{
        Ledgers,
        audit::{AuditEvents, UsageAudit},
        collector::ShareCollector,
        load::{LoadMeter, LoadReader},
        measurement::HostMeasurement,
        process::ProcFs,
    },
};

/// A driver that is being started: the parts that several stages need.
pub(super) struct Startup {
    begun: Instant,
    settings: DriverSettings,
    client: kube::Client,
    gpus: Arc<dyn tessera_gpu::GpuLibrary>,
    pool: PoolName,
    sockets: SocketPaths,
    paths: StatePaths,
    journal: Arc<JournalStore>,
    ledgers: Ledgers,
    metrics: Arc<DriverMetrics>,
    base: Arc<BaseSpec>,
    mps: Mps,
    node: Arc<LocalNode>,
    source: ClaimSource,
    events: EventRecorder,
    node_events: mpsc::UnboundedSender<NodeEvent>,
    claim_events: mpsc::Sender<ClaimEvent>,
    tasks: Supervisor,
    /// Ends tasks and threads if a later stage fails.
    stop_on_drop: DropGuard,
}

/// The GPUs, as the thread `gpus` sees them.
pub(super) struct Hardware {
    state: watch::Receiver<Arc<HardwareState>>,
    health: watch::Receiver<Arc<HealthReport>>,
    pub(super) watcher: InventoryWatcherHandle,
}

impl Startup {
    /// Lays out the state directory, installs the interceptor library, and starts the task that
    /// writes events.
    pub(super) fn prepare_files(
        settings: DriverSettings,
        dependencies: DriverDependencies,
    ) -> anyhow::Result<Self> {
        let begun = Instant::now();
        let DriverDependencies { client, gpus, mig, mounts } = dependencies;
        let kubelet_root = &settings.kubelet_root;
        let sockets = SocketPaths::new(kubelet_root, DRIVER_NAME, settings.pod_uid.as_deref())?;
        let paths = StatePaths::new(settings.state_dir.clone());
        let journal = Arc::new(JournalStore::new(paths.clone()));
        let ledgers = Ledgers::new(paths.clone(), journal.watch());
        let source = ClaimSource::new(client.clone());
        let metrics = Arc::new(DriverMetrics::default().with_shares(ShareCollector {
            ledgers: ledgers.clone(),
            pods: source.pods().clone(),
            node: settings.node.clone(),
        }));
        let library = InstalledLibrary::install(
            &settings.intercept_library,
            settings.intercept,
            &paths,
            &journal,
            &*mounts,
        )?;
        let specs = SpecStore::new(&settings.cdi_dir);
        let base = Arc::new(BaseSpec::new(specs.clone(), settings.driver_root.clone()));
        let files = ShareFiles::new(paths.clone(), mounts);
        let mps = Mps::new(&paths, settings.mps);
        let node = Arc::new(LocalNode {
            paths: paths.clone(),
            journal: Arc::clone(&journal),
            executor: Executor::new(files, specs, Arc::clone(&base), mps.clone(), mig),
            library,
            intercept: settings.intercept,
            context_memory: settings.context_memory,
            published: PublishedRatios {
                memory: settings.memory_ratio,
                cores: settings.cores_ratio,
            },
            default_compute: settings.default_compute.into(),
        });
        host_pids::make_directory(&paths)?;
        let stop = CancellationToken::new();
        let stop_on_drop = stop.clone().drop_guard();
        let mut tasks = Supervisor::new(stop);
        let (events, queued) = EventRecorder::new(client.clone(), settings.node.clone());
        let (node_events, received) = mpsc::unbounded_channel();
        let (claim_events, of_claims) = mpsc::channel(MAX_CLAIM_EVENTS);
        let stop = tasks.stop_token();
        tasks.spawn("node-events", events.clone().record_node_events(received, stop.clone()));
        tasks.spawn("pod-events", events.clone().record_pod_events(queued, stop.clone()));
        let recorded = events.clone().record_claim_events(source.clone(), of_claims, stop);
        tasks.spawn("claim-events", recorded);
        let pool = PoolName::of_node(&settings.node);
        Ok(Self {
            begun,
            settings,
            client,
            gpus,
            pool,
            sockets,
            paths,
            journal,
            ledgers,
            metrics,
            base,
            mps,
            node,
            source,
            events,
            node_events,
            claim_events,
            tasks,
            stop_on_drop,
        })
    }

    /// Makes the node match the journal.
    pub(super) async fn repair_node(&self) -> anyhow::Result<()> {
        let repaired = repair::repair(&self.node, &self.source, &self.pool)
            .await
            .context("cannot repair the node's state")?;
        tracing::info!(
            kept = repaired.kept.len(),
            rolled_back = repaired.rolled_back.len(),
            removed = repaired.removed.len(),
            "node state matches the journal"
        );
        // Also for containers of claims that were prepared in another mode: they may restart.
        let mode = self.settings.intercept;
        if mode.replaces() || self.journal.watch().borrow().has_proxies() {
            self.base.add_real_libraries();
        }
        Ok(())
    }

    /// Starts the thread that looks at the GPUs, and the task that reports if it hangs.
    pub(super) fn watch_hardware(&mut self) -> anyhow::Result<Hardware> {
        let (state_sender, state) = watch::channel(Arc::default());
        let (health_sender, health) = watch::channel(Arc::default());
        let others = other_allocators::watch(
            self.client.clone(),
            &self.settings.node,
            self.settings.on_other_allocator,
            self.settings.other_resources.clone(),
            &mut self.tasks,
        );
        let watcher = InventoryWatcher::new(
            Arc::clone(&self.gpus),
            self.pool.clone(),
            Arc::clone(&self.base),
            InventoryInputs { journal: self.journal.watch(), others },
            Arc::clone(&self.metrics),
            InventoryOutputs {
                hardware: state_sender,
                health: health_sender,
                events: self.node_events.clone(),
            },
        );
        let watcher = watcher.spawn(&mut self.tasks).context("cannot start the thread gpus")?;
        Ok(Hardware { state, health, watcher })
    }

    /// Serves the kubelet's calls and registers with it.
    pub(super) fn serve_kubelet(
        &mut self,
        hardware: &Hardware,
    ) -> anyhow::Result<(Arc<DetachedClaims>, KubeletServers)> {
        let preparer = Preparer::new(
            Arc::clone(&self.node),
            self.pool.clone(),
            hardware.state.clone(),
            self.source.clone(),
            self.events.clone(),
            Arc::clone(&self.metrics),
        );
        let preparer = preparer.in_mode(self.settings.mode);
        let claims = Arc::new(DetachedClaims(Arc::new(preparer)));
        for path in socket::remove_abandoned(&self.settings.kubelet_root, DRIVER_NAME) {
            tracing::info!(path = %path.display(), "removed abandoned socket");
        }
        let health = hardware.health.clone();
        let servers =
            KubeletServers::start(&self.sockets, DRIVER_NAME, Arc::clone(&claims), health)?;
        Ok((claims, servers))
    }

    /// Starts the tasks that watch prepared claims: their processes, MPS daemons, compute shares
    /// and metrics.
    pub(super) fn watch_claims(
        &mut self,
        registered: watch::Receiver<RegistrationState>,
        hardware: &Hardware,
    ) -> anyhow::Result<()> {
        let stop = self.tasks.stop_token();
        let gauges = update_gauges(
            self.journal.watch(),
            registered,
            Arc::clone(&self.metrics),
            self.begun,
            stop.clone(),
        );
        self.tasks.spawn("gauges", gauges);
        let usage = UsageAudit::new(
            self.ledgers.clone(),
            Arc::clone(&self.gpus),
            ProcFs::new(self.settings.proc.clone()),
            Arc::clone(&self.metrics),
            AuditEvents { node: self.node_events.clone(), claims: self.claim_events.clone() },
            self.mps.clone(),
        );
        let usage = usage.with_hardware(hardware.state.clone());
        self.tasks.spawn("usage-audit", usage.run(stop.clone()));
        let measurement = HostMeasurement::new(
            self.ledgers.clone(),
            Arc::clone(&self.gpus),
            ProcFs::new(self.settings.proc.clone()),
            self.claim_events.clone(),
        )
        .with_correction(self.settings.correct_gpu_time);
        self.tasks.spawn("measurement", measurement.run(stop.clone()));
        let daemons = MpsWatch::new(
            self.mps.clone(),
            self.journal.watch(),
            Arc::clone(&self.metrics),
            self.node_events.clone(),
        );
        self.tasks.spawn("mps-watch", daemons.run(stop.clone()));
        self.tasks.spawn("arbitration", Arbitration::new(self.ledgers.clone()).run(stop));
        host_pids::spawn(&mut self.tasks, self.paths.clone())
            .context("cannot start the thread host-pids")
    }

    /// Starts the measurement of the GPUs' load, and returns a reader of it.
    pub(super) fn measure_load(&mut self, hardware: &Hardware) -> LoadReader {
        let meter = LoadMeter::new(
            Arc::clone(&self.gpus),
            hardware.state.clone(),
            self.journal.watch(),
            Arc::clone(&self.metrics),
        );
        let reader = meter.reader();
        let stop = self.tasks.stop_token();
        self.tasks.spawn("load", meter.run(stop));
        reader
    }

    /// Starts the publisher of ResourceSlices, the audit that finds GPUs of orphaned claims, and
    /// the task that changes the sizes of shares.
    pub(super) fn publish(&mut self, hardware: &Hardware) {
        let stop = self.tasks.stop_token();
        let (orphaned_sender, orphaned) = watch::channel(AuditFindings::default());
        let audit = ClaimAudit::new(
            self.source.clone(),
            self.journal.watch(),
            Arc::clone(&self.metrics),
            orphaned_sender,
        );
        self.tasks.spawn("claim-audit", audit.run(stop.clone()));
        if self.settings.mode == DriverMode::Managed {
            let resizer = Resizer::new(
                self.client.clone(),
                Arc::clone(&self.node),
                self.pool.clone(),
                hardware.state.clone(),
                self.source.clone(),
            );
            self.tasks.spawn("resizes", resizer.run(stop.clone()));
        }
        let DriverSettings {
            node,
            device_order,
            mode,
            fence,
            memory_ratio,
            cores_ratio,
            max_shares,
            mps,
            ..
        } = &self.settings;
        let slices = SliceSource::new(node.clone(), *device_order, *mode)
            .with_fence(*fence)
            .with_memory_ratio(*memory_ratio)
            .with_cores_ratio(*cores_ratio)
            .with_max_shares(*max_shares)
            .with_mps(*mps);
        let publisher = Publisher::new(
            self.client.clone(),
            slices,
            hardware.state.clone(),
            self.journal.watch(),
            orphaned,
            Arc::clone(&self.metrics),
        );
        self.tasks.spawn("publisher", publisher.draining(self.settings.stock_drain).run(stop));
    }

    /// Returns the started driver.
    pub(super) fn into_driver(
        self,
        claims: Arc<DetachedClaims>,
        servers: KubeletServers,
        load: LoadReader,
        watcher: InventoryWatcherHandle,
    ) -> Driver {
        Driver {
            servers,
            stop: self.tasks.stop_token(),
            stop_on_drop: self.stop_on_drop,
            tasks: self.tasks,
            sockets: self.sockets,
            metrics: self.metrics,
            load,
            journal: self.journal,
            claims,
            _watcher: watcher,
        }
    }
}

/// Updates the metrics that follow the journal and the registration, until `stop`.
async fn update_gauges(
    mut journal: watch::Receiver<Arc<Journal>>,
    mut registered: watch::Receiver<RegistrationState>,
    metrics: Arc<DriverMetrics>,
    begun: Instant,
    stop: CancellationToken,
) {
    let mut is_logged = false;
    loop {
        metrics.set_prepared_claims(journal.borrow_and_update().claims.len());
        let is_registered = *registered.borrow_and_update() == RegistrationState::Registered;
        metrics.set_registered(is_registered);
        if is_registered && !is_logged {
            is_logged = true;
            tracing::info!(milliseconds = begun.elapsed().as_millis(), "driver is registered");
        }
        tokio::select! {
            () = stop.cancelled() => return,
            Ok(()) = journal.changed() => {}
            // Once a sender is gone, the other channel is still followed.
            Ok(()) = registered.changed() => {}
            else => return,
        }
    }
}
