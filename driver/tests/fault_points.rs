//! The fault points of the build for crash tests.

mod fakes;

use fakes::{
    gpus::uuid,
    kubelet::Kubelet,
    node::{Node, share_id, uid},
};
use serde_json::json;
use tessera_driver::fault::POINTS;

#[tokio::test]
async fn one_claim_reaches_every_fault_point() {
    let node = Node::with_gpus(1);
    let _driver = node.start().await;
    let kubelet = Kubelet::register(&node.path("kubelet")).await;
    let claim = node.allocate("a", &[(0, 4, 10)]);
    kubelet.prepare(claim.clone()).await.expect("prepared");
    let (prepare, later): (Vec<_>, Vec<_>) =
        POINTS.all().into_iter().partition(|(name, _)| name.starts_with("prepare-"));
    assert!(prepare.iter().all(|(_, point)| point.hits == 1), "{prepare:#?}");
    assert!(later.iter().all(|(_, point)| point.hits == 0), "{later:#?}");
    shrink(&node).await;
    kubelet.unprepare(claim).await.expect("unprepared");
    assert!(POINTS.all().values().all(|point| point.hits == 1), "{:#?}", POINTS.all());
}

/// Makes the share of the claim `a` smaller.
async fn shrink(node: &Node) {
    let size = json!({
        "request": "gpu-0", "pool": "node-a", "device": uuid(0).device_name(),
        "shareID": share_id("a", 0), "memory": "2Gi", "cores": "5",
    });
    let resize = json!({
        "apiVersion": "gpu.tessera.dev/v1alpha1", "kind": "GpuResize",
        "metadata": {"name": "a", "namespace": "ns", "uid": "uid-of-resize", "generation": 1},
        "spec": {"requests": [{"name": "gpu-0", "memory": "2Gi", "cores": 5}]},
        "status": {"node": "node-a", "claimUID": uid("a"), "grant": 1, "granted": [size]},
    });
    node.api.put_resize("a", resize);
    let is_applied = |api: &fakes::api::Api| api.resize("a")["status"]["appliedGrant"] == 1;
    node.api.wait_for("the report", |api| is_applied(api).then_some(())).await;
}
