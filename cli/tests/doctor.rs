//! Problems that `doctor` finds.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod fixture;

use fixture::{Fixture, device, golden, read, share};
use k8s_openapi::api::core::v1::Event;
use serde_json::{Value, json};
use tessera_allocator::PlanSettings;
use tessera_cli::doctor::{self, Diagnosis, Severity};
use tessera_cli::explain::PlanView;
use tessera_cli::output::{OutputFormat, render};
use tessera_cli::snapshot::NotRead;
use tessera_cli::tree::{GpuTree, TreeFilter};

fn diagnosis(fixture: &Fixture, events: &[Event]) -> Diagnosis {
    let indexed = fixture.snapshot.indexed();
    let now = fixture.snapshot.taken_at;
    let view = PlanView::new(&fixture.snapshot, &indexed, PlanSettings::default(), now);
    let tree = GpuTree::read(&indexed.index, &TreeFilter::default());
    Diagnosis::new(&view, &tree, &indexed.refused, events)
}

/// A cluster without the failed GPU of node-c.
fn in_order() -> Fixture {
    let mut fixture = Fixture::new();
    fixture.snapshot.resource_slices.retain(|s| s.spec.node_name.as_deref() != Some("node-c"));
    fixture
}

fn codes(diagnosis: &Diagnosis) -> Vec<(Severity, &str)> {
    diagnosis.problems.iter().map(|problem| (problem.severity, problem.code.as_str())).collect()
}

/// A pod that asks for an extended resource, and for no claim.
fn asking(name: &str, resource: &str) -> Value {
    json!({
        "metadata": {"namespace": "team-a", "name": name, "uid": name},
        "spec": {"containers": [{"name": "c", "resources": {
            "requests": {resource: "1"}, "limits": {resource: "1"},
        }}]},
        "status": {"phase": "Pending"},
    })
}

#[test]
fn a_cluster_in_order_has_no_problems() {
    let mut fixture = in_order();
    fixture.tenant("trainer", "node-a", &device("aa"), "19Gi", "25");
    let found = diagnosis(&fixture, &[]);
    assert_eq!(codes(&found), []);
    assert!(!found.has_problems());
    assert_eq!(doctor::text(&found), "no problems found: 4 GPUs on 2 nodes\n");
}

#[test]
fn slices_without_the_rule_that_fences_them_are_found() {
    let mut fixture = in_order();
    for slice in &mut fixture.snapshot.resource_slices {
        let fence = ("gpu.tessera.dev/fence".to_owned(), "DeviceTaintRule".to_owned());
        slice.metadata.annotations.get_or_insert_default().extend([fence]);
        let devices = slice.spec.devices.iter_mut().flatten();
        devices.for_each(|device| device.taints = None);
    }
    let rule = |effect: &str| {
        let taint = json!({"key": "gpu.tessera.dev/managed", "effect": effect});
        let spec = json!({"deviceSelector": {"driver": "gpu.tessera.dev"}, "taint": taint});
        vec![read(json!({"metadata": {"name": "tessera-fence"}, "spec": spec}))]
    };
    let missing = [(Severity::Error, "FenceMissing")];
    assert_eq!(codes(&diagnosis(&fixture, &[])), missing);
    fixture.snapshot.device_taint_rules = rule("None");
    assert_eq!(codes(&diagnosis(&fixture, &[])), missing);
    fixture.snapshot.device_taint_rules = rule("NoSchedule");
    assert_eq!(codes(&diagnosis(&fixture, &[])), [], "the GPUs are managed, and nothing lacks");
    fixture.snapshot.device_taint_rules.clear();
    let resource = "devicetaintrules.resource.k8s.io".to_owned();
    fixture.snapshot.not_read = vec![NotRead { resource, because: "forbidden".to_owned() }];
    assert_eq!(codes(&diagnosis(&fixture, &[])), [(Severity::Info, "NotChecked")]);
}

#[test]
fn problems_name_their_objects_and_what_to_do() {
    let mut fixture = Fixture::new();
    fixture.lease("2026-01-10T09:00:00Z");
    fixture.tenant("batch", "node-b", &device("ba"), "90Gi", "0");
    fixture.pending("huge", share("200Gi", "0"));
    fixture.quota("wrong", json!({"disk": "1"}));
    for pod in 0..7 {
        fixture.snapshot.pods.push(read(asking(&format!("classic-{pod}"), "nvidia.com/gpu")));
    }
    fixture.snapshot.device_classes[0].spec.as_mut().unwrap().extended_resource_name =
        Some("example.com/gpu".to_owned());
    let ours = "deviceclass.resource.kubernetes.io/gpu.tessera.dev";
    fixture.snapshot.pods.push(read(asking("ours", ours)));
    let event: Event = read(json!({
        "metadata": {"name": "e"}, "involvedObject": {"kind": "Node", "name": "node-a"},
        "reason": "GpuMemoryUnaccounted", "message": "GPU-aa: 3 GiB of pod team-b/notebook",
    }));
    let found = diagnosis(&fixture, &[event]);
    golden("doctor.txt", &doctor::text(&found));
    golden("doctor.json", &render(&found, OutputFormat::Json, |_| String::new()).unwrap());
    assert!(found.has_problems());
    assert_eq!(
        codes(&found),
        [
            (Severity::Error, "ControllerDown"),
            (Severity::Error, "Overcommitted"),
            (Severity::Error, "Unhealthy"),
            (Severity::Warning, "ExtendedResource"),
            (Severity::Warning, "ExtendedResourceName"),
            (Severity::Warning, "GpuMemoryUnaccounted"),
            (Severity::Warning, "ObjectIgnored"),
            (Severity::Info, "ExtendedResource"),
            (Severity::Info, "PodsPending"),
        ]
    );
}

#[test]
fn no_controller_is_missed_in_stock_mode() {
    let mut fixture = in_order();
    fixture.snapshot.leases.clear();
    assert_eq!(codes(&diagnosis(&fixture, &[])), [(Severity::Error, "ControllerAbsent")]);
    let slices = &mut fixture.snapshot.resource_slices;
    for device in slices.iter_mut().flat_map(|slice| slice.spec.devices.iter_mut().flatten()) {
        device.taints = None;
    }
    let found = diagnosis(&fixture, &[]);
    assert_eq!(codes(&found), [(Severity::Info, "NotManaged")]);
}

#[test]
fn bound_pods_of_another_system_are_no_problem() {
    let mut fixture = in_order();
    let mut pod = asking("served", "nvidia.com/gpu");
    pod["spec"]["nodeName"] = "node-a".into();
    fixture.snapshot.pods.push(read(pod));
    fixture.snapshot.pods.push(read(asking("cpu", "example.com/fpga")));
    assert_eq!(codes(&diagnosis(&fixture, &[])), []);
}
