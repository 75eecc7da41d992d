//! A pod's status from what its containers do: pure.

use std::collections::BTreeMap;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Container, Pod};
use kube::ResourceExt;
use serde_json::{Value, json};

use super::progress::{self, Outcome};
use crate::node::container::{self, State};

/// Why a container is not created.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Waiting {
    pub(crate) reason: &'static str,
    pub(crate) message: String,
}

/// Everything that a pod's status follows from.
#[derive(Debug)]
pub(crate) struct Seen<'a> {
    pub(crate) pod: &'a Pod,
    pub(crate) containers: &'a [container::Container],
    /// By container name.
    pub(crate) waiting: &'a BTreeMap<String, Waiting>,
    /// `allocatedResourcesStatus` by container name.
    pub(crate) health: &'a BTreeMap<String, Value>,
    /// The pod's claims are prepared.
    pub(crate) prepared: bool,
    /// The pod has ended.
    pub(crate) outcome: Option<Outcome>,
    pub(crate) host_ip: &'a str,
    pub(crate) now: Timestamp,
}

/// The fields of `status` that a kubelet owns, for a merge patch.
pub(crate) fn pod_status(seen: &Seen<'_>) -> Value {
    let spec = seen.pod.spec.as_ref();
    let init: &[Container] =
        spec.and_then(|spec| spec.init_containers.as_deref()).unwrap_or_default();
    let containers: &[Container] = spec.map(|spec| spec.containers.as_slice()).unwrap_or_default();
    let initialized = init.iter().all(|container| succeeded(seen, &container.name));
    let ready = seen.outcome.is_none()
        && initialized
        && containers.iter().all(|container| runs(seen, &container.name));
    let start_time = seen.pod.status.as_ref().and_then(|status| status.start_time.as_ref());
    let conditions = conditions(
        seen,
        &[
            ("PodReadyToStartContainers", seen.prepared && seen.outcome.is_none()),
            ("Initialized", initialized),
            ("Ready", ready),
            ("ContainersReady", ready),
        ],
    );
    let mut status = json!({
        "phase": phase(seen, init, containers),
        "conditions": conditions,
        "hostIP": seen.host_ip,
        "hostIPs": [{"ip": seen.host_ip}],
        "podIP": seen.host_ip,
        "podIPs": [{"ip": seen.host_ip}],
        "startTime": start_time.map_or(seen.now, |time| time.0).to_string(),
        "containerStatuses": statuses(seen, containers, if initialized { "ContainerCreating" } else { "PodInitializing" }),
    });
    if !init.is_empty() {
        status["initContainerStatuses"] = statuses(seen, init, "PodInitializing");
    }
    status
}

fn phase(seen: &Seen<'_>, init: &[Container], containers: &[Container]) -> &'static str {
    if let Some(outcome) = seen.outcome {
        return outcome.phase();
    }
    let began = |container: &Container| {
        progress::latest(seen.containers, &container.name)
            .is_some_and(|latest| latest.state != State::Starting)
    };
    if init.iter().all(|container| succeeded(seen, &container.name)) && containers.iter().all(began)
    {
        "Running"
    } else {
        "Pending"
    }
}

fn succeeded(seen: &Seen<'_>, name: &str) -> bool {
    progress::latest(seen.containers, name)
        .is_some_and(|c| matches!(c.state, State::Exited { code: 0, .. }))
}

fn runs(seen: &Seen<'_>, name: &str) -> bool {
    progress::latest(seen.containers, name)
        .is_some_and(|c| matches!(c.state, State::Running { .. }))
}

/// The kubelet's own conditions, merged into those of others. A condition keeps its time while it
/// keeps its status.
fn conditions(seen: &Seen<'_>, own: &[(&str, bool)]) -> Vec<Value> {
    let present =
        seen.pod.status.as_ref().and_then(|status| status.conditions.clone()).unwrap_or_default();
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
            .map_or(seen.now, |time| time.0);
        let mut condition =
            json!({"type": name, "status": status, "lastTransitionTime": since.to_string()});
        if let (false, Some(_)) = (holds, seen.outcome) {
            condition["reason"] = "PodCompleted".into();
        }
        conditions.push(condition);
    }
    conditions
}

fn statuses(seen: &Seen<'_>, containers: &[Container], not_yet: &str) -> Value {
    containers.iter().map(|container| container_status(seen, container, not_yet)).collect()
}

fn container_status(seen: &Seen<'_>, container: &Container, not_yet: &str) -> Value {
    let name = &container.name;
    let latest = progress::latest(seen.containers, name);
    let running = runs(seen, name);
    let mut status = json!({
        "name": name,
        "image": container.image,
        "imageID": container.image,
        "ready": running,
        "started": running,
        "restartCount": latest.map_or(0, |latest| latest.id.attempt),
        "state": {"waiting": {"reason": not_yet}},
    });
    if let Some(waiting) = seen.waiting.get(name) {
        status["state"] =
            json!({"waiting": {"reason": waiting.reason, "message": waiting.message}});
    }
    if let Some(latest) = latest {
        status["containerID"] = format!(
            "simcluster://{}-{name}-{}",
            seen.pod.uid().unwrap_or_default(),
            latest.id.attempt
        )
        .into();
        if latest.state != State::Starting {
            status["state"] = state(&latest.state);
        }
        let before = seen
            .containers
            .iter()
            .filter(|c| c.id.name == *name && c.id.attempt < latest.id.attempt);
        if let Some(before) = before.max_by_key(|c| c.id.attempt) {
            status["lastState"] = state(&before.state);
        }
    }
    if let Some(health) = seen.health.get(name) {
        status["allocatedResourcesStatus"] = health.clone();
    }
    status
}

fn state(state: &State) -> Value {
    match state {
        State::Starting => json!({"waiting": {"reason": "ContainerCreating"}}),
        State::Running { started_at, .. } => {
            json!({"running": {"startedAt": started_at.to_string()}})
        }
        State::Exited { code, signal, started_at, finished_at, message } => {
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
