//! The fields of a `GpuConfig` as documentation.

use super::{
    ComputePolicy, ComputePriority, EffectiveConfig, PlacementPolicy, Sharing, TopologyMode,
    TopologyScope,
};

/// One field, for `docs/reference/config.md`.
#[derive(Debug, Clone, Copy)]
pub struct ConfigField {
    /// Path from the root of the parameters; `[]` marks the entries of a list.
    pub path: &'static str,
    /// Type of the value, if it has no list of values.
    pub kind: &'static str,
    /// Returns the values with their meaning; empty if `kind` describes them.
    pub values: fn() -> Vec<(&'static str, &'static str)>,
    /// Returns the value in effect where neither class nor claim sets the field.
    pub default: fn(&EffectiveConfig) -> String,
    /// Returns one paragraph: effect of the field.
    pub meaning: &'static str,
}

/// All fields but `apiVersion` and `kind`.
pub const FIELDS: &[ConfigField] = &[
    ConfigField {
        path: "placement.node",
        kind: "string",
        values: || values(PlacementPolicy::ALL, PlacementPolicy::word, PlacementPolicy::meaning),
        default: |config| config.node.to_string(),
        meaning: "Preference among the nodes that fit.",
    },
    ConfigField {
        path: "placement.device",
        kind: "string",
        values: || values(PlacementPolicy::ALL, PlacementPolicy::word, PlacementPolicy::meaning),
        default: |config| config.device.to_string(),
        meaning: "Preference among the GPUs of a node that fit.",
    },
    ConfigField {
        path: "topology[].scope",
        kind: "string",
        values: || values(TopologyScope::ALL, TopologyScope::word, TopologyScope::meaning),
        default: |_| "required".to_owned(),
        meaning: "Connection that the GPUs of one request have in common. A claim's list of terms \
                  replaces that of its class; each scope may be listed once.",
    },
    ConfigField {
        path: "topology[].mode",
        kind: "string",
        values: || values(TopologyMode::ALL, TopologyMode::word, TopologyMode::meaning),
        default: |_| "required".to_owned(),
        meaning: "Strictness of the term.",
    },
    ConfigField {
        path: "exclusive",
        kind: "boolean",
        values: Vec::new,
        default: |config| config.exclusive.to_string(),
        meaning: "Reserves all memory and all `cores` of each chosen GPU, so that no other claim is on \
                  it. `memory.limit` and `compute.limit` still hold the claim to less. The request \
                  names no capacity.",
    },
    ConfigField {
        path: "memory.percent",
        kind: "number, 0.01 to 100, up to two decimals",
        values: Vec::new,
        default: |config| config.memory_percent.map_or("not set".to_owned(), |p| p.to_string()),
        meaning: "Percent of each chosen GPU's published memory. Use this or \
                  `capacity.requests.memory`, not both.",
    },
    ConfigField {
        path: "memory.limit",
        kind: "quantity, at least 1Mi",
        values: Vec::new,
        default: |_| "all that is reserved".to_owned(),
        meaning: "Memory of each chosen GPU that the claim's containers may use: what CUDA and NVML \
                  report as the GPU's memory. At most what the claim reserves; where it reserves a \
                  percentage or all of a GPU with less, all that is reserved.",
    },
    ConfigField {
        path: "memory.oversubscribe",
        kind: "boolean",
        values: Vec::new,
        default: |config| config.oversubscribe.to_string(),
        meaning: "Allows memory to spill to the host. Only claims with `true` get GPUs of nodes \
                  that publish more memory than their GPUs have (`driver.memoryPercent`).",
    },
    ConfigField {
        path: "compute.policy",
        kind: "string",
        values: || values(ComputePolicy::ALL, ComputePolicy::word, ComputePolicy::meaning),
        default: |_| "`driver.defaultComputePolicy` with `cores`, otherwise `None`".to_owned(),
        meaning: "Enforcement of the claim's `cores`.",
    },
    ConfigField {
        path: "compute.limit",
        kind: "whole number, 1 to 100",
        values: Vec::new,
        default: |config| config.compute.limit.map_or("not set".to_owned(), |p| p.to_string()),
        meaning: "Ceiling above `cores` in percent of a GPU, for `Balance`: with `cores: \"20\"` and \
                  `limit: 50` the claim has 20 % guaranteed and never gets more than 50 %.",
    },
    ConfigField {
        path: "compute.priority",
        kind: "string",
        values: || values(ComputePriority::ALL, ComputePriority::word, ComputePriority::meaning),
        default: |config| config.compute_priority.to_string(),
        meaning: "Order in which the claims of one GPU get compute that others leave idle.",
    },
    ConfigField {
        path: "sharing",
        kind: "string",
        values: || values(Sharing::ALL, Sharing::word, Sharing::meaning),
        default: |config| config.sharing.to_string(),
        meaning: "Mechanism that enforces the shares. The claims of one GPU use one mechanism. \
                  `MPS` excludes `compute.policy: Balance`, `compute.priority: High` and \
                  `memory.oversubscribe: true`.",
    },
];

fn values<T: Copy>(
    all: &[T],
    word: fn(T) -> &'static str,
    meaning: fn(T) -> &'static str,
) -> Vec<(&'static str, &'static str)> {
    all.iter().map(|value| (word(*value), meaning(*value).trim())).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use serde_json::{Value, json};

    use super::*;
    use crate::config::{ConfigError, GpuConfig};

    /// Returns the fields that the decoder allows in the object at `path`.
    fn allowed_at(path: &[&str]) -> BTreeSet<String> {
        let mut value = json!({"unknown": 1});
        for field in path.iter().rev() {
            value = match field.strip_suffix("[]") {
                Some(list) => json!({list: [value]}),
                None => json!({*field: value}),
            };
        }
        value["apiVersion"] = Value::from(super::super::API_VERSION);
        value["kind"] = Value::from(super::super::KIND);
        match GpuConfig::decode(&value) {
            Err(ConfigError::UnknownField { allowed, .. }) => {
                allowed.split(", ").map(str::to_owned).collect()
            }
            other => panic!("{value}: {other:?}"),
        }
    }

    #[test]
    fn documented_fields_are_those_of_the_decoder() {
        let mut decoded: BTreeSet<String> = BTreeSet::new();
        let is_simple = |field: &String| !["apiVersion", "kind"].contains(&field.as_str());
        for field in allowed_at(&[]).into_iter().filter(is_simple) {
            let object = if field == "topology" { "topology[]".to_owned() } else { field.clone() };
            if ["sharing", "exclusive"].contains(&field.as_str()) {
                decoded.insert(field);
                continue;
            }
            decoded.extend(allowed_at(&[&object]).into_iter().map(|f| format!("{object}.{f}")));
        }
        let documented: BTreeSet<String> = FIELDS.iter().map(|f| f.path.to_owned()).collect();
        assert_eq!(documented, decoded);
    }
}
