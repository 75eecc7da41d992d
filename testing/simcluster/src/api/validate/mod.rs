//! Validation of the fields used here: names, metadata, and the rules of each kind.

mod claim;
mod names;
mod pod;
mod slice;

use serde_json::Value;

use super::error::FieldError;
use super::kind::Kind;
use super::meta;

pub(crate) use claim::needs_admin_namespace;

/// Part of an object that a request writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    /// All but the status.
    Main,
    /// The status only.
    Status,
    /// A namespace's finalizers.
    Finalize,
    /// A pod's node.
    Binding,
}

/// Validates a new object.
pub(crate) fn create(kind: &Kind, object: &Value) -> Vec<FieldError> {
    let mut errors = Vec::new();
    names::metadata(kind, object, &mut errors);
    match kind.plural {
        "pods" => pod::spec(object, &mut errors),
        "resourceclaims" => claim::spec(&object["spec"], "spec", &mut errors),
        "resourceclaimtemplates" => claim::spec(&object["spec"]["spec"], "spec.spec", &mut errors),
        "resourceslices" => slice::spec(&object["spec"], &mut errors),
        "deviceclasses" => claim::class(&object["spec"], &mut errors),
        _ => {}
    }
    errors
}

/// Validates an update.
pub(crate) fn update(kind: &Kind, part: Part, object: &Value, current: &Value) -> Vec<FieldError> {
    let mut errors = Vec::new();
    names::metadata(kind, object, &mut errors);
    new_finalizers(object, current, &mut errors);
    match (kind.plural, part) {
        ("pods", Part::Main) => pod::spec_update(object, current, &mut errors),
        ("resourceclaims", Part::Main) => immutable(object, current, &mut errors),
        ("resourceclaims", Part::Status) => claim::status(object, current, &mut errors),
        ("resourceclaimtemplates", _) => immutable(object, current, &mut errors),
        ("resourceslices", _) => {
            slice::spec(&object["spec"], &mut errors);
            slice::spec_update(&object["spec"], &current["spec"], &mut errors);
        }
        ("deviceclasses", _) => claim::class(&object["spec"], &mut errors),
        ("events", _) if !kind.group.is_empty() => event_fields(object, current, &mut errors),
        _ => {}
    }
    errors
}

/// Through `events.k8s.io`, only the series and metadata of an event may change; the core API
/// allows every change.
fn event_fields(object: &Value, current: &Value, errors: &mut Vec<FieldError>) {
    for field in [
        "involvedObject",
        "reason",
        "message",
        "source",
        "firstTimestamp",
        "lastTimestamp",
        "count",
        "type",
        "eventTime",
        "action",
        "related",
        "reportingComponent",
        "reportingInstance",
    ] {
        if object[field] != current[field] {
            errors.push(FieldError::invalid(field, object[field].clone(), "field is immutable"));
        }
    }
}

fn immutable(object: &Value, current: &Value, errors: &mut Vec<FieldError>) {
    if object["spec"] != current["spec"] {
        errors.push(FieldError::invalid("spec", object["spec"].clone(), "field is immutable"));
    }
}

fn new_finalizers(object: &Value, current: &Value, errors: &mut Vec<FieldError>) {
    if !meta::is_deleting(current) {
        return;
    }
    let known = meta::finalizers(current);
    let fresh: Vec<String> = meta::finalizers(object)
        .into_iter()
        .filter(|finalizer| !known.contains(finalizer))
        .map(|finalizer| format!("\"{finalizer}\""))
        .collect();
    if !fresh.is_empty() {
        let detail = format!(
            "no new finalizers can be added if the object is being deleted, found new finalizers []string{{{}}}",
            fresh.join(", ")
        );
        errors.push(FieldError::forbidden("metadata.finalizers", detail));
    }
}
