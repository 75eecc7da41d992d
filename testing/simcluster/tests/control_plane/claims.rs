use k8s_openapi::api::core::v1::{Event, Pod};
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::ResourceExt;
use kube::api::{Api, DeleteParams, ListParams};
use serde_json::json;

use crate::{
    allocate, allocated, apis, claim, cluster, consumers, create, generated, gone, node, patch,
    patch_status, pod, present, sim, template, until, with_claim,
};

fn with_template() -> serde_json::Value {
    json!({"resourceClaimTemplateName": "gpu"})
}

#[tokio::test]
async fn pod_gets_claim_from_template() {
    let (_cluster, client) = cluster().await;
    let (pods, claims) = apis(&client);
    template(&client, "gpu").await;
    let made = create(&pods, pod("p", with_template())).await;
    let name = generated(&pods, "p").await;
    assert!(name.starts_with("p-gpu-") && name.len() == "p-gpu-".len() + 5, "{name}");
    let claim = claims.get(&name).await.unwrap();
    assert_eq!(claim.annotations()["resource.kubernetes.io/pod-claim-name"], "gpu");
    assert_eq!((claim.annotations()["note"].as_str(), claim.labels()["team"].as_str()), ("b", "a"));
    let owner = &claim.owner_references()[0];
    assert_eq!((Some(&owner.uid), owner.controller), (made.uid().as_ref(), Some(true)));
    assert_eq!(claims.list(&ListParams::default()).await.unwrap().items.len(), 1);
}

#[tokio::test]
async fn missing_template_causes_event_and_retry() {
    let (_cluster, client) = cluster().await;
    let (pods, _) = apis(&client);
    create(&pods, pod("p", with_template())).await;
    let events: Api<Event> = Api::default_namespaced(client.clone());
    let seen = loop {
        let params = ListParams::default().fields("reason=FailedResourceClaimCreation");
        if let Some(event) = events.list(&params).await.unwrap().items.pop() {
            break event;
        }
        tokio::task::yield_now().await;
    };
    let message = "PodResourceClaim gpu: resource claim template \"gpu\": resourceclaimtemplate.resource.k8s.io \"gpu\" not found";
    assert_eq!(seen.message.as_deref(), Some(message));
    template(&client, "gpu").await;
    generated(&pods, "p").await;
}

#[tokio::test]
async fn deleted_generated_claim_is_created_again() {
    // The real controller does too, but only after its cache of created claims has dropped this
    // one.
    let (_cluster, client) = sim().await;
    let (pods, claims) = apis(&client);
    template(&client, "gpu").await;
    create(&pods, pod("p", with_template())).await;
    let first = generated(&pods, "p").await;
    claims.delete(&first, &DeleteParams::default()).await.unwrap();
    let renamed = move |pod: &Pod| {
        let statuses =
            pod.status.as_ref().and_then(|status| status.resource_claim_statuses.clone());
        statuses.is_some_and(|statuses| statuses[0].resource_claim_name.as_ref() != Some(&first))
    };
    until(&pods, "p", present(renamed)).await;
}

#[tokio::test]
async fn claim_of_finished_pod_is_deallocated_and_deleted() {
    let (_cluster, client) = cluster().await;
    let (pods, claims) = apis(&client);
    node(&client, "node-a", "4").await;
    template(&client, "gpu").await;
    create(&pods, pod("p", with_template())).await;
    let name = generated(&pods, "p").await;
    allocate(&client, &name, "node-a").await;
    until(&claims, &name, present(|claim| consumers(claim) == ["p"])).await;
    patch_status(&pods, "p", json!({"phase": "Succeeded"})).await;
    until(&claims, &name, gone()).await;
    assert!(pods.get_opt("p").await.unwrap().is_some());
}

#[tokio::test]
async fn shared_claim_is_deallocated_with_its_last_pod() {
    let (_cluster, client) = cluster().await;
    let (pods, claims) = apis(&client);
    node(&client, "node-a", "4").await;
    claim(&client, "shared").await;
    create(&pods, pod("one", with_claim())).await;
    create(&pods, pod("two", with_claim())).await;
    allocate(&client, "shared", "node-a").await;
    until(&claims, "shared", present(|claim| consumers(claim).len() == 2)).await;
    pods.delete("one", &DeleteParams::default().grace_period(0)).await.unwrap();
    let left =
        until(&claims, "shared", present(|claim| consumers(claim) == ["two"])).await.unwrap();
    assert!(allocated(&left));
    pods.delete("two", &DeleteParams::default().grace_period(0)).await.unwrap();
    let free = |claim: &ResourceClaim| !allocated(claim) && claim.finalizers().is_empty();
    until(&claims, "shared", present(free)).await;
}

#[tokio::test]
async fn never_reserved_allocation_stays() {
    let (_cluster, client) = cluster().await;
    let (_, claims) = apis(&client);
    claim(&client, "idle").await;
    allocate(&client, "idle", "node-a").await;
    // Later work of the same controller proves that it processed this claim.
    claim(&client, "other").await;
    allocate(&client, "other", "node-a").await;
    claims.delete("other", &DeleteParams::default()).await.unwrap();
    until(&claims, "other", gone()).await;
    assert!(allocated(&claims.get("idle").await.unwrap()));
}

#[tokio::test]
async fn deleted_claim_waits_for_its_pod() {
    let (_cluster, client) = cluster().await;
    let (pods, claims) = apis(&client);
    node(&client, "node-a", "4").await;
    claim(&client, "shared").await;
    create(&pods, pod("p", with_claim())).await;
    allocate(&client, "shared", "node-a").await;
    until(&claims, "shared", present(|claim| consumers(claim) == ["p"])).await;
    claims.delete("shared", &DeleteParams::default()).await.unwrap();
    assert!(allocated(&claims.get("shared").await.unwrap()));
    pods.delete("p", &DeleteParams::default().grace_period(0)).await.unwrap();
    until(&claims, "shared", gone()).await;
}

#[tokio::test]
async fn controller_reserves_claim_of_manually_bound_pod() {
    let (_cluster, client) = cluster().await;
    let (pods, claims) = apis(&client);
    claim(&client, "shared").await;
    let mut bound = pod("p", with_claim());
    bound["spec"]["nodeName"] = "node-a".into();
    create(&pods, bound).await;
    allocate(&client, "shared", "node-a").await;
    until(&claims, "shared", present(|claim| consumers(claim) == ["p"])).await;
}

#[tokio::test]
async fn consumers_of_unknown_kinds_are_kept() {
    let (_cluster, client) = cluster().await;
    let (_, claims) = apis(&client);
    claim(&client, "shared").await;
    allocate(&client, "shared", "node-a").await;
    let consumers_now = json!({"reservedFor": [
        {"apiGroup": "scheduling.k8s.io", "resource": "podgroups", "name": "g", "uid": "1"},
        {"resource": "pods", "name": "ghost", "uid": "2"},
    ]});
    patch_status(&claims, "shared", consumers_now).await;
    let left = until(&claims, "shared", present(|claim| consumers(claim) == ["g"])).await.unwrap();
    assert!(allocated(&left));
    patch(&claims, "shared", json!({"metadata": {"labels": {"still": "there"}}})).await;
}
