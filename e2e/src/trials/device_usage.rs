//! Capacity consumed by claims from each device, and detection of overcommitted devices.

use std::collections::BTreeMap;

use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::ResourceExt;
use serde_json::Value;
use tessera_api::Quantity;

use crate::inventory::{DRIVER, GpuInventory};
use crate::leftovers::device_results;

type DeviceKey = (String, String);
type Consumption = BTreeMap<(DeviceKey, String), Quantity>;

/// Capacity of each device, and the amounts that each claim consumes.
#[derive(Debug)]
pub struct DeviceUsage {
    capacity: BTreeMap<(DeviceKey, String), Quantity>,
    by_claim: BTreeMap<String, Consumption>,
    sums: Consumption,
}

impl DeviceUsage {
    /// Creates the usage of devices without claims.
    pub fn new(inventory: &GpuInventory) -> Self {
        let mut capacity = BTreeMap::new();
        for (key, device) in inventory.devices() {
            for (name, amount) in device.capacity.iter().flatten() {
                if let Ok(amount) = Quantity::parse(&amount.value.0) {
                    capacity.insert((key.clone(), name.clone()), amount);
                }
            }
        }
        Self { capacity, by_claim: BTreeMap::new(), sums: Consumption::new() }
    }

    /// Adds the claim or replaces its earlier state.
    ///
    /// # Errors
    /// Returns an error that names the device and its claims if the device is overcommitted.
    pub fn update(&mut self, claim: &ResourceClaim) -> Result<(), String> {
        let (name, consumption) = (full_name(claim), consumption(claim)?);
        if self.by_claim.get(&name) != Some(&consumption) {
            self.subtract(&name);
            self.add(name, consumption)?;
        }
        Ok(())
    }

    /// Removes a deleted claim.
    pub fn remove(&mut self, claim: &ResourceClaim) {
        self.subtract(&full_name(claim));
    }

    /// Removes all claims.
    pub fn clear(&mut self) {
        self.by_claim.clear();
        self.sums.clear();
    }

    /// Returns the number of claims that consume capacity.
    pub fn consumer_count(&self) -> usize {
        self.by_claim.values().filter(|consumption| !consumption.is_empty()).count()
    }

    fn subtract(&mut self, claim: &str) {
        for (key, amount) in self.by_claim.remove(claim).into_iter().flatten() {
            let rest = self
                .sums
                .get(&key)
                .and_then(|sum| sum.checked_sub(amount))
                .unwrap_or(Quantity::ZERO);
            self.sums.insert(key, rest);
        }
    }

    fn add(&mut self, claim: String, consumption: Consumption) -> Result<(), String> {
        let mut overcommitted = None;
        for (key, amount) in &consumption {
            let sum = self.sums.entry(key.clone()).or_insert(Quantity::ZERO);
            *sum = sum.checked_add(*amount).ok_or("sum of amounts overflows")?;
            if *sum > self.capacity.get(key).copied().unwrap_or(Quantity::ZERO) {
                overcommitted = overcommitted.or_else(|| Some(key.clone()));
            }
        }
        self.by_claim.insert(claim, consumption);
        overcommitted.map_or(Ok(()), |key| Err(self.describe_overcommit(&key)))
    }

    fn describe_overcommit(&self, key: &(DeviceKey, String)) -> String {
        let ((pool, device), name) = key;
        let (sum, capacity) = (self.sums.get(key), self.capacity.get(key));
        let (sum, capacity) =
            (sum.copied().unwrap_or_default(), capacity.copied().unwrap_or_default());
        let claims = self
            .by_claim
            .iter()
            .filter(|(_, consumption)| consumption.contains_key(key))
            .map(|(claim, _)| claim);
        let claims = claims.cloned().collect::<Vec<_>>().join(", ");
        format!("{device} of pool {pool}: {sum} {name} of {capacity} allocated to {claims}")
    }
}

fn full_name(claim: &ResourceClaim) -> String {
    format!("{}/{}", claim.namespace().unwrap_or_default(), claim.name_any())
}

fn consumption(claim: &ResourceClaim) -> Result<Consumption, String> {
    let mut consumption = Consumption::new();
    for result in device_results(claim).filter(|result| result.driver == DRIVER) {
        let key = (result.pool.clone(), result.device.clone());
        for (name, amount) in result.consumed_capacity.iter().flatten() {
            let amount = Quantity::parse(&amount.0)
                .map_err(|error| format!("{}: {error}", Value::from(amount.0.clone())))?;
            let sum = consumption.entry((key.clone(), name.clone())).or_insert(Quantity::ZERO);
            *sum = sum.checked_add(amount).ok_or("sum of amounts overflows")?;
        }
    }
    Ok(consumption)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn device_usage() -> DeviceUsage {
        let slice = serde_json::from_value(json!({
            "metadata": {"name": "s"},
            "spec": {"driver": DRIVER, "nodeName": "n", "pool": {"name": "p", "generation": 1, "resourceSliceCount": 1},
                "devices": [{"name": "gpu-0", "capacity": {"memory": {"value": "80Gi"}, "cores": {"value": "100"}}}]},
        }));
        DeviceUsage::new(&GpuInventory::from_slices(vec![slice.unwrap()]))
    }

    fn claim(name: &str, memory: &str, cores: &str) -> ResourceClaim {
        serde_json::from_value(json!({
            "metadata": {"name": name, "namespace": "x"}, "spec": {},
            "status": {"allocation": {"devices": {"results": [{
                "request": "gpu", "driver": DRIVER, "pool": "p", "device": "gpu-0",
                "consumedCapacity": {"memory": memory, "cores": cores},
            }]}}},
        }))
        .unwrap()
    }

    #[test]
    fn claims_may_fill_device_exactly() {
        let mut usage = device_usage();
        assert_eq!(usage.update(&claim("a", "40Gi", "50")), Ok(()));
        assert_eq!(usage.update(&claim("b", "40960Mi", "50")), Ok(()));
        assert_eq!(usage.consumer_count(), 2);
    }

    #[test]
    fn detects_overcommit_by_one_and_names_claims() {
        let mut full = device_usage();
        full.update(&claim("a", "80Gi", "0")).unwrap();
        let error = full.update(&claim("b", "1", "0")).unwrap_err();
        assert!(error.contains("x/a, x/b") && error.contains("memory"), "{error}");
        let mut full = device_usage();
        full.update(&claim("a", "1Gi", "100")).unwrap();
        assert!(full.update(&claim("b", "1Gi", "1")).unwrap_err().contains("cores"));
    }

    #[test]
    fn released_capacity_may_be_allocated_again() {
        let mut usage = device_usage();
        let first = claim("a", "80Gi", "100");
        usage.update(&first).unwrap();
        usage.remove(&first);
        assert_eq!(usage.update(&claim("b", "80Gi", "100")), Ok(()));
    }

    #[test]
    fn updated_claim_counts_once_with_newest_amount() {
        let mut usage = device_usage();
        usage.update(&claim("a", "80Gi", "100")).unwrap();
        usage.update(&claim("a", "80Gi", "100")).unwrap();
        usage.update(&claim("a", "30Gi", "0")).unwrap();
        assert_eq!(usage.update(&claim("b", "50Gi", "100")), Ok(()));
        assert!(usage.update(&claim("c", "1", "0")).is_err());
    }

    #[test]
    fn replace_drops_old_claims_and_detects_overcommit() {
        let mut usage = device_usage();
        usage.update(&claim("a", "80Gi", "100")).unwrap();
        usage.clear();
        assert_eq!(usage.update(&claim("b", "80Gi", "100")), Ok(()));
        usage.clear();
        let too_much = [claim("b", "80Gi", "100"), claim("c", "1", "0")];
        assert!(too_much.iter().try_for_each(|claim| usage.update(claim)).is_err());
    }

    #[test]
    fn unpublished_device_has_no_capacity() {
        let mut usage = DeviceUsage::new(&GpuInventory::default());
        assert!(usage.update(&claim("a", "1Gi", "0")).is_err());
    }
}
