//! GpuConfigs in the objects that carry them.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use serde_json::{Value, json};
use tessera_admission::review::{ReviewError, ReviewResult};
use tessera_admission::validate::validate;

fn config(fields: &Value) -> Value {
    let mut parameters = json!({"apiVersion": "gpu.tessera.dev/v1alpha1", "kind": "GpuConfig"});
    parameters.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    json!({"opaque": {"driver": "gpu.tessera.dev", "parameters": parameters}})
}

fn devices(capacity: &Value, configs: &[Value]) -> Value {
    let exactly = json!({"deviceClassName": "gpu.tessera.dev", "capacity": {"requests": capacity}});
    json!({"requests": [{"name": "gpu", "exactly": exactly}], "config": configs})
}

/// Returns the message of the refusal of an object; `None` if it is allowed.
fn refusal(resource: &str, kind: &str, spec: &Value) -> Option<String> {
    refusal_in("resource.k8s.io", resource, kind, spec)
}

fn refusal_in(group: &str, resource: &str, kind: &str, spec: &Value) -> Option<String> {
    let object = json!({
        "apiVersion": format!("{group}/v1"), "kind": kind, "metadata": {"name": "a"}, "spec": spec,
    });
    let review = json!({
        "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview",
        "request": {
            "uid": "1", "kind": {"group": group, "version": "v1", "kind": kind},
            "resource": {"group": group, "version": "v1", "resource": resource},
            "name": "a", "operation": "CREATE", "userInfo": {}, "object": object,
        },
    });
    let (answer, result) = validate(review.to_string().as_bytes()).unwrap();
    let answer: Value = serde_json::from_slice(&answer).unwrap();
    let is_allowed = answer["response"]["allowed"].as_bool().unwrap();
    assert_eq!(is_allowed, result == ReviewResult::Left);
    (!is_allowed).then(|| answer["response"]["status"]["message"].as_str().unwrap().to_owned())
}

fn refusal_of_claim(capacity: &Value, configs: &[Value]) -> Option<String> {
    refusal("resourceclaims", "ResourceClaim", &json!({"devices": devices(capacity, configs)}))
}

#[test]
fn a_wrong_field_is_named_with_its_path_and_what_is_allowed() {
    let wrong = config(&json!({"placement": {"device": "Packed"}}));
    let text = refusal_of_claim(&json!({}), &[config(&json!({})), wrong.clone()]).unwrap();
    let path = "spec.devices.config[1].opaque.parameters: placement.device";
    assert!(text.contains(path) && text.contains("Packed") && text.contains("Binpack"), "{text}");
    let spec = json!({"spec": {"devices": devices(&json!({}), std::slice::from_ref(&wrong))}});
    let text = refusal("resourceclaimtemplates", "ResourceClaimTemplate", &spec).unwrap();
    assert!(text.contains("spec.spec.devices.config[0].opaque.parameters: placement"), "{text}");
    let text = refusal("deviceclasses", "DeviceClass", &json!({"config": [wrong]})).unwrap();
    assert!(text.contains("spec.config[0].opaque.parameters: placement.device"), "{text}");
}

#[test]
fn defaults_of_a_namespace_are_held_to_the_same_rules() {
    let refusal = |fields: &Value| {
        let spec = json!({"parameters": config(fields)["opaque"]["parameters"]});
        refusal_in("gpu.tessera.dev", "gpudefaults", "GpuDefaults", &spec)
    };
    assert_eq!(refusal(&json!({"memory": {"percent": 25}})), None);
    let text = refusal(&json!({"placement": {"device": "Packed"}})).unwrap();
    assert!(
        text.contains("spec.parameters: placement.device") && text.contains("Spread"),
        "{text}"
    );
    let text = refusal(&json!({"exclusive": true, "memory": {"percent": 25}})).unwrap();
    assert!(text.contains("spec.parameters: memory.percent"), "{text}");
}

#[test]
fn what_excludes_each_other_is_refused_with_the_request() {
    let fixed = config(&json!({"compute": {"policy": "Fixed"}}));
    let limit = config(&json!({"compute": {"limit": 50}}));
    let cores = json!({"cores": "20"});
    let text = refusal_of_claim(&cores, &[fixed, limit.clone()]).unwrap();
    assert!(text.contains("spec.devices.requests[gpu]: compute.limit"), "{text}");
    assert_eq!(refusal_of_claim(&cores, std::slice::from_ref(&limit)), None);
    let text = refusal_of_claim(&json!({}), &[limit]).unwrap();
    assert!(text.contains("a request without cores"), "{text}");
    let percent = config(&json!({"memory": {"percent": 50}}));
    assert_eq!(refusal_of_claim(&json!({}), std::slice::from_ref(&percent)), None);
    let text = refusal_of_claim(&json!({"memory": "4Gi"}), &[percent]).unwrap();
    assert!(text.contains("memory.percent: 50% cannot be combined with"), "{text}");
    let text = refusal_of_claim(&json!({}), &[config(&json!({"sharing": "TimeSlicing"}))]);
    assert!(text.unwrap().contains("not supported in this version"));
}

#[test]
fn a_config_applies_to_the_requests_that_it_names() {
    let mut other = config(&json!({"memory": {"percent": 50}}));
    other["requests"] = json!(["other"]);
    assert_eq!(refusal_of_claim(&json!({"memory": "4Gi"}), &[other.clone()]), None);
    other["requests"] = json!(["gpu"]);
    assert!(refusal_of_claim(&json!({"memory": "4Gi"}), &[other.clone()]).is_some());
    let mut spec = json!({"devices": devices(&json!({}), &[other])});
    let sub = |name: &str, memory: &str| {
        json!({"name": name, "deviceClassName": "gpu.tessera.dev",
               "capacity": {"requests": {"memory": memory}}})
    };
    spec["devices"]["requests"][0] = json!({"name": "gpu", "firstAvailable": [sub("big", "8Gi")]});
    let text = refusal("resourceclaims", "ResourceClaim", &spec).unwrap();
    assert!(text.contains("requests[gpu/big]: memory.percent"), "{text}");
}

#[test]
fn configs_of_other_drivers_and_other_objects_are_left_alone() {
    let foreign = json!({"opaque": {"driver": "gpu.nvidia.com", "parameters": {"kind": "X"}}});
    assert_eq!(refusal_of_claim(&json!({}), &[foreign]), None);
    assert_eq!(refusal("resourceclaims", "ResourceClaim", &json!({})), None);
    assert_eq!(refusal("deviceclasses", "DeviceClass", &json!({})), None);
    assert_eq!(refusal("resourceslices", "ResourceSlice", &json!({"driver": 1})), None);
    assert!(matches!(validate(b"{}"), Err(ReviewError::Malformed(_))));
}
