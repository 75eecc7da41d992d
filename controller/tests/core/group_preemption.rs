//! Preemption for groups: pods are evicted only if all pods of the group get devices, and what
//! becomes free is kept for all of them.

use std::time::Duration;

use serde_json::json;
use tessera_api::events;
use tessera_controller::core::event::{EvictionOutcome, WatchedKind};

use crate::groups::of_group;
use crate::objects;
use crate::world::World;

const OTHERS: [&str; 3] = ["one", "two", "three"];

/// A cluster with two nodes, of two GPUs and of one, which pods of priority 0 hold.
fn full() -> World {
    let mut world = World::new();
    world.add_node("node-a", 2);
    world.add_node("node-b", 1);
    for pod in OTHERS {
        world.add_bound_pod(pod, "80Gi");
    }
    world
}

impl World {
    /// Adds a group of pods of priority 9 that need a GPU each, and lets searches end.
    fn add_important_group(&mut self, size: usize) -> Vec<String> {
        let names: Vec<String> = (0..size).map(|number| format!("train-{number}")).collect();
        for pod in &names {
            self.put(WatchedKind::Claim, objects::claim(pod, "80Gi"));
            let object = objects::important(objects::pod(pod, &[pod]), 9);
            self.put(WatchedKind::Pod, of_group(object, "train", size));
        }
        self.deliver_all();
        self.pass(Duration::from_millis(100));
        names
    }

    fn evict_for_group(&mut self) -> Vec<String> {
        let victims = self.victims("train-0");
        self.end_evictions("train-0", |_| EvictionOutcome::Evicted);
        self.deliver_all();
        victims
    }
}

#[test]
fn group_gets_the_devices_of_evicted_pods_all_at_once() {
    let mut world = full();
    let group = world.add_important_group(3);
    let victims = world.evict_for_group();
    assert_eq!(victims.len(), 3, "{victims:?}");
    for pod in &OTHERS[..2] {
        world.end_pod(pod);
        world.pass(Duration::from_secs(6));
        world.settle();
        assert!(world.placed(&group).is_empty(), "one of them has not ended");
    }
    world.end_pod(OTHERS[2]);
    world.settle();
    assert_eq!(world.placed(&group).len(), 3);
    world.bind_group(&group);
    world.report_all_notices();
    world.pass(Duration::from_secs(3));
    for pod in &group {
        let notes = world.notes_of(pod, events::PREEMPTING);
        assert!(notes.iter().any(|note| note.contains("nodes node-a, node-b")), "{notes:?}");
    }
    assert_eq!(world.notes_of("one", events::PREEMPTED).len(), 1);
}

#[test]
fn no_pod_is_evicted_for_a_part_of_a_group() {
    let mut world = full();
    world.add_important_group(4);
    assert!(world.open_evictions.is_empty());
}

#[test]
fn no_pod_is_evicted_if_one_of_the_group_never_preempts() {
    let mut world = full();
    for (pod, policy) in [("train-0", "PreemptLowerPriority"), ("train-1", "Never")] {
        world.put(WatchedKind::Claim, objects::claim(pod, "80Gi"));
        let mut object = objects::important(objects::pod(pod, &[pod]), 9);
        object["spec"]["preemptionPolicy"] = json!(policy);
        world.put(WatchedKind::Pod, of_group(object, "train", 2));
    }
    world.deliver_all();
    world.pass(Duration::from_secs(6));
    assert!(world.open_evictions.is_empty());
}

#[test]
fn freed_devices_are_kept_for_the_whole_group() {
    let mut world = full();
    let group = world.add_important_group(3);
    world.evict_for_group();
    world.end_pod("one");
    world.end_pod("two");
    world.add_pod("late", "80Gi");
    world.settle();
    assert_eq!(world.place("late"), None);
    // One pod of the group is deleted: the devices are free again.
    world.delete(WatchedKind::Pod, "train-1");
    world.settle();
    assert!(world.place("late").is_some());
    assert!(world.placed(&group).is_empty());
}

#[test]
fn group_uses_free_devices_beside_those_of_evicted_pods() {
    let mut world = full();
    world.end_pod("two");
    world.settle();
    let group = world.add_important_group(2);
    let victims = world.evict_for_group();
    assert_eq!(victims.len(), 1, "{victims:?}");
    world.end_pod(&victims[0]);
    world.settle();
    assert_eq!(world.placed(&group).len(), 2);
}

#[test]
fn refused_eviction_leads_to_other_victims_of_the_group() {
    let mut world = full();
    world.add_important_group(2);
    let first = world.victims("train-0");
    let message = "the disruption budget needs 1 healthy pod".to_owned();
    let refused = first[0].clone();
    world.end_evictions("train-0", |pod| match pod == refused {
        true => EvictionOutcome::Refused { message: message.clone() },
        false => EvictionOutcome::Evicted,
    });
    world.deliver_all();
    world.pass(Duration::from_millis(100));
    let second = world.victims("train-0");
    assert_eq!(second.len(), 2, "{second:?}");
    assert!(!second.contains(&refused), "{second:?}");
}
