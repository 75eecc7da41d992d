//! Writes of decisions: their order, and failures between them.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod fake_api;

use fake_api::{FakeApi, failure, objects};
use k8s_openapi::api::resource::v1::{AllocationResult, ResourceClaim};
use k8s_openapi::jiff::Timestamp;
use serde_json::{Value, json};
use tessera_controller::commit::{CommitError, Writer};
use tessera_controller::core::effect::BarrierOutcome;
use tessera_controller::leadership::Candidate;
use tokio::time::Duration;

fn allocation() -> AllocationResult {
    serde_json::from_value(json!({
        "allocationTimestamp": "2026-11-21T00:00:00Z",
        "devices": {"results": [{
            "request": "gpu", "driver": "gpu.tessera.dev", "pool": "node-a", "device": "gpu-0",
            "shareID": "1f0c2d3e-9a41-7c3b-8e55-0d6f2b1a4c77",
            "consumedCapacity": {"memory": "19456Mi", "cores": "25"},
        }]},
        "nodeSelector": {"nodeSelectorTerms": [{"matchFields": [
            {"key": "metadata.name", "operator": "In", "values": ["node-a"]},
        ]}]},
    }))
    .unwrap()
}

fn stored(api: &FakeApi) -> ResourceClaim {
    serde_json::from_value(api.put("resourceclaims", objects::claim("c", "19Gi"))).unwrap()
}

fn status(api: &FakeApi) -> Value {
    api.get("resourceclaims", "default", "c").unwrap()["status"].clone()
}

#[tokio::test]
async fn finalizer_then_allocation_and_nothing_else_is_written() {
    let api = FakeApi::new();
    let claim = stored(&api);
    let written = Writer::new(api.client()).allocate(&claim, &allocation()).await.unwrap();
    assert_eq!(
        written.metadata.finalizers.as_deref(),
        Some(&["resource.kubernetes.io/delete-protection".to_owned()][..])
    );
    let writes = api.writes();
    let paths: Vec<&str> = writes.iter().map(|w| w.path.as_str()).collect();
    let path = "namespaces/default/resourceclaims/c";
    assert_eq!(paths, [path, &format!("{path}/status")]);
    let status = writes[1].body["status"].as_object().unwrap();
    assert_eq!(status.keys().collect::<Vec<_>>(), ["allocation"], "reservedFor is the scheduler's");
    assert!(
        writes.iter().all(|w| w.body["metadata"]["resourceVersion"].is_string()),
        "no write without a precondition"
    );
}

#[tokio::test]
async fn first_claims_of_a_burst_are_allocated_before_the_last() {
    let api = FakeApi::new();
    let writer = Writer::new(api.client());
    let claims: Vec<ResourceClaim> = (0..200)
        .map(|n| {
            serde_json::from_value(
                api.put("resourceclaims", objects::claim(&format!("c{n}"), "1Gi")),
            )
        })
        .collect::<Result<_, _>>()
        .unwrap();
    let allocation = allocation();
    let written = claims.iter().map(|claim| writer.allocate(claim, &allocation));
    futures::future::try_join_all(written).await.unwrap();
    let (mut ahead, mut most) = (0_i32, 0);
    for write in api.writes() {
        ahead += if write.path.ends_with("/status") { -1 } else { 1 };
        most = most.max(ahead);
    }
    assert!(most <= 32, "{most} claims had a finalizer and no allocation");
}

#[tokio::test]
async fn foreign_finalizers_stay() {
    let api = FakeApi::new();
    let mut object = objects::claim("c", "19Gi");
    object["metadata"]["finalizers"] = json!(["example.com/theirs"]);
    let claim: ResourceClaim = serde_json::from_value(api.put("resourceclaims", object)).unwrap();
    let written = Writer::new(api.client()).allocate(&claim, &allocation()).await.unwrap();
    assert_eq!(
        written.metadata.finalizers.unwrap(),
        ["example.com/theirs", "resource.kubernetes.io/delete-protection"]
    );
}

#[tokio::test]
async fn changed_claim_is_a_conflict_and_stays() {
    let api = FakeApi::new();
    let claim = stored(&api);
    let mut changed = objects::claim("c", "19Gi");
    changed["metadata"]["labels"] = json!({"owner": "else"});
    api.put("resourceclaims", changed);
    let error = Writer::new(api.client()).allocate(&claim, &allocation()).await.unwrap_err();
    let CommitError::Conflict { now: Some(now), .. } = error else { panic!("{error}") };
    assert_eq!(
        now.metadata.labels.unwrap()["owner"],
        "else",
        "the error brings the claim as it is now"
    );
    assert_eq!(status(&api), Value::Null);
}

#[tokio::test]
async fn change_between_the_two_writes_is_a_conflict() {
    let api = FakeApi::new();
    let claim = stored(&api);
    api.fault(|store, request| {
        if request.path.ends_with("/status") && store.writes.len() == 1 {
            let mut object = store.get("resourceclaims", "default", "c").unwrap().clone();
            object["metadata"]["deletionTimestamp"] = "2026-11-21T00:00:00Z".into();
            store.put("resourceclaims", object);
        }
        None
    });
    let error = Writer::new(api.client()).allocate(&claim, &allocation()).await.unwrap_err();
    assert!(matches!(error, CommitError::Conflict { .. }), "{error}");
    assert_eq!(status(&api), Value::Null);
}

#[tokio::test]
async fn deleted_claim_is_a_conflict_without_object() {
    let api = FakeApi::new();
    let claim = stored(&api);
    api.delete("resourceclaims", "default", "c");
    let error = Writer::new(api.client()).allocate(&claim, &allocation()).await.unwrap_err();
    assert!(matches!(error, CommitError::Conflict { now: None, .. }), "{error}");
}

#[tokio::test]
async fn dropped_field_is_named_and_allocation_released() {
    let api = FakeApi::new();
    let claim = stored(&api);
    // As an API server without DRAConsumableCapacity does it.
    let mut dropped = false;
    api.fault(move |store, request| {
        if !request.path.ends_with("/status") || dropped {
            return None;
        }
        dropped = true;
        let mut object = store.get("resourceclaims", "default", "c").unwrap().clone();
        object["status"] = request.body["status"].clone();
        object["status"]["allocation"]["devices"]["results"][0]
            .as_object_mut()
            .unwrap()
            .remove("consumedCapacity");
        let object = store.put("resourceclaims", object);
        Some(axum::response::IntoResponse::into_response(object.to_string()))
    });
    let error = Writer::new(api.client()).allocate(&claim, &allocation()).await.unwrap_err();
    let CommitError::Dropped { field, .. } = &error else { panic!("{error}") };
    assert_eq!(field, "devices.results.0.consumedCapacity");
    assert_eq!(status(&api)["allocation"], Value::Null);
}

#[tokio::test]
async fn equal_quantities_in_other_notation_are_no_difference() {
    let api = FakeApi::new();
    let claim = stored(&api);
    api.fault(|store, request| {
        if !request.path.ends_with("/status") {
            return None;
        }
        let mut object = store.get("resourceclaims", "default", "c").unwrap().clone();
        object["status"] = request.body["status"].clone();
        object["status"]["allocation"]["devices"]["results"][0]["consumedCapacity"]["memory"] =
            "19Gi".into();
        let object = store.put("resourceclaims", object);
        Some(axum::response::IntoResponse::into_response(object.to_string()))
    });
    Writer::new(api.client()).allocate(&claim, &allocation()).await.unwrap();
}

#[tokio::test]
async fn refused_write_reports_the_server_message() {
    let api = FakeApi::new();
    let claim = stored(&api);
    api.fault(|_, _| Some(failure(403, "Forbidden")));
    let error = Writer::new(api.client()).allocate(&claim, &allocation()).await.unwrap_err();
    let CommitError::Request { source, .. } = &error else { panic!("{error}") };
    assert!(
        source.to_string().contains("Forbidden") || format!("{source:?}").contains("Forbidden"),
        "{source:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn unanswered_write_is_sent_until_it_is_answered() {
    let api = FakeApi::new();
    let claim = stored(&api);
    let mut failures = 0;
    api.fault(move |_, _| {
        failures += 1;
        (failures <= 5).then(|| failure(if failures % 2 == 0 { 429 } else { 503 }, "Unavailable"))
    });
    Writer::new(api.client()).allocate(&claim, &allocation()).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn write_with_a_lost_answer_is_recognized() {
    let api = FakeApi::new();
    let claim = stored(&api);
    let mut lost = false;
    api.fault(move |store, request| {
        if !request.path.ends_with("/status") || lost {
            return None;
        }
        lost = true;
        let mut object = store.get("resourceclaims", "default", "c").unwrap().clone();
        object["status"] = request.body["status"].clone();
        store.put("resourceclaims", object);
        Some(failure(504, "Timeout"))
    });
    let written = Writer::new(api.client()).allocate(&claim, &allocation()).await.unwrap();
    assert!(written.status.unwrap().allocation.is_some());
}

#[tokio::test]
async fn release_clears_the_allocation_at_the_seen_version() {
    let api = FakeApi::new();
    let claim = stored(&api);
    let writer = Writer::new(api.client());
    let allocated = writer.allocate(&claim, &allocation()).await.unwrap();
    let released = writer.release(&allocated).await.unwrap();
    assert!(released.status.unwrap_or_default().allocation.is_none());
    let stale = writer.release(&allocated).await.unwrap_err();
    assert!(matches!(stale, CommitError::Conflict { .. }), "{stale}");
}

#[tokio::test]
async fn barrier_is_concluded_on_the_devices_that_have_it() {
    let api = FakeApi::new();
    let claim = stored(&api);
    let mut two = json!(allocation());
    let results = two["devices"]["results"].as_array_mut().unwrap();
    let mut waiting = results[0].clone();
    waiting["device"] = "gpu-1".into();
    waiting["bindingConditions"] = json!(["gpu.tessera.dev/group-complete"]);
    waiting["bindingFailureConditions"] = json!(["gpu.tessera.dev/group-failed"]);
    results.push(waiting);
    let two: AllocationResult = serde_json::from_value(two).unwrap();
    let writer = Writer::new(api.client());
    let allocated = writer.allocate(&claim, &two).await.unwrap();
    for (outcome, condition) in [
        (BarrierOutcome::Complete, "gpu.tessera.dev/group-complete"),
        (BarrierOutcome::Failed, "gpu.tessera.dev/group-failed"),
    ] {
        let now: ResourceClaim =
            serde_json::from_value(api.get("resourceclaims", "default", "c").unwrap()).unwrap();
        let concluded = writer.conclude(&now, outcome, Timestamp::UNIX_EPOCH).await.unwrap();
        let devices = concluded.status.unwrap().devices.unwrap();
        assert_eq!(devices.len(), 1);
        assert_eq!(devices[0].device, "gpu-1");
        assert_eq!(devices[0].share_id.as_deref(), Some("1f0c2d3e-9a41-7c3b-8e55-0d6f2b1a4c77"));
        let conditions = devices[0].conditions.as_ref().unwrap();
        assert!(conditions.iter().any(|one| one.type_ == condition && one.status == "True"));
    }
    let stale = writer.conclude(&allocated, BarrierOutcome::Complete, Timestamp::UNIX_EPOCH).await;
    assert!(matches!(stale, Err(CommitError::Conflict { .. })), "{stale:?}");
}

#[tokio::test(start_paused = true)]
async fn refusal_after_a_lost_answer_is_not_final() {
    let api = FakeApi::new();
    let claim = stored(&api);
    let mut sent = 0;
    api.fault(move |store, request| {
        if !request.path.ends_with("/status") {
            return None;
        }
        sent += 1;
        match sent {
            1 => {
                let mut object = store.get("resourceclaims", "default", "c").unwrap().clone();
                object["status"] = request.body["status"].clone();
                store.put("resourceclaims", object);
                Some(failure(504, "Timeout"))
            }
            2 => Some(failure(401, "Unauthorized")),
            _ => None,
        }
    });
    let written = Writer::new(api.client()).allocate(&claim, &allocation()).await.unwrap();
    assert!(written.status.unwrap().allocation.is_some());
}

#[tokio::test(start_paused = true)]
async fn refused_read_after_a_lost_answer_is_repeated() {
    let api = FakeApi::new();
    let claim = stored(&api);
    let mut lost = false;
    api.fault(move |store, request| {
        if !request.path.ends_with("/status") || std::mem::replace(&mut lost, true) {
            return None;
        }
        let mut object = store.get("resourceclaims", "default", "c").unwrap().clone();
        object["status"] = request.body["status"].clone();
        store.put("resourceclaims", object);
        Some(failure(504, "Timeout"))
    });
    // As of an API server that has just started and has not read its RBAC rules yet.
    api.refuse_reads(&[403, 401, 403]);
    let written = Writer::new(api.client()).allocate(&claim, &allocation()).await.unwrap();
    assert!(written.status.unwrap().allocation.is_some(), "the write that got no answer stands");
}

#[tokio::test(start_paused = true)]
async fn refused_read_after_a_conflict_ends_the_write() {
    let api = FakeApi::new();
    let claim = stored(&api);
    api.put("resourceclaims", api.get("resourceclaims", "default", "c").unwrap());
    api.refuse_reads(&[403]);
    let error = Writer::new(api.client()).allocate(&claim, &allocation()).await.unwrap_err();
    assert!(
        matches!(error, CommitError::Conflict { now: None, .. }),
        "nothing of ours can have been written: {error}"
    );
}

#[tokio::test(start_paused = true)]
async fn nothing_is_sent_after_the_tenure() {
    let api = FakeApi::new();
    api.put("leases", objects::released_lease());
    let mut leader = Candidate::new(api.client(), "tessera-system", "a".to_owned());
    leader.acquire().await;
    let writer = Writer::new(api.client()).during(leader.tenure());
    let claim = stored(&api);
    // As after the process was suspended: the lease was not renewed, and no task has
    // noticed yet.
    tokio::time::advance(Duration::from_secs(10)).await;
    let (claims, given) =
        (|| api.writes().iter().filter(|w| w.path.contains("claims")).count(), allocation());
    let write =
        tokio::time::timeout(Duration::from_secs(60), writer.allocate(&claim, &given)).await;
    assert!(write.is_err(), "it is not known how it ends");
    assert_eq!(claims(), 0);
}
