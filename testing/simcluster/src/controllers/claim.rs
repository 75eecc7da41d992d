//! Creates claims from templates, removes deleted consumers, deallocates unused claims.
//!
//! Follows pkg/controller/resourceclaim of Kubernetes 1.37.1. Left out: pod groups, extended
//! resources.

use std::collections::{BTreeMap, HashMap};

use k8s_openapi::api::core::v1::{Pod, PodResourceClaim};
use k8s_openapi::api::resource::v1::{
    ResourceClaim, ResourceClaimConsumerReference, ResourceClaimTemplate,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::api::{Api, DeleteParams, ObjectMeta, Patch, PatchParams, PostParams, Preconditions};
use kube::runtime::events::EventType;
use kube::{Client, ResourceExt};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use crate::events::{EventWriter, PodEvent};
use crate::informer::{Change, Informer, Key, key};
use crate::pod_claim::{self, FINALIZER, PodClaim};
use crate::queue::WorkQueue;

/// Annotation of a generated claim with the name of its entry in the pod.
const POD_CLAIM_NAME: &str = "resource.kubernetes.io/pod-claim-name";
/// Leaves room for a hyphen and five characters within 63.
const MAX_BASE_LENGTH: usize = 57;

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Work {
    Pod(Key),
    Claim(Key),
}

/// Reason for a retry.
#[derive(Debug, thiserror::Error)]
enum SyncError {
    #[error(
        "resource claim template \"{0}\": resourceclaimtemplate.resource.k8s.io \"{0}\" not found"
    )]
    NoTemplate(String),
    #[error("API request failed")]
    Api(#[from] kube::Error),
}

pub(super) struct Controller {
    client: Client,
    events: EventWriter,
    pods: Informer<Pod>,
    claims: Informer<ResourceClaim>,
    templates: Informer<ResourceClaimTemplate>,
    work: WorkQueue<Work>,
    /// Claims created for (pod UID, entry) that the watch may not have shown yet, so that none is
    /// created twice.
    made: HashMap<(String, String), String>,
}

impl Controller {
    pub(super) fn new(client: Client) -> Self {
        Self {
            events: EventWriter::new(client.clone(), "resource_claim"),
            pods: Informer::start(Api::all(client.clone())),
            claims: Informer::start(Api::all(client.clone())),
            templates: Informer::start(Api::all(client.clone())),
            client,
            work: WorkQueue::new(),
            made: HashMap::new(),
        }
    }

    pub(super) async fn run(mut self, stop: CancellationToken) {
        loop {
            let synced =
                self.pods.is_synced() && self.claims.is_synced() && self.templates.is_synced();
            tokio::select! {
                biased;
                () = stop.cancelled() => return,
                changes = self.pods.next() => changes.into_iter().for_each(|change| self.pod_changed(&change)),
                changes = self.claims.next() => changes.into_iter().for_each(|change| self.claim_changed(&change)),
                changes = self.templates.next() => changes.into_iter().for_each(|change| self.template_changed(&change)),
                () = self.work.wait_until_due() => {}
                () = std::future::ready(()), if synced && !self.work.is_empty() => self.work_once().await,
            }
        }
    }

    async fn work_once(&mut self) {
        let Some(work) = self.work.pop() else { return };
        let done = match &work {
            Work::Pod(key) => self.sync_pod(key).await,
            Work::Claim(key) => self.sync_claim(key).await,
        };
        self.work.finish(work, done, "claim controller");
    }

    fn pod_changed(&mut self, change: &Change<Pod>) {
        let Some(pod) = change.new.as_ref().or(change.old.as_ref()) else { return };
        if change.new.is_none() {
            let uid = pod.uid().unwrap_or_default();
            self.made.retain(|(pod, _), _| *pod != uid);
        }
        let over = change.new.is_none() || pod_claim::is_done(pod);
        for entry in pod_claim::entries(pod) {
            if over && let Some(name) = PodClaim::of(pod, entry).name() {
                self.work.add(Work::Claim((change.key.0.clone(), name.to_owned())));
            }
        }
        if change.new.is_some() && !pod_claim::entries(pod).is_empty() {
            self.work.add(Work::Pod(change.key.clone()));
        }
    }

    fn claim_changed(&mut self, change: &Change<ResourceClaim>) {
        if change.new.is_some() {
            self.work.add(Work::Claim(change.key.clone()));
        }
        let pods = self.pods.in_namespace(&change.key.0);
        for pod in pods.filter(|pod| pod_claim::uses(pod, &change.key)) {
            self.work.add(Work::Pod(key(pod.as_ref())));
        }
    }

    fn template_changed(&mut self, change: &Change<ResourceClaimTemplate>) {
        let (namespace, name) = &change.key;
        let wants = |pod: &Pod| {
            pod_claim::entries(pod)
                .iter()
                .any(|e| e.resource_claim_template_name.as_ref() == Some(name))
        };
        for pod in self.pods.in_namespace(namespace).filter(|pod| wants(pod)) {
            self.work.add(Work::Pod(key(pod.as_ref())));
        }
    }

    /// Creates the pod's claims, and reserves them if the pod was bound without the scheduler.
    async fn sync_pod(&mut self, key: &Key) -> Result<(), SyncError> {
        let Some(pod) = self.pods.get(key).cloned() else { return Ok(()) };
        if pod.metadata.deletion_timestamp.is_some() {
            return Ok(());
        }
        let mut fresh = BTreeMap::new();
        for entry in pod_claim::entries(&pod) {
            match self.ensure_claim(&pod, entry).await {
                Ok(Some(name)) => drop(fresh.insert(entry.name.clone(), name)),
                Ok(None) => {}
                Err(error) => {
                    self.report(&pod, entry, &error).await;
                    return Err(error);
                }
            }
        }
        if !fresh.is_empty() {
            let statuses: Vec<Value> = fresh
                .iter()
                .map(|(entry, claim)| json!({"name": entry, "resourceClaimName": claim}))
                .collect();
            let patch = json!({"status": {"resourceClaimStatuses": statuses}});
            let pods: Api<Pod> = Api::namespaced(self.client.clone(), &key.0);
            let patched = pods
                .patch_status(&key.1, &PatchParams::default(), &Patch::Strategic(patch))
                .await?;
            self.pods.assume(patched);
        }
        if pod_claim::node_name(&pod).is_some() {
            self.reserve(&pod).await?;
        }
        Ok(())
    }

    /// Returns the name of a claim that is missing in the pod's status. Creates the claim if
    /// needed.
    async fn ensure_claim(
        &mut self,
        pod: &Pod,
        entry: &PodResourceClaim,
    ) -> Result<Option<String>, SyncError> {
        let namespace = pod.namespace().unwrap_or_default();
        match PodClaim::of(pod, entry) {
            PodClaim::Named(_) | PodClaim::NotNeeded => return Ok(None),
            PodClaim::Generated(name) => {
                let claim = self.claims.get(&(namespace.clone(), name));
                if claim.is_some_and(|claim| pod_claim::is_for_pod(pod, claim)) {
                    return Ok(None);
                }
            }
            PodClaim::NotCreated => {}
        }
        let Some(template) = &entry.resource_claim_template_name else { return Ok(None) };
        if let Some(name) = self.find_unrecorded_claim(pod, entry).await? {
            return Ok(Some(name));
        }
        let template = self
            .templates
            .get(&(namespace.clone(), template.clone()))
            .ok_or_else(|| SyncError::NoTemplate(template.clone()))?;
        let claim = generated(pod, entry, template);
        let claims: Api<ResourceClaim> = Api::namespaced(self.client.clone(), &namespace);
        let claim = claims.create(&PostParams::default(), &claim).await?;
        let name = claim.name_any();
        self.made.insert((pod.uid().unwrap_or_default(), entry.name.clone()), name.clone());
        self.claims.assume(claim);
        Ok(Some(name))
    }

    /// Returns an existing claim of this entry that is missing in the pod's status.
    async fn find_unrecorded_claim(
        &self,
        pod: &Pod,
        entry: &PodResourceClaim,
    ) -> Result<Option<String>, SyncError> {
        let belongs = |claim: &ResourceClaim| {
            claim.namespace() == pod.namespace()
                && claim.annotations().get(POD_CLAIM_NAME) == Some(&entry.name)
                && pod_claim::is_for_pod(pod, claim)
        };
        let namespace = pod.namespace().unwrap_or_default();
        if let Some(claim) = self.claims.in_namespace(&namespace).find(|claim| belongs(claim)) {
            return Ok(Some(claim.name_any()));
        }
        let made = self.made.get(&(pod.uid().unwrap_or_default(), entry.name.clone()));
        let Some(name) = made else { return Ok(None) };
        let claims: Api<ResourceClaim> = Api::namespaced(self.client.clone(), &namespace);
        Ok(claims.get_opt(name).await?.filter(belongs).map(|claim| claim.name_any()))
    }

    async fn reserve(&self, pod: &Pod) -> Result<(), SyncError> {
        let namespace = pod.namespace().unwrap_or_default();
        for entry in pod_claim::entries(pod) {
            let Some(name) = PodClaim::of(pod, entry).name().map(str::to_owned) else { continue };
            let Some(claim) = self.claims.get(&(namespace.clone(), name)) else { continue };
            if !pod_claim::is_allocated(claim) || pod_claim::is_reserved_for(pod, claim) {
                continue;
            }
            let mut consumers = pod_claim::reserved_for(claim).to_vec();
            consumers.push(pod_claim::consumer(pod));
            self.write_status(claim, json!({"reservedFor": consumers})).await?;
        }
        Ok(())
    }

    /// Removes deleted consumers, deallocates unused claims, deletes claims that their pod no
    /// longer needs.
    async fn sync_claim(&mut self, key: &Key) -> Result<(), SyncError> {
        let Some(claim) = self.claims.get(key).cloned() else { return Ok(()) };
        let before = pod_claim::reserved_for(&claim);
        let mut remaining = Vec::new();
        for consumer in before {
            if self.consumer_exists(&key.0, consumer).await? {
                remaining.push(consumer.clone());
            }
        }
        let protected = claim.finalizers().iter().any(|finalizer| finalizer == FINALIZER);
        if remaining.len() < before.len() {
            let mut status = json!({"reservedFor": remaining});
            // Only a claim that was reserved before is deallocated.
            if remaining.is_empty() && protected {
                status = json!({"reservedFor": null, "allocation": null});
            }
            let claim = self.write_status(&claim, status).await?;
            if protected && !pod_claim::is_allocated(&claim) {
                self.remove_finalizer(&claim).await?;
            }
        } else if protected && remaining.is_empty() && claim.metadata.deletion_timestamp.is_some() {
            let mut claim = ResourceClaim::clone(&claim);
            if pod_claim::is_allocated(&claim) {
                claim = self.write_status(&claim, json!({"allocation": null})).await?;
            }
            self.remove_finalizer(&claim).await?;
        }
        if remaining.is_empty() {
            self.delete_if_unused(&claim).await?;
        }
        Ok(())
    }

    async fn consumer_exists(
        &self,
        namespace: &str,
        consumer: &ResourceClaimConsumerReference,
    ) -> Result<bool, SyncError> {
        if consumer.api_group.as_deref().is_some_and(|group| !group.is_empty())
            || consumer.resource != "pods"
        {
            // Consumers of other kinds are checked by other controllers.
            return Ok(true);
        }
        let uid = Some(&consumer.uid);
        if let Some(pod) = self.pods.get(&(namespace.to_owned(), consumer.name.clone())) {
            return Ok(pod.metadata.uid.as_ref() == uid && !pod_claim::is_done(pod));
        }
        // The watch may lag behind the scheduler, and a pod that is being bound must not be
        // removed.
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), namespace);
        Ok(pods.get_opt(&consumer.name).await?.is_some_and(|pod| pod.metadata.uid.as_ref() == uid))
    }

    async fn write_status(
        &self,
        claim: &ResourceClaim,
        status: Value,
    ) -> Result<ResourceClaim, SyncError> {
        // With the observed version, so that any concurrent change makes this fail.
        let patch =
            json!({"metadata": {"resourceVersion": claim.resource_version()}, "status": status});
        let claims: Api<ResourceClaim> =
            Api::namespaced(self.client.clone(), &claim.namespace().unwrap_or_default());
        Ok(claims
            .patch_status(&claim.name_any(), &PatchParams::default(), &Patch::Merge(patch))
            .await?)
    }

    async fn remove_finalizer(&self, claim: &ResourceClaim) -> Result<(), SyncError> {
        let left: Vec<&String> =
            claim.finalizers().iter().filter(|finalizer| *finalizer != FINALIZER).collect();
        let patch =
            json!({"metadata": {"resourceVersion": claim.resource_version(), "finalizers": left}});
        let claims: Api<ResourceClaim> =
            Api::namespaced(self.client.clone(), &claim.namespace().unwrap_or_default());
        claims.patch(&claim.name_any(), &PatchParams::default(), &Patch::Merge(patch)).await?;
        Ok(())
    }

    async fn delete_if_unused(&self, claim: &ResourceClaim) -> Result<(), SyncError> {
        let namespace = claim.namespace().unwrap_or_default();
        let owner = claim.owner_references().iter().find(|owner| {
            owner.controller == Some(true) && owner.api_version == "v1" && owner.kind == "Pod"
        });
        let Some(owner) = owner else { return Ok(()) };
        // An unknown pod may be new; if it is deleted, the garbage collector removes the claim.
        let Some(pod) = self.pods.get(&(namespace.clone(), owner.name.clone())) else {
            return Ok(());
        };
        let replaced = pod.metadata.uid.as_ref() != Some(&owner.uid);
        if !(replaced || pod_claim::is_done(pod)) || claim.metadata.deletion_timestamp.is_some() {
            return Ok(());
        }
        let claims: Api<ResourceClaim> = Api::namespaced(self.client.clone(), &namespace);
        let params = DeleteParams::default()
            .preconditions(Preconditions { uid: claim.uid(), resource_version: None });
        match claims.delete(&claim.name_any(), &params).await {
            Err(kube::Error::Api(status)) if status.is_not_found() => Ok(()),
            Err(error) => Err(error.into()),
            Ok(_) => Ok(()),
        }
    }

    async fn report(&self, pod: &Pod, entry: &PodResourceClaim, error: &SyncError) {
        let note = match error {
            SyncError::Api(source) => format!("PodResourceClaim {}: {source}", entry.name),
            SyncError::NoTemplate(_) => format!("PodResourceClaim {}: {error}", entry.name),
        };
        let event = PodEvent {
            type_: EventType::Warning,
            reason: "FailedResourceClaimCreation",
            action: "CreateResourceClaim",
            note: &note,
        };
        self.events.publish(pod, event).await;
    }
}

fn generated(
    pod: &Pod,
    entry: &PodResourceClaim,
    template: &ResourceClaimTemplate,
) -> ResourceClaim {
    let template = template.spec.clone().unwrap_or_default();
    let metadata = template.metadata.unwrap_or_default();
    let mut annotations = metadata.annotations.unwrap_or_default();
    annotations.insert(POD_CLAIM_NAME.to_owned(), entry.name.clone());
    let owner = OwnerReference {
        api_version: "v1".to_owned(),
        kind: "Pod".to_owned(),
        name: pod.name_any(),
        uid: pod.uid().unwrap_or_default(),
        controller: Some(true),
        block_owner_deletion: None,
    };
    ResourceClaim {
        metadata: ObjectMeta {
            generate_name: Some(base_name(&pod.name_any(), &entry.name)),
            annotations: Some(annotations),
            labels: metadata.labels,
            owner_references: Some(vec![owner]),
            ..ObjectMeta::default()
        },
        spec: template.spec,
        status: None,
    }
}

/// Returns `pod-entry-`, with each part cut in proportion if both are too long.
fn base_name(pod: &str, entry: &str) -> String {
    let whole = format!("{pod}-{entry}-");
    if whole.len() <= MAX_BASE_LENGTH {
        return whole;
    }
    let share = |part: &str| part.len() * MAX_BASE_LENGTH / whole.len();
    format!("{}-{}", &pod[..share(pod)], &entry[..share(entry)])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_names_are_cut_in_proportion() {
        assert_eq!(base_name("pod", "gpu"), "pod-gpu-");
        let cut = base_name(&"p".repeat(60), &"g".repeat(20));
        assert!(cut.len() <= MAX_BASE_LENGTH, "{cut}");
        assert!(cut.starts_with("ppp") && cut.contains("-ggg"), "{cut}");
    }
}
