//! Clusters for tests, and golden files of the output.
#![allow(dead_code, reason = "each test uses a part of this module")]

use std::path::{Path, PathBuf};

use k8s_openapi::jiff::Timestamp;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tessera_cli::snapshot::{self, Snapshot};

/// Time of every snapshot.
pub(crate) const NOW: &str = "2026-01-10T12:00:00Z";

/// A cluster that is built object by object.
pub(crate) struct Stage {
    pub(crate) snapshot: Snapshot,
    made: u32,
}

impl Stage {
    /// Returns a cluster with classes and a running controller, without nodes.
    pub(crate) fn empty() -> Self {
        let snapshot = Snapshot {
            taken_at: NOW.parse::<Timestamp>().unwrap(),
            kubernetes: "v1.37.1".to_owned(),
            ..Snapshot::default()
        };
        let mut stage = Self { snapshot, made: 0 };
        stage.class("gpu.tessera.dev", "device.driver == 'gpu.tessera.dev'");
        stage.class("h100.gpu.tessera.dev", H100);
        stage.class("foreign.example.com", "device.driver == 'example.com'");
        stage.lease("2026-01-10T11:59:58Z");
        stage
    }

    /// Returns a cluster of two nodes with two H100 each, and a third with a failed A30.
    pub(crate) fn new() -> Self {
        let mut stage = Self::empty();
        stage.node("node-a", json!([h100(0, "aa"), h100(1, "ab")]));
        stage.node("node-b", json!([h100(0, "ba"), h100(1, "bb")]));
        let mut a30 = gpu(0, "ca", "NVIDIA A30", "24576Mi");
        a30["taints"].as_array_mut().unwrap().push(
            json!({"key": "gpu.tessera.dev/unhealthy", "value": "xid-79", "effect": "NoSchedule"}),
        );
        stage.node("node-c", json!([a30]));
        stage
    }

    fn stamp(&mut self) -> u32 {
        self.made += 1;
        self.made
    }

    pub(crate) fn class(&mut self, name: &str, selector: &str) {
        let class = json!({"metadata": {"name": name}, "spec": {"selectors": [
            {"cel": {"expression": "device.driver == 'gpu.tessera.dev'"}}, {"cel": {"expression": selector}},
        ]}});
        let class = if selector.starts_with("device.driver") {
            json!({"metadata": {"name": name}, "spec": {"selectors": [{"cel": {"expression": selector}}]}})
        } else {
            class
        };
        self.snapshot.device_classes.push(snapshot::trimmed_class(read(class)));
    }

    pub(crate) fn lease(&mut self, renewed: &str) {
        self.snapshot.leases = vec![read(json!({
            "metadata": {"name": "tessera-controller", "namespace": "tessera-system"},
            "spec": {"holderIdentity": "tessera-controller-0", "leaseDurationSeconds": 15,
                     "renewTime": renewed.replace('Z', ".000000Z")},
        }))];
    }

    pub(crate) fn node(&mut self, name: &str, devices: Value) {
        self.snapshot.nodes.push(snapshot::trimmed_node(read(node(name))));
        self.snapshot.resource_slices.push(snapshot::trimmed_slice(read(slice(name, devices))));
    }

    /// Changes a node.
    pub(crate) fn node_is(
        &mut self,
        name: &str,
        change: impl FnOnce(&mut k8s_openapi::api::core::v1::Node),
    ) {
        let node =
            self.snapshot.nodes.iter_mut().find(|node| node.metadata.name.as_deref() == Some(name));
        change(node.unwrap());
    }

    /// Adds a claim with one request.
    pub(crate) fn claim(&mut self, name: &str, request: Value) {
        self.claim_of(name, json!([request]), None);
    }

    /// Adds a claim with those requests, owned by the pod if one is named.
    pub(crate) fn claim_of(&mut self, name: &str, requests: Value, pod: Option<&str>) {
        let made = self.stamp();
        let mut claim = json!({
            "metadata": {"namespace": "team-a", "name": name, "uid": format!("claim-{name}"), "resourceVersion": made.to_string()},
            "spec": {"devices": {"requests": requests}},
        });
        if let Some(pod) = pod {
            claim["metadata"]["ownerReferences"] = json!([
                {"apiVersion": "v1", "kind": "Pod", "name": pod, "uid": format!("pod-{pod}"), "controller": true},
            ]);
        }
        self.snapshot.resource_claims.push(snapshot::trimmed_claim(read(claim)));
    }

    /// Marks the claim as generated for that entry of its pod.
    pub(crate) fn made_for(&mut self, claim: &str, entry: &str) {
        let claims = &mut self.snapshot.resource_claims;
        let at =
            claims.iter().position(|known| known.metadata.name.as_deref() == Some(claim)).unwrap();
        let mut made = claims.remove(at);
        let annotation = ("resource.kubernetes.io/pod-claim-name".to_owned(), entry.to_owned());
        let other = ("example.com/secret".to_owned(), "hunter2".to_owned());
        made.metadata.annotations = Some([annotation, other].into());
        claims.push(snapshot::trimmed_claim(made));
    }

    /// Allocates a share of a device to the claim.
    pub(crate) fn allocated(
        &mut self,
        claim: &str,
        node: &str,
        device: &str,
        memory: &str,
        cores: &str,
    ) {
        let claims = &mut self.snapshot.resource_claims;
        let claim =
            claims.iter_mut().find(|known| known.metadata.name.as_deref() == Some(claim)).unwrap();
        let mut object = serde_json::to_value(&*claim).unwrap();
        object["status"] = json!({"allocation": {
            "allocationTimestamp": "2026-01-10T11:00:00Z",
            "devices": {"results": [{
                "request": "gpu", "driver": "gpu.tessera.dev", "pool": node, "device": device,
                "shareID": "1f0c2d3e-9a41-7c3b-8e55-0d6f2b1a4c77",
                "consumedCapacity": {"memory": memory, "cores": cores},
            }]},
            "nodeSelector": {"nodeSelectorTerms": [{"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]}]},
        }});
        *claim = read(object);
    }

    /// Sets the mode of sharing of the claim's allocation.
    pub(crate) fn shared_by(&mut self, claim: &str, sharing: &str) {
        let claims = &mut self.snapshot.resource_claims;
        let claim =
            claims.iter_mut().find(|known| known.metadata.name.as_deref() == Some(claim)).unwrap();
        let mut object = serde_json::to_value(&*claim).unwrap();
        object["status"]["allocation"]["devices"]["config"] = json!([{"source": "FromClaim", "opaque": {
            "driver": "gpu.tessera.dev",
            "parameters": {"apiVersion": "gpu.tessera.dev/v1alpha1", "kind": "GpuConfig", "sharing": sharing},
        }}]);
        *claim = read(object);
    }

    /// Adds a pending pod with the claims of those names.
    pub(crate) fn pod(
        &mut self,
        name: &str,
        claims: &[&str],
    ) -> &mut k8s_openapi::api::core::v1::Pod {
        let made = self.stamp();
        let entries: Vec<Value> =
            claims.iter().map(|claim| json!({"name": claim, "resourceClaimName": claim})).collect();
        let pod = json!({
            "metadata": {"namespace": "team-a", "name": name, "uid": format!("pod-{name}"),
                         "creationTimestamp": format!("2026-01-10T11:{made:02}:00Z")},
            "spec": {"containers": [{"name": "main", "image": "example/secret",
                                     "env": [{"name": "TOKEN", "value": "hunter2"}]}],
                     "resourceClaims": entries},
            "status": {"phase": "Pending"},
        });
        self.snapshot.pods.extend(snapshot::trimmed_pod(read(pod)));
        self.snapshot.pods.last_mut().unwrap()
    }

    /// Adds a pod that runs on a node.
    pub(crate) fn running(&mut self, name: &str, claims: &[&str], node: &str) {
        let pod = self.pod(name, claims);
        pod.spec.as_mut().unwrap().node_name = Some(node.to_owned());
        pod.status.as_mut().unwrap().phase = Some("Running".to_owned());
    }

    /// Adds a running pod with an exclusive device.
    pub(crate) fn exclusive(&mut self, name: &str, node: &str, device: &str) {
        self.tenant(name, node, device, "0", "0");
        let claim = self.snapshot.resource_claims.last_mut().unwrap();
        let mut object = serde_json::to_value(&*claim).unwrap();
        let result = object["status"]["allocation"]["devices"]["results"][0].as_object_mut();
        let result = result.unwrap();
        result.remove("shareID");
        result.remove("consumedCapacity");
        *claim = read(object);
    }

    /// Adds a running pod with a share of a device.
    pub(crate) fn tenant(
        &mut self,
        name: &str,
        node: &str,
        device: &str,
        memory: &str,
        cores: &str,
    ) {
        let claim = format!("{name}-gpu");
        self.claim(&claim, share(memory, cores));
        self.allocated(&claim, node, device, memory, cores);
        self.running(name, &[&claim], node);
    }
}

/// Returns a request for a share of any GPU.
pub(crate) fn share(memory: &str, cores: &str) -> Value {
    json!({"name": "gpu", "exactly": {
        "deviceClassName": "gpu.tessera.dev", "capacity": {"requests": {"memory": memory, "cores": cores}},
    }})
}

const H100: &str = "device.attributes['gpu.tessera.dev'].productName.matches('(^|[^A-Za-z0-9])H100([^A-Za-z0-9]|$)')";

/// Returns the name of a device.
pub(crate) fn device(mark: &str) -> String {
    format!("gpu-1f0c2d{mark}-9a41-7c3b-8e55-0d6f2b1a4c77")
}

/// Returns the UUID of that device.
pub(crate) fn uuid(mark: &str) -> String {
    format!("GPU-1f0c2d{mark}-9a41-7c3b-8e55-0d6f2b1a4c77")
}

/// Returns H100s with the indices from 0.
pub(crate) fn h100s(number: i64) -> Value {
    (0..number).map(|index| h100(index, &format!("{index:02}"))).collect()
}

fn h100(index: i64, mark: &str) -> Value {
    gpu(index, mark, "NVIDIA H100 80GB HBM3", "81920Mi")
}

/// Returns an H100 that publishes twice its memory.
pub(crate) fn oversubscribed(mark: &str) -> Value {
    let mut gpu = gpu(0, mark, "NVIDIA H100 80GB HBM3", "163840Mi");
    gpu["attributes"]["physicalMemory"] = json!({"string": "81920Mi"});
    gpu
}

fn gpu(index: i64, mark: &str, product: &str, memory: &str) -> Value {
    json!({
        "name": device(mark), "allowMultipleAllocations": true,
        "attributes": {
            "index": {"int": index}, "productName": {"string": product}, "type": {"string": "gpu"},
            "uuid": {"string": uuid(mark)},
        },
        "capacity": {
            "memory": {"value": memory, "requestPolicy": {"default": memory, "validRange": {"min": "1Mi", "step": "1Mi"}}},
            "cores": {"value": "100", "requestPolicy": {"default": "0", "validRange": {"min": "0", "step": "1"}}},
        },
        "taints": [{"key": "gpu.tessera.dev/managed", "effect": "NoSchedule"}],
    })
}

/// Returns a ready node.
pub(crate) fn node(name: &str) -> Value {
    json!({
        "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name}, "annotations": {"secret": "hunter2"}},
        "status": {"allocatable": {"cpu": "32", "memory": "256Gi", "pods": "110"},
                   "addresses": [{"type": "InternalIP", "address": "10.1.2.3"}],
                   "conditions": [{"type": "Ready", "status": "True"}]},
    })
}

/// Returns the ResourceSlice of a node.
pub(crate) fn slice(node: &str, devices: Value) -> Value {
    json!({
        "metadata": {"name": format!("{node}-slice"), "annotations": {"secret": "hunter2"}},
        "spec": {"driver": "gpu.tessera.dev", "nodeName": node, "devices": devices,
                 "pool": {"name": node, "generation": 1, "resourceSliceCount": 1}},
    })
}

pub(crate) fn read<T: DeserializeOwned>(object: Value) -> T {
    serde_json::from_value(object).unwrap()
}

/// Compares a text with a file of `tests/golden`. `UPDATE=1` in the environment writes the file.
#[track_caller]
pub(crate) fn golden(name: &str, text: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name);
    if std::env::var_os("UPDATE").is_some() {
        std::fs::write(&path, text).unwrap();
    }
    let expected = std::fs::read_to_string(&path).unwrap_or_default();
    assert_eq!(text, expected, "differs from {}; to update it set UPDATE=1", path.display());
}

/// Returns the path of the program under test.
pub(crate) fn program() -> PathBuf {
    PathBuf::from(env!("CARGO_BIN_EXE_kubectl-tessera"))
}
