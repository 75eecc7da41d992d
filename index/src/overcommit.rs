//! Devices of which more is allocated than there is, and whose allocation can be taken back.

use std::collections::BTreeSet;

use tessera_allocator::model::{Device, DeviceId, DeviceUse, PodUid, Usage};
use tessera_api::names::ClaimUid;

use crate::claims::{ClaimEntry, Holders, hold};
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
    /// The claims to take back until it holds, the youngest first. Empty if all that could be
    /// taken back is reserved.
    pub losers: Vec<ClaimUid>,
}

impl Index {
    /// Recounts the running sums and compares.
    pub fn audit(&mut self) -> Audit {
        let (mut usage, mut holders) = (Usage::default(), Holders::default());
        for entry in self.claims.values() {
            usage.add(entry.booked());
            hold(&mut holders, &entry.claim.uid, entry.booked());
        }
        let drifted = usage != self.books.usage || holders != self.books.holders;
        if drifted {
            let all = usage.iter().chain(self.books.usage.iter());
            self.books.unplanned.extend(all.map(|(device, _)| device.clone()));
        }
        self.books.usage = usage;
        self.books.holders = holders;
        self.books.touched.extend(self.books.usage.iter().map(|(device, _)| device.clone()));
        let overcommitted = self.overcommitted().into_iter().map(|over| over.device).collect();
        Audit { overcommitted, drifted }
    }

    /// Devices of which more is allocated than there is. Only those are checked that have changed,
    /// or whose holders have, since the last call; each costs what its pool and its holders
    /// are.
    pub fn overcommitted(&mut self) -> Vec<Overcommitted> {
        self.check_claims();
        for device in std::mem::take(&mut self.books.touched) {
            if self.is_exceeded(&device, self.books.usage.of(&device)) {
                let losers = self.losers(&device);
                self.exceeded.insert(device, losers);
            } else {
                self.exceeded.remove(&device);
            }
        }
        let found = |(device, losers): (&DeviceId, &Vec<ClaimUid>)| Overcommitted {
            device: device.clone(),
            losers: losers.clone(),
        };
        self.exceeded.iter().map(found).collect()
    }

    fn is_exceeded(&self, id: &DeviceId, used: Option<&DeviceUse>) -> bool {
        used.zip(self.published_device(id)).is_some_and(|(used, device)| used.exceeds(device))
    }

    /// The device as published; in the slice of the highest generation, where several slices list
    /// it.
    fn published_device(&self, id: &DeviceId) -> Option<&Device> {
        let slices = self.slices_of.get(&id.pool)?.iter().filter_map(|name| self.slices.get(name));
        let listing = slices.filter_map(|slice| {
            let device = slice.devices.iter().find(|device| device.name == id.device)?;
            Some((slice.generation, device))
        });
        listing.max_by_key(|(generation, _)| *generation).map(|(_, device)| device.as_ref())
    }

    fn holders_of(&self, device: &DeviceId) -> impl Iterator<Item = &ClaimEntry> {
        let holders = self.books.holders.get(device).into_iter().flatten();
        holders.filter_map(|claim| self.claims.get(claim))
    }

    fn losers(&self, device: &DeviceId) -> Vec<ClaimUid> {
        let mut free: Vec<&ClaimEntry> =
            self.holders_of(device).filter(|entry| self.is_releasable(entry)).collect();
        free.sort_by_key(|entry| std::cmp::Reverse((entry.allocated_at(), entry.version)));
        let Some(mut used) = self.books.usage.of(device).cloned() else { return Vec::new() };
        let mut losers = Vec::new();
        for entry in free {
            if !self.is_exceeded(device, Some(&used)) {
                break;
            }
            used = used.without(device, entry.booked());
            losers.push(entry.claim.uid.clone());
        }
        losers
    }

    /// Whether nobody has reserved the claim, is bound with it, or has room made for it.
    fn is_releasable(&self, entry: &ClaimEntry) -> bool {
        entry.is_idle()
            && entry.observed.as_ref().is_some_and(is_ours)
            && !self
                .pods_of(entry)
                .filter_map(|uid| self.pods.get(uid))
                .any(|pod| pod.nominated.is_some())
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
        self.holders_of(device).flat_map(|entry| self.pods_of(entry)).cloned().collect()
    }
}
