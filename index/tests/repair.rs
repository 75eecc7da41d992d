//! Repairs of misplaced claims, and overcommitted devices.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::Arc;

use k8s_openapi::api::core::v1::Node;
use serde_json::{Value, json};
use tessera_allocator::model::PodUid;
use tessera_index::{Index, RepairAction, RepairBlocker};

/// An index with two nodes and claims that are given later versions as they come.
struct Fed {
    index: Index,
    version: u64,
}

fn read<T: serde::de::DeserializeOwned>(object: Value) -> T {
    serde_json::from_value(object).unwrap()
}

impl Fed {
    fn new() -> Self {
        let mut index = Index::default();
        index
            .apply_class(read(json!({
                "metadata": {"name": "gpu"},
                "spec": {"selectors": [{"cel": {"expression": "device.driver == 'gpu.tessera.dev'"}}]},
            })))
            .unwrap();
        for name in ["node-a", "node-b"] {
            index.apply_node(&read::<Node>(json!({"metadata": {"name": name}}))).unwrap();
            let gpu = json!({"name": "gpu-0", "allowMultipleAllocations": true,
                "capacity": {"memory": {"value": "80Gi"}},
                "taints": [{"key": "gpu.tessera.dev/managed", "effect": "NoSchedule"}]});
            let slice = json!({"metadata": {"name": name}, "spec": {
                "driver": "gpu.tessera.dev", "nodeName": name, "devices": [gpu],
                "pool": {"name": name, "generation": 1, "resourceSliceCount": 1}}});
            index.apply_slice(&read(slice)).unwrap();
        }
        Self { index, version: 0 }
    }

    /// The claim, allocated on `node` at that second and reserved for pods; not allocated without a
    /// node.
    fn claim(&mut self, name: &str, node: Option<&str>, reserved_for: &[&str]) {
        self.version += 1;
        let results = |node| {
            json!([{"request": "gpu", "driver": "gpu.tessera.dev", "pool": node, "device": "gpu-0",
                "shareID": "1f0c2d3e-9a41-7c3b-8e55-0d6f2b1a4c77", "consumedCapacity": {"memory": "30Gi"}}])
        };
        let entry = |pod: &&str| json!({"resource": "pods", "name": pod, "uid": pod});
        let allocation = node.map(|node| {
            json!({
                "devices": {"results": results(node)},
                "nodeSelector": {"nodeSelectorTerms": [{"matchFields": [
                    {"key": "metadata.name", "operator": "In", "values": [node]},
                ]}]},
            })
        });
        let object = json!({
            "metadata": {"name": name, "namespace": "default", "uid": name, "resourceVersion": self.version.to_string()},
            "spec": {"devices": {"requests": [{"name": "gpu", "exactly": {"deviceClassName": "gpu"}}]}},
            "status": {"allocation": allocation, "reservedFor": reserved_for.iter().map(entry).collect::<Vec<_>>()},
        });
        self.index.apply_claim(&Arc::new(read(object))).unwrap();
    }

    /// The pod, bound with the claim `c`.
    fn pod(&mut self, name: &str, node: &str, status: Value) {
        self.index.apply_pod(&read(json!({
            "metadata": {"name": name, "namespace": "default", "uid": name},
            "spec": {"nodeName": node, "containers": [], "resourceClaims": [{"name": "c", "resourceClaimName": "c"}]},
            "status": status,
        })));
    }

    fn repair_actions(&self) -> Vec<(String, RepairAction)> {
        let pods = ["a", "b", "p"].map(PodUid::new);
        let misplaced = pods.iter().flat_map(|pod| self.index.misplaced(pod));
        misplaced.map(|one| (one.pod.to_string(), one.repair_action)).collect()
    }

    /// Shares booked on the GPU of `node`.
    fn shares(&self, node: &str) -> u32 {
        let snapshot = self.index.snapshot();
        let used = snapshot.usage.iter().find(|(device, _)| device.pool.pool.as_str() == node);
        used.map_or(0, |(_, used)| used.shares)
    }
}

fn pending() -> Value {
    json!({"phase": "Pending", "containerStatuses": [{"name": "c", "image": "", "imageID": "", "ready": false,
        "restartCount": 0, "state": {"waiting": {"reason": "ContainerCreating"}}}]})
}

fn running() -> Value {
    json!({"phase": "Running"})
}

#[test]
fn misplaced_claim_is_deallocated_and_then_planned() {
    let mut fed = Fed::new();
    fed.claim("c", Some("node-b"), &["p"]);
    fed.pod("p", "node-a", pending());
    assert_eq!(fed.repair_actions(), [("p".to_owned(), RepairAction::Deallocate)]);
    fed.claim("c", None, &[]);
    assert_eq!(fed.repair_actions(), [("p".to_owned(), RepairAction::Plan)]);
    assert_eq!(fed.shares("node-b"), 0, "no pod was there");
    fed.claim("c", Some("node-a"), &[]);
    assert_eq!(fed.repair_actions(), []);
}

#[test]
fn container_that_ran_once_counts_as_started() {
    let mut fed = Fed::new();
    fed.claim("c", None, &[]);
    let mut crashed = pending();
    crashed["containerStatuses"][0]["restartCount"] = 1.into();
    let mut created = pending();
    created["containerStatuses"][0]["containerID"] = "containerd://1".into();
    for status in [crashed, created, running()] {
        fed.pod("p", "node-a", status);
        assert_eq!(
            fed.repair_actions(),
            [("p".to_owned(), RepairAction::Blocked(RepairBlocker::Started))]
        );
    }
}

#[test]
fn lost_allocation_is_restored_and_counts_meanwhile() {
    let mut fed = Fed::new();
    fed.claim("c", Some("node-a"), &["p"]);
    fed.pod("p", "node-a", running());
    assert_eq!(fed.repair_actions(), []);
    // Another client ends it and gives the claim something elsewhere.
    fed.claim("c", None, &[]);
    fed.claim("c", Some("node-b"), &[]);
    assert_eq!((fed.shares("node-a"), fed.shares("node-b")), (1, 1));
    assert_eq!(fed.repair_actions(), [("p".to_owned(), RepairAction::Deallocate)]);
    fed.claim("c", None, &[]);
    let repair_actions = fed.repair_actions();
    let [(_, RepairAction::Restore(allocation))] = repair_actions.as_slice() else {
        panic!("{repair_actions:?}")
    };
    let results = allocation.devices.as_ref().unwrap().results.as_ref().unwrap();
    assert_eq!((results[0].pool.as_str(), results[0].share_id.is_some()), ("node-a", true));
    fed.claim("c", Some("node-a"), &[]);
    assert_eq!(fed.repair_actions(), []);
    assert_eq!((fed.shares("node-a"), fed.shares("node-b")), (1, 0));
}

#[test]
fn running_pod_precedes_another_bound_pod() {
    let mut fed = Fed::new();
    fed.claim("c", None, &[]);
    fed.pod("a", "node-a", pending());
    fed.pod("b", "node-b", running());
    let in_use = RepairAction::Blocked(RepairBlocker::InUse);
    assert_eq!(
        fed.repair_actions(),
        [("a".to_owned(), in_use), ("b".to_owned(), RepairAction::Blocked(RepairBlocker::Started))]
    );
}

#[test]
fn ended_pod_is_not_misplaced() {
    for end in [json!({"phase": "Failed"}), json!({"phase": "Succeeded"})] {
        let mut fed = Fed::new();
        fed.claim("c", Some("node-b"), &["p"]);
        fed.pod("p", "node-a", pending());
        fed.pod("p", "node-a", end);
        assert_eq!(fed.repair_actions(), []);
    }
}

#[test]
fn overcommitted_device_names_youngest_unreserved_claim() {
    let mut fed = Fed::new();
    for name in ["one", "two"] {
        fed.claim(name, Some("node-a"), &[]);
    }
    assert_eq!(fed.index.overcommitted(), []);
    fed.claim("three", Some("node-a"), &["pod-3"]);
    let over = fed.index.overcommitted();
    assert_eq!(over.len(), 1);
    assert_eq!(over[0].releasable, [tessera_api::names::ClaimUid::new("two").unwrap()]);
    fed.claim("two", None, &[]);
    assert_eq!(fed.index.overcommitted(), []);
}
