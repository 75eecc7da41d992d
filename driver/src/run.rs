//! Wires the parts together, starts them in order, and stops them in the opposite one.

use std::{sync::Arc, time::Instant};

use anyhow::Context;
use kube::{
    Client, Config,
    config::{KubeConfigOptions, Kubeconfig},
};
use tessera_api::names::{DRIVER_NAME, PoolName};
use tessera_cdi::SpecStore;
use tessera_gpu::{GpuLibrary, NvmlLibrary, NvmlOptions};
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::watch,
};
use tokio_util::sync::CancellationToken;
use tracing_subscriber::EnvFilter;

use crate::{
    args::{Args, LogFormat},
    base_spec::{BaseSpec, DriverRoot},
    events::Events,
    http::{self, Endpoints},
    inventory::{Outlets, Watcher},
    kubelet::{
        registration::Registered,
        server::KubeletServers,
        socket::{self, SocketPaths},
    },
    metrics::Metrics,
    prepare::{DetachedClaims, Node, Preparer, execute::Executor, repair, source::ClaimSource},
    publisher::Publisher,
    slices::SliceSource,
    state::{
        StatePaths, journal::JournalStore, library::InstalledLibrary, mounts::KernelMounts,
        shares::ShareFiles,
    },
};

/// Runs the driver until SIGTERM or SIGINT.
///
/// # Errors
/// What keeps it from starting, or from going on. Missing GPUs and an unreachable API server do not.
pub async fn run(args: Args) -> anyhow::Result<()> {
    let begun = Instant::now();
    let library: Arc<dyn GpuLibrary> = Arc::new(NvmlLibrary::new(nvml_options(&args)));
    if args.print_slices {
        let inventory = library.inventory().context("the GPUs cannot be looked at")?;
        print!("{}", slice_source(&args).as_yaml(inventory)?);
        return Ok(());
    }
    start_logging(args.log_format);
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;

    let pool = PoolName::of_node(&args.node_name);
    let metrics = Arc::new(Metrics::default());
    let client = client(&args).await?;
    let source = ClaimSource::new(client.clone());
    let base = Arc::new(base_spec(&args));
    let node = Arc::new(node(&args, Arc::clone(&base))?);
    let repaired =
        repair::repair(&node, &source, &pool).await.context("the node's state cannot be repaired")?;
    tracing::info!(
        kept = repaired.kept.len(),
        rolled_back = repaired.rolled_back.len(),
        removed = repaired.removed.len(),
        "the node's state is in line with the journal"
    );

    let stop = CancellationToken::new();
    let (hardware_sender, hardware) = watch::channel(Arc::default());
    let (health_sender, health) = watch::channel(Arc::default());
    let outlets = Outlets { hardware: hardware_sender, health: health_sender };
    let journal = node.journal.watch();
    let watcher = Watcher::new(library, pool.clone(), base, journal.clone(), Arc::clone(&metrics), outlets);
    let _watcher = watcher.spawn().context("the thread that watches the GPUs cannot be started")?;

    let events = Events::new(client.clone(), args.node_name.clone());
    let preparer = Preparer::new(node, pool, hardware.clone(), source, events, Arc::clone(&metrics));
    let sockets = SocketPaths::new(&args.kubelet_root, DRIVER_NAME, args.pod_uid.as_deref())?;
    for path in socket::remove_abandoned(&args.kubelet_root, DRIVER_NAME) {
        tracing::info!(path = %path.display(), "an abandoned socket is removed");
    }
    let claims = Arc::new(DetachedClaims(Arc::new(preparer)));
    let mut servers = KubeletServers::start(&sockets, DRIVER_NAME, claims, health)?;
    tokio::spawn(keep_gauges(journal.clone(), servers.registered(), Arc::clone(&metrics), begun));

    let publisher =
        Publisher::new(client, slice_source(&args), hardware, journal.clone(), Arc::clone(&metrics));
    tokio::spawn(publisher.run(stop.clone()));
    if let Some(address) = args.metrics_address.0 {
        let endpoints = Endpoints { metrics, sockets };
        let bound = http::serve(address, endpoints, stop.clone()).await;
        let bound = bound.with_context(|| format!("--metrics-address {address} cannot be served"))?;
        tracing::info!(%bound, "serving /metrics and /healthz");
    }

    let failure = tokio::select! {
        _ = terminate.recv() => None,
        _ = interrupt.recv() => None,
        failure = servers.failed() => Some(failure),
    };
    tracing::info!("stopping; running pods are not touched");
    servers.stop().await;
    stop.cancel();
    failure.map_or(Ok(()), |failure| Err(anyhow::anyhow!(failure)))
}

fn nvml_options(args: &Args) -> NvmlOptions {
    NvmlOptions {
        library: args.nvml_library.clone(),
        driver_root: args.driver_root.clone(),
        sysfs_root: args.sysfs_root.clone(),
        exclude: args.exclude_gpus.iter().cloned().collect(),
    }
}

fn start_logging(format: LogFormat) {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    let subscriber = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    match format {
        LogFormat::Text => subscriber.init(),
        LogFormat::Json => subscriber.json().init(),
    }
}

async fn client(args: &Args) -> anyhow::Result<Client> {
    // Another crate in the process may have set one already, and any does.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let config = match &args.kubeconfig {
        None => Config::infer().await.context("no cluster is configured: set --kubeconfig")?,
        Some(path) => {
            let kubeconfig = Kubeconfig::read_from(path);
            let kubeconfig =
                kubeconfig.with_context(|| format!("--kubeconfig {} cannot be read", path.display()))?;
            let options = KubeConfigOptions::default();
            Config::from_custom_kubeconfig(kubeconfig, &options)
                .await
                .context("--kubeconfig cannot be used")?
        }
    };
    Client::try_from(config).context("no client can be made from the cluster's configuration")
}

fn slice_source(args: &Args) -> SliceSource {
    SliceSource::new(args.node_name.clone(), args.device_order)
}

fn base_spec(args: &Args) -> BaseSpec {
    let root = DriverRoot::new(&args.driver_root, args.driver_root_on_host());
    BaseSpec::new(SpecStore::new(&args.cdi_dir), root)
}

fn node(args: &Args, base: Arc<BaseSpec>) -> anyhow::Result<Node> {
    let paths = StatePaths::new(&args.state_dir);
    let library = InstalledLibrary::install(&args.intercept_library, &paths, &KernelMounts)?;
    let files = ShareFiles::new(paths.clone(), Arc::new(KernelMounts));
    let executor = Executor::new(files, SpecStore::new(&args.cdi_dir), base);
    Ok(Node { journal: Arc::new(JournalStore::new(paths.clone())), paths, executor, library })
}

/// Keeps the metrics that follow a state.
async fn keep_gauges(
    mut journal: watch::Receiver<Arc<crate::state::journal::Journal>>,
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
