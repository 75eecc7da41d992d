//! Trial that edits and forges ResourceSlices of a node. The driver restores its slices and deletes
//! others.

use k8s_openapi::api::resource::v1::ResourceSlice;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use kube::runtime::watcher::Config;
use kube::{Api, ResourceExt};
use serde_json::{Value, json};

use super::policies;
use super::test_bed::{TestBed, wait_selected};
use crate::harness::TrialOutcome;
use crate::inventory::DRIVER;
use crate::runner::Outcome;
use crate::wait::CheckResult;

/// Name of a forged slice of the node, with an invented pool.
const FORGED: &str = "trial-forged-slice";

/// Edits one slice and creates another while the admission policies, which deny both, are removed.
pub(super) async fn check_repaired(test_bed: TestBed) -> TrialOutcome {
    let node = test_bed.node_with("a100", 4).await?;
    let slices: Api<ResourceSlice> = Api::all(test_bed.client.clone());
    // Left by an interrupted run.
    let _ = slices.delete(FORGED, &DeleteParams::default()).await;
    let before = own(&slices, &node).await?;
    policies::without(&test_bed, tamper(&slices, &before, &node)).await?;

    let check = |found: &[ResourceSlice]| {
        let names: Vec<String> = found.iter().map(ResourceExt::name_any).collect();
        match found {
            [slice] if content(slice) == content(&before) => CheckResult::Done(()),
            _ => CheckResult::Pending(format!("{names:?}: {}", json!(found))),
        }
    };
    let selector = of_node(&node);
    wait_selected(slices, selector, "the node's slices to be restored", check).await?;
    Ok(Outcome::Passed(vec![]))
}

fn of_node(node: &str) -> Config {
    Config::default().fields(&format!("spec.nodeName={node},spec.driver={DRIVER}"))
}

async fn own(slices: &Api<ResourceSlice>, node: &str) -> anyhow::Result<ResourceSlice> {
    let check = |found: &[ResourceSlice]| match found {
        [slice] => CheckResult::Done(slice.clone()),
        _ => CheckResult::Pending(format!("{} slices", found.len())),
    };
    wait_selected(slices.clone(), of_node(node), "one slice of the node", check).await
}

async fn tamper(
    slices: &Api<ResourceSlice>,
    own: &ResourceSlice,
    node: &str,
) -> anyhow::Result<()> {
    // Memory that the GPUs do not have. The fence is kept: the driver delays the repair of slices
    // without one, because kube-scheduler may have allocated from them.
    let mut devices = json!(own.spec.devices);
    for device in devices.as_array_mut().into_iter().flatten() {
        device["capacity"]["memory"] = json!({"value": "1Ti"});
    }
    let edit = Patch::Merge(json!({"spec": {"devices": devices}}));
    slices.patch(&own.name_any(), &PatchParams::default(), &edit).await?;
    let pool = json!({"name": "elsewhere", "generation": 1, "resourceSliceCount": 1});
    let forged = json!({
        "metadata": {"name": FORGED},
        "spec": {"driver": DRIVER, "nodeName": node, "pool": pool, "devices": [{"name": "gpu-forged"}]},
    });
    slices.create(&PostParams::default(), &serde_json::from_value(forged)?).await?;
    Ok(())
}

/// Returns a slice's content without fields that change. These are the generation and the times at
/// which taints were added.
fn content(slice: &ResourceSlice) -> Value {
    let mut devices = json!(slice.spec.devices);
    for device in devices.as_array_mut().into_iter().flatten() {
        for taint in device["taints"].as_array_mut().into_iter().flatten() {
            taint["timeAdded"] = Value::Null;
        }
    }
    json!([slice.spec.pool.name, devices, slice.metadata.annotations])
}
