//! What `kubectl tessera explain` says.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod stage;

use k8s_openapi::api::core::v1::Event;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use serde_json::json;
use stage::{Stage, device, golden, read, share};
use tessera_allocator::{Settings, plan};
use tessera_api::names::{ClaimName, Namespace, PodName};
use tessera_cli::explain::{self, PodReport, PodState, Report, View};
use tessera_cli::output::{Format, render};
use tessera_messages as message;

/// Every GPU of node-a and node-b is nearly full.
fn full() -> Stage {
    let mut stage = Stage::new();
    for (pod, node, mark) in
        [("a", "node-a", "aa"), ("b", "node-a", "ab"), ("c", "node-b", "ba"), ("d", "node-b", "bb")]
    {
        stage.tenant(pod, node, &device(mark), "70Gi", "10");
    }
    stage
}

fn pod_with(stage: &Stage, name: &str, events: &[Event]) -> PodReport {
    let picture = stage.snapshot.picture();
    let view = View::new(&stage.snapshot, &picture, Settings::default(), stage.snapshot.taken_at);
    explain::pod(&view, &Namespace::new("team-a").unwrap(), &PodName::new(name).unwrap(), events)
        .unwrap()
}

fn pod(stage: &Stage, name: &str) -> PodReport {
    pod_with(stage, name, &[])
}

fn claim(stage: &Stage, name: &str) -> Report {
    let picture = stage.snapshot.picture();
    let view = View::new(&stage.snapshot, &picture, Settings::default(), stage.snapshot.taken_at);
    explain::claim(&view, &Namespace::new("team-a").unwrap(), &ClaimName::new(name).unwrap())
        .unwrap()
}

fn text(report: &PodReport) -> String {
    explain::pod_text(report, stage::NOW.parse().unwrap())
}

fn codes(report: &PodReport) -> Vec<&str> {
    report.findings.iter().map(|finding| finding.code).collect()
}

#[test]
fn a_pod_that_fits_nowhere_is_told_the_devices_by_reason_and_the_nodes_they_are_on() {
    let mut stage = full();
    stage.node_is("node-b", |node| node.spec.get_or_insert_default().unschedulable = Some(true));
    stage.claim("trainer-gpu", share("19Gi", "25"));
    stage.pod("trainer", &["trainer-gpu"]);
    let report = pod(&stage, "trainer");
    assert_eq!(report.state, PodState::Waiting);
    golden("explain-waiting.txt", &text(&report));
    golden("explain-waiting.json", &render(&report, Format::Json, |_| String::new()).unwrap());
}

#[test]
fn a_claim_that_the_pods_status_does_not_name_is_found_out() {
    let mut stage = Stage::new();
    stage.claim_of("trainer-gpu-x", json!([share("19Gi", "25")]), Some("trainer"));
    stage.made_for("trainer-gpu-x", "gpu");
    stage.pod("trainer", &[]).spec.as_mut().unwrap().resource_claims =
        Some(vec![read(json!({"name": "gpu", "resourceClaimTemplateName": "t"}))]);
    assert_eq!(codes(&pod(&stage, "trainer")), ["PodStatusMissingClaim"], "not allocated yet");
    let created = stage.snapshot.pods.last().unwrap().metadata.creation_timestamp.clone().unwrap();
    let new = &mut stage.snapshot.pods.last_mut().unwrap().metadata;
    new.creation_timestamp = Some(Time(stage::NOW.parse().unwrap()));
    assert_eq!(codes(&pod(&stage, "trainer")), [""; 0], "of any new pod that is so for a moment");
    stage.snapshot.pods.last_mut().unwrap().metadata.creation_timestamp = Some(created);
    stage.allocated("trainer-gpu-x", "node-a", &device("aa"), "19Gi", "25");
    let report = pod(&stage, "trainer");
    assert_eq!(
        (report.state, codes(&report)),
        (PodState::ForScheduler, vec!["PodStatusMissingClaim"])
    );
    assert!(text(&report).contains("delete the pod to start over"), "{}", text(&report));
    let waiting = stage.snapshot.pods.last_mut().unwrap();
    waiting.status.get_or_insert_default().resource_claim_statuses =
        Some(vec![read(json!({"name": "gpu", "resourceClaimName": "trainer-gpu-x"}))]);
    assert_eq!(codes(&pod(&stage, "trainer")), [""; 0]);
}

#[test]
fn the_words_are_those_of_the_controllers_event() {
    let mut stage = full();
    stage.claim("trainer-gpu", share("19Gi", "25"));
    stage.pod("trainer", &["trainer-gpu"]);
    let index = stage.snapshot.picture().index;
    let now = stage::NOW.parse::<Timestamp>().unwrap().as_second();
    let told =
        plan(&index.snapshot(), &index.work().pending, Settings { now, ..Settings::default() });
    let [refusal] = told.refusals.as_slice() else { panic!("one claim is refused") };
    let report = pod(&stage, "trainer");
    assert_eq!(
        report.claims[0].message,
        message::note("trainer-gpu", &refusal.cause, told.kept_for(&refusal.pod))
    );
    assert_eq!(report.claims[0].reason, message::reason(&refusal.cause));
}

#[test]
fn of_several_requests_each_is_also_looked_at_by_itself() {
    let mut stage = full();
    let mut large = share("79Gi", "0");
    large["name"] = "large".into();
    stage.claim_of("trainer-gpu", json!([share("1Gi", "0"), large]), None);
    stage.pod("trainer", &["trainer-gpu"]);
    let report = pod(&stage, "trainer");
    let fits: Vec<(&str, bool)> = report.claims[0]
        .requests
        .iter()
        .map(|request| (request.request.as_str(), request.fits))
        .collect();
    assert_eq!(fits, [("gpu", true), ("large", false)]);
    golden("explain-requests.txt", &text(&report));
}

#[test]
fn a_pod_that_fits_and_is_not_placed_points_at_the_controller_that_is_not_at_work() {
    let mut stage = Stage::new();
    stage.claim("trainer-gpu", share("19Gi", "25"));
    stage.pod("trainer", &["trainer-gpu"]);
    let report = pod(&stage, "trainer");
    assert_eq!((report.state, codes(&report)), (PodState::Placeable, vec![]));
    stage.lease("2026-01-10T11:50:00Z");
    golden("explain-controller-down.txt", &text(&pod(&stage, "trainer")));
    stage.snapshot.leases[0].spec.as_mut().unwrap().holder_identity = Some(String::new());
    assert!(pod(&stage, "trainer").findings[0].message.contains("gave its Lease back"));
    stage.snapshot.leases.clear();
    assert_eq!(codes(&pod(&stage, "trainer")), ["ControllerAbsent"]);
}

#[test]
fn a_lease_within_its_time_and_the_difference_of_two_clocks_is_held() {
    let mut stage = Stage::new();
    stage.claim("trainer-gpu", share("19Gi", "25"));
    stage.pod("trainer", &["trainer-gpu"]);
    stage.lease("2026-01-10T11:59:30Z");
    assert_eq!(codes(&pod(&stage, "trainer")), Vec::<&str>::new());
    stage.lease("2026-01-10T11:59:29Z");
    assert_eq!(codes(&pod(&stage, "trainer")), ["ControllerDown"]);
}

#[test]
fn a_pod_that_would_fit_but_for_older_ones_is_told_that() {
    let mut stage = full();
    stage.claim("first-gpu", share("8Gi", "0"));
    stage.pod("first", &["first-gpu"]);
    for older in ["second", "third", "fourth"] {
        let claim = format!("{older}-gpu");
        stage.claim(&claim, share("8Gi", "0"));
        stage.pod(older, &[&claim]);
    }
    stage.claim("last-gpu", share("8Gi", "0"));
    stage.pod("last", &["last-gpu"]);
    let report = pod(&stage, "last");
    assert_eq!(report.state, PodState::Waiting);
    assert!(
        report.message.contains("if it were not for 4 waiting pods that come before it"),
        "{}",
        report.message
    );
}

#[test]
fn a_pod_that_waits_for_a_gpu_in_use_by_mps_is_told_so_and_the_one_that_has_it_too() {
    let mut stage = Stage::new();
    for (pod, node, mark) in
        [("a", "node-a", "aa"), ("b", "node-a", "ab"), ("c", "node-b", "ba"), ("d", "node-b", "bb")]
    {
        stage.tenant(pod, node, &device(mark), "19Gi", "0");
        stage.shared_by(&format!("{pod}-gpu"), "MPS");
    }
    stage.claim("trainer-gpu", share("30Gi", "0"));
    stage.pod("trainer", &["trainer-gpu"]);
    let (waits, has) = (text(&pod(&stage, "trainer")), text(&pod(&stage, "a")));
    assert!(waits.contains("allocated with sharing MPS"), "{waits}");
    assert!(has.contains("has gpu: gpu-1f0c2daa: memory 19Gi, by MPS\n"), "{has}");
}

#[test]
fn a_bound_pod_is_shown_with_its_devices() {
    let report = pod(&full(), "a");
    assert_eq!(report.state, PodState::Bound);
    golden("explain-bound.txt", &text(&report));
}

#[test]
fn a_pod_that_is_bound_elsewhere_than_its_claim_is_told_in_the_words_of_the_event() {
    let mut stage = Stage::new();
    stage.tenant("trainer", "node-a", &device("aa"), "19Gi", "25");
    stage.snapshot.pods[0].spec.as_mut().unwrap().node_name = Some("node-b".to_owned());
    stage.snapshot.pods[0].status.as_mut().unwrap().phase = Some("Pending".to_owned());
    let report = pod(&stage, "trainer");
    assert_eq!(report.state, PodState::Misplaced);
    assert_eq!(
        report.message,
        "the pod is bound to node node-b, but ResourceClaim trainer-gpu is allocated on node node-a; no pod uses it there, \
         so it will be moved to the pod's node"
    );
}

#[test]
fn a_scheduling_gate_is_named_with_what_would_be_without_it() {
    let mut stage = Stage::new();
    stage.claim("trainer-gpu", share("19Gi", "25"));
    let pod_object = stage.pod("trainer", &["trainer-gpu"]);
    pod_object.spec.as_mut().unwrap().scheduling_gates =
        Some(read(json!([{"name": "kueue.x-k8s.io/admission"}])));
    let report = pod(&stage, "trainer");
    assert_eq!(report.state, PodState::Gated);
    assert_eq!(
        report.message,
        "scheduling gate kueue.x-k8s.io/admission holds it back; it is planned once whoever set that has removed it; now it \
         would fit on node node-a"
    );
}

#[test]
fn a_class_that_does_not_exist_is_named() {
    let mut stage = Stage::new();
    let mut request = share("19Gi", "25");
    request["exactly"]["deviceClassName"] = "h200.gpu.tessera.dev".into();
    stage.claim("trainer-gpu", request);
    stage.pod("trainer", &["trainer-gpu"]);
    let report = pod(&stage, "trainer");
    assert_eq!(report.claims[0].reason, "UnknownDeviceClass");
    assert_eq!(report.message, report.claims[0].message);
    assert!(report.claims[0].message.contains("`h200.gpu.tessera.dev`, which does not exist"));
}

#[test]
fn a_claim_for_another_driver_is_called_kube_schedulers() {
    let mut stage = Stage::new();
    stage.claim(
        "nic",
        json!({"name": "nic", "exactly": {"deviceClassName": "foreign.example.com"}}),
    );
    stage.pod("trainer", &["nic"]);
    let report = pod(&stage, "trainer");
    assert_eq!((report.state, report.claims[0].reason.as_str()), (PodState::Foreign, "Foreign"));
    assert!(claim(&stage, "nic").message.contains("kube-scheduler allocates it"));
}

#[test]
fn a_claim_that_mixes_drivers_is_told_to_be_split() {
    let mut stage = Stage::new();
    let foreign = json!({"name": "nic", "exactly": {"deviceClassName": "foreign.example.com"}});
    stage.claim_of("mixed", json!([share("1Gi", "0"), foreign]), None);
    stage.pod("trainer", &["mixed"]);
    let report = pod(&stage, "trainer");
    assert_eq!(
        (report.state, report.claims[0].reason.as_str()),
        (PodState::Blocked, "MixedDrivers")
    );
    assert!(report.message.contains("split it into one claim per driver"));
}

#[test]
fn what_a_claim_lacks_is_said_whether_it_is_the_claim_or_its_template() {
    let mut stage = Stage::new();
    let from = |template: &str| json!([{"name": "gpu", "resourceClaimTemplateName": template}]);
    stage.pod("late", &[]).spec.as_mut().unwrap().resource_claims = read(from("quarter"));
    assert_eq!(
        pod(&stage, "late").message,
        "ResourceClaimTemplate quarter does not exist, so there is no claim yet"
    );
    stage.snapshot.resource_claim_templates = vec![read(json!({
        "metadata": {"namespace": "team-a", "name": "quarter"}, "spec": {"spec": {"devices": {}}},
    }))];
    assert!(
        pod(&stage, "late")
            .message
            .contains("has not been made from ResourceClaimTemplate quarter yet")
    );
    stage.pod("lost", &["nowhere"]);
    assert_eq!(pod(&stage, "lost").message, "ResourceClaim nowhere does not exist");
}

#[test]
fn an_allocated_pod_waits_for_kube_scheduler_whose_words_are_repeated() {
    let mut stage = Stage::new();
    stage.claim("trainer-gpu", share("19Gi", "25"));
    stage.allocated("trainer-gpu", "node-a", &device("aa"), "19Gi", "25");
    let pod_object = stage.pod("trainer", &["trainer-gpu"]);
    pod_object.status.as_mut().unwrap().conditions = read(json!([
        {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes are available"},
    ]));
    let report = pod(&stage, "trainer");
    assert_eq!(report.state, PodState::ForScheduler);
    assert_eq!(
        report.message,
        "its claims are allocated on node node-a; kube-scheduler has to bind it; its last word: 0/3 nodes are available"
    );
}

#[test]
fn a_pod_that_may_not_spill_is_told_what_to_say_where_memory_is_oversubscribed() {
    let mut stage = Stage::empty();
    stage.claim("trainer-gpu", share("19Gi", "25"));
    stage.pod("trainer", &["trainer-gpu"]);
    stage.node("node-a", json!([stage::oversubscribed("aa")]));
    let told = text(&pod(&stage, "trainer"));
    assert!(
        told.contains("oversubscribed (the claim must set memory.oversubscribe: true)"),
        "{told}"
    );
}

#[test]
fn a_cluster_without_devices_and_one_in_mode_stock_are_told_apart() {
    let mut stage = Stage::empty();
    stage.claim("trainer-gpu", share("19Gi", "25"));
    stage.pod("trainer", &["trainer-gpu"]);
    assert_eq!(codes(&pod(&stage, "trainer")), ["NoDevicesPublished"]);
    stage.node("node-a", json!([{"name": "gpu-0", "allowMultipleAllocations": true, "capacity": {"memory": {"value": "80Gi"}}}]));
    assert_eq!(codes(&pod(&stage, "trainer")), ["NotManaged"]);
}

#[test]
fn events_of_our_parts_are_repeated_the_last_of_each_reason() {
    let mut stage = Stage::new();
    stage.claim("trainer-gpu", share("19Gi", "25"));
    stage.pod("trainer", &["trainer-gpu"]);
    let event = |by: &str, reason: &str, message: &str, at: &str| -> Event {
        read(json!({"metadata": {}, "involvedObject": {}, "reason": reason, "message": message,
                    "reportingComponent": by, "lastTimestamp": at}))
    };
    let events = [
        event("tessera-controller", "InsufficientDevices", "old news", "2026-01-10T11:00:00Z"),
        event("default-scheduler", "FailedScheduling", "not ours", "2026-01-10T11:30:00Z"),
        event("tessera-controller", "InsufficientDevices", "news", "2026-01-10T11:58:00Z"),
    ];
    let report = pod_with(&stage, "trainer", &events);
    let told: Vec<&str> = report.events.iter().map(|said| said.message.as_str()).collect();
    assert_eq!(told, ["news"]);
    assert!(
        text(&report).ends_with("  2m ago, tessera-controller, InsufficientDevices: news\n"),
        "{}",
        text(&report)
    );
}

#[test]
fn a_claim_is_explained_through_the_pods_that_use_it() {
    let mut stage = full();
    stage.claim("shared-gpu", share("19Gi", "25"));
    stage.pod("trainer", &["shared-gpu"]);
    stage.pod("second", &["shared-gpu"]);
    let report = claim(&stage, "shared-gpu");
    assert!(report.waits);
    assert_eq!(
        report.pods.iter().map(|pod| pod.pod.as_str()).collect::<Vec<_>>(),
        ["second", "trainer"]
    );
    assert!(report.pods.iter().all(|pod| pod.state == PodState::Waiting));
    let held = claim(&stage, "a-gpu");
    golden("explain-claim.txt", &explain::claim_text(&held, stage.snapshot.taken_at));
    stage.claim("idle", share("1Gi", "0"));
    assert!(claim(&stage, "idle").message.starts_with("no pod uses it"));
}

#[test]
fn a_pod_that_shares_a_claim_with_another_fits_where_that_one_does() {
    let mut stage = Stage::new();
    stage.claim("shared-gpu", share("19Gi", "25"));
    stage.pod("first", &["shared-gpu"]);
    stage.pod("second", &["shared-gpu"]);
    let (first, second) = (pod(&stage, "first"), pod(&stage, "second"));
    assert_eq!((first.state, second.state), (PodState::Placeable, PodState::Placeable));
    assert_eq!((first.node.as_deref(), second.node), (Some("node-a"), first.node.clone()));
}

#[test]
fn a_name_in_another_namespace_is_pointed_to() {
    let mut stage = Stage::new();
    stage.pod("trainer", &[]);
    let picture = stage.snapshot.picture();
    let view = View::new(&stage.snapshot, &picture, Settings::default(), stage.snapshot.taken_at);
    let error = explain::pod(
        &view,
        &Namespace::new("default").unwrap(),
        &PodName::new("trainer").unwrap(),
        &[],
    );
    assert_eq!(
        error.unwrap_err().to_string(),
        "no Pod `trainer` in namespace `default`; there is one in team-a: choose with -n NAMESPACE"
    );
}
