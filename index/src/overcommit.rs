//! Overcommitment: devices of which more is allocated than they have, and the claims to release.

use std::collections::BTreeSet;

use tessera_allocator::model::{Device, DeviceId, DeviceUsage, PodUid};
use tessera_api::names::ClaimUid;

use crate::claims::ClaimEntry;
use crate::index::Index;
use crate::repair::is_ours;

/// A device of which more is allocated than it has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Overcommitted {
    /// The device.
    pub device: DeviceId,
    /// The claims to release until the rest fits, the youngest first. Empty if none can be
    /// released.
    pub releasable: Vec<ClaimUid>,
}

impl Index {
    /// Returns the overcommitted devices. Checks only those that have changed, or whose holders
    /// have, since the last call; the cost of each is that of its pool and its holders.
    pub fn overcommitted(&mut self) -> Vec<Overcommitted> {
        self.check_claims();
        self.check_touched();
        let found = |(device, releasable): (&DeviceId, &Vec<ClaimUid>)| Overcommitted {
            device: device.clone(),
            releasable: releasable.clone(),
        };
        self.troubled.exceeded.iter().map(found).collect()
    }

    /// Checks the devices that have changed, or whose holders have, since the last call.
    pub(crate) fn check_touched(&mut self) {
        self.charge_republished();
        for device in std::mem::take(&mut self.sums.touched) {
            self.check_trouble(&device);
            if self.is_exceeded(&device, self.sums.usage.get(&device)) {
                let releasable = self.releasable(&device);
                self.troubled.exceeded.insert(device, releasable);
            } else {
                self.troubled.exceeded.remove(&device);
            }
        }
    }

    pub(crate) fn is_exceeded(&self, id: &DeviceId, used: Option<&DeviceUsage>) -> bool {
        used.zip(self.published_device(id)).is_some_and(|(used, device)| used.exceeds(device))
    }

    /// Returns the device as published: of the slice of the highest generation, if several list it.
    pub(crate) fn published_device(&self, id: &DeviceId) -> Option<&Device> {
        let slices = self.slices_of.get(&id.pool).filter_map(|name| self.slices.get(name));
        let listing = slices.filter_map(|slice| {
            let device = slice.devices.iter().find(|device| device.name == id.device)?;
            Some((slice.generation, device))
        });
        listing.max_by_key(|(generation, _)| *generation).map(|(_, device)| device.as_ref())
    }

    pub(crate) fn holders_of(&self, device: &DeviceId) -> impl Iterator<Item = &ClaimEntry> {
        self.sums.holders.get(device).filter_map(|claim| self.claims.get(claim).map(Box::as_ref))
    }

    fn releasable(&self, device: &DeviceId) -> Vec<ClaimUid> {
        let mut free: Vec<&ClaimEntry> =
            self.holders_of(device).filter(|entry| self.is_releasable(entry)).collect();
        free.sort_by_key(|entry| std::cmp::Reverse((entry.allocated_at(), entry.version)));
        let Some(mut used) = self.sums.usage.get(device).cloned() else { return Vec::new() };
        let mut releasable = Vec::new();
        for entry in free {
            if !self.is_exceeded(device, Some(&used)) {
                break;
            }
            used = used.minus(device, entry.counted());
            releasable.push(entry.claim.uid.clone());
        }
        releasable
    }

    /// Returns true if the claim is idle and no room is being made for its pods.
    fn is_releasable(&self, entry: &ClaimEntry) -> bool {
        entry.is_idle()
            && entry.observed.as_ref().is_some_and(|allocation| is_ours(allocation, &self.managed))
            && !self
                .pods_of(entry)
                .filter_map(|uid| self.pods.get(uid))
                .any(|pod| pod.node_with_room().is_some())
    }

    /// Returns the pods that name the claim.
    pub(crate) fn pods_of(&self, entry: &ClaimEntry) -> impl Iterator<Item = &PodUid> {
        let key = (entry.claim.namespace.clone(), entry.claim.name.clone());
        self.pods_by_claim.get(&key)
    }

    /// Returns the pods that name the claim.
    pub fn pods_with(&self, claim: &ClaimUid) -> BTreeSet<PodUid> {
        self.claims.get(claim).into_iter().flat_map(|entry| self.pods_of(entry)).cloned().collect()
    }

    /// Returns the pods whose claims hold the device.
    pub fn pods_on(&self, device: &DeviceId) -> BTreeSet<PodUid> {
        self.holders_of(device).flat_map(|entry| self.pods_of(entry)).cloned().collect()
    }
}
