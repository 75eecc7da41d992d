//! Reviews as kube-apiserver sends them.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use serde_json::{Value, json};
use tessera_admission::configuration::{CONVERT_PATH, WebhookService};
use tessera_admission::review::{ReviewError, ReviewResult, review};
use tessera_dialect::{AdmissionTask, Converter, Dialect, Settings};

const HAMI: AdmissionTask = AdmissionTask::Convert(Dialect::Hami);

fn converter() -> Converter {
    Converter::new(Settings::with_defaults(&[Dialect::Hami])).unwrap()
}

fn pod(limits: Value) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"generateName": "worker-", "namespace": "team-a"},
        "spec": {"schedulerName": "default-scheduler", "containers": [
            {"name": "main", "image": "cuda", "resources": {"limits": limits}},
        ]},
    })
}

fn request(pod: &Value) -> Value {
    let kind = json!({"group": "", "version": "v1", "kind": "Pod"});
    let resource = json!({"group": "", "version": "v1", "resource": "pods"});
    json!({
        "apiVersion": "admission.k8s.io/v1",
        "kind": "AdmissionReview",
        "request": {
            "uid": "705ab4f5", "kind": kind, "resource": resource, "namespace": "team-a",
            "operation": "CREATE", "userInfo": {"username": "replicaset-controller"},
            "object": pod, "oldObject": null, "dryRun": false, "options": null,
        },
    })
}

fn answer(task: AdmissionTask, request: &Value) -> (Value, ReviewResult) {
    let (body, result) = review(&converter(), task, request.to_string().as_bytes()).unwrap();
    let answer: Value = serde_json::from_slice(&body).unwrap();
    assert_eq!(answer["kind"], "AdmissionReview");
    assert_eq!(answer["apiVersion"], "admission.k8s.io/v1");
    assert_eq!(answer["response"]["uid"], "705ab4f5");
    (answer["response"].clone(), result)
}

#[test]
fn a_pod_of_a_dialect_is_patched() {
    let pod = pod(json!({"nvidia.com/gpu": "1", "nvidia.com/gpumem": "3000"}));
    let (response, result) = answer(HAMI, &request(&pod));
    assert_eq!((response["allowed"].as_bool(), result), (Some(true), ReviewResult::Converted));
    assert_eq!(response["patchType"], "JSONPatch");
    assert_eq!(response["auditAnnotations"]["dialect"], "hami");
    let bytes: Vec<u8> = decoded(&response["patch"]);
    let patch: json_patch::Patch = serde_json::from_slice(&bytes).unwrap();
    let mut converted = pod;
    json_patch::patch(&mut converted, &patch).unwrap();
    let claim = &converted["spec"]["resourceClaims"][0]["resourceClaimTemplateName"];
    let template = converter().template(&converted).unwrap().unwrap();
    assert_eq!(*claim, Value::from(template.name), "the controller computes the same");
}

/// Returns the bytes of a patch, in base64.
fn decoded(patch: &Value) -> Vec<u8> {
    serde_json::from_value::<k8s_openapi::ByteString>(patch.clone()).unwrap().0
}

#[test]
fn warnings_reach_the_user() {
    let mut pod = pod(json!({"nvidia.com/gpu": "1", "nvidia.com/gpumem": "3000"}));
    pod["metadata"]["annotations"] = json!({"nvidia.com/vgpu-mode": "mig"});
    let (response, _) = answer(HAMI, &request(&pod));
    let warnings = response["warnings"].as_array().unwrap();
    assert!(warnings[0].as_str().unwrap().contains("nvidia.com/vgpu-mode"), "{warnings:?}");
}

#[test]
fn a_refusal_names_field_value_and_dialect() {
    let pod = pod(json!({"nvidia.com/gpu": "1", "nvidia.com/gpumem": "much"}));
    let (response, result) = answer(HAMI, &request(&pod));
    assert_eq!((response["allowed"].as_bool(), result), (Some(false), ReviewResult::Refused));
    assert_eq!(response["patch"], Value::Null);
    let message = response["status"]["message"].as_str().unwrap();
    for part in ["spec.containers[0].resources.limits[nvidia.com/gpumem]", "much", "hami"] {
        assert!(message.contains(part), "{message}");
    }
}

#[test]
fn a_label_that_names_no_dialect_is_refused() {
    let mut pod = pod(json!({"nvidia.com/gpu": "1"}));
    let (response, result) = answer(AdmissionTask::RefuseLabel, &request(&pod));
    assert_eq!((response["allowed"].as_bool(), result), (Some(false), ReviewResult::Refused));
    let message = response["status"]["message"].as_str().unwrap();
    assert!(message.contains("label gpu.tessera.dev/dialect of namespace team-a"), "{message}");
    pod["metadata"]["labels"] = json!({"gpu.tessera.dev/dialect": "hamii"});
    let (response, _) = answer(AdmissionTask::RefuseLabel, &request(&pod));
    let message = response["status"]["message"].as_str().unwrap();
    assert!(message.contains("hamii") && message.contains("vgpu-manager"), "{message}");
}

#[test]
fn updates_subresources_and_other_kinds_stay_as_they_are() {
    let pod = pod(json!({"nvidia.com/gpu": "1"}));
    let changes = [
        ("operation", json!("UPDATE")),
        ("subResource", json!("ephemeralcontainers")),
        ("resource", json!({"group": "apps", "version": "v1", "resource": "deployments"})),
        ("object", Value::Null),
    ];
    for (field, value) in changes {
        let mut changed = request(&pod);
        changed["request"][field] = value;
        let (response, result) = answer(HAMI, &changed);
        assert_eq!(response["allowed"], true, "{field}");
        assert_eq!((&response["patch"], result), (&Value::Null, ReviewResult::Left), "{field}");
    }
}

#[test]
fn a_body_that_is_no_review_is_an_error() {
    let error = |body: &[u8]| review(&converter(), HAMI, body).unwrap_err();
    for body in [&b""[..], b"{", b"[]", b"{\"kind\": \"Pod\"}", &[0xff; 8]] {
        assert!(matches!(error(body), ReviewError::Malformed(_)));
    }
    let empty = json!({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview"});
    assert!(matches!(error(empty.to_string().as_bytes()), ReviewError::NoRequest));
}

#[test]
fn each_entry_has_a_path_that_names_its_task() {
    let service = WebhookService {
        namespace: "tessera-system".to_owned(),
        name: "tessera-webhook".to_owned(),
    };
    assert_eq!(service.dns_name(), "tessera-webhook.tessera-system.svc");
    let entries = service.webhooks(&converter(), Some("bundle"));
    assert!(entries.len() > 20);
    for entry in &entries {
        let path = entry.client_config.service.as_ref().unwrap().path.clone().unwrap();
        let task = AdmissionTask::named(path.strip_prefix(CONVERT_PATH).unwrap());
        assert!(task.is_some(), "{path}");
        assert_eq!(entry.failure_policy.as_deref(), Some("Fail"));
        assert_eq!(entry.side_effects, "None");
        let namespaces = entry.namespace_selector.as_ref().unwrap();
        let first = &namespaces.match_expressions.as_ref().unwrap()[0];
        assert_eq!(first.key, "kubernetes.io/metadata.name");
        assert_eq!(
            (first.operator.as_str(), &first.values),
            ("NotIn", &Some(vec!["kube-system".to_owned()]))
        );
    }
    let foreign = service.webhooks(&converter(), None);
    assert!(foreign.iter().all(|entry| entry.client_config.ca_bundle.is_none()));
}
