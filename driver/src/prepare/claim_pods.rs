//! Pods of claims, for metrics.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use k8s_openapi::api::resource::v1::ResourceClaim;
use tessera_api::names::{ClaimUid, PodName};

use super::claim::reserving_pods;

/// The pods that have reserved each claim, as the driver last read it: at each Prepare, at its
/// start, and every five minutes. [`ClaimSource`](super::source::ClaimSource) alone writes it.
#[derive(Clone, Debug, Default)]
pub struct ClaimPods(Arc<Mutex<BTreeMap<ClaimUid, BTreeSet<PodName>>>>);

impl ClaimPods {
    /// Records the pods of a claim that was just read.
    pub(super) fn record(&self, claim: &ResourceClaim) {
        let Some(uid) = claim.metadata.uid.as_deref().and_then(|uid| ClaimUid::new(uid).ok())
        else {
            return;
        };
        let pods = reserving_pods(claim).into_iter().map(|pod| pod.name).collect();
        self.locked().insert(uid, pods);
    }

    /// Forgets all claims but those that are `wanted`.
    pub(super) fn retain(&self, wanted: impl Fn(&ClaimUid) -> bool) {
        self.locked().retain(|uid, _| wanted(uid));
    }

    /// Returns the pods of a claim; empty if it was not read.
    #[must_use]
    pub fn of(&self, claim: &ClaimUid) -> BTreeSet<PodName> {
        self.locked().get(claim).cloned().unwrap_or_default()
    }

    fn locked(&self) -> MutexGuard<'_, BTreeMap<ClaimUid, BTreeSet<PodName>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
