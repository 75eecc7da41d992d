//! Consumption of devices by allocated claims.

use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::Arc;

use tessera_api::config::Sharing;
use tessera_api::names::RequestName;
use tessera_api::quantity::Quantity;

use super::NameMap;
use super::device::{BindingConditions, Device, DeviceId};

/// Allocation result: one device for one request of a claim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceResult {
    /// Request name, or `request/subrequest` for a subrequest.
    pub request: RequestName,
    /// Allocated device.
    pub device: DeviceId,
    /// True if a share (with a share ID) is allocated, not the whole device.
    pub shared: bool,
    /// Amount of each capacity that the share consumes.
    pub consumed: NameMap<Quantity>,
    /// Administrative access; consumes nothing.
    pub admin: bool,
    /// Mechanism that isolates the claims on the device.
    pub sharing: Sharing,
    /// Conditions that must hold before the pod can be bound.
    pub binding: Option<Arc<BindingConditions>>,
}

/// Consumption of one device.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DeviceUsage {
    /// Number of exclusive allocations.
    pub exclusive: u32,
    /// Number of shares.
    pub shares: u32,
    /// Number of allocations of both kinds that are shared by MPS; the others use the interceptor.
    pub mps_allocations: u32,
    /// Sum of the capacity that the shares consume.
    pub consumed: NameMap<Quantity>,
}

impl DeviceUsage {
    /// Returns true if the device is overcommitted or allocated exclusively more than once.
    pub fn exceeds(&self, device: &Device) -> bool {
        let twice = self.exclusive > 1 || (self.exclusive == 1 && self.shares > 0);
        let over = |(name, sum): (&String, &Quantity)| {
            device.capacity.get(name).is_none_or(|c| *sum > c.value)
        };
        twice || self.consumed.iter().any(over)
    }

    /// Returns the sharing mechanism that all allocations use; `None` if there are none or several.
    pub fn sharing(&self) -> Option<Sharing> {
        let users = self.exclusive + self.shares;
        [Sharing::Intercept, Sharing::Mps].into_iter().find(|own| {
            users > 0 && conflicting_sharing(users, self.mps_allocations, *own).is_none()
        })
    }

    /// Adds a non-administrative allocation result.
    pub(crate) fn add(&mut self, result: &DeviceResult) {
        self.mps_allocations += u32::from(result.sharing == Sharing::Mps);
        if !result.shared {
            self.exclusive += 1;
            return;
        }
        self.shares += 1;
        // Zero amounts get no entry: `remove` leaves none either, and sums are compared.
        for (name, amount) in result.consumed.iter().filter(|(_, amount)| !amount.is_zero()) {
            let sum = self.consumed.entry(name.clone()).or_default();
            // On overflow nothing is free anyway.
            *sum = sum.checked_add(*amount).unwrap_or(*sum);
        }
    }

    /// Subtracts an allocation result that was added before.
    fn subtract(&mut self, result: &DeviceResult) {
        self.mps_allocations =
            self.mps_allocations.saturating_sub(u32::from(result.sharing == Sharing::Mps));
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

    /// Returns the consumption without those `results` that belong to `device`.
    #[must_use]
    pub fn minus(&self, device: &DeviceId, results: &[DeviceResult]) -> Self {
        let mut rest = self.clone();
        for result in results.iter().filter(|r| !r.admin && r.device == *device) {
            rest.subtract(result);
        }
        rest
    }

    /// Returns the consumption with those `results` that belong to `device`.
    #[must_use]
    pub fn plus(mut self, device: &DeviceId, results: &[DeviceResult]) -> Self {
        results.iter().filter(|r| !r.admin && r.device == *device).for_each(|r| self.add(r));
        self
    }

    fn is_nothing(&self) -> bool {
        self.exclusive == 0 && self.shares == 0
    }
}

/// Returns the sharing mechanism of existing allocations if it conflicts with `own`.
///
/// `users` is the number of allocations and `by_mps` the number of those shared by MPS. Compute
/// limits of the interceptor and MPS do not apply to each other. If both are already in use on the
/// device, no further claim is added.
pub(crate) fn conflicting_sharing(users: u32, by_mps: u32, own: Sharing) -> Option<Sharing> {
    match own {
        Sharing::Mps => (users > by_mps).then_some(Sharing::Intercept),
        Sharing::Intercept | Sharing::TimeSlicing => (by_mps > 0).then_some(Sharing::Mps),
    }
}

/// Consumption of all devices. An unallocated device has no entry.
///
/// Cloning is cheap; the first change after a clone copies the map.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Usage {
    devices: Arc<BTreeMap<DeviceId, DeviceUsage>>,
}

impl Usage {
    /// Adds the devices of an allocated claim.
    pub fn add(&mut self, results: &[DeviceResult]) {
        let devices = Arc::make_mut(&mut self.devices);
        for result in results.iter().filter(|r| !r.admin) {
            devices.entry(result.device.clone()).or_default().add(result);
        }
    }

    /// Subtracts the results that [`add`](Self::add) added.
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

    /// Sets the consumption of a device; `None` removes the entry.
    pub fn set(&mut self, device: &DeviceId, used: Option<DeviceUsage>) {
        let devices = Arc::make_mut(&mut self.devices);
        match used {
            Some(used) => devices.insert(device.clone(), used),
            None => devices.remove(device),
        };
    }

    /// Returns the consumption of a device; `None` if it has no entry.
    pub fn get(&self, device: &DeviceId) -> Option<&DeviceUsage> {
        self.devices.get(device)
    }

    /// Returns true if no device is consumed.
    pub fn is_empty(&self) -> bool {
        self.devices.is_empty()
    }

    /// Returns the devices with consumption after this one, or all of them, in order.
    pub fn after(
        &self,
        device: Option<&DeviceId>,
    ) -> impl Iterator<Item = (&DeviceId, &DeviceUsage)> {
        let from = device.map_or(Bound::Unbounded, Bound::Excluded);
        self.devices.range::<DeviceId, _>((from, Bound::Unbounded))
    }

    /// Returns all devices with consumption, in order.
    pub fn iter(&self) -> impl Iterator<Item = (&DeviceId, &DeviceUsage)> {
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
            consumed: [amount("memory", memory), amount("cores", cores)].into_iter().collect(),
            admin: false,
            sharing: Sharing::Intercept,
            binding: None,
        }
    }

    fn by_mps() -> DeviceResult {
        DeviceResult { sharing: Sharing::Mps, ..share(1, 0) }
    }

    #[test]
    fn removing_results_restores_sums_including_zero_entries() {
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
    fn sharing_is_known_only_if_all_users_agree() {
        let sharing = |results: &[DeviceResult]| {
            let mut usage = Usage::default();
            usage.add(results);
            usage.get(&share(0, 0).device).and_then(DeviceUsage::sharing)
        };
        let whole_by_mps = DeviceResult { shared: false, ..by_mps() };
        let admin_by_mps = DeviceResult { admin: true, ..by_mps() };
        assert_eq!(sharing(&[]), None);
        assert_eq!(sharing(&[share(0, 0), share(1, 0), admin_by_mps]), Some(Sharing::Intercept));
        assert_eq!(sharing(&[by_mps(), whole_by_mps]), Some(Sharing::Mps));
        assert_eq!(sharing(&[by_mps(), share(1, 0)]), None);
    }
}
