//! Troubled devices: those that bound pods use and that are not fit for it any more.

use std::collections::{BTreeMap, BTreeSet};

use tessera_allocator::model::{Device, DeviceId, PodUid, Taint};
use tessera_api::names::{ClaimUid, UNHEALTHY_TAINT_KEY};

use crate::claims::ClaimEntry;
use crate::index::Index;
use crate::pods::PodEntry;

/// The trouble with a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DeviceTrouble {
    /// Its driver has tainted it as unhealthy, for this cause.
    Unhealthy {
        /// The value of the taint, such as `Xid79`.
        cause: String,
    },
    /// Its pool is published without it.
    NotPublished,
    /// More of it is allocated than it has.
    Overcommitted,
}

/// A bound pod that uses a troubled device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TroubledPod {
    /// The pod.
    pub pod: PodUid,
    /// The device.
    pub device: DeviceId,
    /// The trouble with it.
    pub trouble: DeviceTrouble,
}

/// Allocated devices that may be troubled, as of the last check.
#[derive(Debug, Default)]
pub(crate) struct TroubledDevices {
    /// Overcommitted devices, each with the claims to release.
    pub(crate) exceeded: BTreeMap<DeviceId, Vec<ClaimUid>>,
    /// Devices that are tainted as unhealthy.
    unhealthy: BTreeSet<DeviceId>,
    /// Devices that no slice lists.
    unlisted: BTreeSet<DeviceId>,
}

impl Index {
    /// Returns the bound pods that use unhealthy devices. Checks only devices that have changed, or
    /// whose holders have, since the last call; the cost is that of the holders of troubled ones.
    ///
    /// A pod whose claim tolerates the taint is left out.
    pub fn pods_on_unhealthy(&mut self) -> Vec<TroubledPod> {
        self.check_touched();
        let mut found = Vec::new();
        for device in &self.troubled.unhealthy {
            let published = self.published_device(device);
            let Some(taint) = published.and_then(unhealthy_taint) else { continue };
            let trouble = DeviceTrouble::Unhealthy { cause: taint.value.clone() };
            let is_troubled = |entry: &&ClaimEntry| !tolerates(entry, device, taint);
            let claims = self.holders_of(device).filter(is_troubled);
            found.extend(self.troubled_pods(device, &trouble, claims));
        }
        found
    }

    /// Returns the bound pods that use devices that their pool does not list any more, or that are
    /// overcommitted: of each of these as many as have to leave until the rest fits, those of the
    /// lowest priority first, then the youngest.
    ///
    /// A pool that is published in part, or not at all, does not count: the kubelet deletes the
    /// slices of its node when it starts.
    pub fn pods_on_taken(&mut self) -> Vec<TroubledPod> {
        self.check_claims();
        self.check_touched();
        let mut found = Vec::new();
        for device in &self.troubled.unlisted {
            if self.is_pool_complete(device) {
                let claims = self.holders_of(device);
                found.extend(self.troubled_pods(device, &DeviceTrouble::NotPublished, claims));
            }
        }
        for device in self.troubled.exceeded.keys() {
            let claims = self.claims_beyond(device);
            let trouble = DeviceTrouble::Overcommitted;
            found.extend(self.troubled_pods(device, &trouble, claims.into_iter()));
        }
        found
    }

    /// Takes in the state of a device that has changed, or whose holders have.
    pub(crate) fn check_trouble(&mut self, device: &DeviceId) {
        let is_held = self.sums.holders.get(device).next().is_some();
        let (is_unhealthy, is_unlisted) = match self.published_device(device) {
            _ if !is_held => (false, false),
            Some(published) => (unhealthy_taint(published).is_some(), false),
            None => (false, true),
        };
        let TroubledDevices { unhealthy, unlisted, .. } = &mut self.troubled;
        for (set, is_in) in [(unhealthy, is_unhealthy), (unlisted, is_unlisted)] {
            if is_in {
                set.insert(device.clone());
            } else {
                set.remove(device);
            }
        }
    }

    fn troubled_pods<'i>(
        &'i self,
        device: &'i DeviceId,
        trouble: &'i DeviceTrouble,
        claims: impl Iterator<Item = &'i ClaimEntry>,
    ) -> impl Iterator<Item = TroubledPod> {
        let pods = claims.flat_map(|entry| self.bound_pods_of(entry));
        pods.map(move |pod| TroubledPod {
            pod: pod.uid.clone(),
            device: device.clone(),
            trouble: trouble.clone(),
        })
    }

    /// Returns the bound pods that use the claim and are not ending.
    fn bound_pods_of<'i>(&'i self, entry: &'i ClaimEntry) -> impl Iterator<Item = &'i PodEntry> {
        let pods = entry.users.keys().filter_map(|pod| self.pods.get(pod));
        pods.filter(|pod| pod.is_running() && !pod.deleting)
    }

    /// Returns the claims of an overcommitted device whose pods have to leave until the rest fits.
    /// Claims that no pod uses are released anyway, and pods that are ending leave.
    fn claims_beyond(&self, device: &DeviceId) -> Vec<&ClaimEntry> {
        let Some(mut used) = self.sums.usage.get(device).cloned() else { return Vec::new() };
        let (mut staying, leaving): (Vec<&ClaimEntry>, Vec<&ClaimEntry>) =
            self.holders_of(device).partition(|entry| self.bound_pods_of(entry).next().is_some());
        for entry in leaving {
            used = used.minus(device, entry.counted());
        }
        let priority = |entry: &ClaimEntry| self.bound_pods_of(entry).map(|pod| pod.priority).max();
        staying.sort_by_key(|entry| {
            (priority(entry), std::cmp::Reverse((entry.allocated_at(), entry.version)))
        });
        let mut beyond = Vec::new();
        for entry in staying {
            if !self.is_exceeded(device, Some(&used)) {
                break;
            }
            used = used.minus(device, entry.counted());
            beyond.push(entry);
        }
        beyond
    }

    /// Returns true if all slices of the newest generation of the device's pool exist.
    fn is_pool_complete(&self, device: &DeviceId) -> bool {
        let slices = self.slices_of.get(&device.pool).filter_map(|name| self.slices.get(name));
        let mut counts = BTreeMap::<i64, (i64, i64)>::new();
        for slice in slices {
            let (present, wanted) = counts.entry(slice.generation).or_default();
            *present += 1;
            *wanted = slice.slice_count;
        }
        counts.last_key_value().is_some_and(|(_, (present, wanted))| present == wanted)
    }
}

fn unhealthy_taint(device: &Device) -> Option<&Taint> {
    device.taints.iter().find(|taint| taint.key == UNHEALTHY_TAINT_KEY)
}

/// Returns true if the request of the claim that got the device tolerates the taint.
fn tolerates(entry: &ClaimEntry, device: &DeviceId, taint: &Taint) -> bool {
    let result = entry.counted().iter().find(|result| result.device == *device);
    let request = result.and_then(|result| entry.request_of(result));
    request.is_some_and(|request| request.tolerations.iter().any(|one| one.tolerates(taint)))
}
