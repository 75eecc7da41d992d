use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::ResourceExt;
use kube::api::{Api, DeleteParams, Patch, PatchParams, PostParams};
use serde_json::{Value, json};

use crate::{allocation, claim, created, pod, refusal, server, server_api};

const DRIVER: &str = "gpu.tessera.dev";

async fn patch_status(
    claims: &Api<ResourceClaim>,
    patch: Value,
) -> Result<ResourceClaim, kube::Error> {
    claims.patch_status("c", &PatchParams::default(), &Patch::Merge(patch)).await
}

fn consumer(uid: &str) -> Value {
    json!({"resource": "pods", "name": "p", "uid": uid})
}

async fn allocated() -> (Option<tessera_simcluster::api::ApiServer>, Api<ResourceClaim>) {
    let (api, claims) = server_api::<ResourceClaim>().await;
    let mut claim = claim("c");
    claim.metadata.finalizers = Some(vec!["resource.kubernetes.io/delete-protection".into()]);
    created(&claims, claim).await;
    patch_status(&claims, json!({"status": {"allocation": allocation(DRIVER, "node-a")}}))
        .await
        .unwrap();
    (api, claims)
}

#[tokio::test]
async fn status_is_written_only_through_subresource() {
    let (_api, pods) = server_api::<Pod>().await;
    let made = created(&pods, pod("a")).await;
    let through_main =
        Patch::Merge(json!({"status": {"phase": "Running"}, "metadata": {"labels": {"a": "b"}}}));
    let main = pods.patch("a", &PatchParams::default(), &through_main).await.unwrap();
    assert_eq!(main.status.as_ref().unwrap().phase.as_deref(), Some("Pending"));
    assert_eq!(main.labels()["a"], "b");
    let through_status =
        Patch::Merge(json!({"status": {"phase": "Running"}, "spec": {"nodeName": "n"}}));
    let status = pods.patch_status("a", &PatchParams::default(), &through_status).await.unwrap();
    assert_eq!(status.status.unwrap().phase.as_deref(), Some("Running"));
    assert_eq!(status.spec.unwrap().node_name, made.spec.unwrap().node_name);
    assert_eq!(status.metadata.generation, Some(1));
}

#[tokio::test]
async fn claim_status_leaves_metadata_unchanged() {
    let (_api, claims) = server_api::<ResourceClaim>().await;
    created(&claims, claim("c")).await;
    let patch = json!({"metadata": {"labels": {"a": "b"}, "finalizers": ["x.io/y"]}, "status": {}});
    let made = patch_status(&claims, patch).await.unwrap();
    assert!(made.labels().is_empty() && made.finalizers().is_empty());
}

#[tokio::test]
async fn allocation_is_immutable_until_cleared() {
    let (_api, claims) = allocated().await;
    let change = json!({"status": {"allocation": {"allocationTimestamp": "2026-11-21T05:00:00Z"}}});
    let (code, reason, message) = refusal(patch_status(&claims, change).await);
    assert_eq!((code, reason.as_str()), (422, "Invalid"));
    assert!(
        message.contains("status.allocation: Invalid value")
            && message.ends_with("field cannot be modified once set"),
        "{message}"
    );
    patch_status(&claims, json!({"status": {"allocation": null}})).await.unwrap();
    patch_status(&claims, json!({"status": {"allocation": allocation(DRIVER, "node-b")}}))
        .await
        .unwrap();
}

#[tokio::test]
async fn reserved_for_needs_an_allocation() {
    let (_api, claims) = allocated().await;
    patch_status(&claims, json!({"status": {"reservedFor": [consumer("1")]}})).await.unwrap();
    let (code, _, message) =
        refusal(patch_status(&claims, json!({"status": {"allocation": null}})).await);
    assert_eq!(code, 422);
    assert!(
        message.contains(
            "status.reservedFor: Forbidden: may not be specified when `allocated` is not set"
        ),
        "{message}"
    );
    patch_status(&claims, json!({"status": {"allocation": null, "reservedFor": null}}))
        .await
        .unwrap();
}

#[tokio::test]
async fn consumers_are_complete_and_unique() {
    let (_api, claims) = allocated().await;
    let twice = json!({"status": {"reservedFor": [consumer("1"), consumer("1")]}});
    assert!(
        refusal(patch_status(&claims, twice).await)
            .2
            .contains("status.reservedFor[1]: Duplicate value")
    );
    let nameless =
        json!({"status": {"reservedFor": [{"resource": "pods", "uid": "1", "name": ""}]}});
    assert!(
        refusal(patch_status(&claims, nameless).await)
            .2
            .contains("status.reservedFor[0].name: Required value")
    );
}

#[tokio::test]
async fn terminating_claim_gets_no_new_consumer() {
    let (_api, claims) = allocated().await;
    patch_status(&claims, json!({"status": {"reservedFor": [consumer("1")]}})).await.unwrap();
    claims.delete("c", &DeleteParams::default()).await.unwrap();
    let added = json!({"status": {"reservedFor": [consumer("1"), consumer("2")]}});
    let (code, _, message) = refusal(patch_status(&claims, added).await);
    assert_eq!(code, 422);
    assert!(message.contains("new entries may not be added while"), "{message}");
    patch_status(&claims, json!({"status": {"reservedFor": null}})).await.unwrap();
}

#[tokio::test]
async fn allocation_is_checked_for_form_only() {
    let (_api, claims) = server_api::<ResourceClaim>().await;
    created(&claims, claim("c")).await;
    let mut unknown = allocation(DRIVER, "node-a");
    unknown["devices"]["results"][0]["request"] = "other".into();
    let message =
        refusal(patch_status(&claims, json!({"status": {"allocation": unknown}})).await).2;
    assert!(message.contains("results[0].request: Invalid value: \"other\""), "{message}");
    let mut share = allocation(DRIVER, "node-a");
    share["devices"]["results"][0]["shareID"] = "6A2F41A3-C54C-4CF5-93F6-9A2F1D3E4B5C".into();
    let message = refusal(patch_status(&claims, json!({"status": {"allocation": share}})).await).2;
    assert!(message.contains("results[0].shareID: Invalid value"), "{message}");
    // No such device and no such node: neither is checked.
    patch_status(&claims, json!({"status": {"allocation": allocation("none.example", "nowhere")}}))
        .await
        .unwrap();
}

#[tokio::test]
async fn device_status_requires_allocated_device() {
    let (_api, claims) = allocated().await;
    let device =
        json!({"driver": DRIVER, "pool": "node-a", "device": "gpu-0", "data": {"temperature": 40}});
    let made = patch_status(&claims, json!({"status": {"devices": [device]}})).await.unwrap();
    assert_eq!(made.status.unwrap().devices.unwrap().len(), 1);
    let other = json!({"driver": DRIVER, "pool": "node-a", "device": "gpu-7"});
    let message = refusal(patch_status(&claims, json!({"status": {"devices": [other]}})).await).2;
    assert!(message.contains("must be an allocated device in the claim"), "{message}");
    let freed = patch_status(&claims, json!({"status": {"allocation": null}})).await.unwrap();
    assert!(
        freed.status.is_none_or(|status| status.devices.is_none()),
        "device status goes with the allocation"
    );
}

#[tokio::test]
async fn claim_spec_is_immutable() {
    let (_api, claims) = allocated().await;
    let patch = json!({"spec": {"devices": {"requests": [
        {"name": "gpu", "exactly": {"deviceClassName": "gpu.tessera.dev", "count": 2}},
    ]}}});
    let (code, _, message) =
        refusal(claims.patch("c", &PatchParams::default(), &Patch::Merge(patch)).await);
    assert_eq!(code, 422);
    assert!(
        message.contains("spec: Invalid value") && message.ends_with("field is immutable"),
        "{message}"
    );
}

#[tokio::test]
async fn patch_with_stale_resource_version_conflicts() {
    let (_api, claims) = allocated().await;
    let stale = claims.get("c").await.unwrap().resource_version().unwrap();
    let reserve = |version: &str| json!({"metadata": {"resourceVersion": version}, "status": {"reservedFor": [consumer("1")]}});
    let fresh = patch_status(&claims, reserve(&stale)).await.unwrap();
    let unreserve =
        json!({"metadata": {"resourceVersion": stale}, "status": {"reservedFor": null}});
    assert_eq!(refusal(patch_status(&claims, unreserve).await).1, "Conflict");
    assert_eq!(claims.get("c").await.unwrap().resource_version(), fresh.resource_version());
}

#[tokio::test]
async fn pod_is_bound_once_and_not_while_gated() {
    let (_api, client) = server().await;
    let pods: Api<Pod> = Api::default_namespaced(client.clone());
    let mut gated = pod("a");
    gated.spec.as_mut().unwrap().scheduling_gates =
        Some(vec![crate::typed(json!({"name": "kueue"}))]);
    let made = created(&pods, gated).await;
    let reasons = |pod: Pod| pod.status.unwrap().conditions.unwrap().remove(0).reason;
    assert_eq!(reasons(made).as_deref(), Some("SchedulingGated"));
    let binding = |node: &str| {
        let body = json!({"apiVersion": "v1", "kind": "Binding", "metadata": {"name": "a"}, "target": {"kind": "Node", "name": node}});
        let request = axum::http::Request::post(format!(
            "/api/v1/namespaces/{}/pods/a/binding",
            client.default_namespace()
        ))
        .header("content-type", "application/json")
        .body(body.to_string().into_bytes())
        .unwrap();
        client.request::<Value>(request)
    };
    let (code, _, message) = refusal(binding("node-a").await);
    assert_eq!(code, 409);
    assert!(message.contains("non-empty .spec.schedulingGates"), "{message}");
    let ungate = Patch::Json::<()>(
        serde_json::from_value(json!([{"op": "remove", "path": "/spec/schedulingGates"}])).unwrap(),
    );
    let ungated = pods.patch("a", &PatchParams::default(), &ungate).await.unwrap();
    assert_eq!(ungated.metadata.generation, Some(2));
    binding("node-a").await.unwrap();
    let bound = pods.get("a").await.unwrap();
    assert_eq!(bound.spec.unwrap().node_name.as_deref(), Some("node-a"));
    let scheduled = bound.status.unwrap().conditions.unwrap();
    assert!(
        scheduled
            .iter()
            .any(|condition| condition.type_ == "PodScheduled" && condition.status == "True")
    );
    assert!(refusal(binding("node-b").await).2.contains("already assigned to node \"node-a\""));
}

#[tokio::test]
async fn running_pod_spec_is_mostly_immutable() {
    let (_api, pods) = server_api::<Pod>().await;
    let mut made = created(&pods, pod("a")).await;
    made.spec.as_mut().unwrap().containers[0].image = Some("tessera/probe:2".into());
    let mut made = pods.replace("a", &PostParams::default(), &made).await.unwrap();
    assert_eq!(made.metadata.generation, Some(2));
    made.spec.as_mut().unwrap().node_name = Some("node-a".into());
    let (code, _, message) = refusal(pods.replace("a", &PostParams::default(), &made).await);
    assert_eq!(code, 422);
    assert!(message.contains("pod updates may not change fields other than"), "{message}");
}
