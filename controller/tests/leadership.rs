//! Candidates for one lease, against an API server in this process. Time is simulated.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod fake_api;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use fake_api::objects::released_lease;
use fake_api::{FakeApi, failure};
use prometheus_client::registry::Registry;
use tessera_api::names::ManagedDrivers;
use tessera_controller::core::event::{Change, WatchedKind};
use tessera_controller::leadership::{Candidate, LeadershipError};
use tessera_controller::metrics::Metrics;
use tessera_controller::watch;
use tessera_runtime::supervisor::Supervisor;
use tokio::time::{Duration, Instant};
use tokio_util::sync::CancellationToken;

/// Returns an API server with a Lease that a previous leader has released.
fn installed() -> FakeApi {
    let api = FakeApi::new();
    api.put("leases", released_lease());
    api
}

fn candidate(api: &FakeApi, identity: &str) -> Candidate {
    Candidate::new(api.client(), "tessera-system", identity.to_owned())
}

fn holder(api: &FakeApi) -> String {
    let lease = api.get("leases", "tessera-system", "tessera-controller").unwrap();
    lease["spec"]["holderIdentity"].as_str().unwrap().to_owned()
}

#[tokio::test(start_paused = true)]
async fn first_candidate_leads_and_second_waits() {
    let api = installed();
    let start = Instant::now();
    candidate(&api, "a").acquire().await;
    assert!(start.elapsed() < Duration::from_secs(1));
    let mut second = candidate(&api, "b");
    let waited = tokio::time::timeout(Duration::from_secs(14), second.acquire()).await;
    assert!(waited.is_err(), "the lease has not run out");
    assert_eq!(holder(&api), "a");
}

#[tokio::test(start_paused = true)]
async fn lease_is_taken_over_after_expiry_and_request_timeout() {
    let api = installed();
    candidate(&api, "dead").acquire().await;
    let start = Instant::now();
    candidate(&api, "b").acquire().await;
    let took = start.elapsed();
    assert!(took >= Duration::from_secs(15 + 4), "{took:?}");
    assert_eq!(holder(&api), "b");
}

#[tokio::test(start_paused = true)]
async fn released_lease_is_acquired_at_once() {
    let api = installed();
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
async fn leader_without_renewal_stops_before_its_lease_expires() {
    let api = installed();
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
async fn leader_stops_when_another_holds_the_lease() {
    let api = installed();
    let mut leader = candidate(&api, "a");
    leader.acquire().await;
    let mut lease = api.get("leases", "tessera-system", "tessera-controller").unwrap();
    lease["spec"]["holderIdentity"] = "b".into();
    api.put("leases", lease);
    let error = leader.hold(CancellationToken::new()).await.unwrap_err();
    assert!(matches!(&error, LeadershipError::Taken { holder } if holder == "b"), "{error}");
}

#[tokio::test(start_paused = true)]
async fn one_of_two_candidates_takes_over_an_expired_lease() {
    let api = installed();
    candidate(&api, "dead").acquire().await;
    let (mut b, mut c) = (candidate(&api, "b"), candidate(&api, "c"));
    let first = tokio::select! {
        () = b.acquire() => "b",
        () = c.acquire() => "c",
    };
    assert_eq!(holder(&api), first);
}

#[tokio::test(start_paused = true)]
async fn late_renewal_counts_from_its_sending() {
    let api = installed();
    let mut leader = candidate(&api, "a");
    leader.acquire().await;
    let tenure = leader.tenure();
    let mut renewals = 0;
    api.answer_late(Duration::from_secs(3));
    api.fault(move |_, _| {
        renewals += 1;
        (renewals > 1).then(|| failure(500, "InternalError"))
    });
    // Others see the renewal served after 2 s, so the lease can pass on after 17 s.
    let start = Instant::now();
    let error = leader.hold(CancellationToken::new()).await.unwrap_err();
    assert!(matches!(error, LeadershipError::NotRenewed), "{error}");
    let took = start.elapsed();
    assert!(took > Duration::from_secs(10), "the renewal counts: {took:?}");
    assert!(
        took < Duration::from_secs(17 - 4),
        "the last request must end before the lease can pass on: {took:?}"
    );
    assert!(tenure.is_over());
}

#[tokio::test(start_paused = true)]
async fn unanswered_renewal_is_sent_again_in_time() {
    let api = installed();
    let mut leader = candidate(&api, "a");
    leader.acquire().await;
    let before = api.writes().len();
    api.answer_late(Duration::from_secs(3600));
    let stop = CancellationToken::new();
    let holding = leader.hold(stop.clone());
    tokio::pin!(holding);
    let swallowed = api.until("a renewal", |api| (api.writes().len() > before).then_some(()));
    tokio::select! {
        () = swallowed => {}
        ended = &mut holding => panic!("{ended:?}"),
    }
    api.answer_late(Duration::ZERO);
    let ended = tokio::time::timeout(Duration::from_secs(60), &mut holding).await;
    assert!(ended.is_err(), "{ended:?}");
    stop.cancel();
    holding.await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn lease_is_released_after_an_unanswered_renewal() {
    let api = installed();
    let mut leader = candidate(&api, "a");
    leader.acquire().await;
    api.answer_late(Duration::from_secs(3600));
    let stop = CancellationToken::new();
    let holding = leader.hold(stop.clone());
    tokio::pin!(holding);
    // The renewal is sent after two seconds and given up after six; the next one would be sent
    // after eight.
    let ended = tokio::time::timeout(Duration::from_secs(7), &mut holding).await;
    assert!(ended.is_err(), "{ended:?}");
    api.answer_late(Duration::ZERO);
    stop.cancel();
    holding.await.unwrap();
    assert_eq!(holder(&api), "");
}

#[tokio::test(start_paused = true)]
async fn wait_after_takeover_does_not_extend_the_tenure() {
    let api = installed();
    candidate(&api, "dead").acquire().await;
    let mut leader = candidate(&api, "a");
    leader.acquire().await;
    let leases = || api.writes().into_iter().filter(|w| w.path.contains("leases")).count();
    let before = leases();
    let first = api.get("leases", "tessera-system", "tessera-controller").unwrap();
    api.fault(|_, _| Some(failure(500, "InternalError")));
    let start = Instant::now();
    leader.hold(CancellationToken::new()).await.unwrap_err();
    assert!(start.elapsed() <= Duration::from_secs(10), "{:?}", start.elapsed());
    assert_eq!(before, 3, "the dead one's, the take-over, and once more before the work begins");
    assert_eq!(first, api.get("leases", "tessera-system", "tessera-controller").unwrap());
}

#[tokio::test(start_paused = true)]
async fn candidate_without_answer_tries_again() {
    let api = installed();
    api.answer_late(Duration::from_secs(3600));
    let mut leader = candidate(&api, "a");
    let hung = tokio::time::timeout(Duration::from_secs(30), leader.acquire()).await;
    assert!(hung.is_err());
    assert!(api.writes().len() > 2, "{:?}", api.writes());
    api.answer_late(Duration::ZERO);
    tokio::time::timeout(Duration::from_secs(30), leader.acquire()).await.unwrap();
}

/// Deletes the Lease under a leader that does not look: its renewals are swallowed.
#[tokio::test(start_paused = true)]
async fn candidate_waits_for_leader_of_a_deleted_lease() {
    let api = installed();
    let mut leader = candidate(&api, "a");
    leader.acquire().await;
    let tenure = leader.tenure();
    api.delete("leases", "tessera-system", "tessera-controller");
    let start = Instant::now();
    candidate(&api, "b").acquire().await;
    assert!(
        tenure.is_over(),
        "the leader before may still send, {:?} after the deletion",
        start.elapsed()
    );
    // The last request that it sent has ended, too.
    assert!(start.elapsed() >= Duration::from_secs(10 + 4), "{:?}", start.elapsed());
    assert_eq!(holder(&api), "b");
}

#[tokio::test(start_paused = true)]
async fn candidate_renews_while_it_waits_to_lead() {
    let api = FakeApi::new();
    let (mut b, mut c) = (candidate(&api, "b"), candidate(&api, "c"));
    let first = tokio::select! {
        () = b.acquire() => "b",
        () = c.acquire() => "c",
    };
    assert_eq!(holder(&api), first);
    let lease = api.get("leases", "tessera-system", "tessera-controller").unwrap();
    assert_eq!(
        lease["spec"]["leaseTransitions"], 0,
        "no other candidate has acquired it while the first waited"
    );
    let written = api.writes().iter().filter(|write| write.method != "POST").count();
    assert!(written >= 3, "renewed while it waited, and at the end: {written}");
}

#[tokio::test(start_paused = true)]
async fn candidate_waits_for_leader_of_a_replaced_lease() {
    let api = installed();
    let mut leader = candidate(&api, "a");
    leader.acquire().await;
    let tenure = leader.tenure();
    // As `kubectl replace` does it: the spec is gone.
    let mut replaced = api.get("leases", "tessera-system", "tessera-controller").unwrap();
    replaced.as_object_mut().unwrap().remove("spec");
    api.put("leases", replaced);
    candidate(&api, "b").acquire().await;
    assert!(tenure.is_over(), "the leader before may still send");
    assert_eq!(holder(&api), "b");
}

#[tokio::test]
async fn new_leader_lists_by_quorum() {
    let api = FakeApi::new();
    let mut tasks = Supervisor::new(CancellationToken::new());
    let metrics = Metrics::new(&mut Registry::default());
    let (sender, mut changes) = watch::queue();
    watch::start(&api.client(), &ManagedDrivers::default(), &metrics, &mut tasks, sender);
    let mut kinds = 0;
    while kinds < WatchedKind::ALL.len() {
        let change = changes.recv().await.unwrap();
        let is_listed = matches!(change.change, Change::Listed(_) | Change::NotServed(_));
        kinds += usize::from(is_listed);
    }
    let lists = api.lists();
    assert_eq!(lists.len(), WatchedKind::ALL.len());
    for (resource, query) in lists {
        // Without a version the API server reads from the quorum; with "0" from a cache
        // of any age.
        assert_eq!(query.get("resourceVersion"), None, "{resource}");
        assert_eq!(query.get("resourceVersionMatch"), None, "{resource}");
    }
}
