//! The index, by applying objects.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::Arc;

use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim, ResourceSlice};
use serde_json::{Value, json};
use tessera_allocator::model::{DeviceId, PendingPod, PodClaim, PodUid, PoolId};
use tessera_allocator::{
    AllocationPlan, PlanSettings, Planner, Refusal, RefusalCause, UnsupportedFeature, plan,
};
use tessera_api::config::Sharing;
use tessera_api::names::{ClaimUid, DeviceName, DriverName, NodeName, PoolName};
use tessera_api::quantity::Quantity;
use tessera_index::{Index, PlanningBlocker, Scope};

/// An index that is fed with JSON.
struct Fed {
    index: Index,
    version: u64,
    planner: Planner,
}

impl Fed {
    fn new() -> Self {
        Self { index: Index::default(), version: 0, planner: Planner::default() }
    }

    /// One node with one GPU of 80Gi and the class for it.
    fn with_gpu() -> Self {
        let mut fed = Self::new();
        fed.node("node-a", "8");
        fed.slice("node-a", 1, 1, json!([gpu("gpu-0")]));
        fed.class("gpu.tessera.dev", "device.driver == 'gpu.tessera.dev'");
        fed
    }

    /// One node with one GPU that has these attributes.
    fn with_attributes(attributes: Value) -> Self {
        let mut fed = Self::with_gpu();
        let mut published = gpu("gpu-0");
        published["attributes"] = attributes;
        fed.slice("node-a", 2, 1, json!([published]));
        fed
    }

    fn node(&mut self, name: &str, cpu: &str) {
        let node = json!({
            "metadata": {"name": name},
            "status": {"allocatable": {"cpu": cpu, "pods": "110"}, "conditions": [{"type": "Ready", "status": "True"}]},
        });
        self.index.apply_node(&read::<Node>(node)).unwrap();
    }

    fn slice(&mut self, node: &str, generation: i64, count: i64, devices: Value) {
        self.index
            .apply_slice(&slice(&format!("{node}-{generation}"), node, generation, count, devices))
            .unwrap();
    }

    fn class(&mut self, name: &str, expression: &str) {
        let class = json!({"metadata": {"name": name}, "spec": {"selectors": [{"cel": {"expression": expression}}]}});
        self.index.apply_class(read::<DeviceClass>(class)).unwrap();
    }

    fn claim(&mut self, claim: Value) -> Arc<ResourceClaim> {
        let claim = self.object(claim);
        self.index.apply_claim(&claim).unwrap();
        claim
    }

    fn object(&mut self, mut claim: Value) -> Arc<ResourceClaim> {
        self.version += 1;
        claim["metadata"]["resourceVersion"] = self.version.to_string().into();
        Arc::new(read(claim))
    }

    fn pod(&mut self, pod: Value) {
        self.index.apply_pod(&read(pod));
    }

    /// Audits the running sums. Returns true if they were wrong.
    fn audit(&mut self) -> bool {
        let mut drifted = false;
        loop {
            let part = self.index.audit_part(usize::MAX);
            drifted |= part.drifted;
            if part.is_complete {
                return drifted;
            }
        }
    }

    /// Memory taken of the GPU, in GiB.
    fn taken(&mut self) -> i64 {
        assert!(!self.audit(), "the running sums are right at every moment");
        let pool = PoolId { driver: DriverName::ours(), pool: PoolName::new("node-a").unwrap() };
        let device = DeviceId { pool, device: DeviceName::new("gpu-0").unwrap() };
        let snapshot = self.index.snapshot();
        let used = snapshot.usage.get(&device).and_then(|u| u.consumed.get("memory").copied());
        used.unwrap_or_default().value_i64().unwrap() >> 30
    }

    /// Plans with a planner that gets all changes of the index.
    fn plan(&mut self, pods: &[PendingPod]) -> AllocationPlan {
        self.index.take_changes().apply_to(&mut self.planner);
        self.planner.plan(pods, PlanSettings::default())
    }

    fn pending(&self) -> Vec<String> {
        self.index.work().pending.iter().map(|p| p.name.to_string()).collect()
    }

    fn cpu_used(&self) -> Quantity {
        let snapshot = self.index.snapshot();
        let node = &snapshot.nodes[&NodeName::new("node-a").unwrap()];
        node.used.get("cpu").copied().unwrap_or_default()
    }

    /// The part of it that pods with devices request.
    fn cpu_held(&self) -> Quantity {
        let snapshot = self.index.snapshot();
        let node = &snapshot.nodes[&NodeName::new("node-a").unwrap()];
        node.releasable.get("cpu").copied().unwrap_or_default()
    }
}

fn read<T: serde::de::DeserializeOwned>(object: Value) -> T {
    serde_json::from_value(object).unwrap()
}

fn gpu(name: &str) -> Value {
    json!({
        "name": name, "allowMultipleAllocations": true,
        "capacity": {"memory": {"value": "80Gi", "requestPolicy": {"default": "80Gi", "validRange": {"min": "1Mi", "step": "1Mi"}}}},
        "taints": [{"key": "gpu.tessera.dev/managed", "effect": "NoSchedule"}],
    })
}

fn slice(name: &str, node: &str, generation: i64, count: i64, devices: Value) -> ResourceSlice {
    read(json!({
        "metadata": {"name": name},
        "spec": {
            "driver": "gpu.tessera.dev", "nodeName": node, "devices": devices,
            "pool": {"name": node, "generation": generation, "resourceSliceCount": count},
        },
    }))
}

fn claim(name: &str, class: &str) -> Value {
    json!({
        "metadata": {"name": name, "namespace": "default", "uid": format!("uid-{name}")},
        "spec": {"devices": {"requests": [{"name": "gpu", "exactly": {"deviceClassName": class}}]}},
    })
}

/// The claim with a share of the GPU allocated to it.
fn allocated(mut claim: Value, gib: u32) -> Value {
    claim["status"] = json!({"allocation": {
        "devices": {"results": [{
            "request": "gpu", "driver": "gpu.tessera.dev", "pool": "node-a", "device": "gpu-0",
            "shareID": "1f0c2d3e-9a41-7c3b-8e55-0d6f2b1a4c77", "consumedCapacity": {"memory": format!("{gib}Gi")},
        }]},
        "nodeSelector": {"nodeSelectorTerms": [{"matchFields": [
            {"key": "metadata.name", "operator": "In", "values": ["node-a"]},
        ]}]},
    }});
    claim
}

fn reserved(mut claim: Value, pod: &str) -> Value {
    claim["status"]["reservedFor"] =
        json!([{"resource": "pods", "name": pod, "uid": format!("uid-{pod}")}]);
    claim
}

fn pod(name: &str, claims: &[&str]) -> Value {
    let entry = |claim: &&str| json!({"name": claim, "resourceClaimName": claim});
    json!({
        "metadata": {"name": name, "namespace": "default", "uid": format!("uid-{name}")},
        "spec": {
            "containers": [{"name": "c", "resources": {"requests": {"cpu": "2"}}}],
            "resourceClaims": claims.iter().map(entry).collect::<Vec<_>>(),
        },
    })
}

fn on_node(mut pod: Value, phase: &str) -> Value {
    pod["spec"]["nodeName"] = "node-a".into();
    pod["status"] = json!({"phase": phase});
    pod
}

#[test]
fn pod_is_planned_with_all_claims_and_without_gates() {
    let mut fed = Fed::with_gpu();
    let mut gated = pod("p", &["c"]);
    gated["spec"]["schedulingGates"] = json!([{"name": "controller.example.com/gate"}]);
    fed.pod(gated);
    fed.claim(claim("c", "gpu.tessera.dev"));
    assert_eq!(fed.pending(), [""; 0]);
    fed.pod(pod("p", &["c"]));
    assert_eq!(fed.pending(), ["p"]);
    fed.claim(allocated(claim("c", "gpu.tessera.dev"), 19));
    assert_eq!(fed.pending(), [""; 0]);
}

#[test]
fn generated_claim_counts_only_for_its_owner() {
    let mut fed = Fed::with_gpu();
    let mut waiting = pod("p", &[]);
    waiting["spec"]["resourceClaims"] = json!([{"name": "gpu", "resourceClaimTemplateName": "t"}]);
    fed.pod(waiting.clone());
    assert_eq!(fed.pending(), [""; 0], "the claim is not generated yet");
    waiting["status"] =
        json!({"resourceClaimStatuses": [{"name": "gpu", "resourceClaimName": "p-gpu-x"}]});
    fed.pod(waiting);
    let mut generated = claim("p-gpu-x", "gpu.tessera.dev");
    fed.claim(generated.clone());
    assert_eq!(fed.pending(), [""; 0], "another owner's claim of that name");
    generated["metadata"]["ownerReferences"] = json!([{"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": "uid-p", "controller": true}]);
    fed.claim(generated);
    assert_eq!(fed.pending(), ["p"]);
}

/// A pod with a claim from a template, before its status names it.
fn pod_from_template(name: &str) -> Value {
    let mut pod = pod(name, &[]);
    pod["spec"]["resourceClaims"] = json!([{"name": "gpu", "resourceClaimTemplateName": "t"}]);
    pod
}

fn naming(mut pod: Value, claim: &str) -> Value {
    pod["status"]["resourceClaimStatuses"] = json!([{"name": "gpu", "resourceClaimName": claim}]);
    pod
}

/// The claim as kube-controller-manager makes it for the pod's entry `gpu`.
fn made_for(mut claim: Value, pod: &str) -> Value {
    claim["metadata"]["annotations"] = json!({"resource.kubernetes.io/pod-claim-name": "gpu"});
    claim["metadata"]["ownerReferences"] = json!([
        {"apiVersion": "v1", "kind": "Pod", "name": pod, "uid": format!("uid-{pod}"), "controller": true},
    ]);
    claim
}

#[test]
fn generated_claim_is_planned_before_pod_status_names_it() {
    let made = made_for(claim("p-gpu-x", "gpu.tessera.dev"), "p");
    let mut fed = Fed::with_gpu();
    fed.pod(pod_from_template("p"));
    fed.claim(made.clone());
    assert_eq!(fed.pending(), ["p"], "the pod came first");

    let mut fed = Fed::with_gpu();
    fed.claim(made.clone());
    fed.pod(pod_from_template("p"));
    assert_eq!(fed.pending(), ["p"], "the claim came first");
    fed.claim(allocated(made, 19));
    assert_eq!(fed.pending(), [""; 0]);
    assert_eq!(fed.cpu_used(), Quantity::from_integer(2), "the pod is expected where its claim is");
    assert_eq!(fed.index.unneeded(), Vec::<ClaimUid>::new(), "a pod waits for it");
    fed.pod(naming(pod_from_template("p"), "p-gpu-x"));
    assert_eq!(fed.cpu_used(), Quantity::from_integer(2));
    assert!(fed.index.waiting(&PodUid::new("uid-p")).is_some());
}

#[test]
fn generated_claim_matches_pod_entry_and_namespace() {
    let made = || made_for(claim("p-gpu-x", "gpu.tessera.dev"), "p");
    let mut other_pod = made();
    other_pod["metadata"]["ownerReferences"][0]["uid"] = "uid-of-the-pod-before".into();
    let mut not_controlled = made();
    not_controlled["metadata"]["ownerReferences"][0]["controller"] = false.into();
    let mut other_entry = made();
    other_entry["metadata"]["annotations"]["resource.kubernetes.io/pod-claim-name"] = "nic".into();
    let mut other_namespace = made();
    other_namespace["metadata"]["namespace"] = "elsewhere".into();
    for not_the_pods in [other_pod, not_controlled, other_entry, other_namespace] {
        let mut fed = Fed::with_gpu();
        fed.pod(pod_from_template("p"));
        fed.claim(not_the_pods);
        assert_eq!(fed.pending(), [""; 0]);
        fed.claim(made_for(claim("p-gpu-y", "gpu.tessera.dev"), "p"));
        assert_eq!(fed.pending(), ["p"], "nor do they block the pod's own");
    }
}

#[test]
fn pod_is_unlisted_while_its_status_lacks_a_claim() {
    let unlisted =
        |fed: &Fed| fed.index.unlisted().iter().map(ToString::to_string).collect::<Vec<_>>();
    let mut fed = Fed::with_gpu();
    fed.pod(pod_from_template("p"));
    assert_eq!(unlisted(&fed), [""; 0], "there is none that could be named");
    fed.claim(made_for(claim("p-gpu-x", "gpu.tessera.dev"), "p"));
    assert_eq!(unlisted(&fed), ["uid-p"]);
    fed.pod(naming(pod_from_template("p"), "p-gpu-x"));
    assert_eq!(unlisted(&fed), [""; 0]);
    fed.pod(pod_from_template("p"));
    assert_eq!(unlisted(&fed), ["uid-p"], "the name was dropped");

    let mut fed = Fed::with_gpu();
    fed.pod(pod_from_template("p"));
    fed.class("nic", "device.driver == 'nic.example.com'");
    fed.claim(made_for(claim("p-gpu-x", "nic"), "p"));
    assert_eq!(unlisted(&fed), [""; 0], "other drivers' devices are others' to tell of");
}

#[test]
fn pod_status_chooses_between_two_generated_claims() {
    let mut fed = Fed::with_gpu();
    fed.pod(pod_from_template("p"));
    let one = made_for(claim("p-gpu-x", "gpu.tessera.dev"), "p");
    fed.claim(one.clone());
    fed.claim(made_for(claim("p-gpu-y", "gpu.tessera.dev"), "p"));
    assert_eq!(fed.pending(), [""; 0]);
    fed.claim(allocated(one, 19));
    fed.pod(naming(pod_from_template("p"), "p-gpu-y"));
    assert_eq!(fed.pending(), ["p"]);
    assert_eq!(
        fed.index.unneeded(),
        [ClaimUid::new("uid-p-gpu-x").unwrap()],
        "what was allocated early goes back"
    );
}

#[test]
fn deleted_generated_claim_does_not_count() {
    let mut fed = Fed::with_gpu();
    fed.pod(pod_from_template("p"));
    let made = fed.claim(allocated(made_for(claim("p-gpu-x", "gpu.tessera.dev"), "p"), 19));
    assert_eq!(fed.cpu_used(), Quantity::from_integer(2));
    fed.index.remove_claim(&made);
    assert_eq!(fed.cpu_used(), Quantity::ZERO);
    fed.claim(made_for(claim("p-gpu-y", "gpu.tessera.dev"), "p"));
    assert_eq!(fed.pending(), ["p"], "the next one made for it counts alone");
}

#[test]
fn bound_pod_uses_only_claims_of_its_status() {
    let mut fed = Fed::with_gpu();
    fed.claim(allocated(made_for(claim("p-gpu-x", "gpu.tessera.dev"), "p"), 19));
    fed.pod(pod_from_template("p"));
    fed.pod(on_node(pod_from_template("p"), "Pending"));
    assert_eq!(fed.index.unneeded(), [ClaimUid::new("uid-p-gpu-x").unwrap()]);
    fed.pod(naming(on_node(pod_from_template("p"), "Pending"), "p-gpu-x"));
    assert_eq!(fed.index.unneeded(), Vec::<ClaimUid>::new());
}

#[test]
fn claim_being_deleted_is_not_planned() {
    let mut fed = Fed::with_gpu();
    let mut going = claim("c", "gpu.tessera.dev");
    going["metadata"]["deletionTimestamp"] = "2026-11-21T00:00:00Z".into();
    fed.claim(going);
    fed.pod(pod("p", &["c"]));
    assert_eq!(fed.pending(), [""; 0]);
}

#[test]
fn assumed_decision_counts_until_seen_or_forgotten() {
    let mut fed = Fed::with_gpu();
    fed.claim(claim("c", "gpu.tessera.dev"));
    fed.pod(pod("p", &["c"]));
    let decided = plan(&fed.index.snapshot(), &fed.index.work().pending, PlanSettings::default());
    let claim_allocation = &decided.decisions[0].claims[0];
    fed.index.assume(claim_allocation);
    assert_eq!((fed.taken(), fed.pending().len()), (80, 0));
    fed.index.forget(&claim_allocation.claim);
    assert_eq!((fed.taken(), fed.pending().len()), (0, 1));
    fed.index.assume(claim_allocation);
    fed.claim(allocated(claim("c", "gpu.tessera.dev"), 80));
    assert_eq!(fed.taken(), 80, "assumed and seen allocation count once");
    fed.index.forget(&claim_allocation.claim);
    assert_eq!(fed.taken(), 80);
}

#[test]
fn older_version_of_a_claim_is_ignored() {
    let mut fed = Fed::with_gpu();
    let old = fed.object(claim("c", "gpu.tessera.dev"));
    fed.claim(allocated(claim("c", "gpu.tessera.dev"), 19));
    fed.index.apply_claim(&old).unwrap();
    assert_eq!(fed.taken(), 19);
}

#[test]
fn answer_to_a_write_does_not_revive_a_deleted_claim() {
    let mut fed = Fed::with_gpu();
    let claim_object = fed.claim(claim("c", "gpu.tessera.dev"));
    let answer = fed.object(allocated(claim("c", "gpu.tessera.dev"), 19));
    fed.index.remove_claim(&claim_object);
    fed.index.apply_written_claim(&answer).unwrap();
    assert_eq!(fed.taken(), 0);
}

#[test]
fn capacity_stays_taken_while_a_bound_pod_uses_the_claim() {
    let mut fed = Fed::with_gpu();
    let object = fed.claim(reserved(allocated(claim("c", "gpu.tessera.dev"), 19), "p"));
    fed.pod(on_node(pod("p", &["c"]), "Running"));
    fed.pod(on_node(pod("q", &["c"]), "Running"));
    assert_eq!(fed.taken(), 19);
    fed.index.remove_claim(&object);
    assert_eq!(fed.taken(), 19, "its containers run");
    fed.pod(on_node(pod("p", &["c"]), "Succeeded"));
    assert_eq!(fed.taken(), 19, "the second one still does");
    fed.index.remove_pod(&read(pod("q", &["c"])));
    assert_eq!(fed.taken(), 0);
}

#[test]
fn two_shares_of_one_device_for_one_request_count_twice() {
    // kube-scheduler allocates so in stock mode, where the request counts two and no constraint
    // keeps them apart.
    let mut fed = Fed::with_gpu();
    let mut twice = allocated(claim("c", "gpu.tessera.dev"), 19);
    let results = twice["status"]["allocation"]["devices"]["results"].as_array_mut().unwrap();
    let mut second = results[0].clone();
    second["shareID"] = "2f0c2d3e-9a41-7c3b-8e55-0d6f2b1a4c77".into();
    results.push(second);
    fed.pod(on_node(pod("p", &["c"]), "Running"));
    let object = fed.claim(reserved(twice, "p"));
    assert_eq!(fed.taken(), 38);
    fed.index.remove_claim(&object);
    assert_eq!(fed.taken(), 38, "its containers run");
    fed.pod(on_node(pod("p", &["c"]), "Succeeded"));
    assert_eq!(fed.taken(), 0);
}

#[test]
fn claim_moved_under_a_running_pod_counts_twice() {
    let mut fed = Fed::with_gpu();
    fed.slice("node-a", 2, 1, json!([gpu("gpu-0"), gpu("gpu-1")]));
    fed.claim(allocated(claim("c", "gpu.tessera.dev"), 19));
    fed.pod(on_node(pod("p", &["c"]), "Running"));
    let mut moved = allocated(claim("c", "gpu.tessera.dev"), 30);
    moved["status"]["allocation"]["devices"]["results"][0]["device"] = "gpu-1".into();
    fed.claim(moved);
    assert_eq!(fed.taken(), 19, "of gpu-0, where its containers still are");
    fed.pod(on_node(pod("p", &["c"]), "Failed"));
    assert_eq!(fed.taken(), 0);
}

#[test]
fn recreated_claim_is_another_claim() {
    let mut fed = Fed::with_gpu();
    let first = fed.claim(allocated(claim("c", "gpu.tessera.dev"), 19));
    fed.pod(on_node(pod("p", &["c"]), "Running"));
    fed.index.remove_claim(&first);
    let mut second = allocated(claim("c", "gpu.tessera.dev"), 30);
    second["metadata"]["uid"] = "uid-second".into();
    fed.claim(second);
    assert_eq!(fed.taken(), 49);
    fed.index.remove_pod(&read(pod("p", &["c"])));
    assert_eq!(fed.taken(), 30);
}

#[test]
fn pod_requests_count_on_its_node_or_that_of_its_claims() {
    let mut fed = Fed::with_gpu();
    fed.claim(claim("c", "gpu.tessera.dev"));
    fed.pod(pod("p", &["c"]));
    assert_eq!(fed.cpu_used(), Quantity::ZERO);
    fed.claim(allocated(claim("c", "gpu.tessera.dev"), 19));
    assert_eq!(fed.cpu_used(), Quantity::from_integer(2), "expected there");
    fed.pod(on_node(pod("p", &["c"]), "Running"));
    assert_eq!(fed.cpu_used(), Quantity::from_integer(2), "not twice");
    fed.node("node-a", "16");
    assert_eq!(fed.cpu_used(), Quantity::from_integer(2), "a change of the node does not lose it");
    fed.pod(on_node(pod("p", &["c"]), "Succeeded"));
    assert_eq!(fed.cpu_used(), Quantity::ZERO);
}

#[test]
fn requests_of_device_holders_are_counted_apart() {
    let mut fed = Fed::with_gpu();
    let two = Quantity::from_integer(2);
    fed.pod(on_node(pod("daemon", &[]), "Running"));
    assert_eq!((fed.cpu_used(), fed.cpu_held()), (two, Quantity::ZERO));
    fed.claim(claim("c", "gpu.tessera.dev"));
    fed.pod(on_node(pod("p", &["c"]), "Running"));
    assert_eq!(fed.cpu_held(), Quantity::ZERO, "bound before its claim is allocated");
    fed.claim(allocated(claim("c", "gpu.tessera.dev"), 19));
    assert_eq!((fed.cpu_used(), fed.cpu_held()), (Quantity::from_integer(4), two));
    fed.node("node-a", "16");
    assert_eq!(fed.cpu_held(), two, "a change of the node does not lose it");
    fed.pod(on_node(pod("p", &["c"]), "Succeeded"));
    assert_eq!((fed.cpu_used(), fed.cpu_held()), (two, Quantity::ZERO));
}

#[test]
fn only_planning_input_is_a_change_of_a_node() {
    let node = json!({
        "metadata": {"name": "node-a", "resourceVersion": "1", "labels": {"zone": "a"}},
        "status": {
            "allocatable": {"cpu": "8"},
            "conditions": [{"type": "Ready", "status": "True", "lastHeartbeatTime": "2026-11-21T00:00:00Z"}],
        },
    });
    let mut fed = Fed::new();
    let mut is_news = |node: &Value| fed.index.apply_node(&read::<Node>(node.clone())).unwrap();
    assert!(is_news(&node));
    let mut heartbeat = node.clone();
    heartbeat["metadata"]["resourceVersion"] = "2".into();
    heartbeat["status"]["conditions"][0]["lastHeartbeatTime"] = "2026-11-21T00:05:00Z".into();
    assert!(!is_news(&heartbeat));
    let changes = [
        ("/metadata/labels/zone", json!("b")),
        ("/status/allocatable/cpu", json!("4")),
        ("/status/conditions/0/status", json!("Unknown")),
        ("/spec", json!({"unschedulable": true})),
        ("/spec", json!({"taints": [{"key": "k", "effect": "NoSchedule"}]})),
    ];
    for (field, value) in changes {
        let mut changed = node.clone();
        changed["spec"] = json!({});
        *changed.pointer_mut(field).unwrap() = value;
        assert!(is_news(&changed), "{field}");
        assert!(is_news(&node), "{field} as it was");
    }
    let gone = read::<Node>(node.clone());
    fed.index.remove_node(&gone);
    assert!(fed.index.apply_node(&gone).unwrap(), "a node of the same name as one that is gone");
}

#[test]
fn scope_of_a_claim_follows_its_selectors() {
    let mut fed = Fed::with_gpu();
    fed.class(
        "nic",
        "device.driver == 'nic.example.com' && device.attributes['nic.example.com'].fast",
    );
    fed.class("any", "device.attributes['x.example.com'].?y.orValue(0) == 0");
    let scope = |fed: &mut Fed, classes: &[&str]| {
        let requests: Vec<Value> = classes
            .iter()
            .enumerate()
            .map(|(i, class)| json!({"name": format!("r{i}"), "exactly": {"deviceClassName": class}}))
            .collect();
        let name = classes.join("-").replace('.', "-");
        let mut object = claim(&name, "");
        object["spec"]["devices"]["requests"] = requests.into();
        fed.claim(object);
        fed.index.scope(&ClaimUid::new(format!("uid-{name}")).unwrap()).unwrap()
    };
    assert_eq!(scope(&mut fed, &["gpu.tessera.dev"]), Scope::Ours);
    assert_eq!(scope(&mut fed, &["nic"]), Scope::Foreign);
    assert_eq!(scope(&mut fed, &["any"]), Scope::Any);
    assert_eq!(scope(&mut fed, &["gpu.tessera.dev", "any"]), Scope::Ours);
    assert_eq!(scope(&mut fed, &["any", "nic"]), Scope::Foreign);
    assert_eq!(scope(&mut fed, &["gpu.tessera.dev", "nic"]), Scope::Mixed);
}

#[test]
fn claim_for_two_drivers_blocks_its_pod() {
    let mut fed = Fed::with_gpu();
    fed.class("nic", "device.driver == 'nic.example.com'");
    let mut mixed = claim("c", "gpu.tessera.dev");
    let second = json!({"name": "nic", "exactly": {"deviceClassName": "nic"}});
    mixed["spec"]["devices"]["requests"].as_array_mut().unwrap().push(second);
    fed.claim(mixed);
    fed.pod(pod("p", &["c"]));
    let work = fed.index.work();
    assert!(work.pending.is_empty());
    assert_eq!(work.blocked[0].blocker, PlanningBlocker::MixedDrivers);
}

#[test]
fn claim_of_a_pod_group_is_that_of_its_pods() {
    let of_group = |kind: &str, api: &str| {
        let mut claim = claim("g-gpu-x", "gpu.tessera.dev");
        claim["metadata"]["ownerReferences"] = json!([{
            "apiVersion": api, "kind": kind, "name": "g", "uid": "uid-g", "controller": true,
        }]);
        claim
    };
    let in_group = |name: &str, group: &str| {
        let mut pod = naming(pod_from_template(name), "g-gpu-x");
        pod["spec"]["schedulingGroup"] = json!({"podGroupName": group});
        pod
    };
    let pending = |claim: Value, pod: Value| {
        let mut fed = Fed::with_gpu();
        fed.claim(claim);
        fed.pod(pod);
        let work = fed.index.work();
        assert!(work.blocked.is_empty());
        work.pending.len()
    };
    let of_ours = || of_group("PodGroup", "scheduling.k8s.io/v1beta1");
    assert_eq!(pending(of_ours(), in_group("p", "g")), 1);
    let later = of_group("PodGroup", "scheduling.k8s.io/v1");
    assert_eq!(pending(later, in_group("p", "g")), 1, "of any version");
    assert_eq!(pending(of_ours(), in_group("p", "h")), 0, "of another PodGroup");
    assert_eq!(pending(of_ours(), naming(pod_from_template("p"), "g-gpu-x")), 0, "of none");
    let foreign = of_group("PodGroup", "scheduling.volcano.sh/v1beta1");
    assert_eq!(pending(foreign, in_group("p", "g")), 0, "of another API");
    assert_eq!(pending(of_group("Job", "batch/v1"), in_group("p", "g")), 0);
}

#[test]
fn allocated_foreign_claim_restricts_the_nodes() {
    let mut fed = Fed::with_gpu();
    fed.class("nic", "device.driver == 'nic.example.com'");
    fed.claim(claim("ours", "gpu.tessera.dev"));
    fed.claim(claim("theirs", "nic"));
    fed.pod(pod("p", &["ours", "theirs"]));
    assert_eq!(fed.index.work().pending[0].claims.len(), 1);
    let mut theirs = allocated(claim("theirs", "nic"), 1);
    theirs["status"]["allocation"]["devices"]["results"][0]["driver"] = "nic.example.com".into();
    fed.claim(theirs);
    let pending = &fed.index.work().pending[0];
    assert!(
        matches!(&pending.claims[1], PodClaim::Allocated { nodes: Some(nodes), .. } if nodes.single_node() == Some("node-a"))
    );
    assert_eq!(fed.taken(), 0, "devices of other drivers are not counted");
}

#[test]
fn foreign_and_unmanaged_devices_are_not_allocated() {
    let mut fed = Fed::new();
    fed.node("node-a", "8");
    fed.class("gpu.tessera.dev", "device.driver == 'gpu.tessera.dev'");
    let mut foreign = slice("foreign", "node-a", 1, 1, json!([gpu("gpu-0")]));
    foreign.spec.driver = "gpu.example.com".to_owned();
    fed.index.apply_slice(&foreign).unwrap();
    assert!(fed.index.snapshot().slices.is_empty());
    let mut unfenced = gpu("gpu-0");
    unfenced["taints"] = json!([]);
    fed.slice("node-a", 1, 1, json!([unfenced]));
    fed.claim(claim("c", "gpu.tessera.dev"));
    fed.pod(pod("p", &["c"]));
    assert!(
        plan(&fed.index.snapshot(), &fed.index.work().pending, PlanSettings::default())
            .decisions
            .is_empty()
    );
}

#[test]
fn devices_of_a_slice_fenced_by_a_rule_are_allocated() {
    let mut fed = Fed::new();
    fed.node("node-a", "8");
    fed.class("gpu.tessera.dev", "device.driver == 'gpu.tessera.dev'");
    let mut untainted = gpu("gpu-0");
    untainted["taints"] = json!([]);
    let mut fenced = slice("node-a", "node-a", 1, 1, json!([untainted]));
    let annotation = |value: &str| Some([("gpu.tessera.dev/fence".into(), value.into())].into());
    fenced.metadata.annotations = annotation("other");
    fed.index.apply_slice(&fenced).unwrap();
    fed.claim(claim("c", "gpu.tessera.dev"));
    fed.pod(pod("p", &["c"]));
    let decisions = |fed: &Fed| {
        let pending = fed.index.work().pending;
        plan(&fed.index.snapshot(), &pending, PlanSettings::default()).decisions.len()
    };
    assert_eq!(decisions(&fed), 0, "an annotation of a later version");
    fenced.metadata.annotations = annotation("DeviceTaintRule");
    fed.index.apply_slice(&fenced).unwrap();
    assert_eq!(decisions(&fed), 1);
    // The rule itself does not repel our claims.
    let taint = json!({"key": "gpu.tessera.dev/managed", "effect": "NoSchedule"});
    let spec = json!({"deviceSelector": {"driver": "gpu.tessera.dev"}, "taint": taint});
    let rule = read(json!({"metadata": {"name": "tessera-fence"}, "spec": spec}));
    fed.index.apply_taint_rule(&rule);
    assert_eq!(decisions(&fed), 1);
    fed.index.remove_taint_rule(&rule);
    assert_eq!(decisions(&fed), 1, "the controller restores the rule");
    let leaving = json!({"key": "gpu.tessera.dev/leaving-stock", "effect": "NoSchedule"});
    fenced.spec.devices.as_mut().unwrap()[0].taints = Some(vec![read(leaving)]);
    fed.index.apply_slice(&fenced).unwrap();
    assert_eq!(decisions(&fed), 0, "kube-scheduler may still be writing");
}

#[test]
fn holders_are_bound_pods_with_devices_and_all_users_of_claims() {
    let mut fed = Fed::with_gpu();
    fed.claim(allocated(claim("shared", "gpu.tessera.dev"), 19));
    fed.claim(claim("unallocated", "gpu.tessera.dev"));
    let mut first = on_node(pod("first", &["shared"]), "Running");
    first["spec"]["priority"] = 7.into();
    fed.pod(first);
    fed.pod(pod("waits", &["shared"]));
    fed.pod(on_node(pod("done", &["shared"]), "Succeeded"));
    fed.pod(on_node(pod("none", &["unallocated"]), "Running"));
    let holders = fed.index.holders();
    assert_eq!(holders.len(), 1);
    let of_node = &holders[&NodeName::new("node-a").unwrap()];
    let pods = of_node.pods.iter().map(|one| (one.pod.as_str(), one.priority, one.is_ending));
    assert_eq!(pods.collect::<Vec<_>>(), [("uid-first", 7, false)]);
    assert_eq!(of_node.pods[0].requests.get("cpu").unwrap().to_string(), "2");
    let users: Vec<&str> = of_node.claims[0].users.iter().map(|uid| uid.as_str()).collect();
    assert_eq!((users, of_node.claims.len()), (vec!["uid-first", "uid-waits"], 1));
    assert_eq!(of_node.claims[0].results.len(), 1);
    assert!(!of_node.claims[0].is_kept);
    let mut of_group = reserved(allocated(claim("shared", "gpu.tessera.dev"), 19), "group");
    of_group["status"]["reservedFor"][0]["apiGroup"] = "scheduling.k8s.io".into();
    of_group["status"]["reservedFor"][0]["resource"] = "podgroups".into();
    fed.claim(of_group);
    let of_node = fed.index.holders_on(&NodeName::new("node-a").unwrap());
    assert!(of_node.claims[0].is_kept, "it is released when the PodGroup is deleted");
}

#[test]
fn room_is_taken_for_plans_and_for_nothing_else() {
    let mut fed = Fed::with_gpu();
    fed.claim(allocated(claim("held", "gpu.tessera.dev"), 50));
    let mut small = claim("small", "gpu.tessera.dev");
    small["spec"]["devices"]["requests"][0]["exactly"]["capacity"] =
        json!({"requests": {"memory": "20Gi"}});
    fed.claim(small);
    fed.pod(pod("small", &["small"]));
    let pods = fed.index.work().pending;
    let decided = fed.plan(&pods).decisions.remove(0).claims.remove(0).results;
    let urgent = PodUid::new("uid-urgent");
    fed.index.keep_room(&urgent, 7, decided.clone().into());
    fed.index.keep_room(&urgent, 7, decided.into());
    assert_eq!(fed.plan(&pods).decisions.len(), 0, "the 80 GiB are held and kept");
    assert_eq!((fed.taken(), fed.index.overcommitted()), (50, vec![]));
    let node = NodeName::new("node-a").unwrap();
    let used_from = |fed: &Fed, priority| {
        let snapshot = fed.index.snapshot_of_nodes(std::slice::from_ref(&node), &pods[0], priority);
        snapshot.usage.iter().map(|(_, used)| used.shares).sum::<u32>()
    };
    assert_eq!(
        (used_from(&fed, 7), used_from(&fed, 8)),
        (2, 1),
        "room of a lower priority is free"
    );
    fed.index.end_room(&urgent);
    assert_eq!(used_from(&fed, 0), 1);
    assert_eq!(fed.plan(&pods).decisions.len(), 1);
}

#[test]
fn device_leaving_stock_mode_is_never_allocated() {
    let mut fed = Fed::new();
    fed.node("node-a", "8");
    fed.class("gpu.tessera.dev", "device.driver == 'gpu.tessera.dev'");
    let mut leaving = gpu("gpu-0");
    let taints = leaving["taints"].as_array_mut().unwrap();
    taints.push(json!({"key": "gpu.tessera.dev/leaving-stock", "effect": "NoSchedule"}));
    fed.slice("node-a", 1, 1, json!([leaving]));
    let mut tolerant = claim("c", "gpu.tessera.dev");
    tolerant["spec"]["devices"]["requests"][0]["exactly"]["tolerations"] =
        json!([{"operator": "Exists"}]);
    fed.claim(tolerant);
    fed.pod(pod("p", &["c"]));
    assert!(
        plan(&fed.index.snapshot(), &fed.index.work().pending, PlanSettings::default())
            .decisions
            .is_empty()
    );
    // Once that is over, the toleration changes nothing.
    fed.slice("node-a", 2, 1, json!([gpu("gpu-0")]));
    assert_eq!(
        plan(&fed.index.snapshot(), &fed.index.work().pending, PlanSettings::default())
            .decisions
            .len(),
        1
    );
}

#[test]
fn oversubscribed_gpu_needs_claims_that_allow_it() {
    let mut may_spill = claim("c", "gpu.tessera.dev");
    may_spill["spec"]["devices"]["config"] = json!([{"opaque": {"driver": "gpu.tessera.dev", "parameters": {
        "apiVersion": "gpu.tessera.dev/v1alpha1", "kind": "GpuConfig", "memory": {"oversubscribe": true},
    }}}]);
    let plans = |physical: Value, claim: &Value| {
        let mut fed = Fed::new();
        fed.node("node-a", "8");
        fed.class("gpu.tessera.dev", "device.driver == 'gpu.tessera.dev'");
        let mut published = gpu("gpu-0");
        published["attributes"] = physical;
        fed.slice("node-a", 1, 1, json!([published]));
        fed.claim(claim.clone());
        fed.pod(pod("p", &["c"]));
        plan(&fed.index.snapshot(), &fed.index.work().pending, PlanSettings::default())
            .decisions
            .len()
    };
    let plain = claim("c", "gpu.tessera.dev");
    for oversubscribed in [
        json!({"physicalMemory": {"string": "40Gi"}}),
        json!({"gpu.tessera.dev/physicalMemory": {"string": "40Gi"}}),
        json!({"physicalMemory": {"string": "half of it"}}),
        json!({"physicalMemory": {"int": 40}}),
    ] {
        assert_eq!(
            (plans(oversubscribed.clone(), &plain), plans(oversubscribed, &may_spill)),
            (0, 1)
        );
    }
    for whole in [
        json!({}),
        json!({"physicalMemory": {"string": "80Gi"}}),
        json!({"physical": {"string": "1"}}),
    ] {
        assert_eq!((plans(whole.clone(), &plain), plans(whole, &may_spill)), (1, 1));
    }
}

/// A GpuConfig in an allocation.
fn config(source: &str, fields: Value) -> Value {
    let mut parameters = json!({"apiVersion": "gpu.tessera.dev/v1alpha1", "kind": "GpuConfig"});
    parameters.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    json!({"source": source, "opaque": {"driver": "gpu.tessera.dev", "parameters": parameters}})
}

#[test]
fn sharing_of_an_allocation_follows_its_configs() {
    let by_mps = |source: &str| config(source, json!({"sharing": "MPS"}));
    let of_request = |name: &str| {
        let mut config = by_mps("FromClaim");
        config["requests"] = json!([name]);
        config
    };
    let foreign = json!({"source": "FromClaim", "opaque": {"driver": "other.example.com", "parameters": {"sharing": "MPS"}}});
    let other_pool = || {
        let mut claim = allocated(claim("c", "gpu.tessera.dev"), 1);
        claim["status"]["allocation"]["devices"]["results"][0]["driver"] =
            "other.example.com".into();
        claim
    };
    let sharing = |mut claim: Value, configs: Value| {
        claim["status"]["allocation"]["devices"]["config"] = configs;
        let object: ResourceClaim = read(claim);
        let allocation = object.status.unwrap().allocation.unwrap();
        tessera_index::convert::allocated("c", &allocation, &[]).unwrap().results[0].sharing
    };
    let of = |configs: Value| sharing(allocated(claim("c", "gpu.tessera.dev"), 1), configs);
    for by_intercept in [
        Value::Null,
        json!([]),
        json!([config("FromClaim", json!({}))]),
        json!([by_mps("FromClass"), config("FromClaim", json!({"sharing": "Intercept"}))]),
        json!([of_request("another")]),
        json!([foreign]),
        // The driver refuses these.
        json!([config("FromClaim", json!({"sharing": "Mps"}))]),
        json!([config("FromClaim", json!({"sharing": "TimeSlicing"}))]),
        json!([by_mps("FromClaim"), config("FromClaim", json!({"speed": 1}))]),
        json!([
            by_mps("FromClass"),
            config("FromClaim", json!({"memory": {"oversubscribe": true}}))
        ]),
    ] {
        assert_eq!(of(by_intercept.clone()), Sharing::Intercept, "{by_intercept}");
    }
    for by_mps in [
        json!([by_mps("FromClass")]),
        json!([by_mps("FromClaim")]),
        json!([of_request("gpu")]),
        json!([config("FromClass", json!({"sharing": "Intercept"})), by_mps("FromClaim"), foreign]),
    ] {
        assert_eq!(of(by_mps.clone()), Sharing::Mps, "{by_mps}");
    }
    assert_eq!(sharing(other_pool(), json!([by_mps("FromClaim")])), Sharing::Intercept);
}

#[test]
fn gpu_shared_by_mps_is_for_mps_claims_until_the_last_ends() {
    let spec_of = |name: &str, fields: Value| {
        let mut claim = claim(name, "gpu.tessera.dev");
        claim["spec"]["devices"]["requests"][0]["exactly"]["capacity"] =
            json!({"requests": {"memory": "1Gi"}});
        claim["spec"]["devices"]["config"] = json!([config("FromClaim", fields)]);
        claim["spec"]["devices"]["config"][0].as_object_mut().unwrap().remove("source");
        claim
    };
    let mut fed = Fed::with_attributes(json!({"mps": {"bool": true}}));
    fed.claim(spec_of("plain", json!({})));
    fed.pod(pod("p-plain", &["plain"]));
    fed.claim(spec_of("by-mps", json!({"sharing": "MPS"})));
    fed.pod(pod("p-by-mps", &["by-mps"]));
    let holder = spec_of("holder", json!({"sharing": "MPS"}));
    let mut held = allocated(holder.clone(), 1);
    held["status"]["allocation"]["devices"]["config"] =
        json!([config("FromClaim", json!({"sharing": "MPS"}))]);
    let placed = |fed: &mut Fed| {
        let pending = fed.index.work().pending;
        let one_by_one = pending.iter().map(|pod| fed.plan(std::slice::from_ref(pod)));
        let decisions: Vec<_> = one_by_one.flat_map(|plan| plan.decisions).collect();
        assert!(!fed.audit());
        decisions.iter().map(|decision| decision.pod.as_str().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(placed(&mut fed), ["uid-p-by-mps", "uid-p-plain"]);
    fed.claim(held);
    assert_eq!(placed(&mut fed), ["uid-p-by-mps"]);
    fed.claim(holder);
    assert_eq!(placed(&mut fed), ["uid-p-by-mps", "uid-p-plain"]);
}

#[test]
fn decision_with_mps_is_read_back_as_decided() {
    let mut fed = Fed::with_attributes(json!({"mps": {"bool": true}}));
    let mut by_mps = claim("c", "gpu.tessera.dev");
    by_mps["spec"]["devices"]["config"] = json!([config("", json!({"sharing": "MPS"}))]);
    let object = fed.claim(by_mps);
    fed.pod(pod("p", &["c"]));
    let pending = fed.index.work().pending;
    let plan = fed.plan(&pending);
    let claim_allocation = &plan.decisions[0].claims[0];
    let at = k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(
        k8s_openapi::jiff::Timestamp::UNIX_EPOCH,
    );
    let share =
        || tessera_api::names::ShareId::new("1f0c2d3e-9a41-7c3b-8e55-0d6f2b1a4c77").unwrap();
    let classes = fed.index.classes_of(fed.index.requests_of(&claim_allocation.claim).unwrap());
    assert_eq!(classes.len(), 1);
    let classes = classes.iter().map(|(name, class)| (name.clone(), class.as_ref())).collect();
    let written =
        tessera_index::convert::allocation(claim_allocation, &object, &classes, None, at, share);
    let read_back = tessera_index::convert::allocated("c", &written, &[]).unwrap();
    // Otherwise the assumed and the seen allocation would both be counted.
    assert_eq!(*read_back.results, *claim_allocation.results);
    assert_eq!(read_back.results[0].sharing, Sharing::Mps);
}

#[test]
fn mps_claims_need_a_device_with_mps() {
    let mut by_mps = claim("c", "gpu.tessera.dev");
    by_mps["spec"]["devices"]["config"] = json!([config("", json!({"sharing": "MPS"}))]);
    let plans = |attributes: Value| {
        let mut fed = Fed::with_attributes(attributes);
        fed.claim(by_mps.clone());
        fed.pod(pod("p", &["c"]));
        plan(&fed.index.snapshot(), &fed.index.work().pending, PlanSettings::default())
            .decisions
            .len()
    };
    for yes in [json!({"mps": {"bool": true}}), json!({"gpu.tessera.dev/mps": {"bool": true}})] {
        assert_eq!(plans(yes), 1);
    }
    for no in [
        json!({}),
        json!({"mps": {"bool": false}}),
        json!({"mps": {"string": "true"}}),
        json!({"other.example.com/mps": {"bool": true}}),
    ] {
        assert_eq!(plans(no), 0);
    }
}

#[test]
fn taint_rule_blocks_a_device_until_it_is_deleted() {
    let mut fed = Fed::with_gpu();
    fed.claim(claim("c", "gpu.tessera.dev"));
    fed.pod(pod("p", &["c"]));
    let rule = read(json!({
        "metadata": {"name": "broken"},
        "spec": {
            "deviceSelector": {"driver": "gpu.tessera.dev", "pool": "node-a"},
            "taint": {"key": "example.com/broken", "effect": "NoSchedule"},
        },
    }));
    let decisions = |fed: &Fed| {
        plan(&fed.index.snapshot(), &fed.index.work().pending, PlanSettings::default())
            .decisions
            .len()
    };
    fed.index.apply_taint_rule(&rule);
    assert_eq!(decisions(&fed), 0);
    fed.slice("node-a", 1, 1, json!([gpu("gpu-0")]));
    assert_eq!(decisions(&fed), 0, "a slice that is published anew is tainted as well");
    fed.index.remove_taint_rule(&rule);
    assert_eq!(decisions(&fed), 1);
}

#[test]
fn unreadable_slice_is_not_planned() {
    let mut fed = Fed::with_gpu();
    let mut broken = gpu("gpu-0");
    broken["capacity"]["memory"]["value"] = "much".into();
    let error =
        fed.index.apply_slice(&slice("node-a-1", "node-a", 1, 1, json!([broken]))).unwrap_err();
    assert!(error.to_string().contains("capacity[memory].value"), "{error}");
    assert!(fed.index.snapshot().slices.is_empty());
}

#[test]
fn unneeded_allocations_are_found() {
    let mut fed = Fed::with_gpu();
    fed.claim(allocated(claim("c", "gpu.tessera.dev"), 19));
    fed.pod(pod("p", &["c"]));
    assert_eq!(fed.index.unneeded(), Vec::<ClaimUid>::new(), "a pod waits for it");
    fed.index.remove_pod(&read(pod("p", &["c"])));
    assert_eq!(fed.index.unneeded(), [ClaimUid::new("uid-c").unwrap()]);
    fed.claim(reserved(allocated(claim("c", "gpu.tessera.dev"), 19), "p"));
    assert_eq!(
        fed.index.unneeded(),
        Vec::<ClaimUid>::new(),
        "what is reserved is kube-controller-manager's to clear"
    );
}

#[test]
fn only_unreserved_claims_of_oldest_waiting_pod_are_movable() {
    let mut fed = Fed::with_gpu();
    let (mut old, mut young) = (pod("old", &["c"]), pod("young", &["c"]));
    old["metadata"]["creationTimestamp"] = "2026-11-21T00:00:00Z".into();
    young["metadata"]["creationTimestamp"] = "2026-11-21T00:00:01Z".into();
    fed.claim(allocated(claim("c", "gpu.tessera.dev"), 19));
    fed.pod(young);
    fed.pod(old);
    let movable = |fed: &Fed, name: &str| {
        let waiting = fed.index.waiting(&PodUid::new(&format!("uid-{name}")));
        waiting.unwrap().movable.len()
    };
    assert_eq!((movable(&fed, "old"), movable(&fed, "young")), (1, 0));
    fed.claim(reserved(allocated(claim("c", "gpu.tessera.dev"), 19), "old"));
    assert_eq!(movable(&fed, "old"), 0);
}

#[test]
fn audit_reports_an_overcommitted_device() {
    let mut fed = Fed::with_gpu();
    fed.claim(allocated(claim("a", "gpu.tessera.dev"), 50));
    assert!(!fed.audit());
    assert_eq!(fed.index.overcommitted(), []);
    fed.claim(allocated(claim("b", "gpu.tessera.dev"), 50));
    assert!(!fed.audit());
    assert_eq!(fed.index.overcommitted().len(), 1);
}

#[test]
fn claim_with_admin_access_is_refused() {
    let mut fed = Fed::with_gpu();
    let mut asking = claim("c", "gpu.tessera.dev");
    asking["spec"]["devices"]["requests"][0]["exactly"]["adminAccess"] = json!(true);
    fed.claim(asking);
    fed.pod(pod("p", &["c"]));
    let pending = fed.index.work().pending;
    let plan = fed.plan(&pending);
    let [refusal] = plan.refusals.as_slice() else { panic!("{plan:?}") };
    let what = UnsupportedFeature::Field("adminAccess");
    assert!(
        matches!(&*refusal.cause, RefusalCause::NotSupported { what: w, .. } if *w == what),
        "{refusal:?}"
    );
}

#[test]
fn scope_of_a_class_of_two_drivers_is_that_of_the_request() {
    let of_request = |expression: &str| {
        let mut fed = Fed::new();
        fed.class("gpu", "device.driver in ['gpu.tessera.dev', 'gpu.example.com']");
        let mut asking = claim("c", "gpu");
        let selectors = json!([{"cel": {"expression": expression}}]);
        asking["spec"]["devices"]["requests"][0]["exactly"]["selectors"] = selectors;
        fed.claim(asking);
        fed.index.scope(&ClaimUid::new("uid-c").unwrap())
    };
    assert_eq!(of_request("device.driver == 'gpu.example.com'"), Some(Scope::Foreign));
    assert_eq!(of_request("device.driver == 'gpu.tessera.dev'"), Some(Scope::Ours));
}

/// The claim with this number of selectors of 8 KiB.
fn with_selectors(mut claim: Value, count: usize) -> Value {
    let expression = format!("[{}0].size() > 0", "1,".repeat(4000));
    let selectors = vec![json!({"cel": {"expression": expression}}); count];
    claim["spec"]["devices"]["requests"][0]["exactly"]["selectors"] = selectors.into();
    claim
}

#[test]
fn claim_with_more_than_64_kib_of_selectors_is_refused() {
    for (selectors, refused) in [(8, false), (9, true)] {
        let mut fed = Fed::with_gpu();
        fed.claim(with_selectors(claim("c", "gpu.tessera.dev"), selectors));
        fed.pod(pod("p", &["c"]));
        let pending = fed.index.work().pending;
        let plan = fed.plan(&pending);
        let what = UnsupportedFeature::Field("a claim with more than 64 KiB of selectors");
        let is_it = |refusal: &Refusal| matches!(&*refusal.cause, RefusalCause::NotSupported { what: w, .. } if *w == what);
        assert_eq!(plan.refusals.iter().any(is_it), refused, "{plan:?}");
    }
}

#[test]
fn only_planning_input_is_a_change_of_a_pod() {
    let mut fed = Fed::with_gpu();
    let waiting = pod("p", &["c"]);
    assert!(fed.index.apply_pod(&read(waiting.clone())));
    assert!(!fed.index.apply_pod(&read(waiting.clone())));
    let mut probed = waiting.clone();
    probed["status"] = json!({"conditions": [{"type": "ContainersReady", "status": "False"}]});
    assert!(!fed.index.apply_pod(&read(probed)));
    fed.claim(claim("c", "gpu.tessera.dev"));
    assert!(!fed.index.apply_pod(&read(waiting.clone())), "its claim is news of the claim");
    assert!(fed.index.apply_pod(&read(on_node(waiting, "Pending"))));
}

#[test]
fn planning_follows_everything_that_is_applied() {
    let mut fed = Fed::with_gpu();
    fed.claim(claim("c", "gpu.tessera.dev"));
    fed.pod(pod("p", &["c"]));
    let decided = |fed: &mut Fed| {
        let pending = fed.index.work().pending;
        let kept = fed.plan(&pending).decisions;
        assert_eq!(kept, plan(&fed.index.snapshot(), &pending, PlanSettings::default()).decisions);
        kept.len()
    };
    assert_eq!(decided(&mut fed), 1);
    fed.claim(allocated(claim("other", "gpu.tessera.dev"), 80));
    assert_eq!(decided(&mut fed), 0, "the GPU is taken");
    fed.slice("node-a", 2, 1, json!([gpu("gpu-0"), gpu("gpu-1")]));
    assert_eq!(decided(&mut fed), 1, "there is a second one");
    fed.node("node-a", "0");
    assert_eq!(decided(&mut fed), 0, "the node has no room");
    fed.node("node-a", "8");
    fed.class("gpu.tessera.dev", "device.driver == 'other.example.com'");
    assert_eq!(decided(&mut fed), 0, "the class is for something else");
}
