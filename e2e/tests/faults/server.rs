//! The API server goes away in the middle, and comes back.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tessera_simcluster::api::{Fault, RequestInfo, WatchCache};
use tokio_util::sync::CancellationToken;

use crate::rig::{PATIENCE, Rig};

/// Shorter than the ten seconds after which a leader gives up.
const OUTAGE: Duration = Duration::from_secs(3);

fn is_allocation(request: &RequestInfo) -> bool {
    request.resource == "resourceclaims"
        && request.verb == "patch"
        && request.subresource == "status"
}

/// The server crashes at the write of an allocation, which is still `served` or is not; nobody gets
/// its answer. Two claims want more than there is, so whoever forgets the first while its outcome
/// is open gives its share to the second, which is more urgent.
async fn crash_at_the_allocation(served: bool) {
    let rig = Rig::with_nodes(&[1]).await;
    let api = rig.api().clone();
    let crashed = Arc::new(AtomicBool::new(false));
    let (happened, serve) = (crashed.clone(), CancellationToken::new());
    let held = serve.clone();
    rig.decide(move |request| {
        if !is_allocation(request) || happened.load(Ordering::Relaxed) {
            return Fault::None;
        }
        // The test lets the server crash once the request is there.
        Fault::HoldAnswer { serve: held.clone(), answer: CancellationToken::new() }
    });
    let mut controller = rig.controller("a", true);
    let lease = rig.led_by("a").await;
    rig.pod("first", "50Gi").await;
    rig.requested(1, is_allocation).await;
    rig.urgent_pod("second", "50Gi").await;
    rig.told("second", "InsufficientDevices").await;
    crashed.store(true, Ordering::Relaxed);
    if served {
        serve.cancel();
        rig.allocated("first").await;
    }
    api.go_down();
    tokio::time::sleep(OUTAGE).await;
    assert_eq!(rig.is_allocated("first").await, served);
    api.come_back(WatchCache::Fresh);
    rig.bound(&["first".to_owned()]).await;
    assert_eq!(rig.shares_of("first").await, 1);
    // Something that is answered proves that the controller sees the world again.
    rig.pod("third", "20Gi").await;
    rig.bound(&["third".to_owned()]).await;
    assert!(!rig.is_allocated("second").await, "50Gi and 50Gi do not fit into 80Gi");
    assert!(controller.runs());
    let now = rig.leases().get("tessera-controller").await.unwrap();
    let transitions = |lease: &k8s_openapi::api::coordination::v1::Lease| {
        lease.spec.as_ref().unwrap().lease_transitions
    };
    assert_eq!(
        transitions(&now),
        transitions(&lease),
        "the leader keeps its lease over {OUTAGE:?}"
    );
    rig.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restart_before_the_allocation_is_written_loses_and_doubles_nothing() {
    crash_at_the_allocation(false).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restart_after_the_allocation_is_written_and_before_its_answer_loses_and_doubles_nothing()
{
    crash_at_the_allocation(true).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_outage_longer_than_the_lease_ends_the_leader_and_the_next_one_takes_over_what_is_there()
{
    let rig = Rig::with_nodes(&[1]).await;
    let mut first = rig.controller("a", true);
    rig.led_by("a").await;
    rig.pod("before", "50Gi").await;
    rig.bound(&["before".to_owned()]).await;
    rig.api().go_down();
    let ended = tokio::time::timeout(PATIENCE, first.ended()).await;
    assert!(!ended.expect("it goes on without a lease").success());
    assert!(first.log().contains("cannot renew the Lease"), "{}", first.log());
    rig.api().come_back(WatchCache::Fresh);
    let _second = rig.controller("b", true);
    rig.pod("second", "50Gi").await;
    rig.pod("third", "20Gi").await;
    rig.bound(&["third".to_owned()]).await;
    assert!(!rig.is_allocated("second").await);
    rig.finish().await;
}
