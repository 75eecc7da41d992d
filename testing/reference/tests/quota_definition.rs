//! Holds the CustomResourceDefinition of the chart to the type that the controller reads.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeSet;
use std::path::Path;

use k8s_openapi::Resource;
use serde_json::Value;
use tessera_api::quota::{GpuQuota, GpuQuotaSpec, GpuQuotaStatus, QuotaResource};

fn definition() -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/chart/golden/default.yaml");
    let text = std::fs::read_to_string(path).unwrap();
    let is_definition = |document: &&str| document.contains("kind: CustomResourceDefinition");
    serde_saphyr::from_str(text.split("\n---").find(is_definition).unwrap()).unwrap()
}

fn names(properties: &Value) -> BTreeSet<String> {
    properties["properties"].as_object().unwrap().keys().cloned().collect()
}

fn fields(object: Value) -> BTreeSet<String> {
    object.as_object().unwrap().keys().cloned().collect()
}

#[test]
fn the_definition_has_the_fields_of_the_type() {
    let definition = definition();
    let version = &definition["spec"]["versions"][0];
    assert_eq!(definition["spec"]["group"], GpuQuota::GROUP);
    assert_eq!(definition["spec"]["names"]["kind"], GpuQuota::KIND);
    assert_eq!(definition["spec"]["names"]["plural"], GpuQuota::URL_PATH_SEGMENT);
    assert_eq!(version["name"], GpuQuota::VERSION);
    assert!(version["subresources"]["status"].is_object());
    let properties = &version["schema"]["openAPIV3Schema"]["properties"];
    let spec = GpuQuotaSpec { device_class_names: vec!["c".into()], ..GpuQuotaSpec::default() };
    assert_eq!(names(&properties["spec"]), fields(serde_json::to_value(spec).unwrap()));
    let status = serde_json::to_value(GpuQuotaStatus::default()).unwrap();
    assert_eq!(names(&properties["status"]), fields(status));
    let resources = QuotaResource::ALL.map(|resource| resource.name().to_owned());
    assert_eq!(names(&properties["spec"]["properties"]["hard"]), resources.into());
}
