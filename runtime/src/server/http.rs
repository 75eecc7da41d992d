//! An HTTP server on a thread of its own, with few connections and deadlines.

use std::{
    collections::HashMap,
    io,
    net::{IpAddr, SocketAddr},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use axum::{
    Router,
    http::{StatusCode, header},
    response::IntoResponse,
    routing::get,
};
use hyper::{body::Bytes, server::conn::http1};
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    service::TowerToHyperService,
};
use tokio::{
    net::{TcpListener, TcpStream},
    time::{sleep, timeout},
};
use tokio_util::sync::CancellationToken;

use super::single_flight::SingleFlight;

/// Threads for handlers that block.
const BLOCKING_THREADS: usize = 4;

/// Size of the read buffer of a connection, and so the longest request head.
pub(super) const MAX_BUFFER: usize = 16 << 10;

/// Pause after a failed accept. The usual cause is that the process has too many open files.
const ACCEPT_PAUSE: Duration = Duration::from_secs(1);

/// Limits of a server.
#[derive(Clone, Copy, Debug)]
pub struct ServerLimits {
    /// Open connections. Further ones are closed at once.
    pub connections: usize,
    /// Open connections of one IP address, so that one client leaves places to others.
    pub connections_per_address: usize,
    /// Time from the connection to the end of the request's head.
    pub head_timeout: Duration,
    /// Time from the connection to the end of the response.
    pub total_timeout: Duration,
}

impl Default for ServerLimits {
    fn default() -> Self {
        Self {
            connections: 16,
            connections_per_address: 4,
            head_timeout: Duration::from_secs(5),
            total_timeout: Duration::from_secs(30),
        }
    }
}

/// An HTTP server that is bound and not served yet. Each connection serves one request, with TLS
/// many.
#[derive(Debug)]
pub struct HttpServer {
    listener: std::net::TcpListener,
    address: SocketAddr,
    limits: ServerLimits,
    #[cfg(feature = "tls")]
    tls: Option<Arc<rustls::ServerConfig>>,
}

impl HttpServer {
    /// Binds `address`.
    ///
    /// # Errors
    /// The address cannot be bound.
    pub fn bind(address: SocketAddr) -> io::Result<Self> {
        let listener = std::net::TcpListener::bind(address)?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        Ok(Self {
            listener,
            address,
            limits: ServerLimits::default(),
            #[cfg(feature = "tls")]
            tls: None,
        })
    }

    /// Returns the server with these limits.
    #[must_use]
    pub fn with_limits(self, limits: ServerLimits) -> Self {
        Self { limits, ..self }
    }

    /// Returns the server with TLS. The time limits then apply to the handshake and to each
    /// request, not to the connection.
    #[cfg(feature = "tls")]
    #[must_use]
    pub fn with_tls(self, config: Arc<rustls::ServerConfig>) -> Self {
        Self { tls: Some(config), ..self }
    }

    /// Returns the bound address.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Serves `routes` on the calling thread until `stop`. Open connections are closed then, with
    /// TLS after the requests that they have begun.
    ///
    /// # Errors
    /// The runtime of the thread cannot be built.
    pub fn run(self, routes: Router, stop: &CancellationToken) -> io::Result<()> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .max_blocking_threads(BLOCKING_THREADS)
            .build()?;
        let served = runtime.block_on(async {
            let listener = TcpListener::from_std(self.listener)?;
            #[cfg(feature = "tls")]
            if let Some(config) = self.tls {
                let connections = super::tls::Connections::new(config, stop.clone());
                let serve = |stream, routes, limits, place| {
                    connections.spawn(stream, routes, limits, place);
                };
                stop.run_until_cancelled(accept(&listener, self.limits, &routes, serve)).await;
                drop(listener);
                connections.finish().await;
                return Ok(());
            }
            let serve = |stream, routes, limits, place| {
                tokio::spawn(serve_one(stream, routes, limits, place));
            };
            stop.run_until_cancelled(accept(&listener, self.limits, &routes, serve)).await;
            Ok(())
        });
        // A handler may block in a read of a file system.
        runtime.shutdown_background();
        served
    }
}

async fn accept(
    listener: &TcpListener,
    limits: ServerLimits,
    routes: &Router,
    serve: impl Fn(TcpStream, Router, ServerLimits, Place),
) {
    let places = Arc::new(Places { limits, taken: Mutex::default() });
    loop {
        match listener.accept().await {
            Ok((stream, peer)) => {
                if let Some(place) = Places::take(&places, peer.ip()) {
                    serve(stream, routes.clone(), limits, place);
                }
            }
            Err(error) => {
                tracing::debug!(%error, "cannot accept connection");
                sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

/// Serves one request. Errors are the client's, and are not logged.
async fn serve_one(stream: TcpStream, routes: Router, limits: ServerLimits, _place: Place) {
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(limits.head_timeout)
        .keep_alive(false)
        .max_buf_size(MAX_BUFFER)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(routes));
    let _ = timeout(limits.total_timeout, connection).await;
}

/// The open connections by address.
#[derive(Debug)]
struct Places {
    limits: ServerLimits,
    taken: Mutex<HashMap<IpAddr, usize>>,
}

/// A place of a connection, until it is dropped.
#[derive(Debug)]
pub(super) struct Place {
    places: Arc<Places>,
    address: IpAddr,
}

impl Places {
    /// Returns a place for a connection of `address`, or `None` if there is none.
    fn take(this: &Arc<Self>, address: IpAddr) -> Option<Place> {
        let mut taken = this.taken.lock().unwrap_or_else(PoisonError::into_inner);
        if taken.values().sum::<usize>() >= this.limits.connections {
            return None;
        }
        let of_address = taken.entry(address).or_default();
        if *of_address >= this.limits.connections_per_address {
            return None;
        }
        *of_address += 1;
        Some(Place { places: Arc::clone(this), address })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut taken = self.places.taken.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(of_address) = taken.get_mut(&self.address) {
            *of_address -= 1;
            if *of_address == 0 {
                taken.remove(&self.address);
            }
        }
    }
}

/// Returns the route `/metrics`, which answers with the text that `render` returns, in the
/// OpenMetrics format. `render` may block; it runs once at a time, for all who wait.
pub fn metrics(render: impl Fn() -> String + Send + Sync + 'static) -> Router {
    const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    // The copies of the bytes share their memory.
    let rendered = SingleFlight::blocking(move || Bytes::from(render()));
    let answer = move || async move {
        match rendered.get().await {
            Some(text) => ([(header::CONTENT_TYPE, OPEN_METRICS)], text).into_response(),
            None => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
        }
    };
    Router::new().route("/metrics", get(answer))
}

/// Returns the route `/healthz`, which answers 200, or 503 and the reason of `check`.
pub fn healthz(check: SingleFlight<Result<(), String>>) -> Router {
    let answer = move || async move {
        match check.get().await {
            Some(Ok(())) => (StatusCode::OK, "ok\n".to_owned()),
            Some(Err(reason)) => (StatusCode::SERVICE_UNAVAILABLE, format!("{reason}\n")),
            None => (StatusCode::SERVICE_UNAVAILABLE, "the health check panicked\n".to_owned()),
        }
    };
    Router::new().route("/healthz", get(answer))
}
