//! Trials that restart driver, kubelet and containerd: running pods continue, new pods start.

use k8s_openapi::api::core::v1::Pod;
use kube::api::{DeleteParams, ListParams};
use kube::{Api, ResourceExt};
use serde_json::json;

use super::driver_instances::is_ready;
use super::placement::node_name;
use super::test_bed::{A100, TestBed, wait_selected};
use crate::harness::TrialOutcome;
use crate::inventory::DRIVER_LABEL;
use crate::runner::Outcome;
use crate::wait::CheckResult;

/// Namespace of the chart.
const NAMESPACE: &str = "tessera-system";

pub(super) async fn kubelet(test_bed: TestBed) -> TrialOutcome {
    restart_component(&test_bed, async |node| {
        test_bed.operations()?.run(&["restart", node, "kubelet"]).await.map(drop)
    })
    .await
}

pub(super) async fn containerd(test_bed: TestBed) -> TrialOutcome {
    restart_component(&test_bed, async |node| {
        test_bed.operations()?.run(&["restart", node, "containerd"]).await.map(drop)
    })
    .await
}

pub(super) async fn driver(test_bed: TestBed) -> TrialOutcome {
    restart_component(&test_bed, async |node| {
        let pods: Api<Pod> = Api::namespaced(test_bed.client.clone(), NAMESPACE);
        let selector = ListParams::default().labels(DRIVER_LABEL);
        let on_node = pods.list(&selector.fields(&format!("spec.nodeName={node}"))).await?;
        match on_node.items.first() {
            Some(pod) => replace_pod(&pods, pod, node).await,
            // Without a pod, the driver is a process.
            None => test_bed.operations()?.run(&["restart", node, "driver"]).await.map(drop),
        }
    })
    .await
}

/// Deletes the driver's pod, and waits until the DaemonSet's next pod is ready.
async fn replace_pod(pods: &Api<Pod>, old: &Pod, node: &str) -> anyhow::Result<()> {
    pods.delete(&old.name_any(), &DeleteParams::default()).await?;
    let selector = kube::runtime::watcher::Config::default().labels(DRIVER_LABEL);
    let check = |found: &[Pod]| {
        let fresh = found.iter().find(|pod| pod.uid() != old.uid() && node_name(pod) == Some(node));
        CheckResult::done_if(fresh.is_some_and(is_ready), || format!("{} pods", found.len()))
    };
    wait_selected(pods.clone(), selector, "the driver's next pod", check).await
}

/// Creates one pod before the restart and one after, on the same node. Checks that the first is not
/// disturbed.
async fn restart_component(
    test_bed: &TestBed,
    restart: impl AsyncFnOnce(&str) -> anyhow::Result<()>,
) -> TrialOutcome {
    let node = test_bed.node_with("a100", 4).await?;
    test_bed.create_template("share", A100, json!({"memory": "10Gi", "cores": "10"})).await?;
    let before = test_bed.start_holder("before", "share").await?;
    restart(&node).await?;
    test_bed.start_holder("after", "share").await?;
    test_bed.check_undisturbed(&before).await?;
    test_bed.delete(&["before", "after"]).await?;
    Ok(Outcome::Passed(vec![]))
}
