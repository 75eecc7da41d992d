//! `/metrics` and `/healthz`; in a build for crash tests also `/fault-points`.

use std::net::SocketAddr;
use std::sync::Arc;

use axum::Router;
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::get;
use prometheus_client::registry::Registry;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Serves until `stop`. Healthy means that the process runs. A standby is healthy too; what is
/// stuck is visible in the metrics, and a restart does not cure it.
pub(crate) async fn serve(
    address: SocketAddr,
    registry: Registry,
    stop: CancellationToken,
) -> std::io::Result<()> {
    let registry = Arc::new(registry);
    let router = Router::new()
        .route("/metrics", get(move || metrics(Arc::clone(&registry))))
        .route("/healthz", get(|| async { "ok\n" }));
    #[cfg(feature = "fault-points")]
    let router = router.merge(crate::fault::POINTS.routes());
    let listener = TcpListener::bind(address).await?;
    tracing::info!(address = %listener.local_addr()?, "serving metrics");
    axum::serve(listener, router)
        .with_graceful_shutdown(async move { stop.cancelled().await })
        .await
}

async fn metrics(registry: Arc<Registry>) -> impl IntoResponse {
    let mut text = String::new();
    match prometheus_client::encoding::text::encode(&mut text, &registry) {
        Ok(()) => (StatusCode::OK, [(header::CONTENT_TYPE, OPENMETRICS)], text),
        Err(error) => (
            StatusCode::INTERNAL_SERVER_ERROR,
            [(header::CONTENT_TYPE, "text/plain")],
            format!("{error}\n"),
        ),
    }
}
