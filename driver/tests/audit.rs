//! Claims that are deleted from the API server while they are prepared.

mod fakes;

use std::time::Duration;

use fakes::{
    advance,
    gpus::uuid,
    kubelet::Kubelet,
    node::{Node, claim},
};
use serde_json::{Value, json};

/// A little more than the interval of the audit.
const AUDIT_INTERVAL: Duration = Duration::from_secs(301);

const TAINT: &str = "gpu.tessera.dev/orphaned-claim";

/// Returns the names of published devices with the taint of orphaned claims.
fn tainted(slices: &[Value]) -> Vec<String> {
    let devices = slices
        .iter()
        .flat_map(|slice| slice["spec"]["devices"].as_array().cloned().unwrap_or_default());
    let orphaned = devices.filter(|device| {
        let taints = device["taints"].as_array().cloned().unwrap_or_default();
        taints.iter().any(|taint| taint["key"] == TAINT && taint["effect"] == "NoSchedule")
    });
    orphaned.map(|device| device["name"].as_str().expect("a name").to_owned()).collect()
}

async fn until_tainted(node: &Node, gpus: &[u32]) {
    let names: Vec<_> = gpus.iter().map(|gpu| uuid(*gpu).device_name().to_string()).collect();
    let published = |slices: &[Value]| !slices.is_empty() && tainted(slices) == names;
    node.api.wait_for("the taints", |api| published(&api.slices()).then_some(())).await;
}

#[tokio::test]
async fn gpu_of_deleted_claim_is_tainted_until_unprepare() {
    let replaced = || {
        let mut claim = claim("a", &[(1, 1, 0)]);
        claim["metadata"]["uid"] = json!("another");
        claim
    };
    let deallocated = || {
        let mut claim = claim("a", &[(1, 1, 0)]);
        claim["status"] = json!({});
        claim
    };
    let moved = || claim("a", &[(0, 1, 0)]);
    for instead in [None, Some(replaced()), Some(deallocated()), Some(moved())] {
        let node = Node::with_gpus(2);
        let driver = node.start().await;
        let kubelet = Kubelet::register(&node.path("kubelet")).await;
        let claim = node.allocate("a", &[(1, 1, 0)]);
        kubelet.prepare(claim.clone()).await.expect("prepared");
        kubelet.prepare(node.allocate("whole", &[(0, 1, 0)])).await.expect("prepared");
        assert!(tainted(&node.api.slices()).is_empty());
        node.api.remove_claim("ns", "a");
        instead.into_iter().for_each(|claim| node.api.put_claim(claim));

        advance(AUDIT_INTERVAL).await;
        until_tainted(&node, &[1]).await;
        let metrics = driver.metrics().render();
        assert!(metrics.contains("tessera_driver_orphaned_claims 1"), "{metrics}");
        kubelet.unprepare(claim).await.expect("unprepared");
        until_tainted(&node, &[]).await;
        driver.stop().await;
    }
}

#[tokio::test]
async fn failed_read_of_one_claim_does_not_end_the_audit() {
    let node = Node::with_gpus(2);
    let _driver = node.start().await;
    let kubelet = Kubelet::register(&node.path("kubelet")).await;
    kubelet.prepare(node.allocate("a", &[(0, 1, 0)])).await.expect("prepared");
    kubelet.prepare(node.allocate("b", &[(1, 1, 0)])).await.expect("prepared");
    node.api.remove_claim("ns", "b");
    // Claims are read in the order of their UIDs.
    node.api.fail_claim_reads(1, 503);
    advance(AUDIT_INTERVAL).await;
    until_tainted(&node, &[1]).await;
}

#[tokio::test]
async fn failed_read_is_repeated_before_the_next_round() {
    let node = Node::with_gpus(1);
    let _driver = node.start().await;
    let kubelet = Kubelet::register(&node.path("kubelet")).await;
    kubelet.prepare(node.allocate("a", &[(0, 1, 0)])).await.expect("prepared");
    node.api.remove_claim("ns", "a");
    node.api.fail_claim_reads(1, 503);
    let reads = node.api.claim_reads();
    advance(AUDIT_INTERVAL).await;
    node.api.wait_for("a read", |api| (api.claim_reads() > reads).then_some(())).await;
    advance(Duration::from_secs(31)).await;
    until_tainted(&node, &[0]).await;
}

#[tokio::test]
async fn claims_are_read_while_another_read_is_held() {
    let node = Node::with_gpus(2);
    let _driver = node.start().await;
    let kubelet = Kubelet::register(&node.path("kubelet")).await;
    let a = node.allocate("a", &[(0, 1, 0)]);
    kubelet.prepare(a.clone()).await.expect("prepared");
    kubelet.prepare(node.allocate("b", &[(1, 1, 0)])).await.expect("prepared");
    let reads = node.api.claim_reads();
    node.api.hold_claim_reads();
    advance(AUDIT_INTERVAL).await;
    node.api.wait_for("both reads", |api| (api.claim_reads() == reads + 2).then_some(())).await;
    node.api.release_claim_reads();
}

#[tokio::test]
async fn claim_that_cannot_be_read_keeps_only_its_own_taint() {
    let node = Node::with_gpus(2);
    let driver = node.start().await;
    let kubelet = Kubelet::register(&node.path("kubelet")).await;
    let claims = || [claim("a", &[(0, 1, 0)]), claim("b", &[(1, 1, 0)])];
    kubelet.prepare(node.allocate("a", &[(0, 1, 0)])).await.expect("prepared");
    kubelet.prepare(node.allocate("b", &[(1, 1, 0)])).await.expect("prepared");
    node.api.remove_claim("ns", "a");
    node.api.remove_claim("ns", "b");
    driver.stop().await;
    let driver = node.start().await;
    until_tainted(&node, &[0, 1]).await;
    driver.stop().await;

    // The claims are restored, and one cannot be read.
    claims().into_iter().for_each(|claim| node.api.put_claim(claim));
    node.api.fail_reads_of_claim("a", 503);
    let _driver = node.start().await;
    until_tainted(&node, &[0]).await;
}

#[tokio::test]
async fn restart_keeps_taint_of_orphaned_claim() {
    let node = Node::with_gpus(2);
    let driver = node.start().await;
    let kubelet = Kubelet::register(&node.path("kubelet")).await;
    let claim = node.allocate("a", &[(1, 1, 0)]);
    kubelet.prepare(claim.clone()).await.expect("prepared");
    node.api.remove_claim("ns", "a");
    driver.stop().await;
    let driver = node.start().await;
    until_tainted(&node, &[1]).await;
    let published = node.api.slices();
    driver.stop().await;

    // The API server fails, so it is unknown if the claim exists: the slices stay.
    node.api.fail_claim_reads(usize::MAX, 503);
    let reads = node.api.claim_reads();
    let driver = node.start().await;
    let kubelet = Kubelet::register(&node.path("kubelet")).await;
    node.api.wait_for("the audit", |api| (api.claim_reads() > reads).then_some(())).await;
    assert_eq!(node.api.slices(), published, "nothing was written");
    node.api.fail_claim_reads(0, 503);
    kubelet.unprepare(claim).await.expect("unprepared");
    driver.stop().await;
    let _driver = node.start().await;
    until_tainted(&node, &[]).await;
}
