//! A GPU that vanishes while in use: the slice says so, the pod's status says so, the claim stays.

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::ResourceSlice;
use kube::{Api, ResourceExt};
use serde_json::json;

use super::bench::{Bench, PATIENCE};
use crate::harness::TrialOutcome;
use crate::inventory::{DRIVER, GpuInventory, attribute};
use crate::leftovers::holds_device;
use crate::operations::Operations;
use crate::runner::Outcome;
use crate::wait::{self, Verdict};

pub(super) async fn lost(bench: Bench) -> TrialOutcome {
    let hands = bench.hands()?.clone();
    let node = bench.node_with("a100", 4).await?;
    bench.template("share", "a100.gpu.tessera.dev", json!({"memory": "10Gi"})).await?;
    bench.holder("pod", "share").await?;
    bench.holds("pod").await?;
    let claims = bench.claims().list(&Default::default()).await?;
    let claim = claims.items.into_iter().find(holds_device);
    let claim = claim.ok_or_else(|| anyhow::anyhow!("a running pod has no allocated claim"))?;
    let value = serde_json::to_value(&claim.status)?;
    let device =
        value["allocation"]["devices"]["results"][0]["device"].as_str().unwrap_or_default().to_owned();
    let inventory = GpuInventory::read(&bench.client).await?;
    let published = inventory.device(&node, &device);
    let uuid = published.map(|device| attribute(device, "uuid")).unwrap_or_default();
    let uuid = uuid.as_str().ok_or_else(|| anyhow::anyhow!("{device} of {node} has no uuid"))?;

    hands.run(&["gpu", &node, "lose", uuid]).await?;
    let seen = is_missed(&bench, &device, &claim.name_any()).await;
    // Whatever was seen, the others find the GPU whole.
    hands.run(&["gpu", &node, "heal", uuid]).await?;
    seen?;
    published_again(&bench, &hands, &node, &device).await?;
    bench.delete(&["pod".to_owned()]).await?;
    Ok(Outcome::Held(vec![]))
}

/// Whether a slice offers the device as one that a new claim may get.
fn offers(slices: &[ResourceSlice], device: &str) -> bool {
    slices.iter().filter(|slice| slice.spec.driver == DRIVER).any(|slice| {
        let mut devices = slice.spec.devices.iter().flatten();
        devices.any(|one| {
            let gone = one.taints.iter().flatten().any(|taint| taint.key != format!("{DRIVER}/managed"));
            one.name == device && !gone
        })
    })
}

async fn is_missed(bench: &Bench, device: &str, claim: &str) -> anyhow::Result<()> {
    let slices: Api<ResourceSlice> = Api::all(bench.client.clone());
    let judge = |slices: &[ResourceSlice]| {
        if offers(slices, device) { Verdict::NotYet("still offered".into()) } else { Verdict::Done(()) }
    };
    let what = format!("the slices to offer {device} no more");
    wait::until(slices, Default::default(), &what, PATIENCE, judge).await?;
    let judge = |pod: Option<&Pod>| {
        let pod = serde_json::to_value(pod).unwrap_or_default();
        let health = &pod["status"]["containerStatuses"][0]["allocatedResourcesStatus"][0]["resources"];
        let unhealthy =
            health.as_array().into_iter().flatten().any(|resource| resource["health"] == "Unhealthy");
        if unhealthy { Verdict::Done(()) } else { Verdict::NotYet(health.to_string()) }
    };
    wait::until_one(bench.pods(), "pod", "the pod's status to say Unhealthy", PATIENCE, judge).await?;
    let claim = bench.claims().get(claim).await?;
    anyhow::ensure!(holds_device(&claim), "the claim lost its allocation with the GPU");
    Ok(())
}

/// A GPU that comes back is offered again; a driver may need a restart to see it, as with the real thing.
async fn published_again(bench: &Bench, _hands: &Operations, node: &str, device: &str) -> anyhow::Result<()> {
    let slices: Api<ResourceSlice> = Api::all(bench.client.clone());
    let judge = |slices: &[ResourceSlice]| {
        if offers(slices, device) { Verdict::Done(()) } else { Verdict::NotYet("not offered".into()) }
    };
    let what = format!("{device} of {node} to be offered again");
    Ok(wait::until(slices, Default::default(), &what, PATIENCE, judge).await?)
}
