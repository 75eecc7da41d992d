//! One request to a driver.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use http_body_util::{BodyExt, Empty, Limited};
use hyper::body::Bytes;
use hyper::client::conn::http1;
use hyper::{Request, StatusCode, header};
use hyper_util::rt::TokioIo;
use tessera_api::load::{NodeLoad, PATH};
use tokio::net::TcpStream;
use tokio::time::timeout;

/// Time limit of a request.
const TIME_LIMIT: Duration = Duration::from_secs(2);

/// Limit of an answer in bytes: that of a node with 64 GPUs has 6 KiB.
const SIZE_LIMIT: usize = 64 << 10;

/// Errors of a request.
#[derive(Debug, thiserror::Error)]
pub(super) enum LoadError {
    #[error("no answer within {} s", TIME_LIMIT.as_secs())]
    Late,
    #[error("cannot connect")]
    Connect(#[source] io::Error),
    #[error("the connection failed")]
    Connection(#[source] hyper::Error),
    #[error("the driver answered with status {0}")]
    Status(StatusCode),
    #[error("cannot read the answer")]
    Body(#[source] Box<dyn std::error::Error + Send + Sync>),
    #[error("the answer is no load")]
    Content(#[source] serde_json::Error),
}

/// Returns the load of the node whose driver serves at the address.
///
/// # Errors
/// [`LoadError`].
pub(super) async fn load(address: SocketAddr) -> Result<NodeLoad, LoadError> {
    timeout(TIME_LIMIT, ask(address)).await.unwrap_or(Err(LoadError::Late))
}

async fn ask(address: SocketAddr) -> Result<NodeLoad, LoadError> {
    let stream = TcpStream::connect(address).await.map_err(LoadError::Connect)?;
    let (mut sender, connection) =
        http1::handshake(TokioIo::new(stream)).await.map_err(LoadError::Connection)?;
    let request = Request::get(PATH)
        .header(header::HOST, address.to_string())
        .body(Empty::<Bytes>::new())
        .expect("invariant: a path and an address are valid");
    let answer = async {
        let answer = sender.send_request(request).await.map_err(LoadError::Connection)?;
        if answer.status() != StatusCode::OK {
            return Err(LoadError::Status(answer.status()));
        }
        let body = Limited::new(answer.into_body(), SIZE_LIMIT).collect().await;
        let body = body.map_err(LoadError::Body)?.to_bytes();
        serde_json::from_slice(&body).map_err(LoadError::Content)
    };
    // The connection makes progress while it is polled, and ends with the answer.
    let mut connection = std::pin::pin!(connection);
    let mut answer = std::pin::pin!(answer);
    tokio::select! {
        biased;
        answer = &mut answer => answer,
        ended = &mut connection => {
            ended.map_err(LoadError::Connection)?;
            answer.await
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::{Json, Router, routing::get};
    use serde_json::json;
    use tokio::net::TcpListener;

    /// Serves one route, and returns its address.
    async fn serve(route: axum::routing::MethodRouter) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let routes = Router::new().route(PATH, route);
        tokio::spawn(async move { axum::serve(listener, routes).await });
        address
    }

    #[tokio::test]
    async fn the_load_of_a_driver_is_read() {
        let gpus = json!({"gpus": [{
            "uuid": "GPU-1f0c2d3e-9a41-7c3b-8e55-0d6f2b1a4c77", "busyPercent": 40,
            "settledCoresPercent": 25, "laterField": true,
        }]});
        let address = serve(get(move || async move { Json(gpus) })).await;
        let load = load(address).await.expect("a load");
        assert_eq!((load.gpus.len(), load.gpus[0].busy_percent), (1, 40));
    }

    #[tokio::test]
    async fn other_answers_are_errors() {
        let old = serve(axum::routing::post(|| async {})).await;
        assert!(matches!(load(old).await, Err(LoadError::Status(_))), "an older driver");
        let large = serve(get(|| async { "1".repeat(SIZE_LIMIT + 1) })).await;
        assert!(matches!(load(large).await, Err(LoadError::Body(_))));
        let other = serve(get(|| async { "{}" })).await;
        assert!(matches!(load(other).await, Err(LoadError::Content(_))));
    }

    #[tokio::test]
    async fn a_driver_that_hangs_is_given_up() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        tokio::time::pause();
        let address = listener.local_addr().expect("an address");
        assert!(matches!(load(address).await, Err(LoadError::Late)));
    }
}
