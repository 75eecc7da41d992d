//! Preemption: which pods are evicted, for whom the devices are kept, and when that ends.

use std::time::Duration;

use serde_json::json;
use tessera_api::events;
use tessera_controller::core::event::{Event, EvictionOutcome, WatchedKind};

use crate::objects;
use crate::world::World;

/// A cluster with one node of one GPU, whose memory pods of priority 0 hold.
fn full(pods: &[(&str, &str)]) -> World {
    let mut world = World::new();
    world.add_node("node-a", 1);
    for (name, memory) in pods {
        world.add_bound_pod(name, memory);
    }
    world
}

impl World {
    fn add_important_pod(&mut self, name: &str, memory: &str, priority: u8) {
        self.put(WatchedKind::Claim, objects::claim(name, memory));
        self.put(WatchedKind::Pod, objects::important(objects::pod(name, &[name]), priority));
        self.deliver_all();
        self.search();
    }

    /// Lets searches end.
    fn search(&mut self) {
        self.pass(Duration::from_millis(50));
    }

    /// Carries out the evictions for a pod.
    fn evict_for(&mut self, pod: &str) {
        self.end_evictions(pod, |_| EvictionOutcome::Evicted);
        self.deliver_all();
    }

    fn gets_devices(&mut self, pod: &str) -> bool {
        self.settle();
        self.place(pod).is_some()
    }

    fn reasons_of(&self, pod: &str) -> Vec<&'static str> {
        let of_pod = self.notices.iter().filter(|notice| notice.pod.name.as_str() == pod);
        of_pod.map(|notice| notice.reason.name()).collect()
    }
}

fn refused() -> EvictionOutcome {
    EvictionOutcome::Refused { message: "the disruption budget needs 1 healthy pod".to_owned() }
}

#[test]
fn pod_gets_the_devices_of_pods_that_are_evicted() {
    let mut world = full(&[("small", "20Gi"), ("large", "60Gi")]);
    world.add_important_pod("urgent", "60Gi", 9);
    assert_eq!(world.victims("urgent"), ["large"]);
    world.evict_for("urgent");
    assert!(!world.gets_devices("urgent"), "the pod has not ended yet");
    world.end_pod("large");
    assert!(world.gets_devices("urgent"));
    // Events of a pod follow each other by two seconds.
    world.report_all_notices();
    world.pass(Duration::from_secs(3));
    assert_eq!(world.reasons_of("large"), [events::PREEMPTED.name()]);
    assert!(world.reasons_of("urgent").contains(&events::PREEMPTING.name()));
}

#[test]
fn pods_of_equal_priority_and_those_that_never_preempt_wait() {
    let mut world = full(&[("first", "60Gi")]);
    world.add_important_pod("equal", "60Gi", 0);
    world.put(WatchedKind::Claim, objects::claim("patient", "60Gi"));
    let mut patient = objects::important(objects::pod("patient", &["patient"]), 9);
    patient["spec"]["preemptionPolicy"] = "Never".into();
    world.put(WatchedKind::Pod, patient);
    world.deliver_all();
    world.pass(Duration::from_secs(600));
    assert!(world.open_evictions.is_empty());
}

#[test]
fn freed_devices_are_kept_for_the_preemptor() {
    let mut world = full(&[("one", "40Gi"), ("two", "40Gi")]);
    world.add_important_pod("urgent", "80Gi", 9);
    assert_eq!(world.victims("urgent").len(), 2);
    world.evict_for("urgent");
    // Another one would fit as soon as the first victim has ended.
    world.add_pod("other", "40Gi");
    world.end_pod("one");
    assert!(!world.gets_devices("other"));
    world.end_pod("two");
    assert!(world.gets_devices("urgent"));
    assert!(!world.gets_devices("other"));
}

#[test]
fn devices_are_free_again_once_the_preemptor_is_deleted() {
    let mut world = full(&[("one", "40Gi"), ("two", "40Gi")]);
    world.add_important_pod("urgent", "80Gi", 9);
    world.evict_for("urgent");
    world.add_pod("other", "40Gi");
    world.end_pod("one");
    assert!(!world.gets_devices("other"));
    world.end_pod("urgent");
    assert!(world.gets_devices("other"));
}

#[test]
fn evicted_pod_is_told_why_also_if_the_preemptor_is_gone() {
    let mut world = full(&[("one", "80Gi")]);
    world.add_important_pod("urgent", "80Gi", 9);
    world.end_pod("urgent");
    world.deliver_all();
    world.evict_for("urgent");
    assert_eq!(world.reasons_of("one"), [events::PREEMPTED.name()]);
}

#[test]
fn evicted_pod_that_ends_at_once_is_told_why() {
    let mut world = full(&[("one", "40Gi"), ("two", "40Gi")]);
    world.pass(Duration::from_secs(10));
    world.add_important_pod("urgent", "80Gi", 9);
    let open = world.open_evictions.remove("urgent").unwrap();
    // The first ends before the eviction of the second has an outcome.
    for name in ["one", "two"] {
        world.delete(WatchedKind::Pod, name);
    }
    world.deliver_all();
    let evicted = |pod| (pod, EvictionOutcome::Evicted);
    let outcomes = open.victims.into_iter().map(evicted).collect();
    world.step([Event::EvictionsEnded { purpose: open.purpose, outcomes }]);
    for name in ["one", "two"] {
        assert_eq!(world.reasons_of(name), [events::PREEMPTED.name()]);
    }
}

#[test]
fn devices_are_kept_for_a_bounded_time() {
    let mut world = full(&[("one", "40Gi"), ("two", "40Gi")]);
    world.add_important_pod("urgent", "80Gi", 9);
    world.evict_for("urgent");
    world.end_pod("one");
    world.settle();
    // The second victim does not end.
    world.add_pod("other", "40Gi");
    world.pass(Duration::from_secs(290));
    assert!(!world.gets_devices("other"));
    world.pass(Duration::from_secs(11));
    assert!(world.gets_devices("other"));
}

#[test]
fn pod_whose_eviction_is_refused_is_replaced_by_others() {
    let mut world = full(&[("guarded", "40Gi"), ("free", "40Gi")]);
    world.edit(WatchedKind::Pod, "guarded", |pod| {
        pod["metadata"]["creationTimestamp"] = "2026-01-02T00:00:00Z".into();
    });
    world.settle();
    world.add_important_pod("urgent", "40Gi", 9);
    assert_eq!(world.victims("urgent"), ["guarded"], "the younger one");
    world.end_evictions("urgent", |_| refused());
    world.search();
    assert_eq!(world.victims("urgent"), ["free"]);
    assert_eq!(world.reasons_of("guarded"), Vec::<&str>::new(), "it was not evicted");
}

#[test]
fn refused_eviction_is_not_repeated_in_a_loop() {
    let mut world = full(&[("guarded", "80Gi")]);
    world.add_important_pod("urgent", "40Gi", 9);
    let mut attempts = 0;
    for _ in 0..600 {
        if !world.open_evictions.is_empty() {
            attempts += 1;
            world.end_evictions("urgent", |_| refused());
        }
        world.pass(Duration::from_secs(1));
    }
    assert!((4..12).contains(&attempts), "{attempts} in ten minutes");
}

#[test]
fn victims_end_without_further_evictions() {
    let mut world = full(&[("one", "40Gi"), ("two", "40Gi")]);
    world.add_important_pod("urgent", "40Gi", 9);
    world.evict_for("urgent");
    for _ in 0..4 {
        world.pass(Duration::from_secs(60));
        assert!(world.open_evictions.is_empty(), "one victim is enough");
    }
}

#[test]
fn next_leader_waits_for_pods_that_are_ending() {
    let mut world = full(&[("one", "80Gi")]);
    world.add_important_pod("urgent", "40Gi", 9);
    world.evict_for("urgent");
    world.new_leader(None);
    world.settle();
    world.search();
    assert!(world.open_evictions.is_empty(), "its room suffices");
    world.add_pod("other", "80Gi");
    world.end_pod("one");
    assert!(world.gets_devices("urgent"));
}

#[test]
fn pod_of_higher_priority_takes_room_that_is_kept() {
    let mut world = full(&[("low", "80Gi")]);
    world.add_important_pod("middle", "80Gi", 5);
    world.evict_for("middle");
    world.add_important_pod("urgent", "80Gi", 9);
    assert!(world.open_evictions.is_empty(), "the pod that ends makes the room");
    world.end_pod("low");
    assert!(world.gets_devices("urgent"));
    assert!(!world.gets_devices("middle"));
}

#[test]
fn preemptor_placed_elsewhere_keeps_no_devices() {
    let mut world = full(&[("low", "80Gi")]);
    world.add_important_pod("urgent", "80Gi", 9);
    world.evict_for("urgent");
    world.add_node("node-b", 1);
    assert!(world.gets_devices("urgent"));
    assert!(world.place("urgent").unwrap().starts_with("node-b"));
    world.bind("urgent");
    world.end_pod("low");
    world.add_pod("other", "80Gi");
    assert!(world.gets_devices("other"));
}

#[test]
fn mirrors_of_static_pods_are_not_evicted() {
    let mut world = full(&[("static", "80Gi")]);
    world.edit(WatchedKind::Pod, "static", |pod| {
        pod["metadata"]["annotations"] = json!({"kubernetes.io/config.mirror": "hash"});
    });
    world.settle();
    world.add_important_pod("urgent", "80Gi", 9);
    world.pass(Duration::from_secs(60));
    assert!(world.open_evictions.is_empty());
}

#[test]
fn failed_evictions_are_tried_again_after_a_pause() {
    let mut world = full(&[("one", "80Gi")]);
    world.add_important_pod("urgent", "80Gi", 9);
    world.end_evictions("urgent", |_| EvictionOutcome::Failed { message: "no answer".to_owned() });
    world.pass(Duration::from_secs(4));
    assert!(world.open_evictions.is_empty());
    world.pass(Duration::from_secs(2));
    assert_eq!(world.victims("urgent"), ["one"]);
}
