//! The fault points of a build for crash tests lie where their names say. Run with `--features
//! fault-points`.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod fake_api;

use fake_api::FakeApi;
use fake_api::objects::{claim, given, pod, reference};
use k8s_openapi::api::resource::v1::{AllocationResult, ResourceClaim};
use tessera_controller::commit::Writer;
use tessera_controller::core::effect::{BarrierOutcome, EvictionPurpose, Evictions};
use tessera_controller::evict::evict;
use tessera_controller::fault::POINTS;
use tessera_controller::leadership::Tenure;
use tessera_runtime::fault_points::Fault;

/// Waits until a write is held at the point.
async fn until_held(point: &str) {
    while POINTS.all()[point].waiting == 0 {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn each_fault_point_is_reached_after_the_write_before_it() {
    let api = FakeApi::new();
    let object: ResourceClaim =
        serde_json::from_value(api.put("resourceclaims", claim("c", "19Gi"))).unwrap();
    let allocation: AllocationResult =
        serde_json::from_value(given("node-a", "gpu-0", "19Gi")).unwrap();
    for point in POINTS.all().keys() {
        POINTS.arm(point, Fault::Hold).unwrap();
    }
    api.put("pods", pod("victim", &["c"]));
    let (writer, client) = (Writer::new(api.client()), api.client());
    let life = tokio::spawn(async move {
        let allocated = writer.allocate(&object, &allocation).await.unwrap();
        let resized = writer.resize(&allocated, &[]).await.unwrap();
        let released = writer.release(&resized).await.unwrap();
        let at = k8s_openapi::jiff::Timestamp::UNIX_EPOCH;
        writer.conclude(&released, BarrierOutcome::Complete, at).await.unwrap();
        let (purpose, victims) = (EvictionPurpose::Recovery, vec![reference("victim")]);
        let evictions = Evictions { purpose, victims };
        evict(client, Tenure::endless(), evictions).await;
    });
    let state = || {
        let object = api.get("resourceclaims", "default", "c").unwrap();
        (!object["metadata"]["finalizers"].is_null(), !object["status"]["allocation"].is_null())
    };
    let points = [
        ("allocation-decided", (false, false)),
        ("finalizer-written", (true, false)),
        ("allocation-written", (true, true)),
        ("resize-decided", (true, true)),
        ("resize-written", (true, true)),
        ("release-decided", (true, true)),
        ("release-written", (true, false)),
        ("barrier-decided", (true, false)),
        ("barrier-written", (true, false)),
    ];
    let evicting = [("evictions-decided", false), ("eviction-written", true)];
    assert_eq!(points.len() + evicting.len(), POINTS.all().len(), "each declared point is tried");
    for (point, expected) in points {
        until_held(point).await;
        assert_eq!(state(), expected, "finalizer and allocation at {point}");
        POINTS.disarm(point).unwrap();
    }
    for (point, is_evicted) in evicting {
        until_held(point).await;
        let victim = api.get("pods", "default", "victim").unwrap();
        let deleted = !victim["metadata"]["deletionTimestamp"].is_null();
        assert_eq!(deleted, is_evicted, "at {point}");
        POINTS.disarm(point).unwrap();
    }
    life.await.unwrap();
}
