//! Holds the CustomResourceDefinitions of the chart to the types that the controller reads.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeSet;
use std::path::Path;

use k8s_openapi::Resource;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use k8s_openapi::jiff::Timestamp;
use serde_json::Value;
use tessera_api::defaults::{GpuDefaults, GpuDefaultsSpec};
use tessera_api::quota::{GpuQuota, GpuQuotaSpec, GpuQuotaStatus, QuotaResource};
use tessera_api::resize::{GpuResize, GpuResizeSpec, GpuResizeStatus, RequestedSize, SizedShare};

fn definition(plural: &str) -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/chart/golden/default.yaml");
    let text = std::fs::read_to_string(path).unwrap();
    let name = format!("name: {plural}.gpu.tessera.dev");
    let is_definition = |document: &&str| {
        document.contains("kind: CustomResourceDefinition") && document.contains(&name)
    };
    serde_saphyr::from_str(text.split("\n---").find(is_definition).unwrap()).unwrap()
}

fn names(properties: &Value) -> BTreeSet<String> {
    properties["properties"].as_object().unwrap().keys().cloned().collect()
}

fn fields(object: Value) -> BTreeSet<String> {
    object.as_object().unwrap().keys().cloned().collect()
}

/// Returns the version of the kind's definition, whose names are those of the type.
fn version<K: Resource>() -> Value {
    let definition = definition(K::URL_PATH_SEGMENT);
    let spec = &definition["spec"];
    assert_eq!(spec["group"], K::GROUP);
    assert_eq!(spec["names"]["kind"], K::KIND);
    assert_eq!(spec["versions"][0]["name"], K::VERSION);
    spec["versions"][0].clone()
}

#[test]
fn the_definition_of_defaults_has_the_fields_of_the_type() {
    let version = version::<GpuDefaults>();
    let properties = &version["schema"]["openAPIV3Schema"]["properties"];
    let spec = serde_json::to_value(GpuDefaultsSpec::default()).unwrap();
    assert_eq!(names(&properties["spec"]), fields(spec));
}

#[test]
fn the_definition_of_quotas_has_the_fields_of_the_type() {
    let version = version::<GpuQuota>();
    assert!(version["subresources"]["status"].is_object());
    let properties = &version["schema"]["openAPIV3Schema"]["properties"];
    let spec = GpuQuotaSpec { device_class_names: vec!["c".into()], ..GpuQuotaSpec::default() };
    assert_eq!(names(&properties["spec"]), fields(serde_json::to_value(spec).unwrap()));
    let status = serde_json::to_value(GpuQuotaStatus::default()).unwrap();
    assert_eq!(names(&properties["status"]), fields(status));
    let resources = QuotaResource::ALL.map(|resource| resource.name().to_owned());
    assert_eq!(names(&properties["spec"]["properties"]["hard"]), resources.into());
}

#[test]
fn the_definition_of_resizes_has_the_fields_of_the_type() {
    let version = version::<GpuResize>();
    assert!(version["subresources"]["status"].is_object());
    let properties = &version["schema"]["openAPIV3Schema"]["properties"];
    let requested =
        RequestedSize { name: "r".into(), memory: Some(1.into()), cores: Some(1.into()) };
    let spec = GpuResizeSpec { requests: vec![requested] };
    let spec = serde_json::to_value(spec).unwrap();
    assert_eq!(names(&properties["spec"]), fields(spec.clone()));
    let request = &properties["spec"]["properties"]["requests"]["items"];
    assert_eq!(names(request), fields(spec["requests"][0].clone()));
    let sizes = vec![SizedShare::default()];
    let status = GpuResizeStatus {
        node: Some(String::new()),
        claim_uid: Some(String::new()),
        granted: sizes.clone(),
        grant: Some(1),
        applied: sizes,
        applied_grant: Some(1),
        conditions: vec![Condition {
            type_: String::new(),
            status: String::new(),
            reason: String::new(),
            message: String::new(),
            observed_generation: Some(1),
            last_transition_time: Time(Timestamp::UNIX_EPOCH),
        }],
    };
    let status = serde_json::to_value(status).unwrap();
    let known = &properties["status"];
    assert_eq!(names(known), fields(status.clone()));
    let condition = &known["properties"]["conditions"]["items"];
    assert_eq!(names(condition), fields(status["conditions"][0].clone()));
    for list in ["granted", "applied"] {
        assert_eq!(names(&known["properties"][list]["items"]), fields(status[list][0].clone()));
    }
}
