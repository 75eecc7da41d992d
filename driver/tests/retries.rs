//! Retries of transient failures within the kubelet's deadline. The clock is simulated.

mod fakes;

use std::time::Duration;

use fakes::node::{Node, asked};
use tessera_driver::{
    driver::Driver,
    kubelet::plugin::{ClaimHandler, ClaimRef, PreparedDevice},
};
use tessera_proto::dra_v1;
use tokio::time::Instant;

/// Calls the handler without sockets: a paused clock does not wait for the network.
async fn prepare(driver: &Driver, claim: dra_v1::Claim) -> Result<Vec<PreparedDevice>, String> {
    driver.claims().prepare(ClaimRef::from(claim)).await
}

/// Starts a driver on a node and pauses the clock.
async fn paused(gpus: u32) -> (Node, Driver) {
    let node = Node::with_gpus(gpus);
    let driver = node.start().await;
    tokio::time::pause();
    (node, driver)
}

#[tokio::test]
async fn claim_waits_until_another_is_unprepared() {
    let (node, driver) = paused(1).await;
    let first = node.allocate("first", &[(0, 10, 0)]);
    prepare(&driver, first.clone()).await.expect("prepared");
    let second = node.allocate("second", &[(0, 10, 0)]);

    let claims = driver.claims().clone();
    let waiting = tokio::spawn(async move { claims.prepare(ClaimRef::from(second)).await });
    node.api.wait_for("a second attempt", |api| (api.claim_reads() >= 3).then_some(())).await;
    assert!(!waiting.is_finished());
    driver.claims().unprepare(ClaimRef::from(first)).await.expect("unprepared");

    waiting.await.expect("no panic").expect("prepared after the other was unprepared");
}

#[tokio::test]
async fn claim_without_room_is_refused_within_40_seconds() {
    let (node, driver) = paused(1).await;
    prepare(&driver, node.allocate("first", &[(0, 10, 60)])).await.expect("prepared");
    let before = node.traces();

    let begun = Instant::now();
    let error = prepare(&driver, node.allocate("second", &[(0, 7, 0)])).await.expect_err("refused");
    assert!(error.contains("7Gi requested, 10Gi of 16Gi used"), "{error}");
    let waited = begun.elapsed();
    assert!(waited > Duration::from_secs(30) && waited <= Duration::from_secs(40), "{waited:?}");

    let error = prepare(&driver, node.allocate("third", &[(0, 1, 41)])).await.expect_err("refused");
    assert!(error.contains("41 of 100 percent requested, 60 percent used"), "{error}");
    assert_eq!(node.traces(), before);
}

#[tokio::test]
async fn transient_api_failures_are_retried() {
    let (node, driver) = paused(1).await;
    for code in [429, 500, 503] {
        let claim = node.allocate(&format!("claim-{code}"), &[(0, 1, 0)]);
        node.api.fail_claim_reads(3, code);
        prepare(&driver, claim).await.expect("prepared in the end");
    }
}

#[tokio::test]
async fn unavailable_api_fails_within_40_seconds() {
    let (node, driver) = paused(1).await;
    let claim = node.allocate("a", &[(0, 1, 0)]);
    node.api.fail_claim_reads(usize::MAX, 503);
    let begun = Instant::now();
    let error = prepare(&driver, claim.clone()).await.expect_err("timed out");
    assert!(error.contains("cannot read ResourceClaim ns/a"), "{error}");
    assert!(begun.elapsed() <= Duration::from_secs(40), "{:?}", begun.elapsed());

    // A server that never answers.
    node.api.hold_claim_reads();
    let begun = Instant::now();
    let error = prepare(&driver, claim).await.expect_err("timed out");
    assert!(error.contains("timeout of the API server"), "{error}");
    assert!(begun.elapsed() <= Duration::from_secs(41), "{:?}", begun.elapsed());
    node.api.release_claim_reads();
}

#[tokio::test]
async fn permanent_failures_are_not_retried() {
    let (node, driver) = paused(1).await;
    let claim = node.allocate("a", &[(0, 1, 0)]);
    node.api.fail_claim_reads(1, 403);
    prepare(&driver, claim).await.expect_err("forbidden");
    prepare(&driver, asked("missing")).await.expect_err("not there");
    prepare(&driver, node.allocate("huge", &[(0, 17, 0)])).await.expect_err("larger than the GPU");
    assert_eq!(node.api.claim_reads(), 3, "each was read once");
}

#[tokio::test]
async fn event_of_a_failure_is_written_once_in_five_minutes() {
    let (node, driver) = paused(1).await;
    let claim = node.allocate("huge", &[(0, 17, 0)]);
    let events = |count: usize| {
        let api = &node.api;
        async move { api.wait_for("events", |api| (api.events().len() >= count).then_some(())).await }
    };
    for _ in 0..10 {
        prepare(&driver, claim.clone()).await.expect_err("larger than the GPU");
    }
    events(1).await;
    // Another claim's event is written after all of the first one's.
    prepare(&driver, node.allocate("other", &[(0, 17, 0)])).await.expect_err("refused");
    events(2).await;
    assert_eq!(node.api.events().len(), 2);

    tokio::time::advance(Duration::from_secs(300)).await;
    prepare(&driver, claim).await.expect_err("larger than the GPU");
    events(3).await;
    driver.stop().await;
}

#[tokio::test]
async fn reallocated_claim_does_not_block_its_unprepare() {
    let (node, driver) = paused(2).await;
    let claim = node.allocate("a", &[(0, 1, 0)]);
    let old = prepare(&driver, claim.clone()).await.expect("prepared");
    node.allocate("a", &[(1, 1, 0)]);
    let begun = Instant::now();
    let error =
        prepare(&driver, claim.clone()).await.expect_err("still prepared for the old allocation");
    assert!(error.contains("earlier allocation"), "{error}");
    assert!(
        begun.elapsed() < Duration::from_secs(1),
        "an unprepare would have waited {:?}",
        begun.elapsed()
    );
    driver.claims().unprepare(ClaimRef::from(claim.clone())).await.expect("unprepared");
    assert_ne!(prepare(&driver, claim).await.expect("prepared again"), old);
}
