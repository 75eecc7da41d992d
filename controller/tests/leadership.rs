//! Candidates for one lease, against an API server in this process. Time is simulated.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod stand_in;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use stand_in::{StandIn, failure};
use tessera_controller::leadership::{Candidate, LeadershipError};
use tokio::time::{Duration, Instant};
use tokio_util::sync::CancellationToken;

fn candidate(api: &StandIn, identity: &str) -> Candidate {
    Candidate::new(api.client(), "tessera-system", identity.to_owned())
}

fn holder(api: &StandIn) -> String {
    let lease = api.get("leases", "tessera-system", "tessera-controller").unwrap();
    lease["spec"]["holderIdentity"].as_str().unwrap().to_owned()
}

#[tokio::test(start_paused = true)]
async fn the_first_candidate_leads_at_once_and_the_second_waits() {
    let api = StandIn::new();
    let start = Instant::now();
    candidate(&api, "a").acquire().await;
    assert!(start.elapsed() < Duration::from_secs(1));
    let mut second = candidate(&api, "b");
    let waited = tokio::time::timeout(Duration::from_secs(14), second.acquire()).await;
    assert!(waited.is_err(), "the lease has not run out");
    assert_eq!(holder(&api), "a");
}

#[tokio::test(start_paused = true)]
async fn a_dead_leader_is_followed_after_the_lease_and_its_last_requests() {
    let api = StandIn::new();
    candidate(&api, "dead").acquire().await;
    let start = Instant::now();
    candidate(&api, "b").acquire().await;
    let took = start.elapsed();
    assert!(took >= Duration::from_secs(15 + 4), "{took:?}");
    assert_eq!(holder(&api), "b");
}

#[tokio::test(start_paused = true)]
async fn a_lease_given_back_is_taken_at_once() {
    let api = StandIn::new();
    let mut first = candidate(&api, "a");
    first.acquire().await;
    let stop = CancellationToken::new();
    stop.cancel();
    first.hold(stop).await.unwrap();
    assert_eq!(holder(&api), "");
    let start = Instant::now();
    candidate(&api, "b").acquire().await;
    assert!(start.elapsed() < Duration::from_secs(1));
}

#[tokio::test(start_paused = true)]
async fn a_leader_that_cannot_renew_stops_before_its_lease_can_pass_on() {
    let api = StandIn::new();
    let mut leader = candidate(&api, "a");
    leader.acquire().await;
    let broken = Arc::new(AtomicBool::new(true));
    let flag = Arc::clone(&broken);
    api.fault(move |_, _| flag.load(Ordering::Relaxed).then(|| failure(500, "InternalError")));
    let start = Instant::now();
    let error = leader.hold(CancellationToken::new()).await.unwrap_err();
    assert!(matches!(error, LeadershipError::NotRenewed), "{error}");
    assert!(start.elapsed() < Duration::from_secs(15), "{:?}", start.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_leader_that_finds_another_holder_stops() {
    let api = StandIn::new();
    let mut leader = candidate(&api, "a");
    leader.acquire().await;
    let mut lease = api.get("leases", "tessera-system", "tessera-controller").unwrap();
    lease["spec"]["holderIdentity"] = "b".into();
    api.put("leases", lease);
    let error = leader.hold(CancellationToken::new()).await.unwrap_err();
    assert!(matches!(&error, LeadershipError::Taken { holder } if holder == "b"), "{error}");
}

#[tokio::test(start_paused = true)]
async fn of_two_candidates_that_see_a_dead_leader_one_wins() {
    let api = StandIn::new();
    candidate(&api, "dead").acquire().await;
    let (mut b, mut c) = (candidate(&api, "b"), candidate(&api, "c"));
    let first = tokio::select! {
        () = b.acquire() => "b",
        () = c.acquire() => "c",
    };
    assert_eq!(holder(&api), first);
}
