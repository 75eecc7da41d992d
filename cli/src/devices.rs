//! Devices given to claims, as all commands show them.

use std::collections::BTreeMap;

use serde::Serialize;
use tessera_allocator::model::DeviceResult;
use tessera_api::config::Sharing;
use tessera_api::quantity::Quantity;

/// One device that a request has, or would have.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Given {
    /// The request, `request/subrequest` for a chosen alternative.
    pub request: String,
    /// The driver.
    pub driver: String,
    /// The pool; of our devices the name of their node.
    pub pool: String,
    /// The device's name in full.
    pub device: String,
    /// The whole of it.
    pub whole: bool,
    /// Granted for administration: takes nothing from anybody.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub admin: bool,
    /// What keeps it from the others, where that is not the library in each process: `MPS`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sharing: Option<&'static str>,
    /// What a share takes of each capacity.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub amounts: BTreeMap<String, Quantity>,
}

impl From<&DeviceResult> for Given {
    fn from(result: &DeviceResult) -> Self {
        Self {
            request: result.request.to_string(),
            driver: result.device.pool.driver.to_string(),
            pool: result.device.pool.pool.to_string(),
            device: result.device.device.to_string(),
            whole: !result.shared,
            admin: result.admin,
            sharing: way(result),
            amounts: result.consumed.clone(),
        }
    }
}

/// How the device is shared, where that is not how it mostly is.
pub(crate) fn way(result: &DeviceResult) -> Option<&'static str> {
    (result.sharing != Sharing::Intercept).then(|| result.sharing.word())
}

impl Given {
    /// The device and how much of it, as `gpu-1f0c2d3e: memory 19Gi, cores 25`.
    pub(crate) fn text(&self) -> String {
        format!("{}: {}", short(&self.device), self.share())
    }

    /// How much of it, as `memory 19Gi, cores 25`.
    pub(crate) fn share(&self) -> String {
        if self.admin {
            return "for administration".to_owned();
        }
        if self.whole {
            return "all of it".to_owned();
        }
        let mut amounts: Vec<(&String, &Quantity)> =
            self.amounts.iter().filter(|(_, a)| !a.is_zero()).collect();
        // Memory first: it is what is short most often.
        amounts.sort_by_key(|(name, _)| {
            (name.as_str() != tessera_api::names::capacity::MEMORY, *name)
        });
        let amounts: Vec<String> =
            amounts.iter().map(|(name, amount)| format!("{name} {amount}")).collect();
        let amounts =
            if amounts.is_empty() { "a share of nothing".to_owned() } else { amounts.join(", ") };
        match self.sharing {
            Some(way) => format!("{amounts}, by {way}"),
            None => amounts,
        }
    }
}

/// Enough of a device's name to tell it from others of its node: names of ours are UUIDs.
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
    fn a_uuid_is_cut_after_its_first_part_and_other_names_are_not() {
        assert_eq!(short("gpu-1f0c2d3e-9a41-7c3b-8e55-0d6f2b1a4c77"), "gpu-1f0c2d3e");
        assert_eq!(short("gpu-0"), "gpu-0");
        assert_eq!(short("mig-1g-5gb"), "mig-1g-5gb");
    }
}
