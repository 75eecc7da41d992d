//! Trials with another allocator of the same GPUs. They are not published meanwhile, and an event
//! on the Node names the other allocator.

use k8s_openapi::api::core::v1::{Event, Node};
use k8s_openapi::api::resource::v1::ResourceSlice;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use kube::{Api, Client, ResourceExt};
use serde_json::{Value, json};

use super::test_bed::{TestBed, wait_all};
use crate::harness::TrialOutcome;
use crate::inventory::{DRIVER, GpuInventory, attribute};
use crate::runner::Outcome;
use crate::wait::CheckResult;

/// Name of the slice that stands for one of NVIDIA's DRA driver.
const SLICE: &str = "trial-other-allocator";

/// NVIDIA's DRA driver publishes one GPU of a node.
pub(super) async fn dra_driver(test_bed: TestBed) -> TrialOutcome {
    let node = test_bed.node_with("a100", 4).await?;
    let inventory = test_bed.published_gpus().await?;
    let device = inventory.first_of(&node).unwrap_or_default().to_owned();
    let uuid = inventory
        .device(&node, &device)
        .map(|device| attribute(device, "uuid"))
        .unwrap_or_default();
    let all = devices_of(&inventory, &node);

    let slices: Api<ResourceSlice> = Api::all(test_bed.client.clone());
    // Left by an interrupted run.
    let _ = slices.delete(SLICE, &DeleteParams::default()).await;
    slices.create(&PostParams::default(), &nvidia_slice(&node, &uuid)?).await?;
    let outcome = async {
        let others: Vec<_> = all.iter().filter(|name| **name != device).cloned().collect();
        wait_published(&test_bed.client, &node, &others).await?;
        wait_node_event(&test_bed.client, &node, "gpu.nvidia.com").await
    };
    let outcome = outcome.await;
    slices.delete(SLICE, &DeleteParams::default()).await?;
    outcome?;
    wait_published(&test_bed.client, &node, &all).await?;
    Ok(Outcome::Passed(vec![]))
}

/// A device plugin has registered GPUs with the kubelet; no GPU of the node may be published.
pub(super) async fn device_plugin(test_bed: TestBed) -> TrialOutcome {
    let node = test_bed.node_with("a100", 4).await?;
    let all = devices_of(&test_bed.published_gpus().await?, &node);
    let resource = "nvidia.com/gpu";
    set_capacity(&test_bed.client, &node, resource, json!("4")).await?;
    let outcome = async {
        wait_published(&test_bed.client, &node, &[]).await?;
        wait_node_event(&test_bed.client, &node, resource).await
    };
    let outcome = outcome.await;
    set_capacity(&test_bed.client, &node, resource, Value::Null).await?;
    outcome?;
    wait_published(&test_bed.client, &node, &all).await?;
    Ok(Outcome::Passed(vec![]))
}

/// Sets a resource of the node as the kubelet does for a device plugin. The kubelet keeps resources
/// without a known plugin.
pub(super) async fn set_capacity(
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

fn nvidia_slice(node: &str, uuid: &Value) -> serde_json::Result<ResourceSlice> {
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

pub(super) fn devices_of(inventory: &GpuInventory, node: &str) -> Vec<String> {
    let on_node =
        inventory.devices().filter(|((pool, _), _)| inventory.node_of(pool) == Some(node));
    on_node.map(|((_, name), _)| name.clone()).collect()
}

/// Waits until the node publishes exactly these devices.
pub(super) async fn wait_published(
    client: &Client,
    node: &str,
    wanted: &[String],
) -> anyhow::Result<()> {
    let check = |slices: &[ResourceSlice]| {
        let own_slices: Vec<_> =
            slices.iter().filter(|slice| slice.spec.driver == DRIVER).cloned().collect();
        let published = devices_of(&GpuInventory::from_slices(own_slices), node);
        CheckResult::done_if(published == wanted, || published.join(", "))
    };
    let what = format!("{node} to publish [{}]", wanted.join(", "));
    wait_all(Api::all(client.clone()), &what, check).await
}

/// Waits for an event on the Node that names the other allocator.
pub(super) async fn wait_node_event(
    client: &Client,
    node: &str,
    allocator: &str,
) -> anyhow::Result<()> {
    let check = |events: &[Event]| {
        let of_node = events.iter().filter(|event| {
            event.involved_object.kind.as_deref() == Some("Node")
                && event.involved_object.name.as_deref() == Some(node)
        });
        let mut matching =
            of_node.filter(|event| event.reason.as_deref() == Some("GpuNotPublished"));
        match matching
            .find(|event| event.message.as_deref().is_some_and(|text| text.contains(allocator)))
        {
            Some(_) => CheckResult::Done(()),
            None => {
                let names: Vec<_> = events.iter().map(|event| event.name_any()).collect();
                CheckResult::Pending(names.join(", "))
            }
        }
    };
    let what = format!("an event on {node} that names {allocator}");
    let events: Api<Event> = Api::namespaced(client.clone(), "default");
    wait_all(events, &what, check).await
}
