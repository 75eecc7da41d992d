//! Trial that removes an allocated claim of a running pod: the GPU counts as used while the pod
//! runs.

use kube::api::{DeleteParams, Patch, PatchParams};
use serde_json::{Value, json};

use super::placement;
use super::policies;
use super::test_bed::{TestBed, holder, phase};
use crate::harness::TrialOutcome;
use crate::leftovers::holds_device;
use crate::runner::Outcome;

pub(super) async fn check_still_counted(test_bed: TestBed) -> TrialOutcome {
    let node = test_bed.node_with("a100", 1).await?;
    let inventory = test_bed.published_gpus().await?;
    let device =
        inventory.first_of(&node).ok_or_else(|| anyhow::anyhow!("{node} publishes nothing"))?;
    for name in ["used", "wanted"] {
        let claim = whole(name, device);
        test_bed.create_claim(claim).await?;
    }
    create(&test_bed, "holder", "used").await?;
    test_bed.wait_running("holder").await?;

    policies::without(&test_bed, remove_claim(&test_bed, "used")).await?;

    create(&test_bed, "pending", "wanted").await?;
    placement::wait_event_reason(&test_bed, "pending", "InsufficientDevices").await?;
    let wanted = test_bed.claims().get("wanted").await?;
    anyhow::ensure!(!holds_device(&wanted), "a GPU in use was allocated: {}", json!(wanted.status));
    let running = test_bed.pods().get("holder").await?;
    anyhow::ensure!(phase(&running) == "Running", "pod `holder` is {}", phase(&running));

    test_bed.delete(&["holder"]).await?;
    test_bed.wait_running("pending").await?;
    test_bed.delete(&["pending"]).await?;
    Ok(Outcome::Passed(vec![]))
}

/// Returns a claim of all memory of one GPU.
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

async fn create(test_bed: &TestBed, pod: &str, claim: &str) -> anyhow::Result<()> {
    let pod = holder(pod, json!({"name": "gpu", "resourceClaimName": claim}));
    test_bed.create(pod).await?;
    Ok(())
}

/// Deletes the claim and removes the finalizer that protects it.
async fn remove_claim(test_bed: &TestBed, claim: &str) -> anyhow::Result<()> {
    let claims = test_bed.claims();
    claims.delete(claim, &DeleteParams::default()).await?;
    let no_finalizers = Patch::Merge(json!({"metadata": {"finalizers": null}}));
    claims.patch(claim, &PatchParams::default(), &no_finalizers).await?;
    anyhow::ensure!(claims.get_opt(claim).await?.is_none(), "the claim was not deleted");
    Ok(())
}
