//! Groups: all pods of a group get their devices, or none.

use std::time::Duration;

use serde_json::{Value, json};
use tessera_api::events;
use tessera_controller::core::event::WatchedKind;

use crate::objects;
use crate::world::World;

impl World {
    /// Adds pods of one group, each with a claim for a share.
    fn add_group(&mut self, name: &str, size: usize, memory: &str) -> Vec<String> {
        let names: Vec<String> = (0..size).map(|number| format!("{name}-{number}")).collect();
        for pod in &names {
            self.put(WatchedKind::Claim, objects::claim(pod, memory));
            self.put(WatchedKind::Pod, of_group(objects::pod(pod, &[pod]), name, size));
            self.deliver_all();
        }
        names
    }

    fn placed<'n>(&self, names: &'n [String]) -> Vec<&'n str> {
        names.iter().map(String::as_str).filter(|name| self.place(name).is_some()).collect()
    }

    fn notes_of(&self, pod: &str, reason: events::EventReason) -> Vec<&str> {
        let about = self.notices.iter().filter(|notice| notice.pod.name.as_str() == pod);
        let about = about.filter(|notice| notice.reason.name() == reason.name());
        about.map(|notice| notice.note.as_str()).collect()
    }
}

fn of_group(mut pod: Value, name: &str, size: usize) -> Value {
    pod["metadata"]["annotations"] = json!({
        "gpu.tessera.dev/pod-group": name, "gpu.tessera.dev/pod-group-size": size.to_string(),
    });
    pod
}

#[test]
fn group_that_fits_gets_all_of_its_devices() {
    let mut world = World::new();
    world.add_node("node-a", 2);
    world.add_node("node-b", 2);
    let group = world.add_group("train", 4, "80Gi");
    world.settle();
    assert_eq!(world.placed(&group).len(), 4);
}

#[test]
fn of_two_groups_one_runs_and_the_other_holds_nothing() {
    let mut world = World::new();
    world.add_node("node-a", 4);
    let first = world.add_group("first", 3, "80Gi");
    let second = world.add_group("second", 3, "80Gi");
    world.settle();
    assert_eq!((world.placed(&first).len(), world.placed(&second).len()), (3, 0));
    // Events of a pod follow each other by two seconds.
    world.report_all_notices();
    world.pass(Duration::from_secs(3));
    let note = "the pod's group needs devices for 3 pods at the same time, and there are devices \
                for 1; the first pod that does not fit is `second-1`";
    for pod in &second {
        let notes = world.notes_of(pod, events::GROUP_DOES_NOT_FIT);
        assert_eq!(notes, [format!("ResourceClaim {pod}: {note}")]);
    }
    // A pod that comes later takes what the group cannot use.
    world.add_pod("single", "80Gi");
    world.settle();
    assert!(world.place("single").is_some());
    for pod in first.iter().map(String::as_str).chain(["single"]) {
        world.end_pod(pod);
    }
    world.pass(Duration::from_secs(3));
    world.settle();
    assert_eq!(world.placed(&second).len(), 3);
}

#[test]
fn group_waits_until_all_of_its_pods_exist() {
    let mut world = World::new();
    world.add_node("node-a", 4);
    let pods = ["a", "b"];
    for pod in pods {
        world.put(WatchedKind::Claim, objects::claim(pod, "10Gi"));
    }
    world.put(WatchedKind::Pod, of_group(objects::pod("a", &["a"]), "train", 2));
    world.settle();
    assert_eq!(world.place("a"), None);
    let notes = world.notes_of("a", events::GROUP_INCOMPLETE);
    assert!(notes[0].contains("the pod's group has 2 pods, and 1 of them"), "{notes:?}");
    world.put(WatchedKind::Pod, of_group(objects::pod("b", &["b"]), "train", 2));
    world.settle();
    assert!(pods.iter().all(|pod| world.place(pod).is_some()));
}

#[test]
fn pod_whose_write_failed_gets_its_devices_beside_the_others() {
    let mut world = World::new();
    world.add_node("node-a", 2);
    let group = world.add_group("train", 2, "80Gi");
    world.deliver_all();
    let failed = world.open_of("train-1").unwrap();
    world.refuse(failed, false);
    world.answer(failed);
    // What the group has is not given to others meanwhile.
    world.add_pod("single", "80Gi");
    world.settle();
    assert_eq!(world.placed(&group), ["train-0"]);
    world.pass(Duration::from_secs(60));
    world.settle();
    assert!(world.placed(&group).contains(&"train-0"));
    assert_eq!(world.placed(&group).len() + usize::from(world.place("single").is_some()), 2);
}

#[test]
fn pod_that_takes_the_place_of_a_failed_one_joins_its_group() {
    let mut world = World::new();
    world.add_node("node-a", 2);
    let group = world.add_group("train", 2, "80Gi");
    world.settle();
    for pod in &group {
        world.bind(pod);
    }
    world.settle();
    world.end_pod("train-1");
    world.put(WatchedKind::Claim, objects::claim("again", "80Gi"));
    world.put(WatchedKind::Pod, of_group(objects::pod("again", &["again"]), "train", 2));
    world.settle();
    world.pass(Duration::from_secs(3));
    world.settle();
    assert!(world.place("again").is_some());
}
