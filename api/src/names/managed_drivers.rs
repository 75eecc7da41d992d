//! The drivers whose devices Tessera allocates.

use std::collections::BTreeSet;

use super::{DRIVER_NAME, DriverName};

/// The drivers whose devices Tessera allocates: its own, and others that an administrator adds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ManagedDrivers(BTreeSet<DriverName>);

impl ManagedDrivers {
    /// Returns true if Tessera allocates the devices of the driver.
    pub fn contains(&self, driver: &str) -> bool {
        driver == DRIVER_NAME || self.0.iter().any(|managed| managed.as_str() == driver)
    }

    /// Returns the drivers in the order of their names.
    pub fn iter(&self) -> impl Iterator<Item = &DriverName> {
        self.0.iter()
    }

    /// Returns true if there is no driver but Tessera's own.
    pub fn is_tessera_only(&self) -> bool {
        self.0.len() == 1
    }
}

impl Default for ManagedDrivers {
    fn default() -> Self {
        Self::from_iter([])
    }
}

impl FromIterator<DriverName> for ManagedDrivers {
    /// Collects drivers. Tessera's own is always one of them.
    fn from_iter<I: IntoIterator<Item = DriverName>>(drivers: I) -> Self {
        Self(drivers.into_iter().chain([DriverName::ours()]).collect())
    }
}
