//! Trial of `kubectl tessera drain gpu`: four shares of one GPU, of a Deployment whose
//! PodDisruptionBudget allows one pod to be missing.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::api::{DeleteParams, DynamicObject, GroupVersionKind, PostParams};
use kube::core::ApiResource;
use kube::{Api, ResourceExt};
use serde_json::{Value, json};

use super::test_bed::{TestBed, holder, phase, uid, wait_all};
use crate::harness::TrialOutcome;
use crate::inventory::DRIVER;
use crate::leftovers::device_results;
use crate::runner::Outcome;
use crate::wait::CheckResult;

const REPLICAS: usize = 4;

pub(super) async fn moves_shares(test_bed: TestBed) -> TrialOutcome {
    test_bed.taint_rules().await?;
    test_bed.node_with("h100", 2).await?;
    let binpack = json!({"placement": {"node": "Binpack", "device": "Binpack"}});
    test_bed.create_configured_template("share", DRIVER, json!({"memory": "5Gi"}), binpack).await?;
    create(&test_bed, "apps", "Deployment", deployment()).await?;
    create(&test_bed, "policy", "PodDisruptionBudget", budget()).await?;
    let before = wait_running(&test_bed, &BTreeSet::new()).await?;
    let used = devices(&test_bed, &before).await?;
    let Some((node, device)) = used.first().filter(|_| used.len() == 1) else {
        return Err(anyhow::anyhow!("not all on one GPU: {used:?}"));
    };
    let gpu = format!("{node}/{device}");
    let drained = drain(&test_bed, &gpu, &before).await;
    // Later trials need the GPU.
    let plugin = test_bed.plugin()?;
    let back = plugin.call(&["uncordon", "gpu", &gpu], "").await?.result;
    drained?;
    anyhow::ensure!(back[0]["change"] == "uncordoned", "{back}");
    delete(&test_bed, "policy", "PodDisruptionBudget").await?;
    delete(&test_bed, "apps", "Deployment").await?;
    let check = |pods: &[Pod]| CheckResult::done_if(pods.is_empty(), || "pods left".into());
    wait_all(test_bed.pods(), "the pods to be deleted", check).await?;
    Ok(Outcome::Passed(vec![]))
}

/// Drains the GPU. Its pods are evicted and run on other GPUs.
async fn drain(test_bed: &TestBed, gpu: &str, before: &[Pod]) -> anyhow::Result<()> {
    let plugin = test_bed.plugin()?;
    let tried = plugin.call(&["drain", "gpu", gpu, "--dry-run"], "").await?.result;
    let names: BTreeSet<String> =
        before.iter().map(|pod| format!("{}/{}", test_bed.namespace(), pod.name_any())).collect();
    anyhow::ensure!(tried["evicted"] == json!(names), "{tried}");
    let arguments = ["drain", "gpu", gpu, "--grace-period", "1", "--timeout", "4m"];
    let started = tokio::time::Instant::now();
    let drained = plugin.call(&arguments, "").await?;
    let seconds = started.elapsed().as_secs_f64();
    anyhow::ensure!(drained.code == 0, "{}", drained.result);
    anyhow::ensure!(drained.result["evicted"] == json!(names), "{}", drained.result);
    println!("    {REPLICAS} shares moved, one at a time, in {seconds:.0} s");
    let old = before.iter().map(uid).collect();
    let after = wait_running(test_bed, &old).await?;
    let used = devices(test_bed, &after).await?;
    let is_away = used.iter().all(|(node, device)| format!("{node}/{device}") != gpu);
    anyhow::ensure!(is_away, "still on {gpu}: {used:?}");
    Ok(())
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

/// Returns pool and device of the pods' claims.
async fn devices(test_bed: &TestBed, pods: &[Pod]) -> anyhow::Result<BTreeSet<(String, String)>> {
    let mut found = BTreeSet::new();
    for pod in pods {
        let claim: ResourceClaim = test_bed.claim_of(pod).await?;
        found.extend(device_results(&claim).map(|r| (r.pool.clone(), r.device.clone())));
    }
    Ok(found)
}

fn deployment() -> Value {
    let claim = json!({"name": "gpu", "resourceClaimTemplateName": "share"});
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
