//! What `kubectl tessera simulate` says would happen.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod stage;

use serde_json::json;
use stage::{Stage, device, golden, share};
use tessera_api::names::Namespace;
use tessera_cli::args::PolicyName;
use tessera_cli::output::{Format, render};
use tessera_cli::simulate::{self, ManifestError, Outcome, Simulation};

const QUARTER: &str = "
apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {name: quarter}
spec:
  spec:
    devices:
      requests:
      - name: gpu
        exactly: {deviceClassName: gpu.tessera.dev, capacity: {requests: {memory: 19Gi, cores: 25}}}
---
";

const TRAINER: &str = "
apiVersion: v1
kind: Pod
metadata: {name: trainer}
spec:
  resourceClaims: [{name: gpu, resourceClaimTemplateName: quarter}]
  containers: [{name: main, image: example/trainer, resources: {claims: [{name: gpu}]}}]
";

fn try_with(
    stage: &Stage,
    manifests: &str,
    policy: Option<PolicyName>,
) -> Result<Simulation, ManifestError> {
    let namespace = Namespace::new("team-a").unwrap();
    simulate::simulate(&stage.snapshot, manifests, &namespace, PolicyName::settings(policy))
}

fn simulated(stage: &Stage, manifests: &str) -> Simulation {
    try_with(stage, manifests, None).unwrap()
}

fn outcomes(simulation: &Simulation) -> Vec<(&str, Outcome, Option<&str>)> {
    simulation.pods.iter().map(|pod| (pod.pod.as_str(), pod.result, pod.node.as_deref())).collect()
}

#[test]
fn a_pod_gets_its_claim_from_the_template_beside_it_and_a_number_is_an_amount_too() {
    let result = simulated(&Stage::new(), &(QUARTER.to_owned() + TRAINER));
    assert_eq!(outcomes(&result), [("trainer", Outcome::Fits, Some("node-a"))]);
    let claim = &result.pods[0].claims[0];
    assert_eq!(claim.claim.as_deref(), Some("trainer-gpu"));
    assert_eq!(claim.devices[0].amounts["cores"].to_string(), "25");
    assert_eq!(claim.devices[0].device, device("aa"));
    assert!(result.notes.is_empty() && !result.lacks_room(), "{:?}", result.notes);
}

#[test]
fn replicas_are_placed_one_after_the_other_until_nothing_is_left() {
    let mut stage = Stage::new();
    for (pod, node, mark) in [("a", "node-a", "aa"), ("b", "node-a", "ab"), ("c", "node-b", "ba")] {
        stage.tenant(pod, node, &device(mark), "70Gi", "10");
    }
    let deployment = "
apiVersion: apps/v1
kind: Deployment
metadata: {name: server}
spec:
  replicas: 6
  selector: {matchLabels: {app: server}}
  template:
    metadata: {labels: {app: server}}
    spec:
      resourceClaims: [{name: gpu, resourceClaimTemplateName: quarter}]
      containers: [{name: main, image: example/server}]
---
apiVersion: v1
kind: Service
metadata: {name: server}
";
    let result = simulated(&stage, &(QUARTER.to_owned() + deployment));
    let fit: Vec<bool> = result.pods.iter().map(|pod| pod.result == Outcome::Fits).collect();
    assert_eq!(fit, [true, true, true, true, false, false]);
    assert!(result.lacks_room());
    golden("simulate.txt", &simulate::text(&result, true));
    golden("simulate.json", &render(&result, Format::Json, |_| String::new()).unwrap());
}

#[test]
fn the_policy_decides_where() {
    let mut stage = Stage::new();
    stage.tenant("busy", "node-b", &device("bb"), "10Gi", "0");
    let manifests = QUARTER.to_owned() + TRAINER;
    let place = |policy| {
        let result = try_with(&stage, &manifests, Some(policy)).unwrap();
        (result.pods[0].node.clone().unwrap(), result.pods[0].claims[0].devices[0].device.clone())
    };
    assert_eq!(place(PolicyName::FirstFit), ("node-a".to_owned(), device("aa")));
    assert_eq!(place(PolicyName::Binpack), ("node-b".to_owned(), device("bb")));
    assert_eq!(place(PolicyName::Spread), ("node-a".to_owned(), device("aa")));
}

#[test]
fn pods_that_wait_in_the_cluster_come_first_and_a_priority_comes_before_them() {
    let mut stage = Stage::new();
    for (name, mark) in [("x", "aa"), ("y", "ab"), ("z", "ba")] {
        stage.tenant(
            name,
            if mark == "ba" { "node-b" } else { "node-a" },
            &device(mark),
            "80Gi",
            "0",
        );
    }
    stage.claim("old-gpu", share("70Gi", "0"));
    stage.pod("old", &["old-gpu"]);
    let result = simulated(&stage, &(QUARTER.to_owned() + TRAINER));
    assert_eq!(
        (result.waiting_before, outcomes(&result)),
        (1, vec![("trainer", Outcome::DoesNotFit, None)])
    );
    let urgent = TRAINER.replace("spec:", "spec:\n  priority: 100");
    let result = simulated(&stage, &(QUARTER.to_owned() + &urgent));
    assert_eq!(outcomes(&result), [("trainer", Outcome::Fits, Some("node-b"))]);
}

#[test]
fn claims_and_templates_of_the_cluster_are_used_too() {
    let mut stage = Stage::new();
    stage.claim("held", share("19Gi", "0"));
    stage.allocated("held", "node-b", &device("bb"), "19Gi", "0");
    let pod = TRAINER.replace("resourceClaimTemplateName: quarter", "resourceClaimName: held");
    let result = simulated(&stage, &pod);
    assert_eq!(outcomes(&result), [("trainer", Outcome::Fits, Some("node-b"))]);
    let result = simulated(&stage, TRAINER);
    assert_eq!(
        result.pods[0].message,
        "ResourceClaimTemplate quarter does not exist, so there is no claim yet"
    );
}

#[test]
fn a_node_that_is_not_there_yet_can_be_tried() {
    let mut stage = Stage::empty();
    assert_eq!(
        outcomes(&simulated(&stage, &(QUARTER.to_owned() + TRAINER)))[0].1,
        Outcome::DoesNotFit
    );
    stage.node("node-new", json!([]));
    let slice = stage.snapshot.resource_slices.pop().unwrap();
    let mut slice = serde_json::to_value(slice).unwrap();
    slice["spec"]["devices"] =
        serde_json::to_value(&Stage::new().snapshot.resource_slices[0].spec.devices).unwrap();
    let node = serde_json::to_value(stage.snapshot.nodes.pop().unwrap()).unwrap();
    let hardware = format!("{node}\n---\n{slice}\n---\n");
    let result = simulated(&stage, &(hardware + QUARTER + TRAINER));
    assert_eq!(outcomes(&result), [("trainer", Outcome::Fits, Some("node-new"))]);
}

#[test]
fn what_is_limited_is_requested_and_counts_on_the_node() {
    let stage = Stage::new();
    let large = TRAINER.replace("resources: {", "resources: {limits: {cpu: 33}, ");
    let result = simulated(&stage, &(QUARTER.to_owned() + &large));
    assert_eq!(outcomes(&result), [("trainer", Outcome::DoesNotFit, None)]);
    assert!(result.pods[0].claims[0].message.contains("on nodes with insufficient cpu"));
}

#[test]
fn a_pod_that_exists_is_not_made_again() {
    let mut stage = Stage::new();
    stage.tenant("trainer", "node-a", &device("aa"), "19Gi", "25");
    let result = simulated(&stage, &(QUARTER.to_owned() + TRAINER));
    assert_eq!(outcomes(&result), [("trainer", Outcome::Exists, None)]);
}

#[test]
fn a_pod_without_claims_is_no_concern_of_tesseras() {
    let pod = "{apiVersion: v1, kind: Pod, metadata: {name: plain}, spec: {containers: [{name: c, image: i}]}}";
    assert_eq!(outcomes(&simulated(&Stage::new(), pod)), [("plain", Outcome::NotConcerned, None)]);
}

#[test]
fn a_misspelt_field_is_told_and_so_is_a_priority_class() {
    let pod = TRAINER.replace("resourceClaims:", "priorityClassName: gold\n  resourceClaim:");
    let result = simulated(&Stage::new(), &pod);
    assert_eq!(
        result.notes,
        [
            "Pod trainer: there is no field spec.resourceClaim; it is ignored",
            "Pod trainer: PriorityClass gold is not looked up; set spec.priority to plan it with one",
        ]
    );
}

#[test]
fn lists_are_opened_and_names_are_made_for_those_that_are_generated() {
    let list = "
apiVersion: v1
kind: List
items:
- {apiVersion: v1, kind: Pod, metadata: {generateName: a-}, spec: {containers: []}}
- {apiVersion: batch/v1, kind: Job, metadata: {name: b}, spec: {parallelism: 3, completions: 2, template: {spec: {containers: []}}}}
";
    let result = simulated(&Stage::new(), list);
    assert_eq!(
        outcomes(&result).iter().map(|pod| pod.0).collect::<Vec<_>>(),
        ["a-0", "b-0", "b-1"]
    );
}

#[test]
fn what_is_no_manifest_is_refused_with_what_to_do() {
    let refused = |text: &str| try_with(&Stage::new(), text, None).unwrap_err().to_string();
    assert_eq!(
        refused("a: b"),
        "document 1 has no `kind` or no `apiVersion`; is it a Kubernetes manifest?"
    );
    assert_eq!(
        refused("{apiVersion: resource.k8s.io/v1beta1, kind: ResourceClaim, metadata: {name: c}}"),
        "ResourceClaim `c` has apiVersion `resource.k8s.io/v1beta1`; write it as `resource.k8s.io/v1`"
    );
    assert_eq!(
        refused("{apiVersion: v1, kind: Pod, metadata: {name: p}, spec: {containers: 3}}"),
        "Pod `p` is not what the API server takes"
    );
    assert_eq!(
        refused("{apiVersion: v1, kind: Pod, metadata: {name: P_}, spec: {containers: []}}"),
        "Pod has an unusable `metadata.name`"
    );
    assert!(refused("").starts_with("nothing to simulate"));
    assert_eq!(refused("a: [b"), "not YAML, and not JSON");
}
