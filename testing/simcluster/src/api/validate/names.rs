//! Names, labels and annotations.

use serde_json::Value;

use super::super::error::FieldError;
use super::super::kind::Kind;
use super::super::meta;

/// Total size of all annotations, in bytes.
const ANNOTATIONS_LIMIT: usize = 256 * 1024;

const LABEL_RULE: &str = "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must start and end with an alphanumeric character (e.g. 'my-name',  or '123-abc', regex used for validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?')";
const SUBDOMAIN_RULE: &str = "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start and end with an alphanumeric character (e.g. 'example.com', regex used for validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')";
const VALUE_RULE: &str = "a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character (e.g. 'MyValue',  or 'my_value',  or '12345', regex used for validation is '(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?')";
const QUALIFIED_RULE: &str = "name part must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation is '([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]')";

/// Returns true for a DNS label of at most 63 characters.
pub(super) fn is_label(text: &str) -> bool {
    let inner = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    !text.is_empty()
        && text.len() <= 63
        && text.chars().all(inner)
        && !text.starts_with('-')
        && !text.ends_with('-')
}

/// Returns true for a DNS subdomain of at most `most` characters. Its labels may exceed 63, as
/// upstream allows.
pub(super) fn is_subdomain(text: &str, most: usize) -> bool {
    let part = |part: &str| {
        let inner = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
        !part.is_empty()
            && part.chars().all(inner)
            && !part.starts_with('-')
            && !part.ends_with('-')
    };
    text.len() <= most && text.split('.').all(part)
}

fn is_name_part(text: &str) -> bool {
    let edge = |c: Option<char>| c.is_some_and(|c| c.is_ascii_alphanumeric());
    text.len() <= 63
        && text.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
        && edge(text.chars().next())
        && edge(text.chars().next_back())
}

fn is_qualified(text: &str) -> bool {
    match text.split_once('/') {
        Some((prefix, name)) => is_subdomain(prefix, 253) && is_name_part(name),
        None => is_name_part(text),
    }
}

pub(super) fn label(field: &str, text: &str, errors: &mut Vec<FieldError>) {
    if text.is_empty() {
        errors.push(FieldError::required(field, ""));
    } else if !is_label(text) {
        errors.push(FieldError::invalid(field, text, LABEL_RULE));
    }
}

pub(super) fn subdomain(field: &str, text: &str, most: usize, errors: &mut Vec<FieldError>) {
    if text.is_empty() {
        errors.push(FieldError::required(field, ""));
    } else if text.len() > most {
        errors.push(FieldError::too_long(field, most));
    } else if !is_subdomain(text, most) {
        errors.push(FieldError::invalid(field, text, SUBDOMAIN_RULE));
    }
}

/// Checks a driver name: a subdomain of at most 63 characters, upper case allowed.
pub(super) fn driver(field: &str, text: &str, errors: &mut Vec<FieldError>) {
    if text.is_empty() {
        errors.push(FieldError::required(field, ""));
    } else if text.len() > 63 {
        errors.push(FieldError::too_long(field, 63));
    } else if !is_subdomain(&text.to_ascii_lowercase(), 63) {
        errors.push(FieldError::invalid(field, text, SUBDOMAIN_RULE));
    }
}

/// Checks a label or attribute key in the qualified form.
pub(super) fn qualified(field: &str, text: &str, errors: &mut Vec<FieldError>) {
    if !is_qualified(text) {
        errors.push(FieldError::invalid(field, text, QUALIFIED_RULE));
    }
}

pub(super) fn metadata(kind: &Kind, object: &Value, errors: &mut Vec<FieldError>) {
    let name = meta::name(object);
    if name.is_empty() {
        errors.push(FieldError::required("metadata.name", "name or generateName is required"));
    } else if kind.plural == "namespaces" {
        label("metadata.name", name, errors);
    } else {
        subdomain("metadata.name", name, 253, errors);
    }
    for (key, value) in object["metadata"]["labels"].as_object().into_iter().flatten() {
        qualified("metadata.labels", key, errors);
        let value = value.as_str().unwrap_or_default();
        if !value.is_empty() && !is_name_part(value) {
            errors.push(FieldError::invalid("metadata.labels", value, VALUE_RULE));
        }
    }
    let mut size = 0;
    for (key, value) in object["metadata"]["annotations"].as_object().into_iter().flatten() {
        qualified("metadata.annotations", &key.to_ascii_lowercase(), errors);
        size += key.len() + value.as_str().unwrap_or_default().len();
    }
    if size > ANNOTATIONS_LIMIT {
        errors.push(FieldError::too_long("metadata.annotations", ANNOTATIONS_LIMIT));
    }
    for finalizer in meta::finalizers(object) {
        qualified("metadata.finalizers", finalizer, errors);
    }
    owners(object, errors);
}

fn owners(object: &Value, errors: &mut Vec<FieldError>) {
    let owners = object["metadata"]["ownerReferences"].as_array();
    for (index, owner) in owners.into_iter().flatten().enumerate() {
        for field in ["apiVersion", "kind", "name", "uid"] {
            if owner[field].as_str().unwrap_or_default().is_empty() {
                let path = format!("metadata.ownerReferences[{index}].{field}");
                errors.push(FieldError::invalid(path, "", format!("{field} must not be empty")));
            }
        }
    }
    let controllers =
        owners.into_iter().flatten().filter(|owner| owner["controller"] == true).count();
    if controllers > 1 {
        errors.push(FieldError::invalid(
            "metadata.ownerReferences",
            controllers,
            "Only one reference can have Controller set to true",
        ));
    }
}
