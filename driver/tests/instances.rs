//! Two instances of the driver on one node, as during a rolling update: the kubelet may call
//! either.

mod stand_in;

use std::sync::Arc;

use stand_in::node::Node;
use tessera_driver::{
    driver::{Driver, DriverSettings},
    kubelet::plugin::{ClaimRef, ClaimHandler, PreparedDevice},
};
use tessera_proto::dra_v1;
use tokio::task::JoinHandle;

async fn instance(node: &Node, uid: &str) -> Driver {
    let settings = DriverSettings { pod_uid: Some(uid.to_owned()), ..node.settings() };
    node.start_with(settings, Arc::new(node.mounts.clone())).await.expect("it starts")
}

/// A Prepare by `driver`, which waits for the API server: it holds all reads.
async fn waiting(
    node: &Node,
    driver: &Driver,
    claim: dra_v1::Claim,
) -> JoinHandle<Result<Vec<PreparedDevice>, String>> {
    let (reads, claims) = (node.api.claim_reads(), driver.claims().clone());
    let prepare = tokio::spawn(async move { claims.prepare(ClaimRef::from(claim)).await });
    node.api.wait_for("a read of the claim", |api| (api.claim_reads() > reads).then_some(())).await;
    prepare
}

async fn unprepare(driver: &Driver, claim: &dra_v1::Claim) {
    driver.claims().unprepare(ClaimRef::from(claim.clone())).await.expect("unprepared");
}

#[tokio::test]
async fn an_unprepare_by_one_instance_ends_a_prepare_that_waits_in_the_other() {
    let node = Node::with_gpus(1);
    let (old, new) = (instance(&node, "old").await, instance(&node, "new").await);
    let claim = node.allocate("a", &[(0, 4, 10)]);
    for (preparing, unpreparing) in [(&old, &new), (&new, &old)] {
        node.api.hold_claim_reads();
        let prepare = waiting(&node, preparing, claim.clone()).await;
        unprepare(unpreparing, &claim).await;
        node.api.release_claim_reads();
        let error = prepare.await.expect("no panic").expect_err("nobody wants it any more");
        assert!(error.contains("unprepared the claim meanwhile"), "{error}");
        assert!(node.traces().is_empty(), "{:#?}", node.traces());
        assert_eq!(node.asked(), [""; 0]);
    }
    assert!(node.api.events().is_empty(), "no word to a pod that goes: {:?}", node.api.events());
}

#[tokio::test]
async fn a_prepare_after_the_unprepare_is_not_mistaken_for_the_one_before() {
    let node = Node::with_gpus(1);
    let (old, new) = (instance(&node, "old").await, instance(&node, "new").await);
    let claim = node.allocate("a", &[(0, 4, 10)]);
    node.api.hold_claim_reads();
    let before = waiting(&node, &old, claim.clone()).await;
    unprepare(&new, &claim).await;
    let after = waiting(&node, &new, claim.clone()).await;
    node.api.release_claim_reads();

    before.await.expect("no panic").expect_err("ended");
    after.await.expect("no panic").expect("prepared");
    assert_eq!(node.claim_mounts().len(), 1);
    unprepare(&old, &claim).await;
    assert!(node.traces().is_empty(), "{:#?}", node.traces());
}

#[tokio::test]
async fn an_instance_that_starts_leaves_the_attempts_of_the_other_alone() {
    let node = Node::with_gpus(1);
    let old = instance(&node, "old").await;
    let claim = node.allocate("a", &[(0, 4, 10)]);
    node.api.hold_claim_reads();
    let prepare = waiting(&node, &old, claim.clone()).await;
    let new = instance(&node, "new").await;
    node.api.release_claim_reads();

    let first = prepare.await.expect("no panic").expect("prepared");
    let again = new.claims().prepare(ClaimRef::from(claim.clone())).await.expect("prepared");
    assert_eq!(again, first);
    assert_eq!(node.claim_mounts().len(), 1);
    unprepare(&new, &claim).await;
    assert!(node.traces().is_empty(), "{:#?}", node.traces());
}
