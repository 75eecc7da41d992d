//! The fence as a DeviceTaintRule: slices have no managed taint, and are published once the rule
//! exists.

mod fakes;

use std::time::Duration;

use fakes::node::Node;
use serde_json::{Value, json};
use tessera_driver::driver::{Driver, DriverSettings};
use tessera_driver::mode::{DriverMode, FenceKind};

const RULE: &str = "tessera-fence";

fn fence() -> Value {
    let taint = json!({"key": "gpu.tessera.dev/managed", "effect": "NoSchedule"});
    json!({"deviceSelector": {"driver": "gpu.tessera.dev"}, "taint": taint})
}

async fn start(node: &Node, fence: FenceKind) -> Driver {
    node.start_as(DriverSettings { fence, ..node.settings() }).await
}

/// Waits until all devices have these taints, and their slices this fence.
async fn published(node: &Node, taints: &[&str], fence: Option<&str>) {
    let is_right = |slice: &Value| {
        let annotation = slice["metadata"]["annotations"]["gpu.tessera.dev/fence"].as_str();
        let devices = slice["spec"]["devices"].as_array().expect("devices");
        annotation == fence
            && devices.iter().all(|device| {
                let keys = device["taints"].as_array().into_iter().flatten();
                keys.map(|taint| taint["key"].as_str().expect("a key"))
                    .eq(taints.iter().map(|key| format!("gpu.tessera.dev/{key}")))
            })
    };
    let what = format!("slices with taints {taints:?} and fence {fence:?}");
    let is_published = |slices: Vec<Value>| !slices.is_empty() && slices.iter().all(is_right);
    node.api.wait_for(&what, |api| is_published(api.slices()).then_some(())).await;
}

#[tokio::test]
async fn nothing_is_published_before_the_rule_exists() {
    let node = Node::with_gpus(2);
    let _driver = start(&node, FenceKind::Rule).await;
    node.api.wait_for("a read", |api| (api.rule_reads() > 0).then_some(())).await;
    // The pauses between reads.
    tokio::time::pause();
    let wrong = [
        ("deviceSelector", Value::Null),
        ("deviceSelector", json!({"driver": "gpu.tessera.dev", "pool": "node-b"})),
        ("taint", json!({"key": "gpu.tessera.dev/managed", "effect": "None"})),
    ];
    for (field, value) in wrong {
        let mut spec = fence();
        spec[field] = value;
        node.api.put_rule(RULE, spec);
        // The first may have begun before.
        let reads = node.api.rule_reads() + 2;
        node.api.wait_for("reads", |api| (api.rule_reads() >= reads).then_some(())).await;
        assert!(node.api.slices().is_empty(), "{field}");
    }
    node.api.put_rule(RULE, fence());
    published(&node, &[], Some("DeviceTaintRule")).await;
}

#[tokio::test]
async fn change_between_taint_and_rule_leaves_no_gap() {
    let node = Node::with_gpus(2);
    let driver = start(&node, FenceKind::Taint).await;
    published(&node, &["managed"], None).await;
    assert_eq!(node.api.rule_reads(), 0);
    driver.stop().await;

    let driver = start(&node, FenceKind::Rule).await;
    node.api.wait_for("a read", |api| (api.rule_reads() > 0).then_some(())).await;
    published(&node, &["managed"], None).await;
    node.api.put_rule(RULE, fence());
    published(&node, &[], Some("DeviceTaintRule")).await;
    driver.stop().await;

    let _driver = start(&node, FenceKind::Taint).await;
    published(&node, &["managed"], None).await;
}

#[tokio::test]
async fn change_from_stock_to_rule_waits_for_the_drain() {
    let node = Node::with_gpus(1);
    node.api.put_rule(RULE, fence());
    let stock = DriverSettings { mode: DriverMode::Stock, ..node.settings() };
    let driver = node.start_as(stock).await;
    published(&node, &[], None).await;
    driver.stop().await;
    let _driver = start(&node, FenceKind::Rule).await;
    published(&node, &["leaving-stock"], Some("DeviceTaintRule")).await;
    node.api.wipe_slices();
    published(&node, &["leaving-stock"], Some("DeviceTaintRule")).await;
    tokio::time::pause();
    tokio::time::advance(Duration::from_secs(601)).await;
    published(&node, &[], Some("DeviceTaintRule")).await;
}

#[tokio::test]
async fn gpus_are_withdrawn_while_the_rule_is_missing() {
    let node = Node::with_gpus(2);
    node.api.put_rule(RULE, fence());
    let _driver = start(&node, FenceKind::Rule).await;
    published(&node, &[], Some("DeviceTaintRule")).await;
    node.api.remove_rule(RULE);
    node.gpus.lose(0);
    let count = |slices: Vec<Value>| slices[0]["spec"]["devices"].as_array().map(Vec::len);
    node.api.wait_for("one GPU", |api| (count(api.slices()) == Some(1)).then_some(())).await;
}
