//! Generated claims: claims from templates, before the pod's status names them.
//!
//! kube-controller-manager creates all claims of a pod and then writes their names into its status;
//! until then kube-scheduler ignores the pod. Planning in between saves that time. The pod and the
//! entry of a claim follow from its controlling owner and an annotation, as in
//! kube-controller-manager. Where an entry has two claims, either may be named, so neither counts
//! before.
//!
//! This holds for unbound pods only. A bound pod never changes its claims, so only its status
//! counts.

use std::collections::BTreeSet;

use k8s_openapi::api::resource::v1::ResourceClaim;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use tessera_allocator::model::PodUid;
use tessera_api::names::{ClaimName, ClaimUid, Namespace, POD_CLAIM_NAME_ANNOTATION};

use crate::index::Index;
use crate::multimap::Multimap;
use crate::pods::PodEntry;
use crate::scope::Scope;

/// The pod of a generated claim, and the name of the entry in its `spec.resourceClaims`.
pub(crate) type GeneratedFor = (PodUid, String);

/// The generated claims of each entry.
pub(crate) type Generated = Multimap<GeneratedFor, ClaimUid>;

/// Returns the pod and the entry that the claim was generated for.
pub(crate) fn generated_for(claim: &ResourceClaim) -> Option<GeneratedFor> {
    let entry = claim.metadata.annotations.as_ref()?.get(POD_CLAIM_NAME_ANNOTATION)?;
    let owner =
        claim.metadata.owner_references.iter().flatten().find(|owner| is_controlling_pod(owner))?;
    Some((PodUid::new(&owner.uid), entry.clone()))
}

fn is_controlling_pod(owner: &OwnerReference) -> bool {
    owner.controller == Some(true) && owner.kind == "Pod" && owner.api_version == "v1"
}

impl Index {
    /// Notes that a claim for the entry `before` is one for the entry `after`; none = it does not
    /// exist.
    pub(crate) fn regenerate(
        &mut self,
        claim: &ClaimUid,
        before: Option<GeneratedFor>,
        after: Option<GeneratedFor>,
    ) {
        if before == after {
            return;
        }
        if let Some(before) = before {
            self.generated.remove(&before, claim);
            self.update_names(&before.0);
        }
        if let Some(after) = after {
            self.generated.insert(after.clone(), claim.clone());
            self.update_names(&after.0);
        }
    }

    /// Updates the names of the claims of a pod.
    fn update_names(&mut self, uid: &PodUid) {
        let Some(mut pod) = self.pods.remove(uid) else { return };
        self.unlink(&pod);
        self.name_claims(&mut pod);
        self.list_by_claims(&pod);
        self.pods.insert(uid.clone(), pod);
        self.changed_pods.insert(uid.clone());
        self.recount_requests(uid);
    }

    /// Sets the names of claims that the pod's status does not name yet.
    pub(crate) fn name_claims(&self, pod: &mut PodEntry) {
        if !pod.is_waiting() {
            return;
        }
        let (uid, namespace) = (pod.uid.clone(), pod.namespace.clone());
        for reference in pod.claims.iter_mut().filter(|reference| !reference.stated) {
            reference.name = self.only_claim_for(&uid, &namespace, &reference.entry);
        }
    }

    /// Returns the pods that are [unlisted](Self::is_unlisted), usually for a moment only.
    pub fn unlisted(&self) -> BTreeSet<PodUid> {
        self.unbound.iter().filter(|pod| self.is_unlisted(pod)).cloned().collect()
    }

    /// Returns true if the pod is unbound and needs devices of ours, and its status does not name
    /// one of its claims, which exists.
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
        let claims = self.generated.get(&(pod.clone(), entry.to_owned()));
        let claims = claims.filter_map(|uid| self.claims.get(uid)).map(|entry| &entry.claim);
        // Owners are in the namespace of their dependents: a claim with such an owner in another
        // namespace is a mistake or an attack.
        let mut names =
            claims.filter(|claim| claim.namespace == *namespace).map(|claim| &claim.name);
        let name = names.next()?;
        names.next().is_none().then(|| name.clone())
    }
}
