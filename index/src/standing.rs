//! Standing: the stage of one pod and the state of each of its claims, for display.

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::resource::v1::DeviceClass;
use tessera_allocator::model::{Claim, PendingPod, PodUid};
use tessera_api::names::{ClaimName, ClaimUid, DeviceClassName, Namespace, NodeName, PodName};

use crate::convert::AllocatedClaim;
use crate::index::Index;
use crate::pods::{ClaimRef, PodEntry};
use crate::scope::Scope;
use crate::work::{Blocked, is_owned_by};

/// The stage of a pod on the way to its devices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PodStage {
    /// Succeeded or failed.
    Ended,
    /// Being deleted.
    Deleting,
    /// Bound to a node.
    Bound(NodeName),
    /// It has a scheduling gate, so it is not planned.
    Gated,
    /// It waits for a node.
    Waiting,
}

/// One entry of a pod's `spec.resourceClaims`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClaimStanding {
    /// The entry's own name.
    pub entry: String,
    /// The name of the claim; none if it has not been generated from its template yet.
    pub name: Option<ClaimName>,
    /// The claim; none if it does not exist.
    pub claim: Option<ClaimUid>,
    /// Its state.
    pub state: ClaimState,
}

/// The state of a claim of a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ClaimState {
    /// kube-controller-manager has not generated it from its template.
    NotGenerated,
    /// No claim of that name exists.
    Missing,
    /// It is being deleted.
    Deleting,
    /// A claim of the name exists and is not owned by the pod.
    ForeignOwner,
    /// It is allocated.
    Allocated(AllocatedClaim),
    /// It requests devices of other drivers, and kube-scheduler allocates it.
    Foreign,
    /// It waits for an allocation by us.
    Pending,
}

impl Index {
    /// Returns the pod of that name.
    pub fn pod_by_name(&self, namespace: &Namespace, name: &PodName) -> Option<&PodUid> {
        let mut pods =
            self.pods.values().filter(|pod| pod.namespace == *namespace && pod.name == *name);
        pods.next().map(|pod| &pod.uid)
    }

    /// Returns the claim of that name.
    pub fn claim_by_name(&self, namespace: &Namespace, name: &ClaimName) -> Option<&ClaimUid> {
        self.claim_names.get(&(namespace.clone(), name.clone()))
    }

    /// Returns the claims of the pod that exist, in pod order, each with a digest of its labels and
    /// annotations.
    pub fn claims_of_pod(&self, pod: &PodUid) -> impl Iterator<Item = (&Claim, u64)> {
        self.pods.get(pod).into_iter().flat_map(|pod| {
            let names = pod.claims.iter().filter_map(|reference| reference.name.as_ref());
            names.filter_map(|name| {
                let entry = self.claim_named(pod, name)?;
                Some((entry.claim.as_ref(), entry.object.as_ref()?.metadata_digest()))
            })
        })
    }

    /// Returns the classes that the claim names and that exist, as objects, by name.
    pub fn classes_of(&self, claim: &Claim) -> BTreeMap<String, Arc<DeviceClass>> {
        let alternatives = claim.requests.iter().flat_map(|request| &request.alternatives);
        let names = alternatives.filter_map(|alternative| alternative.class.as_ref());
        let class = |name: &DeviceClassName| {
            let (_, object) = self.classes.get(name)?;
            Some((name.to_string(), Arc::clone(object)))
        };
        names.filter_map(class).collect()
    }

    /// Returns the requests of a claim; none if it is not known.
    pub fn requests_of(&self, claim: &ClaimUid) -> Option<&Arc<Claim>> {
        self.claims.get(claim).map(|entry| &entry.claim)
    }

    /// Returns the stage of the pod; none if it is not known.
    pub fn stage(&self, pod: &PodUid) -> Option<PodStage> {
        let pod = self.pods.get(pod)?;
        Some(match &pod.node {
            _ if pod.finished => PodStage::Ended,
            _ if pod.deleting => PodStage::Deleting,
            Some(node) => PodStage::Bound(node.clone()),
            None if pod.gated => PodStage::Gated,
            None => PodStage::Waiting,
        })
    }

    /// Returns the claims of the pod, in pod order.
    pub fn claim_standings(&self, pod: &PodUid) -> Vec<ClaimStanding> {
        let Some(pod) = self.pods.get(pod) else { return Vec::new() };
        pod.claims.iter().map(|reference| self.claim_standing(pod, reference)).collect()
    }

    fn claim_standing(&self, pod: &PodEntry, reference: &ClaimRef) -> ClaimStanding {
        let entry = reference.entry.clone();
        let Some(name) = &reference.name else {
            return ClaimStanding {
                entry,
                name: None,
                claim: None,
                state: ClaimState::NotGenerated,
            };
        };
        let named = self.claim_named(pod, name);
        let state = match named {
            Some(entry)
                if reference.generated && !entry.is_deleting() && !is_owned_by(entry, pod) =>
            {
                ClaimState::ForeignOwner
            }
            Some(entry) => self.claim_state(&entry.claim.uid),
            None => ClaimState::Missing,
        };
        let claim = named.map(|entry| entry.claim.uid.clone());
        ClaimStanding { entry, name: Some(name.clone()), claim, state }
    }

    /// Returns the state of a claim, for any pod.
    pub fn claim_state(&self, claim: &ClaimUid) -> ClaimState {
        let Some(entry) = self.claims.get(claim) else { return ClaimState::Missing };
        match (entry.allocation(), self.scope(claim)) {
            _ if entry.is_deleting() => ClaimState::Deleting,
            (Some(allocation), _) => ClaimState::Allocated(allocation.clone()),
            (None, Some(Scope::Foreign) | None) => ClaimState::Foreign,
            (None, Some(_)) => ClaimState::Pending,
        }
    }

    /// Returns the pod as the allocator's input, also while it is gated; none if a claim is missing
    /// or nothing is to be decided.
    ///
    /// # Errors
    /// It cannot be planned.
    pub fn pending(&self, pod: &PodUid) -> Result<Option<PendingPod>, Blocked> {
        self.pods.get(pod).map_or(Ok(None), |pod| self.plan_of(pod))
    }
}
