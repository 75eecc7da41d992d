//! A proxy before the API server that holds one kind of write until it is let go.
//!
//! ```text
//! kube-scheduler --HTTP--> HoldingProxy --TLS, as the user of its client--> kube-apiserver
//!                               |
//!                       a write that matches waits here
//! ```
//!
//! What happens between two moments of somebody else's program can then be made to happen, instead
//! of waiting for it. Answers pass as they come, so that watches do.

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

/// No object is larger.
const LARGEST_BODY: usize = 8 << 20;

/// Which writes are held.
#[derive(Clone, Debug)]
pub struct Match {
    /// How the request's path ends.
    pub path_ends: String,
    /// What its body contains, in whatever encoding: texts look the same in JSON and in protobuf.
    pub body_has: String,
}

impl Match {
    fn is(&self, request: &Parts, body: &[u8]) -> bool {
        let needle = self.body_has.as_bytes();
        request.method == Method::PUT
            && request.uri.path().ends_with(&self.path_ends)
            && body.windows(needle.len()).any(|part| part == needle)
    }
}

/// What became of the writes that match.
#[derive(Debug, Default)]
struct Gate {
    holds: Option<Match>,
    held: usize,
    answers: Vec<StatusCode>,
}

/// The proxy. Dropping it ends it.
#[derive(Debug)]
pub struct HoldingProxy {
    address: SocketAddr,
    gate: Arc<watch::Sender<Gate>>,
    serving: AbortHandle,
}

impl HoldingProxy {
    /// Serves at a free port of that address. Requests go on as the user of `client`.
    ///
    /// # Errors
    /// The address cannot be listened at.
    pub async fn start(client: Client, address: IpAddr) -> std::io::Result<Self> {
        let gate = Arc::new(watch::Sender::new(Gate::default()));
        let router = Router::new().fallback(pass).with_state((client, Arc::clone(&gate)));
        let listener = TcpListener::bind((address, 0)).await?;
        let address = listener.local_addr()?;
        let serving = tokio::spawn(async move {
            if let Err(error) = axum::serve(listener, router).await {
                tracing::error!(%error, "the proxy ended");
            }
        });
        Ok(Self { address, gate, serving: serving.abort_handle() })
    }

    /// Where it serves.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// From now on, such writes wait.
    pub fn hold(&self, what: Match) {
        self.gate.send_replace(Gate { holds: Some(what), ..Gate::default() });
    }

    /// Waits until a write is held.
    pub async fn held(&self) {
        let mut gate = self.gate.subscribe();
        gate.wait_for(|gate| gate.held > 0).await.expect("invariant: the sender is ours");
    }

    /// Lets the held writes go, and holds no more of them. Returns how the first one was answered.
    pub async fn let_go(&self) -> StatusCode {
        self.gate.send_modify(|gate| gate.holds = None);
        let mut gate = self.gate.subscribe();
        let answered = gate.wait_for(|gate| !gate.answers.is_empty()).await;
        answered.expect("invariant: the sender is ours").answers[0]
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
    let is_held = gate.borrow().holds.as_ref().is_some_and(|what| what.is(&parts, &body));
    if is_held {
        gate.send_modify(|gate| gate.held += 1);
        let mut opened = gate.subscribe();
        opened.wait_for(|gate| gate.holds.is_none()).await.expect("invariant: the sender is ours");
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
    of_one_connection(&mut parts.headers);
    // Both come anew: another server, another body.
    parts.headers.remove(header::HOST);
    parts.headers.remove(header::CONTENT_LENGTH);
    let answer = client.send(Request::from_parts(parts, body.into())).await?;
    let (mut parts, body) = answer.into_parts();
    of_one_connection(&mut parts.headers);
    Ok(Response::from_parts(parts, Body::new(body)))
}

/// Removes what concerns one connection and not the request (RFC 9110, section 7.6.1).
fn of_one_connection(headers: &mut HeaderMap) {
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
