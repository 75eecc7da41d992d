//! `/metrics` and `/healthz`.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use axum::{
    Router,
    extract::State,
    http::{StatusCode, header},
    response::IntoResponse,
    routing::get,
};
use tessera_proto::{
    dra_v1::{NodePrepareResourcesRequest, dra_plugin_client::DraPluginClient},
    registration::{InfoRequest, registration_client::RegistrationClient},
};
use tessera_runtime::error_chain::chain;
use tokio::{net::TcpListener, sync::Mutex};
use tokio_util::sync::CancellationToken;
use tonic::transport::{Channel, Endpoint};

use crate::{kubelet::socket::SocketPaths, metrics::DriverMetrics, state::journal::JournalStore};

/// The parts that the endpoints read.
#[derive(Clone, Debug)]
pub struct Endpoints {
    metrics: Arc<DriverMetrics>,
    sockets: SocketPaths,
    journal: Arc<JournalStore>,
    /// Held by the health check that uses the journal. One that hangs there would otherwise take
    /// another thread at each probe.
    journal_check: Arc<Mutex<()>>,
}

impl Endpoints {
    /// Returns endpoints that serve `metrics`, and are healthy if `sockets` answer and `journal`
    /// can be read.
    #[must_use]
    pub fn new(
        metrics: Arc<DriverMetrics>,
        sockets: SocketPaths,
        journal: Arc<JournalStore>,
    ) -> Self {
        Self { metrics, sockets, journal, journal_check: Arc::default() }
    }
}

/// Deadline of a health check. The kubelet's probes wait 1 s by default; the chart sets more.
const TIMEOUT: Duration = Duration::from_secs(3);

/// An HTTP server that is bound and not served yet.
#[derive(Debug)]
pub struct HttpServer {
    listener: TcpListener,
    address: SocketAddr,
    endpoints: Endpoints,
}

impl HttpServer {
    /// Binds `address`.
    ///
    /// # Errors
    /// The address cannot be bound.
    pub async fn bind(address: SocketAddr, endpoints: Endpoints) -> std::io::Result<Self> {
        let listener = TcpListener::bind(address).await?;
        let address = listener.local_addr()?;
        Ok(Self { listener, address, endpoints })
    }

    /// Returns the bound address.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Serves until `stop`.
    pub async fn run(self, stop: CancellationToken) {
        let router = Router::new()
            .route("/metrics", get(metrics))
            .route("/healthz", get(healthz))
            .with_state(self.endpoints);
        #[cfg(feature = "fault-points")]
        let router = router.merge(crate::fault::POINTS.routes());
        let stopped = stop.cancelled_owned();
        if let Err(error) = axum::serve(self.listener, router).with_graceful_shutdown(stopped).await
        {
            tracing::error!(%error, "HTTP server failed");
        }
    }
}

async fn metrics(State(endpoints): State<Endpoints>) -> impl IntoResponse {
    const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    // Blocking, since it reads the ledgers of all shares.
    let rendered = tokio::task::spawn_blocking(move || endpoints.metrics.render()).await;
    let text = rendered.map_err(|error| (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()));
    text.map(|text| ([(header::CONTENT_TYPE, OPEN_METRICS)], text))
}

/// Returns 200 if both sockets answer and the journal can be read.
///
/// So it detects a server that hangs, a removed socket, and a journal that a restart rebuilds.
async fn healthz(State(endpoints): State<Endpoints>) -> (StatusCode, String) {
    match tokio::time::timeout(TIMEOUT, check(&endpoints)).await {
        Ok(Ok(())) => (StatusCode::OK, "ok\n".to_owned()),
        Ok(Err(error)) => (StatusCode::SERVICE_UNAVAILABLE, format!("{error}\n")),
        Err(_) => {
            (StatusCode::SERVICE_UNAVAILABLE, format!("no answer within {} s\n", TIMEOUT.as_secs()))
        }
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

async fn connect(socket: &std::path::Path) -> Result<Channel, String> {
    let failed =
        |error: tonic::transport::Error| format!("{}: {}", socket.display(), chain(&error));
    Endpoint::from_shared(format!("unix://{}", socket.display()))
        .map_err(failed)?
        .connect()
        .await
        .map_err(failed)
}
