//! Mode stock on a cluster whose scheduler is the real one: `helm upgrade` there and back.

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceClaimTemplate, ResourceSlice};
use kube::api::PostParams;
use kube::{Api, ResourceExt};
use serde_json::json;

use super::bench::{Bench, PATIENCE, holder, phase};
use super::placement::told_of;
use super::release::helm;
use crate::harness::TrialOutcome;
use crate::inventory::DRIVER;
use crate::runner::Outcome;
use crate::wait::{self, Verdict};

pub(super) async fn there_and_back(bench: Bench) -> TrialOutcome {
    let helm = helm()?;
    bench.node_with("a100", 4).await?;
    helm.upgrade(&["mode=stock", "driver.deviceOrder=free-first"]).await?;
    let seen = kube_scheduler_allocates(&bench).await;
    // Whatever was seen, the others find the cluster as it was.
    helm.upgrade(&[]).await?;
    seen?;
    taints_are(&bench, "all devices to be our controller's", &["managed"]).await?;
    bench.holder("managed", "share").await?;
    bench.holds("managed").await?;
    bench.delete(&["managed".to_owned()]).await?;
    Ok(Outcome::Held(vec![]))
}

async fn kube_scheduler_allocates(bench: &Bench) -> anyhow::Result<()> {
    taints_are(bench, "no device to have a fence", &[]).await?;
    bench.template("share", "a100.gpu.tessera.dev", json!({"memory": "10Gi"})).await?;
    bench.holder("one", "share").await?;
    bench.holds("one").await?;
    let first = device_of(bench, "one").await?;
    comes_last(bench, &first).await?;
    bench.holder("two", "share").await?;
    bench.holds("two").await?;
    let second = device_of(bench, "two").await?;
    anyhow::ensure!(first != second, "free-first spreads, and both pods have {first}");

    let mut greedy = holder("greedy", json!({"name": "gpu", "resourceClaimTemplateName": "share"}));
    greedy["spec"]["containers"][0]["command"] = json!(["tessera-probe", "hold", "--take", "11Gi"]);
    bench.pods().create(&PostParams::default(), &serde_json::from_value(greedy)?).await?;
    let judge = |pod: Option<&Pod>| match pod.map(phase) {
        Some("Failed") => Verdict::Done(()),
        Some("Running") | Some("Pending") => Verdict::NotYet("not yet".into()),
        other => Verdict::Hopeless(format!("{other:?}")),
    };
    let what = "a pod that takes 11Gi of a claim of 10Gi to fail";
    wait::until_one(bench.pods(), "greedy", what, PATIENCE, judge).await?;
    percent_is_refused(bench).await?;
    bench.delete(&["one", "two", "greedy", "percent"].map(str::to_owned)).await
}

/// The driver says at the pod that only the controller can do this, and what to write instead.
async fn percent_is_refused(bench: &Bench) -> anyhow::Result<()> {
    let parameters = json!({"apiVersion": "gpu.tessera.dev/v1alpha1", "kind": "GpuConfig", "memory": {"percent": 25}});
    let template = json!({
        "metadata": {"name": "percent"},
        "spec": {"spec": {"devices": {
            "requests": [{"name": "gpu", "exactly": {"deviceClassName": "a100.gpu.tessera.dev"}}],
            "config": [{"opaque": {"driver": DRIVER, "parameters": parameters}}],
        }}},
    });
    let templates: Api<ResourceClaimTemplate> =
        Api::namespaced(bench.client.clone(), bench.namespace());
    templates.create(&PostParams::default(), &serde_json::from_value(template)?).await?;
    bench.holder("percent", "percent").await?;
    told_of(bench, "percent", &["memory.percent", "capacity.requests.memory"]).await?;
    Ok(())
}

async fn device_of(bench: &Bench, pod: &str) -> anyhow::Result<String> {
    let claims = bench.claims().list(&Default::default()).await?;
    let of_pod =
        |claim: &&ResourceClaim| claim.owner_references().iter().any(|owner| owner.name == pod);
    let claim = claims.iter().find(of_pod).ok_or_else(|| anyhow::anyhow!("{pod} has no claim"))?;
    let status = serde_json::to_value(&claim.status)?;
    let device = &status["allocation"]["devices"]["results"][0]["device"];
    Ok(device
        .as_str()
        .ok_or_else(|| anyhow::anyhow!("the claim of {pod} is not allocated"))?
        .to_owned())
}

/// Waits until the slices list the device after all others of its pool.
async fn comes_last(bench: &Bench, device: &str) -> anyhow::Result<()> {
    let judge = |slices: &[ResourceSlice]| {
        let mut ours = slices.iter().filter(|slice| slice.spec.driver == DRIVER);
        let last = |slice: &&ResourceSlice| {
            slice.spec.devices.iter().flatten().last().is_some_and(|last| last.name == device)
        };
        if ours.any(|slice| last(&slice)) {
            Verdict::Done(())
        } else {
            Verdict::NotYet("not last".into())
        }
    };
    let what = format!("{device}, which is in use, to come last");
    Ok(wait::until(Api::all(bench.client.clone()), Default::default(), &what, PATIENCE, judge)
        .await?)
}

/// Waits until every device of ours has just these taints of ours.
async fn taints_are(bench: &Bench, what: &str, wanted: &[&str]) -> anyhow::Result<()> {
    let judge = |slices: &[ResourceSlice]| {
        let ours = slices.iter().filter(|slice| slice.spec.driver == DRIVER);
        let devices: Vec<_> = ours.flat_map(|slice| slice.spec.devices.iter().flatten()).collect();
        let differing = devices.iter().find(|device| {
            let keys = device.taints.iter().flatten().map(|taint| taint.key.as_str());
            let own = keys.filter_map(|key| key.strip_prefix(DRIVER)?.strip_prefix('/'));
            !own.eq(wanted.iter().copied())
        });
        match differing {
            None if !devices.is_empty() => Verdict::Done(()),
            other => Verdict::NotYet(format!("{:?}", other.map(|device| &device.taints))),
        }
    };
    Ok(wait::until(Api::all(bench.client.clone()), Default::default(), what, PATIENCE, judge)
        .await?)
}
