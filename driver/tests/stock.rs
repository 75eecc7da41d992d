//! Mode stock: kube-scheduler allocates the GPUs.

mod fakes;

use std::time::Duration;

use fakes::{
    kubelet::Kubelet,
    node::{Node, asked, configured},
};
use serde_json::{Value, json};
use tessera_driver::{driver::DriverSettings, mode::DriverMode};

fn taints(node: &Node) -> Vec<Vec<String>> {
    let slices = node.api.slices();
    let devices = slices
        .iter()
        .flat_map(|slice| slice["spec"]["devices"].as_array().cloned().unwrap_or_default());
    let key = |taint: &Value| taint["key"].as_str().expect("a key").to_owned();
    devices
        .map(|device| device["taints"].as_array().into_iter().flatten().map(key).collect())
        .collect()
}

async fn taints_are(node: &Node, wanted: &[&str]) {
    let wanted: Vec<String> = wanted.iter().map(|key| format!("gpu.tessera.dev/{key}")).collect();
    let what = format!("taints {wanted:?}");
    let all =
        |found: Vec<Vec<String>>| !found.is_empty() && found.iter().all(|taints| *taints == wanted);
    node.api.wait_for(&what, |_| all(taints(node)).then_some(())).await;
}

/// Changes a slice, and waits until the driver has restored it.
async fn sees_slices(node: &Node) {
    let name = node.api.slices()[0]["metadata"]["name"].as_str().expect("a name").to_owned();
    node.api.edit_slice(&name, |slice| {
        slice["metadata"]["annotations"]["gpu.tessera.dev/topology"] = json!("nonsense")
    });
    let is_right =
        |slice: &Value| slice["metadata"]["annotations"]["gpu.tessera.dev/topology"].is_null();
    node.api.wait_for("the restored slice", |api| is_right(&api.slices()[0]).then_some(())).await;
}

async fn start(node: &Node, mode: DriverMode) -> tessera_driver::driver::Driver {
    let settings = DriverSettings { mode, ..node.settings() };
    node.start_as(settings).await
}

#[tokio::test]
async fn change_from_stock_to_managed_waits_for_the_drain() {
    let node = Node::with_gpus(2);
    let driver = start(&node, DriverMode::Stock).await;
    taints_are(&node, &[]).await;
    driver.stop().await;

    let driver = start(&node, DriverMode::Managed).await;
    taints_are(&node, &["managed", "leaving-stock"]).await;
    node.api.wipe_slices();
    taints_are(&node, &["managed", "leaving-stock"]).await;
    driver.stop().await;

    // A restart restarts the wait.
    let _driver = start(&node, DriverMode::Managed).await;
    sees_slices(&node).await;
    tokio::time::pause();
    // Real time has passed before the clock was paused.
    tokio::time::advance(Duration::from_secs(500)).await;
    assert_eq!(taints(&node)[0].len(), 2, "{:?}", taints(&node));
    tokio::time::advance(Duration::from_secs(101)).await;
    taints_are(&node, &["managed"]).await;
}

#[tokio::test]
async fn change_from_managed_to_stock_does_not_wait() {
    let node = Node::with_gpus(1);
    let driver = start(&node, DriverMode::Managed).await;
    taints_are(&node, &["managed"]).await;
    driver.stop().await;
    let _driver = start(&node, DriverMode::Stock).await;
    taints_are(&node, &[]).await;
}

#[tokio::test]
async fn refuses_controller_features_with_field_and_advice() {
    let node = Node::with_gpus(1);
    let driver = start(&node, DriverMode::Managed).await;
    taints_are(&node, &["managed"]).await;
    let kubelet = Kubelet::register(&node.path("kubelet")).await;
    node.api.put_claim(configured("before", &[(0, 1, 0)], &json!({"memory": {"percent": 10}})));
    let before = kubelet.prepare(asked("before")).await.expect("allocated by the controller");
    driver.stop().await;

    let _driver = start(&node, DriverMode::Stock).await;
    taints_are(&node, &[]).await;
    let kubelet = Kubelet::register(&node.path("kubelet")).await;
    assert_eq!(kubelet.prepare(asked("before")).await.expect("unchanged"), before);
    let configs = [
        ("memory.percent", json!({"memory": {"percent": 25}})),
        ("exclusive", json!({"exclusive": true})),
        ("placement.node", json!({"placement": {"node": "Spread"}})),
        ("placement.device", json!({"placement": {"device": "Binpack"}})),
    ];
    for (field, fields) in configs {
        node.api.put_claim(configured("after", &[(0, 1, 0)], &fields));
        let refused = kubelet.prepare(asked("after")).await.expect_err(field);
        assert!(refused.contains(field) && refused.contains("mode=managed"), "{refused}");
    }
    let event = node.api.wait_for("an event", |api| api.events().first().cloned()).await;
    let note = event["note"].as_str().expect("a note");
    assert!(note.contains("capacity.requests.memory"), "{note}");
    node.api.put_claim(configured("plain", &[(0, 1, 0)], &json!({"sharing": "Intercept"})));
    kubelet.prepare(asked("plain")).await.expect("needs no controller");
    node.api.put_claim(configured(
        "spills",
        &[(0, 1, 0)],
        &json!({"memory": {"oversubscribe": true}}),
    ));
    kubelet.prepare(asked("spills")).await.expect("needs no controller");
}

#[tokio::test]
async fn burst_of_claims_causes_few_slice_writes() {
    let node = Node::with_gpus(4);
    let order = tessera_api::slice::DeviceOrder::FreeFirst;
    let settings =
        DriverSettings { mode: DriverMode::Stock, device_order: order, ..node.settings() };
    let driver = node.start_as(settings).await;
    taints_are(&node, &[]).await;
    let kubelet = Kubelet::register(&node.path("kubelet")).await;
    for number in 0..16 {
        let name = format!("claim-{number}");
        kubelet.prepare(node.allocate(&name, &[(number % 4, 1, 0)])).await.expect("prepared");
    }
    let metrics = driver.metrics().render();
    let patches = metrics
        .lines()
        .find_map(|line| line.strip_prefix("tessera_driver_slice_writes_total{verb=\"Patch\"} "));
    let patches: u32 = patches.unwrap_or("0").parse().expect("a number");
    assert!(patches <= 4, "{patches} writes for 16 claims");
}
