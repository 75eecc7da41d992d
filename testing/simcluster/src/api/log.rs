//! Container output, requested from the kubelet of the pod's node, as in the real server but over
//! plain HTTP.
//!
//! The kubelet's address is the node's `InternalIP` and
//! `status.daemonEndpoints.kubeletEndpoint.Port`.

use axum::body::Body;
use axum::http::{Request, Response, StatusCode};
use serde_json::Value;

use super::error::ApiError;
use super::meta;
use super::server::{Call, respond};

/// Query parameters of a log request that are forwarded to the kubelet.
const FORWARDED: &[&str] =
    &["follow", "previous", "tailLines", "limitBytes", "timestamps", "sinceSeconds", "sinceTime"];

/// Handles `GET pods/NAME/log`.
pub(crate) async fn answer(call: &Call<'_>, name: &str) -> Result<Response<Body>, ApiError> {
    let pod = call.stored(name)?;
    let container = container(call, &pod)?;
    let node = pod["spec"]["nodeName"].as_str().unwrap_or_default();
    if node.is_empty() {
        return Err(ApiError::bad_request(format!("pod {name} does not have a host assigned")));
    }
    let kubelet = kubelet(call, node)?;
    let query: Vec<String> = FORWARDED
        .iter()
        .filter_map(|field| call.query.text(field).map(|value| format!("{field}={value}")))
        .collect();
    let path =
        format!("/containerLogs/{}/{name}/{container}?{}", meta::namespace(&pod), query.join("&"));
    forward(node, kubelet, &path).await
}

fn kubelet(call: &Call<'_>, name: &str) -> Result<String, ApiError> {
    let node = call.shared.store.get("nodes", "", name);
    let node = node
        .ok_or_else(|| ApiError::internal(format!("node \"{name}\" of the pod does not exist")))?;
    let addresses = node["status"]["addresses"].as_array();
    let address = addresses
        .into_iter()
        .flatten()
        .find(|address| address["type"] == "InternalIP")
        .and_then(|address| address["address"].as_str());
    let port = node["status"]["daemonEndpoints"]["kubeletEndpoint"]["Port"].as_i64();
    match (address, port) {
        (Some(address), Some(port)) => Ok(format!("http://{address}:{port}")),
        _ => Err(ApiError::internal(format!("node \"{name}\" has no kubelet address"))),
    }
}

async fn forward(node: &str, kubelet: String, path: &str) -> Result<Response<Body>, ApiError> {
    let failed = |error: &dyn std::fmt::Display| {
        ApiError::internal(format!("kubelet of node \"{node}\": {error}"))
    };
    let url = kubelet.parse().map_err(|error| failed(&error))?;
    let mut config = kube::Config::new(url);
    // A followed log may be silent for any time.
    config.read_timeout = None;
    let client = kube::Client::try_from(config).map_err(|error| failed(&error))?;
    let request =
        Request::get(path).body(kube::client::Body::empty()).map_err(|error| failed(&error))?;
    let answer = client.send(request).await.map_err(|error| failed(&error))?;
    let status = answer.status();
    let body = Body::new(answer.into_body());
    if status.is_success() {
        return respond(StatusCode::OK, "text/plain", body);
    }
    let body = axum::body::to_bytes(body, 64 * 1024).await.unwrap_or_default();
    Err(ApiError::bad_request(String::from_utf8_lossy(&body).trim().to_owned()))
}

fn container(call: &Call<'_>, pod: &Value) -> Result<String, ApiError> {
    let names: Vec<&str> = ["containers", "initContainers"]
        .iter()
        .flat_map(|list| pod["spec"][*list].as_array().into_iter().flatten())
        .filter_map(|container| container["name"].as_str())
        .collect();
    let name = meta::name(pod);
    match call.query.text("container") {
        Some(asked) if names.contains(&asked) => Ok(asked.to_owned()),
        Some(asked) => {
            Err(ApiError::bad_request(format!("container {asked} is not valid for pod {name}")))
        }
        None if pod["spec"]["containers"].as_array().map(Vec::len) == Some(1) => {
            Ok(names[0].to_owned())
        }
        None => Err(ApiError::bad_request(format!(
            "a container name must be specified for pod {name}, choose one of: [{}]",
            names.join(" ")
        ))),
    }
}
