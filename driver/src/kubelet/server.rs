//! The two servers, and the order in which they come and go.

use std::{sync::Arc, time::Duration};

use tessera_proto::{
    dra_v1, dra_v1beta1, health_v1, health_v1alpha1,
    registration::registration_server::RegistrationServer,
};
use tokio::{sync::watch, task::JoinHandle};
use tokio_stream::wrappers::UnixListenerStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::{Server, server::Router};

use super::{
    health::HealthService,
    plugin::{Claims, PluginService},
    registration::{Registered, RegistrationService},
    socket::{Socket, SocketError, SocketPaths},
};

/// How long calls may take to end once the server stops. Longer ones go on in tasks of their own as
/// long as the process lives, and the kubelet asks again.
const GRACE: Duration = Duration::from_secs(5);

/// Both servers, serving.
#[derive(Debug)]
pub struct KubeletServers {
    registration: RunningServer,
    plugin: RunningServer,
    registered: watch::Receiver<Registered>,
}

#[derive(Debug)]
struct RunningServer {
    stop: CancellationToken,
    task: JoinHandle<Result<(), tonic::transport::Error>>,
    /// Removed when the server has stopped.
    _socket: Socket,
}

impl KubeletServers {
    /// Serves. The plugin's socket answers before the registrar's is there: the kubelet calls as
    /// soon as it sees that.
    ///
    /// # Errors
    /// [`SocketError`]; nothing is left then.
    pub fn start<C: Claims>(
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
        let plugin = RunningServer::start(&paths.plugin, router, stop)?;

        let (sender, registered) = watch::channel(Registered::NotYet);
        let service = RegistrationService::new(driver, paths.plugin.clone(), sender);
        let router = Server::builder().add_service(RegistrationServer::new(service));
        let registration =
            RunningServer::start(&paths.registration, router, CancellationToken::new())?;
        Ok(Self { registration, plugin, registered })
    }

    /// How the registration stands, and word of changes.
    #[must_use]
    pub fn registered(&self) -> watch::Receiver<Registered> {
        self.registered.clone()
    }

    /// Ends when a server ends by itself, which it should not.
    pub async fn failed(&mut self) -> String {
        let (name, result) = tokio::select! {
            result = &mut self.registration.task => ("registration", result),
            result = &mut self.plugin.task => ("plugin", result),
        };
        match result {
            Ok(Ok(())) => format!("the {name} server ended"),
            Ok(Err(error)) => format!("the {name} server failed: {error}"),
            Err(error) => format!("the {name} server failed: {error}"),
        }
    }

    /// Stops: the registrar first, so that the kubelet sends nothing new, then the plugin. Both
    /// sockets are gone then.
    pub async fn stop(self) {
        self.registration.stop().await;
        self.plugin.stop().await;
    }
}

impl RunningServer {
    fn start(
        path: &std::path::Path,
        router: Router,
        stop: CancellationToken,
    ) -> Result<Self, SocketError> {
        let (socket, listener) = Socket::bind(path)?;
        let stopped = stop.clone().cancelled_owned();
        let incoming = UnixListenerStream::new(listener);
        let task = tokio::spawn(router.serve_with_incoming_shutdown(incoming, stopped));
        Ok(Self { stop, task, _socket: socket })
    }

    async fn stop(mut self) {
        self.stop.cancel();
        // One that ended by itself was waited for already.
        if self.task.is_finished() {
            return;
        }
        if tokio::time::timeout(GRACE, &mut self.task).await.is_err() {
            self.task.abort();
        }
    }
}
