//! Trial of recovery: the pod of a ReplicaSet is evicted from a GPU that has become unhealthy, and
//! its replacement runs on another one.

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use kube::api::DeleteParams;
use serde_json::{Value, json};

use super::gpu::wait_taint;
use super::placement::wait_event_reason;
use super::release::helm;
use super::test_bed::{A100, TestBed, phase, wait_all};
use crate::harness::TrialOutcome;
use crate::inventory::attribute;
use crate::leftovers::device_results;
use crate::runner::Outcome;
use crate::wait::CheckResult;

pub(super) async fn evicts_from_unhealthy(test_bed: TestBed) -> TrialOutcome {
    let helm = helm()?;
    test_bed.node_with("a100", 4).await?;
    test_bed.create_template("share", A100, json!({"memory": "10Gi"})).await?;
    let replica_sets = test_bed.create_replica_set("model", 1, "share").await?;
    helm.upgrade(&["controller.recovery=unhealthy", "controller.recoveryDelaySeconds=3"]).await?;
    let outcome = recover(&test_bed).await;
    // Later trials need the other configuration, in every case.
    helm.upgrade(&[]).await?;
    outcome?;
    replica_sets.delete("model", &DeleteParams::default()).await?;
    wait_all(test_bed.pods(), "the pods to be deleted", CheckResult::none_left).await?;
    Ok(Outcome::Passed(vec![]))
}

async fn recover(test_bed: &TestBed) -> anyhow::Result<()> {
    let operations = test_bed.operations()?;
    let before = wait_running(test_bed, None).await?;
    let (node, device) = device_of(test_bed, &before).await?;
    let inventory = test_bed.published_gpus().await?;
    let uuid = inventory.device(&node, &device).map(|device| attribute(device, "uuid"));
    let uuid = uuid.as_ref().and_then(Value::as_str);
    let uuid = uuid.ok_or_else(|| anyhow::anyhow!("{device} of {node} has no uuid"))?;
    operations.run(&["gpu", &node, "xid", uuid, "119", "--recovery", "gpu-reset"]).await?;
    let outcome = async {
        let name = before.name_any();
        let message = wait_event_reason(test_bed, &name, "EvictedFromGpu").await?;
        anyhow::ensure!(message.contains("Xid119"), "{message}");
        let after = wait_running(test_bed, Some(&name)).await?;
        let other = device_of(test_bed, &after).await?;
        anyhow::ensure!(other != (node.clone(), device.clone()), "still on {device}");
        anyhow::Ok(())
    };
    let outcome = outcome.await;
    operations.run(&["gpu", &node, "reset", uuid]).await?;
    outcome?;
    wait_taint(test_bed, &device, None).await
}

/// Waits until the only pod runs, and is not the one of this name.
async fn wait_running(test_bed: &TestBed, but: Option<&str>) -> anyhow::Result<Pod> {
    let check = |pods: &[Pod]| match pods {
        [pod] if phase(pod) == "Running" && Some(pod.name_any().as_str()) != but => {
            CheckResult::Done(pod.clone())
        }
        pods => CheckResult::Pending(format!("{} pods", pods.len())),
    };
    wait_all(test_bed.pods(), "one pod to run", check).await
}

/// Returns the pool and the device of the pod's claim.
async fn device_of(test_bed: &TestBed, pod: &Pod) -> anyhow::Result<(String, String)> {
    let claim = test_bed.claim_of(pod).await?;
    let device = device_results(&claim).next().map(|r| (r.pool.clone(), r.device.clone()));
    device.ok_or_else(|| anyhow::anyhow!("pod {} has no device", pod.name_any()))
}
