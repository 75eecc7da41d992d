//! The fault points of the build for crash tests.

mod fakes;

use fakes::{kubelet::Kubelet, node::Node};
use tessera_driver::fault::POINTS;

#[tokio::test]
async fn one_claim_reaches_every_fault_point() {
    let node = Node::with_gpus(1);
    let _driver = node.start().await;
    let kubelet = Kubelet::register(&node.path("kubelet")).await;
    let claim = node.allocate("a", &[(0, 4, 10)]);
    kubelet.prepare(claim.clone()).await.expect("prepared");
    let (prepare, unprepare): (Vec<_>, Vec<_>) =
        POINTS.all().into_iter().partition(|(name, _)| name.starts_with("prepare-"));
    assert!(prepare.iter().all(|(_, point)| point.hits == 1), "{prepare:#?}");
    assert!(unprepare.iter().all(|(_, point)| point.hits == 0), "{unprepare:#?}");
    kubelet.unprepare(claim).await.expect("unprepared");
    assert!(POINTS.all().values().all(|point| point.hits == 1), "{:#?}", POINTS.all());
}
