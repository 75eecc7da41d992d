//! Trial of `kubectl tessera drain gpu`: four shares of one GPU, of a Deployment whose
//! PodDisruptionBudget allows one pod to be missing.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::Pod;
use kube::api::{DeleteParams, DynamicObject, GroupVersionKind, PostParams};
use kube::core::ApiResource;
use kube::{Api, ResourceExt};
use serde_json::{Value, json};

use super::placement::binpack;
use super::test_bed::{TestBed, holder, phase, uid, wait_all};
use crate::harness::TrialOutcome;
use crate::inventory::DRIVER;
use crate::runner::Outcome;
use crate::wait::CheckResult;

const REPLICAS: usize = 4;

pub(super) async fn moves_shares(test_bed: TestBed) -> TrialOutcome {
    with_full_gpu(&test_bed, async |gpu| {
        check_dry_run(&test_bed, gpu).await?;
        drain(&test_bed, gpu).await
    })
    .await?;
    Ok(Outcome::Passed(vec![]))
}

/// A GPU, and the pods that use it.
pub(super) struct UsedGpu {
    /// Its node and its device, as `kubectl tessera` takes them.
    gpu: String,
    pods: Vec<Pod>,
}

/// Starts a Deployment on one GPU, runs a part of a trial that drains the GPU, uncordons the GPU
/// and deletes the Deployment.
pub(super) async fn with_full_gpu(
    test_bed: &TestBed,
    part: impl AsyncFnOnce(&UsedGpu) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    test_bed.taint_rules().await?;
    test_bed.node_with("h100", 2).await?;
    let capacity = json!({"memory": "5Gi"});
    test_bed.create_configured_template("drained", DRIVER, capacity, binpack()).await?;
    create(test_bed, "apps", "Deployment", deployment()).await?;
    create(test_bed, "policy", "PodDisruptionBudget", budget()).await?;
    let pods = wait_running(test_bed, &BTreeSet::new()).await?;
    let used = UsedGpu { gpu: test_bed.common_gpu(&pods).await?, pods };
    let drained = part(&used).await;
    // Later trials need the GPU.
    let back = test_bed.plugin()?.call(&["uncordon", "gpu", &used.gpu], "").await?.result;
    drained?;
    anyhow::ensure!(back[0]["change"] == "uncordoned", "{back}");
    delete(test_bed, "policy", "PodDisruptionBudget").await?;
    delete(test_bed, "apps", "Deployment").await?;
    delete(test_bed, "resource.k8s.io", "ResourceClaimTemplate").await?;
    let check = |pods: &[Pod]| CheckResult::done_if(pods.is_empty(), || "pods left".into());
    wait_all(test_bed.pods(), "the pods to be deleted", check).await
}

/// Checks that `--dry-run` names all pods.
async fn check_dry_run(test_bed: &TestBed, used: &UsedGpu) -> anyhow::Result<()> {
    let arguments = ["drain", "gpu", &used.gpu, "--dry-run"];
    let tried = test_bed.plugin()?.call(&arguments, "").await?.result;
    anyhow::ensure!(tried["evicted"] == used.names(test_bed), "{tried}");
    Ok(())
}

/// Drains the GPU. Its pods are evicted and run on other GPUs.
pub(super) async fn drain(test_bed: &TestBed, used: &UsedGpu) -> anyhow::Result<()> {
    let arguments = ["drain", "gpu", &used.gpu, "--grace-period", "1", "--timeout", "4m"];
    let started = tokio::time::Instant::now();
    let drained = test_bed.plugin()?.call(&arguments, "").await?;
    let seconds = started.elapsed().as_secs_f64();
    anyhow::ensure!(drained.code == 0, "{}", drained.result);
    anyhow::ensure!(drained.result["evicted"] == used.names(test_bed), "{}", drained.result);
    println!("    {REPLICAS} shares moved, one at a time, in {seconds:.0} s");
    let old = used.pods.iter().map(uid).collect();
    let after = test_bed.gpus_of(&wait_running(test_bed, &old).await?).await?;
    anyhow::ensure!(!after.contains(&used.gpu), "still on {}: {after:?}", used.gpu);
    Ok(())
}

impl UsedGpu {
    /// Returns the namespaces and names of the pods, sorted.
    fn names(&self, test_bed: &TestBed) -> Value {
        let name = |pod: &Pod| format!("{}/{}", test_bed.namespace(), pod.name_any());
        json!(self.pods.iter().map(name).collect::<BTreeSet<_>>())
    }
}

/// Waits until all replicas run, other than those with these UIDs.
async fn wait_running(test_bed: &TestBed, but: &BTreeSet<String>) -> anyhow::Result<Vec<Pod>> {
    let check = |pods: &[Pod]| {
        let is_old = |pod: &Pod| but.contains(&uid(pod));
        let running: Vec<Pod> =
            pods.iter().filter(|pod| phase(pod) == "Running" && !is_old(pod)).cloned().collect();
        match running.len() == REPLICAS && pods.len() == REPLICAS {
            true => CheckResult::Done(running),
            false => CheckResult::Pending(format!("{} of {} run", running.len(), pods.len())),
        }
    };
    wait_all(test_bed.pods(), "all replicas to run", check).await
}

fn deployment() -> Value {
    let claim = json!({"name": "gpu", "resourceClaimTemplateName": "drained"});
    let mut spec = holder("unused", claim)["spec"].clone();
    // A Deployment restarts its containers always.
    spec["restartPolicy"] = Value::Null;
    let labels = json!({"app": "drained"});
    json!({"spec": {
        "replicas": REPLICAS,
        "selector": {"matchLabels": labels},
        "template": {"metadata": {"labels": labels}, "spec": spec},
    }})
}

fn budget() -> Value {
    json!({"spec": {"maxUnavailable": 1, "selector": {"matchLabels": {"app": "drained"}}}})
}

fn api(test_bed: &TestBed, group: &str, kind: &str) -> Api<DynamicObject> {
    let resource = ApiResource::from_gvk(&GroupVersionKind::gvk(group, "v1", kind));
    Api::namespaced_with(test_bed.client.clone(), test_bed.namespace(), &resource)
}

async fn create(
    test_bed: &TestBed,
    group: &str,
    kind: &str,
    mut object: Value,
) -> anyhow::Result<()> {
    object["apiVersion"] = format!("{group}/v1").into();
    object["kind"] = kind.into();
    object["metadata"] = json!({"name": "drained"});
    let object = serde_json::from_value(object)?;
    api(test_bed, group, kind).create(&PostParams::default(), &object).await?;
    Ok(())
}

async fn delete(test_bed: &TestBed, group: &str, kind: &str) -> anyhow::Result<()> {
    api(test_bed, group, kind).delete("drained", &DeleteParams::default()).await?;
    Ok(())
}
