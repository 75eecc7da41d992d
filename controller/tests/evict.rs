//! Evictions: all or none as far as a dry run shows, and what their outcomes tell.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod fake_api;

use axum::http::StatusCode;
use fake_api::objects::{pod, reference};
use fake_api::{FakeApi, failure};
use tessera_controller::core::effect::{EvictionPurpose, Evictions};
use tessera_controller::core::event::{Event, EvictionOutcome};
use tessera_controller::evict::evict;
use tessera_controller::leadership::Tenure;

/// A cluster with these pods.
fn cluster(pods: &[&str]) -> FakeApi {
    let api = FakeApi::new();
    for name in pods {
        api.put("pods", pod(name, &[]));
    }
    api
}

/// Evicts the pods. Returns the outcome of each that has one.
async fn outcomes(api: &FakeApi, victims: &[&str]) -> Vec<(String, EvictionOutcome)> {
    let victims = victims.iter().map(|name| reference(name)).collect();
    let preemption = EvictionPurpose::Preemption { preemptor: reference("p") };
    let evictions = Evictions { purpose: preemption.clone(), victims };
    let Event::EvictionsEnded { purpose, outcomes } =
        evict(api.client(), Tenure::endless(), evictions).await
    else {
        panic!("another event");
    };
    assert_eq!(purpose, preemption);
    outcomes.into_iter().map(|(victim, outcome)| (victim.name.to_string(), outcome)).collect()
}

fn evicted(api: &FakeApi) -> Vec<String> {
    let pods = api.list("pods").into_iter();
    let ending = pods.filter(|pod| pod["metadata"]["deletionTimestamp"].is_string());
    ending.map(|pod| pod["metadata"]["name"].as_str().unwrap().to_owned()).collect()
}

/// Refuses the requests about this pod with a status code; with `is_late`, not the dry run.
fn refuse(api: &FakeApi, name: &'static str, code: u16, is_late: bool) {
    api.fault(move |_, request| {
        let is_dry_run = !request.body["deleteOptions"]["dryRun"].is_null();
        let is_it = request.path.contains(&format!("/{name}/"));
        (is_it && !(is_late && is_dry_run)).then(|| failure(code, "Refused"))
    });
}

#[tokio::test]
async fn pods_are_evicted_with_their_own_grace_period_and_uid() {
    let api = cluster(&["a", "b"]);
    let all = outcomes(&api, &["a", "b"]).await;
    assert!(all.iter().all(|(_, outcome)| *outcome == EvictionOutcome::Evicted), "{all:?}");
    assert_eq!(evicted(&api), ["a", "b"]);
    let bodies: Vec<_> = api.writes().into_iter().map(|write| write.body).collect();
    assert_eq!(bodies.len(), 4, "a dry run of each, then each");
    for body in bodies {
        assert!(body["deleteOptions"]["gracePeriodSeconds"].is_null(), "{body}");
        assert!(body["deleteOptions"]["preconditions"]["uid"].is_string(), "{body}");
    }
}

#[tokio::test]
async fn no_pod_is_evicted_if_one_may_not_be() {
    let api = cluster(&["a", "b"]);
    refuse(&api, "b", StatusCode::TOO_MANY_REQUESTS.as_u16(), false);
    let all = outcomes(&api, &["a", "b"]).await;
    assert!(matches!(&all[..], [(name, EvictionOutcome::Refused { .. })] if name == "b"));
    assert_eq!(evicted(&api), Vec::<String>::new());
}

#[tokio::test]
async fn evictions_end_with_the_first_that_is_refused() {
    let api = cluster(&["a", "b", "c"]);
    refuse(&api, "b", StatusCode::TOO_MANY_REQUESTS.as_u16(), true);
    let all = outcomes(&api, &["a", "b", "c"]).await;
    assert!(matches!(
        &all[..],
        [(_, EvictionOutcome::Evicted), (_, EvictionOutcome::Refused { .. })]
    ));
    assert_eq!(evicted(&api), ["a"]);
}

#[tokio::test]
async fn pod_that_is_gone_is_no_failure_and_an_error_is_one() {
    let api = cluster(&["a", "b"]);
    let all = outcomes(&api, &["gone", "a"]).await;
    assert_eq!(all[0].1, EvictionOutcome::Gone);
    assert_eq!(evicted(&api), ["a"]);
    refuse(&api, "b", StatusCode::FORBIDDEN.as_u16(), false);
    let all = outcomes(&api, &["b"]).await;
    assert!(matches!(all[0].1, EvictionOutcome::Failed { .. }), "{all:?}");
}
