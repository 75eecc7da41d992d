//! Trials of a driver update with two instances on a node, and of a restart without a driver.

use k8s_openapi::api::core::v1::{ContainerStatus, Pod};
use kube::ResourceExt;
use kube::api::DeleteParams;
use serde_json::{Value, json};

use super::driver_instances::{DriverInstances, WITH_FAULT_POINTS, restarts_of};
use super::test_bed::{A100, TestBed, container_ids, holder, wait_deleted, wait_one};
use crate::harness::TrialOutcome;
use crate::leftovers::device_results;
use crate::runner::Outcome;
use crate::wait::CheckResult;

/// Two instances run on the node during an update. A Prepare is held in the old instance; its
/// Unprepare and other pods go to the new one.
pub(super) async fn two_instances(test_bed: TestBed) -> TrialOutcome {
    let drivers = DriverInstances::new(&test_bed.client);
    let shipped = drivers.image().await?;
    let run = async || {
        let outcome = update_with_two_instances(&test_bed, &drivers, &shipped).await;
        drivers.change(chart_settings()).await?;
        outcome
    };
    drivers.with_fault_points(run).await?;
    Ok(Outcome::Passed(vec![]))
}

/// Rollout settings with which every node keeps the old instance for ten minutes beside the new
/// one.
fn keep_both_settings() -> Value {
    json!({"minReadySeconds": 600, "updateStrategy": {"rollingUpdate": {"maxSurge": "100%"}}})
}

/// Rollout settings of the chart.
fn chart_settings() -> Value {
    json!({"minReadySeconds": 0, "updateStrategy": {"rollingUpdate": {"maxSurge": 1}}})
}

async fn update_with_two_instances(
    test_bed: &TestBed,
    drivers: &DriverInstances,
    shipped: &str,
) -> anyhow::Result<()> {
    let node = test_bed.node_with("a100", 4).await?;
    test_bed.create_template("share", A100, json!({"memory": "1Gi", "cores": "1"})).await?;
    let old = drivers.wait_ready(&node, WITH_FAULT_POINTS).await?.name_any();
    let before = test_bed.start_holder("before", "share").await?;
    drivers.arm(&old, "prepare-claim-read", "hold").await?;
    test_bed.create_holder("held", "share").await?;
    drivers.wait_held(&old, "prepare-claim-read").await?;

    drivers.change(keep_both_settings()).await?;
    drivers.set_image(shipped).await?;
    drivers.wait_ready(&node, shipped).await?;
    test_bed.delete(&["held"]).await?;
    test_bed.start_holder("after", "share").await?;
    let alive = drivers.pods.get(&old).await?;
    anyhow::ensure!(alive.metadata.deletion_timestamp.is_none(), "the old instance is terminating");
    drivers.release(&old, "prepare-claim-read").await?;
    drivers.change(chart_settings()).await?;
    drivers.wait_replaced(shipped).await?;

    test_bed.check_undisturbed(&before).await?;
    test_bed.delete(&["before", "after"]).await?;
    let left = test_bed.operations()?.run(&["residue", &node]).await?;
    anyhow::ensure!(left.trim().is_empty(), "files left on {node}:\n{left}");
    Ok(())
}

/// A container's CDI file is deleted and the container is killed while no driver runs. The driver's
/// start restores the file and the container.
pub(super) async fn cdi_file_deleted(test_bed: TestBed) -> TrialOutcome {
    let drivers = DriverInstances::new(&test_bed.client);
    let node = test_bed.node_with("a100", 4).await?;
    test_bed.create_template("share", A100, json!({"memory": "1Gi", "cores": "1"})).await?;
    let mut pod = holder("restarts", json!({"name": "gpu", "resourceClaimTemplateName": "share"}));
    pod["spec"]["restartPolicy"] = json!("Always");
    test_bed.create(pod).await?;
    let pod = test_bed.wait_running("restarts").await?;

    let absent = async || {
        let delete = "rm /var/run/cdi/k8s.gpu.tessera.dev-claim_*";
        test_bed.operations()?.run(&["exec", &node, "sh", "-c", delete]).await?;
        kill_container(&test_bed, &node, &pod).await?;
        wait_missing_device(&test_bed).await
    };
    without_driver(&drivers, &node, absent).await?;

    let restarts = restarts_of(&pod);
    let check = |pod: Option<&Pod>| match pod {
        Some(pod) if restarts_of(pod) > restarts && is_running(pod) => CheckResult::Done(()),
        other => CheckResult::Pending(format!("{:?}", other.map(container_ids))),
    };
    wait_one(test_bed.pods(), "restarts", "the container to be restarted", check).await?;
    test_bed.delete(&["restarts"]).await?;
    Ok(Outcome::Passed(vec![]))
}

/// The driver is removed before the pods of its node: a deleted pod stays `Terminating`, its GPU
/// stays taken, and all of it ends when a driver is back.
pub(super) async fn removed_before_pods(test_bed: TestBed) -> TrialOutcome {
    let drivers = DriverInstances::new(&test_bed.client);
    let node = test_bed.node_with("a100", 4).await?;
    test_bed.create_template("share", A100, json!({"memory": "1Gi", "cores": "1"})).await?;
    let stays = test_bed.start_holder("stays", "share").await?;
    let hangs = test_bed.start_holder("hangs", "share").await?;
    let claim = test_bed.claim_of(&hangs).await?.name_any();
    let absent = async || {
        test_bed.pods().delete("hangs", &DeleteParams::default()).await?;
        // The kubelet stops the containers, and cannot unprepare the claim.
        wait_one(test_bed.pods(), "hangs", "the containers to be stopped", stopped).await?;
        let claim = test_bed.claims().get(&claim).await?;
        anyhow::ensure!(device_results(&claim).next().is_some(), "its GPU stays taken");
        Ok(())
    };
    without_driver(&drivers, &node, absent).await?;
    wait_deleted(test_bed.pods(), "hangs").await?;
    test_bed.check_undisturbed(&stays).await?;
    test_bed.delete(&["stays"]).await?;
    let left = test_bed.operations()?.run(&["residue", &node]).await?;
    anyhow::ensure!(left.trim().is_empty(), "files left on {node}:\n{left}");
    Ok(Outcome::Passed(vec![]))
}

fn stopped(pod: Option<&Pod>) -> CheckResult<()> {
    let Some(pod) = pod else { return CheckResult::Impossible("the pod is gone".to_owned()) };
    let state = container(pod).and_then(|status| status.state.as_ref());
    let is_stopped = state.is_some_and(|state| state.terminated.is_some());
    CheckResult::done_if(is_stopped, || format!("{state:?}"))
}

/// Runs `act` while no driver runs on the node.
async fn without_driver(
    drivers: &DriverInstances,
    node: &str,
    act: impl AsyncFnOnce() -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let selector = |value: Value| json!({"template": {"spec": {"nodeSelector": {"e2e.tessera.dev/none": value}}}});
    drivers.change(selector("none".into())).await?;
    let absent = async {
        drivers.wait_no_driver_on(node).await?;
        act().await
    };
    let absent = absent.await;
    drivers.change(selector(Value::Null)).await?;
    drivers.wait_replaced(&drivers.image().await?).await?;
    absent
}

/// Kills the pod's only container with SIGKILL.
async fn kill_container(test_bed: &TestBed, node: &str, pod: &Pod) -> anyhow::Result<()> {
    let id = container(pod).and_then(|status| status.container_id.clone());
    let id = id.as_deref().and_then(|id| id.strip_prefix("containerd://"));
    let id = id.ok_or_else(|| anyhow::anyhow!("pod {} has no container", pod.name_any()))?;
    let ctr = format!("{}/ctr", std::env::var("TESSERA_E2E_BIN")?);
    let kill =
        ["exec", node, &ctr, "--namespace", "k8s.io", "tasks", "kill", "--signal", "SIGKILL", id];
    test_bed.operations()?.run(&kill).await.map(drop)
}

/// Waits until the kubelet has failed to restart the container.
async fn wait_missing_device(test_bed: &TestBed) -> anyhow::Result<()> {
    let check = |pod: Option<&Pod>| {
        let state = pod.and_then(container).and_then(|status| status.state.clone());
        let message = state.and_then(|state| state.waiting).and_then(|waiting| waiting.message);
        match message.filter(|message| message.contains("unresolvable CDI devices")) {
            Some(_) => CheckResult::Done(()),
            None => CheckResult::Pending(format!("{:?}", pod.map(container_ids))),
        }
    };
    let what = "the container's start to fail without its CDI device";
    wait_one(test_bed.pods(), "restarts", what, check).await
}

fn container(pod: &Pod) -> Option<&ContainerStatus> {
    pod.status.as_ref()?.container_statuses.as_ref()?.first()
}

fn is_running(pod: &Pod) -> bool {
    container(pod)
        .is_some_and(|status| status.state.as_ref().is_some_and(|state| state.running.is_some()))
}
