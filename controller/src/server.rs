//! `/metrics` and `/healthz`, and the health socket of probes; in a build for crash tests also
//! `/fault-points`.
//!
//! Healthy means that the process runs. A standby is healthy too; what is stuck is visible in the
//! metrics, and a restart does not cure it.

use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;

use k8s_openapi::jiff::Timestamp;
use prometheus_client::registry::Registry;
use tessera_runtime::server::health::HealthSocket;
use tessera_runtime::server::http::{self, HttpServer};
use tessera_runtime::server::single_flight::SingleFlight;
use tessera_runtime::supervisor::Supervisor;

use crate::webhook::certificate::ServedCertificate;

/// Serves on a thread of `tasks` until they stop.
///
/// # Errors
/// The address cannot be bound, or the thread cannot be started.
pub(crate) fn serve(
    address: SocketAddr,
    registry: Registry,
    tasks: &mut Supervisor,
) -> io::Result<()> {
    let routes = http::metrics(move || render(&registry)).merge(http::healthz(health()));
    #[cfg(feature = "fault-points")]
    let routes = routes.merge(crate::fault::POINTS.routes());
    let server = HttpServer::bind(address)?;
    tracing::info!(address = %server.address(), "serving metrics");
    let stop = tasks.stop_token();
    on_thread(tasks, "http", move || server.run(routes, &stop))
}

/// Serves the health socket `path`, as [`serve`] does.
///
/// # Errors
/// The socket cannot be bound, or the thread cannot be started.
pub(crate) fn serve_health(path: &Path, tasks: &mut Supervisor) -> io::Result<()> {
    let socket = HealthSocket::bind(path)?;
    let stop = tasks.stop_token();
    on_thread(tasks, "health", move || socket.run(&health(), &stop))
}

/// Serves the socket `path` of readiness, as [`serve`] does: `certificate` is that of the webhook,
/// and none if it is not served.
///
/// # Errors
/// The socket cannot be bound, or the thread cannot be started.
pub(crate) fn serve_ready(
    path: &Path,
    certificate: Option<Arc<ServedCertificate>>,
    tasks: &mut Supervisor,
) -> io::Result<()> {
    let socket = HealthSocket::bind(path)?;
    let stop = tasks.stop_token();
    let check = SingleFlight::new(move || {
        let now = Timestamp::now().as_second();
        let ready = certificate.as_ref().map_or(Ok(()), |served| served.check(now));
        async { ready }
    });
    on_thread(tasks, "ready", move || socket.run(&check, &stop))
}

fn on_thread(
    tasks: &mut Supervisor,
    name: &'static str,
    serve: impl FnOnce() -> io::Result<()> + Send + 'static,
) -> io::Result<()> {
    tasks.spawn_thread(name, move || {
        if let Err(error) = serve() {
            tracing::error!(%error, server = name, "server failed");
        }
    })
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
