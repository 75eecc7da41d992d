//! Pods that are bound to one node while their claim is on another, or nowhere. Time is simulated.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod fake_api;

use fake_api::FakeApi;
use fake_api::controller::{
    Controller, add_node, allocation, claim_writes, clear, cluster, event, place, reserve,
    reserve_and_bind,
};
use fake_api::objects::{allocated, assigned, bound, claim, given, pod, reserved};
use serde_json::{Value, json};
use tokio::time::{Duration, Instant};

/// Two nodes with a GPU each; claim `c` is allocated on `node-b` and pod `p` bound to `node-a`, as
/// after a PreBind that met a conflict and reserved the allocation that it found.
fn split(consumers: &[&str]) -> FakeApi {
    let api = cluster(1);
    add_node(&api, "node-b", 1);
    let there = allocated(claim("c", "19Gi"), given("node-b", "gpu-0", "19Gi"));
    api.put("resourceclaims", reserved(there, consumers));
    api.put("pods", assigned(pod("p", &["c"]), "node-a"));
    api
}

async fn seconds(n: u64) {
    tokio::time::sleep(Duration::from_secs(n)).await;
}

#[tokio::test(start_paused = true)]
async fn unused_misplaced_claim_is_moved_to_its_pod() {
    let api = split(&["p"]);
    let controller = Controller::start(&api);
    api.until("the end of the allocation there", |api| {
        allocation(api, "c").is_none().then_some(())
    })
    .await;
    let cleared = Instant::now();
    let writes = claim_writes(&api, "c");
    assert_eq!(
        writes[0]["status"],
        json!({"allocation": null, "devices": null, "reservedFor": null})
    );
    assert!(
        writes[0]["metadata"]["resourceVersion"].is_string(),
        "no write without a precondition"
    );
    api.until("an allocation", |api| allocation(api, "c")).await;
    assert!(
        cleared.elapsed() >= Duration::from_secs(2),
        "another PreBind has to notice: {:?}",
        cleared.elapsed()
    );
    assert_eq!(place(&api, "c").unwrap(), "node-a");
    // kube-controller-manager reserves for bound pods.
    reserve(&api, "p", "c");
    api.put("pods", bound(pod("p", &["c"]), "node-a"));
    // Where it was there is room again.
    api.put("resourceclaims", claim("large", "80Gi"));
    api.put("pods", pod("large", &["large"]));
    api.until("another allocation", |api| allocation(api, "large")).await;
    assert_eq!(place(&api, "large").unwrap(), "node-b");
    seconds(300).await;
    assert_eq!(claim_writes(&api, "c").len(), 2);
    let note = event(&api, "p", "ClaimNodeMismatch").unwrap();
    assert!(
        note.contains("bound to node node-a") && note.contains("allocated on node node-b"),
        "{note}"
    );
    let events = api.list("events");
    let told = events.iter().find(|e| e["reason"] == "ClaimNodeMismatch").unwrap();
    assert_eq!(told["related"]["name"], "node-a", "{told}");
    assert_eq!(controller.metrics.misplaced.get(), 0);
    controller.stop().await;
}

#[tokio::test(start_paused = true)]
async fn misplaced_claim_that_may_be_in_use_stays() {
    // It is also reserved by a pod that is bound there, one that may yet be, one that we do not
    // know.
    for other in ["there", "waiting", "unknown"] {
        let api = split(&["p", other]);
        match other {
            "there" => drop(api.put("pods", assigned(pod(other, &["c"]), "node-b"))),
            "waiting" => drop(api.put("pods", pod(other, &["c"]))),
            _ => {}
        }
        let controller = Controller::start(&api);
        seconds(600).await;
        assert_eq!(claim_writes(&api, "c"), [Value::Null; 0], "{other}");
        let note = event(&api, "p", "ClaimNodeMismatch").unwrap();
        assert!(note.contains("another pod may be using it; delete the pod"), "{note}");
        assert_eq!(controller.metrics.misplaced.get(), 1);
        controller.stop().await;
    }
}

#[tokio::test(start_paused = true)]
async fn claim_reserved_by_a_pod_group_stays() {
    let api = split(&["p"]);
    let mut object = api.get("resourceclaims", "default", "c").unwrap();
    object["status"]["reservedFor"][0] = json!({"apiGroup": "scheduling.k8s.io", "resource": "podgroups", "name": "p", "uid": "uid-p"});
    api.put("resourceclaims", object);
    let controller = Controller::start(&api);
    seconds(600).await;
    assert_eq!(claim_writes(&api, "c"), [Value::Null; 0]);
    controller.stop().await;
}

#[tokio::test(start_paused = true)]
async fn pod_joining_a_claim_during_its_move_keeps_it() {
    let api = split(&["p"]);
    let mut met = false;
    api.fault(move |store, request| {
        // kube-scheduler's PreBind for a second pod is faster.
        if request.path.ends_with("/status") && !std::mem::replace(&mut met, true) {
            let object = store.get("resourceclaims", "default", "c").unwrap().clone();
            store.put("resourceclaims", reserved(object, &["p", "q"]));
            store.put("pods", assigned(pod("q", &["c"]), "node-b"));
        }
        None
    });
    let controller = Controller::start(&api);
    seconds(600).await;
    assert_eq!(place(&api, "c").unwrap(), "node-b");
    assert_eq!(claim_writes(&api, "c").len(), 1, "one try, which conflicted");
    controller.stop().await;
}

#[tokio::test(start_paused = true)]
async fn claim_of_bound_pod_waits_for_room_on_its_node() {
    let api = cluster(1);
    add_node(&api, "node-b", 1);
    let large = allocated(claim("large", "70Gi"), given("node-a", "gpu-0", "70Gi"));
    api.put("resourceclaims", reserved(large, &["large"]));
    api.put("pods", bound(pod("large", &["large"]), "node-a"));
    // Bound past kube-scheduler, with nothing allocated; a second pod that waits for the claim
    // could go to the other node.
    api.put("resourceclaims", claim("c", "19Gi"));
    api.put("pods", assigned(pod("p", &["c"]), "node-a"));
    api.put("pods", pod("q", &["c"]));
    let controller = Controller::start(&api);
    seconds(60).await;
    assert_eq!(claim_writes(&api, "c"), [Value::Null; 0]);
    let note = event(&api, "p", "ClaimNodeMismatch").unwrap();
    assert!(note.contains("insufficient memory (9Gi short)"), "{note}");
    assert!(note.contains("make room on the node, or delete the pod"), "{note}");
    let note = event(&api, "q", "ClaimInUse").unwrap();
    assert!(note.contains("on the node of that pod first"), "{note}");
    api.delete("pods", "default", "large");
    clear(&api, "large");
    api.until("an allocation", |api| allocation(api, "c")).await;
    assert_eq!(place(&api, "c").unwrap(), "node-a");
    controller.stop().await;
}

#[tokio::test(start_paused = true)]
async fn claim_cleared_under_running_containers_is_restored() {
    let api = cluster(4);
    api.put("resourceclaims", claim("c", "19Gi"));
    api.put("pods", pod("p", &["c"]));
    let controller = Controller::start(&api);
    let before = api.until("an allocation", |api| allocation(api, "c")).await;
    reserve_and_bind(&api, "p", &["c"]);
    seconds(1).await;
    clear(&api, "c");
    let after = api.until("an allocation", |api| allocation(api, "c")).await;
    assert_eq!(after, before, "the containers go on with it");
    seconds(1).await;
    assert_eq!(controller.metrics.repairs.get(), 1);
    controller.stop().await;
}

#[tokio::test(start_paused = true)]
async fn unknown_devices_of_running_containers_are_only_reported() {
    let api = cluster(1);
    api.put("resourceclaims", claim("c", "19Gi"));
    api.put("pods", bound(pod("p", &["c"]), "node-a"));
    let controller = Controller::start(&api);
    seconds(600).await;
    assert_eq!(claim_writes(&api, "c"), [Value::Null; 0]);
    let note = event(&api, "p", "ClaimNodeMismatch").unwrap();
    assert!(note.contains("not allocated; containers of the pod have run"), "{note}");
    assert_eq!(api.list("events").len(), 1, "reported once");
    api.delete("pods", "default", "p");
    seconds(10).await;
    assert_eq!(controller.metrics.misplaced.get(), 0);
    controller.stop().await;
}

#[tokio::test(start_paused = true)]
async fn claim_ended_by_kube_controller_manager_is_no_failure() {
    let api = cluster(1);
    api.put("resourceclaims", claim("c", "19Gi"));
    api.put("pods", pod("p", &["c"]));
    let controller = Controller::start(&api);
    api.until("an allocation", |api| allocation(api, "c")).await;
    reserve_and_bind(&api, "p", &["c"]);
    seconds(1).await;
    let before = claim_writes(&api, "c").len();
    // The pod has ended, which its own watch delivers a moment later.
    clear(&api, "c");
    seconds(1).await;
    api.delete("pods", "default", "p");
    seconds(600).await;
    assert_eq!(claim_writes(&api, "c").len(), before);
    controller.stop().await;
}

#[tokio::test(start_paused = true)]
async fn claim_deleted_in_use_is_reported() {
    let api = cluster(1);
    api.put("resourceclaims", claim("c", "70Gi"));
    api.put("pods", pod("p", &["c"]));
    let controller = Controller::start(&api);
    api.until("an allocation", |api| allocation(api, "c")).await;
    reserve_and_bind(&api, "p", &["c"]);
    seconds(1).await;
    // A client has removed the finalizer, and creates another claim of the name.
    api.delete("resourceclaims", "default", "c");
    let mut again = claim("c", "70Gi");
    again["metadata"]["uid"] = "uid-again".into();
    api.put("resourceclaims", again);
    api.put("pods", pod("q", &["c"]));
    seconds(150).await;
    let note = event(&api, "p", "ClaimDeletedInUse").unwrap();
    assert!(
        note.contains("ResourceClaim c was deleted") && note.contains("on node node-a"),
        "{note}"
    );
    assert_eq!(controller.metrics.orphaned.get(), 1);
    assert_eq!(allocation(&api, "c"), None, "70Gi stay taken");
    api.delete("pods", "default", "p");
    api.until("an allocation", |api| allocation(api, "c")).await;
    seconds(60).await;
    assert_eq!(controller.metrics.orphaned.get(), 0);
    controller.stop().await;
}

#[tokio::test(start_paused = true)]
async fn bound_pod_without_room_is_misplaced_until_room_is_made() {
    let api = cluster(1);
    api.put(
        "resourceclaims",
        reserved(allocated(claim("held", "70Gi"), given("node-a", "gpu-0", "70Gi")), &["holder"]),
    );
    api.put("pods", bound(pod("holder", &["held"]), "node-a"));
    api.put("resourceclaims", claim("c", "19Gi"));
    api.put("pods", assigned(pod("p", &["c"]), "node-a"));
    let controller = Controller::start(&api);
    seconds(200).await;
    let note = event(&api, "p", "ClaimNodeMismatch").unwrap();
    assert!(
        note.contains("make room on the node")
            && note.contains("0/1 GPUs available for ResourceClaim c"),
        "{note}"
    );
    for _ in 0..40 {
        seconds(1).await;
        assert_eq!(controller.metrics.misplaced.get(), 1, "also while it is not tried again");
    }
    api.delete("pods", "default", "holder");
    api.delete("resourceclaims", "default", "held");
    let freed = Instant::now();
    api.until("an allocation", |api| allocation(api, "c")).await;
    assert!(freed.elapsed() <= Duration::from_secs(31), "{:?}", freed.elapsed());
    controller.stop().await;
}
