//! What a pod needs next, from its spec and the containers that it has: pure.

use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::{Container, Pod};

use crate::node::container::{self, State};

/// Pause before a container is started again. The kubelet's grows from 10 s; nobody wants to wait
/// for a stand-in.
const RESTART_DELAY: Duration = Duration::from_secs(1);

/// How a pod ends.
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

/// What to do now.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Next<'a> {
    /// Containers to start, with the number of their attempt.
    pub(crate) start: Vec<(&'a Container, u32)>,
    /// Look again after this time.
    pub(crate) again_in: Option<Duration>,
    /// Nothing will ever run again.
    pub(crate) outcome: Option<Outcome>,
}

/// What one container's history asks for.
enum Want {
    Start(u32),
    StartIn(Duration),
    Wait,
    Done { success: bool },
}

/// The next step of `pod`, whose containers so far are `containers`.
pub(crate) fn next<'a>(
    pod: &'a Pod,
    containers: &[container::Container],
    now: Timestamp,
) -> Next<'a> {
    let Some(spec) = &pod.spec else { return Next::default() };
    let policy = spec.restart_policy.as_deref().unwrap_or("Always");
    let mut next = Next::default();
    // An init container is restarted until it succeeds, unless nothing ever is.
    let init_policy = if policy == "Never" { "Never" } else { "OnFailure" };
    for container in spec.init_containers.iter().flatten() {
        match want(latest(containers, &container.name), init_policy, now) {
            Want::Done { success: true } => continue,
            Want::Done { success: false } => next.outcome = Some(Outcome::Failed),
            Want::Start(attempt) => next.start.push((container, attempt)),
            Want::StartIn(pause) => next.again_in = Some(pause),
            Want::Wait => {}
        }
        return next;
    }
    let (mut all_done, mut success) = (true, true);
    for container in &spec.containers {
        let want = want(latest(containers, &container.name), policy, now);
        if let Want::Done { success: this } = want {
            success &= this;
            continue;
        }
        all_done = false;
        match want {
            Want::Start(attempt) => next.start.push((container, attempt)),
            Want::StartIn(pause) => {
                next.again_in = Some(next.again_in.map_or(pause, |other| other.min(pause)))
            }
            Want::Wait | Want::Done { .. } => {}
        }
    }
    if all_done {
        next.outcome = Some(if success { Outcome::Succeeded } else { Outcome::Failed });
    }
    next
}

/// The newest container of that name.
pub(crate) fn latest<'c>(
    containers: &'c [container::Container],
    name: &str,
) -> Option<&'c container::Container> {
    containers
        .iter()
        .filter(|container| container.id.name == name)
        .max_by_key(|container| container.id.attempt)
}

fn want(latest: Option<&container::Container>, policy: &str, now: Timestamp) -> Want {
    let Some(latest) = latest else { return Want::Start(0) };
    let State::Exited { code, finished_at, .. } = &latest.state else { return Want::Wait };
    let success = *code == 0;
    if policy == "Never" || (policy == "OnFailure" && success) {
        return Want::Done { success };
    }
    let due =
        finished_at.saturating_add(SignedDuration::try_from(RESTART_DELAY).unwrap_or_default());
    match Duration::try_from(due.unwrap_or(now).duration_since(now)) {
        Ok(pause) if !pause.is_zero() => Want::StartIn(pause),
        _ => Want::Start(latest.id.attempt + 1),
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
        let state =
            State::Exited { code, signal: None, started_at: None, finished_at, message: None };
        record(name, attempt, state)
    }

    fn running(name: &str) -> container::Container {
        record(name, 0, State::Running { pid: 1, started_at: NOW })
    }

    fn record(name: &str, attempt: u32, state: State) -> container::Container {
        let id = ContainerId { pod_uid: "u".into(), name: name.into(), attempt };
        container::Container { id, state, log: "/log".into() }
    }

    fn starts(next: &Next<'_>) -> Vec<(String, u32)> {
        next.start.iter().map(|(container, attempt)| (container.name.clone(), *attempt)).collect()
    }

    #[test]
    fn containers_wait_for_the_init_container() {
        let pod = pod("Never");
        assert_eq!(starts(&next(&pod, &[], NOW)), [("i".to_owned(), 0)]);
        assert_eq!(next(&pod, &[running("i")], NOW), Next::default());
        assert_eq!(
            starts(&next(&pod, &[exited("i", 0, 0, 0)], NOW)),
            [("a".to_owned(), 0), ("b".to_owned(), 0)]
        );
    }

    #[test]
    fn a_failed_init_container_fails_a_pod_that_is_never_restarted() {
        let pod = pod("Never");
        let failed = next(&pod, &[exited("i", 0, 1, 0)], NOW);
        assert_eq!((failed.outcome, failed.start.len()), (Some(Outcome::Failed), 0));
    }

    #[test]
    fn a_pod_ends_with_its_last_container_and_fails_if_any_did() {
        let pod = pod("Never");
        let init = exited("i", 0, 0, 9);
        let half = [init.clone(), exited("a", 0, 1, 0), running("b")];
        assert_eq!(next(&pod, &half, NOW).outcome, None);
        let done = [init.clone(), exited("a", 0, 1, 0), exited("b", 0, 0, 0)];
        assert_eq!(next(&pod, &done, NOW).outcome, Some(Outcome::Failed));
        let good = [init, exited("a", 0, 0, 0), exited("b", 0, 0, 0)];
        assert_eq!(next(&pod, &good, NOW).outcome, Some(Outcome::Succeeded));
    }

    #[test]
    fn restarts_come_after_a_pause_with_the_next_number() {
        let pod = pod("Always");
        let init = exited("i", 0, 0, 9);
        let fresh = [init.clone(), exited("a", 2, 0, 0), running("b")];
        assert_eq!(next(&pod, &fresh, NOW).again_in, Some(RESTART_DELAY));
        let rested = [init, exited("a", 1, 0, 9), exited("a", 2, 0, 5), running("b")];
        assert_eq!(starts(&next(&pod, &rested, NOW)), [("a".to_owned(), 3)]);
    }

    #[test]
    fn on_failure_restarts_only_what_failed() {
        let pod = pod("OnFailure");
        let records = [exited("i", 0, 0, 9), exited("a", 0, 0, 9), exited("b", 0, 3, 9)];
        assert_eq!(starts(&next(&pod, &records, NOW)), [("b".to_owned(), 1)]);
    }
}
