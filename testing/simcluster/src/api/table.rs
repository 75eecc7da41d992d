//! Tables for `kubectl get`, with the columns used here.

use jiff::Timestamp;
use serde_json::{Map, Value, json};

use super::kind::Kind;
use super::meta;

type Cell = fn(&Value) -> Value;

fn columns(kind: &Kind) -> Vec<(&'static str, Cell)> {
    let name: (&'static str, Cell) = ("Name", |object| meta::name(object).into());
    let created: (&'static str, Cell) =
        ("Age", |object| age(&object["metadata"]["creationTimestamp"]).into());
    let own: Vec<(&'static str, Cell)> = match kind.plural {
        "pods" => vec![
            ("Ready", |pod| ready_containers(pod).into()),
            ("Status", |pod| pod_state(pod).into()),
            ("Restarts", |pod| restarts(pod).into()),
            ("Node", |pod| or_none(&pod["spec"]["nodeName"])),
        ],
        "nodes" => vec![("Status", |node| node_state(node).into())],
        "namespaces" => vec![("Status", |namespace| or_none(&namespace["status"]["phase"]))],
        "resourceclaims" => vec![("State", |claim| claim_state(claim).into())],
        "resourceslices" => vec![
            ("Node", |slice| or_none(&slice["spec"]["nodeName"])),
            ("Driver", |slice| or_none(&slice["spec"]["driver"])),
            ("Pool", |slice| or_none(&slice["spec"]["pool"]["name"])),
        ],
        "events" => {
            return vec![
                ("Last Seen", |event| age(&last_seen(event)).into()),
                ("Type", |event| or_none(&event["type"])),
                ("Reason", |event| or_none(&event["reason"])),
                ("Object", |event| {
                    let about = &event["involvedObject"];
                    let kind = about["kind"].as_str().unwrap_or_default().to_lowercase();
                    format!("{kind}/{}", about["name"].as_str().unwrap_or_default()).into()
                }),
                ("Message", |event| or_none(&event["message"])),
            ];
        }
        _ => Vec::new(),
    };
    std::iter::once(name).chain(own).chain(std::iter::once(created)).collect()
}

/// Renders objects as `meta.k8s.io/v1 Table`.
pub(crate) fn render<'a>(
    kind: &Kind,
    objects: impl Iterator<Item = &'a Value>,
    metadata: Map<String, Value>,
) -> Value {
    let columns = columns(kind);
    let definitions: Vec<Value> = columns
        .iter()
        .map(|(name, _)| {
            let format = if *name == "Name" { "name" } else { "" };
            json!({"name": name, "type": "string", "format": format, "description": "", "priority": 0})
        })
        .collect();
    let rows: Vec<Value> = objects
        .map(|object| {
            let cells: Vec<Value> = columns.iter().map(|(_, cell)| cell(object)).collect();
            let object = json!({
                "kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": object["metadata"],
            });
            json!({"cells": cells, "object": object})
        })
        .collect();
    json!({
        "kind": "Table", "apiVersion": "meta.k8s.io/v1", "metadata": metadata,
        "columnDefinitions": definitions, "rows": rows,
    })
}

fn or_none(value: &Value) -> Value {
    value.as_str().filter(|text| !text.is_empty()).unwrap_or("<none>").into()
}

fn last_seen(event: &Value) -> Value {
    ["lastTimestamp", "eventTime", "firstTimestamp"]
        .iter()
        .map(|field| event[*field].clone())
        .find(Value::is_string)
        .unwrap_or_else(|| event["metadata"]["creationTimestamp"].clone())
}

fn age(time: &Value) -> String {
    let Some(time) = time.as_str().and_then(|text| text.parse::<Timestamp>().ok()) else {
        return "<unknown>".to_owned();
    };
    let seconds = Timestamp::now().as_second().saturating_sub(time.as_second()).max(0);
    match seconds {
        0..120 => format!("{seconds}s"),
        120..7200 => format!("{}m", seconds / 60),
        7200..172_800 => format!("{}h", seconds / 3600),
        _ => format!("{}d", seconds / 86_400),
    }
}

fn statuses(pod: &Value) -> impl Iterator<Item = &Value> {
    pod["status"]["containerStatuses"].as_array().into_iter().flatten()
}

fn ready_containers(pod: &Value) -> String {
    let ready = statuses(pod).filter(|status| status["ready"] == true).count();
    format!("{ready}/{}", pod["spec"]["containers"].as_array().map_or(0, Vec::len))
}

fn restarts(pod: &Value) -> String {
    statuses(pod).filter_map(|status| status["restartCount"].as_i64()).sum::<i64>().to_string()
}

fn pod_state(pod: &Value) -> String {
    if meta::is_deleting(pod) {
        return "Terminating".to_owned();
    }
    let waiting = statuses(pod).find_map(|status| status["state"]["waiting"]["reason"].as_str());
    let gated = pod["status"]["conditions"]
        .as_array()
        .into_iter()
        .flatten()
        .any(|c| c["reason"] == "SchedulingGated");
    let reason = pod["status"]["reason"].as_str();
    let phase = pod["status"]["phase"].as_str().unwrap_or("Unknown");
    let state = match (waiting, gated, reason) {
        (Some(waiting), _, _) => waiting,
        (None, true, _) => "SchedulingGated",
        (None, false, Some(reason)) => reason,
        (None, false, None) => phase,
    };
    state.to_owned()
}

fn node_state(node: &Value) -> String {
    let ready = node["status"]["conditions"]
        .as_array()
        .into_iter()
        .flatten()
        .any(|condition| condition["type"] == "Ready" && condition["status"] == "True");
    let cordoned = if node["spec"]["unschedulable"] == true { ",SchedulingDisabled" } else { "" };
    format!("{}{cordoned}", if ready { "Ready" } else { "NotReady" })
}

fn claim_state(claim: &Value) -> String {
    let status = &claim["status"];
    let mut state = Vec::new();
    if meta::is_deleting(claim) {
        state.push("deleted");
    }
    if status["allocation"].is_object() {
        state.push("allocated");
    }
    if status["reservedFor"].as_array().is_some_and(|consumers| !consumers.is_empty()) {
        state.push("reserved");
    }
    if state.is_empty() {
        state.push("pending");
    }
    state.join(",")
}
