//! GpuQuota: what the ResourceClaims of a namespace may hold of the GPUs (ADR 124).

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::custom_resource::custom_resource;
use crate::quantity::Quantity;

/// A resource that a quota limits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum QuotaResource {
    /// Device memory, in bytes.
    Memory,
    /// Compute, in percent of a GPU.
    Cores,
    /// Shares of GPUs.
    Shares,
    /// GPUs of which a claim takes all the memory, so that no other claim fits.
    Gpus,
}

impl QuotaResource {
    /// All resources.
    pub const ALL: [Self; 4] = [Self::Memory, Self::Cores, Self::Shares, Self::Gpus];

    /// Returns the name in `spec.hard`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Cores => "cores",
            Self::Shares => "shares",
            Self::Gpus => "gpus",
        }
    }

    /// Returns the resource of this name.
    pub fn of_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|resource| resource.name() == name)
    }
}

/// Amounts of resources: bytes, percent of a GPU, shares and GPUs. An absent resource is not
/// limited, or not counted.
pub type QuotaAmounts = BTreeMap<QuotaResource, Quantity>;

/// The GPU memory, compute, shares and whole GPUs that the claims of a namespace may hold.
///
/// Reading one never fails for what a field contains, because one object that cannot be read would
/// fail the list of all: [`limits`](Self::limits) reports it.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
pub struct GpuQuota {
    /// Metadata.
    #[serde(default)]
    pub metadata: ObjectMeta,
    /// The limits.
    #[serde(default)]
    pub spec: GpuQuotaSpec,
    /// The use, written by the controller.
    #[serde(default)]
    pub status: Option<GpuQuotaStatus>,
}

/// The limits of a quota.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct GpuQuotaSpec {
    /// The DeviceClasses whose devices count; empty = all.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub device_class_names: Vec<String>,
    /// The largest amount of each resource, by name, as quantities.
    pub hard: BTreeMap<String, Value>,
}

/// The use of a quota.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct GpuQuotaStatus {
    /// `spec.hard` as the controller enforces it.
    pub hard: BTreeMap<String, String>,
    /// The amounts that allocated claims hold now, of the resources in `hard`.
    pub used: BTreeMap<String, String>,
}

/// Error in the fields of a quota.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum QuotaError {
    /// The resource does not exist.
    #[error("spec.hard: unknown resource `{name}`; allowed: memory, cores, shares, gpus")]
    UnknownResource {
        /// The name.
        name: String,
    },
    /// The amount is not a quantity, or is negative.
    #[error(
        "spec.hard.{name}: {value} is not an amount; write a quantity of 0 or more, such as \
         \"40Gi\" of memory, or \"200\" percent of cores"
    )]
    Amount {
        /// The resource.
        name: &'static str,
        /// The value, as JSON.
        value: String,
    },
}

impl GpuQuota {
    /// Returns the limits.
    ///
    /// # Errors
    /// A resource is unknown, or its amount is not a quantity of 0 or more.
    pub fn limits(&self) -> Result<QuotaAmounts, QuotaError> {
        let limit = |(name, value): (&String, &Value)| {
            let unknown = || QuotaError::UnknownResource { name: name.clone() };
            let resource = QuotaResource::of_name(name).ok_or_else(unknown)?;
            let amount = Quantity::deserialize(value).ok().filter(|amount| !amount.is_negative());
            let name = resource.name();
            let error = || QuotaError::Amount { name, value: value.to_string() };
            Ok((resource, amount.ok_or_else(error)?))
        };
        self.spec.hard.iter().map(limit).collect()
    }
}

impl GpuQuotaStatus {
    /// Returns the status with these amounts, of which `used` has those in `hard`.
    pub fn new(hard: &QuotaAmounts, used: &QuotaAmounts) -> Self {
        let text = |resource: &QuotaResource, amounts: &QuotaAmounts| {
            amounts.get(resource).copied().unwrap_or_default().to_string()
        };
        let of = |amounts: &QuotaAmounts| {
            hard.keys()
                .map(|resource| (resource.name().to_owned(), text(resource, amounts)))
                .collect()
        };
        Self { hard: of(hard), used: of(used) }
    }
}

custom_resource!(GpuQuota, "gpuquotas", [spec; status]);

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn quota(hard: Value) -> GpuQuota {
        let object = json!({"metadata": {"name": "team"}, "spec": {"hard": hard}});
        serde_json::from_value(object).expect("a quota can always be read")
    }

    #[test]
    fn amounts_are_read_from_numbers_and_strings() {
        let hard = json!({"memory": "40Gi", "cores": 200, "shares": "8", "gpus": 2});
        let limits = quota(hard).limits().unwrap();
        let amount = |resource| limits[&resource];
        assert_eq!(amount(QuotaResource::Memory), Quantity::parse("42949672960").unwrap());
        assert_eq!(amount(QuotaResource::Cores), Quantity::from_integer(200));
        assert_eq!(limits.len(), 4);
        assert_eq!(quota(json!({})).limits(), Ok(QuotaAmounts::new()));
    }

    #[test]
    fn an_error_names_the_resource_and_what_is_allowed() {
        let error = |hard| quota(hard).limits().unwrap_err().to_string();
        assert_eq!(
            error(json!({"disk": "1"})),
            "spec.hard: unknown resource `disk`; allowed: memory, cores, shares, gpus"
        );
        for bad in [json!("lots"), json!(-1), json!({}), json!(null), json!([1])] {
            let text = error(json!({"memory": bad}));
            assert!(text.starts_with(&format!("spec.hard.memory: {bad} is not")), "{text}");
        }
    }

    #[test]
    fn a_quota_is_written_as_it_was_read() {
        let object = json!({
            "apiVersion": "gpu.tessera.dev/v1alpha1",
            "kind": "GpuQuota",
            "metadata": {"name": "team", "namespace": "a"},
            "spec": {"deviceClassNames": ["gpu.tessera.dev"], "hard": {"cores": 150}},
            "status": {"hard": {"cores": "150"}, "used": {"cores": "20"}},
        });
        let quota: GpuQuota = serde_json::from_value(object.clone()).unwrap();
        assert_eq!(serde_json::to_value(&quota).unwrap(), object);
    }

    #[test]
    fn the_status_has_the_resources_that_are_limited() {
        let hard = quota(json!({"memory": "1Gi", "gpus": "1"})).limits().unwrap();
        let used = [(QuotaResource::Cores, Quantity::from_integer(5))].into();
        let status = GpuQuotaStatus::new(&hard, &used);
        assert_eq!(
            status.used,
            [("gpus".into(), "0".into()), ("memory".into(), "0".into())].into()
        );
        assert_eq!(status.hard["memory"], "1Gi");
    }
}
