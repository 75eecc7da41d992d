//! Holdings: the devices of each claim and its pods, for display only.

use tessera_allocator::model::DeviceResult;
use tessera_api::names::{ClaimName, ClaimUid, Namespace, PodName};

use crate::index::Index;

/// The devices of ours that one claim holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holding<'i> {
    /// The claim.
    pub claim: &'i ClaimUid,
    /// Its namespace.
    pub namespace: &'i Namespace,
    /// Its name.
    pub name: &'i ClaimName,
    /// Its devices; shares with their amounts.
    pub results: &'i [DeviceResult],
    /// The pods that are bound with it or wait for a node, by name.
    pub pods: Vec<&'i PodName>,
    /// The object is deleted; a bound pod keeps the devices taken.
    pub gone: bool,
}

impl Index {
    /// Returns all claims that hold devices of ours, by UID.
    pub fn holdings(&self) -> impl Iterator<Item = Holding<'_>> {
        let holding = self.claims.values().filter(|entry| !entry.counted().is_empty());
        holding.map(|entry| {
            // After the object is deleted, its name refers to another one for unbound pods.
            let named = self.pods_of(entry).filter(|_| entry.object.is_some());
            let waiting =
                named.filter(|uid| self.pods.get(*uid).is_some_and(|pod| pod.is_waiting()));
            let pods = entry.users.keys().chain(waiting).filter_map(|uid| self.pods.get(uid));
            let mut pods: Vec<&PodName> = pods.map(|pod| &pod.name).collect();
            pods.sort();
            pods.dedup();
            Holding {
                claim: &entry.claim.uid,
                namespace: &entry.claim.namespace,
                name: &entry.claim.name,
                results: entry.counted(),
                pods,
                gone: entry.object.is_none(),
            }
        })
    }
}
