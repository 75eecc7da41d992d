//! Defaults set by the server, for the fields used here.
//!
//! The service account admission sets the account's name but mounts no token, and does not check
//! that the account exists.

use jiff::Timestamp;
use serde_json::{Map, Value, json};

use super::kind::Kind;
use super::meta;

fn default(object: &mut Value, field: &str, value: impl Into<Value>) {
    if let Some(map) = object.as_object_mut() {
        map.entry(field).or_insert_with(|| value.into());
    }
}

fn each(list: &mut Value) -> impl Iterator<Item = &mut Value> {
    list.as_array_mut().into_iter().flatten()
}

/// Sets defaults for absent fields. Called for every write of the main resource.
pub(crate) fn fill(kind: &Kind, object: &mut Value, now: Timestamp) {
    match kind.plural {
        "pods" => pod(&mut object["spec"]),
        "namespaces" => namespace(object),
        "resourceclaims" => claim_spec(&mut object["spec"]),
        "resourceclaimtemplates" => claim_spec(&mut object["spec"]["spec"]),
        "resourceslices" => slice(&mut object["spec"], now),
        _ => {}
    }
}

fn pod(spec: &mut Value) {
    if !spec.is_object() {
        *spec = Value::Object(Map::new());
    }
    for (field, value) in [
        ("restartPolicy", json!("Always")),
        ("terminationGracePeriodSeconds", json!(30)),
        ("dnsPolicy", json!("ClusterFirst")),
        ("schedulerName", json!("default-scheduler")),
        ("securityContext", json!({})),
        ("enableServiceLinks", json!(true)),
        ("serviceAccountName", json!("default")),
        ("priority", json!(0)),
        ("preemptionPolicy", json!("PreemptLowerPriority")),
    ] {
        default(spec, field, value);
    }
    for list in ["initContainers", "containers"] {
        for container in each(&mut spec[list]) {
            let image = container["image"].as_str().unwrap_or_default();
            let tag =
                image.rsplit('/').next().and_then(|last| last.split_once(':')).map(|(_, tag)| tag);
            let pull = if matches!(tag, None | Some("latest")) { "Always" } else { "IfNotPresent" };
            default(container, "imagePullPolicy", pull);
            default(container, "terminationMessagePath", "/dev/termination-log");
            default(container, "terminationMessagePolicy", "File");
            default(container, "resources", json!({}));
            requests_from_limits(&mut container["resources"]);
        }
        if spec[list].is_null()
            && let Some(spec) = spec.as_object_mut()
        {
            spec.remove(list);
        }
    }
    for key in ["node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"] {
        let tolerated = each(&mut spec["tolerations"]).any(|toleration| {
            toleration["key"] == key
                || (toleration["key"].is_null() && toleration["operator"] == "Exists")
        });
        if !tolerated {
            let toleration = json!({"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300});
            match spec["tolerations"].as_array_mut() {
                Some(tolerations) => tolerations.push(toleration),
                None => spec["tolerations"] = json!([toleration]),
            }
        }
    }
}

fn requests_from_limits(resources: &mut Value) {
    let limits = resources["limits"].as_object().cloned().unwrap_or_default();
    if limits.is_empty() {
        if let Some(map) = resources.as_object_mut() {
            map.retain(|_, value| !value.is_null());
        }
        return;
    }
    default(resources, "requests", json!({}));
    for (name, amount) in limits {
        default(&mut resources["requests"], &name, amount);
    }
}

fn namespace(object: &mut Value) {
    let name = meta::name(object).to_owned();
    default(&mut object["metadata"], "labels", json!({}));
    object["metadata"]["labels"]["kubernetes.io/metadata.name"] = name.into();
}

fn claim_spec(spec: &mut Value) {
    let Some(requests) = spec.pointer_mut("/devices/requests") else { return };
    for request in each(requests) {
        if let Some(exactly) = request.get_mut("exactly") {
            device_request(exactly);
        }
        if let Some(alternatives) = request.get_mut("firstAvailable") {
            each(alternatives).for_each(device_request);
        }
    }
}

fn device_request(request: &mut Value) {
    default(request, "allocationMode", "ExactCount");
    if request["allocationMode"] == "ExactCount" {
        // Zero means "not set" in Go.
        if request["count"] == 0 {
            request["count"] = json!(1);
        }
        default(request, "count", 1);
    }
    if let Some(tolerations) = request.get_mut("tolerations") {
        each(tolerations).for_each(|toleration| default(toleration, "operator", "Equal"));
    }
}

fn slice(spec: &mut Value, now: Timestamp) {
    let Some(devices) = spec.get_mut("devices") else { return };
    for device in each(devices) {
        if let Some(taints) = device.get_mut("taints") {
            each(taints).for_each(|taint| default(taint, "timeAdded", meta::seconds(now)));
        }
    }
}
