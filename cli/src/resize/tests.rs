use serde_json::json;
use tessera_api::resize::APPLIED_CONDITION;

use super::*;

fn claim(requests: &[&str]) -> ResourceClaim {
    let result = |request: &&str| {
        json!({
            "request": request, "driver": DRIVER_NAME, "pool": "node-a", "device": "gpu-0",
            "shareID": format!("share-{request}"),
            "consumedCapacity": {"memory": "10Gi", "cores": "25"},
        })
    };
    let results: Vec<Value> = requests.iter().map(result).collect();
    serde_json::from_value(json!({
        "metadata": {"name": "c", "namespace": "n", "uid": "u"},
        "spec": {},
        "status": {"allocation": {"devices": {"results": results}}},
    }))
    .unwrap()
}

fn size(memory: Option<&str>, cores: Option<&str>) -> ShareSize {
    let amount = |text: Option<&str>| text.map(|text| Quantity::parse(text).unwrap());
    ShareSize { memory: amount(memory), cores: amount(cores) }
}

#[test]
fn the_only_request_needs_no_name() {
    let (request, found) = shares(&claim(&["gpu"]), None).unwrap();
    assert_eq!((request.as_str(), found.len()), ("gpu", 1));
    let error = shares(&claim(&["a", "b"]), None).unwrap_err().to_string();
    assert_eq!(error, "ResourceClaim c has shares of the requests a, b; name one by --request");
    assert_eq!(shares(&claim(&["a", "b"]), Some("b")).unwrap().0, "b");
    assert!(shares(&claim(&["a"]), Some("other")).is_err());
}

#[test]
fn a_claim_without_shares_is_refused_with_what_to_do() {
    let error = shares(&claim(&[]), None).unwrap_err().to_string();
    assert!(error.contains("gets the size in its spec, or in its template"), "{error}");
}

#[test]
fn the_sizes_that_count_are_those_before() {
    let mut resized = claim(&["gpu"]);
    let devices = json!([{
        "driver": DRIVER_NAME, "pool": "node-a", "device": "gpu-0", "shareID": "share-gpu",
        "data": {
            "apiVersion": "gpu.tessera.dev/v1alpha1", "kind": "GpuShareSize",
            "memory": "20Gi", "cores": "30",
        },
    }]);
    let status = resized.status.as_mut().unwrap();
    status.devices = Some(serde_json::from_value(devices).unwrap());
    let (_, found) = shares(&resized, None).unwrap();
    let before = amounts(&found[0]);
    assert_eq!((before.memory.as_str(), before.cores.as_str()), ("20Gi", "30"));
}

#[test]
fn another_request_and_amount_stay_as_asked_for() {
    let claim = claim(&["a", "b"]);
    let first = wanted(&claim, None, "a", size(Some("20Gi"), None));
    let owner = &first.metadata.owner_references.as_ref().unwrap()[0];
    assert_eq!((owner.kind.as_str(), owner.uid.as_str()), ("ResourceClaim", "u"));
    let second = wanted(&claim, Some(first), "b", size(None, Some("10")));
    let third = wanted(&claim, Some(second), "a", size(None, Some("50")));
    assert_eq!(
        json!(third.spec),
        json!({"requests": [
            {"name": "a", "memory": "20Gi", "cores": "50"}, {"name": "b", "cores": "10"},
        ]})
    );
}

#[test]
fn only_the_answer_to_the_last_grant_ends_the_wait() {
    let resize = |granted: Value, grant: i64, applied: Value| -> GpuResize {
        let condition = |name: &str, condition: Value| {
            let mut condition = condition;
            condition["type"] = name.into();
            condition["lastTransitionTime"] = "2026-11-28T00:00:00Z".into();
            condition
        };
        serde_json::from_value(json!({
            "metadata": {"name": "c", "generation": 2},
            "status": {
                "node": "node-a", "grant": grant, "appliedGrant": 5,
                "conditions": [
                    condition(GRANTED_CONDITION, granted), condition(APPLIED_CONDITION, applied),
                ],
            },
        }))
        .unwrap()
    };
    let granted = |generation: i64| json!({"status": "True", "reason": "Granted", "message": "m", "observedGeneration": generation});
    let applied = json!({"status": "True", "reason": "Applied", "message": "m"});
    let waiting = |resize: &GpuResize| match progress(resize) {
        Progress::Waiting(message) => message,
        Progress::Applied => "applied".to_owned(),
        Progress::Refused(message) => format!("refused: {message}"),
    };
    let old = resize(granted(1), 5, applied.clone());
    assert!(waiting(&old).starts_with("tessera-controller has not answered"));
    let unanswered = resize(granted(2), 6, applied.clone());
    assert_eq!(waiting(&unanswered), "the driver of node node-a has not answered");
    assert_eq!(waiting(&resize(granted(2), 5, applied.clone())), "applied");
    let in_use = json!({"status": "False", "reason": "MemoryInUse", "message": "uses 3Gi"});
    assert_eq!(waiting(&resize(granted(2), 5, in_use)), "uses 3Gi");
    let mut refused = granted(2);
    refused["status"] = "False".into();
    refused["message"] = "no room".into();
    assert_eq!(waiting(&resize(refused, 5, applied)), "refused: no room");
}
