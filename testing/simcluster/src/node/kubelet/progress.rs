//! PodActions actions for a pod, computed from its spec and its containers. Pure.

use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::{Container, Pod};

use crate::node::container::{self, ContainerState};

/// Pause before a container is restarted. The kubelet's back-off begins at 10 s; tests need less.
const RESTART_DELAY: Duration = Duration::from_secs(1);

/// Final result of a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    Succeeded,
    Failed,
}

impl Outcome {
    pub(crate) fn phase(self) -> &'static str {
        match self {
            Self::Succeeded => "Succeeded",
            Self::Failed => "Failed",
        }
    }
}

/// Actions due now.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct PodActions<'a> {
    /// Containers to start, with their attempt numbers.
    pub(crate) start: Vec<(&'a Container, u32)>,
    /// Pause before the pod is checked again.
    pub(crate) again_in: Option<Duration>,
    /// Final result, once no container will run again.
    pub(crate) outcome: Option<Outcome>,
}

/// Action that one container's history calls for.
enum ContainerAction {
    Start(u32),
    StartIn(Duration),
    Wait,
    Done { success: bool },
}

/// Returns the next actions for `pod`, given its `containers`.
pub(crate) fn next_actions<'a>(
    pod: &'a Pod,
    containers: &[container::Container],
    now: Timestamp,
) -> PodActions<'a> {
    let Some(spec) = &pod.spec else { return PodActions::default() };
    let policy = spec.restart_policy.as_deref().unwrap_or("Always");
    let mut next = PodActions::default();
    // Init containers are restarted until they succeed, unless the policy is Never.
    let init_policy = if policy == "Never" { "Never" } else { "OnFailure" };
    for container in spec.init_containers.iter().flatten() {
        match container_action(latest(containers, &container.name), init_policy, now) {
            ContainerAction::Done { success: true } => continue,
            ContainerAction::Done { success: false } => next.outcome = Some(Outcome::Failed),
            ContainerAction::Start(attempt) => next.start.push((container, attempt)),
            ContainerAction::StartIn(pause) => next.again_in = Some(pause),
            ContainerAction::Wait => {}
        }
        return next;
    }
    let (mut all_done, mut success) = (true, true);
    for container in &spec.containers {
        let want = container_action(latest(containers, &container.name), policy, now);
        if let ContainerAction::Done { success: this } = want {
            success &= this;
            continue;
        }
        all_done = false;
        match want {
            ContainerAction::Start(attempt) => next.start.push((container, attempt)),
            ContainerAction::StartIn(pause) => {
                next.again_in = Some(next.again_in.map_or(pause, |other| other.min(pause)))
            }
            ContainerAction::Wait | ContainerAction::Done { .. } => {}
        }
    }
    if all_done {
        next.outcome = Some(if success { Outcome::Succeeded } else { Outcome::Failed });
    }
    next
}

/// Returns the newest container of that name.
pub(crate) fn latest<'c>(
    containers: &'c [container::Container],
    name: &str,
) -> Option<&'c container::Container> {
    containers
        .iter()
        .filter(|container| container.id.name == name)
        .max_by_key(|container| container.id.attempt)
}

fn container_action(
    latest: Option<&container::Container>,
    policy: &str,
    now: Timestamp,
) -> ContainerAction {
    let Some(latest) = latest else { return ContainerAction::Start(0) };
    let ContainerState::Exited { code, finished_at, .. } = &latest.state else {
        return ContainerAction::Wait;
    };
    let success = *code == 0;
    if policy == "Never" || (policy == "OnFailure" && success) {
        return ContainerAction::Done { success };
    }
    let due =
        finished_at.saturating_add(SignedDuration::try_from(RESTART_DELAY).unwrap_or_default());
    match Duration::try_from(due.unwrap_or(now).duration_since(now)) {
        Ok(pause) if !pause.is_zero() => ContainerAction::StartIn(pause),
        _ => ContainerAction::Start(latest.id.attempt + 1),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::node::container::ContainerId;

    const NOW: Timestamp = Timestamp::UNIX_EPOCH;

    fn pod(policy: &str) -> Pod {
        serde_json::from_value(json!({"spec": {
            "restartPolicy": policy,
            "initContainers": [{"name": "i"}],
            "containers": [{"name": "a"}, {"name": "b"}],
        }}))
        .unwrap()
    }

    fn exited(name: &str, attempt: u32, code: i32, seconds_ago: i64) -> container::Container {
        let finished_at = NOW - SignedDuration::from_secs(seconds_ago);
        let state = ContainerState::Exited {
            code,
            signal: None,
            started_at: None,
            finished_at,
            message: None,
        };
        record(name, attempt, state)
    }

    fn running(name: &str) -> container::Container {
        record(name, 0, ContainerState::Running { pid: 1, started_at: NOW })
    }

    fn record(name: &str, attempt: u32, state: ContainerState) -> container::Container {
        let id = ContainerId { pod_uid: "u".into(), name: name.into(), attempt };
        container::Container { id, state, log: "/log".into() }
    }

    fn starts(next: &PodActions<'_>) -> Vec<(String, u32)> {
        next.start.iter().map(|(container, attempt)| (container.name.clone(), *attempt)).collect()
    }

    #[test]
    fn containers_start_after_the_init_container() {
        let pod = pod("Never");
        assert_eq!(starts(&next_actions(&pod, &[], NOW)), [("i".to_owned(), 0)]);
        assert_eq!(next_actions(&pod, &[running("i")], NOW), PodActions::default());
        assert_eq!(
            starts(&next_actions(&pod, &[exited("i", 0, 0, 0)], NOW)),
            [("a".to_owned(), 0), ("b".to_owned(), 0)]
        );
    }

    #[test]
    fn failed_init_container_fails_pod_with_policy_never() {
        let pod = pod("Never");
        let failed = next_actions(&pod, &[exited("i", 0, 1, 0)], NOW);
        assert_eq!((failed.outcome, failed.start.len()), (Some(Outcome::Failed), 0));
    }

    #[test]
    fn pod_ends_with_last_container_and_fails_if_any_failed() {
        let pod = pod("Never");
        let init = exited("i", 0, 0, 9);
        let half = [init.clone(), exited("a", 0, 1, 0), running("b")];
        assert_eq!(next_actions(&pod, &half, NOW).outcome, None);
        let done = [init.clone(), exited("a", 0, 1, 0), exited("b", 0, 0, 0)];
        assert_eq!(next_actions(&pod, &done, NOW).outcome, Some(Outcome::Failed));
        let good = [init, exited("a", 0, 0, 0), exited("b", 0, 0, 0)];
        assert_eq!(next_actions(&pod, &good, NOW).outcome, Some(Outcome::Succeeded));
    }

    #[test]
    fn restart_waits_and_increments_the_attempt() {
        let pod = pod("Always");
        let init = exited("i", 0, 0, 9);
        let fresh = [init.clone(), exited("a", 2, 0, 0), running("b")];
        assert_eq!(next_actions(&pod, &fresh, NOW).again_in, Some(RESTART_DELAY));
        let rested = [init, exited("a", 1, 0, 9), exited("a", 2, 0, 5), running("b")];
        assert_eq!(starts(&next_actions(&pod, &rested, NOW)), [("a".to_owned(), 3)]);
    }

    #[test]
    fn on_failure_restarts_only_failed_containers() {
        let pod = pod("OnFailure");
        let records = [exited("i", 0, 0, 9), exited("a", 0, 0, 9), exited("b", 0, 3, 9)];
        assert_eq!(starts(&next_actions(&pod, &records, NOW)), [("b".to_owned(), 1)]);
    }
}
