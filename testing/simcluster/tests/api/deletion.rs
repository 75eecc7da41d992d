use k8s_openapi::api::core::v1::{ConfigMap, Namespace, Pod};
use kube::ResourceExt;
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams, Preconditions};
use serde_json::json;

use crate::{config_map, created, pod, refusal, server, server_api, typed};

fn merge(patch: serde_json::Value) -> Patch<serde_json::Value> {
    Patch::Merge(patch)
}

#[tokio::test]
async fn object_is_removed_with_its_last_finalizer() {
    let (_api, maps) = server_api::<ConfigMap>().await;
    let mut map = config_map("a");
    map.metadata.finalizers = Some(vec!["x.io/one".into(), "x.io/two".into()]);
    created(&maps, map).await;
    assert!(maps.delete("a", &DeleteParams::default()).await.unwrap().is_left());
    let first = maps.get("a").await.unwrap();
    assert!(first.metadata.deletion_timestamp.is_some());
    maps.delete("a", &DeleteParams::default()).await.unwrap();
    assert_eq!(maps.get("a").await.unwrap().resource_version(), first.resource_version());
    let added = merge(json!({"metadata": {"finalizers": ["x.io/one", "x.io/two", "x.io/three"]}}));
    let (code, _, message) = refusal(maps.patch("a", &PatchParams::default(), &added).await);
    assert_eq!(code, 422);
    assert!(
        message.contains("no new finalizers can be added if the object is being deleted"),
        "{message}"
    );
    let params = PatchParams::default();
    maps.patch("a", &params, &merge(json!({"metadata": {"finalizers": ["x.io/one"]}})))
        .await
        .unwrap();
    assert!(maps.get_opt("a").await.unwrap().is_some());
    maps.patch("a", &params, &merge(json!({"metadata": {"finalizers": null}}))).await.unwrap();
    assert!(maps.get_opt("a").await.unwrap().is_none());
}

#[tokio::test]
async fn deletion_preconditions_are_checked() {
    let (_api, maps) = server_api::<ConfigMap>().await;
    let made = created(&maps, config_map("a")).await;
    let with = |uid: Option<String>, version: Option<String>| {
        DeleteParams::default().preconditions(Preconditions { uid, resource_version: version })
    };
    assert_eq!(refusal(maps.delete("a", &with(Some("other".into()), None)).await).1, "Conflict");
    assert_eq!(refusal(maps.delete("a", &with(None, Some("1".into()))).await).1, "Conflict");
    assert!(maps.delete("a", &with(made.uid(), made.resource_version())).await.unwrap().is_right());
}

#[tokio::test]
async fn bound_pod_waits_for_its_kubelet() {
    let (_api, pods) = server_api::<Pod>().await;
    let mut bound = pod("a");
    bound.spec.as_mut().unwrap().node_name = Some("node-a".into());
    created(&pods, bound).await;
    pods.delete("a", &DeleteParams::default()).await.unwrap();
    let deleting = pods.get("a").await.unwrap();
    assert_eq!(deleting.metadata.deletion_grace_period_seconds, Some(30));
    assert_eq!(deleting.metadata.generation, Some(2));
    pods.delete("a", &DeleteParams::default().grace_period(5)).await.unwrap();
    assert_eq!(pods.get("a").await.unwrap().metadata.deletion_grace_period_seconds, Some(5));
    // Status updates of the kubelet do not end the deletion.
    let status = json!({"status": {"phase": "Failed"}});
    pods.patch_status("a", &PatchParams::default(), &merge(status)).await.unwrap();
    assert!(pods.get_opt("a").await.unwrap().is_some());
    pods.delete("a", &DeleteParams::default().grace_period(0)).await.unwrap();
    assert!(pods.get_opt("a").await.unwrap().is_none());
}

#[tokio::test]
async fn unbound_pod_is_removed_at_once() {
    let (_api, pods) = server_api::<Pod>().await;
    created(&pods, pod("a")).await;
    assert!(pods.delete("a", &DeleteParams::default()).await.unwrap().is_left());
    assert!(pods.get_opt("a").await.unwrap().is_none());
}

#[tokio::test]
async fn pod_is_evicted_gracefully() {
    let (_api, pods) = server_api::<Pod>().await;
    let mut bound = pod("a");
    bound.spec.as_mut().unwrap().node_name = Some("node-a".into());
    created(&pods, bound).await;
    pods.evict("a", &Default::default()).await.unwrap();
    assert!(pods.get("a").await.unwrap().metadata.deletion_timestamp.is_some());
}

#[tokio::test]
async fn collection_is_deleted_by_selector() {
    let (_api, maps) = server_api::<ConfigMap>().await;
    for name in ["a", "b"] {
        let mut map = config_map(name);
        map.metadata.labels = Some([("name".to_owned(), name.to_owned())].into());
        created(&maps, map).await;
    }
    let selected = ListParams::default().labels("name=a");
    maps.delete_collection(&DeleteParams::default(), &selected).await.unwrap();
    let left = maps.list(&ListParams::default()).await.unwrap();
    assert_eq!(left.items.iter().map(ResourceExt::name_any).collect::<Vec<_>>(), ["b"]);
}

#[tokio::test]
async fn terminating_namespace_refuses_new_objects() {
    let (_api, client) = server().await;
    let namespaces: Api<Namespace> = Api::all(client.clone());
    let name = format!("n-{}", uuid::Uuid::new_v4().simple());
    let made = created(&namespaces, typed(json!({"metadata": {"name": name}}))).await;
    assert_eq!(made.labels()["kubernetes.io/metadata.name"], name);
    namespaces.delete(&name, &DeleteParams::default()).await.unwrap();
    let phase = namespaces.get(&name).await.unwrap().status.unwrap().phase;
    assert_eq!(phase.as_deref(), Some("Terminating"));
    let maps: Api<ConfigMap> = Api::namespaced(client, &name);
    let (code, _, message) = refusal(maps.create(&PostParams::default(), &config_map("a")).await);
    assert_eq!(code, 403);
    assert!(message.ends_with("because it is being terminated"), "{message}");
}
