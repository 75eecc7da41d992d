//! Patches: merge, JSON, strategic merge, and the used part of server-side apply.
//!
//! Lists are merged by the keys below, which are those of the Kubernetes API for the served kinds.
//! Apply records the last applied fields of each manager and removes the fields that it no longer
//! names. Conflicts between managers are ignored, as with `force`, and other writes than apply have
//! no field owners.

use std::collections::{BTreeMap, HashMap};

use json_patch::PatchOperation;
use serde_json::{Map, Value};

use super::error::ApiError;

/// Body of a PATCH, by media type.
#[derive(Clone, Debug)]
pub(crate) enum Patch {
    Json(json_patch::Patch),
    Merge(Value),
    Strategic(Value),
    Apply(Value),
}

impl Patch {
    /// Parses a body.
    ///
    /// # Errors
    /// Returns 415 for another media type, 400 for an invalid body.
    pub(crate) fn parse(media_type: &str, body: &[u8]) -> Result<Self, ApiError> {
        let value = || {
            serde_json::from_slice::<Value>(body)
                .map_err(|error| ApiError::bad_request(error.to_string()))
        };
        match media_type {
            "application/json-patch+json" => serde_json::from_slice(body)
                .map(Self::Json)
                .map_err(|error| ApiError::bad_request(format!("error decoding patch: {error}"))),
            "application/merge-patch+json" => value().map(Self::Merge),
            "application/strategic-merge-patch+json" => value().map(Self::Strategic),
            "application/apply-patch+yaml" => yaml(body).map(Self::Apply),
            other => Err(ApiError::unsupported_media_type(other)),
        }
    }

    /// Returns the patched object.
    ///
    /// # Errors
    /// Returns 422 for a JSON patch that does not apply (a failed test, a missing path).
    pub(crate) fn apply(&self, current: &Value) -> Result<Value, ApiError> {
        let mut object = current.clone();
        match self {
            Self::Json(patch) => json_patch::patch(&mut object, &without_absent(patch, current))
                .map_err(|error| {
                    ApiError::unprocessable(format!(
                        "the server rejected our request due to an error in our request: {error}"
                    ))
                })?,
            Self::Merge(patch) => json_patch::merge(&mut object, patch),
            Self::Strategic(patch) => merge_object(&mut object, patch, Style::Strategic),
            Self::Apply(patch) => merge_object(&mut object, patch, Style::Apply),
        }
        Ok(object)
    }
}

/// Returns the patch without its tests that a field is null which is absent: they hold in the API
/// server's library, and fail in this one.
fn without_absent(patch: &json_patch::Patch, current: &Value) -> json_patch::Patch {
    let holds = |operation: &&PatchOperation| match operation {
        PatchOperation::Test(test) => {
            test.value.is_null() && current.pointer(test.path.as_str()).is_none()
        }
        _ => false,
    };
    json_patch::Patch(patch.0.iter().filter(|operation| !holds(operation)).cloned().collect())
}

/// Parses YAML, of which JSON is a subset.
pub(crate) fn yaml(body: &[u8]) -> Result<Value, ApiError> {
    if let Ok(value) = serde_json::from_slice(body) {
        return Ok(value);
    }
    let text =
        std::str::from_utf8(body).map_err(|error| ApiError::bad_request(error.to_string()))?;
    serde_saphyr::from_str(text)
        .map_err(|error| ApiError::bad_request(format!("error decoding YAML: {error}")))
}

#[derive(Clone, Copy, PartialEq)]
enum Style {
    Strategic,
    Apply,
}

/// Returns the merge keys of a list under this key, for strategic merge and apply.
fn merge_keys(list: &str, style: Style) -> Option<&'static [&'static str]> {
    let keys: &[&str] = match list {
        "conditions" | "addresses" => &["type"],
        "containers"
        | "initContainers"
        | "ephemeralContainers"
        | "volumes"
        | "env"
        | "imagePullSecrets"
        | "resourceClaims"
        | "resourceClaimStatuses"
        | "schedulingGates" => &["name"],
        "claims" if style == Style::Apply => &["name"],
        "volumeMounts" => &["mountPath"],
        "volumeDevices" => &["devicePath"],
        "ports" => &["containerPort"],
        "ownerReferences" | "reservedFor" => &["uid"],
        "hostAliases" | "podIPs" | "hostIPs" => &["ip"],
        "topologySpreadConstraints" => &["topologyKey"],
        // `status.devices` of a claim. `spec.devices` is an object in a claim and an atomic list in
        // a slice.
        "devices" if style == Style::Apply => &["driver", "device", "pool", "shareID"],
        _ => return None,
    };
    Some(keys)
}

const PRIMITIVE_SETS: &[&str] = &["finalizers"];

fn merge_object(target: &mut Value, patch: &Value, style: Style) {
    let Some(patch) = patch.as_object() else {
        *target = patch.clone();
        return;
    };
    if patch.get("$patch").and_then(Value::as_str) == Some("replace") {
        *target = Value::Object(without_directives(patch));
        return;
    }
    if !target.is_object() {
        *target = Value::Object(Map::new());
    }
    let Some(map) = target.as_object_mut() else { return };
    if let Some(Value::Array(kept)) = patch.get("$retainKeys") {
        map.retain(|key, _| kept.iter().any(|kept| kept.as_str() == Some(key)));
    }
    let before = if style == Style::Strategic { map.clone() } else { Map::new() };
    for (key, value) in patch {
        if let Some(list) = key.strip_prefix("$deleteFromPrimitiveList/") {
            remove_items(map.get_mut(list), value);
        } else if !key.starts_with('$') {
            merge_field(map, key, value, style);
        }
    }
    if style == Style::Strategic {
        for (key, value) in patch {
            match key.strip_prefix("$setElementOrder/") {
                Some(list) => reorder(map, &before, list, value),
                None if patch.contains_key(&format!("$setElementOrder/{key}")) => {}
                None => reorder(map, &before, key, value),
            }
        }
    }
}

fn merge_field(map: &mut Map<String, Value>, key: &str, value: &Value, style: Style) {
    match value {
        Value::Null => {
            map.remove(key);
        }
        Value::Object(inner) if inner.get("$patch").and_then(Value::as_str) == Some("delete") => {
            map.remove(key);
        }
        Value::Object(_) => merge_object(map.entry(key).or_insert(Value::Null), value, style),
        Value::Array(items) => match merge_keys(key, style) {
            Some(keys) if is_mergeable(items, keys) => merge_list(map, key, items, keys, style),
            _ if PRIMITIVE_SETS.contains(&key) => union(map, key, items),
            _ => {
                map.insert(key.to_owned(), value.clone());
            }
        },
        _ => {
            map.insert(key.to_owned(), value.clone());
        }
    }
}

/// Returns true if the items have the first key, or are directives for the whole list.
///
/// A list of another kind may have the same name (`spec.devices` of a slice has no `driver`).
fn is_mergeable(items: &[Value], keys: &[&str]) -> bool {
    items.iter().all(|item| item.get(keys[0]).is_some() || item.get("$patch").is_some())
}

fn merge_list(
    map: &mut Map<String, Value>,
    key: &str,
    items: &[Value],
    keys: &[&str],
    style: Style,
) {
    let list = map.entry(key).or_insert_with(|| Value::Array(Vec::new()));
    if !list.is_array() {
        *list = Value::Array(Vec::new());
    }
    let Some(list) = list.as_array_mut() else { return };
    if items.iter().any(|item| item["$patch"] == "replace") {
        list.clear();
    }
    for item in items {
        let position = list.iter().position(|other| is_same_item(other, item, keys));
        match (item["$patch"].as_str(), position) {
            (Some("replace"), _) | (Some("delete"), None) => {}
            (Some("delete"), Some(at)) => {
                list.remove(at);
            }
            (_, Some(at)) => merge_object(&mut list[at], item, style),
            (_, None) => {
                let mut fresh = Value::Null;
                merge_object(&mut fresh, item, style);
                list.push(fresh);
            }
        }
    }
}

fn union(map: &mut Map<String, Value>, key: &str, items: &[Value]) {
    let list = map.entry(key).or_insert_with(|| Value::Array(Vec::new()));
    if let Some(list) = list.as_array_mut() {
        for item in items {
            if !list.contains(item) {
                list.push(item.clone());
            }
        }
    }
}

fn remove_items(list: Option<&mut Value>, gone: &Value) {
    if let (Some(Value::Array(list)), Value::Array(gone)) = (list, gone) {
        list.retain(|item| !gone.contains(item));
    }
}

/// Orders a merged list as the strategic merge defines it.
///
/// The patch's items come in the patch's order, the others stay in place, and items known to both
/// keep the server's order.
fn reorder(map: &mut Map<String, Value>, before: &Map<String, Value>, list: &str, order: &Value) {
    let keys = merge_keys(list, Style::Strategic).unwrap_or_default();
    if keys.is_empty() && !PRIMITIVE_SETS.contains(&list) {
        return;
    }
    let (Some(Value::Array(merged)), Value::Array(order)) = (map.get_mut(list), order) else {
        return;
    };
    let server = before.get(list).and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
    let place = |list: &[Value], item: &Value| {
        list.iter().position(|other| is_same_item(other, item, keys))
    };
    let (mut patched, mut others): (Vec<Value>, Vec<Value>) =
        std::mem::take(merged).into_iter().partition(|item| place(order, item).is_some());
    patched.sort_by_key(|item| place(order, item));
    others.sort_by_key(|item| place(server, item));
    let (mut patched, mut others) = (patched.into_iter().peekable(), others.into_iter().peekable());
    while let (Some(item), Some(other)) = (patched.peek(), others.peek()) {
        let other_first = match (place(server, other), place(server, item)) {
            (Some(other), Some(item)) => other < item,
            _ => false,
        };
        merged.extend(if other_first { others.next() } else { patched.next() });
    }
    merged.extend(patched);
    merged.extend(others);
}

fn without_directives(patch: &Map<String, Value>) -> Map<String, Value> {
    patch
        .iter()
        .filter(|(key, _)| !key.starts_with('$'))
        .map(|(key, value)| (key.clone(), value.clone()))
        .collect()
}

/// Last applied fields of each manager, by object UID.
#[derive(Debug, Default)]
pub(crate) struct AppliedFields {
    by_object: HashMap<String, BTreeMap<String, Value>>,
}

impl AppliedFields {
    /// Removes fields that this manager applied before and no longer names, unless another manager
    /// applies them.
    pub(crate) fn prune(&self, object: &mut Value, uid: &str, manager: &str, patch: &Value) {
        let Some(managers) = self.by_object.get(uid) else { return };
        let Some(before) = managers.get(manager) else { return };
        let others: Vec<&Value> = managers
            .iter()
            .filter(|(name, _)| *name != manager)
            .map(|(_, applied)| applied)
            .collect();
        prune(object, before, patch, &others);
    }

    /// Records the fields that a manager applied.
    pub(crate) fn record(&mut self, uid: &str, manager: &str, patch: &Value) {
        self.by_object.entry(uid.to_owned()).or_default().insert(manager.to_owned(), patch.clone());
    }
}

fn prune(target: &mut Value, before: &Value, now: &Value, others: &[&Value]) {
    let (Some(map), Some(before)) = (target.as_object_mut(), before.as_object()) else { return };
    for (key, old) in before {
        let kept: Vec<&Value> = others.iter().filter_map(|other| other.get(key)).collect();
        let new = now.get(key).unwrap_or(&Value::Null);
        if new.is_null() && kept.is_empty() {
            map.remove(key);
            continue;
        }
        let keys = merge_keys(key, Style::Apply).unwrap_or_default();
        match map.get_mut(key) {
            Some(Value::Array(list))
                if !keys.is_empty() || PRIMITIVE_SETS.contains(&key.as_str()) =>
            {
                prune_list(list, old, new, &kept, keys);
            }
            Some(inner) => prune(inner, old, new, &kept),
            None => {}
        }
    }
}

fn prune_list(
    list: &mut Vec<Value>,
    before: &Value,
    now: &Value,
    others: &[&Value],
    keys: &[&str],
) {
    list.retain(|item| {
        let still =
            || std::iter::once(&now).chain(others).any(|list| find(list, item, keys).is_some());
        find(before, item, keys).is_none() || still()
    });
    for item in list {
        let Some(old) = find(before, item, keys) else { continue };
        let new = find(now, item, keys).unwrap_or(&Value::Null);
        let kept: Vec<&Value> = others.iter().filter_map(|other| find(other, item, keys)).collect();
        prune(item, old, new, &kept);
    }
}

fn find<'a>(list: &'a Value, item: &Value, keys: &[&str]) -> Option<&'a Value> {
    list.as_array()?.iter().find(|other| is_same_item(other, item, keys))
}

/// Returns true if two list items are the same: by their keys, or by value if there are none.
fn is_same_item(one: &Value, other: &Value, keys: &[&str]) -> bool {
    if keys.is_empty() {
        one == other
    } else {
        keys.iter().all(|key| one.get(key) == other.get(key))
    }
}
