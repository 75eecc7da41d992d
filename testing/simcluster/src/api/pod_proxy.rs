//! `pods/NAME:PORT/proxy/PATH`: forwards a GET request to a port of the pod.

use axum::body::Body;
use axum::http::{Request, Response, Uri};
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use serde_json::Value;

use super::error::ApiError;
use super::server::Call;

/// Forwards the request to the pod's address and returns its response.
pub(crate) async fn answer(call: &Call<'_>, target: &str) -> Result<Response<Body>, ApiError> {
    let (name, port) = target.split_once(':').unwrap_or((target, ""));
    let pod = call.stored(name)?;
    let port = port_of(&pod, port)?;
    let address = pod["status"]["podIP"].as_str();
    let address = address.ok_or_else(|| ApiError::unavailable("address not allowed"))?;
    let uri: Uri = format!("http://{address}:{port}/{}", call.route.path_in_pod)
        .parse()
        .map_err(|error| ApiError::bad_request(format!("invalid path: {error}")))?;
    let request = Request::get(uri).body(Body::empty());
    let request = request.map_err(|error| ApiError::bad_request(error.to_string()))?;
    let client = Client::builder(TokioExecutor::new()).build_http::<Body>();
    let response = client.request(request).await.map_err(|error| {
        ApiError::unavailable(format!("error trying to reach service: {error}"))
    })?;
    Ok(response.map(Body::new))
}

/// Returns the port, by default the first of the pod's containers.
fn port_of(pod: &Value, text: &str) -> Result<u16, ApiError> {
    if text.is_empty() {
        let first = pod["spec"]["containers"][0]["ports"][0]["containerPort"].as_u64();
        return Ok(first.and_then(|port| u16::try_from(port).ok()).unwrap_or(80));
    }
    text.parse().map_err(|_| ApiError::bad_request(format!("invalid pod port `{text}`")))
}
