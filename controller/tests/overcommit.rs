//! Overcommitted devices, as a write that is carried out long after its client has gone
//! away can do it. Time is simulated.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod fake_api;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use fake_api::FakeApi;
use fake_api::controller::{Controller, add_node, allocation, claim_writes, cluster, event, place};
use fake_api::objects::{allocated, bound, claim, given, nominated, pod, reserved};
use serde_json::{Value, json};
use tokio::time::Duration;

/// The claim with so much of the one GPU of `node-a`, allocated at that second.
fn taken(name: &str, memory: &str, second: u32) -> Value {
    let mut allocation = given("node-a", "gpu-0", memory);
    allocation["allocationTimestamp"] = format!("2026-11-21T00:00:{second:02}Z").into();
    allocated(claim(name, memory), allocation)
}

async fn seconds(n: u64) {
    tokio::time::sleep(Duration::from_secs(n)).await;
}

/// Adds claims that are not reserved, each with a pod that waits for it.
fn put_waiting(api: &FakeApi, claims: &[(&str, &str, u32)]) {
    for (name, memory, second) in claims {
        api.put("resourceclaims", taken(name, memory, *second));
        api.put("pods", pod(name, &[name]));
    }
}

#[tokio::test(start_paused = true)]
async fn late_write_of_previous_leader_is_undone() {
    let api = cluster(1);
    api.put("resourceclaims", claim("a", "50Gi"));
    api.put("resourceclaims", claim("b", "50Gi"));
    api.put("pods", pod("a", &["a"]));
    let controller = Controller::start(&api);
    let first = api.until("an allocation", |api| allocation(api, "a")).await;
    add_node(&api, "node-b", 1);
    seconds(1).await;
    // The leader before had decided on it just when it was killed; the API server has only now got
    // to it.
    api.put("pods", pod("b", &["b"]));
    api.put("resourceclaims", {
        let mut late = allocated(claim("b", "50Gi"), given("node-a", "gpu-0", "50Gi"));
        // In the same second, however long the controller takes: a fixed date would pass.
        late["status"]["allocation"]["allocationTimestamp"] = first["allocationTimestamp"].clone();
        late
    });
    api.until("its end", |api| (place(api, "b").as_deref() == Some("node-b")).then_some(())).await;
    assert_eq!(allocation(&api, "a"), Some(first));
    let note = event(&api, "b", "Overcommitted").unwrap();
    assert!(
        note.contains("node-a") && note.contains("gpu-0") && note.contains("allocated again"),
        "{note}"
    );
    assert_eq!(controller.metrics.overcommitted.get(), 0);
    controller.stop().await;
}

#[tokio::test(start_paused = true)]
async fn youngest_claims_are_released_until_the_rest_fits() {
    let api = cluster(1);
    put_waiting(&api, &[("young", "20Gi", 3), ("old", "50Gi", 1), ("middle", "25Gi", 2)]);
    let controller = Controller::start(&api);
    seconds(60).await;
    assert_eq!(claim_writes(&api, "young")[0]["status"]["allocation"], Value::Null);
    for kept in ["old", "middle"] {
        assert_eq!(claim_writes(&api, kept), [Value::Null; 0], "{kept}");
    }
    assert_eq!(allocation(&api, "young"), None, "5Gi are left");
    assert_eq!(controller.metrics.overcommitted.get(), 0);
    controller.stop().await;
}

#[tokio::test(start_paused = true)]
async fn reserved_claim_stays_however_young() {
    let api = cluster(1);
    put_waiting(&api, &[("old", "50Gi", 1)]);
    api.put("resourceclaims", reserved(taken("young", "50Gi", 9), &["young"]));
    api.put("pods", bound(pod("young", &["young"]), "node-a"));
    let controller = Controller::start(&api);
    api.until("its end", |api| allocation(api, "old").is_none().then_some(())).await;
    seconds(60).await;
    assert_eq!(claim_writes(&api, "young"), [Value::Null; 0]);
    controller.stop().await;
}

#[tokio::test(start_paused = true)]
async fn reserved_or_nominated_overcommitment_is_only_reported() {
    let api = cluster(1);
    for (name, second) in [("a", 1), ("b", 2)] {
        api.put("resourceclaims", reserved(taken(name, "30Gi", second), &[name]));
        api.put("pods", bound(pod(name, &[name]), "node-a"));
    }
    put_waiting(&api, &[("c", "30Gi", 3)]);
    api.put("pods", nominated(pod("c", &["c"]), "node-a"));
    let controller = Controller::start(&api);
    seconds(150).await;
    for name in ["a", "b", "c"] {
        assert_eq!(claim_writes(&api, name), [Value::Null; 0], "{name}");
        assert!(event(&api, name, "Overcommitted").is_some(), "{name}");
    }
    assert_eq!(controller.metrics.overcommitted.get(), 1);
    controller.stop().await;
}

#[tokio::test(start_paused = true)]
async fn refused_release_is_not_sent_in_a_loop() {
    let api = cluster(1);
    put_waiting(&api, &[("a", "50Gi", 1), ("b", "50Gi", 2)]);
    api.fault(|_, request| {
        let releases = request.body.pointer("/status/allocation") == Some(&json!(null));
        releases.then(|| fake_api::failure(403, "Forbidden"))
    });
    let controller = Controller::start(&api);
    seconds(20).await;
    let errors = controller.metrics.write_errors.get();
    assert!((5..=15).contains(&errors), "{errors}");
    controller.stop().await;
}

/// Returns true if the request releases the claim.
fn is_release(request: &fake_api::Request, claim: &str) -> bool {
    request.path.ends_with(&format!("resourceclaims/{claim}/status"))
        && request.body.pointer("/status/allocation") == Some(&Value::Null)
}

/// Returns true if the request allocates the claim.
fn is_allocation(request: &fake_api::Request, claim: &str) -> bool {
    request.path.ends_with(&format!("resourceclaims/{claim}/status")) && !is_release(request, claim)
}

/// A release of `a` is carried out, and its answer lost.
const RELEASES_UNANSWERED: usize = 1;
/// It is answered, and allocations of `a` are not, nor are they carried out.
const ALLOCATIONS_UNANSWERED: usize = 2;
/// Everything is answered.
const ALL_ANSWERED: usize = 3;

#[tokio::test(start_paused = true)]
async fn device_of_an_unanswered_release_is_allocated_once() {
    let api = cluster(1);
    let phase = Arc::new(AtomicUsize::new(0));
    let now = Arc::clone(&phase);
    api.fault(move |store, request| {
        let phase = now.load(Ordering::Relaxed);
        if is_release(request, "a") && phase == RELEASES_UNANSWERED {
            let mut released = store.get("resourceclaims", "default", "a").unwrap().clone();
            if released.as_object_mut().unwrap().remove("status").is_some() {
                store.put("resourceclaims", released);
            }
            return Some(fake_api::failure(504, "Timeout"));
        }
        let is_lost = is_allocation(request, "a") && (1..ALL_ANSWERED).contains(&phase);
        is_lost.then(|| fake_api::failure(504, "Timeout"))
    });
    let controller = Controller::start(&api);
    api.put("resourceclaims", claim("a", "50Gi"));
    api.put("pods", pod("a", &["a"]));
    api.until("an allocation", |api| allocation(api, "a")).await;
    phase.store(RELEASES_UNANSWERED, Ordering::Relaxed);
    api.delete("pods", "default", "a");
    api.until("the release", |api| allocation(api, "a").is_none().then_some(())).await;
    // The next pod for the claim, while the outcome of the release is not known.
    api.put("pods", pod("next", &["a"]));
    seconds(10).await;
    phase.store(ALLOCATIONS_UNANSWERED, Ordering::Relaxed);
    seconds(10).await;
    api.put("resourceclaims", claim("b", "50Gi"));
    api.put("pods", pod("b", &["b"]));
    seconds(10).await;
    phase.store(ALL_ANSWERED, Ordering::Relaxed);
    api.until("an allocation", |api| allocation(api, "a")).await;
    seconds(10).await;
    assert_eq!(allocation(&api, "b"), None, "the GPU has 80Gi, of which `a` holds 50Gi");
    controller.stop().await;
}
