//! Trial of stock mode with the real kube-scheduler: enabled and disabled by `helm upgrade`.

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::{
    DeviceTaintRule, ResourceClaim, ResourceClaimTemplate, ResourceSlice,
};
use kube::api::PostParams;
use kube::{Api, ResourceExt};
use serde_json::{Value, json};
use tessera_api::names::FENCE_RULE;
use tessera_api::slice::{Fence, is_fenced_by_rule};

use super::placement::wait_event_text;
use super::release::helm;
use super::test_bed::{A100, TestBed, holder, phase, wait_all, wait_deleted, wait_one};
use crate::harness::TrialOutcome;
use crate::inventory::DRIVER;
use crate::leftovers::device_results;
use crate::runner::Outcome;
use crate::wait::CheckResult;

pub(super) async fn switched_and_restored(test_bed: TestBed) -> TrialOutcome {
    let helm = helm()?;
    test_bed.node_with("a100", 4).await?;
    let rules: Api<DeviceTaintRule> = Api::all(test_bed.client.clone());
    let has_rule = rules.get_opt(FENCE_RULE).await?.is_some();
    let managed = if has_rule { Fence::Rule } else { Fence::Taint };
    // Dialects need the controller.
    let stock = [
        "mode=stock",
        "driver.deviceOrder=free-first",
        "dialects.enabled=false",
        "extendedResourceName=nvidia.com/gpu",
    ];
    helm.upgrade(&stock).await?;
    let outcome = async {
        if has_rule {
            wait_deleted(rules, FENCE_RULE).await?;
        }
        kube_scheduler_allocates(&test_bed).await
    };
    let outcome = outcome.await;
    // Restore managed mode in every case; later trials need it.
    helm.upgrade(&[]).await?;
    outcome?;
    wait_fence(&test_bed, managed).await?;
    test_bed.start_holder("managed", "share").await?;
    test_bed.delete(&["managed"]).await?;
    Ok(Outcome::Passed(vec![]))
}

async fn kube_scheduler_allocates(test_bed: &TestBed) -> anyhow::Result<()> {
    wait_fence(test_bed, Fence::Stock).await?;
    test_bed.create_template("share", A100, json!({"memory": "10Gi"})).await?;
    test_bed.start_holder("one", "share").await?;
    let first = device_of(test_bed, "one").await?;
    wait_listed_last(test_bed, &first).await?;
    test_bed.start_holder("two", "share").await?;
    let second = device_of(test_bed, "two").await?;
    anyhow::ensure!(first != second, "both pods use {first} with deviceOrder=free-first");

    let mut greedy = holder("greedy", json!({"name": "gpu", "resourceClaimTemplateName": "share"}));
    greedy["spec"]["containers"][0]["command"] = json!(["tessera-probe", "hold", "--take", "11Gi"]);
    test_bed.create(greedy).await?;
    let check = |pod: Option<&Pod>| match pod.map(phase) {
        Some("Failed") => CheckResult::Done(()),
        Some("Running") | Some("Pending") => CheckResult::Pending("not yet".into()),
        other => CheckResult::Impossible(format!("{other:?}")),
    };
    let what = "a pod that allocates 11Gi of a claim of 10Gi to fail";
    wait_one(test_bed.pods(), "greedy", what, check).await?;
    check_percent_refused(test_bed).await?;
    test_bed.delete(&["one", "two", "greedy", "percent"]).await?;
    run_extended_resource(test_bed).await
}

/// A pod that asks for `nvidia.com/gpu` gets a claim from kube-scheduler, for a whole GPU.
async fn run_extended_resource(test_bed: &TestBed) -> anyhow::Result<()> {
    let pod = |name: &str| {
        let mut pod = holder(name, json!({"name": "gpu"}));
        pod["spec"]["resourceClaims"] = Value::Null;
        pod["spec"]["containers"][0]["resources"] = json!({"limits": {"nvidia.com/gpu": 1}});
        pod
    };
    let mut mounting = pod("mounting");
    mounting["spec"]["volumes"] = json!([{"name": "v", "emptyDir": {}}]);
    mounting["spec"]["containers"][0]["volumeMounts"] =
        json!([{"name": "v", "mountPath": "/dev/tessera"}]);
    let refused = test_bed.create(mounting).await.err().map(|error| error.to_string());
    anyhow::ensure!(
        refused.as_ref().is_some_and(|text| text.contains("/dev/tessera")),
        "a pod with an extended resource mounts at /dev/tessera: {refused:?}"
    );
    test_bed.create(pod("extended")).await?;
    let running = serde_json::to_value(test_bed.wait_running("extended").await?)?;
    let claim = &running["status"]["extendedResourceClaimStatus"]["resourceClaimName"];
    let claim = claim.as_str().ok_or_else(|| anyhow::anyhow!("no claim: {running}"))?;
    let object = test_bed.claims().get(claim).await?;
    let devices: Vec<_> = device_results(&object).collect();
    anyhow::ensure!(devices.len() == 1, "not one device: {devices:?}");
    let inventory = test_bed.published_gpus().await?;
    let key = (devices[0].pool.clone(), devices[0].device.clone());
    let published = inventory.devices().find(|(device, _)| **device == key);
    let capacity = published.and_then(|(_, device)| device.capacity.clone()).unwrap_or_default();
    let taken = devices[0].consumed_capacity.as_ref().and_then(|amounts| amounts.get("memory"));
    anyhow::ensure!(
        taken.is_some() && taken == capacity.get("memory").map(|memory| &memory.value),
        "not all memory of the GPU: {taken:?} of {capacity:?}"
    );
    test_bed.delete(&["extended"]).await?;
    wait_deleted(test_bed.claims(), claim).await
}

/// Checks that the driver rejects `memory.percent`, which only the controller supports. The event
/// names the alternative.
async fn check_percent_refused(test_bed: &TestBed) -> anyhow::Result<()> {
    let parameters = json!({"apiVersion": "gpu.tessera.dev/v1alpha1", "kind": "GpuConfig", "memory": {"percent": 25}});
    let template = json!({
        "metadata": {"name": "percent"},
        "spec": {"spec": {"devices": {
            "requests": [{"name": "gpu", "exactly": {"deviceClassName": "a100.gpu.tessera.dev"}}],
            "config": [{"opaque": {"driver": DRIVER, "parameters": parameters}}],
        }}},
    });
    let templates: Api<ResourceClaimTemplate> =
        Api::namespaced(test_bed.client.clone(), test_bed.namespace());
    templates.create(&PostParams::default(), &serde_json::from_value(template)?).await?;
    test_bed.create_holder("percent", "percent").await?;
    wait_event_text(test_bed, "percent", &["memory.percent", "capacity.requests.memory"]).await?;
    Ok(())
}

async fn device_of(test_bed: &TestBed, pod: &str) -> anyhow::Result<String> {
    let claims = test_bed.claims().list(&Default::default()).await?;
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
async fn wait_listed_last(test_bed: &TestBed, device: &str) -> anyhow::Result<()> {
    let check = |slices: &[ResourceSlice]| {
        let mut own_slices = slices.iter().filter(|slice| slice.spec.driver == DRIVER);
        let last = |slice: &&ResourceSlice| {
            slice.spec.devices.iter().flatten().last().is_some_and(|last| last.name == device)
        };
        CheckResult::done_if(own_slices.any(|slice| last(&slice)), || "not last".into())
    };
    let what = format!("used device {device} to be listed last");
    wait_all(Api::all(test_bed.client.clone()), &what, check).await
}

/// Waits until all slices of the driver have this fence, and no device another taint of the driver.
pub(super) async fn wait_fence(test_bed: &TestBed, fence: Fence) -> anyhow::Result<()> {
    let wanted: &[&str] = if fence == Fence::Taint { &["managed"] } else { &[] };
    let has_fence = |slice: &ResourceSlice| {
        let has_taints = slice.spec.devices.iter().flatten().all(|device| {
            let keys = device.taints.iter().flatten().map(|taint| taint.key.as_str());
            let own = keys.filter_map(|key| key.strip_prefix(DRIVER)?.strip_prefix('/'));
            own.eq(wanted.iter().copied())
        });
        has_taints && is_fenced_by_rule(slice) == (fence == Fence::Rule)
    };
    let check = |slices: &[ResourceSlice]| {
        let own = || slices.iter().filter(|slice| slice.spec.driver == DRIVER);
        match own().find(|slice| !has_fence(slice)) {
            None if own().next().is_some() => CheckResult::Done(()),
            other => CheckResult::Pending(format!("{other:?}")),
        }
    };
    let what = format!("all slices to be published with fence {fence:?}");
    wait_all(Api::all(test_bed.client.clone()), &what, check).await
}
