//! Strict decoding, by hand: serde's derived errors name neither the field's path nor what is
//! allowed there.

use serde_json::{Map, Value};

use crate::quantity::Quantity;

use super::{
    API_VERSION, Compute, ComputePolicy, ComputePriority, ConfigError, GpuConfig, KIND, Memory,
    MemoryPercent, Percent, Placement, PlacementPolicy, Sharing, TopologyMode, TopologyScope,
    TopologyTerm,
};

/// Longest piece of a refused value that an error repeats, in characters: errors become events of
/// at most 1024 bytes.
const SHOWN_VALUE: usize = 64;

const FIELDS: &[&str] =
    &["apiVersion", "kind", "placement", "topology", "exclusive", "memory", "compute", "sharing"];

pub(super) fn decode(parameters: &Value) -> Result<GpuConfig, ConfigError> {
    let object = Object::of(parameters, String::new())?;
    object.must_be("apiVersion", API_VERSION)?;
    object.must_be("kind", KIND)?;
    object.has_only(FIELDS)?;
    Ok(GpuConfig {
        placement: object
            .object("placement")?
            .map(|o| placement(&o))
            .transpose()?
            .unwrap_or_default(),
        topology: topology(&object)?,
        exclusive: object.boolean("exclusive")?,
        memory: object.object("memory")?.map(|o| memory(&o)).transpose()?.unwrap_or_default(),
        compute: object.object("compute")?.map(|o| compute(&o)).transpose()?.unwrap_or_default(),
        sharing: object.word("sharing", Sharing::ALL, Sharing::word)?,
    })
}

fn placement(object: &Object<'_>) -> Result<Placement, ConfigError> {
    object.has_only(&["node", "device"])?;
    Ok(Placement {
        node: object.word("node", PlacementPolicy::ALL, PlacementPolicy::word)?,
        device: object.word("device", PlacementPolicy::ALL, PlacementPolicy::word)?,
    })
}

fn topology(object: &Object<'_>) -> Result<Option<Vec<TopologyTerm>>, ConfigError> {
    let Some(value) = object.get("topology") else { return Ok(None) };
    let path = object.path_of("topology");
    let list = value.as_array().ok_or_else(|| wrong_type(&path, value, "a list"))?;
    let mut terms: Vec<TopologyTerm> = Vec::new();
    for (index, entry) in list.iter().enumerate() {
        let entry = Object::of(entry, format!("{path}[{index}]"))?;
        entry.has_only(&["scope", "mode"])?;
        let scope = entry.required_word("scope", TopologyScope::ALL, TopologyScope::word)?;
        let mode = entry.required_word("mode", TopologyMode::ALL, TopologyMode::word)?;
        if terms.iter().any(|term| term.scope == scope) {
            return Err(ConfigError::Duplicate {
                path: entry.path_of("scope"),
                value: scope.to_string(),
            });
        }
        terms.push(TopologyTerm { scope, mode });
    }
    Ok(Some(terms))
}

fn memory(object: &Object<'_>) -> Result<Memory, ConfigError> {
    object.has_only(&["percent", "limit", "oversubscribe"])?;
    let percent = object.get("percent").map(|v| memory_percent(v, object.path_of("percent")));
    let limit = object.get("limit").map(|value| amount(value, object.path_of("limit")));
    Ok(Memory {
        percent: percent.transpose()?,
        limit: limit.transpose()?,
        oversubscribe: object.boolean("oversubscribe")?,
    })
}

fn memory_percent(value: &Value, path: String) -> Result<MemoryPercent, ConfigError> {
    if !value.is_number() {
        return Err(wrong_type(&path, value, "a number"));
    }
    // The text of the number is exact: 33.33 as a binary fraction is not 33.33.
    value.to_string().parse().map_err(|_| ConfigError::UnknownValue {
        path,
        value: shown(value),
        allowed: MemoryPercent::ALLOWED.to_owned(),
    })
}

fn amount(value: &Value, path: String) -> Result<Quantity, ConfigError> {
    let text =
        value.as_str().ok_or_else(|| wrong_type(&path, value, "a string such as \"8Gi\""))?;
    let is_enough = |amount: &Quantity| amount.floor_mib().is_some_and(|mib| mib > 0);
    Quantity::parse(text).ok().filter(is_enough).ok_or_else(|| ConfigError::UnknownValue {
        path,
        value: shown(value),
        allowed: "a quantity of at least 1Mi, such as 8Gi".to_owned(),
    })
}

fn percent(value: &Value, path: String) -> Result<Percent, ConfigError> {
    if !value.is_number() {
        return Err(wrong_type(&path, value, "a number"));
    }
    value.as_u64().and_then(Percent::new).ok_or_else(|| ConfigError::UnknownValue {
        path,
        value: shown(value),
        allowed: "whole numbers from 1 to 100".to_owned(),
    })
}

fn compute(object: &Object<'_>) -> Result<Compute, ConfigError> {
    object.has_only(&["policy", "priority", "limit"])?;
    let limit = object.get("limit").map(|value| percent(value, object.path_of("limit")));
    Ok(Compute {
        policy: object.word("policy", ComputePolicy::ALL, ComputePolicy::word)?,
        priority: object.word("priority", ComputePriority::ALL, ComputePriority::word)?,
        limit: limit.transpose()?,
    })
}

/// A JSON object and where it is. A field that is null counts as not set, as everywhere in
/// Kubernetes.
struct Object<'v> {
    fields: &'v Map<String, Value>,
    path: String,
}

impl<'v> Object<'v> {
    fn of(value: &'v Value, path: String) -> Result<Self, ConfigError> {
        match value {
            Value::Object(fields) => Ok(Self { fields, path }),
            other => {
                let path = if path.is_empty() { "parameters" } else { &path };
                Err(wrong_type(path, other, "an object"))
            }
        }
    }

    fn path_of(&self, field: &str) -> String {
        if self.path.is_empty() { field.to_owned() } else { format!("{}.{field}", self.path) }
    }

    fn get(&self, field: &str) -> Option<&'v Value> {
        self.fields.get(field).filter(|value| !value.is_null())
    }

    fn object(&self, field: &str) -> Result<Option<Self>, ConfigError> {
        self.get(field).map(|value| Self::of(value, self.path_of(field))).transpose()
    }

    fn boolean(&self, field: &str) -> Result<Option<bool>, ConfigError> {
        let wrong = |value| wrong_type(&self.path_of(field), value, "true or false");
        self.get(field).map(|value| value.as_bool().ok_or_else(|| wrong(value))).transpose()
    }

    fn has_only(&self, allowed: &[&str]) -> Result<(), ConfigError> {
        match self.fields.keys().find(|field| !allowed.contains(&field.as_str())) {
            None => Ok(()),
            Some(field) => Err(ConfigError::UnknownField {
                path: self.path_of(&shortened(field.clone())),
                allowed: allowed.join(", "),
            }),
        }
    }

    fn must_be(&self, field: &str, expected: &str) -> Result<(), ConfigError> {
        let path = self.path_of(field);
        match self.get(field) {
            None => Err(ConfigError::Missing { path, expected: expected.to_owned() }),
            Some(value) if value.as_str() == Some(expected) => Ok(()),
            Some(value) => Err(ConfigError::UnknownValue {
                path,
                value: shown(value),
                allowed: expected.to_owned(),
            }),
        }
    }

    fn word<T: Copy>(
        &self,
        field: &str,
        all: &[T],
        word: impl Fn(T) -> &'static str,
    ) -> Result<Option<T>, ConfigError> {
        let Some(value) = self.get(field) else { return Ok(None) };
        let path = self.path_of(field);
        let text = value.as_str().ok_or_else(|| wrong_type(&path, value, "a string"))?;
        match all.iter().copied().find(|candidate| word(*candidate) == text) {
            Some(found) => Ok(Some(found)),
            None => Err(ConfigError::UnknownValue {
                path,
                value: shown(value),
                allowed: list(all, word),
            }),
        }
    }

    fn required_word<T: Copy>(
        &self,
        field: &str,
        all: &[T],
        word: impl Fn(T) -> &'static str,
    ) -> Result<T, ConfigError> {
        let missing = || ConfigError::Missing {
            path: self.path_of(field),
            expected: format!("one of {}", list(all, &word)),
        };
        self.word(field, all, &word)?.ok_or_else(missing)
    }
}

fn list<T: Copy>(all: &[T], word: impl Fn(T) -> &'static str) -> String {
    all.iter().map(|value| word(*value)).collect::<Vec<_>>().join(", ")
}

fn wrong_type(path: &str, value: &Value, expected: &'static str) -> ConfigError {
    ConfigError::WrongType { path: path.to_owned(), value: shown(value), expected }
}

fn shown(value: &Value) -> String {
    shortened(value.to_string())
}

fn shortened(text: String) -> String {
    match text.char_indices().nth(SHOWN_VALUE) {
        None => text,
        Some((end, _)) => format!("{}…", &text[..end]),
    }
}
