//! Simulated placement of pods.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod fixture;

use fixture::{Fixture, device, golden, read, share};
use k8s_openapi::api::scheduling::v1::PriorityClass;
use serde_json::{Value, json};
use tessera_api::names::Namespace;
use tessera_cli::args::PolicyName;
use tessera_cli::convert::{Conversions, ManifestFile};
use tessera_cli::output::{OutputFormat, render};
use tessera_cli::simulate::{self, ManifestError, SimulatedOutcome, Simulation};

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
    fixture: &Fixture,
    manifests: &str,
    policy: Option<PolicyName>,
) -> Result<Simulation, ManifestError> {
    let namespace = Namespace::new("team-a").unwrap();
    let settings = PolicyName::settings(policy);
    simulate::simulate(&fixture.snapshot, manifests, &namespace, settings, false)
}

/// Returns the result for each pod with the evictions that would make room for it.
fn with_preemption(fixture: &Fixture, manifests: &str) -> Simulation {
    let namespace = Namespace::new("team-a").unwrap();
    let settings = PolicyName::settings(None);
    simulate::simulate(&fixture.snapshot, manifests, &namespace, settings, true).unwrap()
}

fn simulated(fixture: &Fixture, manifests: &str) -> Simulation {
    try_with(fixture, manifests, None).unwrap()
}

fn outcomes(simulation: &Simulation) -> Vec<(&str, SimulatedOutcome, Option<&str>)> {
    simulation.pods.iter().map(|pod| (pod.pod.as_str(), pod.result, pod.node.as_deref())).collect()
}

#[test]
fn generates_claims_from_templates_of_the_files() {
    let result = simulated(&Fixture::new(), &(QUARTER.to_owned() + TRAINER));
    assert_eq!(outcomes(&result), [("trainer", SimulatedOutcome::Fits, Some("node-a"))]);
    let claim = &result.pods[0].claims[0];
    assert_eq!(claim.claim.as_deref(), Some("trainer-gpu"));
    assert_eq!(claim.devices[0].amounts.get("cores").unwrap().to_string(), "25");
    assert_eq!(claim.devices[0].device, device("aa"));
    assert!(result.notes.is_empty() && result.fits(), "{:?}", result.notes);
}

#[test]
fn replicas_with_the_same_result_share_a_line() {
    let mut fixture = Fixture::new();
    for (pod, node, mark) in [("a", "node-a", "aa"), ("b", "node-a", "ab"), ("c", "node-b", "ba")] {
        fixture.tenant(pod, node, &device(mark), "70Gi", "10");
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
    let result = simulated(&fixture, &(QUARTER.to_owned() + deployment));
    let fit: Vec<bool> =
        result.pods.iter().map(|pod| pod.result == SimulatedOutcome::Fits).collect();
    assert_eq!(fit, [true, true, true, true, false, false]);
    assert!(!result.fits());
    golden("simulate.txt", &simulate::text(&result, true));
    golden("simulate.json", &render(&result, OutputFormat::Json, |_| String::new()).unwrap());
}

#[test]
fn policy_decides_the_node() {
    let mut fixture = Fixture::new();
    fixture.tenant("busy", "node-b", &device("bb"), "10Gi", "0");
    let manifests = QUARTER.to_owned() + TRAINER;
    let place = |policy| {
        let result = try_with(&fixture, &manifests, Some(policy)).unwrap();
        (result.pods[0].node.clone().unwrap(), result.pods[0].claims[0].devices[0].device.clone())
    };
    assert_eq!(place(PolicyName::FirstFit), ("node-a".to_owned(), device("aa")));
    assert_eq!(place(PolicyName::Binpack), ("node-b".to_owned(), device("bb")));
    assert_eq!(place(PolicyName::Spread), ("node-a".to_owned(), device("aa")));
}

#[test]
fn pending_pods_come_first_except_for_higher_priority() {
    let mut fixture = Fixture::new();
    for (name, mark) in [("x", "aa"), ("y", "ab"), ("z", "ba")] {
        fixture.tenant(
            name,
            if mark == "ba" { "node-b" } else { "node-a" },
            &device(mark),
            "80Gi",
            "0",
        );
    }
    fixture.pending("old", share("70Gi", "0"));
    let result = simulated(&fixture, &(QUARTER.to_owned() + TRAINER));
    assert_eq!(
        (result.pending_before, outcomes(&result)),
        (1, vec![("trainer", SimulatedOutcome::DoesNotFit, None)])
    );
    let urgent = TRAINER.replace("spec:", "spec:\n  priority: 100");
    let result = simulated(&fixture, &(QUARTER.to_owned() + &urgent));
    assert_eq!(outcomes(&result), [("trainer", SimulatedOutcome::Fits, Some("node-b"))]);
}

#[test]
fn uses_claims_and_templates_of_the_cluster() {
    let mut fixture = Fixture::new();
    fixture.claim("held", share("19Gi", "0"));
    fixture.allocated("held", "node-b", &device("bb"), "19Gi", "0");
    let pod = TRAINER.replace("resourceClaimTemplateName: quarter", "resourceClaimName: held");
    let result = simulated(&fixture, &pod);
    assert_eq!(outcomes(&result), [("trainer", SimulatedOutcome::Fits, Some("node-b"))]);
    let result = simulated(&fixture, TRAINER);
    assert_eq!(
        result.pods[0].message,
        "ResourceClaimTemplate quarter does not exist, so the claim is not generated"
    );
}

#[test]
fn node_of_the_files_can_be_used() {
    let mut fixture = Fixture::empty();
    assert_eq!(
        outcomes(&simulated(&fixture, &(QUARTER.to_owned() + TRAINER)))[0].1,
        SimulatedOutcome::DoesNotFit
    );
    fixture.node("node-new", json!([]));
    let slice = fixture.snapshot.resource_slices.pop().unwrap();
    let mut slice = serde_json::to_value(slice).unwrap();
    slice["spec"]["devices"] =
        serde_json::to_value(&Fixture::new().snapshot.resource_slices[0].spec.devices).unwrap();
    let node = serde_json::to_value(fixture.snapshot.nodes.pop().unwrap()).unwrap();
    let hardware = format!("{node}\n---\n{slice}\n---\n");
    let result = simulated(&fixture, &(hardware + QUARTER + TRAINER));
    assert_eq!(outcomes(&result), [("trainer", SimulatedOutcome::Fits, Some("node-new"))]);
}

#[test]
fn limits_are_default_requests() {
    let fixture = Fixture::new();
    let large = TRAINER.replace("resources: {", "resources: {limits: {cpu: 33}, ");
    let result = simulated(&fixture, &(QUARTER.to_owned() + &large));
    assert_eq!(outcomes(&result), [("trainer", SimulatedOutcome::DoesNotFit, None)]);
    assert!(result.pods[0].claims[0].message.contains("on nodes with insufficient cpu"));
}

#[test]
fn existing_pod_is_not_added() {
    let mut fixture = Fixture::new();
    fixture.tenant("trainer", "node-a", &device("aa"), "19Gi", "25");
    let result = simulated(&fixture, &(QUARTER.to_owned() + TRAINER));
    assert_eq!(outcomes(&result), [("trainer", SimulatedOutcome::Exists, None)]);
}

#[test]
fn pod_without_claims_is_not_applicable() {
    let pod = "{apiVersion: v1, kind: Pod, metadata: {name: plain}, spec: {containers: [{name: c, image: i}]}}";
    assert_eq!(
        outcomes(&simulated(&Fixture::new(), pod)),
        [("plain", SimulatedOutcome::NotApplicable, None)]
    );
}

#[test]
fn notes_unknown_fields_and_priority_classes() {
    let pod = TRAINER.replace("resourceClaims:", "priorityClassName: gold\n  resourceClaim:");
    let result = simulated(&Fixture::new(), &pod);
    assert_eq!(
        result.notes,
        [
            "Pod trainer: unknown field spec.resourceClaim is ignored",
            "Pod trainer: PriorityClass gold is ignored; set spec.priority to simulate it",
        ]
    );
}

#[test]
fn reads_lists_and_generates_names() {
    let list = "
apiVersion: v1
kind: List
items:
- {apiVersion: v1, kind: Pod, metadata: {generateName: a-}, spec: {containers: []}}
- {apiVersion: batch/v1, kind: Job, metadata: {name: b}, spec: {parallelism: 3, completions: 2, template: {spec: {containers: []}}}}
";
    let result = simulated(&Fixture::new(), list);
    assert_eq!(
        outcomes(&result).iter().map(|pod| pod.0).collect::<Vec<_>>(),
        ["a-0", "b-0", "b-1"]
    );
}

#[test]
fn refuses_invalid_manifests() {
    let refused = |text: &str| try_with(&Fixture::new(), text, None).unwrap_err().to_string();
    assert_eq!(
        refused("a: b"),
        "document 1 is no Kubernetes manifest: it has no `kind` or no `apiVersion`"
    );
    assert_eq!(
        refused("{apiVersion: resource.k8s.io/v1beta1, kind: ResourceClaim, metadata: {name: c}}"),
        "ResourceClaim `c` has apiVersion `resource.k8s.io/v1beta1`; convert it to `resource.k8s.io/v1`"
    );
    assert_eq!(
        refused("{apiVersion: v1, kind: Pod, metadata: {name: p}, spec: {containers: 3}}"),
        "Pod `p` is invalid"
    );
    assert_eq!(
        refused("{apiVersion: v1, kind: Pod, metadata: {name: P_}, spec: {containers: []}}"),
        "Pod has an invalid `metadata.name`"
    );
    assert!(refused("").starts_with("nothing to simulate"));
    assert_eq!(refused("a: [b"), "neither YAML nor JSON");
}

#[test]
fn cause_of_an_invalid_config_is_printed_once() {
    let invalid = QUARTER.replace(
        "    devices:\n",
        "    devices:\n      config:\n      - opaque:\n          driver: gpu.tessera.dev\n          parameters: {apiVersion: gpu.tessera.dev/v1alpha1, kind: GpuConfig, placment: {}}\n",
    );
    let text = simulate::text(&simulated(&Fixture::new(), &(invalid + TRAINER)), true);
    assert_eq!(text.matches("placment").count(), 1, "{text}");
}

/// Selectors compile, and the planner accepts configurations and constraints: a pod fits, or lacks
/// GPUs as it asks for.
#[test]
fn converted_pods_of_other_systems_are_planned() {
    let mut fixture = Fixture::new();
    fixture.node("big", fixture::h100s(8));
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../dialect/tests/examples");
    let (mut fit, mut short) = (Vec::new(), Vec::new());
    for dialect in tessera_dialect::Dialect::ALL {
        let settings = tessera_dialect::Settings::with_defaults(&[dialect]);
        let converter = tessera_dialect::Converter::new(settings).unwrap();
        let (namespace, paths) = ("team-a", &[]);
        let conversions = Conversions {
            converter: &converter,
            namespace,
            template_paths: paths,
            add_tolerations: false,
        };
        let directory = [root.join(dialect.name())];
        for file in ManifestFile::read_all(&directory, false).unwrap() {
            let converted = conversions.convert(std::slice::from_ref(&file)).unwrap();
            if converted.report.objects[0].templates.is_empty() {
                continue;
            }
            let pod = &simulated(&fixture, &converted.manifests).pods[0];
            match pod.result {
                SimulatedOutcome::Fits => fit.push(pod.pod.clone()),
                other => short.push(format!("{} {other:?}: {}", pod.pod, pod.message)),
            }
        }
    }
    assert!(fit.len() > 60, "{} fit; {short:#?}", fit.len());
    // The other one names a node that the cluster does not have.
    let is_valid =
        |text: &String| text.contains("GPUs available") || text.contains("bound to node node-1");
    assert!(short.iter().all(is_valid), "{short:#?}");
}

/// All GPUs in use, by pods with these priorities.
fn full(priorities: [i32; 4]) -> Fixture {
    let mut fixture = Fixture::new();
    let gpus = [("node-a", "aa"), ("node-a", "ab"), ("node-b", "ba"), ("node-b", "bb")];
    for ((node, gpu), priority) in gpus.into_iter().zip(priorities) {
        let name = format!("tenant-{gpu}");
        fixture.tenant(&name, node, &device(gpu), "70Gi", "50");
        let pods = &mut fixture.snapshot.pods;
        let pod = pods.iter_mut().find(|pod| pod.metadata.name.as_ref() == Some(&name)).unwrap();
        pod.spec.as_mut().unwrap().priority = Some(priority);
    }
    fixture
}

/// The trainer with a pod spec that begins with this.
fn trainer_with(spec: &str) -> String {
    QUARTER.to_owned() + &TRAINER.replace("spec:\n", &format!("spec:\n  {spec}\n"))
}

#[test]
fn preemption_names_node_and_pods_to_evict() {
    let fixture = full([300, 300, 20, 10]);
    let result = with_preemption(&fixture, &trainer_with("priority: 100"));
    assert_eq!(outcomes(&result), [("trainer", SimulatedOutcome::DoesNotFit, None)]);
    let preemption = result.pods[0].preemption.as_ref().unwrap();
    assert_eq!(preemption.nodes, ["node-b"]);
    let victims = preemption.victims.iter().map(|v| (v.pod.as_str(), v.priority));
    assert_eq!(victims.collect::<Vec<_>>(), [("tenant-bb", 10)]);
    let text = simulate::text(&result, true);
    let sentence =
        "It would fit on node node-b if these pods were evicted: team-a/tenant-bb (priority 10).";
    assert!(text.split_whitespace().collect::<Vec<_>>().join(" ").contains(sentence), "{text}");
    assert!(!result.fits(), "nothing is evicted");
    // Without the option nothing is searched.
    let plain = simulated(&fixture, &trainer_with("priority: 100"));
    assert_eq!(plain.pods[0].preemption, None);
}

#[test]
fn preemption_for_a_group_names_all_of_its_nodes() {
    let fixture = full([300, 30, 20, 300]);
    let pod = |number: usize| {
        let group = "annotations: {gpu.tessera.dev/pod-group: train, \
                     gpu.tessera.dev/pod-group-size: \"5\"}";
        let named = TRAINER.replace("name: trainer", &format!("name: trainer-{number}, {group}"));
        named.replace("spec:\n", "spec:\n  priority: 100\n")
    };
    let pods: Vec<String> = (0..5).map(pod).collect();
    let result = with_preemption(&fixture, &(QUARTER.to_owned() + &pods.join("\n---\n")));
    let preemption = result.pods[0].preemption.as_ref().unwrap();
    assert_eq!((preemption.pods, preemption.nodes.join(" ").as_str()), (5, "node-a node-b"));
    let text = simulate::text(&result, true);
    let sentence = "The group of 5 pods would fit on nodes node-a, node-b if these pods were \
                    evicted: team-a/tenant-ba (priority 20), team-a/tenant-ab (priority 30).";
    assert!(text.split_whitespace().collect::<Vec<_>>().join(" ").contains(sentence), "{text}");
}

#[test]
fn pods_without_or_against_preemption_evict_none() {
    let fixture = full([300, 300, 20, 10]);
    let lowest = with_preemption(&fixture, &trainer_with("priority: 10"));
    assert_eq!(lowest.pods[0].preemption, None, "no pod of lower priority");
    let never = trainer_with("priority: 100\n  preemptionPolicy: Never");
    let never = with_preemption(&fixture, &never);
    assert_eq!(never.pods[0].result, SimulatedOutcome::DoesNotFit);
    assert_eq!(never.pods[0].preemption, None);
    let fits = with_preemption(&Fixture::new(), &trainer_with("priority: 100"));
    assert_eq!((fits.pods[0].result, &fits.pods[0].preemption), (SimulatedOutcome::Fits, &None));
}

/// Returns a PriorityClass with these fields.
fn priority_class(name: &str, mut fields: Value) -> PriorityClass {
    fields["metadata"] = json!({"name": name});
    read(fields)
}

#[test]
fn priority_and_policy_come_from_the_priority_class() {
    let mut fixture = full([300, 300, 20, 10]);
    fixture.snapshot.priority_classes = Some(vec![
        priority_class("urgent", json!({"value": 100})),
        priority_class("patient", json!({"value": 100, "preemptionPolicy": "Never"})),
    ]);
    let victims = |fixture: &Fixture, line: &str| {
        let result = with_preemption(fixture, &trainer_with(line));
        assert_eq!(result.notes, [""; 0], "{line}");
        let preemption = result.pods[0].preemption.as_ref();
        preemption.map_or(0, |preemption| preemption.victims.len())
    };
    assert_eq!(victims(&fixture, "priorityClassName: urgent"), 1);
    assert_eq!(victims(&fixture, "priorityClassName: patient"), 0);
    let own_policy = "priorityClassName: patient\n  preemptionPolicy: PreemptLowerPriority";
    assert_eq!(victims(&fixture, own_policy), 1);
    assert_eq!(victims(&fixture, "priorityClassName: system-node-critical"), 1);
    assert_eq!(victims(&fixture, "priority: 5"), 0);

    // Without a class, the default one with the lowest value is the pod's.
    assert_eq!(victims(&fixture, "restartPolicy: Never"), 0);
    let classes = fixture.snapshot.priority_classes.as_mut().unwrap();
    classes.push(priority_class("high", json!({"value": 500, "globalDefault": true})));
    assert_eq!(victims(&fixture, "restartPolicy: Never"), 1);
    let classes = fixture.snapshot.priority_classes.as_mut().unwrap();
    classes.push(priority_class("low", json!({"value": 5, "globalDefault": true})));
    assert_eq!(victims(&fixture, "restartPolicy: Never"), 0);
}

#[test]
fn pod_of_a_missing_priority_class_is_refused() {
    let mut fixture = full([300, 300, 20, 10]);
    fixture.snapshot.priority_classes = Some(vec![priority_class("urgent", json!({"value": 100}))]);
    let gold = trainer_with("priorityClassName: gold");
    assert_eq!(
        try_with(&fixture, &gold, None).unwrap_err().to_string(),
        "Pod `trainer` has the priorityClassName `gold`, and no such PriorityClass exists (list \
         them with `kubectl get priorityclasses`, or add the class to the files)"
    );
    // A class of the manifests is created before.
    let class = "{apiVersion: scheduling.k8s.io/v1, kind: PriorityClass, value: 100, metadata: {name: gold}}";
    let result = with_preemption(&fixture, &format!("{class}\n---\n{gold}"));
    assert_eq!(result.pods[0].preemption.as_ref().unwrap().victims.len(), 1);
}

#[test]
fn class_of_the_files_leaves_those_of_the_cluster_unknown() {
    // Not permitted to list PriorityClasses: `silver` may exist.
    let fixture = full([300, 300, 20, 10]);
    let class = "{apiVersion: scheduling.k8s.io/v1, kind: PriorityClass, value: 100, metadata: {name: gold}}";
    let with = |pod: &str| format!("{class}\n---\n{}", trainer_with(pod));
    let gold = with_preemption(&fixture, &with("priorityClassName: gold"));
    assert_eq!(gold.pods[0].preemption.as_ref().unwrap().victims.len(), 1);
    let silver = with_preemption(&fixture, &with("priorityClassName: silver"));
    assert_eq!(
        silver.notes,
        ["Pod trainer: PriorityClass silver is ignored; set spec.priority to simulate it"]
    );
}

/// A Job whose pods each ask for most of a GPU.
fn job_of(pods: usize) -> String {
    let template = QUARTER.replace("memory: 19Gi", "memory: 70Gi");
    format!(
        "{template}
apiVersion: batch/v1
kind: Job
metadata: {{name: train}}
spec:
  parallelism: {pods}
  template:
    metadata: {{annotations: {{gpu.tessera.dev/pod-group-size: \"{pods}\"}}}}
    spec:
      restartPolicy: Never
      resourceClaims: [{{name: gpu, resourceClaimTemplateName: quarter}}]
      containers: [{{name: main, image: i, resources: {{claims: [{{name: gpu}}]}}}}]
"
    )
}

#[test]
fn pods_of_a_group_fit_together_or_not_at_all() {
    let single = try_with(&Fixture::new(), &job_of(1), None).unwrap();
    assert!(single.fits());
    let fits = (1..20).take_while(|pods| simulated(&Fixture::new(), &job_of(*pods)).fits()).count();
    assert!(fits > 1, "the cluster has several GPUs");
    let simulation = simulated(&Fixture::new(), &job_of(fits + 1));
    assert_eq!(simulation.pods.len(), fits + 1);
    for pod in &simulation.pods {
        assert_eq!(pod.result, SimulatedOutcome::DoesNotFit, "{}", pod.pod);
    }
    let text = simulate::text(&simulation, true);
    let expected = format!("{} pods at the same time, and there are devices for {fits}", fits + 1);
    let in_one_line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(in_one_line.contains(&expected), "{text}");
}

#[test]
fn pod_group_of_a_file_makes_a_group_of_its_pods() {
    let annotation = "metadata: {annotations: {gpu.tessera.dev/pod-group-size: \"40\"}}";
    let of_kubernetes = "scheduling.k8s.io/v1beta1\nkind: PodGroup\nmetadata: {name: train}\n\
                         spec: {schedulingPolicy: {gang: {minCount: 40}}}";
    let of_volcano = "scheduling.volcano.sh/v1beta1\nkind: PodGroup\nmetadata: {name: train}\n\
                      spec: {minMember: 40}";
    let named = "metadata: {annotations: {scheduling.k8s.io/group-name: train}}";
    let in_spec = job_of(40).replace(annotation, "").replace(
        "      resourceClaims:",
        "      schedulingGroup: {podGroupName: train}\n      resourceClaims:",
    );
    let annotated = job_of(40).replace(annotation, named);
    for (group, job) in [(of_kubernetes, in_spec), (of_volcano, annotated)] {
        let simulation = simulated(&Fixture::new(), &format!("apiVersion: {group}\n---\n{job}"));
        assert_eq!(simulation.pods.len(), 40);
        assert!(!simulation.pods.iter().any(|pod| pod.result == SimulatedOutcome::Fits), "{group}");
        let text = simulate::text(&simulation, true);
        let in_one_line = text.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(in_one_line.contains("devices for 40 pods at the same time"), "{text}");
    }
}
