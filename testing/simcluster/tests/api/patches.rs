use k8s_openapi::api::core::v1::{ConfigMap, Pod};
use k8s_openapi::api::resource::v1::ResourceSlice;
use kube::ResourceExt;
use kube::api::{Api, Patch, PatchParams};
use serde_json::{Value, json};

use crate::{config_map, created, pod, refusal, server, server_api, slice};

#[tokio::test]
async fn merge_patch_removes_by_null() {
    let (_api, maps) = server_api::<ConfigMap>().await;
    created(&maps, config_map("a")).await;
    let patch = Patch::Merge(json!({"data": {"a": null, "b": "2"}}));
    let made = maps.patch("a", &PatchParams::default(), &patch).await.unwrap();
    assert_eq!(made.data.unwrap(), [("b".to_owned(), "2".to_owned())].into());
}

#[tokio::test]
async fn json_patch_is_atomic() {
    let (_api, maps) = server_api::<ConfigMap>().await;
    created(&maps, config_map("a")).await;
    let patch = |value: Value| Patch::Json::<()>(serde_json::from_value(value).unwrap());
    let good = patch(json!([
        {"op": "test", "path": "/data/a", "value": "1"},
        {"op": "add", "path": "/metadata/finalizers", "value": ["x.io/y"]},
    ]));
    let made = maps.patch("a", &PatchParams::default(), &good).await.unwrap();
    assert_eq!(made.finalizers(), ["x.io/y"]);
    let bad = patch(json!([
        {"op": "replace", "path": "/data/a", "value": "2"},
        {"op": "test", "path": "/data/a", "value": "1"},
    ]));
    assert_eq!(refusal(maps.patch("a", &PatchParams::default(), &bad).await).0, 422);
    assert_eq!(maps.get("a").await.unwrap().data.unwrap()["a"], "1");
}

#[tokio::test]
async fn strategic_patch_merges_lists_by_key() {
    let (_api, pods) = server_api::<Pod>().await;
    created(&pods, pod("a")).await;
    let condition = |kind: &str, status: &str| json!({"status": {"conditions": [{"type": kind, "status": status}]}});
    for patch in
        [condition("Ready", "False"), condition("PodScheduled", "True"), condition("Ready", "True")]
    {
        pods.patch_status("a", &PatchParams::default(), &Patch::Strategic(patch)).await.unwrap();
    }
    let conditions = pods.get("a").await.unwrap().status.unwrap().conditions.unwrap();
    let seen: Vec<_> = conditions.iter().map(|c| (c.type_.as_str(), c.status.as_str())).collect();
    assert_eq!(seen, [("PodScheduled", "True"), ("Ready", "True")]);
    let gone = json!({"status": {"conditions": [{"type": "Ready", "$patch": "delete"}]}});
    let made =
        pods.patch_status("a", &PatchParams::default(), &Patch::Strategic(gone)).await.unwrap();
    assert_eq!(made.status.unwrap().conditions.unwrap().len(), 1);
}

#[tokio::test]
async fn strategic_patch_adds_and_removes_finalizers() {
    let (_api, maps) = server_api::<ConfigMap>().await;
    created(&maps, config_map("a")).await;
    let patch = async |patch: Value| {
        let made =
            maps.patch("a", &PatchParams::default(), &Patch::Strategic(patch)).await.unwrap();
        made.finalizers().to_vec()
    };
    assert_eq!(patch(json!({"metadata": {"finalizers": ["x.io/a"]}})).await, ["x.io/a"]);
    assert_eq!(patch(json!({"metadata": {"finalizers": ["x.io/b"]}})).await, ["x.io/b", "x.io/a"]);
    let gone = json!({"metadata": {"$deleteFromPrimitiveList/finalizers": ["x.io/a"]}});
    assert_eq!(patch(gone).await, ["x.io/b"]);
}

#[tokio::test]
async fn server_side_apply_creates_and_then_merges() {
    let (_api, client) = server().await;
    let maps: Api<ConfigMap> = Api::default_namespaced(client.clone());
    let params = PatchParams::apply("test");
    let apply = |data: Value| {
        Patch::Apply(
            json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}, "data": data}),
        )
    };
    let made = maps.patch("a", &params, &apply(json!({"a": "1"}))).await.unwrap();
    assert!(made.uid().is_some());
    let made = maps.patch("a", &params, &apply(json!({"b": "2"}))).await.unwrap();
    assert_eq!(
        made.data.unwrap().into_keys().collect::<Vec<_>>(),
        ["b"],
        "fields that are no longer applied are removed"
    );
    let other = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}, "data": {"b": "2", "c": "3"}});
    maps.patch("a", &PatchParams::apply("other"), &Patch::Apply(other)).await.unwrap();
    let made = maps.patch("a", &params, &apply(json!({"d": "4"}))).await.unwrap();
    let left: Vec<_> = made.data.unwrap().into_keys().collect();
    assert_eq!(left, ["b", "c", "d"], "fields of another manager stay");

    let slices: Api<ResourceSlice> = Api::all(client);
    let mut applied = slice("s", "node-a");
    slices.patch("s", &params, &Patch::Apply(&applied)).await.unwrap();
    let spec = &mut applied.spec;
    spec.pool.generation = 2;
    spec.devices.as_mut().unwrap()[0].name = "gpu-1".into();
    let made = slices.patch("s", &params, &Patch::Apply(&applied)).await.unwrap();
    let names: Vec<_> = made.spec.devices.unwrap().into_iter().map(|device| device.name).collect();
    assert_eq!(names, ["gpu-1"], "the devices of a slice are one atomic list");
    assert_eq!(made.metadata.generation, Some(2));
}

#[tokio::test]
async fn unknown_media_type_is_refused() {
    let (_api, client) = server().await;
    let request = axum::http::Request::patch("/api/v1/namespaces/default/configmaps/a")
        .header("content-type", "text/plain")
        .body(b"{}".to_vec())
        .unwrap();
    assert_eq!(refusal(client.request::<Value>(request).await).0, 415);
}
