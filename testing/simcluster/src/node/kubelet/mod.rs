//! The kubelet stand-in.
//!
//! ```text
//! registry.rs   sockets appear and vanish -> handshake -> plugins.rs (connections, health streams)
//! watcher.rs    pods bound to this node   -> one worker each
//! worker.rs     claims.rs (check, prepare, unprepare; checkpoint.rs) -> container runtime -> status.rs -> API
//!               progress.rs says what comes next, podspec.rs how a container is started: both pure
//! slices.rs     the wiping of ResourceSlices      logs.rs   container output over HTTP
//! ```
//!
//! What a driver can notice is as in Kubernetes 1.37: the order of checks and calls, the batches,
//! the time limit, the checkpoint, the wiping, the retries (their pace is an option). What only a
//! user of many kinds of pods would notice is left out, see [`crate::node`].

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
use std::io;
use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use kube::{Api, Client};
use tokio::net::TcpListener;
use tokio::task::JoinSet;

use self::claims::Claims;
use self::events::Recorder;
use self::health::HealthBook;
use self::plugins::Plugins;
use self::slices::SliceWiper;
use super::container::Runtime;

/// What a kubelet needs to know.
#[derive(Clone)]
pub struct KubeletOptions {
    /// Its node.
    pub node_name: String,
    /// Labels of the node, besides its host name.
    pub labels: BTreeMap<String, String>,
    /// Capacity and allocatable of the node.
    pub allocatable: BTreeMap<String, String>,
    /// Root directory: plugin sockets, checkpoint, volumes. Made if missing; at most some 60 bytes
    /// long, for the sake of the sockets' paths.
    pub root: PathBuf,
    /// How it talks to the API server.
    pub client: Client,
    /// Where containers run. It outlives the kubelet.
    pub runtime: Runtime,
    /// Pause before a failed step of a pod is tried again (`syncFrequency`; production: 60 s).
    pub sync_period: Duration,
    /// How long a driver may be away before its slices are deleted (production: 30 s).
    pub slice_wipe_delay: Duration,
}

/// A kubelet could not start.
#[derive(Debug, thiserror::Error)]
pub enum KubeletError {
    /// A directory of its could not be made.
    #[error("failed to create `{path}`")]
    Directory {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The checkpoint of an earlier kubelet could not be read.
    #[error("failed to read the claims checkpoint under `{root}`")]
    Checkpoint {
        /// The kubelet's root.
        root: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The server for container output could not listen.
    #[error("failed to listen for log requests")]
    Listen {
        /// Why.
        source: io::Error,
    },
    /// The Node object could not be written.
    #[error("failed to register node {node}")]
    Register {
        /// Its name.
        node: String,
        /// Why.
        source: Box<kube::Error>,
    },
}

/// A running kubelet. Dropping it stops it less politely than [`Kubelet::stop`]; containers run on
/// either way.
pub struct Kubelet {
    shared: Arc<Shared>,
    tasks: JoinSet<()>,
}

/// What the parts of one kubelet share.
struct Shared {
    node: String,
    root: PathBuf,
    host_ip: Ipv4Addr,
    sync_period: Duration,
    client: Client,
    runtime: Runtime,
    plugins: Arc<Plugins>,
    claims: Claims,
    health: Arc<HealthBook>,
    events: Recorder,
    /// UID of each pod of this node by namespace and name.
    pods: Mutex<BTreeMap<(String, String), String>>,
}

impl Kubelet {
    /// Registers the node, deletes its slices, and takes up work: containers of an earlier kubelet
    /// are taken over.
    ///
    /// # Errors
    /// See [`KubeletError`]; nothing runs then.
    pub async fn start(options: KubeletOptions) -> Result<Self, KubeletError> {
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
        let listener = TcpListener::bind((host_ip, 0))
            .await
            .map_err(|source| KubeletError::Listen { source })?;
        let port = listener.local_addr().map_err(|source| KubeletError::Listen { source })?.port();
        let node = node_object::node(&node_name, labels, &allocatable, host_ip, port);
        node_object::register(&client, &node).await.map_err(|source| KubeletError::Register {
            node: node_name.clone(),
            source: Box::new(source),
        })?;
        let health = Arc::new(HealthBook::new());
        let wiper = SliceWiper::new(client.clone(), node_name.clone(), slice_wipe_delay);
        wiper.wipe_all().await;
        let plugins = Arc::new(Plugins::new(health.clone(), wiper));
        let claims = Claims::new(client.clone(), plugins.clone(), &root)
            .map_err(|source| KubeletError::Checkpoint { root: root.clone(), source })?;
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
                tracing::error!(%error, "the plugin registry cannot be watched any more");
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

    /// Stops. Containers and everything that is prepared stay for the next kubelet with the same
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

fn make_directories(root: &std::path::Path) -> Result<PathBuf, KubeletError> {
    let registry = root.join("plugins_registry");
    for path in [root.join("plugins"), root.join("pods"), registry.clone()] {
        std::fs::create_dir_all(&path)
            .map_err(|source| KubeletError::Directory { path, source })?;
    }
    Ok(registry)
}
