use super::*;
use crate::node::container::ContainerId;

const NOW: Timestamp = Timestamp::UNIX_EPOCH;

fn pod() -> Pod {
    serde_json::from_value(json!({
        "metadata": {"name": "p", "uid": "u"},
        "spec": {"initContainers": [{"name": "i"}], "containers": [{"name": "c", "image": "tools"}]},
        "status": {"conditions": [
            {"type": "PodScheduled", "status": "True"},
            {"type": "Ready", "status": "False", "lastTransitionTime": "2026-01-02T03:04:05Z"},
        ]},
    }))
    .unwrap()
}

fn container(name: &str, attempt: u32, state: ContainerState) -> container::Container {
    let id = ContainerId { pod_uid: "u".into(), name: name.into(), attempt };
    container::Container { id, state, log: "/log".into() }
}

fn exited(name: &str, attempt: u32, code: i32) -> container::Container {
    let state = ContainerState::Exited {
        code,
        signal: None,
        started_at: Some(NOW),
        finished_at: NOW,
        message: None,
    };
    container(name, attempt, state)
}

fn status(containers: &[container::Container], outcome: Option<Outcome>) -> Value {
    let waiting = BTreeMap::from([(
        "c".to_owned(),
        Waiting { reason: "CreateContainerError", message: "cdi".into() },
    )]);
    pod_status(&StatusInputs {
        pod: &pod(),
        containers,
        waiting: if containers.is_empty() { &waiting } else { const { &BTreeMap::new() } },
        health: &BTreeMap::from([("c".to_owned(), json!([{"name": "claim:gpu"}]))]),
        prepared: true,
        outcome,
        host_ip: "127.0.0.1",
        now: NOW,
    })
}

fn condition<'a>(status: &'a Value, name: &str) -> &'a Value {
    status["conditions"]
        .as_array()
        .unwrap()
        .iter()
        .find(|condition| condition["type"] == name)
        .unwrap()
}

#[test]
fn pod_is_pending_until_every_container_started() {
    let status = status(&[], None);
    assert_eq!(status["phase"], "Pending");
    assert_eq!(
        status["containerStatuses"][0]["state"]["waiting"]["reason"],
        "CreateContainerError"
    );
    assert_eq!(status["initContainerStatuses"][0]["state"]["waiting"]["reason"], "PodInitializing");
    assert_eq!(condition(&status, "Initialized")["status"], "False");
}

#[test]
fn running_pod_is_ready_and_shows_device_health() {
    let run = container("c", 0, ContainerState::Running { pid: 1, started_at: NOW });
    let status = status(&[exited("i", 0, 0), run], None);
    assert_eq!(status["phase"], "Running");
    assert_eq!(condition(&status, "Ready")["status"], "True");
    assert_eq!(status["containerStatuses"][0]["allocatedResourcesStatus"][0]["name"], "claim:gpu");
    assert!(status["containerStatuses"][0]["state"]["running"].is_object());
}

#[test]
fn foreign_and_unchanged_conditions_are_kept() {
    let status = status(&[exited("i", 0, 1)], Some(Outcome::Failed));
    assert_eq!(condition(&status, "PodScheduled")["status"], "True");
    assert_eq!(condition(&status, "Ready")["lastTransitionTime"], "2026-01-02T03:04:05Z");
    assert_eq!(status["phase"], "Failed");
}

#[test]
fn restarted_container_shows_last_state() {
    let run = container("c", 1, ContainerState::Running { pid: 1, started_at: NOW });
    let status = status(&[exited("i", 0, 0), exited("c", 0, 3), run], None);
    let shown = &status["containerStatuses"][0];
    assert_eq!(
        (shown["restartCount"].as_i64(), shown["lastState"]["terminated"]["exitCode"].as_i64()),
        (Some(1), Some(3))
    );
}

#[test]
fn status_parses_as_pod_status() {
    let status = status(&[exited("i", 0, 0), exited("c", 0, 0)], Some(Outcome::Succeeded));
    let typed: k8s_openapi::api::core::v1::PodStatus = serde_json::from_value(status).unwrap();
    assert_eq!(typed.phase.as_deref(), Some("Succeeded"));
}
