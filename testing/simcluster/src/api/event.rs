//! Events, served both as `v1` and as `events.k8s.io/v1`. The store keeps the core form.

use serde_json::{Map, Value};

/// Selectable fields of core events.
pub(crate) const CORE_FIELDS: &[&str] = &[
    "involvedObject.kind",
    "involvedObject.namespace",
    "involvedObject.name",
    "involvedObject.uid",
    "involvedObject.apiVersion",
    "involvedObject.resourceVersion",
    "involvedObject.fieldPath",
    "reason",
    "reportingComponent",
    "source",
    "type",
];

/// Selectable fields of `events.k8s.io/v1` events.
pub(crate) const EVENTS_FIELDS: &[&str] = &[
    "regarding.kind",
    "regarding.namespace",
    "regarding.name",
    "regarding.uid",
    "regarding.apiVersion",
    "regarding.resourceVersion",
    "regarding.fieldPath",
    "reason",
    "reportingController",
    "type",
];

/// Pairs of (core name, events.k8s.io name).
const RENAMED: &[(&str, &str)] = &[
    ("message", "note"),
    ("involvedObject", "regarding"),
    ("source", "deprecatedSource"),
    ("firstTimestamp", "deprecatedFirstTimestamp"),
    ("lastTimestamp", "deprecatedLastTimestamp"),
    ("count", "deprecatedCount"),
    ("reportingComponent", "reportingController"),
];

/// Converts `events.k8s.io/v1` to `v1`.
pub(crate) fn to_core(mut event: Value) -> Value {
    if let Some(map) = event.as_object_mut() {
        for (core, modern) in RENAMED {
            rename(map, modern, core);
        }
        map.insert("apiVersion".into(), "v1".into());
    }
    event
}

/// Converts `v1` to `events.k8s.io/v1`.
pub(crate) fn from_core(mut event: Value) -> Value {
    if let Some(map) = event.as_object_mut() {
        for (core, modern) in RENAMED {
            rename(map, core, modern);
        }
        map.insert("apiVersion".into(), "events.k8s.io/v1".into());
    }
    event
}

fn rename(map: &mut Map<String, Value>, from: &str, to: &str) {
    if let Some(value) = map.remove(from) {
        map.insert(to.to_owned(), value);
    }
}
