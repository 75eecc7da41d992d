//! Watches that lag, fail and expire.

use std::sync::Arc;
use std::time::Duration;

use tessera_simcluster::api::{Fault, RequestInfo, WatchFault};
use tokio_util::sync::CancellationToken;

use crate::harness::{Change, FaultHarness, is_controller};

const LAG: Duration = Duration::from_millis(700);

fn is_allocation(request: &RequestInfo) -> bool {
    request.resource == "resourceclaims"
        && request.verb == "patch"
        && request.subresource == "status"
}

fn is_list(request: &RequestInfo) -> bool {
    request.resource == "resourceclaims" && request.verb == "list"
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn relist_after_410_keeps_allocation_in_flight() {
    let harness = FaultHarness::with_nodes(&[1]).await;
    let gate = CancellationToken::new();
    let held = gate.clone();
    harness.set_faults(move |request| match is_allocation(request) && request.name == "a" {
        true => Fault::Hold(held.clone()),
        false => Fault::None,
    });
    let _controller = harness.controller("a", false);
    harness.pod("a", "50Gi").await;
    harness.wait_requests(1, is_allocation).await;
    let lists = harness.requests(is_list).len();
    harness.api().reset_watch_cache();
    harness.api().close_watches();
    harness.wait_requests(lists + 1, is_list).await;
    harness.pod("b", "50Gi").await;
    harness.wait_event("b", "InsufficientDevices").await;
    assert!(!harness.is_allocated("a").await && !harness.is_allocated("b").await);
    gate.cancel();
    harness.wait_bound(&["a".to_owned()]).await;
    assert!(!harness.is_allocated("b").await);
    harness.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn repeated_410_loses_no_events() {
    let harness = FaultHarness::with_nodes(&[2]).await;
    let events = std::sync::atomic::AtomicUsize::new(0);
    harness.api().set_watch_fault_hook(Some(Arc::new(move |watch| {
        let number = events.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        if is_controller(watch) && number % 2 == 1 { WatchFault::Expire } else { WatchFault::None }
    })));
    let _controller = harness.controller("a", false);
    let names: Vec<String> = (0..10).map(|number| format!("pod-{number}")).collect();
    for name in &names {
        harness.pod(name, "16Gi").await;
    }
    harness.wait_bound(&names).await;
    for name in &names {
        assert_eq!(harness.shares_of(name).await, 1, "{name}");
    }
    // The last list may be under way, after its back-off.
    harness.wait_requests(2, is_list).await;
    harness.finish().await;
}

/// Delays the events of one kind. They arrive after events of other kinds that they caused or that
/// caused them.
async fn check_delayed(resource: &'static str) {
    let harness = FaultHarness::with_nodes(&[1]).await;
    harness.api().set_watch_fault_hook(Some(Arc::new(move |watch| {
        let lags = is_controller(watch) && watch.resource == resource;
        if lags { WatchFault::Delay(LAG) } else { WatchFault::None }
    })));
    let _controller = harness.controller("a", false);
    let names = |set: &str| (0..5).map(|number| format!("{set}-{number}")).collect::<Vec<String>>();
    for name in names("first") {
        harness.pod(&name, "16Gi").await;
    }
    harness.wait_bound(&names("first")).await;
    for name in names("first") {
        assert_eq!(
            harness.changes_of(&name).await,
            [Change::Protected, Change::Allocated],
            "{name}"
        );
    }
    // The GPU is full. The second set of pods is allocated only what the first set releases.
    for name in names("second") {
        harness.pod(&name, "16Gi").await;
    }
    harness.wait_event("second-0", "InsufficientDevices").await;
    for name in names("first") {
        harness.delete_now(&name).await;
    }
    harness.wait_bound(&names("second")).await;
    for name in names("first").iter().chain(&names("second")) {
        assert_eq!(harness.shares_of(name).await, 1, "{name}");
    }
    for name in names("first") {
        let changes = [Change::Protected, Change::Allocated, Change::Released];
        assert_eq!(harness.changes_of(&name).await, changes, "{name}");
    }
    for name in names("second") {
        assert_eq!(
            harness.changes_of(&name).await,
            [Change::Protected, Change::Allocated],
            "{name}"
        );
    }
    assert_eq!(harness.event_count("Rescheduling").await, 0);
    harness.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn delayed_claims_are_allocated_once() {
    check_delayed("resourceclaims").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn delayed_pods_are_allocated_once() {
    check_delayed("pods").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn delayed_slices_cause_no_rescheduling() {
    check_delayed("resourceslices").await;
}
