//! Slices of a node that somebody else has written: the driver puts them right, whatever they say.

use k8s_openapi::api::resource::v1::ResourceSlice;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use kube::runtime::watcher::Config;
use kube::{Api, ResourceExt};
use serde_json::{Value, json};

use super::bench::{Bench, PATIENCE};
use super::policies;
use crate::harness::TrialOutcome;
use crate::inventory::DRIVER;
use crate::runner::Outcome;
use crate::wait::{self, Verdict};

/// A slice of the node that names a pool of somebody's invention.
const FORGED: &str = "trial-forged-slice";

/// Without the policies, which refuse both, one slice is edited and another is made. Then the
/// policies are back.
pub(super) async fn put_right(bench: Bench) -> TrialOutcome {
    let node = bench.node_with("a100", 4).await?;
    let slices: Api<ResourceSlice> = Api::all(bench.client.clone());
    // What an interrupted run left.
    let _ = slices.delete(FORGED, &DeleteParams::default()).await;
    let before = own(&slices, &node).await?;
    policies::without(&bench, tamper(&slices, &before, &node)).await?;

    let judge = |found: &[ResourceSlice]| {
        let names: Vec<String> = found.iter().map(ResourceExt::name_any).collect();
        match found {
            [slice] if says(slice) == says(&before) => Verdict::Done(()),
            _ => Verdict::NotYet(format!("{names:?}: {}", json!(found))),
        }
    };
    let selector = of_node(&node);
    wait::until(slices, selector, "the node's slices to be as they were", PATIENCE, judge).await?;
    Ok(Outcome::Held(vec![]))
}

fn of_node(node: &str) -> Config {
    Config::default().fields(&format!("spec.nodeName={node},spec.driver={DRIVER}"))
}

async fn own(slices: &Api<ResourceSlice>, node: &str) -> anyhow::Result<ResourceSlice> {
    let judge = |found: &[ResourceSlice]| match found {
        [slice] => Verdict::Done(slice.clone()),
        _ => Verdict::NotYet(format!("{} slices", found.len())),
    };
    Ok(wait::until(slices.clone(), of_node(node), "one slice of the node", PATIENCE, judge).await?)
}

async fn tamper(
    slices: &Api<ResourceSlice>,
    own: &ResourceSlice,
    node: &str,
) -> anyhow::Result<()> {
    // Memory that is not there. Without their fence they would be left alone for a while:
    // kube-scheduler may have seen them.
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

/// What a slice says, without the generation, which counts changes, and the times at which taints
/// were seen first.
fn says(slice: &ResourceSlice) -> Value {
    let mut devices = json!(slice.spec.devices);
    for device in devices.as_array_mut().into_iter().flatten() {
        for taint in device["taints"].as_array_mut().into_iter().flatten() {
            taint["timeAdded"] = Value::Null;
        }
    }
    json!([slice.spec.pool.name, devices, slice.metadata.annotations])
}
