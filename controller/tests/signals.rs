//! Signals of kube-scheduler about pods that it cannot place where their devices are. Time is
//! simulated.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod fake_api;

use fake_api::controller::{
    Controller, add_node, allocation, claim_writes, clear, cluster, event, place, reserve_and_bind,
};
use fake_api::objects::{claim, nominated, pod, unschedulable};
use serde_json::Value;
use tokio::time::{Duration, Instant};

const NO_PORT: &str =
    "0/2 nodes are available: 1 node(s) didn't have free ports for the requested pod ports.";

async fn seconds(n: u64) {
    tokio::time::sleep(Duration::from_secs(n)).await;
}

#[tokio::test(start_paused = true)]
async fn late_nomination_keeps_the_node_of_a_cleared_claim() {
    let api = cluster(1);
    api.put("resourceclaims", claim("c", "19Gi"));
    api.put("pods", pod("p", &["c"]));
    let controller = Controller::start(&api);
    api.until("an allocation", |api| allocation(api, "c")).await;
    add_node(&api, "node-b", 1);
    seconds(1).await;
    // In one cycle kube-scheduler clears the claim, evicts the victim, and writes the condition
    // with the node last of all.
    clear(&api, "c");
    tokio::time::sleep(Duration::from_millis(500)).await;
    api.put("pods", nominated(unschedulable(pod("p", &["c"]), "preemption"), "node-a"));
    api.until("another allocation", |api| allocation(api, "c")).await;
    assert_eq!(place(&api, "c").unwrap(), "node-a");
    controller.stop().await;
}

#[tokio::test(start_paused = true)]
async fn second_claim_follows_a_cleared_one_to_another_node() {
    let api = cluster(1);
    for name in ["one", "two"] {
        api.put("resourceclaims", claim(name, "19Gi"));
    }
    api.put("pods", pod("p", &["one", "two"]));
    let controller = Controller::start(&api);
    api.until("allocations", |api| allocation(api, "one").and(allocation(api, "two"))).await;
    add_node(&api, "node-b", 1);
    seconds(1).await;
    clear(&api, "one");
    let moved = |api: &fake_api::FakeApi, name| place(api, name).as_deref() == Some("node-b");
    api.until("both elsewhere", |api| (moved(api, "one") && moved(api, "two")).then_some(())).await;
    controller.stop().await;
}

#[tokio::test(start_paused = true)]
async fn nominated_pod_keeps_claims_and_regains_the_cleared_one() {
    let api = cluster(1);
    for (name, memory) in [("one", "40Gi"), ("two", "20Gi"), ("victim", "60Gi")] {
        api.put("resourceclaims", claim(name, memory));
    }
    api.put("pods", pod("p", &["one", "two"]));
    let controller = Controller::start(&api);
    let before =
        api.until("allocations", |api| allocation(api, "one").and(allocation(api, "two"))).await;
    add_node(&api, "node-b", 1);
    api.put("pods", nominated(pod("p", &["one", "two"]), "node-a"));
    clear(&api, "one");
    // Something takes the room meanwhile and goes later, as a victim does that ends slowly.
    let mut blocker = fake_api::objects::allocated(
        claim("victim", "60Gi"),
        fake_api::objects::given("node-a", "gpu-0", "60Gi"),
    );
    blocker = fake_api::objects::reserved(blocker, &["victim"]);
    api.put("resourceclaims", blocker);
    api.put("pods", fake_api::objects::bound(pod("victim", &["victim"]), "node-a"));
    seconds(60).await;
    assert_eq!(
        allocation(&api, "two"),
        Some(before),
        "never deallocated while a node is nominated"
    );
    assert_eq!(allocation(&api, "one"), None);
    api.delete("pods", "default", "victim");
    clear(&api, "victim");
    api.until("the first one", |api| allocation(api, "one")).await;
    assert_eq!(place(&api, "one").unwrap(), "node-a");
    controller.stop().await;
}

#[tokio::test(start_paused = true)]
async fn nothing_is_released_while_a_node_is_nominated() {
    let api = cluster(1);
    api.put("resourceclaims", claim("c", "19Gi"));
    api.put("pods", pod("p", &["c"]));
    let controller = Controller::start(&api);
    api.until("an allocation", |api| allocation(api, "c")).await;
    let failed = unschedulable(pod("p", &["c"]), NO_PORT);
    api.put("pods", nominated(failed.clone(), "node-a"));
    let before = claim_writes(&api, "c").len();
    seconds(600).await;
    assert_eq!(claim_writes(&api, "c").len(), before);
    api.put("pods", failed);
    api.until("its end", |api| allocation(api, "c").is_none().then_some(())).await;
    controller.stop().await;
}

#[tokio::test(start_paused = true)]
async fn deallocated_claim_is_held_for_every_pod() {
    let api = cluster(1);
    add_node(&api, "node-b", 1);
    api.put("resourceclaims", claim("c", "19Gi"));
    api.put("pods", pod("a", &["c"]));
    // Waits for the same claim; kube-scheduler may be about to bind it.
    api.put("pods", pod("b", &["c"]));
    let controller = Controller::start(&api);
    api.until("an allocation", |api| allocation(api, "c")).await;
    api.put("pods", unschedulable(pod("a", &["c"]), NO_PORT));
    api.until("its end", |api| allocation(api, "c").is_none().then_some(())).await;
    let ended = Instant::now();
    api.until("another allocation", |api| allocation(api, "c")).await;
    assert!(ended.elapsed() >= Duration::from_secs(2), "{:?}", ended.elapsed());
    let patch = &claim_writes(&api, "c")[2];
    assert_eq!(patch["status"]["allocation"], Value::Null);
    assert_eq!(patch["status"].get("reservedFor"), None, "an unreserved claim only");
    assert!(patch["metadata"]["resourceVersion"].is_string());
    controller.stop().await;
}

#[tokio::test(start_paused = true)]
async fn failure_of_second_pod_keeps_the_claim_of_the_first() {
    let api = cluster(1);
    api.put("resourceclaims", claim("c", "19Gi"));
    api.put("pods", pod("a", &["c"]));
    let controller = Controller::start(&api);
    api.until("an allocation", |api| allocation(api, "c")).await;
    let before = claim_writes(&api, "c").len();
    // Not reserved yet: the first pod may be on its way.
    let mut late = unschedulable(pod("b", &["c"]), "0/1 nodes are available: 1 Insufficient cpu.");
    late["metadata"]["creationTimestamp"] = "2026-11-21T00:00:00Z".into();
    api.put("pods", late.clone());
    seconds(300).await;
    assert_eq!(claim_writes(&api, "c").len(), before);
    // And reserved.
    reserve_and_bind(&api, "a", &["c"]);
    late["status"]["conditions"][0]["message"] = NO_PORT.into();
    api.put("pods", late);
    seconds(300).await;
    assert_eq!(claim_writes(&api, "c").len(), before);
    assert_eq!(event(&api, "b", "Rescheduling"), None);
    controller.stop().await;
}
