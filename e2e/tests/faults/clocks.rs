//! Clocks that jump an hour.

use k8s_openapi::api::coordination::v1::Lease;
use kube::ResourceExt;
use std::time::Duration;
use tessera_e2e::wait::{self, Verdict};
use tessera_simcluster::api::RequestInfo;

use crate::rig::{PATIENCE, Rig};

const HOUR: i64 = 3600;

/// How long the lease lasts.
const LEASE: Duration = Duration::from_secs(15);

/// It is renewed every 2 s: with so many renewals it has outlived itself.
const RENEWALS: usize = 9;

/// Waits until `holder` has renewed the lease so often; fails when anybody else gets it.
async fn renewed(rig: &Rig, holder: &str) {
    let mut versions = Vec::new();
    let judge = |lease: Option<&Lease>| {
        let Some(lease) = lease else { return Verdict::NotYet("no Lease".to_owned()) };
        let held =
            lease.spec.as_ref().and_then(|spec| spec.holder_identity.clone()).unwrap_or_default();
        if held != holder {
            return Verdict::Hopeless(format!("the Lease is {held}'s"));
        }
        if versions.last() != Some(&lease.resource_version()) {
            versions.push(lease.resource_version());
        }
        if versions.len() > RENEWALS {
            Verdict::Done(())
        } else {
            Verdict::NotYet(format!("{}", versions.len()))
        }
    };
    let what = format!("{RENEWALS} renewals by {holder}");
    wait::until_one(rig.leases(), "tessera-controller", &what, PATIENCE, judge).await.unwrap();
}

/// A renewal, or a takeover. Who does not hold the lease only reads it.
fn is_lease_write(request: &RequestInfo) -> bool {
    request.resource == "leases" && request.verb == "update"
}

/// By how many seconds the time of the claim's allocation is ahead of the test's.
async fn allocated_ahead(rig: &Rig, claim: &str) -> i64 {
    let claim = rig.claims().get(claim).await.unwrap();
    let stamp = claim.status.unwrap().allocation.unwrap().allocation_timestamp.unwrap();
    stamp.0.as_second() - jiff::Timestamp::now().as_second()
}

/// The leader's clock jumps one way and that of the standby the other: two hours between them.
async fn clocks_jump(ahead: i64) {
    let rig = Rig::with_nodes(&[1]).await;
    let mut leader = rig.controller("leader", true);
    rig.led_by("leader").await;
    let mut standby = rig.controller("standby", true);
    rig.pod("before", "10Gi").await;
    rig.bound(&["before".to_owned()]).await;
    leader.set_clock_ahead(ahead);
    standby.set_clock_ahead(-ahead);
    rig.pod("meanwhile", "10Gi").await;
    rig.bound(&["meanwhile".to_owned()]).await;
    let wrong = allocated_ahead(&rig, "meanwhile").await;
    assert!((wrong - ahead).abs() < 60, "the clock did not jump: {wrong}");
    renewed(&rig, "leader").await;
    assert!(leader.runs() && standby.runs());
    // What the dead leader has left says that it renewed an hour from now, or an hour ago.
    leader.kill().await;
    let renewals = rig.requests(is_lease_write);
    rig.led_by("standby").await;
    let (renewed, _) = renewals.last().unwrap();
    let (taken, _) = &rig.requests(is_lease_write)[renewals.len()];
    let held = *taken - *renewed;
    assert!(held >= LEASE, "taken before the lease was over: {held:?}");
    rig.pod("after", "10Gi").await;
    rig.bound(&["after".to_owned()]).await;
    for name in ["before", "meanwhile", "after"] {
        assert_eq!(rig.shares_of(name).await, 1, "{name}");
    }
    rig.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_leader_an_hour_ahead_keeps_its_lease_and_does_not_hold_it_beyond_its_death() {
    clocks_jump(HOUR).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_leader_an_hour_behind_keeps_its_lease_and_nobody_takes_it_early() {
    clocks_jump(-HOUR).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pods_are_bound_while_the_clock_of_the_api_server_jumps() {
    let rig = Rig::with_nodes(&[1]).await;
    let mut controller = rig.controller("a", true);
    rig.led_by("a").await;
    for (name, ahead) in [("ahead", HOUR), ("behind", -HOUR), ("right", 0)] {
        rig.api().set_clock_ahead(ahead);
        rig.pod(name, "40Gi").await;
        rig.bound(&[name.to_owned()]).await;
        let created = rig.pods().get(name).await.unwrap().metadata.creation_timestamp.unwrap();
        let wrong = created.0.as_second() - jiff::Timestamp::now().as_second();
        assert!((wrong - ahead).abs() < 60, "the clock did not jump: {wrong}");
        // Each makes room for the next, which finds half of the GPU taken otherwise.
        rig.delete_now(name).await;
    }
    assert!(controller.runs());
    rig.finish().await;
}
