//! The scheduler's own device allocator, without tessera-controller and admission policies.

use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::resource::v1::{DeviceTaintRule, ResourceClaim, ResourceSlice};
use kube::{Api, Client};
use serde_json::{Value, json};

use crate::{
    allocated, cluster, consumers, create, node, node_of, patch, present, unschedulable, until,
};

const MANAGED_TAINT: &str = "gpu.tessera.dev/managed";

/// Creates a node with two GPUs of 80 GiB that are shared by memory.
async fn node_with_gpus(client: &Client, taints: Value) {
    node(client, "node-a", "32").await;
    // The allocator must not check node taints.
    let taint = json!({"spec": {"taints": [{"key": "a", "effect": "NoSchedule"}]}});
    patch::<Node>(&Api::all(client.clone()), "node-a", taint).await;
    let device = |name: &str| {
        json!({"name": name, "allowMultipleAllocations": true, "taints": taints, "capacity": {"memory": {
            "value": "80Gi", "requestPolicy": {"default": "80Gi", "validRange": {"min": "1Mi", "step": "1Mi"}}}}})
    };
    let slice = json!({"metadata": {"name": "node-a-1"}, "spec": {
        "driver": "gpu.tessera.dev", "nodeName": "node-a",
        "pool": {"name": "node-a", "generation": 1, "resourceSliceCount": 1},
        "devices": [device("gpu-0"), device("gpu-1")],
    }});
    create::<ResourceSlice>(&Api::all(client.clone()), slice).await;
}

/// Creates a pod that requests this much memory of a GPU.
async fn pod_with_claim(client: &Client, name: &str, memory: &str, tolerations: Value) {
    let exactly = json!({"deviceClassName": "gpu.tessera.dev", "tolerations": tolerations,
        "capacity": {"requests": {"memory": memory}}});
    let claim = json!({"metadata": {"name": name}, "spec": {"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}}});
    create::<ResourceClaim>(&Api::default_namespaced(client.clone()), claim).await;
    let mut pod = crate::pod(name, json!({"resourceClaimName": name}));
    pod["spec"]["tolerations"] = json!([{"operator": "Exists"}]);
    create::<Pod>(&Api::default_namespaced(client.clone()), pod).await;
}

/// Returns the device of a bound pod's claim.
async fn device_of(client: &Client, name: &str) -> String {
    let pods: Api<Pod> = Api::default_namespaced(client.clone());
    until(&pods, name, present(|pod: &Pod| node_of(pod) == Some("node-a"))).await;
    let claims: Api<ResourceClaim> = Api::default_namespaced(client.clone());
    let claim = claims.get(name).await.unwrap();
    assert_eq!(consumers(&claim), [name]);
    assert_eq!(
        claim.metadata.finalizers.as_ref().unwrap(),
        &["resource.kubernetes.io/delete-protection"]
    );
    let status = serde_json::to_value(&claim.status).unwrap();
    status["allocation"]["devices"]["results"][0]["device"].as_str().unwrap().to_owned()
}

async fn stays_pending(client: &Client, name: &str) {
    let pods: Api<Pod> = Api::default_namespaced(client.clone());
    let is_rejected = |pod: &Pod| {
        unschedulable(pod).is_some_and(|message| message.contains("1 cannot allocate all claims"))
    };
    until(&pods, name, present(is_rejected)).await;
    let claims: Api<ResourceClaim> = Api::default_namespaced(client.clone());
    assert!(!allocated(&claims.get(name).await.unwrap()));
}

#[tokio::test]
async fn untainted_devices_are_allocated_first_fit() {
    let (_cluster, client) = cluster().await;
    node_with_gpus(&client, json!([])).await;
    pod_with_claim(&client, "one", "50Gi", Value::Null).await;
    assert_eq!(device_of(&client, "one").await, "gpu-0");
    pod_with_claim(&client, "two", "40Gi", Value::Null).await;
    assert_eq!(device_of(&client, "two").await, "gpu-1");
    pod_with_claim(&client, "three", "30Gi", Value::Null).await;
    assert_eq!(device_of(&client, "three").await, "gpu-0");
    pod_with_claim(&client, "four", "41Gi", Value::Null).await;
    stays_pending(&client, "four").await;
}

#[tokio::test]
async fn tainted_device_needs_a_tolerating_claim() {
    let (_cluster, client) = cluster().await;
    node_with_gpus(&client, json!([{"key": MANAGED_TAINT, "effect": "NoSchedule"}])).await;
    pod_with_claim(&client, "fenced", "1Gi", Value::Null).await;
    stays_pending(&client, "fenced").await;
    pod_with_claim(&client, "tolerant", "1Gi", json!([{"operator": "Exists"}])).await;
    assert_eq!(device_of(&client, "tolerant").await, "gpu-0");
}

#[tokio::test]
async fn device_tainted_by_a_rule_needs_a_tolerating_claim() {
    let (_cluster, client) = cluster().await;
    let rules: Api<DeviceTaintRule> = Api::all(client.clone());
    let taint = json!({"key": MANAGED_TAINT, "effect": "NoSchedule"});
    let rule = |name: &str, selector: Value| json!({"metadata": {"name": name}, "spec": {"deviceSelector": selector, "taint": taint}});
    let first = json!({"driver": "gpu.tessera.dev", "pool": "node-a", "device": "gpu-0"});
    create(&rules, rule("first", first)).await;
    create(&rules, rule("selects-nothing", Value::Null)).await;
    create(&rules, rule("other-driver", json!({"driver": "gpu.example.com"}))).await;
    node_with_gpus(&client, json!([])).await;
    pod_with_claim(&client, "second", "80Gi", Value::Null).await;
    assert_eq!(device_of(&client, "second").await, "gpu-1");
    pod_with_claim(&client, "fenced", "1Gi", Value::Null).await;
    stays_pending(&client, "fenced").await;
    pod_with_claim(&client, "tolerant", "1Gi", json!([{"operator": "Exists"}])).await;
    assert_eq!(device_of(&client, "tolerant").await, "gpu-0");
    rules.delete("first", &Default::default()).await.unwrap();
    assert_eq!(device_of(&client, "fenced").await, "gpu-0");
}
