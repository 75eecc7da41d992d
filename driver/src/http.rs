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
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tonic::transport::{Channel, Endpoint};

use crate::{kubelet::socket::SocketPaths, metrics::Metrics, state::journal::JournalStore};

/// What the endpoints look at.
#[derive(Clone, Debug)]
pub struct Endpoints {
    /// The metrics.
    pub metrics: Arc<Metrics>,
    /// The sockets that must answer.
    pub sockets: SocketPaths,
    /// The journal that must be readable.
    pub journal: Arc<JournalStore>,
}

/// For a whole health check. The kubelet's probes wait 1 s by default; charts set more.
const TIMEOUT: Duration = Duration::from_secs(3);

/// Serves until `stop`. Returns the address it is bound to.
///
/// # Errors
/// The address cannot be bound.
pub async fn serve(
    address: SocketAddr,
    endpoints: Endpoints,
    stop: CancellationToken,
) -> std::io::Result<SocketAddr> {
    let listener = TcpListener::bind(address).await?;
    let bound = listener.local_addr()?;
    let router = Router::new()
        .route("/metrics", get(metrics))
        .route("/healthz", get(healthz))
        .with_state(endpoints);
    #[cfg(feature = "fault-points")]
    let router = router.merge(crate::fault::POINTS.routes());
    tokio::spawn(async move {
        let server = axum::serve(listener, router).with_graceful_shutdown(stop.cancelled_owned());
        if let Err(error) = server.await {
            tracing::error!(%error, "the metrics server failed");
        }
    });
    Ok(bound)
}

async fn metrics(State(endpoints): State<Endpoints>) -> impl IntoResponse {
    const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    // Reads files of shares.
    let rendered = tokio::task::spawn_blocking(move || endpoints.metrics.render()).await;
    let text = rendered.map_err(|error| (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()));
    text.map(|text| ([(header::CONTENT_TYPE, OPEN_METRICS)], text))
}

/// Healthy is who answers on both sockets and can read the journal: a server that hangs, a socket
/// that somebody removed, or a journal that a restart would rebuild is found by trying.
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
    let locked = tokio::task::spawn_blocking(move || journal.lock().map(drop)).await;
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
