//! Connections with TLS, which serve many requests each, by HTTP/1.1 or HTTP/2.

use std::{sync::Arc, time::Duration};

use axum::{
    Router,
    extract::{Request, State},
    http::{HeaderValue, StatusCode, Version, header},
    middleware::{Next, from_fn_with_state},
    response::{IntoResponse, Response},
};
use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    server::conn::auto,
    service::TowerToHyperService,
};
use rustls::{ConfigBuilder, ServerConfig, WantsVerifier, server::ResolvesServerCert};
use tokio::{
    net::TcpStream,
    time::{Instant, sleep, timeout},
};
use tokio_rustls::TlsAcceptor;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::http::{MAX_BUFFER, Place, ServerLimits};

/// Time after which a connection takes no further request. Clients connect again, so that the
/// replicas of a Service share the load after one of them has started.
const MAX_AGE: Duration = Duration::from_secs(300);

/// Time for which a connection of HTTP/1.1 may be idle. It must be longer than clients keep one (90
/// s in Go): a request on a connection that the server closes at that moment fails.
const MAX_IDLE: Duration = Duration::from_secs(150);

/// Interval of pings on a connection of HTTP/2.
const PING_INTERVAL: Duration = Duration::from_secs(30);

/// Time for the answer to a ping.
const PING_TIMEOUT: Duration = Duration::from_secs(10);

/// Requests of one connection at a time.
const MAX_STREAMS: u32 = 16;

/// Time for requests that have begun when the server stops.
const FINISH: Duration = Duration::from_secs(2);

/// Time for which idle connections of HTTP/1.1 stay open when the server stops: a client may be
/// sending a request, whose answer then ends the connection.
const LINGER: Duration = Duration::from_millis(500);

/// Returns the configuration of a server whose certificate `resolver` chooses for each connection.
/// Clients need no certificate.
///
/// # Panics
/// Never: ring has the default versions of TLS.
pub fn server_config(resolver: Arc<dyn ResolvesServerCert>) -> ServerConfig {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder: ConfigBuilder<ServerConfig, WantsVerifier> =
        ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .expect("invariant: ring supports the default versions of TLS");
    let mut config = builder.with_no_client_auth().with_cert_resolver(resolver);
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    config
}

/// The open connections.
pub(super) struct Connections {
    acceptor: TlsAcceptor,
    stop: CancellationToken,
    tasks: TaskTracker,
}

impl Connections {
    pub(super) fn new(config: Arc<ServerConfig>, stop: CancellationToken) -> Self {
        Self { acceptor: TlsAcceptor::from(config), stop, tasks: TaskTracker::new() }
    }

    /// Serves a connection until it ends, or the server stops.
    pub(super) fn spawn(
        &self,
        stream: TcpStream,
        routes: Router,
        limits: ServerLimits,
        place: Place,
    ) {
        let (acceptor, stop) = (self.acceptor.clone(), self.stop.clone());
        self.tasks.spawn(async move {
            serve(stream, routes, limits, acceptor, stop).await;
            drop(place);
        });
    }

    /// Waits until all connections have ended, at most for [`FINISH`].
    pub(super) async fn finish(self) {
        self.tasks.close();
        let _ = timeout(FINISH, self.tasks.wait()).await;
    }
}

/// Serves the requests of a connection. Errors are the client's, and are not logged.
async fn serve(
    stream: TcpStream,
    routes: Router,
    limits: ServerLimits,
    acceptor: TlsAcceptor,
    stop: CancellationToken,
) {
    let Ok(Ok(stream)) = timeout(limits.head_timeout, acceptor.accept(stream)).await else {
        return;
    };
    let is_http2 = stream.get_ref().1.alpn_protocol() == Some(b"h2");
    let state = RequestState { limit: limits.total_timeout, opened: Instant::now(), stop };
    let stop = state.stop.clone();
    let routes = routes.layer(from_fn_with_state(state, within));
    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder.http1().timer(TokioTimer::new()).header_read_timeout(MAX_IDLE).max_buf_size(MAX_BUFFER);
    builder
        .http2()
        .timer(TokioTimer::new())
        .keep_alive_interval(PING_INTERVAL)
        .keep_alive_timeout(PING_TIMEOUT)
        .max_concurrent_streams(MAX_STREAMS);
    let service = TowerToHyperService::new(routes);
    let connection = builder.serve_connection(TokioIo::new(stream), service);
    let mut connection = std::pin::pin!(connection);
    tokio::select! {
        _ = connection.as_mut() => return,
        () = stop.cancelled() => {}
        // Only HTTP/2 can tell a client that a request was not read.
        () = sleep(MAX_AGE), if is_http2 => {}
    }
    if !is_http2 && timeout(LINGER, connection.as_mut()).await.is_ok() {
        return;
    }
    connection.as_mut().graceful_shutdown();
    let _ = timeout(limits.total_timeout, connection).await;
}

/// State that the requests of a connection share.
#[derive(Clone)]
struct RequestState {
    limit: Duration,
    opened: Instant,
    stop: CancellationToken,
}

/// Bounds the time of one request: of its body, and of its handler. Ends a connection of HTTP/1.1
/// that is old, or whose server stops, with the answer.
async fn within(State(state): State<RequestState>, request: Request, next: Next) -> Response {
    let is_http1 = request.version() < Version::HTTP_2;
    let mut response = match timeout(state.limit, next.run(request)).await {
        Ok(response) => response,
        Err(_) => StatusCode::REQUEST_TIMEOUT.into_response(),
    };
    if is_http1 && (state.opened.elapsed() > MAX_AGE || state.stop.is_cancelled()) {
        response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    response
}
