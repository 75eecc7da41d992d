//! One dialect's settings: those that all dialects have, and its own.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer, de};
use serde_json::{Map, Value};
use tessera_api::config::{ComputePolicy, Placement, PlacementPolicy};

use super::words;

/// Reaction to a field of a pod that a claim does not express or that the operator may not want.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
pub enum Action {
    /// The pod is refused.
    Refuse,
    /// The pod is converted, with a warning.
    Warn,
}

/// Preferences among nodes and GPUs where the pod names none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PlacementSetting {
    /// Preference among nodes.
    #[serde(default, deserialize_with = "words::placement_policy")]
    pub node: Option<PlacementPolicy>,
    /// Preference among the GPUs of a node.
    #[serde(default, deserialize_with = "words::placement_policy")]
    pub device: Option<PlacementPolicy>,
}

impl From<PlacementSetting> for Placement {
    fn from(setting: PlacementSetting) -> Self {
        Self { node: setting.node, device: setting.device }
    }
}

/// Settings that all dialects have. `None` is the dialect's default.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Common {
    /// Enforcement of compute where the pod names none.
    #[serde(default, deserialize_with = "words::compute_policy")]
    pub compute_policy: Option<ComputePolicy>,
    /// Placement where the pod names none.
    #[serde(default)]
    pub default_placement: Option<PlacementSetting>,
    /// True if all claims may spill memory to the host.
    #[serde(default)]
    pub oversubscribe: bool,
    /// True if containers get the environment variables of the old system.
    #[serde(default)]
    pub environment: bool,
    /// Pods that set the variable by which the old system's limits are turned off. The limits hold
    /// all the same.
    #[serde(default)]
    pub unlimited: Option<Action>,
    /// Pods with GPUs and a privileged container.
    #[serde(default)]
    pub privileged: Option<Action>,
    /// Pods with GPUs and `spec.nodeName`.
    #[serde(default)]
    pub node_name: Option<Action>,
    /// Fields that a claim does not express.
    #[serde(default)]
    pub inexpressible: Option<Action>,
    /// True if a pod that the old system ran without the GPUs it asks for is converted likewise,
    /// with a warning, and not refused.
    #[serde(default)]
    pub lenient: bool,
    /// Schedulers whose pods are read. Absent: those of the dialect. An empty list: all.
    #[serde(default)]
    pub schedulers: Option<Vec<String>>,
    /// Schedulers that are gone: their pods get the default scheduler. Absent: those of the
    /// dialect.
    #[serde(default)]
    pub replaced_schedulers: Option<Vec<String>>,
}

impl Common {
    const FIELDS: &[&str] = &[
        "computePolicy",
        "defaultPlacement",
        "oversubscribe",
        "environment",
        "unlimited",
        "privileged",
        "nodeName",
        "inexpressible",
        "lenient",
        "schedulers",
        "replacedSchedulers",
    ];
}

/// Settings of a dialect.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Entry<S> {
    /// Settings that all dialects have.
    pub common: Common,
    /// Settings of this dialect alone.
    pub own: S,
}

impl<'de, S: DeserializeOwned> Deserialize<'de> for Entry<S> {
    /// Splits the fields by name: `flatten` of serde would accept unknown ones.
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let fields = Map::deserialize(deserializer)?;
        let is_common = |name: &str| Common::FIELDS.contains(&name);
        let (common, own): (Map<_, _>, Map<_, _>) =
            fields.into_iter().partition(|(name, _)| is_common(name));
        Ok(Self {
            common: serde_json::from_value(Value::Object(common)).map_err(de::Error::custom)?,
            own: serde_json::from_value(Value::Object(own)).map_err(de::Error::custom)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn common_fields_are_all_listed() {
        let unknown = serde_json::from_str::<Common>(r#"{"unknown": 1}"#).expect_err("unknown");
        let text = unknown.to_string();
        let expected = text.split('`').skip(3).step_by(2).collect::<Vec<_>>();
        assert_eq!(expected, Common::FIELDS);
    }
}
