//! Claims made from templates, known as a pod's before the pod's status names them.
//!
//! kube-controller-manager makes all claims of a pod and then writes their names into its status;
//! until then kube-scheduler leaves the pod alone. What is planned in between keeps nobody waiting.
//! Which entry of which pod a claim was made for is told as kube-controller-manager tells it: by
//! the owner that controls it and an annotation. Where there are two for one entry, it may name
//! either, so neither counts before it has.
//!
//! This holds for pods without a node only. A bound pod is tied to its claims for good, so there
//! only its status counts.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::resource::v1::ResourceClaim;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use tessera_allocator::model::PodUid;
use tessera_api::names::{ClaimName, ClaimUid, Namespace, POD_CLAIM_NAME_ANNOTATION};

use crate::index::Index;
use crate::multimap;
use crate::pods::PodEntry;
use crate::scope::Scope;

/// The pod that a claim was made for, and the name of its entry in `spec.resourceClaims`.
pub(crate) type MadeFor = (PodUid, String);

/// Which claims were made for which entry.
pub(crate) type Generated = BTreeMap<MadeFor, BTreeSet<ClaimUid>>;

/// What the claim was made for, if for a pod.
pub(crate) fn made_for(claim: &ResourceClaim) -> Option<MadeFor> {
    let entry = claim.metadata.annotations.as_ref()?.get(POD_CLAIM_NAME_ANNOTATION)?;
    let owner =
        claim.metadata.owner_references.iter().flatten().find(|owner| is_controlling_pod(owner))?;
    Some((PodUid::new(&owner.uid), entry.clone()))
}

fn is_controlling_pod(owner: &OwnerReference) -> bool {
    owner.controller == Some(true) && owner.kind == "Pod" && owner.api_version == "v1"
}

impl Index {
    /// A claim that was made for `before` is now known to be made for `after`; none = it is not
    /// there.
    pub(crate) fn regenerate(
        &mut self,
        claim: &ClaimUid,
        before: Option<MadeFor>,
        after: Option<MadeFor>,
    ) {
        if before == after {
            return;
        }
        if let Some(before) = before {
            multimap::remove(&mut self.generated, &before, claim);
            self.name_again(&before.0);
        }
        if let Some(after) = after {
            self.generated.entry(after.clone()).or_default().insert(claim.clone());
            self.name_again(&after.0);
        }
    }

    /// Finds the pod by the names that its claims have now.
    fn name_again(&mut self, uid: &PodUid) {
        let Some(mut pod) = self.pods.remove(uid) else { return };
        self.unlink(&pod);
        self.name_claims(&mut pod);
        self.list_by_claims(&pod);
        self.pods.insert(uid.clone(), pod);
        self.rebook(uid);
    }

    /// Fills in the names that the pod's status does not tell yet.
    pub(crate) fn name_claims(&self, pod: &mut PodEntry) {
        if !pod.is_waiting() {
            return;
        }
        let (uid, namespace) = (pod.uid.clone(), pod.namespace.clone());
        for reference in pod.claims.iter_mut().filter(|reference| !reference.stated) {
            reference.name = self.only_claim_for(&uid, &namespace, &reference.entry);
        }
    }

    /// Pods of which [`is_unlisted`](Self::is_unlisted) holds. As a rule that is so for moments
    /// only.
    pub fn unlisted(&self) -> BTreeSet<PodUid> {
        self.unbound.iter().filter(|pod| self.is_unlisted(pod)).cloned().collect()
    }

    /// Whether a pod waits for a node and for devices of ours, and one of its claims is there that
    /// its status does not name.
    pub fn is_unlisted(&self, pod: &PodUid) -> bool {
        let Some(pod) = self.pods.get(pod).filter(|pod| pod.is_waiting()) else { return false };
        let is_ours = |name| {
            let claim = self.claim_named(pod, name).map(|entry| &entry.claim.uid);
            matches!(claim.and_then(|uid| self.scope(uid)), Some(Scope::Ours | Scope::Mixed))
        };
        pod.claims.iter().any(|reference| !reference.stated && reference.name.is_some())
            && pod.claims.iter().filter_map(|reference| reference.name.as_ref()).any(is_ours)
    }

    fn only_claim_for(
        &self,
        pod: &PodUid,
        namespace: &Namespace,
        entry: &str,
    ) -> Option<ClaimName> {
        let claims = self.generated.get(&(pod.clone(), entry.to_owned()))?;
        let claims = claims.iter().filter_map(|uid| self.claims.get(uid)).map(|entry| &entry.claim);
        // Owners are in the namespace of what they own: a claim elsewhere with such an owner is
        // somebody's mistake, or attempt.
        let mut names =
            claims.filter(|claim| claim.namespace == *namespace).map(|claim| &claim.name);
        let name = names.next()?;
        names.next().is_none().then(|| name.clone())
    }
}
