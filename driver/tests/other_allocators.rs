//! GPUs that another allocator publishes are withheld, and an event reports the reason.

mod fakes;

use fakes::{gpus::uuid, node::Node};
use serde_json::{Value, json};
use tessera_driver::{driver::DriverSettings, other_allocators::OtherAllocatorPolicy};

/// Returns the names of published devices.
fn published(node: &Node) -> Vec<String> {
    let slices = node.api.slices();
    let devices = slices
        .iter()
        .flat_map(|slice| slice["spec"]["devices"].as_array().cloned().unwrap_or_default());
    devices.map(|device| device["name"].as_str().expect("a name").to_owned()).collect()
}

fn names<const N: usize>(numbers: [u32; N]) -> Vec<String> {
    numbers.map(|number| uuid(number).device_name().to_string()).to_vec()
}

async fn publishes<const N: usize>(node: &Node, numbers: [u32; N]) {
    let what = format!("{numbers:?} and no others");
    node.api
        .wait_for(&what, |api| {
            let there = !api.slices().is_empty() && published(node) == names(numbers);
            there.then_some(())
        })
        .await;
}

/// Returns a slice of NVIDIA's DRA driver with this GPU.
fn nvidia_slice(node: &str, gpu: u32) -> Value {
    json!({
        "metadata": {"name": "nvidias"},
        "spec": {
            "driver": "gpu.nvidia.com",
            "nodeName": node,
            "pool": {"name": node, "generation": 1, "resourceSliceCount": 1},
            "devices": [{"name": "gpu-0", "attributes": {"uuid": {"string": uuid(gpu).to_string()}}}],
        },
    })
}

#[tokio::test]
async fn device_plugin_withholds_all_gpus_with_event() {
    let node = Node::with_gpus(2);
    let driver = node.start().await;
    publishes(&node, [0, 1]).await;
    node.api.set_capacity("nvidia.com/gpu", "2");
    publishes(&node, []).await;
    let metrics = driver.metrics().render();
    assert!(
        metrics.contains("tessera_driver_unpublished_gpus{reason=\"OtherAllocator\"} 2"),
        "{metrics}"
    );
    let event = node.api.wait_for("an event", |api| api.events().first().cloned()).await;
    assert_eq!(event["reason"], "GpuNotPublished");
    assert_eq!(
        (&event["regarding"]["kind"], &event["regarding"]["name"]),
        (&json!("Node"), &json!("node-a"))
    );
    let note = event["note"].as_str().expect("a note");
    assert!(note.contains("nvidia.com/gpu") && note.contains(uuid(1).as_str()), "{note}");

    node.api.set_capacity("nvidia.com/gpu", "0");
    publishes(&node, [0, 1]).await;
}

#[tokio::test]
async fn other_dra_driver_withholds_its_gpus_of_this_node() {
    let node = Node::with_gpus(2);
    node.api.put_slice(nvidia_slice("node-a", 1));
    let _driver = node.start_as(node.settings()).await;
    publishes(&node, [0]).await;
    node.api.delete_slice("nvidias");
    publishes(&node, [0, 1]).await;
    node.api.put_slice(nvidia_slice("node-b", 0));
    node.api.put_slice(
        json!({"metadata": {"name": "mine"}, "spec": nvidia_slice("node-a", 0)["spec"]}),
    );
    publishes(&node, [1]).await;
}

#[tokio::test]
async fn prepared_claim_stays_and_new_claim_is_refused() {
    let node = Node::with_gpus(1);
    let _driver = node.start().await;
    let kubelet = fakes::kubelet::Kubelet::register(&node.path("kubelet")).await;
    let claim = node.allocate("before", &[(0, 1, 0)]);
    let devices = kubelet.prepare(claim.clone()).await.expect("prepared");
    node.api.set_capacity("nvidia.com/gpu", "1");
    publishes(&node, []).await;
    assert_eq!(kubelet.prepare(claim).await.expect("still prepared"), devices);
    let refused =
        kubelet.prepare(node.allocate("after", &[(0, 1, 0)])).await.expect_err("not its turn");
    assert!(
        refused.contains("another allocator") && refused.contains("nvidia.com/gpu"),
        "{refused}"
    );
}

#[tokio::test]
async fn policy_ignore_publishes_all_gpus() {
    let node = Node::with_gpus(2);
    node.api.set_capacity("nvidia.com/gpu", "2");
    node.api.put_slice(nvidia_slice("node-a", 1));
    let settings =
        DriverSettings { on_other_allocator: OtherAllocatorPolicy::Ignore, ..node.settings() };
    let _driver = node.start_as(settings).await;
    publishes(&node, [0, 1]).await;
}
