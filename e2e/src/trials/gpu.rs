//! Trials of a GPU that fails or disappears while in use. The slice and the pod's status report the
//! failure and the recovery, and the claim keeps its allocation.

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::ResourceSlice;
use kube::{Api, ResourceExt};
use serde_json::json;

use super::test_bed::{A100, TestBed, wait_all, wait_one};
use crate::harness::TrialOutcome;
use crate::inventory::{DRIVER, attribute};
use crate::leftovers::holds_device;
use crate::runner::Outcome;
use crate::wait::CheckResult;

/// A GPU with a share used by a running pod.
struct UsedGpu {
    node: String,
    claim: String,
    device: String,
    uuid: String,
}

impl UsedGpu {
    /// Starts a pod on a GPU.
    async fn start(test_bed: &TestBed) -> anyhow::Result<Self> {
        let node = test_bed.node_with("a100", 4).await?;
        test_bed.create_template("share", A100, json!({"memory": "10Gi"})).await?;
        test_bed.start_holder("pod", "share").await?;
        let claims = test_bed.claims().list(&Default::default()).await?;
        let claim = claims.items.into_iter().find(holds_device);
        let claim = claim.ok_or_else(|| anyhow::anyhow!("a running pod has no allocated claim"))?;
        let value = serde_json::to_value(&claim.status)?;
        let device = value["allocation"]["devices"]["results"][0]["device"]
            .as_str()
            .unwrap_or_default()
            .to_owned();
        let inventory = test_bed.published_gpus().await?;
        let published = inventory.device(&node, &device);
        let uuid = published.map(|device| attribute(device, "uuid")).unwrap_or_default();
        let uuid = uuid
            .as_str()
            .ok_or_else(|| anyhow::anyhow!("{device} of {node} has no uuid"))?
            .to_owned();
        Ok(Self { node, claim: claim.name_any(), device, uuid })
    }
}

pub(super) async fn lost(test_bed: TestBed) -> TrialOutcome {
    let operations = test_bed.operations()?.clone();
    let UsedGpu { node, claim, device, uuid } = UsedGpu::start(&test_bed).await?;
    operations.run(&["gpu", &node, "lose", &uuid]).await?;
    let outcome = wait_reported_lost(&test_bed, &device, &claim).await;
    // Restore the GPU in every case; later trials need it.
    operations.run(&["gpu", &node, "heal", &uuid]).await?;
    outcome?;
    wait_published_again(&test_bed, &node, &device).await?;
    test_bed.delete(&["pod"]).await?;
    Ok(Outcome::Passed(vec![]))
}

/// An XID error, and the reset that clears it. The slice and the pod's status report both, and the
/// pod continues.
pub(super) async fn recovers(test_bed: TestBed) -> TrialOutcome {
    let operations = test_bed.operations()?.clone();
    let UsedGpu { node, device, uuid, .. } = UsedGpu::start(&test_bed).await?;
    operations.run(&["gpu", &node, "xid", &uuid, "119", "--recovery", "gpu-reset"]).await?;
    let outcome = async {
        wait_taint(&test_bed, &device, Some("Xid119")).await?;
        wait_health(&test_bed, "Unhealthy").await
    };
    let outcome = outcome.await;
    operations.run(&["gpu", &node, "reset", &uuid]).await?;
    outcome?;
    wait_taint(&test_bed, &device, None).await?;
    wait_health(&test_bed, "Healthy").await?;
    test_bed.delete(&["pod"]).await?;
    Ok(Outcome::Passed(vec![]))
}

/// Waits until the device is published with that value of the unhealthy taint, or without the
/// taint.
pub(super) async fn wait_taint(
    test_bed: &TestBed,
    device: &str,
    value: Option<&str>,
) -> anyhow::Result<()> {
    let slices: Api<ResourceSlice> = Api::all(test_bed.client.clone());
    let check = |slices: &[ResourceSlice]| {
        let of_driver = slices.iter().filter(|slice| slice.spec.driver == DRIVER);
        let mut devices = of_driver.flat_map(|slice| slice.spec.devices.iter().flatten());
        let Some(found) = devices.find(|found| found.name == device) else {
            return CheckResult::Pending("not published".into());
        };
        let mut taints = found.taints.iter().flatten();
        let taint = taints.find(|taint| taint.key == format!("{DRIVER}/unhealthy"));
        let current = taint.map(|taint| taint.value.as_deref().unwrap_or_default());
        CheckResult::done_if(current == value, || format!("{current:?}"))
    };
    let what = format!("{device} to be tainted as unhealthy with {value:?}");
    wait_all(slices, &what, check).await
}

/// Waits until the kubelet reports that health of the pod's device.
async fn wait_health(test_bed: &TestBed, wanted: &str) -> anyhow::Result<()> {
    let check = |pod: Option<&Pod>| {
        let pod = serde_json::to_value(pod).unwrap_or_default();
        let health =
            &pod["status"]["containerStatuses"][0]["allocatedResourcesStatus"][0]["resources"];
        let mut resources = health.as_array().into_iter().flatten();
        let found = resources.any(|resource| resource["health"] == wanted);
        CheckResult::done_if(found, || health.to_string())
    };
    let what = format!("the pod's status to report {wanted}");
    wait_one(test_bed.pods(), "pod", &what, check).await
}

/// Returns true if a slice publishes the device without a taint other than the managed one.
fn is_available(slices: &[ResourceSlice], device: &str) -> bool {
    slices.iter().filter(|slice| slice.spec.driver == DRIVER).any(|slice| {
        let mut devices = slice.spec.devices.iter().flatten();
        devices.any(|one| {
            let is_tainted =
                one.taints.iter().flatten().any(|taint| taint.key != format!("{DRIVER}/managed"));
            one.name == device && !is_tainted
        })
    })
}

async fn wait_reported_lost(test_bed: &TestBed, device: &str, claim: &str) -> anyhow::Result<()> {
    let slices: Api<ResourceSlice> = Api::all(test_bed.client.clone());
    let check = |slices: &[ResourceSlice]| {
        CheckResult::done_if(!is_available(slices, device), || "still available".into())
    };
    let what = format!("{device} to become unavailable in the slices");
    wait_all(slices, &what, check).await?;
    wait_health(test_bed, "Unhealthy").await?;
    let claim = test_bed.claims().get(claim).await?;
    anyhow::ensure!(holds_device(&claim), "the claim lost its allocation with the GPU");
    Ok(())
}

/// Waits until a recovered GPU is published again.
async fn wait_published_again(test_bed: &TestBed, node: &str, device: &str) -> anyhow::Result<()> {
    let slices: Api<ResourceSlice> = Api::all(test_bed.client.clone());
    let check = |slices: &[ResourceSlice]| {
        CheckResult::done_if(is_available(slices, device), || "not available".into())
    };
    let what = format!("{device} of {node} to become available again");
    wait_all(slices, &what, check).await
}
