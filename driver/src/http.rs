//! `/metrics`, `/load` and `/healthz`, and the health socket of probes.

use std::{path::Path, sync::Arc, time::Duration};

use axum::{Json, Router, routing::get};
use tessera_api::load;
use tessera_proto::{
    dra_v1::{NodePrepareResourcesRequest, dra_plugin_client::DraPluginClient},
    registration::{InfoRequest, registration_client::RegistrationClient},
};
use tessera_runtime::{
    error_chain::chain,
    server::{
        health::HealthSocket,
        http::{self, HttpServer},
        single_flight::SingleFlight,
    },
};
use tokio::sync::Mutex;
use tokio_util::sync::CancellationToken;
use tonic::transport::{Channel, Endpoint};

use crate::{
    clock::monotonic_ns, kubelet::socket::SocketPaths, metrics::DriverMetrics,
    state::journal::JournalStore, usage::load::LoadReader,
};

/// The parts that the endpoints read.
#[derive(Clone, Debug)]
pub struct Endpoints {
    metrics: Arc<DriverMetrics>,
    load: LoadReader,
    sockets: SocketPaths,
    journal: Arc<JournalStore>,
    /// Held by the health check that uses the journal. One that hangs there would otherwise take
    /// another thread at each probe.
    journal_check: Arc<Mutex<()>>,
}

impl Endpoints {
    /// Returns endpoints that serve `metrics` and `load`, and are healthy if `sockets` answer and
    /// `journal` can be read.
    #[must_use]
    pub fn new(
        metrics: Arc<DriverMetrics>,
        load: LoadReader,
        sockets: SocketPaths,
        journal: Arc<JournalStore>,
    ) -> Self {
        Self { metrics, load, sockets, journal, journal_check: Arc::default() }
    }

    /// Returns the routes `/metrics`, `/load` and `/healthz`.
    pub fn routes(&self) -> Router {
        let metrics = Arc::clone(&self.metrics);
        // Rendering reads the ledgers of all shares.
        let routes = http::metrics(move || metrics.render()).merge(http::healthz(self.health()));
        let load = self.load.clone();
        let load = get(move || async move { Json(load.read(monotonic_ns())) });
        let routes = routes.route(load::PATH, load);
        #[cfg(feature = "fault-points")]
        let routes = routes.merge(crate::fault::POINTS.routes());
        routes
    }

    /// Returns the health check: both sockets answer and the journal can be read.
    ///
    /// So it detects a server that hangs, a removed socket, and a journal that a restart rebuilds.
    #[must_use]
    pub fn health(&self) -> SingleFlight<Result<(), String>> {
        let endpoints = self.clone();
        SingleFlight::new(move || {
            let endpoints = endpoints.clone();
            async move {
                match tokio::time::timeout(TIMEOUT, check(&endpoints)).await {
                    Ok(result) => result,
                    Err(_) => Err(format!("no answer within {} s", TIMEOUT.as_secs())),
                }
            }
        })
    }
}

/// Deadline of a health check. The kubelet's probes wait 1 s by default; the chart sets more.
const TIMEOUT: Duration = Duration::from_secs(3);

/// Serves the [routes](Endpoints::routes) on the calling thread until `stop`.
pub fn serve(server: HttpServer, endpoints: &Endpoints, stop: &CancellationToken) {
    if let Err(error) = server.run(endpoints.routes(), stop) {
        tracing::error!(%error, "HTTP server failed");
    }
}

/// Serves the health socket on the calling thread until `stop`.
pub fn serve_health(socket: HealthSocket, endpoints: &Endpoints, stop: &CancellationToken) {
    if let Err(error) = socket.run(&endpoints.health(), stop) {
        tracing::error!(%error, "health socket failed");
    }
}

async fn check(endpoints: &Endpoints) -> Result<(), String> {
    call_both(&endpoints.sockets).await?;
    let journal = Arc::clone(&endpoints.journal);
    let only_one = Arc::clone(&endpoints.journal_check).lock_owned().await;
    let locked = tokio::task::spawn_blocking(move || {
        let _only_one = only_one;
        journal.lock().map(drop)
    })
    .await;
    locked.map_err(|error| error.to_string())?.map_err(|error| chain(&error))
}

async fn call_both(sockets: &SocketPaths) -> Result<(), String> {
    let registration = connect(&sockets.registration).await?;
    let answer = RegistrationClient::new(registration).get_info(InfoRequest {}).await;
    answer.map_err(|status| format!("registration: {status}"))?;
    let plugin = connect(&sockets.plugin).await?;
    let answer = DraPluginClient::new(plugin)
        .node_prepare_resources(NodePrepareResourcesRequest::default())
        .await;
    answer.map_err(|status| format!("plugin: {status}"))?;
    Ok(())
}

async fn connect(socket: &Path) -> Result<Channel, String> {
    let failed =
        |error: tonic::transport::Error| format!("{}: {}", socket.display(), chain(&error));
    Endpoint::from_shared(format!("unix://{}", socket.display()))
        .map_err(failed)?
        .connect()
        .await
        .map_err(failed)
}
