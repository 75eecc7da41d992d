//! An editor gets rid of an allocated claim under a running pod: the GPU counts as taken while the
//! pod runs.

use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use serde_json::{Value, json};

use super::bench::{Bench, holder, phase};
use super::placement;
use super::policies;
use crate::harness::TrialOutcome;
use crate::inventory::GpuInventory;
use crate::leftovers::holds_device;
use crate::runner::Outcome;

pub(super) async fn counted(bench: Bench) -> TrialOutcome {
    let node = bench.node_with("a100", 1).await?;
    let inventory = GpuInventory::read(&bench.client).await?;
    let device =
        inventory.first_of(&node).ok_or_else(|| anyhow::anyhow!("{node} publishes nothing"))?;
    for name in ["taken", "wanted"] {
        let claim = whole(name, device);
        bench.claims().create(&PostParams::default(), &serde_json::from_value(claim)?).await?;
    }
    create(&bench, "holder", "taken").await?;
    bench.holds("holder").await?;

    policies::without(&bench, strip(&bench, "taken")).await?;

    create(&bench, "waiting", "wanted").await?;
    placement::told(&bench, "waiting", "InsufficientDevices").await?;
    let wanted = bench.claims().get("wanted").await?;
    anyhow::ensure!(
        !holds_device(&wanted),
        "a GPU in use was handed out: {}",
        json!(wanted.status)
    );
    let running = bench.pods().get("holder").await?;
    anyhow::ensure!(phase(&running) == "Running", "the holder is {}", phase(&running));

    bench.delete(&["holder".to_owned()]).await?;
    bench.holds("waiting").await?;
    bench.delete(&["waiting".to_owned()]).await?;
    Ok(Outcome::Held(vec![]))
}

/// A claim of all memory of one GPU.
fn whole(name: &str, device: &str) -> Value {
    let uuid = device.trim_start_matches("gpu-");
    let select = format!("device.attributes[\"gpu.tessera.dev\"].uuid.endsWith(\"{uuid}\")");
    json!({
        "metadata": {"name": name},
        "spec": {"devices": {"requests": [{"name": "gpu", "exactly": {
            "deviceClassName": "gpu.tessera.dev", "selectors": [{"cel": {"expression": select}}],
        }}]}},
    })
}

async fn create(bench: &Bench, pod: &str, claim: &str) -> anyhow::Result<()> {
    let pod = holder(pod, json!({"name": "gpu", "resourceClaimName": claim}));
    bench.pods().create(&PostParams::default(), &serde_json::from_value(pod)?).await?;
    Ok(())
}

/// Deletes the claim, and strips the finalizer that keeps it.
async fn strip(bench: &Bench, claim: &str) -> anyhow::Result<()> {
    let claims = bench.claims();
    claims.delete(claim, &DeleteParams::default()).await?;
    let no_finalizers = Patch::Merge(json!({"metadata": {"finalizers": null}}));
    claims.patch(claim, &PatchParams::default(), &no_finalizers).await?;
    anyhow::ensure!(claims.get_opt(claim).await?.is_none(), "the claim is still there");
    Ok(())
}
