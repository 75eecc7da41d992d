//! Registration and DRA plugin gRPC servers: order of start and stop.

use std::{sync::Arc, time::Duration};

use tessera_proto::{
    dra_v1, dra_v1beta1, health_v1, health_v1alpha1,
    registration::registration_server::RegistrationServer,
};
use tessera_runtime::{error_chain::chain, supervisor::TaskFailure};
use tokio::{sync::watch, task::JoinHandle};
use tokio_stream::wrappers::UnixListenerStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::{Server, server::Router};

use super::{
    health::HealthService,
    plugin::{ClaimHandler, PluginService},
    registration::{RegistrationService, RegistrationState},
    socket::{Socket, SocketError, SocketPaths},
};

/// Time for which calls may finish when the server stops. Longer work continues in tasks of its own
/// as long as the process lives, and the kubelet calls again.
const GRACE: Duration = Duration::from_secs(5);

/// Both running servers.
#[derive(Debug)]
pub struct KubeletServers {
    registration: RunningServer,
    plugin: RunningServer,
    registered: watch::Receiver<RegistrationState>,
}

#[derive(Debug)]
struct RunningServer {
    name: &'static str,
    stop: CancellationToken,
    task: JoinHandle<Result<(), tonic::transport::Error>>,
    /// Its file is removed when the server has stopped.
    _socket: Socket,
}

impl KubeletServers {
    /// Starts both servers. The plugin's socket must answer before the registration socket exists:
    /// the kubelet calls the plugin as soon as it finds that.
    ///
    /// # Errors
    /// [`SocketError`]. No server is running then.
    pub fn start<C: ClaimHandler>(
        paths: &SocketPaths,
        driver: &str,
        claims: Arc<C>,
        health: watch::Receiver<Arc<super::health::HealthReport>>,
    ) -> Result<Self, SocketError> {
        let stop = CancellationToken::new();
        let plugin = PluginService::new(claims);
        let health = HealthService::new(health, stop.clone());
        let (_, liveness) = tonic_health::server::health_reporter();
        let router = Server::builder()
            .add_service(dra_v1::dra_plugin_server::DraPluginServer::new(plugin.clone()))
            .add_service(dra_v1beta1::dra_plugin_server::DraPluginServer::new(plugin))
            .add_service(health_v1::dra_resource_health_server::DraResourceHealthServer::new(
                health.clone(),
            ))
            .add_service(health_v1alpha1::dra_resource_health_server::DraResourceHealthServer::new(
                health,
            ))
            .add_service(liveness);
        let plugin = RunningServer::start("plugin-server", &paths.plugin, router, stop)?;

        let (sender, registered) = watch::channel(RegistrationState::Pending);
        let service = RegistrationService::new(driver, paths.plugin.clone(), sender);
        let router = Server::builder().add_service(RegistrationServer::new(service));
        let registration = RunningServer::start(
            "registration-server",
            &paths.registration,
            router,
            CancellationToken::new(),
        )?;
        Ok(Self { registration, plugin, registered })
    }

    /// Returns a channel of the state of the registration.
    #[must_use]
    pub fn registered(&self) -> watch::Receiver<RegistrationState> {
        self.registered.clone()
    }

    /// Waits until a server ends although it was not stopped.
    pub async fn failed(&mut self) -> TaskFailure {
        let (name, result) = tokio::select! {
            result = &mut self.registration.task => (self.registration.name, result),
            result = &mut self.plugin.task => (self.plugin.name, result),
        };
        match result {
            Ok(Err(error)) => TaskFailure::new(name, chain(&error)),
            result => TaskFailure::from_join(name, result.map(drop)),
        }
    }

    /// Stops registration first, so that the kubelet sends no new calls, then the plugin. Removes
    /// both sockets.
    pub async fn stop(self) {
        self.registration.stop().await;
        self.plugin.stop().await;
    }
}

impl RunningServer {
    fn start(
        name: &'static str,
        path: &std::path::Path,
        router: Router,
        stop: CancellationToken,
    ) -> Result<Self, SocketError> {
        let (socket, listener) = Socket::bind(path)?;
        let stopped = stop.clone().cancelled_owned();
        let incoming = UnixListenerStream::new(listener);
        let task = tokio::spawn(router.serve_with_incoming_shutdown(incoming, stopped));
        Ok(Self { name, stop, task, _socket: socket })
    }

    async fn stop(mut self) {
        self.stop.cancel();
        // The handle of a task that failed was polled to its end already.
        if self.task.is_finished() {
            return;
        }
        if tokio::time::timeout(GRACE, &mut self.task).await.is_err() {
            self.task.abort();
        }
    }
}
