//! Pods that wait for kube-scheduler, and bound pods with misplaced claims: each whose state has
//! changed is among the affected ones.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim, ResourceSlice};
use proptest::prelude::*;
use serde_json::{Value, json};
use tessera_allocator::model::PodUid;
use tessera_index::{Index, Misplaced, Waiting};

const PODS: u8 = 5;
const CLAIMS: u8 = 4;
const NODES: u8 = 2;

/// A change of an object. Numbers are names.
#[derive(Debug, Clone)]
enum Change {
    Claim { claim: u8, node: Option<u8>, reserved: bool },
    DeleteClaim(u8),
    Pod { pod: u8, claims: Vec<u8>, stage: Stage, message: bool },
    DeletePod(u8),
    Node(u8),
    DeleteNode(u8),
    Slice { node: u8, tainted: bool },
    DeleteSlice(u8),
    Class { ours: bool },
}

/// The stage of a pod.
#[derive(Debug, Clone, Copy)]
enum Stage {
    Gated,
    Waiting,
    Bound,
    Finished,
}

fn change() -> impl Strategy<Value = Change> {
    let stages = [Stage::Gated, Stage::Waiting, Stage::Waiting, Stage::Bound, Stage::Finished];
    let pod = (
        0..PODS,
        prop::collection::vec(0..CLAIMS, 1..3),
        prop::sample::select(stages.to_vec()),
        any::<bool>(),
    );
    let claim = (0..CLAIMS, prop::option::weighted(0.7, 0..NODES), prop::bool::weighted(0.2));
    prop_oneof![
        6 => claim.prop_map(|(claim, node, reserved)| Change::Claim { claim, node, reserved }),
        1 => (0..CLAIMS).prop_map(Change::DeleteClaim),
        6 => pod.prop_map(|(pod, claims, stage, message)| {
            Change::Pod { pod, claims, stage, message }
        }),
        1 => (0..PODS).prop_map(Change::DeletePod),
        1 => (0..NODES).prop_map(Change::Node),
        1 => (0..NODES).prop_map(Change::DeleteNode),
        1 => (0..NODES, any::<bool>()).prop_map(|(node, tainted)| Change::Slice { node, tainted }),
        1 => (0..NODES).prop_map(Change::DeleteSlice),
        1 => any::<bool>().prop_map(|ours| Change::Class { ours }),
    ]
}

fn read<T: serde::de::DeserializeOwned>(object: Value) -> T {
    serde_json::from_value(object).unwrap()
}

fn claim(number: u8, node: Option<u8>, reserved: bool, version: usize) -> Value {
    let mut claim = json!({
        "metadata": {
            "name": format!("c{number}"), "namespace": "team", "uid": format!("claim-{number}"),
            "resourceVersion": version.to_string(),
        },
        "spec": {"devices": {"requests": [{"name": "gpu", "exactly": {"deviceClassName": "a"}}]}},
    });
    if let Some(node) = node {
        let node = format!("node-{node}");
        let field = json!({"key": "metadata.name", "operator": "In", "values": [node]});
        claim["status"] = json!({"allocation": {
            "devices": {"results": [{
                "request": "gpu", "driver": "gpu.tessera.dev", "pool": node, "device": "gpu-0",
                "shareID": "1f0c2d3e-9a41-7c3b-8e55-0d6f2b1a4c77",
                "consumedCapacity": {"memory": "1Gi"},
            }]},
            "nodeSelector": {"nodeSelectorTerms": [{"matchFields": [field]}]},
        }});
        if reserved {
            let consumer = json!({"resource": "pods", "name": "p0", "uid": "pod-0"});
            claim["status"]["reservedFor"] = json!([consumer]);
        }
    }
    claim
}

fn pod(number: u8, claims: &[u8], stage: Stage, message: bool) -> Value {
    let entries = claims.iter().enumerate().map(|(at, claim)| {
        json!({"name": format!("entry-{at}"), "resourceClaimName": format!("c{claim}")})
    });
    let mut pod = json!({
        "metadata": {
            "name": format!("p{number}"), "namespace": "team", "uid": format!("pod-{number}"),
            "creationTimestamp": format!("2026-11-21T00:00:0{number}Z"),
        },
        "spec": {
            "containers": [{"name": "c"}], "resourceClaims": entries.collect::<Vec<_>>(),
        },
    });
    match stage {
        Stage::Gated => pod["spec"]["schedulingGates"] = json!([{"name": "later"}]),
        Stage::Waiting => {}
        Stage::Bound => pod["spec"]["nodeName"] = "node-0".into(),
        Stage::Finished => pod["status"] = json!({"phase": "Succeeded"}),
    }
    if message {
        pod["status"]["conditions"] = json!([{
            "type": "PodScheduled", "status": "False", "reason": "Unschedulable",
            "message": "no port is free",
        }]);
    }
    pod
}

fn node(number: u8) -> Node {
    read(json!({"metadata": {"name": format!("node-{number}")}}))
}

fn slice(node: u8, tainted: bool) -> ResourceSlice {
    let node = format!("node-{node}");
    let taints =
        if tainted { json!([{"key": "broken", "effect": "NoSchedule"}]) } else { json!([]) };
    read(json!({
        "metadata": {"name": node},
        "spec": {
            "driver": "gpu.tessera.dev", "nodeName": node,
            "pool": {"name": node, "generation": 1, "resourceSliceCount": 1},
            "devices": [{
                "name": "gpu-0", "allowMultipleAllocations": true, "taints": taints,
                "capacity": {"memory": {"value": "80Gi"}},
            }],
        },
    }))
}

fn class(ours: bool) -> DeviceClass {
    let driver = if ours { "gpu.tessera.dev" } else { "other.example.com" };
    let expression = format!("device.driver == '{driver}'");
    read(json!({
        "metadata": {"name": "a"}, "spec": {"selectors": [{"cel": {"expression": expression}}]},
    }))
}

/// An index, and what a delete event needs: the objects that exist.
#[derive(Default)]
struct Cluster {
    index: Index,
    claims: BTreeMap<u8, ResourceClaim>,
    pods: BTreeMap<u8, Pod>,
    /// The claims that each pod names, from its first creation on.
    claims_of: BTreeMap<u8, Vec<u8>>,
    version: usize,
}

impl Cluster {
    fn apply(&mut self, change: &Change) {
        self.version += 1;
        match change {
            Change::Claim { claim: number, node, reserved } => {
                // kube-scheduler reserves claims only for pods that name them.
                let is_named = self.claims_of.get(&0).is_some_and(|named| named.contains(number));
                let reserved = *reserved && is_named;
                let object: ResourceClaim = read(claim(*number, *node, reserved, self.version));
                self.index.apply_claim(&Arc::new(object.clone())).unwrap();
                self.claims.insert(*number, object);
            }
            Change::DeleteClaim(number) => {
                if let Some(object) = self.claims.remove(number) {
                    self.index.remove_claim(&object);
                }
            }
            Change::Pod { pod: number, claims, stage, message } => {
                // The API server allows no other ones later.
                let claims = self.claims_of.entry(*number).or_insert_with(|| claims.clone());
                let object: Pod = read(pod(*number, claims, *stage, *message));
                self.index.apply_pod(&object);
                self.pods.insert(*number, object);
            }
            Change::DeletePod(number) => {
                if let Some(object) = self.pods.remove(number) {
                    self.index.remove_pod(&object);
                }
            }
            Change::Node(number) => drop(self.index.apply_node(&node(*number)).unwrap()),
            Change::DeleteNode(number) => self.index.remove_node(&node(*number)),
            Change::Slice { node, tainted } => {
                self.index.apply_slice(&slice(*node, *tainted)).unwrap();
            }
            Change::DeleteSlice(number) => self.index.remove_slice(&slice(*number, false)),
            Change::Class { ours } => self.index.apply_class(class(*ours)).unwrap(),
        }
    }

    /// Returns the states of all pods.
    fn states(&self) -> BTreeMap<PodUid, (Option<Waiting>, Vec<Misplaced>)> {
        let pods = (0..PODS).map(|number| PodUid::new(&format!("pod-{number}")));
        let state = |pod: PodUid| {
            let state = (self.index.waiting(&pod), self.index.misplaced(&pod));
            (pod, state)
        };
        pods.map(state).collect()
    }

    fn take_changed(&mut self) -> BTreeSet<PodUid> {
        let changed = self.index.take_changed_pods();
        self.index.take_affected(&changed)
    }
}

proptest! {
    #[test]
    fn each_pod_whose_state_has_changed_is_reported(
        parts in prop::collection::vec(prop::collection::vec(change(), 1..4), 1..40),
    ) {
        let mut cluster = Cluster::default();
        cluster.apply(&Change::Class { ours: true });
        let mut before = cluster.states();
        for part in &parts {
            part.iter().for_each(|change| cluster.apply(change));
            let changed = cluster.take_changed();
            let now = cluster.states();
            for pod in now.keys().filter(|pod| before[*pod] != now[*pod]) {
                prop_assert!(changed.contains(pod), "{pod} after {part:?}");
            }
            before = now;
        }
    }
}

#[test]
fn a_pod_that_shares_no_claim_is_not_reported() {
    let mut cluster = Cluster::default();
    cluster.apply(&Change::Class { ours: true });
    for number in 0..3 {
        cluster.apply(&Change::Claim { claim: number, node: Some(0), reserved: false });
        let (claims, stage) = (vec![number], Stage::Waiting);
        cluster.apply(&Change::Pod { pod: number, claims, stage, message: false });
    }
    let names = |pods: BTreeSet<PodUid>| pods.iter().map(ToString::to_string).collect::<Vec<_>>();
    assert_eq!(names(cluster.take_changed()), ["pod-0", "pod-1", "pod-2"]);
    assert_eq!(names(cluster.take_changed()), [""; 0]);
    cluster.apply(&Change::Pod { pod: 1, claims: vec![1], stage: Stage::Waiting, message: true });
    assert_eq!(names(cluster.take_changed()), ["pod-1"]);
    cluster.apply(&Change::Node(0));
    assert_eq!(names(cluster.take_changed()), ["pod-0", "pod-1", "pod-2"]);
}
