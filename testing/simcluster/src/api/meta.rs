//! Reads and writes `metadata` of objects in JSON form.

use jiff::Timestamp;
use serde_json::{Map, Value, json};

/// Returns the time `seconds_ahead` seconds after `now`.
pub(crate) fn later(now: Timestamp, seconds_ahead: i64) -> String {
    seconds(now.checked_add(jiff::SignedDuration::from_secs(seconds_ahead)).unwrap_or(now))
}

/// Formats a time with the precision of `metadata`.
pub(crate) fn seconds(time: Timestamp) -> String {
    time.strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}

/// Returns `metadata`, created if absent.
pub(crate) fn metadata_mut(object: &mut Value) -> &mut Map<String, Value> {
    if !object.is_object() {
        *object = json!({});
    }
    if !object["metadata"].is_object() {
        object["metadata"] = json!({});
    }
    object["metadata"].as_object_mut().expect("invariant: it was set to an object above")
}

fn text<'a>(object: &'a Value, field: &str) -> &'a str {
    object["metadata"][field].as_str().unwrap_or_default()
}

pub(crate) fn name(object: &Value) -> &str {
    text(object, "name")
}

pub(crate) fn namespace(object: &Value) -> &str {
    text(object, "namespace")
}

pub(crate) fn uid(object: &Value) -> &str {
    text(object, "uid")
}

pub(crate) fn resource_version(object: &Value) -> &str {
    text(object, "resourceVersion")
}

pub(crate) fn set_resource_version(object: &mut Value, revision: u64) {
    metadata_mut(object).insert("resourceVersion".into(), revision.to_string().into());
}

pub(crate) fn is_deleting(object: &Value) -> bool {
    object["metadata"]["deletionTimestamp"].is_string()
}

pub(crate) fn grace_seconds(object: &Value) -> i64 {
    object["metadata"]["deletionGracePeriodSeconds"].as_i64().unwrap_or(0)
}

pub(crate) fn finalizers(object: &Value) -> Vec<&str> {
    object["metadata"]["finalizers"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(Value::as_str)
        .collect()
}

pub(crate) fn label<'a>(object: &'a Value, key: &str) -> Option<&'a str> {
    object["metadata"]["labels"][key].as_str()
}

/// Copies one metadata field from `from`, or removes it if `from` has none.
pub(crate) fn restore(object: &mut Value, from: &Value, field: &str) {
    let metadata = metadata_mut(object);
    match &from["metadata"][field] {
        Value::Null => metadata.remove(field),
        value => metadata.insert(field.to_owned(), value.clone()),
    };
}

/// Returns five characters as the API server appends them to `generateName`: no vowels, no
/// look-alikes.
pub(crate) fn random_suffix() -> String {
    const ALPHABET: &[u8; 27] = b"bcdfghjklmnpqrstvwxz2456789";
    let random = uuid::Uuid::new_v4();
    random.as_bytes()[..5]
        .iter()
        .map(|byte| char::from(ALPHABET[usize::from(*byte) % ALPHABET.len()]))
        .collect()
}

/// Returns a new object's UID.
pub(crate) fn new_uid() -> String {
    uuid::Uuid::new_v4().to_string()
}
