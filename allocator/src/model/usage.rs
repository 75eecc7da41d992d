//! What allocated claims take of each device.

use std::collections::BTreeMap;
use std::sync::Arc;

use tessera_api::config::Sharing;
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
    /// What keeps it from the others on the device, and them from it.
    pub sharing: Sharing,
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
    /// How many of both are shared by MPS; the others are by Intercept.
    pub by_mps: u32,
    /// Sum over the shares.
    pub consumed: BTreeMap<String, Quantity>,
}

impl DeviceUse {
    /// Whether more is taken than the device has, or the whole of it more than once.
    pub fn exceeds(&self, device: &Device) -> bool {
        let twice = self.exclusive > 1 || (self.exclusive == 1 && self.shares > 0);
        let over = |(name, sum): (&String, &Quantity)| {
            device.capacity.get(name).is_none_or(|c| *sum > c.value)
        };
        twice || self.consumed.iter().any(over)
    }

    /// How its users share it; none where there are none, or some in one way and some in the other.
    pub fn sharing(&self) -> Option<Sharing> {
        let users = self.exclusive + self.shares;
        [Sharing::Intercept, Sharing::Mps]
            .into_iter()
            .find(|own| users > 0 && differing(users, self.by_mps, *own).is_none())
    }

    /// Adds a grant of the device that takes something.
    pub(crate) fn add(&mut self, result: &DeviceResult) {
        self.by_mps += u32::from(result.sharing == Sharing::Mps);
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

    /// Subtracts a grant that was added.
    fn subtract(&mut self, result: &DeviceResult) {
        self.by_mps = self.by_mps.saturating_sub(u32::from(result.sharing == Sharing::Mps));
        if !result.shared {
            self.exclusive = self.exclusive.saturating_sub(1);
            return;
        }
        self.shares = self.shares.saturating_sub(1);
        for (name, amount) in &result.consumed {
            if let Some(sum) = self.consumed.get_mut(name) {
                *sum = sum.checked_sub(*amount).unwrap_or(*sum);
            }
        }
        self.consumed.retain(|_, sum| !sum.is_zero());
    }

    /// What is left of the use without those of the `results` that are grants of `device`.
    #[must_use]
    pub fn without(&self, device: &DeviceId, results: &[DeviceResult]) -> Self {
        let mut rest = self.clone();
        for result in results.iter().filter(|r| !r.admin && r.device == *device) {
            rest.subtract(result);
        }
        rest
    }

    fn is_nothing(&self) -> bool {
        self.exclusive == 0 && self.shares == 0
    }
}

/// How some of so many users of a device share it, so many of them by MPS, if that is not how `own`
/// would be shared: the two ways know nothing of each other. Where somebody has brought both
/// together, nobody else gets in between.
pub(crate) fn differing(users: u32, by_mps: u32, own: Sharing) -> Option<Sharing> {
    match own {
        Sharing::Mps => (users > by_mps).then_some(Sharing::Intercept),
        Sharing::Intercept | Sharing::TimeSlicing => (by_mps > 0).then_some(Sharing::Mps),
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
            used.subtract(result);
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
        let pool =
            PoolId { driver: DriverName::new("d").unwrap(), pool: PoolName::new("p").unwrap() };
        let amount = |name: &str, amount| (name.to_owned(), Quantity::from_integer(amount));
        DeviceResult {
            request: RequestName::new("r").unwrap(),
            device: DeviceId { pool, device: DeviceName::new("gpu-0").unwrap() },
            shared: true,
            consumed: [amount("memory", memory), amount("cores", cores)].into(),
            admin: false,
            sharing: Sharing::Intercept,
            binding: None,
        }
    }

    fn by_mps() -> DeviceResult {
        DeviceResult { sharing: Sharing::Mps, ..share(1, 0) }
    }

    #[test]
    fn what_comes_and_goes_leaves_the_sums_of_what_stays_even_where_they_are_zero() {
        let mut running = Usage::default();
        running.add(&[share(1, 0)]);
        running.add(&[share(2, 0)]);
        running.add(&[by_mps()]);
        running.remove(&[share(2, 0)]);
        running.remove(&[by_mps()]);
        let mut fresh = Usage::default();
        fresh.add(&[share(1, 0)]);
        assert_eq!(running, fresh);
    }

    #[test]
    fn a_device_says_how_it_is_shared_as_long_as_all_of_its_users_agree() {
        let sharing = |results: &[DeviceResult]| {
            let mut usage = Usage::default();
            usage.add(results);
            usage.of(&share(0, 0).device).and_then(DeviceUse::sharing)
        };
        let whole_by_mps = DeviceResult { shared: false, ..by_mps() };
        let admin_by_mps = DeviceResult { admin: true, ..by_mps() };
        assert_eq!(sharing(&[]), None);
        assert_eq!(sharing(&[share(0, 0), share(1, 0), admin_by_mps]), Some(Sharing::Intercept));
        assert_eq!(sharing(&[by_mps(), whole_by_mps]), Some(Sharing::Mps));
        assert_eq!(sharing(&[by_mps(), share(1, 0)]), None);
    }
}
