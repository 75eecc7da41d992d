//! Changes of the sizes of prepared shares.

mod fakes;

use std::{fs, os::unix::fs::MetadataExt, time::Duration};

use fakes::{
    advance,
    api::Api,
    gpus::uuid,
    kubelet::Kubelet,
    ledger::{Ledger, MIB, path, share},
    node::{Node, claim, configured, share_id, uid},
};
use serde_json::{Value, json};
use tessera_driver::{driver::Driver, state::journal::Journal};
use tessera_intercept_abi::Grant;

/// A little more than the pause before a change is tried again.
const RETRY: Duration = Duration::from_secs(6);

/// A node with one GPU and the prepared claim `a`: 4 GiB and 20 percent.
async fn with_share(node: &Node) -> (Driver, Kubelet) {
    let driver = node.start().await;
    let kubelet = Kubelet::register(&node.path("kubelet")).await;
    kubelet.prepare(node.allocate("a", &[(0, 4, 20)])).await.expect("prepared");
    (driver, kubelet)
}

fn size(memory: &str, cores: &str) -> Value {
    json!({
        "request": "gpu-0", "pool": "node-a", "device": uuid(0).device_name(),
        "shareID": share_id("a", 0), "memory": memory, "cores": cores,
    })
}

/// Has the claim count this size.
fn count(node: &Node, memory: &str, cores: &str) {
    count_in(node, claim("a", &[(0, 4, 20)]), memory, cores);
}

fn count_in(node: &Node, mut object: Value, memory: &str, cores: &str) {
    object["status"]["devices"] = json!([{
        "driver": "gpu.tessera.dev", "pool": "node-a", "device": uuid(0).device_name(),
        "shareID": share_id("a", 0),
        "data": {
            "apiVersion": "gpu.tessera.dev/v1alpha1", "kind": "GpuShareSize",
            "memory": memory, "cores": cores,
        },
    }]);
    node.api.put_claim(object);
}

/// Grants the driver a size.
fn grant(node: &Node, number: i64, memory: &str, cores: &str) {
    grant_size(node, number, size(memory, cores));
}

fn grant_size(node: &Node, number: i64, size: Value) {
    node.api.put_resize("a", resize(number, size));
}

/// Returns the GpuResize with this grant.
fn resize(number: i64, size: Value) -> Value {
    json!({
        "apiVersion": "gpu.tessera.dev/v1alpha1", "kind": "GpuResize",
        "metadata": {"name": "a", "namespace": "ns", "uid": "uid-of-resize", "generation": number},
        "spec": {
            "requests": [{"name": "gpu-0", "memory": size["memory"], "cores": size["cores"]}],
        },
        "status": {
            "node": "node-a", "claimUID": uid("a"), "grant": number, "granted": [size],
        },
    })
}

/// Returns the status of the condition Applied, its reason and message, and the applied sizes, once
/// the driver has answered the grant of this number.
async fn answer(node: &Node, number: i64) -> (bool, String, String, Value) {
    node.api
        .wait_for("the driver's report", |api| {
            let status = api.resize("a")["status"].clone();
            let conditions = status["conditions"].as_array()?;
            let condition = conditions.iter().find(|one| one["type"] == "Applied")?;
            let text = |field: &str| condition[field].as_str().expect("a text").to_owned();
            (status["appliedGrant"] == number && condition["observedGeneration"] == number).then(
                || {
                    (
                        text("status") == "True",
                        text("reason"),
                        text("message"),
                        status["applied"].clone(),
                    )
                },
            )
        })
        .await
}

/// Returns the memory in GiB and the cores of the share's grant, and its number of changes.
fn granted(node: &Node) -> (u64, u32, u64) {
    let page = fs::read(node.paths().grant(&share("a"))).expect("a grant");
    let grant = Grant::parse(&page).expect("a grant");
    (grant.memory_limit_bytes >> 30, grant.cores_percent, grant.sequence)
}

fn journal(node: &Node) -> Journal {
    let text = fs::read_to_string(node.paths().journal()).expect("a journal");
    let mut object: Value = serde_json::from_str(&text).expect("JSON");
    object.as_object_mut().expect("an object").remove("version");
    serde_json::from_value(object).expect("a journal")
}

#[tokio::test]
async fn a_grant_that_overtakes_a_report_is_applied() {
    let node = Node::with_gpus(1);
    let (driver, _kubelet) = with_share(&node).await;
    count(&node, "8Gi", "50");
    grant(&node, 1, "8Gi", "50");
    assert!(answer(&node, 1).await.0);
    // The second grant changes nothing. Another follows before the answer to it is stored.
    node.api.overtake_report(resize(3, size("6Gi", "30")));
    grant(&node, 2, "8Gi", "50");
    assert!(answer(&node, 3).await.0);
    assert_eq!(granted(&node).0, 6);
    driver.stop().await;
}

#[tokio::test]
async fn a_share_grows_in_place() {
    let node = Node::with_gpus(1);
    let (driver, kubelet) = with_share(&node).await;
    let inode = fs::metadata(node.paths().grant(&share("a"))).expect("a grant").ino();
    count(&node, "8Gi", "50");
    grant(&node, 1, "8Gi", "50");
    let (is_applied, reason, _, applied) = answer(&node, 1).await;
    assert!(is_applied);
    assert_eq!((reason.as_str(), applied), ("Applied", json!([size("8Gi", "50")])));
    assert_eq!(granted(&node), (8, 50, 2));
    let after = fs::metadata(node.paths().grant(&share("a"))).expect("a grant").ino();
    assert_eq!(after, inode, "containers have it mounted");
    // Another pod that shares the claim.
    kubelet.prepare(fakes::node::asked("a")).await.expect("prepared");
    assert_eq!(granted(&node), (8, 50, 2));
    driver.stop().await;
}

#[tokio::test]
async fn a_driver_that_restarts_keeps_the_size() {
    let node = Node::with_gpus(1);
    let (driver, _) = with_share(&node).await;
    count(&node, "8Gi", "50");
    grant(&node, 1, "8Gi", "50");
    assert!(answer(&node, 1).await.0);
    driver.stop().await;
    fs::remove_file(node.paths().grant(&share("a"))).expect("removed");
    let driver = node.start().await;
    assert_eq!((granted(&node).0, granted(&node).1), (8, 50), "it is restored from the journal");
    driver.stop().await;
    fs::write(node.paths().journal(), "unreadable").expect("written");
    let driver = node.start().await;
    let record = &journal(&node).claims[uid("a").as_str()];
    assert_eq!(record.shares[0].memory_bytes, 8 << 30, "it is rebuilt from what the claim counts");
    driver.stop().await;
}

#[tokio::test]
async fn a_claim_is_prepared_with_the_size_that_counts() {
    let node = Node::with_gpus(1);
    let driver = node.start().await;
    let kubelet = Kubelet::register(&node.path("kubelet")).await;
    count(&node, "8Gi", "50");
    kubelet.prepare(fakes::node::asked("a")).await.expect("prepared");
    assert_eq!(granted(&node), (8, 50, 0));
    driver.stop().await;
}

#[tokio::test]
async fn more_than_the_claim_counts_is_never_applied() {
    let node = Node::with_gpus(1);
    let (driver, _) = with_share(&node).await;
    grant(&node, 1, "8Gi", "20");
    let (is_applied, reason, _, applied) = answer(&node, 1).await;
    assert!(!is_applied);
    assert_eq!((reason.as_str(), applied), ("NotCounted", json!([size("4Gi", "20")])));
    assert_eq!(granted(&node), (4, 20, 0));
    count(&node, "8Gi", "20");
    advance(RETRY).await;
    node.api.wait_for("the report", |_| (granted(&node).0 == 8).then_some(())).await;
    driver.stop().await;
}

#[tokio::test]
async fn a_share_shrinks_once_its_memory_is_free() {
    let node = Node::with_gpus(1);
    let (driver, _) = with_share(&node).await;
    let ledger = Ledger::of(&node, "a");
    ledger.process(0, 100, 3072 * MIB);
    let alive = Ledger::lives(&node, "a", 0);
    grant(&node, 1, "2Gi", "10");
    let (is_applied, reason, message, applied) = answer(&node, 1).await;
    assert!(!is_applied);
    assert_eq!((reason.as_str(), applied), ("MemoryInUse", json!([size("4Gi", "20")])));
    assert!(message.ends_with("uses 3Gi, more than the new limit of 2Gi"), "{message}");
    assert_eq!(granted(&node), (4, 20, 0), "the limit was not even tried");
    drop(alive);
    advance(RETRY).await;
    node.api
        .wait_for("the report", |api| {
            (api.resize("a")["status"]["applied"] == json!([size("2Gi", "10")])).then_some(())
        })
        .await;
    assert_eq!(granted(&node), (2, 10, 2));
    driver.stop().await;
}

#[tokio::test]
async fn a_ledger_that_cannot_be_read_keeps_its_limit() {
    let node = Node::with_gpus(1);
    let (driver, _) = with_share(&node).await;
    fs::write(path(&node, "a"), "not a ledger").expect("written");
    grant(&node, 1, "2Gi", "10");
    let (is_applied, reason, message, _) = answer(&node, 1).await;
    assert!(!is_applied);
    assert_eq!(reason, "Refused");
    assert!(message.starts_with("cannot read the memory in use of share"), "{message}");
    assert_eq!(granted(&node), (4, 20, 0));
    driver.stop().await;
}

#[tokio::test]
async fn a_gpu_without_room_refuses_after_some_attempts() {
    let node = Node::with_gpus(1);
    let (driver, kubelet) = with_share(&node).await;
    // The controller would not count it.
    kubelet.prepare(node.allocate("b", &[(0, 10, 20)])).await.expect("prepared");
    count(&node, "8Gi", "20");
    grant(&node, 1, "8Gi", "20");
    let (_, reason, message, _) = answer(&node, 1).await;
    assert_eq!(reason, "Failed");
    assert!(message.contains("insufficient memory on GPU"), "{message}");
    let is_refused = |api: &Api| api.resize("a")["status"]["conditions"][0]["reason"] == "Refused";
    // An attempt has no trace of its own, so time goes on while one is under way.
    while !is_refused(&node.api) {
        advance(Duration::from_secs(1)).await;
    }
    assert_eq!(granted(&node), (4, 20, 0));
    driver.stop().await;
}

#[tokio::test]
async fn a_grant_for_another_allocation_waits_for_its_prepare() {
    let node = Node::with_gpus(1);
    let (driver, kubelet) = with_share(&node).await;
    // The claim was allocated again, and the kubelet has not unprepared it.
    let mut again = claim("a", &[(0, 4, 20)]);
    let result = &mut again["status"]["allocation"]["devices"]["results"][0];
    result["shareID"] = share_id("b", 0).into();
    node.api.put_claim(again.clone());
    let reads = node.api.claim_reads();
    let mut granted = size("2Gi", "10");
    granted["shareID"] = share_id("b", 0).into();
    grant_size(&node, 1, granted);
    kubelet.unprepare(fakes::node::asked("a")).await.expect("unprepared");
    assert_eq!(node.api.claim_reads(), reads, "nothing is to be done about it");
    kubelet.prepare(fakes::node::asked("a")).await.expect("prepared");
    node.api
        .wait_for("the report", |api| {
            let status = &api.resize("a")["status"];
            (status["appliedGrant"] == 1 && status["conditions"][0]["status"] == "True")
                .then_some(())
        })
        .await;
    driver.stop().await;
}

#[tokio::test]
async fn a_share_without_cores_gets_a_cap_with_them() {
    let node = Node::with_gpus(1);
    let driver = node.start().await;
    let kubelet = Kubelet::register(&node.path("kubelet")).await;
    kubelet.prepare(node.allocate("a", &[(0, 4, 0)])).await.expect("prepared");
    count_in(&node, claim("a", &[(0, 4, 0)]), "4Gi", "30");
    grant(&node, 1, "4Gi", "30");
    assert!(answer(&node, 1).await.0);
    let page = fs::read(node.paths().grant(&share("a"))).expect("a grant");
    let policy = Grant::parse(&page).expect("a grant").policy;
    assert_eq!(policy, tessera_intercept_abi::ComputePolicy::Balance);
    driver.stop().await;
}

#[tokio::test]
async fn a_limit_below_the_reservation_stays() {
    let node = Node::with_gpus(1);
    let driver = node.start().await;
    let kubelet = Kubelet::register(&node.path("kubelet")).await;
    let limited = || configured("a", &[(0, 4, 20)], &json!({"memory": {"limit": "3Gi"}}));
    node.api.put_claim(limited());
    kubelet.prepare(fakes::node::asked("a")).await.expect("prepared");
    assert_eq!(granted(&node).0, 3);
    count_in(&node, limited(), "8Gi", "20");
    grant(&node, 1, "8Gi", "20");
    assert!(answer(&node, 1).await.0);
    assert_eq!(granted(&node).0, 3);
    let reserved = journal(&node).claims[uid("a").as_str()].shares[0].reservation();
    assert_eq!(reserved.memory_bytes, 8 << 30);
    driver.stop().await;
}
