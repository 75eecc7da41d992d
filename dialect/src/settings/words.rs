//! Values of GpuConfig as they appear in settings.

use serde::{Deserialize, Deserializer, de};
use tessera_api::config::{ComputePolicy, PlacementPolicy};

/// Deserializes a compute policy.
pub(super) fn compute_policy<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<ComputePolicy>, D::Error> {
    word(deserializer)
}

/// Deserializes a placement policy.
pub(super) fn placement_policy<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<PlacementPolicy>, D::Error> {
    word(deserializer)
}

fn word<'de, D, T>(deserializer: D) -> Result<Option<T>, D::Error>
where
    D: Deserializer<'de>,
    T: std::str::FromStr<Err: std::fmt::Display>,
{
    let text = Option::<String>::deserialize(deserializer)?;
    text.map(|text| text.parse().map_err(|error| de::Error::custom(format!("`{text}`: {error}"))))
        .transpose()
}
