//! GpuDefaults: the GpuConfig of claims of a namespace that say nothing else (ADR 125).

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::config::{ConfigError, GpuConfig};
use crate::custom_resource::custom_resource;

/// Name of the one object of a namespace that counts.
pub const GPU_DEFAULTS_NAME: &str = "default";

/// Parameters for the claims of a namespace. A claim and its DeviceClass override each field.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
pub struct GpuDefaults {
    /// Metadata.
    #[serde(default)]
    pub metadata: ObjectMeta,
    /// The parameters.
    #[serde(default)]
    pub spec: GpuDefaultsSpec,
}

/// The parameters of a namespace.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct GpuDefaultsSpec {
    /// A GpuConfig, as in a claim.
    pub parameters: Value,
}

custom_resource!(GpuDefaults, "gpudefaults", [spec;]);

impl GpuDefaults {
    /// Returns the parameters.
    ///
    /// # Errors
    /// They are not a GpuConfig, or set what this version does not support.
    pub fn config(&self) -> Result<GpuConfig, ConfigError> {
        let config = GpuConfig::decode(&self.spec.parameters);
        let checked = config.and_then(|config| config.effective().map(|_| config));
        checked.map_err(|error| error.at("spec.parameters"))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_parameters_are_those_of_a_claim() {
        let defaults = |parameters: Value| -> GpuDefaults {
            let object =
                json!({"metadata": {"name": "default"}, "spec": {"parameters": parameters}});
            serde_json::from_value(object).unwrap()
        };
        let mut parameters = json!({
            "apiVersion": "gpu.tessera.dev/v1alpha1", "kind": "GpuConfig", "compute": {"policy": "Fixed"},
        });
        let config = defaults(parameters.clone()).config().unwrap();
        assert_eq!(config.encode(), parameters);
        parameters["compute"]["policy"] = "Strict".into();
        let error = defaults(parameters).config().unwrap_err().to_string();
        assert!(error.starts_with("spec.parameters: compute.policy: unknown value"), "{error}");
        assert!(defaults(Value::Null).config().is_err());
    }
}
