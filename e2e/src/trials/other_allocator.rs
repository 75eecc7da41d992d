//! Another allocator of the same GPUs: they are not offered as long as it hands them out, and the
//! Node says why.

use k8s_openapi::api::core::v1::{Event, Node};
use k8s_openapi::api::resource::v1::ResourceSlice;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use kube::{Api, Client, ResourceExt};
use serde_json::{Value, json};

use super::bench::{Bench, PATIENCE};
use crate::harness::TrialOutcome;
use crate::inventory::{DRIVER, GpuInventory, attribute};
use crate::runner::Outcome;
use crate::wait::{self, Verdict};

/// The name of the slice that NVIDIA's DRA driver would have made.
const SLICE: &str = "trial-other-allocator";

/// NVIDIA's DRA driver publishes one GPU of a node.
pub(super) async fn dra_driver(bench: Bench) -> TrialOutcome {
    let node = bench.node_with("a100", 4).await?;
    let inventory = GpuInventory::read(&bench.client).await?;
    let device = inventory.first_of(&node).unwrap_or_default().to_owned();
    let uuid = inventory
        .device(&node, &device)
        .map(|device| attribute(device, "uuid"))
        .unwrap_or_default();
    let all = devices_of(&inventory, &node);

    let slices: Api<ResourceSlice> = Api::all(bench.client.clone());
    // What an interrupted run left.
    let _ = slices.delete(SLICE, &DeleteParams::default()).await;
    slices.create(&PostParams::default(), &nvidias(&node, &uuid)?).await?;
    let seen = async {
        let others: Vec<_> = all.iter().filter(|name| **name != device).cloned().collect();
        offers(&bench.client, &node, &others).await?;
        node_says(&bench.client, &node, "gpu.nvidia.com").await
    };
    let seen = seen.await;
    slices.delete(SLICE, &DeleteParams::default()).await?;
    seen?;
    offers(&bench.client, &node, &all).await?;
    Ok(Outcome::Held(vec![]))
}

/// A device plugin has registered GPUs with the kubelet: all of the node's are concerned.
pub(super) async fn device_plugin(bench: Bench) -> TrialOutcome {
    let node = bench.node_with("a100", 4).await?;
    let all = devices_of(&GpuInventory::read(&bench.client).await?, &node);
    let resource = "nvidia.com/gpu";
    set_capacity(&bench.client, &node, resource, json!("4")).await?;
    let seen = async {
        offers(&bench.client, &node, &[]).await?;
        node_says(&bench.client, &node, resource).await
    };
    let seen = seen.await;
    set_capacity(&bench.client, &node, resource, Value::Null).await?;
    seen?;
    offers(&bench.client, &node, &all).await?;
    Ok(Outcome::Held(vec![]))
}

/// As the kubelet does for a plugin. It leaves resources alone of which it knows no plugin.
async fn set_capacity(
    client: &Client,
    node: &str,
    resource: &str,
    amount: Value,
) -> anyhow::Result<()> {
    let nodes: Api<Node> = Api::all(client.clone());
    let status =
        json!({"status": {"capacity": {resource: amount}, "allocatable": {resource: amount}}});
    nodes.patch_status(node, &PatchParams::default(), &Patch::Merge(status)).await?;
    Ok(())
}

fn nvidias(node: &str, uuid: &Value) -> serde_json::Result<ResourceSlice> {
    serde_json::from_value(json!({
        "metadata": {"name": SLICE},
        "spec": {
            "driver": "gpu.nvidia.com",
            "nodeName": node,
            "pool": {"name": node, "generation": 1, "resourceSliceCount": 1},
            "devices": [{"name": "gpu-0", "attributes": {"uuid": {"string": uuid}, "type": {"string": "gpu"}}}],
        },
    }))
}

fn devices_of(inventory: &GpuInventory, node: &str) -> Vec<String> {
    let on_node =
        inventory.devices().filter(|((pool, _), _)| inventory.node_of(pool) == Some(node));
    on_node.map(|((_, name), _)| name.clone()).collect()
}

/// Waits until the node offers just these devices.
async fn offers(client: &Client, node: &str, wanted: &[String]) -> anyhow::Result<()> {
    let judge = |slices: &[ResourceSlice]| {
        let ours: Vec<_> =
            slices.iter().filter(|slice| slice.spec.driver == DRIVER).cloned().collect();
        let there = devices_of(&GpuInventory::of(ours), node);
        if there == wanted { Verdict::Done(()) } else { Verdict::NotYet(there.join(", ")) }
    };
    let what = format!("{node} to offer [{}]", wanted.join(", "));
    Ok(wait::until(Api::all(client.clone()), Default::default(), &what, PATIENCE, judge).await?)
}

/// Waits for an event on the Node that names the other allocator.
async fn node_says(client: &Client, node: &str, allocator: &str) -> anyhow::Result<()> {
    let judge = |events: &[Event]| {
        let of_node = events.iter().filter(|event| {
            event.involved_object.kind.as_deref() == Some("Node")
                && event.involved_object.name.as_deref() == Some(node)
        });
        let mut told = of_node.filter(|event| event.reason.as_deref() == Some("GpuNotPublished"));
        match told
            .find(|event| event.message.as_deref().is_some_and(|text| text.contains(allocator)))
        {
            Some(_) => Verdict::Done(()),
            None => {
                let names: Vec<_> = events.iter().map(|event| event.name_any()).collect();
                Verdict::NotYet(names.join(", "))
            }
        }
    };
    let what = format!("an event on {node} that names {allocator}");
    let events: Api<Event> = Api::namespaced(client.clone(), "default");
    Ok(wait::until(events, Default::default(), &what, PATIENCE, judge).await?)
}
