use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use k8s_openapi::api::core::v1::{ConfigMap, Node, Pod};
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceClaimTemplate, ResourceSlice};
use kube::api::{Api, DeleteParams};
use kube::{Resource, ResourceExt};
use serde_json::{Value, json};
use tessera_simcluster::api::{ApiError, Fault, RequestInfo, WatchFault};
use tessera_simcluster::cluster::SimCluster;
use tokio::sync::Notify;

use crate::{cluster, create, generated, gone, node, pod, present, sim, template, until};

#[tokio::test]
async fn generated_claim_is_deleted_with_its_pod() {
    let (_cluster, client) = cluster().await;
    let pods: Api<Pod> = Api::default_namespaced(client.clone());
    let claims: Api<ResourceClaim> = Api::default_namespaced(client.clone());
    template(&client, "gpu").await;
    create(&pods, pod("p", json!({"resourceClaimTemplateName": "gpu"}))).await;
    let name = generated(&pods, "p").await;
    pods.delete("p", &DeleteParams::default()).await.unwrap();
    until(&claims, &name, gone()).await;
}

fn slice_of(node: &Node, name: &str) -> Value {
    json!({
        "metadata": {"name": name, "ownerReferences": [node.owner_ref(&())]},
        "spec": {"driver": "gpu.tessera.dev", "nodeName": node.name_any(), "pool": {
            "name": node.name_any(), "generation": 1, "resourceSliceCount": 1,
        }},
    })
}

#[tokio::test]
async fn slices_are_deleted_with_their_node_incarnation() {
    let (_cluster, client) = cluster().await;
    let (nodes, slices): (Api<Node>, Api<ResourceSlice>) =
        (Api::all(client.clone()), Api::all(client.clone()));
    let first = node(&client, "node-a", "4").await;
    create(&slices, slice_of(&first, "one")).await;
    nodes.delete("node-a", &DeleteParams::default()).await.unwrap();
    until(&slices, "one", gone()).await;
    node(&client, "node-a", "4").await;
    create(&slices, slice_of(&first, "two")).await;
    until(&slices, "two", gone()).await;
}

fn owned(name: &str, owner: &ConfigMap) -> Value {
    let mut reference = serde_json::to_value(owner.owner_ref(&())).unwrap();
    reference["blockOwnerDeletion"] = true.into();
    json!({"metadata": {"name": name, "ownerReferences": [reference]}})
}

fn template_owned(name: &str, owner: &ConfigMap) -> Value {
    let mut template = owned(name, owner);
    template["spec"] = json!({"spec": {"devices": {"requests": [
        {"name": "gpu", "exactly": {"deviceClassName": "gpu.tessera.dev"}},
    ]}}});
    template
}

#[tokio::test]
async fn foreground_deletion_removes_the_owner_last() {
    let (_cluster, client) = cluster().await;
    let maps: Api<ConfigMap> = Api::default_namespaced(client);
    let owner = create(&maps, json!({"metadata": {"name": "owner"}})).await;
    let mut dependent = owned("dependent", &owner);
    dependent["metadata"]["finalizers"] = json!(["x.io/wait"]);
    create(&maps, dependent).await;
    maps.delete("owner", &DeleteParams::foreground()).await.unwrap();
    until(&maps, "dependent", present(|map: &ConfigMap| map.metadata.deletion_timestamp.is_some()))
        .await;
    assert!(maps.get_opt("owner").await.unwrap().is_some());
    crate::patch(&maps, "dependent", json!({"metadata": {"finalizers": null}})).await;
    until(&maps, "owner", gone()).await;
}

/// A cluster whose garbage collector can be kept from watching ConfigMaps. At first it watches
/// them.
struct BlockedWatch {
    cluster: SimCluster,
    maps: Api<ConfigMap>,
    templates: Api<ResourceClaimTemplate>,
    /// Deleted object.
    missing: ConfigMap,
    is_blocked: Arc<AtomicBool>,
    /// Notified when a list of ConfigMaps was refused: the watch has ended.
    refused: Arc<Notify>,
}

impl BlockedWatch {
    async fn new() -> Self {
        let (cluster, client) = sim().await;
        let maps: Api<ConfigMap> = Api::default_namespaced(client.clone());
        let missing = create(&maps, json!({"metadata": {"name": "missing"}})).await;
        maps.delete("missing", &DeleteParams::default()).await.unwrap();
        let templates = Api::default_namespaced(client);
        let this = Self {
            cluster,
            maps,
            templates,
            missing,
            is_blocked: Arc::default(),
            refused: Arc::default(),
        };
        // Later refused requests are neither a first list nor a first watch that would resume.
        this.process_dependents().await;
        let shown = this.owner("shown").await;
        this.create_dependent("shown", &shown).await;
        this.process_dependents().await;
        this.maps.delete("shown", &DeleteParams::default()).await.unwrap();
        until(&this.templates, "of-shown", gone()).await;
        this.hook();
        this
    }

    fn hook(&self) {
        let watches_maps = |request: &RequestInfo| {
            request.user.name.ends_with(":generic-garbage-collector")
                && request.resource == "configmaps"
                && request.verb != "get"
        };
        let api = self.cluster.api();
        let (is_blocked, refused) = (self.is_blocked.clone(), self.refused.clone());
        api.set_fault_hook(Some(Arc::new(move |request| {
            if !is_blocked.load(Ordering::SeqCst) || !watches_maps(request) {
                return Fault::None;
            }
            refused.notify_one();
            Fault::Refuse(ApiError::unavailable("no watch for now"))
        })));
        let is_blocked = self.is_blocked.clone();
        api.set_watch_fault_hook(Some(Arc::new(move |watch| {
            let expired = is_blocked.load(Ordering::SeqCst) && watches_maps(watch);
            if expired { WatchFault::Expire } else { WatchFault::None }
        })));
    }

    fn block(&self) {
        self.is_blocked.store(true, Ordering::SeqCst);
    }

    async fn unblock(&self) {
        self.refused.notified().await;
        self.is_blocked.store(false, Ordering::SeqCst);
    }

    async fn owner(&self, name: &str) -> ConfigMap {
        create(&self.maps, json!({"metadata": {"name": name}})).await
    }

    async fn create_dependent(&self, name: &str, owner: &ConfigMap) {
        create(&self.templates, template_owned(&format!("of-{name}"), owner)).await;
    }

    /// Makes the collector process all existing dependents: this one is deleted, and queued after
    /// them.
    async fn process_dependents(&self) {
        self.create_dependent("missing", &self.missing).await;
        until(&self.templates, "of-missing", gone()).await;
    }
}

#[tokio::test]
async fn dependents_of_unwatched_owner_are_deleted() {
    let watch = BlockedWatch::new().await;
    watch.block();
    let owner = watch.owner("owner").await;
    watch.create_dependent("owner", &owner).await;
    watch.process_dependents().await;
    assert!(watch.templates.get_opt("of-owner").await.unwrap().is_some());
    watch.maps.delete("owner", &DeleteParams::default()).await.unwrap();
    watch.unblock().await;
    until(&watch.templates, "of-owner", gone()).await;
}

#[tokio::test]
async fn dependents_of_replaced_owner_are_deleted() {
    let watch = BlockedWatch::new().await;
    let owner = watch.owner("owner").await;
    watch.create_dependent("owner", &owner).await;
    watch.process_dependents().await;
    watch.block();
    watch.maps.delete("owner", &DeleteParams::default()).await.unwrap();
    watch.owner("owner").await;
    watch.unblock().await;
    until(&watch.templates, "of-owner", gone()).await;
}

#[tokio::test]
async fn orphan_deletion_keeps_the_dependents() {
    let (_cluster, client) = cluster().await;
    let maps: Api<ConfigMap> = Api::default_namespaced(client);
    let owner = create(&maps, json!({"metadata": {"name": "owner"}})).await;
    create(&maps, owned("dependent", &owner)).await;
    maps.delete("owner", &DeleteParams::orphan()).await.unwrap();
    until(&maps, "owner", gone()).await;
    assert!(maps.get("dependent").await.unwrap().owner_references().is_empty());
}
