//! Pod status, computed from the states of its containers. Pure.

use std::collections::BTreeMap;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Container, Pod};
use kube::ResourceExt;
use serde_json::{Value, json};

use super::progress::{self, Outcome};
use crate::node::container::{self, ContainerState};

/// Reason and message of a container that is not created.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Waiting {
    pub(crate) reason: &'static str,
    pub(crate) message: String,
}

/// Inputs from which a pod's status is computed.
#[derive(Debug)]
pub(crate) struct StatusInputs<'a> {
    pub(crate) pod: &'a Pod,
    pub(crate) containers: &'a [container::Container],
    /// By container name.
    pub(crate) waiting: &'a BTreeMap<String, Waiting>,
    /// `allocatedResourcesStatus` by container name.
    pub(crate) health: &'a BTreeMap<String, Value>,
    /// True once the pod's claims are prepared.
    pub(crate) prepared: bool,
    /// Final result, once the pod has ended.
    pub(crate) outcome: Option<Outcome>,
    pub(crate) host_ip: &'a str,
    pub(crate) now: Timestamp,
}

/// Returns the fields of `status` that a kubelet owns, as a merge patch.
pub(crate) fn pod_status(inputs: &StatusInputs<'_>) -> Value {
    let spec = inputs.pod.spec.as_ref();
    let init: &[Container] =
        spec.and_then(|spec| spec.init_containers.as_deref()).unwrap_or_default();
    let containers: &[Container] = spec.map(|spec| spec.containers.as_slice()).unwrap_or_default();
    let initialized = init.iter().all(|container| has_succeeded(inputs, &container.name));
    let ready = inputs.outcome.is_none()
        && initialized
        && containers.iter().all(|container| is_running(inputs, &container.name));
    let start_time = inputs.pod.status.as_ref().and_then(|status| status.start_time.as_ref());
    let conditions = conditions(
        inputs,
        &[
            ("PodReadyToStartContainers", inputs.prepared && inputs.outcome.is_none()),
            ("Initialized", initialized),
            ("Ready", ready),
            ("ContainersReady", ready),
        ],
    );
    let mut status = json!({
        "phase": phase(inputs, init, containers),
        "conditions": conditions,
        "hostIP": inputs.host_ip,
        "hostIPs": [{"ip": inputs.host_ip}],
        "podIP": inputs.host_ip,
        "podIPs": [{"ip": inputs.host_ip}],
        "startTime": start_time.map_or(inputs.now, |time| time.0).to_string(),
        "containerStatuses": statuses(inputs, containers, if initialized { "ContainerCreating" } else { "PodInitializing" }),
    });
    if !init.is_empty() {
        status["initContainerStatuses"] = statuses(inputs, init, "PodInitializing");
    }
    status
}

fn phase(inputs: &StatusInputs<'_>, init: &[Container], containers: &[Container]) -> &'static str {
    if let Some(outcome) = inputs.outcome {
        return outcome.phase();
    }
    let began = |container: &Container| {
        progress::latest(inputs.containers, &container.name)
            .is_some_and(|latest| latest.state != ContainerState::Starting)
    };
    if init.iter().all(|container| has_succeeded(inputs, &container.name))
        && containers.iter().all(began)
    {
        "Running"
    } else {
        "Pending"
    }
}

fn has_succeeded(inputs: &StatusInputs<'_>, name: &str) -> bool {
    progress::latest(inputs.containers, name)
        .is_some_and(|c| matches!(c.state, ContainerState::Exited { code: 0, .. }))
}

fn is_running(inputs: &StatusInputs<'_>, name: &str) -> bool {
    progress::latest(inputs.containers, name)
        .is_some_and(|c| matches!(c.state, ContainerState::Running { .. }))
}

/// Merges the kubelet's conditions into those of other writers. A condition keeps its time while
/// its status is unchanged.
fn conditions(inputs: &StatusInputs<'_>, own: &[(&str, bool)]) -> Vec<Value> {
    let present =
        inputs.pod.status.as_ref().and_then(|status| status.conditions.clone()).unwrap_or_default();
    let mut conditions: Vec<Value> = present
        .iter()
        .filter(|condition| !own.iter().any(|(name, _)| *name == condition.type_))
        .filter_map(|condition| serde_json::to_value(condition).ok())
        .collect();
    for (name, holds) in own {
        let status = if *holds { "True" } else { "False" };
        let before =
            present.iter().find(|condition| condition.type_ == *name && condition.status == status);
        let since = before
            .and_then(|condition| condition.last_transition_time.as_ref())
            .map_or(inputs.now, |time| time.0);
        let mut condition =
            json!({"type": name, "status": status, "lastTransitionTime": since.to_string()});
        if let (false, Some(_)) = (holds, inputs.outcome) {
            condition["reason"] = "PodCompleted".into();
        }
        conditions.push(condition);
    }
    conditions
}

fn statuses(inputs: &StatusInputs<'_>, containers: &[Container], not_yet: &str) -> Value {
    containers.iter().map(|container| container_status(inputs, container, not_yet)).collect()
}

fn container_status(inputs: &StatusInputs<'_>, container: &Container, not_yet: &str) -> Value {
    let name = &container.name;
    let latest = progress::latest(inputs.containers, name);
    let running = is_running(inputs, name);
    let mut status = json!({
        "name": name,
        "image": container.image,
        "imageID": container.image,
        "ready": running,
        "started": running,
        "restartCount": latest.map_or(0, |latest| latest.id.attempt),
        "state": {"waiting": {"reason": not_yet}},
    });
    if let Some(waiting) = inputs.waiting.get(name) {
        status["state"] =
            json!({"waiting": {"reason": waiting.reason, "message": waiting.message}});
    }
    if let Some(latest) = latest {
        status["containerID"] = format!(
            "simcluster://{}-{name}-{}",
            inputs.pod.uid().unwrap_or_default(),
            latest.id.attempt
        )
        .into();
        if latest.state != ContainerState::Starting {
            status["state"] = state(&latest.state);
        }
        let before = inputs
            .containers
            .iter()
            .filter(|c| c.id.name == *name && c.id.attempt < latest.id.attempt);
        if let Some(before) = before.max_by_key(|c| c.id.attempt) {
            status["lastState"] = state(&before.state);
        }
    }
    if let Some(health) = inputs.health.get(name) {
        status["allocatedResourcesStatus"] = health.clone();
    }
    status
}

fn state(state: &ContainerState) -> Value {
    match state {
        ContainerState::Starting => json!({"waiting": {"reason": "ContainerCreating"}}),
        ContainerState::Running { started_at, .. } => {
            json!({"running": {"startedAt": started_at.to_string()}})
        }
        ContainerState::Exited { code, signal, started_at, finished_at, message } => {
            let reason = match (started_at, code) {
                (None, _) => "StartError",
                (Some(_), 0) => "Completed",
                (Some(_), _) => "Error",
            };
            json!({"terminated": {
                "exitCode": code, "signal": signal, "reason": reason, "message": message,
                "startedAt": started_at.map(|time| time.to_string()), "finishedAt": finished_at.to_string(),
            }})
        }
    }
}

#[cfg(test)]
#[path = "status/tests.rs"]
mod tests;
