//! What allocated claims take of each device.

use std::collections::BTreeMap;
use std::sync::Arc;

use tessera_api::names::RequestName;
use tessera_api::quantity::Quantity;

use super::device::{Binding, Device, DeviceId};

/// One device given to one request of a claim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceResult {
    /// The request, `request/subrequest` for a chosen alternative.
    pub request: RequestName,
    /// The device.
    pub device: DeviceId,
    /// A share of it (with a share ID), not the whole of it.
    pub shared: bool,
    /// What the share takes of each capacity.
    pub consumed: BTreeMap<String, Quantity>,
    /// Granted for administration: takes nothing from anybody.
    pub admin: bool,
    /// What has to be so before the pod can be bound.
    pub binding: Option<Arc<Binding>>,
}

/// What is taken of one device.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DeviceUse {
    /// Allocations of the whole device.
    pub exclusive: u32,
    /// Shares of it.
    pub shares: u32,
    /// Sum over the shares.
    pub consumed: BTreeMap<String, Quantity>,
}

impl DeviceUse {
    /// Whether more is taken than the device has, or the whole of it more than once.
    pub fn exceeds(&self, device: &Device) -> bool {
        let twice = self.exclusive > 1 || (self.exclusive == 1 && self.shares > 0);
        let over =
            |(name, sum): (&String, &Quantity)| device.capacity.get(name).is_none_or(|c| *sum > c.value);
        twice || self.consumed.iter().any(over)
    }

    /// Adds a grant of the device that takes something.
    pub(crate) fn add(&mut self, result: &DeviceResult) {
        if !result.shared {
            self.exclusive += 1;
            return;
        }
        self.shares += 1;
        // Nothing has no entry: `remove` leaves none either, and sums are compared.
        for (name, amount) in result.consumed.iter().filter(|(_, amount)| !amount.is_zero()) {
            let sum = self.consumed.entry(name.clone()).or_default();
            // Beyond what an amount can hold nothing is left anyway.
            *sum = sum.checked_add(*amount).unwrap_or(*sum);
        }
    }

    fn is_nothing(&self) -> bool {
        self.exclusive == 0 && self.shares == 0
    }
}

/// What is taken of all devices. A device that is in no claim has no entry.
///
/// Cloning is cheap; the first change after a clone copies.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Usage {
    devices: Arc<BTreeMap<DeviceId, DeviceUse>>,
}

impl Usage {
    /// Adds the devices of an allocated claim.
    pub fn add(&mut self, results: &[DeviceResult]) {
        let devices = Arc::make_mut(&mut self.devices);
        for result in results.iter().filter(|r| !r.admin) {
            devices.entry(result.device.clone()).or_default().add(result);
        }
    }

    /// Takes away what [`add`](Self::add) added for the same results.
    pub fn remove(&mut self, results: &[DeviceResult]) {
        let devices = Arc::make_mut(&mut self.devices);
        for result in results.iter().filter(|r| !r.admin) {
            let Some(used) = devices.get_mut(&result.device) else { continue };
            if result.shared {
                used.shares = used.shares.saturating_sub(1);
                for (name, amount) in &result.consumed {
                    if let Some(sum) = used.consumed.get_mut(name) {
                        *sum = sum.checked_sub(*amount).unwrap_or(*sum);
                    }
                }
                used.consumed.retain(|_, sum| !sum.is_zero());
            } else {
                used.exclusive = used.exclusive.saturating_sub(1);
            }
            if used.is_nothing() {
                devices.remove(&result.device);
            }
        }
    }

    /// Says what is taken of a device.
    pub fn set(&mut self, device: &DeviceId, used: Option<DeviceUse>) {
        let devices = Arc::make_mut(&mut self.devices);
        match used {
            Some(used) => devices.insert(device.clone(), used),
            None => devices.remove(device),
        };
    }

    /// What is taken of a device; nothing if it has no entry.
    pub fn of(&self, device: &DeviceId) -> Option<&DeviceUse> {
        self.devices.get(device)
    }

    /// Whether nothing is taken of any device.
    pub fn is_empty(&self) -> bool {
        self.devices.is_empty()
    }

    /// All devices of which something is taken, in order.
    pub fn iter(&self) -> impl Iterator<Item = (&DeviceId, &DeviceUse)> {
        self.devices.iter()
    }
}

#[cfg(test)]
mod tests {
    use tessera_api::names::{DeviceName, DriverName, PoolName};

    use super::super::device::PoolId;
    use super::*;

    fn share(memory: i64, cores: i64) -> DeviceResult {
        let pool = PoolId { driver: DriverName::new("d").unwrap(), pool: PoolName::new("p").unwrap() };
        let amount = |name: &str, amount| (name.to_owned(), Quantity::from_integer(amount));
        DeviceResult {
            request: RequestName::new("r").unwrap(),
            device: DeviceId { pool, device: DeviceName::new("gpu-0").unwrap() },
            shared: true,
            consumed: [amount("memory", memory), amount("cores", cores)].into(),
            admin: false,
            binding: None,
        }
    }

    #[test]
    fn what_comes_and_goes_leaves_the_sums_of_what_stays_even_where_they_are_zero() {
        let mut running = Usage::default();
        running.add(&[share(1, 0)]);
        running.add(&[share(2, 0)]);
        running.remove(&[share(2, 0)]);
        let mut fresh = Usage::default();
        fresh.add(&[share(1, 0)]);
        assert_eq!(running, fresh);
    }
}
