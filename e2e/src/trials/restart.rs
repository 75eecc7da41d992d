//! Driver, kubelet and containerd, each restarted once: what runs goes on, what is new starts.

use k8s_openapi::api::core::v1::Pod;
use kube::api::{DeleteParams, ListParams};
use kube::{Api, ResourceExt};
use serde_json::json;

use super::bench::{Bench, PATIENCE, container_ids};
use crate::harness::TrialOutcome;
use crate::runner::Outcome;
use crate::wait::{self, Verdict};

/// Namespace of the chart.
const NAMESPACE: &str = "tessera-system";
/// The chart's label of the driver's pods.
const DRIVER: &str = "app.kubernetes.io/name=tessera-driver";

pub(super) async fn kubelet(bench: Bench) -> TrialOutcome {
    around(&bench, async |node| {
        Ok(bench.hands()?.run(&["restart", node, "kubelet"]).await.map(drop)?)
    })
    .await
}

pub(super) async fn containerd(bench: Bench) -> TrialOutcome {
    around(&bench, async |node| {
        Ok(bench.hands()?.run(&["restart", node, "containerd"]).await.map(drop)?)
    })
    .await
}

pub(super) async fn driver(bench: Bench) -> TrialOutcome {
    around(&bench, async |node| {
        let pods: Api<Pod> = Api::namespaced(bench.client.clone(), NAMESPACE);
        let selector = ListParams::default().labels(DRIVER);
        let on_node = pods.list(&selector.fields(&format!("spec.nodeName={node}"))).await?;
        match on_node.items.first() {
            Some(pod) => replaced(&pods, pod, node).await,
            // No pod: the driver is a plain process.
            None => Ok(bench.hands()?.run(&["restart", node, "driver"]).await.map(drop)?),
        }
    })
    .await
}

/// Deletes the driver's pod and waits for the DaemonSet's next one to be ready.
async fn replaced(pods: &Api<Pod>, old: &Pod, node: &str) -> anyhow::Result<()> {
    pods.delete(&old.name_any(), &DeleteParams::default()).await?;
    let selector = kube::runtime::watcher::Config::default().labels(DRIVER);
    let judge = |found: &[Pod]| {
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
        if ready { Verdict::Done(()) } else { Verdict::NotYet(format!("{} pods", found.len())) }
    };
    Ok(wait::until(pods.clone(), selector, "the driver's next pod", PATIENCE, judge).await?)
}

/// One pod before, one after, both on the node in question; the first must not notice.
async fn around(
    bench: &Bench,
    restart: impl AsyncFnOnce(&str) -> anyhow::Result<()>,
) -> TrialOutcome {
    let node = bench.node_with("a100", 4).await?;
    bench
        .template("share", "a100.gpu.tessera.dev", json!({"memory": "10Gi", "cores": "10"}))
        .await?;
    bench.holder("before", "share").await?;
    let before = bench.holds("before").await?;
    restart(&node).await?;
    bench.holder("after", "share").await?;
    bench.holds("after").await?;
    let still = bench.pods().get("before").await?;
    anyhow::ensure!(
        container_ids(&still) == container_ids(&before) && super::bench::phase(&still) == "Running",
        "the pod from before noticed: {:?}, then {:?}",
        container_ids(&before),
        container_ids(&still)
    );
    bench.delete(&["before".to_owned(), "after".to_owned()]).await?;
    Ok(Outcome::Held(vec![]))
}
