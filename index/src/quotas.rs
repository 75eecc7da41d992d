//! GpuQuotas, and what the claims of their namespaces hold (ADR 124).
//!
//! A claim counts while its devices count as taken: from the decision on, and until no container
//! can use them any more. So the sums follow from the claims alone, and a restart of the controller
//! gives the same. Only namespaces with a quota have sums.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use tessera_allocator::model::{Device, DeviceId, DeviceResult};
use tessera_allocator::{Charge, QuotaState, charges};
use tessera_api::names::{ClaimUid, Namespace, QuotaName};
use tessera_api::quota::{GpuQuota, GpuQuotaStatus};

use crate::convert::{self, ConvertError};
use crate::index::Index;

/// The quotas of all namespaces.
#[derive(Debug, Default)]
pub(crate) struct Quotas {
    namespaces: BTreeMap<Namespace, NamespaceQuotas>,
    /// Namespaces whose quotas or sums have changed since
    /// [`take_changes`](crate::Index::take_changes).
    pub(crate) unplanned: BTreeSet<Namespace>,
    /// Namespaces whose quotas, sums or statuses have changed since
    /// [`take_changed_quotas`](crate::Index::take_changed_quotas).
    changed: BTreeSet<Namespace>,
    /// Devices whose publication has changed since the claims that hold them were counted.
    republished: BTreeSet<DeviceId>,
}

/// The quotas of a namespace.
#[derive(Debug, Default)]
struct NamespaceQuotas {
    quotas: BTreeMap<QuotaName, QuotaEntry>,
    /// Amounts of each claim that holds devices.
    charges: BTreeMap<ClaimUid, Vec<ChargedDevice>>,
}

#[derive(Debug)]
struct QuotaEntry {
    state: QuotaState,
    /// The status of the object as last seen.
    status: Option<GpuQuotaStatus>,
}

/// Amounts that one device of a claim counts.
#[derive(Debug, Clone, PartialEq, Eq)]
struct ChargedDevice {
    device: DeviceId,
    charge: Charge,
}

/// A quota and its use.
#[derive(Debug, Clone, PartialEq)]
pub struct QuotaStanding<'i> {
    /// Namespace of the quota.
    pub namespace: &'i Namespace,
    /// The quota, and what allocated claims count against it.
    pub state: &'i QuotaState,
    /// The status of the object as last seen.
    pub status: Option<&'i GpuQuotaStatus>,
}

impl QuotaStanding<'_> {
    /// Returns the status that the object should have.
    pub fn wanted_status(&self) -> GpuQuotaStatus {
        GpuQuotaStatus::new(&self.state.quota.hard, &self.state.used)
    }
}

impl QuotaEntry {
    fn standing<'i>(&'i self, namespace: &'i Namespace) -> QuotaStanding<'i> {
        QuotaStanding { namespace, state: &self.state, status: self.status.as_ref() }
    }
}

impl NamespaceQuotas {
    /// Counts a claim with these devices instead of those before. Returns false if nothing changes.
    fn count(&mut self, claim: &ClaimUid, devices: Vec<ChargedDevice>) -> bool {
        let known = match devices.is_empty() {
            true => self.charges.remove(claim).unwrap_or_default(),
            false => self.charges.insert(claim.clone(), devices.clone()).unwrap_or_default(),
        };
        if known == devices {
            return false;
        }
        for entry in self.quotas.values_mut() {
            entry.state.remove(known.iter().map(|device| &device.charge));
            entry.state.add(devices.iter().map(|device| &device.charge));
        }
        true
    }

    /// Returns what the device of a claim counted so far.
    fn known(&self, claim: &ClaimUid, result: &DeviceResult) -> Option<&Charge> {
        let devices = self.charges.get(claim)?;
        devices.iter().find(|known| known.device == result.device).map(|known| &known.charge)
    }
}

impl Index {
    /// Takes over a GpuQuota. Returns true if its limits have changed.
    ///
    /// # Errors
    /// It cannot be read. The last readable version stays.
    pub fn apply_quota(&mut self, object: &GpuQuota) -> Result<bool, ConvertError> {
        let (namespace, quota) = convert::quota(object)?;
        let known = self.quotas.namespaces.get_mut(&namespace);
        self.quotas.changed.insert(namespace.clone());
        if let Some(entry) = known.and_then(|known| known.quotas.get_mut(&quota.name))
            && *entry.state.quota == quota
        {
            entry.status.clone_from(&object.status);
            return Ok(false);
        }
        let is_first = !self.quotas.namespaces.contains_key(&namespace);
        let of_namespace = self.quotas.namespaces.entry(namespace.clone()).or_default();
        let mut state = QuotaState { quota: Arc::new(quota), used: BTreeMap::new() };
        for devices in of_namespace.charges.values() {
            state.add(devices.iter().map(|device| &device.charge));
        }
        let name = state.quota.name.clone();
        of_namespace.quotas.insert(name, QuotaEntry { state, status: object.status.clone() });
        if is_first {
            self.claims_in(&namespace).iter().for_each(|claim| self.charge(claim));
        }
        self.quotas.unplanned.insert(namespace);
        Ok(true)
    }

    /// Removes a deleted GpuQuota.
    pub fn remove_quota(&mut self, object: &GpuQuota) {
        let Ok((namespace, name)) = convert::quota_names(object) else { return };
        let Some(of_namespace) = self.quotas.namespaces.get_mut(&namespace) else { return };
        of_namespace.quotas.remove(&name);
        if of_namespace.quotas.is_empty() {
            self.quotas.namespaces.remove(&namespace);
        }
        self.quotas.unplanned.insert(namespace.clone());
        self.quotas.changed.insert(namespace);
    }

    /// Returns all quotas, by namespace and name.
    pub fn quotas(&self) -> impl Iterator<Item = QuotaStanding<'_>> {
        self.quotas.namespaces.keys().flat_map(|namespace| self.quotas_of(namespace))
    }

    /// Returns the quotas of a namespace, by name.
    pub fn quotas_of(&self, namespace: &Namespace) -> impl Iterator<Item = QuotaStanding<'_>> {
        let found = self.quotas.namespaces.get_key_value(namespace);
        found.into_iter().flat_map(|(namespace, of_namespace)| {
            of_namespace.quotas.values().map(move |entry| entry.standing(namespace))
        })
    }

    /// Returns one quota; none if it does not exist.
    pub fn quota(&self, namespace: &Namespace, name: &QuotaName) -> Option<QuotaStanding<'_>> {
        let (namespace, of_namespace) = self.quotas.namespaces.get_key_value(namespace)?;
        Some(of_namespace.quotas.get(name)?.standing(namespace))
    }

    /// Returns the namespaces whose quotas, sums or statuses have changed since the last call.
    pub fn take_changed_quotas(&mut self) -> BTreeSet<Namespace> {
        std::mem::take(&mut self.quotas.changed)
    }

    /// Counts the devices of a claim against the quotas of its namespace. A device that is not
    /// published now counts as it did before, or as a whole GPU.
    pub(crate) fn charge(&mut self, uid: &ClaimUid) {
        let Some(entry) = self.claims.get(uid) else { return };
        let namespace = &entry.claim.namespace;
        let Some(of_namespace) = self.quotas.namespaces.get(namespace) else { return };
        let results = entry.counted();
        let published: Vec<Option<&Device>> =
            results.iter().map(|result| self.published_device(&result.device)).collect();
        let counted = charges(&entry.claim, results, published.iter().copied());
        let charged = |((result, device), charge): ((&DeviceResult, &Option<&Device>), Charge)| {
            let known = of_namespace.known(uid, result).filter(|_| device.is_none());
            let charge = known.cloned().unwrap_or(charge);
            ChargedDevice { device: result.device.clone(), charge }
        };
        let devices: Vec<ChargedDevice> =
            results.iter().zip(&published).zip(counted).map(charged).collect();
        let namespace = namespace.clone();
        let Some(of_namespace) = self.quotas.namespaces.get_mut(&namespace) else { return };
        if of_namespace.count(uid, devices) {
            self.quotas.unplanned.insert(namespace.clone());
            self.quotas.changed.insert(namespace);
        }
    }

    /// Notes devices whose publication has changed.
    pub(crate) fn note_republished(&mut self, devices: impl IntoIterator<Item = DeviceId>) {
        // A first quota counts by what is published then.
        if !self.quotas.namespaces.is_empty() {
            self.quotas.republished.extend(devices);
        }
    }

    /// Counts the claims anew that hold a device whose publication has changed.
    pub(crate) fn charge_republished(&mut self) {
        for device in std::mem::take(&mut self.quotas.republished) {
            let holders: Vec<ClaimUid> = self.sums.holders.get(&device).cloned().collect();
            holders.iter().for_each(|claim| self.charge(claim));
        }
    }

    /// Returns the states of all quotas.
    pub(crate) fn quota_snapshot(&self) -> BTreeMap<Namespace, Vec<QuotaState>> {
        let namespaces = self.quotas.namespaces.keys();
        namespaces.map(|namespace| (namespace.clone(), self.quota_states(namespace))).collect()
    }

    /// Returns the state of the quotas of a namespace.
    pub(crate) fn quota_states(&self, namespace: &Namespace) -> Vec<QuotaState> {
        self.quotas_of(namespace).map(|quota| quota.state.clone()).collect()
    }
}
