//! HTTP proxy in front of the API server that holds matching writes until they are released.
//!
//! ```text
//! kube-scheduler --HTTP--> HoldingProxy --TLS, as the user of its client--> kube-apiserver
//!                               |
//!                       matching writes are held here
//! ```
//!
//! It makes races between two requests of another program reproducible. Responses are streamed, so
//! watches work.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::request::Parts;
use axum::http::{HeaderMap, Method, Request, Response, StatusCode, header};
use axum::response::IntoResponse;
use kube::Client;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::AbortHandle;

/// Limit of a request body, in bytes; larger than any API object.
const LARGEST_BODY: usize = 8 << 20;

/// Selects the writes that are held.
#[derive(Clone, Debug)]
pub struct WriteFilter {
    /// Suffix of the request's path.
    pub path_suffix: String,
    /// Text in the request's body. It is encoded equally in JSON and protobuf.
    pub body_contains: String,
}

impl WriteFilter {
    fn matches(&self, request: &Parts, body: &[u8]) -> bool {
        let needle = self.body_contains.as_bytes();
        request.method == Method::PUT
            && request.uri.path().ends_with(&self.path_suffix)
            && body.windows(needle.len()).any(|part| part == needle)
    }
}

/// State of the held writes.
#[derive(Debug, Default)]
struct Gate {
    holds: Option<WriteFilter>,
    held: usize,
    answers: Vec<StatusCode>,
}

/// The proxy. It stops when dropped.
#[derive(Debug)]
pub struct HoldingProxy {
    address: SocketAddr,
    gate: Arc<watch::Sender<Gate>>,
    serving: AbortHandle,
}

impl HoldingProxy {
    /// Starts the proxy on a free port of that address. Requests are forwarded as the user of
    /// `client`.
    ///
    /// # Errors
    /// Returns an error if the address cannot be bound.
    pub async fn start(client: Client, address: IpAddr) -> std::io::Result<Self> {
        let gate = Arc::new(watch::Sender::new(Gate::default()));
        let router = Router::new().fallback(pass).with_state((client, Arc::clone(&gate)));
        let listener = TcpListener::bind((address, 0)).await?;
        let address = listener.local_addr()?;
        let serving = tokio::spawn(async move {
            if let Err(error) = axum::serve(listener, router).await {
                tracing::error!(%error, "proxy stopped");
            }
        });
        Ok(Self { address, gate, serving: serving.abort_handle() })
    }

    /// Returns the URL of the proxy.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Holds matching writes from now on.
    pub fn hold(&self, filter: WriteFilter) {
        self.gate.send_replace(Gate { holds: Some(filter), ..Gate::default() });
    }

    /// Waits until a write is held.
    pub async fn wait_held(&self) {
        let mut gate = self.gate.subscribe();
        gate.wait_for(|gate| gate.held > 0).await.expect("invariant: the proxy owns the sender");
    }

    /// Releases the held writes and stops holding. Returns the status of the first held write's
    /// response.
    pub async fn release(&self) -> StatusCode {
        self.gate.send_modify(|gate| gate.holds = None);
        let mut gate = self.gate.subscribe();
        let answered = gate.wait_for(|gate| !gate.answers.is_empty()).await;
        answered.expect("invariant: the proxy owns the sender").answers[0]
    }
}

impl Drop for HoldingProxy {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

async fn pass(
    State((client, gate)): State<(Client, Arc<watch::Sender<Gate>>)>,
    request: Request<Body>,
) -> Response<Body> {
    let (parts, body) = request.into_parts();
    let body = match axum::body::to_bytes(body, LARGEST_BODY).await {
        Ok(body) => body,
        Err(error) => return (StatusCode::BAD_REQUEST, error.to_string()).into_response(),
    };
    let is_held = gate.borrow().holds.as_ref().is_some_and(|filter| filter.matches(&parts, &body));
    if is_held {
        gate.send_modify(|gate| gate.held += 1);
        let mut opened = gate.subscribe();
        opened
            .wait_for(|gate| gate.holds.is_none())
            .await
            .expect("invariant: the proxy owns the sender");
    }
    let response = match forward(&client, parts, body).await {
        Ok(response) => response,
        Err(error) => (StatusCode::BAD_GATEWAY, error.to_string()).into_response(),
    };
    if is_held {
        gate.send_modify(|gate| gate.answers.push(response.status()));
    }
    response
}

async fn forward(
    client: &Client,
    mut parts: Parts,
    body: Bytes,
) -> Result<Response<Body>, kube::Error> {
    remove_hop_by_hop_headers(&mut parts.headers);
    // Server and body differ, so both headers are set again.
    parts.headers.remove(header::HOST);
    parts.headers.remove(header::CONTENT_LENGTH);
    let answer = client.send(Request::from_parts(parts, body.into())).await?;
    let (mut parts, body) = answer.into_parts();
    remove_hop_by_hop_headers(&mut parts.headers);
    Ok(Response::from_parts(parts, Body::new(body)))
}

/// Removes hop-by-hop headers (RFC 9110, section 7.6.1).
fn remove_hop_by_hop_headers(headers: &mut HeaderMap) {
    for name in [
        header::CONNECTION,
        header::TRANSFER_ENCODING,
        header::UPGRADE,
        header::TE,
        header::TRAILER,
    ] {
        headers.remove(name);
    }
}
