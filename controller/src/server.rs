//! `/metrics` and `/healthz`, and the health socket of probes; in a build for crash tests also
//! `/fault-points`.
//!
//! Healthy means that the process runs. A standby is healthy too; what is stuck is visible in the
//! metrics, and a restart does not cure it.

use std::net::SocketAddr;
use std::path::Path;
use std::{io, thread};

use prometheus_client::registry::Registry;
use tessera_runtime::server::health::HealthSocket;
use tessera_runtime::server::http::{self, HttpServer};
use tessera_runtime::server::single_flight::SingleFlight;
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

/// Serves on a thread of its own until `stop`. The returned future completes when the server ends.
///
/// # Errors
/// The address cannot be bound, or the thread cannot be started.
pub(crate) fn serve(
    address: SocketAddr,
    registry: Registry,
    stop: CancellationToken,
) -> io::Result<impl Future<Output = ()> + use<>> {
    let routes = http::metrics(move || render(&registry)).merge(http::healthz(health()));
    #[cfg(feature = "fault-points")]
    let routes = routes.merge(crate::fault::POINTS.routes());
    let server = HttpServer::bind(address)?;
    tracing::info!(address = %server.address(), "serving metrics");
    on_thread("http", move || server.run(routes, &stop))
}

/// Serves the health socket `path`, as [`serve`] does.
///
/// # Errors
/// The socket cannot be bound, or the thread cannot be started.
pub(crate) fn serve_health(
    path: &Path,
    stop: CancellationToken,
) -> io::Result<impl Future<Output = ()> + use<>> {
    let socket = HealthSocket::bind(path)?;
    on_thread("health", move || socket.run(&health(), &stop))
}

/// Runs a server on a thread of its own. The returned future completes when the server ends.
fn on_thread<S>(name: &'static str, serve: S) -> io::Result<impl Future<Output = ()>>
where
    S: FnOnce() -> io::Result<()> + Send + 'static,
{
    let (running, ended) = oneshot::channel::<()>();
    let serve = move || {
        let _running = running;
        if let Err(error) = serve() {
            tracing::error!(%error, server = name, "server failed");
        }
    };
    thread::Builder::new().name(name.to_owned()).spawn(serve)?;
    Ok(async move { ended.await.unwrap_or_default() })
}

fn health() -> SingleFlight<Result<(), String>> {
    SingleFlight::new(|| async { Ok(()) })
}

fn render(registry: &Registry) -> String {
    let mut text = String::new();
    prometheus_client::encoding::text::encode(&mut text, registry)
        .expect("invariant: writing to a String does not fail");
    text
}
