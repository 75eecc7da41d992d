//! Devices of which more is allocated than there is, and whose allocation can be taken back.

use std::collections::BTreeSet;

use tessera_allocator::model::{DeviceId, DeviceUse, PodUid, Usage};
use tessera_api::names::ClaimUid;

use crate::claims::ClaimEntry;
use crate::index::Index;
use crate::repair::is_ours;

/// What an audit of the running sums found.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Audit {
    /// Devices of which more is taken than there is, or that are taken twice as a whole.
    pub overcommitted: Vec<DeviceId>,
    /// The running sums differ from a fresh count: a defect of ours. They have been put right.
    pub drifted: bool,
}

/// A device of which more is taken than there is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Overcommitted {
    /// The device.
    pub device: DeviceId,
    /// The claims to take back until it holds, the youngest first. Empty if all that could be taken back is reserved.
    pub losers: Vec<ClaimUid>,
}

impl Index {
    /// Adds everything up anew and compares.
    pub fn audit(&mut self) -> Audit {
        let mut usage = Usage::default();
        for entry in self.claims.values() {
            usage.add(entry.booked());
        }
        let drifted = usage != self.books.usage;
        if drifted {
            let all = usage.iter().chain(self.books.usage.iter());
            self.books.unplanned.extend(all.map(|(device, _)| device.clone()));
        }
        self.books.usage = usage;
        self.books.touched.extend(self.books.usage.iter().map(|(device, _)| device.clone()));
        let overcommitted = self.overcommitted().into_iter().map(|over| over.device).collect();
        Audit { overcommitted, drifted }
    }

    /// Devices of which more is taken than there is. Only those are looked at of which something has changed.
    pub fn overcommitted(&mut self) -> Vec<Overcommitted> {
        for device in std::mem::take(&mut self.books.touched) {
            if self.is_exceeded(&device, self.books.usage.of(&device)) {
                self.exceeded.insert(device);
            } else {
                self.exceeded.remove(&device);
            }
        }
        let found = self
            .exceeded
            .iter()
            .map(|device| Overcommitted { device: device.clone(), losers: self.losers(device) });
        found.collect()
    }

    fn is_exceeded(&self, id: &DeviceId, used: Option<&DeviceUse>) -> bool {
        let slices = self.slices.values().filter(|slice| slice.pool == id.pool);
        let device = slices.flat_map(|slice| &slice.devices).find(|device| device.name == id.device);
        used.zip(device).is_some_and(|(used, device)| used.exceeds(device))
    }

    fn losers(&self, device: &DeviceId) -> Vec<ClaimUid> {
        let holders = self.claims.values().filter(|e| e.booked().iter().any(|r| r.device == *device));
        let mut free: Vec<&ClaimEntry> = holders.filter(|entry| self.is_releasable(entry)).collect();
        free.sort_by_key(|entry| std::cmp::Reverse((entry.allocated_at(), entry.version)));
        let mut usage = self.books.usage.clone();
        let mut losers = Vec::new();
        for entry in free {
            if !self.is_exceeded(device, usage.of(device)) {
                break;
            }
            usage.remove(entry.booked());
            losers.push(entry.claim.uid.clone());
        }
        losers
    }

    /// Whether nobody has reserved the claim, is bound with it, or has room made for it.
    fn is_releasable(&self, entry: &ClaimEntry) -> bool {
        entry.is_idle()
            && entry.observed.as_ref().is_some_and(is_ours)
            && !self.pods_of(entry).filter_map(|uid| self.pods.get(uid)).any(|pod| pod.nominated.is_some())
    }

    /// The pods that name the claim.
    pub(crate) fn pods_of(&self, entry: &ClaimEntry) -> impl Iterator<Item = &PodUid> {
        let key = (entry.claim.namespace.clone(), entry.claim.name.clone());
        self.pods_by_claim.get(&key).into_iter().flatten()
    }

    /// The pods that name the claim.
    pub fn pods_with(&self, claim: &ClaimUid) -> BTreeSet<PodUid> {
        self.claims.get(claim).into_iter().flat_map(|entry| self.pods_of(entry)).cloned().collect()
    }

    /// The pods whose claims hold the device.
    pub fn pods_on(&self, device: &DeviceId) -> BTreeSet<PodUid> {
        let holding = self.claims.values().filter(|c| c.booked().iter().any(|r| r.device == *device));
        holding.flat_map(|entry| self.pods_of(entry)).cloned().collect()
    }
}
