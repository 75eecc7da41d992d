//! A fake kubelet.
//!
//! ```text
//! registry.rs   sockets appear and vanish -> handshake -> plugins.rs (connections, health streams)
//! watcher.rs    pods bound to this node   -> one worker each
//! worker.rs     claims.rs (check, prepare, unprepare; checkpoint.rs) -> container runtime
//!               -> status.rs -> API server
//! progress.rs   next actions for a pod; podspec.rs: container configuration; both pure
//! slices.rs     wiping of ResourceSlices      logs.rs   container output over HTTP
//! ```
//!
//! Everything visible to a driver is as in Kubernetes 1.37: the order of checks and calls, the
//! batches, the time limit, the checkpoint, the wiping, the retries (their interval is an option).
//! Features of other kinds of pods are left out, see [`crate::node`].

mod checkpoint;
mod claims;
mod events;
mod health;
mod logs;
mod node_object;
mod plugin;
mod plugins;
mod podspec;
mod progress;
mod registry;
mod slices;
mod status;
mod watcher;
mod worker;

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::Context as _;
use k8s_openapi::api::core::v1::Pod;
use kube::{Api, Client};
use tokio::net::TcpListener;
use tokio::task::JoinSet;

use self::claims::Claims;
use self::events::Recorder;
use self::health::DeviceHealthCache;
use self::plugins::PluginRegistry;
use self::slices::SliceWiper;
use super::container::Runtime;

/// Configuration of a [`Kubelet`].
#[derive(Clone)]
pub struct KubeletOptions {
    /// Name of the node.
    pub node_name: String,
    /// Labels of the node, besides its host name.
    pub labels: BTreeMap<String, String>,
    /// Capacity and allocatable of the node.
    pub allocatable: BTreeMap<String, String>,
    /// Root directory: plugin sockets, checkpoint, volumes. Created if missing. At most about 60
    /// bytes long, because socket paths are limited.
    pub root: PathBuf,
    /// Client of the API server.
    pub client: Client,
    /// Container runtime. It outlives the kubelet.
    pub runtime: Runtime,
    /// Pause before a failed step of a pod is retried (`syncFrequency`; production: 60 s).
    pub sync_period: Duration,
    /// Time between a driver's disconnect and the deletion of its slices (production: 30 s).
    pub slice_wipe_delay: Duration,
}

/// A running kubelet. Dropping it aborts its tasks; [`Kubelet::stop`] stops it cleanly. Containers
/// continue to run in both cases.
pub struct Kubelet {
    shared: Arc<Shared>,
    tasks: JoinSet<()>,
}

/// State shared by the parts of one kubelet.
struct Shared {
    node: String,
    root: PathBuf,
    host_ip: Ipv4Addr,
    sync_period: Duration,
    client: Client,
    runtime: Runtime,
    plugins: Arc<PluginRegistry>,
    claims: Claims,
    health: Arc<DeviceHealthCache>,
    events: Recorder,
    /// UID of each pod of this node, by namespace and name.
    pods: Mutex<BTreeMap<(String, String), String>>,
}

impl Kubelet {
    /// Registers the node, deletes its slices, and starts work. Containers of an earlier kubelet
    /// are adopted.
    ///
    /// # Errors
    /// Returns an error if a step fails; nothing runs then.
    pub async fn start(options: KubeletOptions) -> anyhow::Result<Self> {
        let KubeletOptions {
            node_name,
            labels,
            allocatable,
            root,
            client,
            runtime,
            sync_period,
            slice_wipe_delay,
        } = options;
        let registry = make_directories(&root)?;
        let host_ip = Ipv4Addr::LOCALHOST;
        let listener =
            TcpListener::bind((host_ip, 0)).await.context("cannot listen for log requests")?;
        let port = listener.local_addr()?.port();
        let node = node_object::node(&node_name, labels, &allocatable, host_ip, port);
        node_object::register(&client, &node)
            .await
            .with_context(|| format!("cannot register node {node_name}"))?;
        let health = Arc::new(DeviceHealthCache::new());
        let wiper = SliceWiper::new(client.clone(), node_name.clone(), slice_wipe_delay);
        wiper.wipe_all().await;
        let plugins = Arc::new(PluginRegistry::new(health.clone(), wiper));
        let claims = Claims::new(client.clone(), plugins.clone(), &root)
            .with_context(|| format!("cannot read claim checkpoint in `{}`", root.display()))?;
        let events = Recorder::new(client.clone(), node_name.clone());
        let pods = Mutex::default();
        let shared = Arc::new(Shared {
            node: node_name,
            root,
            host_ip,
            sync_period,
            client,
            runtime,
            plugins: plugins.clone(),
            claims,
            health,
            events,
            pods,
        });
        let mut tasks = JoinSet::new();
        tasks.spawn(logs::serve(listener, shared.clone()));
        tasks.spawn(watcher::run(shared.clone()));
        tasks.spawn(async move {
            if let Err(error) = registry::watch(registry, plugins).await {
                tracing::error!(%error, "plugin directory watch failed");
            }
        });
        Ok(Self { shared, tasks })
    }

    /// Resolves once a driver of that name is registered.
    pub async fn registered(&self, driver: &str) {
        let mut changes = self.shared.plugins.subscribe();
        while !self.shared.plugins.names().iter().any(|name| name == driver) {
            if changes.changed().await.is_err() {
                return;
            }
        }
    }

    /// Stops the kubelet. Containers and prepared claims stay for the next kubelet with the same
    /// root and runtime.
    pub async fn stop(mut self) {
        self.tasks.shutdown().await;
    }
}

impl Drop for Kubelet {
    fn drop(&mut self) {
        self.shared.plugins.close();
    }
}

impl Shared {
    fn pods_api(&self, namespace: &str) -> Api<Pod> {
        Api::namespaced(self.client.clone(), namespace)
    }
}

fn make_directories(root: &std::path::Path) -> anyhow::Result<PathBuf> {
    let registry = root.join("plugins_registry");
    for path in [root.join("plugins"), root.join("pods"), registry.clone()] {
        std::fs::create_dir_all(&path)
            .with_context(|| format!("cannot create `{}`", path.display()))?;
    }
    Ok(registry)
}
