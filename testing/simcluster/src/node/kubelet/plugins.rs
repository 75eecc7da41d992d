//! Registered drivers, their connections and their health streams.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tessera_proto::health_v1::dra_resource_health_client::DraResourceHealthClient;
use tessera_proto::health_v1::{
    DeviceHealth, DeviceIdentifier, NodeWatchResourcesRequest, NodeWatchResourcesResponse,
};
use tessera_proto::health_v1alpha1::{
    self, dra_resource_health_client::DraResourceHealthClient as AlphaClient,
};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tonic::{Code, Status, Streaming};

use super::health::DeviceHealthCache;
use super::plugin::{HealthService, Plugin};
use super::slices::SliceWiper;

/// The kubelet's pause before it reopens a health stream.
const HEALTH_RETRY: Duration = Duration::from_secs(5);

/// All registered driver instances.
#[derive(Debug)]
pub(crate) struct PluginRegistry {
    registered: Mutex<Vec<Registered>>,
    changes: watch::Sender<u64>,
    health: Arc<DeviceHealthCache>,
    wiper: SliceWiper,
}

#[derive(Debug)]
struct Registered {
    /// Registration socket.
    socket: PathBuf,
    plugin: Arc<Plugin>,
    /// Tasks of its health stream and connection watch, aborted with it.
    _tasks: JoinSet<()>,
}

impl PluginRegistry {
    pub(crate) fn new(health: Arc<DeviceHealthCache>, wiper: SliceWiper) -> Self {
        Self { registered: Mutex::default(), changes: watch::channel(0).0, health, wiper }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Registered>> {
        self.registered.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns a receiver whose value counts registrations and deregistrations.
    pub(crate) fn subscribe(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// Returns the newest connected instance, or the newest if none is connected.
    pub(crate) fn get(&self, driver: &str) -> Option<Arc<Plugin>> {
        let registered = self.lock();
        let instances = || {
            registered.iter().rev().map(|one| &one.plugin).filter(|plugin| plugin.driver == driver)
        };
        instances().find(|plugin| plugin.is_connected()).or_else(|| instances().next()).cloned()
    }

    /// Returns the names of the registered drivers.
    pub(crate) fn names(&self) -> Vec<String> {
        let mut names: Vec<_> = self.lock().iter().map(|one| one.plugin.driver.clone()).collect();
        names.sort();
        names.dedup();
        names
    }

    pub(crate) fn add(self: &Arc<Self>, socket: PathBuf, plugin: Plugin) -> Result<(), String> {
        let plugin = Arc::new(plugin);
        let mut registered = self.lock();
        if let Some(other) = registered.iter().find(|one| one.plugin.endpoint == plugin.endpoint) {
            return Err(format!(
                "endpoint {} already registered for DRA driver plugin {}",
                plugin.endpoint.display(),
                other.plugin.driver
            ));
        }
        self.wiper.cancel(&plugin.driver);
        let mut tasks = JoinSet::new();
        tasks.spawn(watch_connection(self.clone(), plugin.clone()));
        if plugin.health.is_some() {
            tasks.spawn(watch_health(self.health.clone(), plugin.clone()));
        }
        tracing::info!(driver = plugin.driver, endpoint = %plugin.endpoint.display(), "registered DRA plugin");
        registered.push(Registered { socket, plugin, _tasks: tasks });
        drop(registered);
        self.changes.send_modify(|count| *count += 1);
        Ok(())
    }

    pub(crate) fn remove(&self, socket: &Path) {
        let mut registered = self.lock();
        let Some(index) = registered.iter().position(|one| one.socket == socket) else { return };
        let gone = registered.remove(index);
        let last = !registered.iter().any(|one| one.plugin.driver == gone.plugin.driver);
        drop(registered);
        tracing::info!(driver = gone.plugin.driver, "deregistered DRA plugin");
        if last {
            self.health.remove_driver(&gone.plugin.driver);
        }
        self.wipe_if_unusable(&gone.plugin.driver);
        self.changes.send_modify(|count| *count += 1);
    }

    /// Ends all background tasks.
    pub(crate) fn close(&self) {
        self.lock().clear();
        self.wiper.cancel_all();
    }

    fn wipe_if_unusable(&self, driver: &str) {
        let usable =
            self.lock().iter().any(|one| one.plugin.driver == driver && one.plugin.is_connected());
        if !usable {
            self.wiper.schedule(driver);
        }
    }
}

async fn watch_connection(plugins: Arc<PluginRegistry>, plugin: Arc<Plugin>) {
    plugin.disconnected().await;
    plugins.wipe_if_unusable(&plugin.driver);
}

async fn watch_health(cache: Arc<DeviceHealthCache>, plugin: Arc<Plugin>) {
    loop {
        let ended = match plugin.health {
            Some(HealthService::V1) => follow_v1(&cache, &plugin).await,
            Some(HealthService::V1Alpha1) => follow_v1alpha1(&cache, &plugin).await,
            None => return,
        };
        cache.remove_driver(&plugin.driver);
        match ended {
            Err(status) if status.code() == Code::Unimplemented => return,
            Err(status) => tracing::debug!(driver = plugin.driver, %status, "health stream ended"),
            Ok(()) => {}
        }
        tokio::time::sleep(HEALTH_RETRY).await;
    }
}

async fn follow_v1(cache: &DeviceHealthCache, plugin: &Plugin) -> Result<(), Status> {
    let mut client = DraResourceHealthClient::new(plugin.channel.clone());
    let response = client.node_watch_resources(NodeWatchResourcesRequest {}).await?;
    let mut stream: Streaming<NodeWatchResourcesResponse> = response.into_inner();
    while let Some(message) = stream.message().await? {
        cache.report(&plugin.driver, message.devices, Instant::now());
    }
    Ok(())
}

async fn follow_v1alpha1(cache: &DeviceHealthCache, plugin: &Plugin) -> Result<(), Status> {
    let mut client = AlphaClient::new(plugin.channel.clone());
    let response =
        client.node_watch_resources(health_v1alpha1::NodeWatchResourcesRequest {}).await?;
    let mut stream = response.into_inner();
    while let Some(message) = stream.message().await? {
        cache.report(
            &plugin.driver,
            message.devices.into_iter().map(from_v1alpha1).collect(),
            Instant::now(),
        );
    }
    Ok(())
}

fn from_v1alpha1(device: health_v1alpha1::DeviceHealth) -> DeviceHealth {
    DeviceHealth {
        device: device
            .device
            .map(|id| DeviceIdentifier { pool_name: id.pool_name, device_name: id.device_name }),
        // The numbers of the statuses are the same.
        health: device.health,
        last_updated_time: device.last_updated_time,
        health_check_timeout_seconds: device.health_check_timeout_seconds,
        message: device.message,
    }
}
