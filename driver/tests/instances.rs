//! Two instances of the driver on one node during a rolling update. The kubelet may call either.

mod fakes;

use fakes::node::Node;
use tessera_driver::{
    driver::{Driver, DriverSettings},
    kubelet::plugin::{ClaimHandler, ClaimRef, PreparedDevice},
};
use tessera_proto::dra_v1;
use tokio::task::JoinHandle;

async fn instance(node: &Node, uid: &str) -> Driver {
    let settings = DriverSettings { pod_uid: Some(uid.to_owned()), ..node.settings() };
    node.start_as(settings).await
}

/// Starts a Prepare by `driver` that waits for the API server, which holds all reads.
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
async fn unprepare_cancels_prepare_of_other_instance() {
    let node = Node::with_gpus(1);
    let (old, new) = (instance(&node, "old").await, instance(&node, "new").await);
    let claim = node.allocate("a", &[(0, 4, 10)]);
    for (preparing, unpreparing) in [(&old, &new), (&new, &old)] {
        node.api.hold_claim_reads();
        let prepare = waiting(&node, preparing, claim.clone()).await;
        unprepare(unpreparing, &claim).await;
        node.api.release_claim_reads();
        let error = prepare.await.expect("no panic").expect_err("canceled");
        assert!(error.contains("unprepared the claim meanwhile"), "{error}");
        assert!(node.traces().is_empty(), "{:#?}", node.traces());
        assert_eq!(node.asked(), [""; 0]);
    }
    assert!(node.api.events().is_empty(), "no event for a deleted pod: {:?}", node.api.events());
}

#[tokio::test]
async fn unprepare_does_not_cancel_later_prepare() {
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
async fn starting_instance_keeps_attempts_of_the_other() {
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
