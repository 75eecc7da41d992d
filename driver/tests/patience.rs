//! What passes by itself is waited for, within the time that the kubelet gives. The clock is the
//! test's.

mod stand_in;

use std::time::Duration;

use stand_in::node::{Node, asked};
use tessera_driver::{
    driver::Driver,
    kubelet::plugin::{ClaimRef, ClaimHandler, PreparedDevice},
};
use tessera_proto::dra_v1;
use tokio::time::Instant;

/// Calls without sockets: a paused clock jumps while a real one would wait for the network.
async fn prepare(driver: &Driver, claim: dra_v1::Claim) -> Result<Vec<PreparedDevice>, String> {
    driver.claims().prepare(ClaimRef::from(claim)).await
}

/// A node whose driver has started, with a clock that stands still unless all wait for it.
async fn paused(gpus: u32) -> (Node, Driver) {
    let node = Node::with_gpus(gpus);
    let driver = node.start().await;
    tokio::time::pause();
    (node, driver)
}

#[tokio::test]
async fn a_claim_waits_until_another_one_is_unprepared() {
    let (node, driver) = paused(1).await;
    let first = node.allocate("first", &[(0, 10, 0)]);
    prepare(&driver, first.clone()).await.expect("prepared");
    let second = node.allocate("second", &[(0, 10, 0)]);

    let claims = driver.claims().clone();
    let waiting = tokio::spawn(async move { claims.prepare(ClaimRef::from(second)).await });
    node.api.wait_for("a second attempt", |api| (api.claim_reads() >= 3).then_some(())).await;
    assert!(!waiting.is_finished());
    driver.claims().unprepare(ClaimRef::from(first)).await.expect("unprepared");

    waiting.await.expect("no panic").expect("prepared, once there was room");
}

#[tokio::test]
async fn a_claim_that_never_fits_is_refused_before_the_kubelet_gives_up() {
    let (node, driver) = paused(1).await;
    prepare(&driver, node.allocate("first", &[(0, 10, 60)])).await.expect("prepared");
    let before = node.traces();

    let begun = Instant::now();
    let error = prepare(&driver, node.allocate("second", &[(0, 7, 0)])).await.expect_err("refused");
    assert!(error.contains("7Gi do not fit beside 10Gi"), "{error}");
    let waited = begun.elapsed();
    assert!(waited > Duration::from_secs(30) && waited <= Duration::from_secs(40), "{waited:?}");

    let error = prepare(&driver, node.allocate("third", &[(0, 1, 41)])).await.expect_err("refused");
    assert!(error.contains("41 percent do not fit beside 60 percent"), "{error}");
    assert_eq!(node.traces(), before);
}

#[tokio::test]
async fn failures_of_the_api_that_pass_are_not_the_kubelet_s_to_see() {
    let (node, driver) = paused(1).await;
    for code in [429, 500, 503] {
        let claim = node.allocate(&format!("claim-{code}"), &[(0, 1, 0)]);
        node.api.fail_claim_reads(3, code);
        prepare(&driver, claim).await.expect("prepared in the end");
    }
}

#[tokio::test]
async fn an_api_that_stays_away_is_given_up_within_40_seconds() {
    let (node, driver) = paused(1).await;
    let claim = node.allocate("a", &[(0, 1, 0)]);
    node.api.fail_claim_reads(usize::MAX, 503);
    let begun = Instant::now();
    let error = prepare(&driver, claim.clone()).await.expect_err("given up");
    assert!(error.contains("ResourceClaim ns/a could not be read"), "{error}");
    assert!(begun.elapsed() <= Duration::from_secs(40), "{:?}", begun.elapsed());

    // Nor one that takes calls and never answers.
    node.api.hold_claim_reads();
    let begun = Instant::now();
    let error = prepare(&driver, claim).await.expect_err("given up");
    assert!(error.contains("did not answer in time"), "{error}");
    assert!(begun.elapsed() <= Duration::from_secs(41), "{:?}", begun.elapsed());
    node.api.release_claim_reads();
}

#[tokio::test]
async fn what_does_not_pass_by_itself_is_answered_at_once() {
    let (node, driver) = paused(1).await;
    let claim = node.allocate("a", &[(0, 1, 0)]);
    node.api.fail_claim_reads(1, 403);
    prepare(&driver, claim).await.expect_err("forbidden");
    prepare(&driver, asked("missing")).await.expect_err("not there");
    prepare(&driver, node.allocate("huge", &[(0, 17, 0)])).await.expect_err("larger than the GPU");
    assert_eq!(node.api.claim_reads(), 3, "each was read once");
}

#[tokio::test]
async fn a_claim_that_was_allocated_anew_does_not_stand_in_the_way_of_its_own_unprepare() {
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
    assert_ne!(prepare(&driver, claim).await.expect("prepared anew"), old);
}
