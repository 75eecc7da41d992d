//! Trials that restart driver, kubelet and containerd: running pods continue, new pods start.

use k8s_openapi::api::core::v1::Pod;
use kube::api::{DeleteParams, ListParams};
use kube::{Api, ResourceExt};
use serde_json::json;

use super::test_bed::{TIMEOUT, TestBed, container_ids};
use crate::harness::TrialOutcome;
use crate::runner::Outcome;
use crate::wait::{self, CheckResult};

/// Namespace of the chart.
const NAMESPACE: &str = "tessera-system";
/// The chart's label of the driver's pods.
const DRIVER: &str = "app.kubernetes.io/name=tessera-driver";

pub(super) async fn kubelet(test_bed: TestBed) -> TrialOutcome {
    restart_component(&test_bed, async |node| {
        Ok(test_bed.operations()?.run(&["restart", node, "kubelet"]).await.map(drop)?)
    })
    .await
}

pub(super) async fn containerd(test_bed: TestBed) -> TrialOutcome {
    restart_component(&test_bed, async |node| {
        Ok(test_bed.operations()?.run(&["restart", node, "containerd"]).await.map(drop)?)
    })
    .await
}

pub(super) async fn driver(test_bed: TestBed) -> TrialOutcome {
    restart_component(&test_bed, async |node| {
        let pods: Api<Pod> = Api::namespaced(test_bed.client.clone(), NAMESPACE);
        let selector = ListParams::default().labels(DRIVER);
        let on_node = pods.list(&selector.fields(&format!("spec.nodeName={node}"))).await?;
        match on_node.items.first() {
            Some(pod) => replace_pod(&pods, pod, node).await,
            // Without a pod, the driver is a process.
            None => Ok(test_bed.operations()?.run(&["restart", node, "driver"]).await.map(drop)?),
        }
    })
    .await
}

/// Deletes the driver's pod, and waits until the DaemonSet's next pod is ready.
async fn replace_pod(pods: &Api<Pod>, old: &Pod, node: &str) -> anyhow::Result<()> {
    pods.delete(&old.name_any(), &DeleteParams::default()).await?;
    let selector = kube::runtime::watcher::Config::default().labels(DRIVER);
    let check = |found: &[Pod]| {
        let fresh = found.iter().find(|pod| {
            pod.uid() != old.uid()
                && pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()) == Some(node)
        });
        let ready = fresh.is_some_and(|pod| {
            let conditions =
                pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
            conditions
                .into_iter()
                .any(|condition| condition.type_ == "Ready" && condition.status == "True")
        });
        if ready {
            CheckResult::Done(())
        } else {
            CheckResult::Pending(format!("{} pods", found.len()))
        }
    };
    Ok(wait::until(pods.clone(), selector, "the driver's next pod", TIMEOUT, check).await?)
}

/// Creates one pod before the restart and one after, on the same node, and checks that the first is
/// not disturbed.
async fn restart_component(
    test_bed: &TestBed,
    restart: impl AsyncFnOnce(&str) -> anyhow::Result<()>,
) -> TrialOutcome {
    let node = test_bed.node_with("a100", 4).await?;
    test_bed
        .create_template("share", "a100.gpu.tessera.dev", json!({"memory": "10Gi", "cores": "10"}))
        .await?;
    test_bed.create_holder("before", "share").await?;
    let before = test_bed.wait_running("before").await?;
    restart(&node).await?;
    test_bed.create_holder("after", "share").await?;
    test_bed.wait_running("after").await?;
    let still = test_bed.pods().get("before").await?;
    anyhow::ensure!(
        container_ids(&still) == container_ids(&before)
            && super::test_bed::phase(&still) == "Running",
        "pod `before` was restarted: {:?}, then {:?}",
        container_ids(&before),
        container_ids(&still)
    );
    test_bed.delete(&["before".to_owned(), "after".to_owned()]).await?;
    Ok(Outcome::Passed(vec![]))
}
