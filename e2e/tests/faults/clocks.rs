//! Wall clocks that jump by one hour.

use k8s_openapi::api::coordination::v1::Lease;
use kube::ResourceExt;
use std::time::Duration;
use tessera_e2e::wait::{self, CheckResult};
use tessera_simcluster::api::RequestInfo;

use crate::harness::{FaultHarness, TIMEOUT};

const HOUR: i64 = 3600;

/// Duration of the lease.
const LEASE: Duration = Duration::from_secs(15);

/// Number of renewals. One every 2 s, so they take longer than the lease's duration.
const RENEWALS: usize = 9;

/// Waits until `holder` has renewed the lease that often; fails if another instance acquires it.
async fn wait_renewed(harness: &FaultHarness, holder: &str) {
    let mut versions = Vec::new();
    let check = |lease: Option<&Lease>| {
        let Some(lease) = lease else { return CheckResult::Pending("no Lease".to_owned()) };
        let held =
            lease.spec.as_ref().and_then(|spec| spec.holder_identity.clone()).unwrap_or_default();
        if held != holder {
            return CheckResult::Impossible(format!("the Lease is held by {held}"));
        }
        if versions.last() != Some(&lease.resource_version()) {
            versions.push(lease.resource_version());
        }
        CheckResult::done_if(versions.len() > RENEWALS, || versions.len().to_string())
    };
    let what = format!("{RENEWALS} renewals by {holder}");
    wait::until_one(harness.leases(), "tessera-controller", &what, TIMEOUT, check).await.unwrap();
}

/// Returns true for a renewal or an acquisition; other instances only read the lease.
fn is_lease_write(request: &RequestInfo) -> bool {
    request.resource == "leases" && request.verb == "update"
}

/// Returns by how many seconds the claim's allocation timestamp is ahead of the test's clock.
async fn allocated_ahead(harness: &FaultHarness, claim: &str) -> i64 {
    let claim = harness.claims().get(claim).await.unwrap();
    let stamp = claim.status.unwrap().allocation.unwrap().allocation_timestamp.unwrap();
    stamp.0.as_second() - jiff::Timestamp::now().as_second()
}

/// The clocks of leader and standby jump in opposite directions, two hours apart.
async fn clocks_jump(ahead: i64) {
    let harness = FaultHarness::with_nodes(&[1]).await;
    let mut leader = harness.controller("leader", true);
    harness.wait_leader("leader").await;
    let mut standby = harness.controller("standby", true);
    harness.pod("before", "10Gi").await;
    harness.wait_bound(&["before".to_owned()]).await;
    leader.set_clock_ahead(ahead);
    standby.set_clock_ahead(-ahead);
    harness.pod("meanwhile", "10Gi").await;
    harness.wait_bound(&["meanwhile".to_owned()]).await;
    let wrong = allocated_ahead(&harness, "meanwhile").await;
    assert!((wrong - ahead).abs() < 60, "the clock did not jump: {wrong}");
    wait_renewed(&harness, "leader").await;
    assert!(leader.check_running() && standby.check_running());
    // The renew time in the lease of the dead leader is one hour off.
    leader.kill().await;
    let renewals = harness.requests(is_lease_write);
    harness.wait_leader("standby").await;
    let (renewed, _) = renewals.last().unwrap();
    let (taken, _) = &harness.requests(is_lease_write)[renewals.len()];
    let held = *taken - *renewed;
    assert!(held >= LEASE, "lease acquired before it expired: {held:?}");
    harness.pod("after", "10Gi").await;
    harness.wait_bound(&["after".to_owned()]).await;
    for name in ["before", "meanwhile", "after"] {
        assert_eq!(harness.shares_of(name).await, 1, "{name}");
    }
    harness.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leader_one_hour_ahead_keeps_lease_until_it_dies() {
    clocks_jump(HOUR).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leader_one_hour_behind_keeps_lease_until_it_expires() {
    clocks_jump(-HOUR).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn binds_pods_while_api_server_clock_jumps() {
    let harness = FaultHarness::with_nodes(&[1]).await;
    let mut controller = harness.controller("a", true);
    harness.wait_leader("a").await;
    for (name, ahead) in [("ahead", HOUR), ("behind", -HOUR), ("correct", 0)] {
        harness.api().set_clock_ahead(ahead);
        harness.pod(name, "40Gi").await;
        harness.wait_bound(&[name.to_owned()]).await;
        let created = harness.pods().get(name).await.unwrap().metadata.creation_timestamp.unwrap();
        let wrong = created.0.as_second() - jiff::Timestamp::now().as_second();
        assert!((wrong - ahead).abs() < 60, "the clock did not jump: {wrong}");
        // Free the GPU for the next pod, which does not fit twice.
        harness.delete_now(name).await;
    }
    assert!(controller.check_running());
    harness.finish().await;
}
