//! The driver replaced, with both instances alive for a while, and absent while a container
//! restarts.

use k8s_openapi::api::core::v1::{ContainerStatus, Pod};
use kube::ResourceExt;
use serde_json::{Value, json};

use super::bench::{Bench, PATIENCE, container_ids, holder, phase};
use super::driver_instances::{DriverInstances, WITH_FAULT_POINTS, restarts_of};
use crate::harness::TrialOutcome;
use crate::runner::Outcome;
use crate::wait::{self, Verdict};

/// An update with both instances alive on the node. A Prepare is held in the old instance; its
/// Unprepare and other pods go to the new one.
pub(super) async fn two_instances(bench: Bench) -> TrialOutcome {
    let drivers = DriverInstances::of(&bench.client);
    let shipped = drivers.image().await?;
    let run = async || {
        let outcome = both_alive(&bench, &drivers, &shipped).await;
        drivers.change(as_shipped()).await?;
        outcome
    };
    drivers.with_fault_points(run).await?;
    Ok(Outcome::Held(vec![]))
}

/// Every node gets its new instance at once, and keeps the old one until that has been ready for
/// ten minutes.
fn both_stay() -> Value {
    json!({"minReadySeconds": 600, "updateStrategy": {"rollingUpdate": {"maxSurge": "100%"}}})
}

/// What the chart says.
fn as_shipped() -> Value {
    json!({"minReadySeconds": 0, "updateStrategy": {"rollingUpdate": {"maxSurge": 1}}})
}

async fn both_alive(bench: &Bench, drivers: &DriverInstances, shipped: &str) -> anyhow::Result<()> {
    let node = bench.node_with("a100", 4).await?;
    bench.template("share", "a100.gpu.tessera.dev", json!({"memory": "1Gi", "cores": "1"})).await?;
    let old = drivers.ready(&node, WITH_FAULT_POINTS).await?.name_any();
    bench.holder("before", "share").await?;
    let before = bench.holds("before").await?;
    drivers.arm(&old, "prepare-claim-read", "hold").await?;
    bench.holder("held", "share").await?;
    drivers.held(&old, "prepare-claim-read").await?;

    drivers.change(both_stay()).await?;
    drivers.set_image(shipped).await?;
    drivers.ready(&node, shipped).await?;
    bench.delete(&["held".to_owned()]).await?;
    bench.holder("after", "share").await?;
    bench.holds("after").await?;
    let alive = drivers.pods.get(&old).await?;
    anyhow::ensure!(alive.metadata.deletion_timestamp.is_none(), "the old instance was to live on");
    drivers.release(&old, "prepare-claim-read").await?;
    drivers.change(as_shipped()).await?;
    drivers.replaced(shipped).await?;

    let still = bench.pods().get("before").await?;
    anyhow::ensure!(
        container_ids(&still) == container_ids(&before) && phase(&still) == "Running",
        "the pod from before noticed: {:?}, then {:?}",
        container_ids(&before),
        container_ids(&still)
    );
    bench.delete(&["before".to_owned(), "after".to_owned()]).await?;
    let left = bench.hands()?.run(&["residue", &node]).await?;
    anyhow::ensure!(left.trim().is_empty(), "left on {node}:\n{left}");
    Ok(())
}

/// While there is no driver, a container's CDI file is deleted and the container ends: the driver's
/// start brings it back.
pub(super) async fn cdi_file_deleted(bench: Bench) -> TrialOutcome {
    let drivers = DriverInstances::of(&bench.client);
    let node = bench.node_with("a100", 4).await?;
    bench.template("share", "a100.gpu.tessera.dev", json!({"memory": "1Gi", "cores": "1"})).await?;
    let mut pod = holder("restarts", json!({"name": "gpu", "resourceClaimTemplateName": "share"}));
    pod["spec"]["restartPolicy"] = json!("Always");
    bench.create(pod).await?;
    let pod = bench.holds("restarts").await?;

    drivers
        .change(json!({"template": {"spec": {"nodeSelector": {"e2e.tessera.dev/none": "none"}}}}))
        .await?;
    let absent = async {
        drivers.gone_from(&node).await?;
        let delete = "rm /var/run/cdi/k8s.gpu.tessera.dev-claim_*";
        bench.hands()?.run(&["exec", &node, "sh", "-c", delete]).await?;
        kill_container(&bench, &node, &pod).await?;
        waits_for_its_device(&bench).await
    };
    let absent = absent.await;
    drivers
        .change(json!({"template": {"spec": {"nodeSelector": {"e2e.tessera.dev/none": null}}}}))
        .await?;
    drivers.replaced(&drivers.image().await?).await?;
    absent?;

    let restarts = restarts_of(&pod);
    let judge = |pod: Option<&Pod>| match pod {
        Some(pod) if restarts_of(pod) > restarts && is_running(pod) => Verdict::Done(()),
        other => Verdict::NotYet(format!("{:?}", other.map(container_ids))),
    };
    wait::until_one(bench.pods(), "restarts", "the container to be back", PATIENCE, judge).await?;
    bench.delete(&["restarts".to_owned()]).await?;
    Ok(Outcome::Held(vec![]))
}

/// Ends the pod's only container, as a crash of its program would.
async fn kill_container(bench: &Bench, node: &str, pod: &Pod) -> anyhow::Result<()> {
    let id = container(pod).and_then(|status| status.container_id.clone());
    let id = id.as_deref().and_then(|id| id.strip_prefix("containerd://"));
    let id = id.ok_or_else(|| anyhow::anyhow!("pod {} has no container", pod.name_any()))?;
    let ctr = format!("{}/ctr", std::env::var("TESSERA_E2E_BIN")?);
    let kill =
        ["exec", node, &ctr, "--namespace", "k8s.io", "tasks", "kill", "--signal", "SIGKILL", id];
    Ok(bench.hands()?.run(&kill).await.map(drop)?)
}

/// Waits until the kubelet has tried to start the container again, in vain.
async fn waits_for_its_device(bench: &Bench) -> anyhow::Result<()> {
    let judge = |pod: Option<&Pod>| {
        let state = pod.and_then(container).and_then(|status| status.state.clone());
        let message = state.and_then(|state| state.waiting).and_then(|waiting| waiting.message);
        match message.filter(|message| message.contains("unresolvable CDI devices")) {
            Some(_) => Verdict::Done(()),
            None => Verdict::NotYet(format!("{:?}", pod.map(container_ids))),
        }
    };
    let what = "the container to miss its CDI device";
    Ok(wait::until_one(bench.pods(), "restarts", what, PATIENCE, judge).await?)
}

fn container(pod: &Pod) -> Option<&ContainerStatus> {
    pod.status.as_ref()?.container_statuses.as_ref()?.first()
}

fn is_running(pod: &Pod) -> bool {
    container(pod)
        .is_some_and(|status| status.state.as_ref().is_some_and(|state| state.running.is_some()))
}
