//! Objects for tests.
#![allow(dead_code, reason = "each test binary uses its own part")]

use serde_json::{Value, json};

pub(crate) fn class() -> Value {
    json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass",
        "metadata": {"name": "gpu.tessera.dev", "uid": "class"},
        "spec": {"selectors": [{"cel": {"expression": "device.driver == 'gpu.tessera.dev'"}}]},
    })
}

/// The Lease after its holder has released it.
pub(crate) fn released_lease() -> Value {
    json!({
        "apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
        "metadata": {"name": "tessera-controller", "namespace": "tessera-system"},
        "spec": {
            "holderIdentity": "", "leaseDurationSeconds": 1, "leaseTransitions": 0,
            "renewTime": "2026-11-21T00:00:00.000000Z",
        },
    })
}

pub(crate) fn node(name: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Node",
        "metadata": {"name": name, "uid": format!("uid-{name}")},
        "status": {
            "allocatable": {"cpu": "8", "memory": "32Gi", "pods": "110"},
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    })
}

/// A node's GPUs as the driver publishes them, fenced.
pub(crate) fn slice(node: &str, gpus: usize) -> Value {
    let device = |i: usize| {
        json!({
            "name": format!("gpu-{i}"),
            "allowMultipleAllocations": true,
            "attributes": {"type": {"string": "gpu"}},
            "capacity": {
                "memory": {"value": "80Gi", "requestPolicy": {"default": "80Gi", "validRange": {"min": "1Mi", "step": "1Mi"}}},
                "cores": {"value": "100", "requestPolicy": {"default": "0", "validRange": {"min": "0", "step": "1"}}},
            },
            "taints": [{"key": "gpu.tessera.dev/managed", "effect": "NoSchedule"}],
        })
    };
    json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice",
        "metadata": {"name": format!("slice-{node}"), "uid": format!("slice-{node}")},
        "spec": {
            "driver": "gpu.tessera.dev", "nodeName": node,
            "pool": {"name": node, "generation": 1, "resourceSliceCount": 1},
            "devices": (0..gpus).map(device).collect::<Vec<_>>(),
        },
    })
}

/// A claim for a share of one GPU.
pub(crate) fn claim(name: &str, memory: &str) -> Value {
    json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
        "metadata": {"name": name, "namespace": "default", "uid": format!("uid-{name}")},
        "spec": {"devices": {"requests": [{
            "name": "gpu",
            "exactly": {
                "deviceClassName": "gpu.tessera.dev", "allocationMode": "ExactCount", "count": 1,
                "capacity": {"requests": {"memory": memory, "cores": "25"}},
            },
        }]}},
    })
}

/// Name of the quota of the namespace `default`.
#[allow(dead_code, reason = "each test binary uses its own part")]
pub(crate) const QUOTA: &str = "team";

/// A quota with these limits.
#[allow(dead_code, reason = "each test binary uses its own part")]
pub(crate) fn quota(hard: Value) -> Value {
    json!({
        "metadata": {"name": QUOTA, "namespace": "default", "uid": "uid-quota"},
        "spec": {"hard": hard},
    })
}

/// A resize of the share of the claim of this name.
#[allow(dead_code, reason = "each test binary uses its own part")]
pub(crate) fn resize(claim: &str, size: Value) -> Value {
    let mut request = size;
    request["name"] = "gpu".into();
    json!({
        "metadata": {
            "name": claim, "namespace": "default", "uid": format!("uid-resize-{claim}"),
            "generation": 1,
        },
        "spec": {"requests": [request]},
    })
}

/// An allocation of a share of one device.
pub(crate) fn given(node: &str, device: &str, memory: &str) -> Value {
    json!({
        "allocationTimestamp": "2026-11-21T00:00:00Z",
        "devices": {"results": [{
            "request": "gpu", "driver": "gpu.tessera.dev", "pool": node, "device": device,
            "shareID": "1f0c2d3e-9a41-7c3b-8e55-0d6f2b1a4c77",
            "consumedCapacity": {"memory": memory, "cores": "25"},
        }]},
        "nodeSelector": {"nodeSelectorTerms": [{"matchFields": [
            {"key": "metadata.name", "operator": "In", "values": [node]},
        ]}]},
    })
}

/// The claim with that allocation, as another client wrote it.
pub(crate) fn allocated(mut claim: Value, allocation: Value) -> Value {
    claim["metadata"]["finalizers"] = json!(["resource.kubernetes.io/delete-protection"]);
    claim["status"] = json!({"allocation": allocation});
    claim
}

/// A pod that names claims.
pub(crate) fn pod(name: &str, claims: &[&str]) -> Value {
    let entry = |claim: &&str| json!({"name": claim, "resourceClaimName": claim});
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": name, "namespace": "default", "uid": format!("uid-{name}")},
        "spec": {
            "containers": [{"name": "c", "image": "i"}],
            "resourceClaims": claims.iter().map(entry).collect::<Vec<_>>(),
        },
        "status": {"phase": "Pending"},
    })
}

/// Returns the pod with this priority.
#[allow(dead_code, reason = "not every test has priorities")]
pub(crate) fn important(mut pod: Value, priority: u8) -> Value {
    pod["spec"]["priority"] = priority.into();
    pod
}

/// Returns a pod of [`pod`] as effects refer to it.
#[allow(dead_code, reason = "not every test evicts pods")]
pub(crate) fn reference(name: &str) -> tessera_controller::core::effect::PodReference {
    tessera_controller::core::effect::PodReference {
        namespace: tessera_api::names::Namespace::new("default").unwrap(),
        name: tessera_api::names::PodName::new(name).unwrap(),
        uid: tessera_allocator::model::PodUid::new(&format!("uid-{name}")),
    }
}

/// A claim template as the API server stores it, with its defaults.
pub(crate) fn template(name: &str, uid: &str, mut spec: Value) -> Value {
    // Not omitted by Go, since it is a struct.
    spec["metadata"] = json!({});
    let requests = spec["spec"]["devices"]["requests"].as_array_mut();
    for request in requests.into_iter().flatten() {
        let exactly = &mut request["exactly"];
        if exactly["allocationMode"].is_null() {
            exactly["allocationMode"] = "ExactCount".into();
        }
        if exactly["count"].is_null() {
            exactly["count"] = 1.into();
        }
    }
    json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaimTemplate",
        "metadata": {"name": name, "namespace": "default", "uid": uid},
        "spec": spec,
    })
}

/// The pod after kube-scheduler could not place it.
pub(crate) fn unschedulable(mut pod: Value, message: &str) -> Value {
    pod["status"]["conditions"] = json!([
        {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message},
    ]);
    pod
}

/// The pod after it was bound.
pub(crate) fn bound(mut pod: Value, node: &str) -> Value {
    pod["spec"]["nodeName"] = node.into();
    pod["status"]["phase"] = "Running".into();
    pod
}

/// The pod after it was bound, before the kubelet has started containers.
pub(crate) fn assigned(mut pod: Value, node: &str) -> Value {
    pod["spec"]["nodeName"] = node.into();
    pod
}

/// The claim with these pods in `reservedFor`.
pub(crate) fn reserved(mut claim: Value, pods: &[&str]) -> Value {
    let entry = |pod: &&str| json!({"resource": "pods", "name": pod, "uid": format!("uid-{pod}")});
    claim["status"]["reservedFor"] = pods.iter().map(entry).collect::<Vec<_>>().into();
    claim
}

/// The pod with this nomination by the controller, or without one.
pub(crate) fn nominated_by_controller(mut pod: Value, node: Option<String>) -> Value {
    pod["status"]["nominatedNodeName"] = node.clone().into();
    let fields = json!([{
        "manager": "tessera-controller", "operation": "Update", "apiVersion": "v1",
        "fieldsType": "FieldsV1", "fieldsV1": {"f:status": {"f:nominatedNodeName": {}}},
        "subresource": "status",
    }]);
    pod["metadata"]["managedFields"] = if node.is_some() { fields } else { Value::Null };
    pod
}

/// The pod nominated for `node`, where room is being made for it.
pub(crate) fn nominated(mut pod: Value, node: &str) -> Value {
    pod["status"]["nominatedNodeName"] = node.into();
    pod
}
