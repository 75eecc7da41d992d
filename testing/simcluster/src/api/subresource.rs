//! Subresources: status, finalize, and a pod's binding, eviction, log and proxy.

use axum::body::Body;
use axum::http::{Method, Response, StatusCode};
use serde_json::{Value, json};

use super::error::ApiError;
use super::kind::{Kind, StatusSubresource};
use super::lifecycle::DeleteOptions;
use super::server::{Call, json};
use super::validate::Part;
use super::{log, meta, pod_proxy};

pub(crate) async fn run(
    call: &Call<'_>,
    method: &Method,
    name: &str,
    subresource: &str,
) -> Result<Response<Body>, ApiError> {
    let kind = call.route.kind;
    match (method.as_str(), kind.plural, subresource) {
        (_, _, "status") if kind.status == StatusSubresource::None => Err(ApiError::no_such_path()),
        ("GET", _, "status") => call.get(name),
        ("PUT", _, "status") => call.replace(name, Part::Status),
        ("PATCH", _, "status") => call.patch(name, Part::Status),
        ("PUT", "namespaces", "finalize") => call.replace(name, Part::Finalize),
        ("POST", "pods", "binding") => bind(call, name),
        ("POST", "pods", "eviction") => evict(call, name),
        ("GET", "pods", "log") => log::answer(call, name).await,
        ("GET", "pods", "proxy") => pod_proxy::answer(call, name).await,
        (_, _, "status") | (_, "pods", "binding" | "eviction" | "log" | "proxy") => {
            Err(ApiError::method_not_allowed())
        }
        _ => Err(ApiError::no_such_path()),
    }
}

fn parsed(call: &Call<'_>) -> Result<Value, ApiError> {
    serde_json::from_slice(&call.body).map_err(|error| ApiError::bad_request(error.to_string()))
}

fn success() -> Result<Response<Body>, ApiError> {
    let status = json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": 201});
    json(StatusCode::CREATED, &status)
}

/// Sets a pod's node, which is allowed once.
fn bind(call: &Call<'_>, name: &str) -> Result<Response<Body>, ApiError> {
    let binding = parsed(call)?;
    let node = binding["target"]["name"].as_str().unwrap_or_default();
    if node.is_empty() {
        return Err(ApiError::bad_request("target.name: Required value"));
    }
    let request = call.request();
    request.update(name, Part::Binding, false, |pod| {
        let pod = pod.ok_or_else(|| ApiError::not_found(request.kind, name))?;
        let mut pod = bound(request.kind, pod, &binding, node)?;
        set_scheduled(&mut pod, meta::seconds(request.now));
        Ok(pod)
    })?;
    success()
}

fn bound(kind: &Kind, pod: &Value, binding: &Value, node: &str) -> Result<Value, ApiError> {
    let name = meta::name(pod);
    let refuse =
        |because: String| Err(ApiError::conflict(kind, &format!("{name}/binding"), &because));
    let uid = meta::uid(binding);
    if !uid.is_empty() && uid != meta::uid(pod) {
        return refuse(format!(
            "Precondition failed: UID in precondition: {uid}, UID in object meta: {}",
            meta::uid(pod)
        ));
    }
    if meta::is_deleting(pod) {
        return refuse(format!("pod {name} is being deleted, cannot be assigned to a host"));
    }
    if let Some(assigned) = pod["spec"]["nodeName"].as_str().filter(|node| !node.is_empty()) {
        return refuse(format!("pod {name} is already assigned to node \"{assigned}\""));
    }
    if pod["spec"]["schedulingGates"].as_array().is_some_and(|gates| !gates.is_empty()) {
        return refuse(format!("pod {name} has non-empty .spec.schedulingGates"));
    }
    let mut pod = pod.clone();
    pod["spec"]["nodeName"] = node.into();
    if let Some(status) = pod["status"].as_object_mut() {
        // A nomination is obsolete once the pod has a node.
        status.remove("nominatedNodeName");
    }
    for field in ["annotations", "labels"] {
        for (key, value) in binding["metadata"][field].as_object().into_iter().flatten() {
            pod["metadata"][field][key] = value.clone();
        }
    }
    Ok(pod)
}

fn set_scheduled(pod: &mut Value, now: String) {
    let scheduled = json!({"type": "PodScheduled", "status": "True", "lastTransitionTime": now, "lastProbeTime": null});
    match pod["status"]["conditions"].as_array_mut() {
        Some(conditions) => {
            conditions.retain(|condition| condition["type"] != "PodScheduled");
            conditions.push(scheduled);
        }
        None => pod["status"]["conditions"] = json!([scheduled]),
    }
}

/// Deletes the pod. Disruption budgets are not supported.
fn evict(call: &Call<'_>, name: &str) -> Result<Response<Body>, ApiError> {
    let options: DeleteOptions =
        serde_json::from_value(parsed(call)?["deleteOptions"].clone()).unwrap_or_default();
    call.request().delete(name, &options)?;
    success()
}
