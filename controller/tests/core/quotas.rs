//! Quotas: claims are held to them at every moment, and their statuses follow.

use std::time::Duration;

use serde_json::{Value, json};
use tessera_api::events;
use tessera_controller::core::effect::Notice;
use tessera_controller::core::event::{QuotaStatusOutcome, WatchedKind};

use crate::objects;
use crate::world::World;

const QUOTA: WatchedKind = WatchedKind::Quota;

/// Eight GPUs, and a quota with these limits.
fn cluster(hard: Value) -> World {
    let mut world = World::new();
    world.add_node("node-a", 8);
    set(&mut world, hard);
    world
}

fn set(world: &mut World, hard: Value) {
    let status = world.get(QUOTA, objects::QUOTA).map(|quota| quota["status"].clone());
    let mut quota = objects::quota(hard);
    quota["status"] = status.unwrap_or_default();
    world.put(QUOTA, quota);
    world.deliver_all();
}

fn allocated(world: &World) -> usize {
    world.names(WatchedKind::Claim).iter().filter(|claim| world.place(claim).is_some()).count()
}

fn used(world: &World) -> Value {
    world.get(QUOTA, objects::QUOTA).unwrap()["status"]["used"].clone()
}

#[test]
fn sixty_four_pods_race_for_a_quota_of_five() {
    // The world checks each write that the core starts.
    let mut world = cluster(json!({"memory": "50Gi"}));
    for pod in 0..64 {
        let name = format!("p{pod:02}");
        world.put(WatchedKind::Claim, objects::claim(&name, "10Gi"));
        world.put(WatchedKind::Pod, objects::pod(&name, &[&name]));
    }
    world.settle();
    world.pass(Duration::from_secs(2));
    world.settle();
    assert_eq!(allocated(&world), 5);
    assert_eq!(used(&world), json!({"memory": "50Gi"}));
    let about = |notice: &&Notice| notice.reason == events::QUOTA_EXCEEDED;
    assert!(world.notices.iter().filter(about).count() >= 59);
    let text = &world.notices.iter().rfind(about).unwrap().note;
    assert!(text.contains("over quota by 10Gi of memory (used 50Gi of 50Gi)"), "{text}");
}

#[test]
fn what_ends_makes_room_for_the_next() {
    let mut world = cluster(json!({"cores": "25"}));
    for name in ["a", "b", "c"] {
        world.add_pod(name, "10Gi");
    }
    world.settle();
    let first = ["a", "b", "c"].into_iter().find(|name| world.place(name).is_some()).unwrap();
    assert_eq!(allocated(&world), 1);
    world.delete(WatchedKind::Pod, first);
    world.delete(WatchedKind::Claim, first);
    world.settle();
    assert_eq!(allocated(&world), 1, "another one");
}

#[test]
fn a_raised_quota_is_used_and_a_lowered_one_takes_nothing() {
    let mut world = cluster(json!({"shares": 1}));
    ["a", "b", "c"].iter().for_each(|name| world.add_pod(name, "10Gi"));
    world.settle();
    assert_eq!(allocated(&world), 1);
    set(&mut world, json!({"shares": 3}));
    world.settle();
    assert_eq!(allocated(&world), 3);
    set(&mut world, json!({"shares": 1}));
    world.add_pod("d", "10Gi");
    world.settle();
    world.pass(Duration::from_secs(60));
    world.settle();
    assert_eq!(allocated(&world), 3, "nothing is taken away, nothing is added");
    assert_eq!(used(&world), json!({"shares": "3"}));
    world.delete(QUOTA, objects::QUOTA);
    world.settle();
    assert_eq!(allocated(&world), 4);
}

#[test]
fn a_new_leader_counts_the_claims_anew() {
    let mut world = cluster(json!({"memory": "30Gi"}));
    ["a", "b", "c", "d"].iter().for_each(|name| world.add_pod(name, "10Gi"));
    world.settle();
    assert_eq!(allocated(&world), 3);
    world.new_leader(None);
    world.add_pod("e", "10Gi");
    world.settle();
    assert_eq!(allocated(&world), 3);
}

#[test]
fn a_claim_deleted_in_use_counts_until_its_pod_ends() {
    let mut world = cluster(json!({"memory": "10Gi"}));
    world.add_bound_pod("a", "10Gi");
    // Its finalizer is removed by a user.
    world.delete(WatchedKind::Claim, "a");
    world.add_pod("b", "10Gi");
    world.settle();
    assert_eq!(world.place("b"), None);
    world.end_pod("a");
    world.settle();
    assert!(world.place("b").is_some());
}

#[test]
fn a_slice_that_vanishes_for_a_moment_frees_no_quota() {
    // kubelet deletes the slices of a node when it starts.
    let mut world = cluster(json!({"gpus": 1}));
    world.add_pod("a", "80Gi");
    world.settle();
    world.add_node("node-b", 1);
    world.delete(WatchedKind::Slice, "node-a");
    world.deliver_all();
    world.add_pod("b", "80Gi");
    world.settle();
    assert_eq!(world.place("b"), None, "the GPU of node-b");
    world.new_leader(None);
    world.settle();
    assert_eq!(world.place("b"), None, "also for a leader that never saw the slice");
}

#[test]
fn a_burst_of_allocations_is_one_write_of_the_status() {
    let mut world = cluster(json!({"memory": "1Ti"}));
    let ended = |world: &mut World| {
        let open = world.open_quotas.len();
        world.end_quota_status(QuotaStatusOutcome::Stored);
        world.deliver_all();
        open
    };
    assert_eq!(ended(&mut world), 1, "the first status");
    ["a", "b", "c"].iter().for_each(|name| world.add_pod(name, "10Gi"));
    assert_eq!(ended(&mut world), 0, "a second has not passed");
    world.pass(Duration::from_secs(1));
    assert_eq!(ended(&mut world), 1);
    assert_eq!(used(&world), json!({"memory": "30Gi"}));
    world.pass(Duration::from_secs(600));
    assert_eq!(world.open_quotas.len(), 0, "nothing has changed");
}

#[test]
fn a_status_that_cannot_be_written_is_tried_ever_more_slowly() {
    let mut world = cluster(json!({"memory": "1Ti"}));
    let mut tries = 0;
    for _ in 0..600 {
        tries += world.open_quotas.len();
        world.end_quota_status(QuotaStatusOutcome::Failed);
        world.pass(Duration::from_secs(1));
    }
    assert!((10..20).contains(&tries), "{tries}");
}

#[test]
fn figures_name_each_resource_of_a_quota() {
    let mut world = World::new();
    world.add_node("node-a", 1);
    world.put(QUOTA, objects::quota(json!({"memory": "1Ti", "gpus": 2})));
    world.deliver(QUOTA);
    let of_namespace = world.figures.quotas.values().next().unwrap();
    let figure = |at: usize| (of_namespace[at].resource.name(), of_namespace[at].hard.to_string());
    assert_eq!((figure(0), figure(1)), (("memory", "1Ti".into()), ("gpus", "2".into())));
    world.delete(QUOTA, objects::QUOTA);
    world.deliver(QUOTA);
    assert!(world.figures.quotas.values().next().unwrap().is_empty());
}
