//! Watches that lag, break and expire.

use std::sync::Arc;
use std::time::Duration;

use tessera_simcluster::api::{Fault, RequestInfo, WatchFault};
use tokio_util::sync::CancellationToken;

use crate::rig::{Change, Rig, is_controller};

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
async fn after_410_a_new_list_does_not_free_what_is_being_written() {
    let rig = Rig::with_nodes(&[1]).await;
    let gate = CancellationToken::new();
    let held = gate.clone();
    rig.decide(move |request| match is_allocation(request) && request.name == "a" {
        true => Fault::Hold(held.clone()),
        false => Fault::None,
    });
    let _controller = rig.controller("a", false);
    rig.pod("a", "50Gi").await;
    rig.requested(1, is_allocation).await;
    let lists = rig.requests(is_list).len();
    rig.api().forget_past();
    rig.api().close_watches();
    rig.requested(lists + 1, is_list).await;
    rig.pod("b", "50Gi").await;
    rig.told("b", "InsufficientDevices").await;
    assert!(!rig.is_allocated("a").await && !rig.is_allocated("b").await);
    gate.cancel();
    rig.bound(&["a".to_owned()]).await;
    assert!(!rig.is_allocated("b").await);
    rig.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_watch_that_ends_with_410_at_every_other_event_misses_nothing() {
    let rig = Rig::with_nodes(&[2]).await;
    let events = std::sync::atomic::AtomicUsize::new(0);
    rig.api().set_watch_fault_hook(Some(Arc::new(move |watch| {
        let number = events.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        if is_controller(watch) && number % 2 == 1 { WatchFault::Expire } else { WatchFault::None }
    })));
    let _controller = rig.controller("a", false);
    let names: Vec<String> = (0..10).map(|number| format!("pod-{number}")).collect();
    for name in &names {
        rig.pod(name, "16Gi").await;
    }
    rig.bound(&names).await;
    for name in &names {
        assert_eq!(rig.shares_of(name).await, 1, "{name}");
    }
    assert!(rig.requests(is_list).len() > 1, "no list after 410");
    rig.finish().await;
}

/// One kind lags, so that its events come after those of other kinds that were caused by them, or
/// that they caused.
async fn lagging(resource: &'static str) {
    let rig = Rig::with_nodes(&[1]).await;
    rig.api().set_watch_fault_hook(Some(Arc::new(move |watch| {
        let lags = is_controller(watch) && watch.resource == resource;
        if lags { WatchFault::Delay(LAG) } else { WatchFault::None }
    })));
    let _controller = rig.controller("a", false);
    let names =
        |wave: &str| (0..5).map(|number| format!("{wave}-{number}")).collect::<Vec<String>>();
    for name in names("first") {
        rig.pod(&name, "16Gi").await;
    }
    rig.bound(&names("first")).await;
    for name in names("first") {
        assert_eq!(rig.changes_of(&name).await, [Change::Protected, Change::Allocated], "{name}");
    }
    // The GPU is full. The second wave gets what the first gives back, and not a moment earlier.
    for name in names("second") {
        rig.pod(&name, "16Gi").await;
    }
    rig.told("second-0", "InsufficientDevices").await;
    for name in names("first") {
        rig.delete_now(&name).await;
    }
    rig.bound(&names("second")).await;
    for name in names("first").iter().chain(&names("second")) {
        assert_eq!(rig.shares_of(name).await, 1, "{name}");
    }
    for name in names("first") {
        let changes = [Change::Protected, Change::Allocated, Change::Released];
        assert_eq!(rig.changes_of(&name).await, changes, "{name}");
    }
    for name in names("second") {
        assert_eq!(rig.changes_of(&name).await, [Change::Protected, Change::Allocated], "{name}");
    }
    assert_eq!(rig.events("Rescheduling").await, 0);
    rig.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn claims_that_are_seen_long_after_their_pods_are_allocated_once() {
    lagging("resourceclaims").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pods_that_are_seen_long_after_their_claims_are_served_once() {
    lagging("pods").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slices_and_nodes_that_are_seen_late_do_no_harm() {
    lagging("resourceslices").await;
}
