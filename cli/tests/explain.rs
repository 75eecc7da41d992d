//! Explanations of pods and claims.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod fixture;

use fixture::{Fixture, device, golden, read, share};
use k8s_openapi::api::core::v1::Event;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use serde_json::json;
use tessera_allocator::{PlanSettings, plan};
use tessera_api::names::{ClaimName, Namespace, PodName};
use tessera_cli::explain::{self, ClaimReport, ExplainError, PlanView, PodReport, PodState};
use tessera_cli::output::{OutputFormat, render};
use tessera_cli::snapshot::{self, IndexedSnapshot};
use tessera_messages as message;

/// A cluster in which every GPU of node-a and node-b is nearly full.
fn full() -> Fixture {
    let mut fixture = Fixture::new();
    for (pod, node, mark) in
        [("a", "node-a", "aa"), ("b", "node-a", "ab"), ("c", "node-b", "ba"), ("d", "node-b", "bb")]
    {
        fixture.tenant(pod, node, &device(mark), "70Gi", "10");
    }
    fixture
}

/// Returns a cluster with free GPUs and the pending pod `trainer`.
fn with_pending_pod() -> Fixture {
    let mut fixture = Fixture::new();
    fixture.pending("trainer", share("19Gi", "25"));
    fixture
}

fn view<'a>(fixture: &'a Fixture, indexed: &'a IndexedSnapshot) -> PlanView<'a> {
    PlanView::new(&fixture.snapshot, indexed, PlanSettings::default(), fixture.snapshot.taken_at)
}

fn pod_with(fixture: &Fixture, name: &str, events: &[Event]) -> PodReport {
    let indexed = fixture.snapshot.indexed();
    let view = view(fixture, &indexed);
    explain::pod(&view, &Namespace::new("team-a").unwrap(), &PodName::new(name).unwrap(), events)
        .unwrap()
}

fn pod(fixture: &Fixture, name: &str) -> PodReport {
    pod_with(fixture, name, &[])
}

fn claim(fixture: &Fixture, name: &str) -> ClaimReport {
    let indexed = fixture.snapshot.indexed();
    let view = view(fixture, &indexed);
    explain::claim(&view, &Namespace::new("team-a").unwrap(), &ClaimName::new(name).unwrap())
        .unwrap()
}

fn text(report: &PodReport) -> String {
    explain::pod_text(report, fixture::NOW.parse().unwrap())
}

fn codes(report: &PodReport) -> Vec<&str> {
    report.findings.iter().map(|finding| finding.code).collect()
}

fn set_priority(fixture: &mut Fixture, name: &str, priority: i32) {
    let pods = &mut fixture.snapshot.pods;
    let pod = pods.iter_mut().find(|pod| pod.metadata.name.as_deref() == Some(name)).unwrap();
    pod.spec.as_mut().unwrap().priority = Some(priority);
}

#[test]
fn pod_that_waits_names_the_pods_to_evict() {
    let mut fixture = full();
    fixture.pending("trainer", share("19Gi", "25"));
    assert!(!text(&pod(&fixture, "trainer")).contains("evicted"), "all have the same priority");
    for (name, priority) in [("a", 300), ("b", 300), ("c", 300), ("d", 10), ("trainer", 100)] {
        set_priority(&mut fixture, name, priority);
    }
    let report = pod(&fixture, "trainer");
    let sentence =
        "It would fit on node node-b if these pods were evicted: team-a/d (priority 10).";
    assert!(report.message.ends_with(sentence), "{}", report.message);
    assert!(report.hint.unwrap().starts_with("wait: the controller evicts them"));
    // It is being deleted.
    let pods = &mut fixture.snapshot.pods;
    let victim = pods.iter_mut().find(|pod| pod.metadata.name.as_deref() == Some("d")).unwrap();
    victim.metadata.deletion_timestamp = Some(Time(fixture::NOW.parse().unwrap()));
    let report = pod(&fixture, "trainer");
    let sentence = "It fits on node node-b once pods there have ended.";
    assert!(report.message.ends_with(sentence), "{}", report.message);
}

#[test]
fn pending_pod_is_explained_by_node_and_reason() {
    let mut fixture = full();
    fixture
        .change_node("node-b", |node| node.spec.get_or_insert_default().unschedulable = Some(true));
    fixture.pending("trainer", share("19Gi", "25"));
    let report = pod(&fixture, "trainer");
    assert_eq!(report.state, PodState::Pending);
    golden("explain-pending.txt", &text(&report));
    golden(
        "explain-pending.json",
        &render(&report, OutputFormat::Json, |_| String::new()).unwrap(),
    );
}

#[test]
fn pod_status_without_a_claim_is_found() {
    let mut fixture = Fixture::new();
    fixture.claim_with("trainer-gpu-x", json!([share("19Gi", "25")]), Some("trainer"));
    fixture.generated_for("trainer-gpu-x", "gpu");
    fixture.pod("trainer", &[]).spec.as_mut().unwrap().resource_claims =
        Some(vec![read(json!({"name": "gpu", "resourceClaimTemplateName": "t"}))]);
    assert_eq!(codes(&pod(&fixture, "trainer")), ["PodStatusMissingClaim"], "not allocated yet");
    let created =
        fixture.snapshot.pods.last().unwrap().metadata.creation_timestamp.clone().unwrap();
    let new = &mut fixture.snapshot.pods.last_mut().unwrap().metadata;
    new.creation_timestamp = Some(Time(fixture::NOW.parse().unwrap()));
    assert_eq!(codes(&pod(&fixture, "trainer")), [""; 0], "normal for a new pod");
    fixture.snapshot.pods.last_mut().unwrap().metadata.creation_timestamp = Some(created);
    fixture.allocated("trainer-gpu-x", "node-a", &device("aa"), "19Gi", "25");
    let report = pod(&fixture, "trainer");
    assert_eq!(
        (report.state, codes(&report)),
        (PodState::PendingScheduling, vec!["PodStatusMissingClaim"])
    );
    let advice = &report.findings[0].message;
    assert!(advice.contains("delete the pod to start over"), "{advice}");
    let listed = fixture.snapshot.pods.last_mut().unwrap();
    listed.status.get_or_insert_default().resource_claim_statuses =
        Some(vec![read(json!({"name": "gpu", "resourceClaimName": "trainer-gpu-x"}))]);
    assert_eq!(codes(&pod(&fixture, "trainer")), [""; 0]);
}

#[test]
fn message_is_that_of_the_event() {
    let mut fixture = full();
    fixture.pending("trainer", share("19Gi", "25"));
    let index = fixture.snapshot.indexed().index;
    let now = fixture::NOW.parse::<Timestamp>().unwrap().as_second();
    let plan = plan(
        &index.snapshot(),
        &index.work().pending,
        PlanSettings { now, ..PlanSettings::default() },
    );
    let [refusal] = plan.refusals.as_slice() else { panic!("one claim is refused") };
    let report = pod(&fixture, "trainer");
    assert_eq!(
        report.claims[0].message,
        message::refusal_message("trainer-gpu", &refusal.cause, plan.reserved_for(&refusal.pod))
    );
    assert_eq!(report.claims[0].reason, message::refusal_reason(&refusal.cause).name());
}

#[test]
fn several_requests_are_also_explained_one_by_one() {
    let mut fixture = full();
    let mut large = share("79Gi", "0");
    large["name"] = "large".into();
    fixture.claim_with("trainer-gpu", json!([share("1Gi", "0"), large]), None);
    fixture.pod("trainer", &["trainer-gpu"]);
    let report = pod(&fixture, "trainer");
    let fits: Vec<(&str, bool)> = report.claims[0]
        .requests
        .iter()
        .map(|request| (request.request.as_str(), request.fits))
        .collect();
    assert_eq!(fits, [("gpu", true), ("large", false)]);
    golden("explain-requests.txt", &text(&report));
}

#[test]
fn schedulable_pod_shows_that_no_controller_runs() {
    let mut fixture = with_pending_pod();
    let report = pod(&fixture, "trainer");
    assert_eq!((report.state, codes(&report)), (PodState::Schedulable, vec![]));
    fixture.lease("2026-01-10T11:50:00Z");
    golden("explain-controller-down.txt", &text(&pod(&fixture, "trainer")));
    fixture.snapshot.leases[0].spec.as_mut().unwrap().holder_identity = Some(String::new());
    assert!(pod(&fixture, "trainer").findings[0].message.contains("released its Lease"));
    fixture.snapshot.leases.clear();
    assert_eq!(codes(&pod(&fixture, "trainer")), ["ControllerAbsent"]);
}

#[test]
fn lease_expires_after_its_duration_and_clock_skew() {
    let mut fixture = with_pending_pod();
    fixture.lease("2026-01-10T11:59:30Z");
    assert_eq!(codes(&pod(&fixture, "trainer")), Vec::<&str>::new());
    fixture.lease("2026-01-10T11:59:29Z");
    assert_eq!(codes(&pod(&fixture, "trainer")), ["ControllerDown"]);
}

#[test]
fn pod_behind_older_pods_is_explained() {
    let mut fixture = full();
    fixture.pending("first", share("8Gi", "0"));
    for older in ["second", "third", "fourth"] {
        let claim = format!("{older}-gpu");
        fixture.claim(&claim, share("8Gi", "0"));
        fixture.pod(older, &[&claim]);
    }
    fixture.pending("last", share("8Gi", "0"));
    let report = pod(&fixture, "last");
    assert_eq!(report.state, PodState::Pending);
    assert!(
        report
            .message
            .contains("but pods of higher priority or age get the devices first (4 pending)"),
        "{}",
        report.message
    );
}

#[test]
fn sharing_by_mps_is_shown_for_both_pods() {
    let mut fixture = Fixture::new();
    for (pod, node, mark) in
        [("a", "node-a", "aa"), ("b", "node-a", "ab"), ("c", "node-b", "ba"), ("d", "node-b", "bb")]
    {
        fixture.tenant(pod, node, &device(mark), "19Gi", "0");
        fixture.set_sharing(&format!("{pod}-gpu"), "MPS");
    }
    fixture.pending("trainer", share("30Gi", "0"));
    let (pending, bound) = (text(&pod(&fixture, "trainer")), text(&pod(&fixture, "a")));
    assert!(pending.contains("allocated with sharing MPS"), "{pending}");
    assert!(
        bound.contains("Allocated gpu: gpu-1f0c2daa on node-a: memory 19Gi, sharing MPS\n"),
        "{bound}"
    );
}

#[test]
fn bound_pod_is_shown_with_its_devices() {
    let report = pod(&full(), "a");
    assert_eq!(report.state, PodState::Bound);
    golden("explain-bound.txt", &text(&report));
}

#[test]
fn node_mismatch_has_the_message_of_the_event() {
    let mut fixture = Fixture::new();
    fixture.tenant("trainer", "node-a", &device("aa"), "19Gi", "25");
    fixture.snapshot.pods[0].spec.as_mut().unwrap().node_name = Some("node-b".to_owned());
    fixture.snapshot.pods[0].status.as_mut().unwrap().phase = Some("Pending".to_owned());
    let report = pod(&fixture, "trainer");
    assert_eq!(report.state, PodState::NodeMismatch);
    assert_eq!(
        report.message,
        "the pod is bound to node node-b, but ResourceClaim trainer-gpu is allocated on node node-a; no pod uses it there, \
         so it will be moved to the pod's node"
    );
}

#[test]
fn scheduling_gate_is_named_with_the_placement_without_it() {
    let mut fixture = Fixture::new();
    let pod_object = fixture.pending("trainer", share("19Gi", "25"));
    pod_object.spec.as_mut().unwrap().scheduling_gates =
        Some(read(json!([{"name": "kueue.x-k8s.io/admission"}])));
    let report = pod(&fixture, "trainer");
    assert_eq!(report.state, PodState::SchedulingGated);
    assert_eq!(
        report.message,
        "it has scheduling gate kueue.x-k8s.io/admission and is planned when its owner removes the \
         gate; it would fit on node node-a"
    );
}

#[test]
fn unknown_class_is_named() {
    let mut fixture = Fixture::new();
    let mut request = share("19Gi", "25");
    request["exactly"]["deviceClassName"] = "h200.gpu.tessera.dev".into();
    fixture.pending("trainer", request);
    let report = pod(&fixture, "trainer");
    assert_eq!(report.claims[0].reason, "UnknownDeviceClass");
    assert_eq!(report.message, report.claims[0].message);
    assert!(report.claims[0].message.contains("`h200.gpu.tessera.dev`, which does not exist"));
}

#[test]
fn claim_of_another_driver_is_not_managed() {
    let mut fixture = Fixture::new();
    fixture.claim(
        "nic",
        json!({"name": "nic", "exactly": {"deviceClassName": "foreign.example.com"}}),
    );
    fixture.pod("trainer", &["nic"]);
    let report = pod(&fixture, "trainer");
    assert_eq!(
        (report.state, report.claims[0].reason.as_str()),
        (PodState::NotManaged, "NotManaged")
    );
    assert!(claim(&fixture, "nic").message.contains("kube-scheduler allocates it"));
}

#[test]
fn claim_of_mixed_drivers_is_blocked() {
    let mut fixture = Fixture::new();
    let foreign = json!({"name": "nic", "exactly": {"deviceClassName": "foreign.example.com"}});
    fixture.claim_with("mixed", json!([share("1Gi", "0"), foreign]), None);
    fixture.pod("trainer", &["mixed"]);
    let report = pod(&fixture, "trainer");
    assert_eq!(
        (report.state, report.claims[0].reason.as_str()),
        (PodState::Blocked, "MixedDrivers")
    );
    assert!(report.message.contains("split it into one claim per driver"));
}

#[test]
fn claim_of_managed_drivers_is_planned() {
    let mut fixture = Fixture::new();
    let foreign = json!({"name": "nic", "exactly": {"deviceClassName": "foreign.example.com"}});
    fixture.claim_with("mixed", json!([share("1Gi", "0"), foreign]), None);
    fixture.pod("trainer", &["mixed"]);
    fixture.snapshot.device_taint_rules = vec![read(json!({
        "metadata": {"name": "tessera-fence.example.com"},
        "spec": {
            "deviceSelector": {"driver": "example.com"},
            "taint": {"key": "gpu.tessera.dev/managed", "effect": "NoSchedule"},
        },
    }))];
    assert_eq!(pod(&fixture, "trainer").state, PodState::Pending, "no NIC is published");
    let mut nics = fixture::slice("node-b", json!([{"name": "nic-0"}]));
    nics["metadata"]["name"] = "node-b-nics".into();
    nics["spec"]["driver"] = "example.com".into();
    fixture.snapshot.resource_slices.push(snapshot::trimmed_slice(read(nics)));
    let report = pod(&fixture, "trainer");
    assert_eq!((report.state, report.node.as_deref()), (PodState::Schedulable, Some("node-b")));
}

#[test]
fn missing_claim_or_template_is_named() {
    let mut fixture = Fixture::new();
    let from = |template: &str| json!([{"name": "gpu", "resourceClaimTemplateName": template}]);
    fixture.pod("late", &[]).spec.as_mut().unwrap().resource_claims = read(from("quarter"));
    assert_eq!(
        pod(&fixture, "late").message,
        "ResourceClaimTemplate quarter does not exist, so the claim is not generated"
    );
    fixture.snapshot.resource_claim_templates = vec![read(json!({
        "metadata": {"namespace": "team-a", "name": "quarter"}, "spec": {"spec": {"devices": {}}},
    }))];
    assert!(
        pod(&fixture, "late")
            .message
            .contains("is not generated from ResourceClaimTemplate quarter yet")
    );
    fixture.pod("lost", &["nowhere"]);
    assert_eq!(pod(&fixture, "lost").message, "ResourceClaim nowhere does not exist");
}

#[test]
fn allocated_pod_shows_the_message_of_kube_scheduler() {
    let mut fixture = Fixture::new();
    fixture.claim("trainer-gpu", share("19Gi", "25"));
    fixture.allocated("trainer-gpu", "node-a", &device("aa"), "19Gi", "25");
    let pod_object = fixture.pod("trainer", &["trainer-gpu"]);
    pod_object.status.as_mut().unwrap().conditions = read(json!([
        {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes are available"},
    ]));
    let report = pod(&fixture, "trainer");
    assert_eq!(report.state, PodState::PendingScheduling);
    assert_eq!(
        report.message,
        "its claims are allocated on node node-a, but kube-scheduler does not bind it: 0/3 nodes \
         are available"
    );
}

#[test]
fn oversubscribed_gpu_shows_the_field_to_set() {
    let mut fixture = Fixture::empty();
    fixture.pending("trainer", share("19Gi", "25"));
    fixture.node("node-a", json!([fixture::oversubscribed("aa")]));
    let shown = text(&pod(&fixture, "trainer"));
    assert!(
        shown.contains("oversubscribed (the claim must set memory.oversubscribe: true)"),
        "{shown}"
    );
}

#[test]
fn no_devices_and_stock_mode_are_distinguished() {
    let mut fixture = Fixture::empty();
    fixture.pending("trainer", share("19Gi", "25"));
    assert_eq!(codes(&pod(&fixture, "trainer")), ["NoDevicesPublished"]);
    fixture.node("node-a", json!([{"name": "gpu-0", "allowMultipleAllocations": true, "capacity": {"memory": {"value": "80Gi"}}}]));
    assert_eq!(codes(&pod(&fixture, "trainer")), ["NotManaged"]);
}

#[test]
fn last_event_of_each_reason_is_shown() {
    let fixture = with_pending_pod();
    let event = |by: &str, reason: &str, message: &str, at: &str| -> Event {
        read(json!({"metadata": {}, "involvedObject": {}, "reason": reason, "message": message,
                    "reportingComponent": by, "lastTimestamp": at}))
    };
    let events = [
        event(
            "gpu.tessera.dev/controller",
            "InsufficientDevices",
            "old news",
            "2026-01-10T11:00:00Z",
        ),
        event(
            "default-scheduler",
            "FailedScheduling",
            "of another component",
            "2026-01-10T11:30:00Z",
        ),
        event("gpu.tessera.dev/controller", "InsufficientDevices", "news", "2026-01-10T11:58:00Z"),
    ];
    let report = pod_with(&fixture, "trainer", &events);
    let shown: Vec<&str> = report.events.iter().map(|event| event.message.as_str()).collect();
    assert_eq!(shown, ["news"]);
    assert!(
        text(&report)
            .ends_with("  2m ago, gpu.tessera.dev/controller, InsufficientDevices: news\n"),
        "{}",
        text(&report)
    );
}

#[test]
fn claim_is_explained_with_its_pods() {
    let mut fixture = full();
    fixture.claim("shared-gpu", share("19Gi", "25"));
    fixture.pod("trainer", &["shared-gpu"]);
    fixture.pod("second", &["shared-gpu"]);
    let report = claim(&fixture, "shared-gpu");
    assert!(report.is_pending);
    assert_eq!(
        report.pods.iter().map(|pod| pod.pod.as_str()).collect::<Vec<_>>(),
        ["second", "trainer"]
    );
    assert!(report.pods.iter().all(|pod| pod.state == PodState::Pending));
    let held = claim(&fixture, "a-gpu");
    golden("explain-claim.txt", &explain::claim_text(&held, fixture.snapshot.taken_at));
    fixture.claim("idle", share("1Gi", "0"));
    assert!(claim(&fixture, "idle").message.starts_with("no pod uses it"));
}

#[test]
fn pods_with_one_claim_fit_on_one_node() {
    let mut fixture = Fixture::new();
    fixture.claim("shared-gpu", share("19Gi", "25"));
    fixture.pod("first", &["shared-gpu"]);
    fixture.pod("second", &["shared-gpu"]);
    let (first, second) = (pod(&fixture, "first"), pod(&fixture, "second"));
    assert_eq!((first.state, second.state), (PodState::Schedulable, PodState::Schedulable));
    assert_eq!((first.node.as_deref(), second.node), (Some("node-a"), first.node.clone()));
}

#[test]
fn other_namespaces_with_the_name_are_listed() {
    let mut fixture = Fixture::new();
    fixture.pod("trainer", &[]);
    let indexed = fixture.snapshot.indexed();
    let view = view(&fixture, &indexed);
    let error = explain::pod(
        &view,
        &Namespace::new("default").unwrap(),
        &PodName::new("trainer").unwrap(),
        &[],
    );
    assert_eq!(
        error.unwrap_err().to_string(),
        "pod `trainer` not found in namespace `default`; found in team-a: choose one with -n \
         NAMESPACE"
    );
}

#[test]
fn one_request_for_many_gpus_names_the_node_with_most() {
    let mut fixture = Fixture::new();
    fixture.tenant("busy", "node-b", &device("ba"), "70Gi", "10");
    let mut pair = share("80Gi", "100");
    pair["exactly"]["count"] = 2.into();
    fixture.claim("pair-gpu", pair.clone());
    fixture.pod("pair", &["pair-gpu"]);
    assert_eq!(pod(&fixture, "pair").state, PodState::Schedulable);
    fixture.tenant("busy2", "node-a", &device("ab"), "1Gi", "0");
    let report = pod(&fixture, "pair");
    assert!(
        report.message.starts_with(
            "2/5 GPUs available for claim pair-gpu: only 1 of 2 requested GPUs is available on \
             node-a; the next GPU on node-a: insufficient memory (1Gi short)"
        ),
        "{}",
        report.message
    );
    golden("explain-pair.txt", &text(&report));
}

#[test]
fn events_before_the_binding_are_marked() {
    let mut fixture = full();
    let event = |reason: &str, at: &str| -> Event {
        read(json!({"metadata": {}, "involvedObject": {}, "reason": reason, "message": "text",
                    "reportingComponent": "gpu.tessera.dev/controller", "lastTimestamp": at}))
    };
    let events = [
        event("InsufficientDevices", "2026-01-10T11:00:00Z"),
        event("Overcommitted", "2026-01-10T11:58:00Z"),
    ];
    let bound = fixture.snapshot.pods.iter_mut().find(|p| p.metadata.name.as_deref() == Some("a"));
    bound.unwrap().status.as_mut().unwrap().conditions = read(json!([
        {"type": "PodScheduled", "status": "True", "lastTransitionTime": "2026-01-10T11:30:00Z"},
    ]));
    let report = pod_with(&fixture, "a", &events);
    let marks: Vec<bool> = report.events.iter().map(|event| event.before_binding).collect();
    assert_eq!(marks, [true, false]);
    assert!(
        text(&report).ends_with(
            "Recent events:\n  2m ago, gpu.tessera.dev/controller, Overcommitted: text\n\n\
             Earlier events, before the pod was bound:\n  \
             60m ago, gpu.tessera.dev/controller, InsufficientDevices: text\n"
        ),
        "{}",
        text(&report)
    );
}

#[test]
fn claim_is_found_by_pod_and_entry() {
    let mut fixture = Fixture::new();
    fixture.claim_with("trainer-gpu-x", json!([share("19Gi", "25")]), Some("trainer"));
    fixture.generated_for("trainer-gpu-x", "gpu");
    let entries = json!([
        {"name": "gpu", "resourceClaimTemplateName": "t"},
        {"name": "late", "resourceClaimTemplateName": "t"},
    ]);
    fixture.pod("trainer", &[]).spec.as_mut().unwrap().resource_claims = read(entries);
    let indexed = fixture.snapshot.indexed();
    let view = view(&fixture, &indexed);
    let (namespace, pod) = (Namespace::new("team-a").unwrap(), PodName::new("trainer").unwrap());
    let find = |entry| explain::claim_of_entry(&view, &namespace, &pod, entry);
    assert_eq!(find("gpu").unwrap().as_str(), "trainer-gpu-x");
    assert!(matches!(find("late"), Err(ExplainError::NotGenerated { .. })));
    assert_eq!(
        find("other").unwrap_err().to_string(),
        "pod `trainer` has no entry `other` in spec.resourceClaims; its entries: gpu, late"
    );
}

/// Returns the message and the hint for a pod without claims that requests a resource.
fn answer_for_resource(resource: &str, class_of: Option<&str>) -> (String, Option<String>) {
    let mut fixture = Fixture::new();
    let pod_object = fixture.pod("old", &[]);
    let resources = json!({"requests": {"cpu": "1", resource: "1"}});
    pod_object.spec.as_mut().unwrap().containers[0].resources = Some(read(resources));
    if let Some(name) = class_of {
        let spec = json!({"extendedResourceName": name});
        let class = json!({"metadata": {"name": "a100.gpu.tessera.dev"}, "spec": spec});
        fixture.snapshot.device_classes.push(read(class));
    }
    let report = pod(&fixture, "old");
    assert_eq!(report.state, PodState::NoClaims);
    (report.message, report.hint)
}

#[test]
fn a_pod_of_another_system_is_explained_with_the_conversion() {
    let (message, hint) = answer_for_resource("nvidia.com/gpumem", None);
    assert!(message.contains("`nvidia.com/gpumem`") && message.contains("(hami, 4paradigm)"));
    assert!(hint.unwrap().contains("kubectl tessera convert --dialect hami"));
    let (message, hint) = answer_for_resource("nvidia.com/mig-1g.10gb.me", None);
    assert!(message.contains("which NVIDIA's device plugin serves"), "{message}");
    let hint = hint.unwrap();
    assert!(
        hint.contains("mig.gpu.tessera.dev and a selector of the profile 1g.10gb+me"),
        "{hint}"
    );
    let (message, hint) = answer_for_resource("example.com/dongle", None);
    assert_eq!((message.as_str(), hint), ("it uses no ResourceClaims", None));
    for (resource, class_of) in [
        ("deviceclass.resource.kubernetes.io/a100.gpu.tessera.dev", None),
        ("nvidia.com/gpu", Some("nvidia.com/gpu")),
    ] {
        let (message, hint) = answer_for_resource(resource, class_of);
        assert!(message.contains("DeviceClass a100.gpu.tessera.dev"), "{message}");
        assert!(message.contains("in stock mode only"), "{message}");
        assert!(hint.unwrap().contains("deviceClassName: a100.gpu.tessera.dev"));
    }
}

/// A pod of the group `train` of two, with a claim for a share.
fn member(fixture: &mut Fixture, name: &str) {
    fixture.claim(name, share("19Gi", "25"));
    let pod = fixture.pod(name, &[name]);
    let annotations =
        [("gpu.tessera.dev/pod-group", "train"), ("gpu.tessera.dev/pod-group-size", "2")];
    let annotations = annotations.map(|(name, value)| (name.to_owned(), value.to_owned()));
    pod.metadata.annotations = Some(annotations.into());
}

#[test]
fn pod_of_a_group_is_explained_with_its_group() {
    let mut fixture = Fixture::new();
    member(&mut fixture, "first");
    let report = pod(&fixture, "first");
    assert_eq!(report.state, PodState::Blocked);
    assert!(report.message.contains("group has 2 pods, and 1 of them"), "{}", report.message);
    member(&mut fixture, "second");
    assert_eq!(pod(&fixture, "second").state, PodState::Schedulable);
    for (name, mark) in [("first", "aa"), ("second", "ab")] {
        fixture.allocated(name, "node-a", &device(mark), "19Gi", "25");
    }
    for claim in &mut fixture.snapshot.resource_claims {
        let allocation = claim.status.as_mut().unwrap().allocation.as_mut().unwrap();
        let results = allocation.devices.as_mut().unwrap().results.as_mut().unwrap();
        results[0].binding_conditions = Some(vec!["gpu.tessera.dev/group-complete".to_owned()]);
    }
    let report = pod(&fixture, "second");
    assert_eq!(report.state, PodState::PendingScheduling);
    let expected = "nodes for all 2 pods of its group, so far it has them for 0";
    assert!(report.message.contains(expected), "{}", report.message);
}

#[test]
fn pod_of_a_group_that_waits_names_the_pods_to_evict() {
    let mut fixture = full();
    for name in ["first", "second"] {
        member(&mut fixture, name);
        set_priority(&mut fixture, name, 100);
    }
    for (name, priority) in [("a", 300), ("b", 300), ("c", 300), ("d", 10)] {
        set_priority(&mut fixture, name, priority);
    }
    let sentence = "The group of 2 pods would fit on node node-b if these pods were evicted: \
                    team-a/d (priority 10).";
    for name in ["first", "second"] {
        let report = pod(&fixture, name);
        assert!(report.message.ends_with(sentence), "{}", report.message);
        assert!(report.hint.unwrap().starts_with("wait: the controller evicts them"));
    }
    set_priority(&mut fixture, "second", 10);
    assert!(!pod(&fixture, "first").message.contains("evicted"), "less than each of the group");
}
