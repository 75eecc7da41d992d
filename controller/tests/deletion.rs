//! Pods and nodes that go away between allocation and binding, and after. Time is simulated.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod fake_api;

use fake_api::controller::{
    Controller, add_node, allocation, claim_writes, clear, cluster, event, place, reserve_and_bind,
};
use fake_api::objects::{claim, pod};
use serde_json::{Value, json};
use tokio::time::{Duration, Instant};

async fn seconds(n: u64) {
    tokio::time::sleep(Duration::from_secs(n)).await;
}

/// A pod with a claim made from a template, and that claim.
fn with_template() -> (Value, Value) {
    let mut generated = claim("p-gpu", "70Gi");
    generated["metadata"]["ownerReferences"] = json!([{"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": "uid-p", "controller": true}]);
    let mut owner = pod("p", &[]);
    owner["spec"]["resourceClaims"] = json!([{"name": "gpu", "resourceClaimTemplateName": "t"}]);
    owner["status"]["resourceClaimStatuses"] =
        json!([{"name": "gpu", "resourceClaimName": "p-gpu"}]);
    (owner, generated)
}

#[tokio::test(start_paused = true)]
async fn pod_deleted_before_binding_releases_its_share_at_once() {
    let users = (pod("p", &["c"]), claim("c", "70Gi"));
    for (owner, object) in [users, with_template()] {
        for gone in [true, false] {
            let api = cluster(1);
            let name = object["metadata"]["name"].as_str().unwrap().to_owned();
            api.put("resourceclaims", object.clone());
            api.put("pods", owner.clone());
            let controller = Controller::start(&api);
            api.until("an allocation", |api| allocation(api, &name)).await;
            let start = Instant::now();
            if gone {
                api.delete("pods", "default", "p");
            } else {
                // A finalizer keeps the object.
                let mut deleting = owner.clone();
                deleting["metadata"]["deletionTimestamp"] = "2026-11-21T00:00:00Z".into();
                api.put("pods", deleting);
            }
            api.until("its end", |api| allocation(api, &name).is_none().then_some(())).await;
            assert!(start.elapsed() < Duration::from_millis(100), "{:?}", start.elapsed());
            api.put("resourceclaims", claim("next", "70Gi"));
            api.put("pods", pod("next", &["next"]));
            api.until("room for the next", |api| allocation(api, "next")).await;
            controller.stop().await;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn claim_being_deleted_is_not_written() {
    let api = cluster(1);
    let (owner, object) = with_template();
    api.put("resourceclaims", object);
    api.put("pods", owner);
    let controller = Controller::start(&api);
    api.until("an allocation", |api| allocation(api, "p-gpu")).await;
    let before = claim_writes(&api, "p-gpu").len();
    // The garbage collector is faster than the news of the pod.
    let mut deleting = api.get("resourceclaims", "default", "p-gpu").unwrap();
    deleting["metadata"]["deletionTimestamp"] = "2026-11-21T00:00:00Z".into();
    api.put("resourceclaims", deleting);
    api.delete("pods", "default", "p");
    seconds(10).await;
    assert_eq!(claim_writes(&api, "p-gpu").len(), before);
    clear(&api, "p-gpu");
    api.put("resourceclaims", claim("next", "70Gi"));
    api.put("pods", pod("next", &["next"]));
    api.until("room for the next", |api| allocation(api, "next")).await;
    controller.stop().await;
}

#[tokio::test(start_paused = true)]
async fn unreserved_claim_on_deleted_node_moves() {
    let api = cluster(1);
    for name in ["waiting", "running"] {
        api.put("resourceclaims", claim(name, "19Gi"));
        api.put("pods", pod(name, &[name]));
    }
    let controller = Controller::start(&api);
    api.until("allocations", |api| allocation(api, "waiting").and(allocation(api, "running")))
        .await;
    reserve_and_bind(&api, "running", &["running"]);
    add_node(&api, "node-b", 1);
    seconds(1).await;
    let before = claim_writes(&api, "running").len();
    api.delete("nodes", "", "node-a");
    // Its slices go with it: the node owns them.
    api.delete("resourceslices", "", "slice-node-a");
    api.until("the other node", |api| {
        (place(api, "waiting").as_deref() == Some("node-b")).then_some(())
    })
    .await;
    let note = event(&api, "waiting", "Rescheduling").unwrap();
    assert!(note.contains("node node-a") && note.contains("does not exist any more"), "{note}");
    seconds(60).await;
    assert_eq!(
        claim_writes(&api, "running").len(),
        before,
        "its pod is kube-controller-manager's to remove first"
    );
    // The pod garbage collector removes the pod, then its reservation goes and the allocation with
    // it.
    api.delete("pods", "default", "running");
    clear(&api, "running");
    api.put("pods", pod("again", &["running"]));
    api.until("an allocation", |api| allocation(api, "running")).await;
    assert_eq!(place(&api, "running").unwrap(), "node-b");
    controller.stop().await;
}
