use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use k8s_openapi::api::core::v1::{ConfigMap, Node, Pod};
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceClaimTemplate, ResourceSlice};
use kube::api::{Api, DeleteParams};
use kube::{Resource, ResourceExt};
use serde_json::{Value, json};
use tessera_simcluster::api::{ApiError, Fault, RequestInfo, WatchFault};

use crate::{cluster, create, generated, gone, node, pod, present, sim, template, until};

#[tokio::test]
async fn a_generated_claim_goes_with_its_pod() {
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
async fn slices_go_with_their_node_and_slices_of_a_namesake_go_at_once() {
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
async fn foreground_deletion_lets_the_owner_go_last() {
    let (_cluster, client) = cluster().await;
    let maps: Api<ConfigMap> = Api::default_namespaced(client);
    let owner = create(&maps, json!({"metadata": {"name": "owner"}})).await;
    let mut dependent = owned("dependent", &owner);
    dependent["metadata"]["finalizers"] = json!(["x.io/wait"]);
    create(&maps, dependent).await;
    maps.delete("owner", &DeleteParams::foreground()).await.unwrap();
    until(&maps, "dependent", present(|map: &ConfigMap| map.metadata.deletion_timestamp.is_some())).await;
    assert!(maps.get_opt("owner").await.unwrap().is_some());
    crate::patch(&maps, "dependent", json!({"metadata": {"finalizers": null}})).await;
    until(&maps, "owner", gone()).await;
}

#[tokio::test]
async fn what_an_owner_leaves_goes_also_where_no_watch_has_ever_shown_the_owner() {
    let (cluster, client) = sim().await;
    let maps: Api<ConfigMap> = Api::default_namespaced(client.clone());
    let templates: Api<ResourceClaimTemplate> = Api::default_namespaced(client);
    let missed = create(&maps, json!({"metadata": {"name": "missed"}})).await;
    maps.delete("missed", &DeleteParams::default()).await.unwrap();
    let blind = Arc::new(AtomicBool::new(true));
    let (lists, events) = (blind.clone(), blind.clone());
    let watches_maps = |request: &RequestInfo| {
        request.user.name.ends_with(":generic-garbage-collector")
            && request.resource == "configmaps"
            && request.verb != "get"
    };
    cluster.api().set_fault_hook(Some(Arc::new(move |request| {
        let refused = lists.load(Ordering::SeqCst) && watches_maps(request);
        if refused { Fault::Refuse(ApiError::unavailable("no watch for now")) } else { Fault::None }
    })));
    cluster.api().set_watch_fault_hook(Some(Arc::new(move |watch| {
        let expired = events.load(Ordering::SeqCst) && watches_maps(watch);
        if expired { WatchFault::Expire } else { WatchFault::None }
    })));
    let owner = create(&maps, json!({"metadata": {"name": "owner"}})).await;
    create(&templates, template_owned("dependent", &owner)).await;
    // It goes after the one before it was looked at, and found to have an owner.
    create(&templates, template_owned("later", &missed)).await;
    until(&templates, "later", gone()).await;
    assert!(templates.get_opt("dependent").await.unwrap().is_some());
    maps.delete("owner", &DeleteParams::default()).await.unwrap();
    blind.store(false, Ordering::SeqCst);
    until(&templates, "dependent", gone()).await;
}

#[tokio::test]
async fn orphan_deletion_leaves_the_dependents() {
    let (_cluster, client) = cluster().await;
    let maps: Api<ConfigMap> = Api::default_namespaced(client);
    let owner = create(&maps, json!({"metadata": {"name": "owner"}})).await;
    create(&maps, owned("dependent", &owner)).await;
    maps.delete("owner", &DeleteParams::orphan()).await.unwrap();
    until(&maps, "owner", gone()).await;
    assert!(maps.get("dependent").await.unwrap().owner_references().is_empty());
}
