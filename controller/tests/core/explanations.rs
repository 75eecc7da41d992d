//! Explanations: events, each text once, and the reports of the audit.

use std::collections::BTreeSet;
use std::time::Duration;

use serde_json::json;
use tessera_api::events::{self, EventReason};
use tessera_controller::core::effect::MAX_OPEN_NOTICES;
use tessera_controller::core::event::WatchedKind;

use crate::objects;
use crate::world::World;

fn seconds(n: u64) -> Duration {
    Duration::from_secs(n)
}

/// A node with one GPU that is full, and a pod that does not fit.
fn full() -> World {
    let mut world = World::new();
    world.add_node("node-a", 1);
    world.add_bound_pod("first", "80Gi");
    world.add_pod("second", "20Gi");
    world
}

fn reasons_of(world: &World, pod: &str) -> Vec<EventReason> {
    let notices = world.notices.iter().filter(|notice| notice.pod.name.as_str() == pod);
    notices.map(|notice| notice.reason).collect()
}

#[test]
fn pending_pod_gets_one_event_and_counts_as_pending() {
    let mut world = full();
    assert_eq!(reasons_of(&world, "second"), [events::INSUFFICIENT_DEVICES]);
    world.touch("first");
    world.deliver_all();
    let pending = world.figures.pending.clone().unwrap();
    assert_eq!(pending.values().sum::<i64>(), 1, "{pending:?}");
    world.pass(seconds(600));
    assert_eq!(reasons_of(&world, "second").len(), 1, "the same text is published once");
    world.end_pod("first");
    world.settle();
    world.pass(seconds(3));
    world.settle();
    assert!(world.place("second").is_some());
    assert_eq!(world.figures.pending.clone().unwrap_or_default().len(), 0);
}

#[test]
fn refused_event_is_published_again_until_it_is_taken() {
    let mut world = full();
    world.report_notices(false);
    for pause in [2, 4, 8] {
        assert_eq!(world.take_notices(), 1, "before a pause of {pause} s");
        world.report_notices(false);
        world.pass(seconds(pause) - Duration::from_millis(1));
        assert_eq!(world.take_notices(), 0);
        world.pass(Duration::from_millis(1));
    }
    assert_eq!(world.take_notices(), 1);
    world.report_notices(true);
    world.pass(seconds(900));
    assert_eq!(world.take_notices(), 0, "it was taken");
}

#[test]
fn refused_event_about_a_placed_pod_is_dropped() {
    let mut world = full();
    world.report_notices(false);
    assert_eq!(world.take_notices(), 1);
    world.end_pod("first");
    world.settle();
    // The pod is placed before the event is due again.
    world.pass(Duration::from_millis(1500));
    world.settle();
    assert!(world.place("second").is_some());
    world.pass(seconds(900));
    assert_eq!(world.take_notices(), 0, "the pod has its devices");
}

#[test]
fn open_notices_are_bounded_and_the_rest_follows() {
    let mut world = full();
    let pods = MAX_OPEN_NOTICES + 50;
    // Delivered together: a step for each pod takes 20 s.
    for number in 1..pods {
        let name = format!("pod-{number}");
        world.put(WatchedKind::Claim, objects::claim(&name, "20Gi"));
        world.put(WatchedKind::Pod, objects::pod(&name, &[&name]));
    }
    world.deliver_all();
    assert_eq!(world.notices.len(), MAX_OPEN_NOTICES);
    world.report_all_notices();
    world.pass(seconds(3));
    world.report_all_notices();
    assert_eq!(world.notices.len(), pods, "each pod has one event");
}

/// A full node, and this many more pods of one shape that do not fit.
fn full_with(pods: usize) -> World {
    let mut world = full();
    for number in 1..pods {
        let name = format!("pod-{number}");
        world.put(WatchedKind::Claim, objects::claim(&name, "20Gi"));
        world.put(WatchedKind::Pod, objects::pod(&name, &[&name]));
    }
    world.deliver_all();
    world.report_all_notices();
    world
}

#[test]
fn queued_pods_are_told_when_their_reason_changes() {
    let mut world = full_with(300);
    world.pass(seconds(3));
    let before = world.notices.len();
    assert_eq!(before, 300, "each pod has one event");
    let mut slice = objects::slice("node-b", 1);
    slice["spec"]["devices"][0]["capacity"]["memory"]["value"] = "1Gi".into();
    world.put(WatchedKind::Node, objects::node("node-b"));
    world.put(WatchedKind::Slice, slice);
    world.deliver_all();
    world.pass(seconds(1));
    world.report_all_notices();
    let told: BTreeSet<&str> =
        world.notices[before..].iter().map(|notice| notice.pod.name.as_str()).collect();
    assert_eq!((told.len(), world.notices.len() - before), (300, 300), "one more each");
    world.pass(seconds(900));
    assert_eq!(world.notices.len() - before, 300, "and nothing after it");
}

#[test]
fn reasons_change_although_events_never_pause() {
    let mut world = full_with(100);
    world.pass(seconds(3));
    let before = world.notices.len();
    let mut slice = objects::slice("node-b", 1);
    slice["spec"]["devices"][0]["capacity"]["memory"]["value"] = "1Gi".into();
    world.put(WatchedKind::Node, objects::node("node-b"));
    world.put(WatchedKind::Slice, slice);
    world.deliver_all();
    // Each new pod leads to a plan before the reasons are due.
    for number in 0..30 {
        world.add_pod(&format!("late-{number}"), "30Gi");
        world.pass(Duration::from_millis(10));
        world.report_all_notices();
    }
    let told = world.notices[before..].iter().map(|notice| notice.pod.name.as_str());
    let told: BTreeSet<&str> = told.filter(|name| !name.starts_with("late")).collect();
    assert_eq!(told.len(), 100, "after 300 ms");
}

#[test]
fn claims_of_queued_pods_count_as_pending() {
    let mut world = full_with(50);
    let pending = |world: &World| world.figures.pending.clone().unwrap().values().sum::<i64>();
    world.touch("first");
    world.deliver_all();
    assert_eq!(pending(&world), 50);
    world.end_pod("pod-7");
    world.deliver_all();
    world.touch("first");
    world.deliver_all();
    assert_eq!(pending(&world), 49);
}

#[test]
fn events_of_one_reason_are_published_at_growing_intervals() {
    let mut world = full();
    let before = world.notices.len();
    // The text changes every second, since the number of devices does.
    for node in 0..300 {
        world.pass(seconds(1));
        let mut slice = objects::slice(&format!("node-{node}"), 1);
        slice["spec"]["devices"][0]["capacity"]["memory"]["value"] = "1Gi".into();
        world.put(WatchedKind::Node, objects::node(&format!("node-{node}")));
        world.put(WatchedKind::Slice, slice);
        world.deliver_all();
    }
    let published = world.notices.len() - before;
    assert!((6..=8).contains(&published), "{published} events in 300 s");
}

#[test]
fn two_claims_of_a_pod_are_explained_once_each() {
    let mut world = full();
    for name in ["x", "y"] {
        world.put(WatchedKind::Claim, objects::claim(name, "30Gi"));
    }
    world.put(WatchedKind::Pod, objects::pod("both", &["x", "y"]));
    world.deliver_all();
    world.pass(seconds(3600));
    let notes = world.notices.iter().filter(|notice| notice.pod.name.as_str() == "both");
    assert!(notes.count() <= 2, "{:?}", world.notices);
}

#[test]
fn write_without_an_answer_is_reported_after_a_minute() {
    let mut world = World::new();
    world.add_node("node-a", 1);
    world.pass(seconds(10));
    world.add_pod("a", "20Gi");
    world.pass(seconds(49));
    assert_eq!(reasons_of(&world, "a"), [] as [EventReason; 0]);
    world.pass(seconds(1));
    assert_eq!(reasons_of(&world, "a"), [events::API_SERVER_TIMEOUT]);
    assert_eq!(world.figures.unanswered, Some(1));
    world.settle();
    world.pass(seconds(60));
    assert_eq!(world.figures.unanswered, Some(0));
}

#[test]
fn claim_deleted_in_use_is_reported_by_the_second_audit() {
    let mut world = full();
    world.delete(WatchedKind::Claim, "first");
    world.deliver_all();
    world.pass(seconds(60));
    assert_eq!(reasons_of(&world, "first"), [] as [EventReason; 0], "the pod may have just ended");
    world.pass(seconds(60));
    assert_eq!(reasons_of(&world, "first"), [events::CLAIM_DELETED_IN_USE]);
    assert_eq!(world.place("second"), None, "its devices stay taken until the pod has ended");
}

#[test]
fn deleted_node_is_given_up_at_once() {
    let mut world = World::new();
    world.add_node("node-a", 1);
    world.add_pod("a", "20Gi");
    world.settle();
    world.delete(WatchedKind::Slice, "slice-node-a");
    world.delete(WatchedKind::Node, "node-a");
    world.deliver_all();
    assert_eq!(reasons_of(&world, "a")[0], events::RESCHEDULING);
    assert!(world.open_of("a").is_some(), "its allocation is released");
}

/// Asserts that the pod gets this event 2 s after the one before, which is about other devices, and
/// only once.
fn assert_follows(world: &mut World, pod: &str, reason: EventReason) {
    let got = |world: &World| reasons_of(world, pod).iter().filter(|r| **r == reason).count();
    assert_eq!(got(world), 0, "another event was published less than 2 s ago");
    world.pass(seconds(2));
    assert_eq!(got(world), 1, "{:?}", world.notices);
    world.pass(seconds(600));
    assert_eq!(got(world), 1, "{:?}", world.notices);
}

#[test]
fn dropped_fields_are_reported_soon_after_another_event() {
    let mut world = full();
    world.add_node("node-b", 1);
    let id = world.open_of("second").expect("there is room now");
    world.drop_field(id, "a field was dropped");
    // No further attempt repeats the text within the test.
    world.delete(WatchedKind::Slice, "slice-node-b");
    world.deliver_all();
    assert_follows(&mut world, "second", events::ALLOCATION_FIELDS_DROPPED);
}

#[test]
fn rescheduling_is_reported_soon_after_another_event() {
    let mut world = full();
    world.add_node("node-b", 1);
    world.settle();
    world.delete(WatchedKind::Slice, "slice-node-b");
    world.delete(WatchedKind::Node, "node-b");
    world.settle();
    assert_follows(&mut world, "second", events::RESCHEDULING);
}

#[test]
fn overcommitment_is_reported_soon_after_another_event() {
    let mut world = full();
    world.add_node("node-b", 1);
    world.settle();
    let mut smaller = objects::slice("node-b", 1);
    smaller["spec"]["devices"][0]["capacity"]["memory"]["value"] = "10Gi".into();
    world.put_slice_of_less(smaller);
    world.settle();
    assert_follows(&mut world, "second", events::OVERCOMMITTED);
}

#[test]
fn deferred_event_is_dropped_when_the_pod_is_bound() {
    let mut world = full();
    world.add_node("node-b", 1);
    let id = world.open_of("second").expect("there is room now");
    world.drop_field(id, "a field was dropped");
    world.pass(seconds(1));
    world.settle();
    world.bind("second");
    world.settle();
    world.pass(seconds(600));
    assert_eq!(reasons_of(&world, "second"), [events::INSUFFICIENT_DEVICES], "it is outdated");
}

#[test]
fn pod_whose_status_lacks_a_claim_for_long_gets_nothing() {
    let mut world = World::new();
    world.add_node("node-a", 1);
    // Two generated claims of which the status names one.
    let mut pod = objects::pod("p", &[]);
    pod["spec"]["resourceClaims"] = json!([
        {"name": "x", "resourceClaimTemplateName": "t"},
        {"name": "y", "resourceClaimTemplateName": "t"},
    ]);
    let status = json!([{"name": "x", "resourceClaimName": "x"}]);
    pod["status"]["resourceClaimStatuses"] = status;
    for name in ["x", "y"] {
        let mut claim = objects::claim(name, "20Gi");
        claim["metadata"]["annotations"] = json!({"resource.kubernetes.io/pod-claim-name": name});
        claim["metadata"]["ownerReferences"] = json!([{
            "apiVersion": "v1", "kind": "Pod", "name": "p", "uid": "uid-p", "controller": true,
        }]);
        world.put(WatchedKind::Claim, claim);
    }
    world.put(WatchedKind::Pod, pod.clone());
    world.deliver(WatchedKind::Pod);
    world.settle();
    assert!(world.place("x").is_some() && world.place("y").is_some(), "planned before the status");
    world.pass(seconds(120));
    assert_eq!(reasons_of(&world, "p"), [events::POD_STATUS_MISSING_CLAIM]);
    world.settle();
    world.pass(seconds(10));
    world.settle();
    assert_eq!((world.place("x"), world.place("y")), (None, None));
    let both = json!([
        {"name": "x", "resourceClaimName": "x"}, {"name": "y", "resourceClaimName": "y"},
    ]);
    world.edit(WatchedKind::Pod, "p", |pod| pod["status"]["resourceClaimStatuses"] = both);
    world.settle();
    world.pass(seconds(10));
    world.settle();
    assert!(world.place("x").is_some() && world.place("y").is_some());
}

#[test]
fn same_text_is_published_again_after_the_pod_has_moved() {
    let mut world = World::new();
    world.add_node("node-a", 1);
    world.add_pod("a", "20Gi");
    world.settle();
    world.report_unschedulable("a", "0/1 nodes are available: 1 Insufficient cpu.");
    for _ in 0..100 {
        world.settle();
        world.pass(seconds(1));
    }
    let expected = [
        events::RESCHEDULING,
        events::INSUFFICIENT_DEVICES,
        events::RESCHEDULING,
        events::INSUFFICIENT_DEVICES,
    ];
    assert_eq!(reasons_of(&world, "a")[..4], expected);
}
