//! Adding up what claims take from each device, at every moment.

use std::collections::BTreeMap;

use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::ResourceExt;
use serde_json::Value;
use tessera_api::Quantity;

use crate::inventory::{DRIVER, GpuInventory};

type DeviceKey = (String, String);
type Taken = BTreeMap<(DeviceKey, String), Quantity>;

/// What each claim takes, and what there is.
#[derive(Debug)]
pub struct DeviceLedger {
    capacity: BTreeMap<(DeviceKey, String), Quantity>,
    by_claim: BTreeMap<String, Taken>,
    sums: Taken,
}

impl DeviceLedger {
    /// Nothing is taken yet.
    pub fn new(inventory: &GpuInventory) -> Self {
        let mut capacity = BTreeMap::new();
        for (key, device) in inventory.devices() {
            for (name, amount) in device.capacity.iter().flatten() {
                if let Ok(amount) = Quantity::parse(&amount.value.0) {
                    capacity.insert((key.clone(), name.clone()), amount);
                }
            }
        }
        Self { capacity, by_claim: BTreeMap::new(), sums: Taken::new() }
    }

    /// The claim is now like this.
    ///
    /// # Errors
    /// A device gives more than it has; the text says which and to whom.
    pub fn see(&mut self, claim: &ResourceClaim) -> Result<(), String> {
        let (name, taken) = (full_name(claim), taken(claim)?);
        if self.by_claim.get(&name) != Some(&taken) {
            self.take_out(&name);
            self.put_in(name, taken)?;
        }
        Ok(())
    }

    /// The claim is gone.
    pub fn forget(&mut self, claim: &ResourceClaim) {
        self.take_out(&full_name(claim));
    }

    /// These are all claims that there are, at one moment.
    ///
    /// # Errors
    /// As [`Self::see`].
    pub fn replace(&mut self, claims: &[ResourceClaim]) -> Result<(), String> {
        // First what is gone: it may be what made room for others.
        self.by_claim.clear();
        self.sums.clear();
        claims.iter().try_for_each(|claim| self.see(claim))
    }

    /// How many claims hold something.
    pub fn holding(&self) -> usize {
        self.by_claim.values().filter(|taken| !taken.is_empty()).count()
    }

    fn take_out(&mut self, claim: &str) {
        for (key, amount) in self.by_claim.remove(claim).into_iter().flatten() {
            let left = self
                .sums
                .get(&key)
                .and_then(|sum| sum.checked_sub(amount))
                .unwrap_or(Quantity::ZERO);
            self.sums.insert(key, left);
        }
    }

    fn put_in(&mut self, claim: String, taken: Taken) -> Result<(), String> {
        let mut over = None;
        for (key, amount) in &taken {
            let sum = self.sums.entry(key.clone()).or_insert(Quantity::ZERO);
            *sum = sum.checked_add(*amount).ok_or("amounts beyond all measure")?;
            if *sum > self.capacity.get(key).copied().unwrap_or(Quantity::ZERO) {
                over = over.or_else(|| Some(key.clone()));
            }
        }
        self.by_claim.insert(claim, taken);
        over.map_or(Ok(()), |key| Err(self.overcommitted(&key)))
    }

    fn overcommitted(&self, key: &(DeviceKey, String)) -> String {
        let ((pool, device), name) = key;
        let (sum, there) = (self.sums.get(key), self.capacity.get(key));
        let (sum, there) = (sum.copied().unwrap_or_default(), there.copied().unwrap_or_default());
        let holders = self
            .by_claim
            .iter()
            .filter(|(_, taken)| taken.contains_key(key))
            .map(|(claim, _)| claim);
        let holders = holders.cloned().collect::<Vec<_>>().join(", ");
        format!("{device} of {pool} gives {sum} of {there} {name} to {holders}")
    }
}

fn full_name(claim: &ResourceClaim) -> String {
    format!("{}/{}", claim.namespace().unwrap_or_default(), claim.name_any())
}

fn taken(claim: &ResourceClaim) -> Result<Taken, String> {
    let allocation = claim.status.as_ref().and_then(|status| status.allocation.as_ref());
    let results = allocation
        .and_then(|allocation| allocation.devices.as_ref())
        .and_then(|d| d.results.as_ref());
    let mut taken = Taken::new();
    for result in results.into_iter().flatten().filter(|result| result.driver == DRIVER) {
        let key = (result.pool.clone(), result.device.clone());
        for (name, amount) in result.consumed_capacity.iter().flatten() {
            let amount = Quantity::parse(&amount.0)
                .map_err(|error| format!("{}: {error}", Value::from(amount.0.clone())))?;
            let sum = taken.entry((key.clone(), name.clone())).or_insert(Quantity::ZERO);
            *sum = sum.checked_add(amount).ok_or("amounts beyond all measure")?;
        }
    }
    Ok(taken)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn ledger() -> DeviceLedger {
        let slice = serde_json::from_value(json!({
            "metadata": {"name": "s"},
            "spec": {"driver": DRIVER, "nodeName": "n", "pool": {"name": "p", "generation": 1, "resourceSliceCount": 1},
                "devices": [{"name": "gpu-0", "capacity": {"memory": {"value": "80Gi"}, "cores": {"value": "100"}}}]},
        }));
        DeviceLedger::new(&GpuInventory::of(vec![slice.unwrap()]))
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
    fn claims_that_fill_a_device_exactly_are_fine() {
        let mut ledger = ledger();
        assert_eq!(ledger.see(&claim("a", "40Gi", "50")), Ok(()));
        assert_eq!(ledger.see(&claim("b", "40960Mi", "50")), Ok(()));
        assert_eq!(ledger.holding(), 2);
    }

    #[test]
    fn one_byte_or_one_percent_too_many_is_noticed_and_names_the_holders() {
        let mut full = ledger();
        full.see(&claim("a", "80Gi", "0")).unwrap();
        let error = full.see(&claim("b", "1", "0")).unwrap_err();
        assert!(error.contains("x/a, x/b") && error.contains("memory"), "{error}");
        let mut full = ledger();
        full.see(&claim("a", "1Gi", "100")).unwrap();
        assert!(full.see(&claim("b", "1Gi", "1")).unwrap_err().contains("cores"));
    }

    #[test]
    fn what_a_claim_gives_back_may_be_taken_by_another() {
        let mut ledger = ledger();
        let first = claim("a", "80Gi", "100");
        ledger.see(&first).unwrap();
        ledger.forget(&first);
        assert_eq!(ledger.see(&claim("b", "80Gi", "100")), Ok(()));
    }

    #[test]
    fn a_claim_that_is_seen_again_counts_once_and_with_its_newest_amount() {
        let mut ledger = ledger();
        ledger.see(&claim("a", "80Gi", "100")).unwrap();
        ledger.see(&claim("a", "80Gi", "100")).unwrap();
        ledger.see(&claim("a", "30Gi", "0")).unwrap();
        assert_eq!(ledger.see(&claim("b", "50Gi", "100")), Ok(()));
        assert!(ledger.see(&claim("c", "1", "0")).is_err());
    }

    #[test]
    fn after_a_gap_only_what_is_there_counts_and_too_much_is_still_noticed() {
        let mut ledger = ledger();
        ledger.see(&claim("a", "80Gi", "100")).unwrap();
        assert_eq!(ledger.replace(&[claim("b", "80Gi", "100")]), Ok(()));
        assert!(ledger.replace(&[claim("b", "80Gi", "100"), claim("c", "1", "0")]).is_err());
    }

    #[test]
    fn a_device_that_nobody_published_has_nothing_to_give() {
        let mut ledger = DeviceLedger::new(&GpuInventory::default());
        assert!(ledger.see(&claim("a", "1Gi", "0")).is_err());
    }
}
