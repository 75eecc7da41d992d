//! Nominations: written before the claims, replaced and removed with the decision, and never
//! against kube-scheduler.

use std::time::Duration;

use tessera_controller::core::NominationPolicy;
use tessera_controller::core::effect::NominationWrite;
use tessera_controller::core::event::{NominationOutcome, WatchedKind};

use crate::objects;
use crate::world::World;

const NO_PORT: &str = "0/1 nodes are available: 1 node(s) didn't have free ports.";

/// A cluster with one node of one GPU.
fn cluster() -> World {
    let mut world = World::new();
    world.add_node("node-a", 1);
    world
}

/// The nodes that the nominations replace and write, in order.
fn changes(world: &World) -> Vec<(Option<&str>, Option<&str>)> {
    let nodes = world.nominations.iter().map(|NominationWrite { node, replaced, .. }| {
        (replaced.as_ref().map(|n| n.as_str()), node.as_ref().map(|n| n.as_str()))
    });
    nodes.collect()
}

#[test]
fn pod_is_nominated_once_for_the_node_of_its_devices() {
    let mut world = cluster();
    world.add_pod("a", "50Gi");
    assert_eq!(changes(&world), [(None, Some("node-a"))]);
    world.settle();
    assert_eq!(world.nomination("a"), Some(("node-a".to_owned(), true)));
    world.pass(Duration::from_secs(600));
    assert_eq!(changes(&world).len(), 1);
}

#[test]
fn allocation_waits_for_no_nomination() {
    let mut world = cluster();
    world.add_pod("a", "50Gi");
    for outcome in [NominationOutcome::Failed, NominationOutcome::Denied] {
        world.fail_nomination("a", outcome);
    }
    world.settle();
    assert_eq!(world.place("a").unwrap(), "node-a/gpu-0");
}

#[test]
fn refused_permission_pauses_nominations() {
    let mut world = cluster();
    world.add_pod("a", "10Gi");
    world.fail_nomination("a", NominationOutcome::Denied);
    world.add_pod("b", "10Gi");
    assert_eq!(changes(&world).len(), 1);
    world.pass(Duration::from_secs(601));
    world.add_pod("c", "10Gi");
    assert_eq!(changes(&world).len(), 2);
}

#[test]
fn nomination_by_kube_scheduler_is_never_replaced() {
    let mut world = cluster();
    world.put(WatchedKind::Claim, objects::claim("a", "10Gi"));
    let pod = objects::pod("a", &["a"]);
    world.put(WatchedKind::Pod, objects::nominated(pod, "node-x"));
    world.settle();
    assert_eq!(world.place("a").unwrap(), "node-a/gpu-0");
    assert_eq!(changes(&world), []);
}

#[test]
fn nomination_is_removed_with_the_allocation() {
    let mut world = cluster();
    world.add_pod("a", "50Gi");
    world.settle();
    // An attempt failed without a trace of ours: it began before the nomination.
    world.edit(WatchedKind::Pod, "a", |pod| {
        let failed = objects::unschedulable(pod.clone(), NO_PORT);
        pod["status"]["conditions"] = failed["status"]["conditions"].clone();
    });
    world.settle();
    world.pass(Duration::from_secs(59));
    assert_eq!(world.place("a").unwrap(), "node-a/gpu-0", "room may be made there");
    world.pass(Duration::from_secs(2));
    world.settle();
    assert_eq!(world.place("a"), None);
    assert_eq!(changes(&world), [(None, Some("node-a")), (Some("node-a"), None)]);
    assert_eq!(world.nomination("a"), None);
}

#[test]
fn removal_without_an_answer_is_repeated_after_a_pause() {
    let mut world = cluster();
    world.put(WatchedKind::Claim, objects::claim("stale", "90Gi"));
    let pod = objects::pod("stale", &["stale"]);
    world.put(WatchedKind::Pod, objects::nominated_by_controller(pod, Some("node-a".to_owned())));
    world.deliver_all();
    for sent in 1..4 {
        assert_eq!(changes(&world).len(), sent, "one removal per second");
        world.fail_nomination("stale", NominationOutcome::Failed);
        assert_eq!(changes(&world).len(), sent);
        world.pass(Duration::from_millis(1001));
    }
    world.settle();
    assert_eq!(world.nomination("stale"), None);
}

#[test]
fn next_decision_nominates_after_a_failed_attempt() {
    let mut world = cluster();
    world.add_pod("a", "50Gi");
    world.settle();
    world.add_node("node-b", 1);
    // The failed attempt removes the nomination.
    world.report_unschedulable("a", NO_PORT);
    world.settle();
    assert_eq!(changes(&world).len(), 1, "nothing is nominated twice for one decision");
    for _ in 0..3 {
        world.pass(Duration::from_secs(3));
        world.settle();
    }
    assert_eq!(world.place("a").unwrap(), "node-b/gpu-0");
    assert_eq!(changes(&world), [(None, Some("node-a")), (None, Some("node-b"))]);
}

#[test]
fn late_nomination_of_a_failed_decision_is_removed() {
    let mut world = cluster();
    world.add_pod("a", "50Gi");
    let write = world.open_of("a").unwrap();
    world.refuse(write, true);
    world.end_nomination("a");
    world.settle();
    assert_eq!(world.nomination("a"), None);
    assert_eq!(changes(&world), [(None, Some("node-a")), (Some("node-a"), None)]);
}

#[test]
fn new_leader_knows_the_nominations_of_the_last_one() {
    let mut world = cluster();
    for (name, memory) in [("kept", "50Gi"), ("stale", "90Gi")] {
        world.put(WatchedKind::Claim, objects::claim(name, memory));
        let pod = objects::pod(name, &[name]);
        let nominated = objects::nominated_by_controller(pod, Some("node-a".to_owned()));
        world.put(WatchedKind::Pod, nominated);
    }
    world.settle();
    assert_eq!(world.nomination("kept"), Some(("node-a".to_owned(), true)));
    assert_eq!(world.nomination("stale"), None);
    assert_eq!(changes(&world), [(Some("node-a"), None)]);
}

#[test]
fn own_nomination_is_no_freed_capacity() {
    let mut world = cluster();
    world.add_node("node-b", 1);
    world.add_pod("a", "50Gi");
    world.settle();
    let first = world.place("a").unwrap();
    // kube-scheduler clears the claim, and nominates no node.
    world.clear("a");
    world.settle();
    world.pass(Duration::from_secs(10));
    world.settle();
    let second = world.place("a").unwrap();
    assert_ne!(first, second);
}

#[test]
fn room_made_on_the_nominated_node_is_used() {
    let mut world = cluster();
    world.add_pod("a", "50Gi");
    world.settle();
    world.add_node("node-b", 1);
    world.clear("a");
    world.deliver_all();
    world.preempt("a", "node-a", "preempting");
    world.settle();
    world.pass(Duration::from_secs(10));
    world.settle();
    assert_eq!(world.place("a").unwrap(), "node-a/gpu-0");
}

#[test]
fn small_clusters_are_left_alone() {
    for policy in [NominationPolicy::Auto, NominationPolicy::Never] {
        let mut world = World::with_nominations(policy);
        world.add_node("node-a", 1);
        world.add_pod("a", "50Gi");
        assert_eq!(changes(&world), [], "{policy:?}");
    }
    let mut world = World::with_nominations(NominationPolicy::Auto);
    world.add_node("node-a", 1);
    for number in 0..2000 {
        world.put(WatchedKind::Node, objects::node(&format!("empty-{number}")));
    }
    world.add_pod("a", "50Gi");
    assert_eq!(changes(&world), [(None, Some("node-a"))]);
}
