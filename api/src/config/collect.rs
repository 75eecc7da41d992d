//! Selection and merging of the configs of one request.

use k8s_openapi::api::resource::v1::{
    DeviceAllocationConfiguration, DeviceClaimConfiguration, DeviceClassConfiguration,
    OpaqueDeviceConfiguration,
};

use super::{ConfigError, EffectiveConfig, GpuConfig};
use crate::names::{DRIVER_NAME, RequestName};

/// Author of a config.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ConfigSource {
    /// A DeviceClass: `FromClass`.
    Class,
    /// The claim: `FromClaim`.
    Claim,
}

impl ConfigSource {
    /// As allocations write it.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Class => "FromClass",
            Self::Claim => "FromClaim",
        }
    }
}

/// One config that may hold for a request, whatever object it stands in.
#[derive(Debug, Clone, Copy)]
pub struct ConfigEntry<'c> {
    /// Its author.
    pub source: ConfigSource,
    /// Its position in its list, for messages.
    pub index: usize,
    /// The requests it is meant for; empty = all.
    pub requests: &'c [String],
    /// Its parameters.
    pub opaque: Option<&'c OpaqueDeviceConfiguration>,
}

impl<'c> ConfigEntry<'c> {
    /// A config of an allocation.
    ///
    /// # Errors
    /// Its source is neither the class nor the claim.
    pub fn of_allocation(
        index: usize,
        config: &'c DeviceAllocationConfiguration,
    ) -> Result<Self, ConfigError> {
        let source = match config.source.as_str() {
            "FromClass" => ConfigSource::Class,
            "FromClaim" => ConfigSource::Claim,
            other => {
                return Err(ConfigError::UnknownValue {
                    path: format!("config[{index}].source"),
                    value: other.to_owned(),
                    allowed: "FromClass, FromClaim".to_owned(),
                });
            }
        };
        let requests = config.requests.as_deref().unwrap_or_default();
        Ok(Self { source, index, requests, opaque: config.opaque.as_ref() })
    }

    /// A config of a DeviceClass.
    pub fn of_class(index: usize, config: &'c DeviceClassConfiguration) -> Self {
        Self { source: ConfigSource::Class, index, requests: &[], opaque: config.opaque.as_ref() }
    }

    /// A config of a claim's spec.
    pub fn of_claim(index: usize, config: &'c DeviceClaimConfiguration) -> Self {
        let requests = config.requests.as_deref().unwrap_or_default();
        Self { source: ConfigSource::Claim, index, requests, opaque: config.opaque.as_ref() }
    }

    /// Returns true if it is for Tessera's driver. Configs of other drivers are ignored, even if
    /// malformed.
    pub fn is_ours(&self) -> bool {
        self.opaque.is_some_and(|opaque| opaque.driver == DRIVER_NAME)
    }

    /// Returns true if it applies to `request`: it lists no request, or this one, or the parent of
    /// this subrequest.
    pub fn is_for(&self, request: &RequestName) -> bool {
        self.requests.is_empty() || self.requests.iter().any(|entry| request.is_named_by(entry))
    }

    /// Decodes it; `None` if it is for another driver.
    ///
    /// # Errors
    /// It is ours and not a valid `GpuConfig`. The path begins with the source and the position of
    /// the config.
    pub fn decode(&self) -> Result<Option<GpuConfig>, ConfigError> {
        let Some(opaque) = self.opaque.filter(|_| self.is_ours()) else { return Ok(None) };
        GpuConfig::decode(&opaque.parameters.0).map(Some).map_err(|error| error.at(&self.place()))
    }

    fn place(&self) -> String {
        let object = match self.source {
            ConfigSource::Class => "DeviceClass",
            ConfigSource::Claim => "ResourceClaim",
        };
        format!("{object} config[{}]", self.index)
    }
}

/// Merges what configs say about a request: the class's in their order, then the claim's, a later
/// one overriding an earlier one field by field.
///
/// # Errors
/// A config of ours that is meant for the request is malformed, or sets what this version does not
/// support; or what they come to contradicts itself.
pub fn merged_config<'c>(
    entries: impl IntoIterator<Item = ConfigEntry<'c>>,
    request: &RequestName,
) -> Result<GpuConfig, ConfigError> {
    let mut meant: Vec<ConfigEntry<'c>> =
        entries.into_iter().filter(|entry| entry.is_for(request)).collect();
    meant.sort_by_key(|entry| entry.source);
    let mut merged = GpuConfig::default();
    for entry in meant {
        if let Some(config) = entry.decode()? {
            // Checked one by one: a class's unsupported value is an error even where the claim
            // overrides it, and the message says whose it is.
            config.supported().map_err(|error| error.at(&entry.place()))?;
            merged = merged.overridden_by(&config);
        }
    }
    // Of the whole: what class and claim say together may be what neither says alone.
    merged.consistent()?;
    Ok(merged)
}

/// The parameters of a request, from the config list of its claim's allocation. Configs of other
/// drivers are left alone.
///
/// # Errors
/// As [`merged_config`]; also for a config whose source is unknown.
pub fn effective_config(
    configs: &[DeviceAllocationConfiguration],
    request: &RequestName,
) -> Result<EffectiveConfig, ConfigError> {
    allocated_config(configs, request)?.effective()
}

/// Returns the merged parameters as written, without defaults.
///
/// # Errors
/// As [`effective_config`].
pub fn allocated_config(
    configs: &[DeviceAllocationConfiguration],
    request: &RequestName,
) -> Result<GpuConfig, ConfigError> {
    let entries: Vec<ConfigEntry<'_>> = configs
        .iter()
        .enumerate()
        .map(|(index, config)| ConfigEntry::of_allocation(index, config))
        .collect::<Result<_, _>>()?;
    merged_config(entries, request)
}

/// The parameters of a request before it is allocated: from the configs of its class and of its
/// claim.
///
/// # Errors
/// As [`merged_config`].
pub fn effective_config_of_request(
    class: &[DeviceClassConfiguration],
    claim: &[DeviceClaimConfiguration],
    request: &RequestName,
) -> Result<EffectiveConfig, ConfigError> {
    let class =
        class.iter().enumerate().map(|(index, config)| ConfigEntry::of_class(index, config));
    let claim =
        claim.iter().enumerate().map(|(index, config)| ConfigEntry::of_claim(index, config));
    merged_config(class.chain(claim), request)?.effective()
}
