//! Pods: the fields used here, and the fields that may change after creation.

use serde_json::{Map, Value};

use super::super::error::FieldError;
use super::names;

pub(super) fn spec(pod: &Value, errors: &mut Vec<FieldError>) {
    let spec = &pod["spec"];
    if spec["containers"].as_array().is_none_or(Vec::is_empty) {
        errors.push(FieldError::required("spec.containers", ""));
    }
    let claims = names_of(&spec["resourceClaims"]);
    for list in ["initContainers", "containers"] {
        for (index, container) in spec[list].as_array().into_iter().flatten().enumerate() {
            self::container(&format!("spec.{list}[{index}]"), container, &claims, errors);
        }
    }
    for (index, claim) in spec["resourceClaims"].as_array().into_iter().flatten().enumerate() {
        pod_claim(&format!("spec.resourceClaims[{index}]"), claim, errors);
    }
    duplicates("spec.resourceClaims", &claims, errors);
    duplicates("spec.containers", &names_of(&spec["containers"]), errors);
}

fn container(path: &str, container: &Value, claims: &[&str], errors: &mut Vec<FieldError>) {
    names::label(&format!("{path}.name"), container["name"].as_str().unwrap_or_default(), errors);
    if container["image"].as_str().unwrap_or_default().trim().is_empty() {
        errors.push(FieldError::required(format!("{path}.image"), ""));
    }
    for (index, used) in
        container["resources"]["claims"].as_array().into_iter().flatten().enumerate()
    {
        let name = used["name"].as_str().unwrap_or_default();
        if !claims.contains(&name) {
            let known = match claims {
                [] => " which is empty".to_owned(),
                known => format!(": {}", known.join(", ")),
            };
            let detail = format!("must be one of the names in pod.spec.resourceClaims{known}");
            errors.push(FieldError::not_found(
                format!("{path}.resources.claims[{index}]"),
                name,
                detail,
            ));
        }
    }
}

fn pod_claim(path: &str, claim: &Value, errors: &mut Vec<FieldError>) {
    names::label(&format!("{path}.name"), claim["name"].as_str().unwrap_or_default(), errors);
    match (claim["resourceClaimName"].as_str(), claim["resourceClaimTemplateName"].as_str()) {
        (None, None) => errors.push(FieldError::invalid(
            path,
            claim["name"].clone(),
            "must specify one of: `resourceClaimName`, `resourceClaimTemplateName`",
        )),
        (Some(_), Some(_)) => errors.push(FieldError::invalid(
            path,
            claim["name"].clone(),
            "at most one of `resourceClaimName` or `resourceClaimTemplateName` may be specified",
        )),
        (Some(name), None) => {
            names::subdomain(&format!("{path}.resourceClaimName"), name, 253, errors)
        }
        (None, Some(name)) => {
            names::subdomain(&format!("{path}.resourceClaimTemplateName"), name, 253, errors)
        }
    }
}

fn names_of(list: &Value) -> Vec<&str> {
    list.as_array().into_iter().flatten().filter_map(|item| item["name"].as_str()).collect()
}

fn duplicates(path: &str, names: &[&str], errors: &mut Vec<FieldError>) {
    for (index, name) in names.iter().enumerate() {
        if names[..index].contains(name) {
            errors.push(FieldError::duplicate(format!("{path}[{index}].name"), *name));
        }
    }
}

/// Allows changes of images, activeDeadlineSeconds, additional tolerations and removed scheduling
/// gates; while gated also of the node selection.
pub(super) fn spec_update(pod: &Value, current: &Value, errors: &mut Vec<FieldError>) {
    let (new, old) = (&pod["spec"], &current["spec"]);
    let gated = old["schedulingGates"].as_array().is_some_and(|gates| !gates.is_empty());
    let gates_before = names_of(&old["schedulingGates"]);
    for (index, gate) in names_of(&new["schedulingGates"]).into_iter().enumerate() {
        if !gates_before.contains(&gate) {
            errors.push(FieldError::forbidden(
                format!("spec.schedulingGates[{index}]"),
                "only deletion is allowed, but found new scheduling gate",
            ));
        }
    }
    let old_tolerations = old["tolerations"].as_array().map(Vec::as_slice).unwrap_or_default();
    let new_tolerations = new["tolerations"].as_array().map(Vec::as_slice).unwrap_or_default();
    if old_tolerations.iter().any(|toleration| !new_tolerations.contains(toleration)) {
        errors.push(FieldError::forbidden(
            "spec.tolerations",
            "existing toleration can not be modified except its tolerationSeconds",
        ));
    }
    if fixed(new, gated) != fixed(old, gated) {
        errors.push(FieldError::forbidden(
            "spec",
            "pod updates may not change fields other than `spec.containers[*].image`,`spec.initContainers[*].image`,`spec.activeDeadlineSeconds`,`spec.tolerations` (only additions to existing tolerations),`spec.terminationGracePeriodSeconds` (allow it to be set to 1 if it was previously negative)",
        ));
    }
}

/// Returns the spec without the fields that may change.
fn fixed(spec: &Value, gated: bool) -> Map<String, Value> {
    let mut spec = spec.as_object().cloned().unwrap_or_default();
    for field in ["activeDeadlineSeconds", "tolerations", "schedulingGates"] {
        spec.remove(field);
    }
    if gated {
        spec.remove("nodeSelector");
        spec.remove("affinity");
    }
    for list in ["containers", "initContainers"] {
        for container in spec.get_mut(list).and_then(Value::as_array_mut).into_iter().flatten() {
            if let Some(container) = container.as_object_mut() {
                container.remove("image");
            }
        }
    }
    spec
}
