//! Decodes objects with the generated types of the current Kubernetes schema, as the real server
//! does.
//!
//! A field of the wrong type is refused. An unknown field is dropped, or refused under strict
//! validation. A number in place of a quantity becomes a string.

use k8s_openapi::serde::{Serialize, de::DeserializeOwned};
use serde_json::{Map, Value};

use super::quantity;

/// Decoded object and its unknown fields.
pub(crate) struct Decoded {
    /// The object with known fields only.
    pub(crate) object: Value,
    /// Paths of fields that are not in the schema.
    pub(crate) unknown: Vec<String>,
}

/// Decodes one kind. The error describes the invalid field.
pub(crate) type Decode = fn(Value) -> Result<Decoded, String>;

/// Decodes by the schema of `T`.
pub(crate) fn decode<T: DeserializeOwned + Serialize>(mut raw: Value) -> Result<Decoded, String> {
    quantities_to_strings(&mut raw);
    check_quantities(&raw)?;
    let typed = T::deserialize(&raw).map_err(|error| error.to_string())?;
    let mut object = serde_json::to_value(typed).map_err(|error| error.to_string())?;
    let mut unknown = Vec::new();
    collect_unknown("", &raw, &object, &mut unknown);
    drop_empty(&mut object);
    Ok(Decoded { object, unknown })
}

/// Maps with quantities as values, and single quantity fields.
const QUANTITY_MAPS: &[&str] = &[
    "requests",
    "limits",
    "capacity",
    "allocatable",
    "consumedCapacity",
    "hard",
    "counters",
    "overhead",
];
const QUANTITY_FIELDS: &[&str] = &["min", "max", "step", "default", "sizeLimit"];

fn quantities_to_strings(value: &mut Value) {
    match value {
        Value::Object(map) => {
            for (key, inner) in map.iter_mut() {
                if QUANTITY_MAPS.contains(&key.as_str()) {
                    numbers_in_map(inner);
                } else if QUANTITY_FIELDS.contains(&key.as_str()) {
                    number_to_string(inner);
                } else if key == "validValues" {
                    inner.as_array_mut().into_iter().flatten().for_each(number_to_string);
                }
                // Opaque parameters are left to their driver.
                if key != "parameters" {
                    quantities_to_strings(inner);
                }
            }
        }
        Value::Array(items) => items.iter_mut().for_each(quantities_to_strings),
        _ => {}
    }
}

fn numbers_in_map(value: &mut Value) {
    for inner in value.as_object_mut().into_iter().flat_map(Map::values_mut) {
        number_to_string(inner);
        if let Some(nested) = inner.get_mut("value") {
            number_to_string(nested);
        }
    }
}

fn number_to_string(value: &mut Value) {
    if let Value::Number(number) = value {
        *value = Value::String(number.to_string());
    }
}

/// Error message of the real decoder.
const QUANTITY_RULE: &str =
    "quantities must match the regular expression '^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'";

fn check_quantities(value: &Value) -> Result<(), String> {
    let check = |value: &Value| match value.as_str() {
        Some(text) if quantity::parse(text).is_none() => Err(QUANTITY_RULE.to_owned()),
        _ => Ok(()),
    };
    match value {
        Value::Object(map) => {
            for (key, inner) in map.iter().filter(|(key, _)| *key != "parameters" && *key != "data")
            {
                let amounts = inner.as_object().filter(|_| QUANTITY_MAPS.contains(&key.as_str()));
                for amount in amounts.into_iter().flat_map(Map::values) {
                    check(amount)?;
                    check(&amount["value"])?;
                }
                check_quantities(inner)?;
            }
        }
        Value::Array(items) => items.iter().try_for_each(check_quantities)?,
        _ => {}
    }
    Ok(())
}

/// Collects the fields of `raw` that are missing in `known`, as paths in kubectl's notation.
fn collect_unknown(path: &str, raw: &Value, known: &Value, unknown: &mut Vec<String>) {
    match (raw, known) {
        (Value::Object(raw), Value::Object(known)) => {
            for (key, value) in raw.iter().filter(|(_, value)| !value.is_null()) {
                let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
                match known.get(key) {
                    Some(inner) => collect_unknown(&path, value, inner, unknown),
                    None => unknown.push(path),
                }
            }
        }
        (Value::Array(raw), Value::Array(known)) => {
            for (index, (value, inner)) in raw.iter().zip(known).enumerate() {
                collect_unknown(&format!("{path}[{index}]"), value, inner, unknown);
            }
        }
        _ => {}
    }
}

/// Maps that the server omits when empty. Other empty objects have a meaning (`emptyDir: {}`).
const OMITTED_WHEN_EMPTY: &[&str] =
    &["labels", "annotations", "nodeSelector", "attributes", "capacity", "consumedCapacity"];

/// Removes empty lists, which are `omitempty` throughout the Kubernetes API.
fn drop_empty(value: &mut Value) {
    match value {
        Value::Object(map) => {
            map.retain(|key, inner| match inner {
                Value::Null => false,
                Value::Array(items) => !items.is_empty(),
                Value::Object(inner) => {
                    !(inner.is_empty() && OMITTED_WHEN_EMPTY.contains(&key.as_str()))
                }
                _ => true,
            });
            for (key, inner) in map.iter_mut() {
                if key != "parameters" && key != "data" {
                    drop_empty(inner);
                }
            }
        }
        Value::Array(items) => items.iter_mut().for_each(drop_empty),
        _ => {}
    }
}
