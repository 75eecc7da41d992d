//! What kube-scheduler says about pods that it cannot place where their devices are. Time is
//! simulated.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod stand_in;

use serde_json::Value;
use stand_in::controller::{
    Controller, add_node, allocation, claim_writes, clear, cluster, event, place, reserve_and_bind,
};
use stand_in::objects::{claim, nominated, pod, unschedulable};
use tokio::time::{Duration, Instant};

const NO_PORT: &str =
    "0/2 nodes are available: 1 node(s) didn't have free ports for the requested pod ports.";

async fn seconds(n: u64) {
    tokio::time::sleep(Duration::from_secs(n)).await;
}

#[tokio::test(start_paused = true)]
async fn where_preemption_makes_room_the_claim_stays_although_the_nomination_is_told_later() {
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
async fn one_cleared_claim_of_two_takes_the_other_with_it_to_another_node() {
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
    let moved = |api: &stand_in::StandIn, name| place(api, name).as_deref() == Some("node-b");
    api.until("both elsewhere", |api| (moved(api, "one") && moved(api, "two")).then_some(())).await;
    controller.stop().await;
}

#[tokio::test(start_paused = true)]
async fn while_room_is_being_made_the_claims_that_are_left_stay_and_the_cleared_one_comes_back() {
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
    let mut blocker = stand_in::objects::allocated(
        claim("victim", "60Gi"),
        stand_in::objects::given("node-a", "gpu-0", "60Gi"),
    );
    blocker = stand_in::objects::reserved(blocker, &["victim"]);
    api.put("resourceclaims", blocker);
    api.put("pods", stand_in::objects::bound(pod("victim", &["victim"]), "node-a"));
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
async fn nothing_is_taken_back_while_a_node_is_nominated() {
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
async fn after_an_allocation_was_taken_back_the_next_one_waits_for_whichever_pod_it_is() {
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
async fn a_late_pods_failure_never_takes_the_first_ones_claim() {
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
