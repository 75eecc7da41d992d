//! Devices allocated to claims, as all commands show them.

use serde::Serialize;
use tessera_allocator::model::{DeviceResult, NameMap};
use tessera_api::config::Sharing;
use tessera_api::quantity::Quantity;

/// One device that is allocated to a request, or would be.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct AllocatedDevice {
    /// The request, `request/subrequest` for a chosen alternative.
    pub request: String,
    /// The device's driver.
    pub driver: String,
    /// The device's pool; of gpu.tessera.dev the name of the node.
    pub pool: String,
    /// The full name of the device.
    pub device: String,
    /// True if the device is allocated exclusively.
    pub whole: bool,
    /// True for admin access: the allocation consumes no capacity.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub admin: bool,
    /// The mode of sharing if it is not the default, the interceptor: `MPS`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sharing: Option<&'static str>,
    /// Amount of each capacity that the share consumes.
    #[serde(skip_serializing_if = "NameMap::is_empty")]
    pub amounts: NameMap<Quantity>,
}

impl From<&DeviceResult> for AllocatedDevice {
    fn from(result: &DeviceResult) -> Self {
        Self {
            request: result.request.to_string(),
            driver: result.device.pool.driver.to_string(),
            pool: result.device.pool.pool.to_string(),
            device: result.device.device.to_string(),
            whole: !result.shared,
            admin: result.admin,
            sharing: sharing_mode(result),
            amounts: result.consumed.clone(),
        }
    }
}

/// Returns the mode of sharing if it is not the default.
pub(crate) fn sharing_mode(result: &DeviceResult) -> Option<&'static str> {
    (result.sharing != Sharing::Intercept).then(|| result.sharing.word())
}

impl AllocatedDevice {
    /// Returns the device with its share: `gpu-1f0c2d3e: memory 19Gi, cores 25`.
    pub(crate) fn text(&self) -> String {
        format!("{}: {}", short(&self.device), self.share())
    }

    /// Returns the device with its node and share: `gpu-1f0c2d3e on node-a: memory 19Gi`.
    pub(crate) fn text_with_node(&self) -> String {
        format!("{} on {}: {}", short(&self.device), self.pool, self.share())
    }

    /// Returns the share: `memory 19Gi, cores 25`.
    pub(crate) fn share(&self) -> String {
        if self.admin {
            return "admin access".to_owned();
        }
        if self.whole {
            return "exclusive".to_owned();
        }
        let mut amounts: Vec<(&String, &Quantity)> =
            self.amounts.iter().filter(|(_, a)| !a.is_zero()).collect();
        // Memory first: it is the scarcest capacity in most clusters.
        amounts.sort_by_key(|(name, _)| {
            (name.as_str() != tessera_api::names::capacity::MEMORY, *name)
        });
        let amounts: Vec<String> =
            amounts.iter().map(|(name, amount)| format!("{name} {amount}")).collect();
        let amounts =
            if amounts.is_empty() { "no capacity".to_owned() } else { amounts.join(", ") };
        match self.sharing {
            Some(mode) => format!("{amounts}, sharing {mode}"),
            None => amounts,
        }
    }
}

/// Returns the prefix of a device name that is unique on its node. Device names contain UUIDs.
pub(crate) fn short(device: &str) -> &str {
    match device.match_indices('-').nth(1) {
        Some((end, _)) if device.len() > 24 => &device[..end],
        _ => device,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shortens_uuids_only() {
        assert_eq!(short("gpu-1f0c2d3e-9a41-7c3b-8e55-0d6f2b1a4c77"), "gpu-1f0c2d3e");
        assert_eq!(short("gpu-0"), "gpu-0");
        assert_eq!(short("mig-1g-5gb"), "mig-1g-5gb");
    }
}
