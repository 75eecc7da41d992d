//! Outages of the API server.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tessera_simcluster::api::{Fault, RequestInfo, WatchCache};
use tokio_util::sync::CancellationToken;

use crate::harness::{FaultHarness, TIMEOUT};

/// Duration of an outage, shorter than the ten seconds after which a leader exits.
const OUTAGE: Duration = Duration::from_secs(3);

fn is_allocation(request: &RequestInfo) -> bool {
    request.resource == "resourceclaims"
        && request.verb == "patch"
        && request.subresource == "status"
}

/// The server crashes during the write of an allocation, which it has applied if `served` is true.
/// The response is lost. Two claims exceed the capacity, so a controller that dropped the
/// unconfirmed allocation would allocate the share to the second pod, which has a higher priority.
async fn crash_during_allocation(served: bool) {
    let harness = FaultHarness::with_nodes(&[1]).await;
    let api = harness.api().clone();
    let crashed = Arc::new(AtomicBool::new(false));
    let (is_crashed, serve) = (crashed.clone(), CancellationToken::new());
    let held = serve.clone();
    harness.set_faults(move |request| {
        if !is_allocation(request) || is_crashed.load(Ordering::Relaxed) {
            return Fault::None;
        }
        // The test crashes the server after the request has arrived.
        Fault::HoldResponse { serve: held.clone(), answer: CancellationToken::new() }
    });
    let mut controller = harness.controller("a", true);
    let lease = harness.wait_leader("a").await;
    harness.pod("first", "50Gi").await;
    harness.wait_requests(1, is_allocation).await;
    harness.urgent_pod("second", "50Gi").await;
    harness.wait_event("second", "InsufficientDevices").await;
    crashed.store(true, Ordering::Relaxed);
    if served {
        serve.cancel();
        harness.wait_allocated("first").await;
    }
    api.simulate_crash();
    tokio::time::sleep(OUTAGE).await;
    assert_eq!(harness.is_allocated("first").await, served);
    api.restart_after_crash(WatchCache::Fresh);
    harness.wait_bound(&["first".to_owned()]).await;
    assert_eq!(harness.shares_of("first").await, 1);
    // A new allocation shows that the controller's watches work again.
    harness.pod("third", "20Gi").await;
    harness.wait_bound(&["third".to_owned()]).await;
    assert!(!harness.is_allocated("second").await, "50Gi and 50Gi do not fit into 80Gi");
    assert!(controller.check_running());
    let now = harness.leases().get("tessera-controller").await.unwrap();
    let transitions = |lease: &k8s_openapi::api::coordination::v1::Lease| {
        lease.spec.as_ref().unwrap().lease_transitions
    };
    assert_eq!(
        transitions(&now),
        transitions(&lease),
        "the leader must keep its lease during {OUTAGE:?}"
    );
    harness.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn restart_before_allocation_write_allocates_once() {
    crash_during_allocation(false).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn restart_after_allocation_write_allocates_once() {
    crash_during_allocation(true).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn outage_longer_than_lease_leads_to_takeover() {
    let harness = FaultHarness::with_nodes(&[1]).await;
    let mut first = harness.controller("a", true);
    harness.wait_leader("a").await;
    harness.pod("before", "50Gi").await;
    harness.wait_bound(&["before".to_owned()]).await;
    harness.api().simulate_crash();
    let ended = tokio::time::timeout(TIMEOUT, first.wait_exit()).await;
    assert!(!ended.expect("the controller continued without a lease").success());
    assert!(first.log().contains("cannot renew the Lease"), "{}", first.log());
    harness.api().restart_after_crash(WatchCache::Fresh);
    let _second = harness.controller("b", true);
    harness.pod("second", "50Gi").await;
    harness.pod("third", "20Gi").await;
    harness.wait_bound(&["third".to_owned()]).await;
    assert!(!harness.is_allocated("second").await);
    harness.finish().await;
}
