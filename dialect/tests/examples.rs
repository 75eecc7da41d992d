//! Pods of every dialect: `tests/examples/DIALECT/ID.yaml`, and the expected claim of each in
//! `tests/examples/DIALECT.yaml`.
//!
//! Fields of an expectation: `settings` of the dialect; `claim` in the notation of the module
//! `notation`, or `none`, with `selectors`, `uses` (container and requests), `env`, `scheduler` and
//! `warnings`; or `refused`, the beginning of the error; or `leaves`.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod notation;

use std::collections::BTreeMap;
use std::path::Path;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::ResourceClaimTemplateSpec;
use serde::Deserialize;
use serde_json::{Value, json};
use tessera_dialect::{
    CONVERTED_ANNOTATION, Conversion, ConversionError, Converter, Dialect, ManifestForm,
    NamespaceView, Settings, Template, Verdict,
};

/// Expected result of a conversion.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Expected {
    settings: Option<Value>,
    claim: Option<String>,
    #[serde(default)]
    selectors: Vec<String>,
    #[serde(default)]
    warnings: Vec<String>,
    #[serde(default)]
    uses: Vec<String>,
    #[serde(default)]
    env: Vec<String>,
    scheduler: Option<String>,
    refused: Option<String>,
    leaves: Option<String>,
}

/// An example: a pod and the expected result.
struct Example {
    name: String,
    dialect: Dialect,
    pod: Value,
    expected: Expected,
}

impl Example {
    fn converter(&self) -> Converter {
        let own = self.expected.settings.clone().unwrap_or_else(|| json!({}));
        let dialect = self.dialect.name();
        let settings = json!({"default": [dialect], "dialects": {dialect: own}});
        Converter::new(serde_json::from_value(settings).unwrap()).unwrap()
    }

    fn verdict(&self) -> Result<Verdict, ConversionError> {
        self.converter().convert(&self.pod, namespace())
    }

    fn check(&self) {
        let Expected { claim, refused, leaves, .. } = &self.expected;
        let results = [claim, refused, leaves].into_iter().flatten().count();
        assert_eq!(results, 1, "claim, refused or leaves");
        match self.verdict() {
            Err(error) => {
                let text = error.to_string();
                let beginning = refused.as_ref().unwrap_or_else(|| panic!("{text}"));
                assert!(text.starts_with(beginning), "{text}");
                let dialect = format!("(read as a pod of {})", self.dialect);
                assert!(text.ends_with(&dialect), "{text}");
            }
            Ok(Verdict::Leave(reason)) => {
                assert_eq!(Some(format!("{reason:?}")), *leaves);
            }
            Ok(Verdict::Convert(conversion)) => self.check_conversion(&conversion),
        }
    }

    fn check_conversion(&self, conversion: &Conversion) {
        let spec = conversion.template.as_ref().map(|template| &template.spec);
        let claim = spec.map_or("none".to_owned(), notation::notation);
        assert_eq!(Some(claim), self.expected.claim);
        let selectors = spec.map(notation::selectors).unwrap_or_default();
        assert_eq!(selectors, self.expected.selectors);
        let warnings = &conversion.warnings;
        assert_eq!(warnings.len(), self.expected.warnings.len(), "{warnings:?}");
        for (warning, expected) in warnings.iter().zip(&self.expected.warnings) {
            assert!(warning.contains(expected), "{warning}");
        }
        let mut converted = self.pod.clone();
        json_patch::patch(&mut converted, &conversion.patch.0).expect("the patch applies");
        let typed: Pod = serde_json::from_value(converted.clone()).expect("still a pod");
        self.check_containers(&typed);
        if self.expected.scheduler.is_some() {
            assert_eq!(typed.spec.unwrap().scheduler_name, self.expected.scheduler);
        }
        self.check_names_are_gone(&converted);
        let again = self.converter().convert(&converted, namespace()).unwrap();
        assert_eq!(format!("{again:?}"), "Leave(Converted)");
        let template = self.converter().template(&converted).expect("computed again");
        assert_eq!(template, conversion.template);
        if let Some(spec) = spec {
            serde_json::from_value::<ResourceClaimTemplateSpec>(spec.clone()).expect("a template");
        }
    }

    fn check_containers(&self, pod: &Pod) {
        let spec = pod.spec.as_ref().unwrap();
        let containers = spec.init_containers.iter().flatten().chain(&spec.containers);
        let containers: BTreeMap<_, _> = containers.map(|c| (c.name.as_str(), c)).collect();
        for line in &self.expected.uses {
            let (name, requests) = line.split_once(": ").unwrap();
            let claims = containers[name].resources.as_ref().unwrap().claims.as_ref().unwrap();
            let used: Vec<_> = claims.iter().filter_map(|claim| claim.request.as_deref()).collect();
            assert_eq!(used.join(","), requests);
        }
        for line in &self.expected.env {
            let (name, variable) = line.split_once(' ').unwrap();
            let variables = containers[name].env.iter().flatten();
            let mut written =
                variables.map(|v| format!("{}={}", v.name, v.value.as_deref().unwrap_or("")));
            assert!(written.any(|written| written == variable), "{variable}");
        }
    }

    /// Checks that no container names an extended resource, and that all other fields are as they
    /// were.
    fn check_names_are_gone(&self, converted: &Value) {
        let before = without_changes(&self.pod);
        assert_eq!(without_changes(converted), before);
        let text = converted["spec"].to_string();
        for list in ["containers", "initContainers"] {
            for container in converted["spec"][list].as_array().into_iter().flatten() {
                for amounts in ["limits", "requests"] {
                    let names = container["resources"][amounts].as_object();
                    let extended = names.into_iter().flatten().find(|(name, _)| name.contains('/'));
                    assert!(extended.is_none(), "{text}");
                }
            }
        }
    }
}

/// Returns the pod without all fields that a conversion may change.
fn without_changes(pod: &Value) -> Value {
    let mut pod = pod.clone();
    pod["metadata"].as_object_mut().unwrap().remove("annotations");
    let spec = pod["spec"].as_object_mut().unwrap();
    spec.remove("resourceClaims");
    spec.remove("schedulerName");
    for list in ["containers", "initContainers"] {
        for container in spec.get_mut(list).and_then(Value::as_array_mut).into_iter().flatten() {
            let container = container.as_object_mut().unwrap();
            container.remove("resources");
            container.remove("env");
        }
    }
    pod
}

fn namespace() -> NamespaceView<'static> {
    static LABELS: BTreeMap<String, String> = BTreeMap::new();
    NamespaceView { name: "team-a", labels: &LABELS }
}

fn examples() -> Vec<Example> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/examples");
    let mut examples = Vec::new();
    for dialect in Dialect::ALL {
        let index = directory.join(format!("{dialect}.yaml"));
        let index = std::fs::read_to_string(index).unwrap();
        let index: BTreeMap<String, Expected> = serde_saphyr::from_str(&index).unwrap();
        let pods = std::fs::read_dir(directory.join(dialect.name())).unwrap().count();
        assert_eq!(pods, index.len(), "{dialect}: an expectation for each pod");
        for (name, expected) in index {
            let path = directory.join(format!("{dialect}/{name}.yaml"));
            let pod = std::fs::read_to_string(path).unwrap();
            let pod = serde_saphyr::from_str(&pod).unwrap();
            examples.push(Example { name, dialect, pod, expected });
        }
    }
    examples
}

#[test]
fn pods_of_every_dialect_become_the_expected_claims() {
    let mut failed = Vec::new();
    for example in examples() {
        let check = std::panic::AssertUnwindSafe(|| example.check());
        if let Err(panic) = std::panic::catch_unwind(check) {
            let text = panic.downcast_ref::<String>().cloned();
            let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
            failed.push(format!("{}: {}", example.name, text.unwrap_or_default()));
        }
    }
    assert!(failed.is_empty(), "{} failed:\n{}", failed.len(), failed.join("\n"));
    assert!(examples().len() > 120);
}

#[test]
fn the_webhook_and_the_command_give_the_same_pod() {
    let (mut converted, mut refused) = (0, 0);
    for example in examples() {
        let converter = example.converter();
        let mut own_name = |template: &Template| template.name.clone();
        let mut form = ManifestForm { template_name: &mut own_name, add_tolerations: false };
        let written = converter.convert_manifest(&example.pod, namespace(), &mut form);
        let admitted = converter.admit(&example.pod, "team-a", example.dialect);
        match (written, admitted) {
            (Ok(Verdict::Convert(written)), Ok(Verdict::Convert(admitted))) => {
                assert_eq!(written.template, admitted.template, "{}", example.name);
                assert_eq!(written.warnings, admitted.warnings, "{}", example.name);
                let pod = |conversion: &Conversion| {
                    let mut pod = example.pod.clone();
                    json_patch::patch(&mut pod, &conversion.patch.0).unwrap();
                    without_original(pod)
                };
                assert_eq!(pod(&written), pod(&admitted), "{}", example.name);
                converted += 1;
            }
            (Ok(written), Ok(admitted)) => assert_eq!(written, admitted, "{}", example.name),
            (Err(written), Err(admitted)) => {
                assert_eq!(written.to_string(), admitted.to_string(), "{}", example.name);
                refused += 1;
            }
            other => panic!("{}: {other:?}", example.name),
        }
    }
    assert!(converted > 60 && refused > 20, "{converted} {refused}");
}

/// Returns the pod without the annotation of the webhook.
fn without_original(mut pod: Value) -> Value {
    let metadata = pod["metadata"].as_object_mut().unwrap();
    if let Some(annotations) = metadata.get_mut("annotations").and_then(Value::as_object_mut) {
        annotations.remove(CONVERTED_ANNOTATION);
        if annotations.is_empty() {
            metadata.remove("annotations");
        }
    }
    pod
}

#[test]
fn examples_convert_without_settings_of_other_dialects() {
    for example in examples().iter().filter(|example| example.expected.settings.is_none()) {
        let all = Converter::new(Settings::with_defaults(&[example.dialect])).unwrap();
        let alone = example.verdict().map_err(|error| error.to_string());
        let beside = all.convert(&example.pod, namespace()).map_err(|error| error.to_string());
        assert_eq!(alone, beside, "{}", example.name);
    }
}

#[test]
fn converted_annotation_names_what_was_removed() {
    let example = examples().into_iter().find(|example| example.name == "H9").unwrap();
    let Ok(Verdict::Convert(conversion)) = example.verdict() else { panic!("refused") };
    let mut converted = example.pod.clone();
    json_patch::patch(&mut converted, &conversion.patch.0).unwrap();
    let annotation = converted["metadata"]["annotations"][CONVERTED_ANNOTATION].as_str().unwrap();
    let original: Value = serde_json::from_str(annotation).unwrap();
    assert_eq!(original["dialect"], "hami");
    assert_eq!(original["containers"]["b"]["limits"]["nvidia.com/gpu"], "2");
    assert_eq!(original["annotations"]["nvidia.com/nouse-gputype"], "PCIE");
}
