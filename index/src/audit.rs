//! Audit of the running sums, in parts: a count of all claims of a large cluster takes 0.7 s, and
//! pods wait meanwhile.

use std::collections::BTreeSet;
use std::ops::Bound;

use tessera_allocator::model::{DeviceId, Usage};
use tessera_api::names::ClaimUid;

use crate::claims::add_holder;
use crate::index::Index;

/// The result of one part of an audit of the running sums.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Audit {
    /// Running sums differed from a fresh count, which is a defect. They are corrected.
    pub drifted: bool,
    /// This was the last part of the audit.
    pub is_complete: bool,
}

/// The place at which the next part of an audit begins.
#[derive(Debug)]
pub(crate) enum AuditPlace {
    /// The claims after this one: each is listed with its devices.
    Claims(Option<ClaimUid>),
    /// The devices with holders after this one: the holders count it, and its usage is their sum.
    Holders(Option<DeviceId>),
    /// The devices with usage after this one: they have holders.
    Usage(Option<DeviceId>),
}

impl Default for AuditPlace {
    fn default() -> Self {
        Self::Claims(None)
    }
}

impl Index {
    /// Continues the audit of the running sums with this number of claims or devices, and corrects
    /// what is wrong. After the last part the next one begins a new audit. The devices are checked
    /// for overcommitment by the next call of [`overcommitted`](Self::overcommitted).
    pub fn audit_part(&mut self, size: usize) -> Audit {
        let (drifted, next) = match std::mem::take(&mut self.audited) {
            AuditPlace::Claims(after) => self.audit_claims(after, size),
            AuditPlace::Holders(after) => self.audit_holders(after, size),
            AuditPlace::Usage(after) => self.audit_usage(after, size),
        };
        let is_complete = matches!(next, AuditPlace::Claims(None));
        self.audited = next;
        // Otherwise one step would check all devices.
        self.check_touched();
        Audit { drifted, is_complete }
    }

    fn audit_claims(&mut self, after: Option<ClaimUid>, size: usize) -> (bool, AuditPlace) {
        let range = (after.as_ref().map_or(Bound::Unbounded, Bound::Excluded), Bound::Unbounded);
        let (mut drifted, mut last, mut seen) = (false, None, 0);
        for (uid, entry) in self.claims.range::<ClaimUid, _>(range).take(size) {
            (last, seen) = (Some(uid), seen + 1);
            let holders = &mut self.sums.holders;
            if !entry.counted().iter().all(|result| holders.contains(&result.device, uid)) {
                drifted = true;
                add_holder(holders, uid, entry.counted());
            }
        }
        let next = match last.filter(|_| seen == size) {
            Some(last) => AuditPlace::Claims(Some(last.clone())),
            None => AuditPlace::Holders(None),
        };
        (drifted, next)
    }

    fn audit_holders(&mut self, after: Option<DeviceId>, size: usize) -> (bool, AuditPlace) {
        let part = self.sums.holders.keys_after(after.as_ref()).take(size);
        let devices: Vec<DeviceId> = part.cloned().collect();
        let mut drifted = false;
        for device in &devices {
            drifted |= self.audit_device(device);
        }
        let next = match devices.last().filter(|_| devices.len() == size) {
            Some(last) => AuditPlace::Holders(Some(last.clone())),
            None => AuditPlace::Usage(None),
        };
        (drifted, next)
    }

    fn audit_usage(&mut self, after: Option<DeviceId>, size: usize) -> (bool, AuditPlace) {
        let part: Vec<DeviceId> =
            self.sums.usage.after(after.as_ref()).take(size).map(|(id, _)| id.clone()).collect();
        let mut drifted = false;
        for device in part.iter().filter(|device| !self.sums.holders.contains_key(*device)) {
            drifted = true;
            self.sums.usage.set(device, None);
            self.sums.touched.insert(device.clone());
            self.sums.unplanned.insert(device.clone());
        }
        let next = match part.last().filter(|_| part.len() == size) {
            Some(last) => AuditPlace::Usage(Some(last.clone())),
            None => AuditPlace::default(),
        };
        (drifted, next)
    }

    /// Counts the holders of a device anew. Returns true if they or its usage were wrong.
    fn audit_device(&mut self, device: &DeviceId) -> bool {
        let mut usage = Usage::default();
        let mut wrong_holders = BTreeSet::new();
        for claim in self.sums.holders.get(device) {
            let counted = self.claims.get(claim).map(|entry| entry.counted()).unwrap_or_default();
            let of_device: Vec<_> =
                counted.iter().filter(|result| result.device == *device).cloned().collect();
            if of_device.is_empty() {
                wrong_holders.insert(claim.clone());
            }
            usage.add(&of_device);
        }
        for claim in &wrong_holders {
            self.sums.holders.remove(device, claim);
        }
        let fresh = usage.get(device);
        let is_wrong = !wrong_holders.is_empty() || fresh != self.sums.usage.get(device);
        if is_wrong {
            self.sums.usage.set(device, fresh.cloned());
            self.sums.unplanned.insert(device.clone());
        }
        self.sums.touched.insert(device.clone());
        is_wrong
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use serde_json::{Value, json};
    use tessera_allocator::model::{DeviceUsage, PoolId};
    use tessera_api::names::{DeviceName, DriverName, PoolName};

    use super::*;

    fn claim(number: usize) -> Value {
        let device = format!("gpu-{}", number % 3);
        json!({
            "metadata": {
                "name": format!("claim-{number}"), "namespace": "default",
                "uid": format!("uid-{number}"), "resourceVersion": "1",
            },
            "spec": {"devices": {"requests": [
                {"name": "gpu", "exactly": {"deviceClassName": "gpu.tessera.dev"}},
            ]}},
            "status": {"allocation": {"devices": {"results": [{
                "request": "gpu", "driver": "gpu.tessera.dev", "pool": "node-a", "device": device,
                "shareID": format!("1f0c2d3e-9a41-7c3b-8e55-{number:012x}"),
                "consumedCapacity": {"memory": "1Gi"},
            }]}}},
        })
    }

    fn index() -> Index {
        let mut index = Index::default();
        for number in 0..10 {
            let claim = serde_json::from_value(claim(number)).expect("a claim");
            index.apply_claim(&Arc::new(claim)).expect("readable");
        }
        index
    }

    fn device(name: &str) -> DeviceId {
        let pool = PoolName::new("node-a").expect("a name");
        let pool = PoolId { driver: DriverName::ours(), pool };
        DeviceId { pool, device: DeviceName::new(name).expect("a name") }
    }

    /// Audits in parts of this size. Returns true if the sums were wrong.
    fn audit(index: &mut Index, size: usize) -> bool {
        let mut drifted = false;
        for _ in 0..100 {
            let part = index.audit_part(size);
            drifted |= part.drifted;
            if part.is_complete {
                return drifted;
            }
        }
        panic!("the audit does not end");
    }

    #[test]
    fn parts_of_any_size_find_right_sums_right() {
        let mut index = index();
        for size in 1..12 {
            assert!(!audit(&mut index, size), "{size}");
        }
    }

    #[test]
    fn each_wrong_sum_is_found_and_corrected() {
        type Damage = fn(&mut Index);
        let damages: [(&str, Damage); 4] = [
            ("usage of a device", |index| {
                index.sums.usage.set(&device("gpu-1"), Some(DeviceUsage::default()));
            }),
            ("usage of a device without claims", |index| {
                index.sums.usage.set(&device("gpu-7"), Some(DeviceUsage::default()));
            }),
            ("a missing holder", |index| {
                let gpu = device("gpu-2");
                let holders: Vec<ClaimUid> = index.sums.holders.get(&gpu).cloned().collect();
                holders.iter().for_each(|claim| index.sums.holders.remove(&gpu, claim));
            }),
            ("a holder that does not count the device", |index| {
                let uid = ClaimUid::new("uid-0").expect("a UID");
                index.sums.holders.insert(device("gpu-1"), uid);
            }),
        ];
        for (what, damage) in damages {
            for size in [1, 2, 3, 10, 100] {
                let mut damaged = index();
                damage(&mut damaged);
                assert!(audit(&mut damaged, size), "{what} in parts of {size}");
                assert!(!audit(&mut damaged, size), "{what} is corrected");
                let right = index();
                assert_eq!(damaged.sums.usage, right.sums.usage, "{what}");
                assert_eq!(damaged.sums.holders, right.sums.holders, "{what}");
            }
        }
    }
}
