//! A GPU that fails or vanishes while in use: the slice says so, the pod's status says so, the
//! claim stays; and both say when it is whole again.

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::ResourceSlice;
use kube::{Api, ResourceExt};
use serde_json::json;

use super::bench::{Bench, PATIENCE};
use crate::harness::TrialOutcome;
use crate::inventory::{DRIVER, GpuInventory, attribute};
use crate::leftovers::holds_device;
use crate::runner::Outcome;
use crate::wait::{self, Verdict};

/// A GPU with a share of it in use by a running pod.
struct InUse {
    node: String,
    claim: String,
    device: String,
    uuid: String,
}

impl InUse {
    /// Starts the pod.
    async fn by_a_pod(bench: &Bench) -> anyhow::Result<Self> {
        let node = bench.node_with("a100", 4).await?;
        bench.template("share", "a100.gpu.tessera.dev", json!({"memory": "10Gi"})).await?;
        bench.holder("pod", "share").await?;
        bench.holds("pod").await?;
        let claims = bench.claims().list(&Default::default()).await?;
        let claim = claims.items.into_iter().find(holds_device);
        let claim = claim.ok_or_else(|| anyhow::anyhow!("a running pod has no allocated claim"))?;
        let value = serde_json::to_value(&claim.status)?;
        let device = value["allocation"]["devices"]["results"][0]["device"]
            .as_str()
            .unwrap_or_default()
            .to_owned();
        let inventory = GpuInventory::read(&bench.client).await?;
        let published = inventory.device(&node, &device);
        let uuid = published.map(|device| attribute(device, "uuid")).unwrap_or_default();
        let uuid = uuid
            .as_str()
            .ok_or_else(|| anyhow::anyhow!("{device} of {node} has no uuid"))?
            .to_owned();
        Ok(Self { node, claim: claim.name_any(), device, uuid })
    }
}

pub(super) async fn lost(bench: Bench) -> TrialOutcome {
    let hands = bench.hands()?.clone();
    let InUse { node, claim, device, uuid } = InUse::by_a_pod(&bench).await?;
    hands.run(&["gpu", &node, "lose", &uuid]).await?;
    let seen = is_missed(&bench, &device, &claim).await;
    // Whatever was seen, the others find the GPU whole.
    hands.run(&["gpu", &node, "heal", &uuid]).await?;
    seen?;
    published_again(&bench, &node, &device).await?;
    bench.delete(&["pod".to_owned()]).await?;
    Ok(Outcome::Held(vec![]))
}

/// An XID, and the reset that cures it: slice and pod status follow both, and the pod runs on.
pub(super) async fn recovers(bench: Bench) -> TrialOutcome {
    let hands = bench.hands()?.clone();
    let InUse { node, device, uuid, .. } = InUse::by_a_pod(&bench).await?;
    hands.run(&["gpu", &node, "xid", &uuid, "119", "--recovery", "gpu-reset"]).await?;
    let seen = async {
        taint_is(&bench, &device, Some("Xid119")).await?;
        health_is(&bench, "Unhealthy").await
    };
    let seen = seen.await;
    hands.run(&["gpu", &node, "reset", &uuid]).await?;
    seen?;
    taint_is(&bench, &device, None).await?;
    health_is(&bench, "Healthy").await?;
    bench.delete(&["pod".to_owned()]).await?;
    Ok(Outcome::Held(vec![]))
}

/// Waits until the device has the taint of an unhealthy one, of that value, or is there without it.
pub(super) async fn taint_is(
    bench: &Bench,
    device: &str,
    value: Option<&str>,
) -> anyhow::Result<()> {
    let slices: Api<ResourceSlice> = Api::all(bench.client.clone());
    let judge = |slices: &[ResourceSlice]| {
        let of_driver = slices.iter().filter(|slice| slice.spec.driver == DRIVER);
        let mut devices = of_driver.flat_map(|slice| slice.spec.devices.iter().flatten());
        let Some(found) = devices.find(|found| found.name == device) else {
            return Verdict::NotYet("not published".into());
        };
        let mut taints = found.taints.iter().flatten();
        let taint = taints.find(|taint| taint.key == format!("{DRIVER}/unhealthy"));
        let there = taint.map(|taint| taint.value.as_deref().unwrap_or_default());
        if there == value { Verdict::Done(()) } else { Verdict::NotYet(format!("{there:?}")) }
    };
    let what = format!("{device} to be tainted as unhealthy with {value:?}");
    Ok(wait::until(slices, Default::default(), &what, PATIENCE, judge).await?)
}

/// Waits until the kubelet shows that health of the pod's device.
async fn health_is(bench: &Bench, wanted: &str) -> anyhow::Result<()> {
    let judge = |pod: Option<&Pod>| {
        let pod = serde_json::to_value(pod).unwrap_or_default();
        let health =
            &pod["status"]["containerStatuses"][0]["allocatedResourcesStatus"][0]["resources"];
        let mut resources = health.as_array().into_iter().flatten();
        let is_it = resources.any(|resource| resource["health"] == wanted);
        if is_it { Verdict::Done(()) } else { Verdict::NotYet(health.to_string()) }
    };
    let what = format!("the pod's status to say {wanted}");
    Ok(wait::until_one(bench.pods(), "pod", &what, PATIENCE, judge).await?)
}

/// Whether a slice offers the device as one that a new claim may get.
fn offers(slices: &[ResourceSlice], device: &str) -> bool {
    slices.iter().filter(|slice| slice.spec.driver == DRIVER).any(|slice| {
        let mut devices = slice.spec.devices.iter().flatten();
        devices.any(|one| {
            let gone =
                one.taints.iter().flatten().any(|taint| taint.key != format!("{DRIVER}/managed"));
            one.name == device && !gone
        })
    })
}

async fn is_missed(bench: &Bench, device: &str, claim: &str) -> anyhow::Result<()> {
    let slices: Api<ResourceSlice> = Api::all(bench.client.clone());
    let judge = |slices: &[ResourceSlice]| {
        if offers(slices, device) {
            Verdict::NotYet("still offered".into())
        } else {
            Verdict::Done(())
        }
    };
    let what = format!("the slices to offer {device} no more");
    wait::until(slices, Default::default(), &what, PATIENCE, judge).await?;
    health_is(bench, "Unhealthy").await?;
    let claim = bench.claims().get(claim).await?;
    anyhow::ensure!(holds_device(&claim), "the claim lost its allocation with the GPU");
    Ok(())
}

/// A GPU that comes back is offered again.
async fn published_again(bench: &Bench, node: &str, device: &str) -> anyhow::Result<()> {
    let slices: Api<ResourceSlice> = Api::all(bench.client.clone());
    let judge = |slices: &[ResourceSlice]| {
        if offers(slices, device) {
            Verdict::Done(())
        } else {
            Verdict::NotYet("not offered".into())
        }
    };
    let what = format!("{device} of {node} to be offered again");
    Ok(wait::until(slices, Default::default(), &what, PATIENCE, judge).await?)
}
