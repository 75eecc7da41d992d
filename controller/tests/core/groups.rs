//! Groups: all pods of a group get their devices, or none.

use std::collections::BTreeSet;
use std::time::Duration;

use k8s_openapi::api::resource::v1::ResourceClaim;
use serde_json::{Value, json};
use tessera_api::events;
use tessera_controller::core::effect::BarrierOutcome;
use tessera_controller::core::event::{Change, EvictionOutcome, WatchedKind};

use crate::objects;
use crate::resizes::apply_devices;
use crate::world::World;

impl World {
    /// Adds pods of one group, each with a claim for a share.
    pub(crate) fn add_group(&mut self, name: &str, size: usize, memory: &str) -> Vec<String> {
        let names: Vec<String> = (0..size).map(|number| format!("{name}-{number}")).collect();
        for pod in &names {
            self.put(WatchedKind::Claim, objects::claim(pod, memory));
            self.put(WatchedKind::Pod, of_group(objects::pod(pod, &[pod]), name, size));
            self.deliver_all();
        }
        names
    }

    /// Has kube-scheduler find nodes for all pods of a group, and bind them.
    pub(crate) fn bind_group(&mut self, names: &[String]) {
        names.iter().for_each(|pod| self.reserve(pod));
        self.settle();
        names.iter().for_each(|pod| self.assign(pod));
        self.settle();
        assert!(names.iter().all(|pod| self.is_bound(pod)), "{names:?} are bound");
    }

    fn is_bound(&self, pod: &str) -> bool {
        self.get(WatchedKind::Pod, pod).is_some_and(|pod| pod["spec"]["nodeName"].is_string())
    }

    pub(crate) fn placed<'n>(&self, names: &'n [String]) -> Vec<&'n str> {
        names.iter().map(String::as_str).filter(|name| self.place(name).is_some()).collect()
    }

    pub(crate) fn notes_of(&self, pod: &str, reason: events::EventReason) -> Vec<&str> {
        let about = self.notices.iter().filter(|notice| notice.pod.name.as_str() == pod);
        let about = about.filter(|notice| notice.reason.name() == reason.name());
        about.map(|notice| notice.note.as_str()).collect()
    }
}

impl World {
    /// Returns true if all binding conditions of the claim's devices are true, and no failure
    /// condition is.
    pub(crate) fn has_met_conditions(&self, claim: &str) -> bool {
        let object = self.get(WatchedKind::Claim, claim).unwrap();
        let results = object["status"]["allocation"]["devices"]["results"].as_array();
        results.into_iter().flatten().all(|result| {
            let all = |field: &str| result[field].as_array().cloned().unwrap_or_default();
            let is_true = |condition: &Value| has_condition(&object, result, condition);
            all("bindingConditions").iter().all(is_true)
                && !all("bindingFailureConditions").iter().any(is_true)
        })
    }

    /// Ends PreBind of the pods that wait for a claim that has failed, and gives their reservations
    /// back, as kube-scheduler does.
    pub(crate) fn end_failed(&mut self) {
        for pod in self.names(WatchedKind::Pod) {
            let object = self.get(WatchedKind::Pod, &pod).unwrap();
            let claims = self.claims_of(&pod);
            let failed = |claim: &String| {
                let text = self.get(WatchedKind::Claim, claim).unwrap().to_string();
                text.contains("\"type\":\"gpu.tessera.dev/group-failed\"")
            };
            if object["spec"]["nodeName"].is_null() && claims.iter().any(failed) {
                for claim in claims {
                    self.edit(WatchedKind::Claim, &claim, |claim| {
                        claim["status"]["reservedFor"] = Value::Null;
                    });
                }
            }
        }
    }

    /// Checks that as many pods of the claim's group as it has are bound or have reserved their
    /// claims, as far as the core knows.
    pub(crate) fn check_complete(&self, claim: &ResourceClaim) {
        let pod = claim.metadata.name.clone().unwrap();
        let known = |kind, name: &str| self.known.get(&(kind, name.to_owned()));
        let of = |pod: &Value| {
            (pod["metadata"]["annotations"].clone(), pod["spec"]["schedulingGroup"].clone())
        };
        let group = of(known(WatchedKind::Pod, &pod).unwrap());
        let size: usize = match group.1["podGroupName"].as_str() {
            Some(name) => {
                let object = known(WatchedKind::PodGroup, name).unwrap();
                let gang = &object["spec"]["schedulingPolicy"]["gang"];
                gang["minCount"].as_u64().unwrap().try_into().unwrap()
            }
            None => group.0["gpu.tessera.dev/pod-group-size"].as_str().unwrap().parse().unwrap(),
        };
        let members = self
            .known
            .iter()
            .filter(|((kind, _), object)| *kind == WatchedKind::Pod && of(object) == group);
        let has_arrived = |((_, name), pod): &(&(WatchedKind, String), &Value)| {
            let claim = known(WatchedKind::Claim, name);
            let reserved = claim.is_some_and(|claim| {
                claim["status"]["reservedFor"].to_string().contains(&format!("uid-{name}"))
            });
            pod["spec"]["nodeName"].is_string() || reserved
        };
        let arrived = members.filter(has_arrived).count();
        assert!(arrived >= size, "{pod}: {arrived} of {size} pods have a node");
    }
}

fn has_condition(claim: &Value, result: &Value, condition: &Value) -> bool {
    let devices = claim["status"]["devices"].as_array();
    devices.into_iter().flatten().any(|device| {
        let is_it = ["driver", "pool", "device"].iter().all(|key| device[*key] == result[*key]);
        let conditions = device["conditions"].as_array().into_iter().flatten();
        let mut conditions = conditions.filter(|one| one["status"] == "True");
        is_it && conditions.any(|one| one["type"] == *condition)
    })
}

/// Sets the condition of the outcome on the devices of a claim.
pub(crate) fn conclude(claim: &mut ResourceClaim, outcome: BarrierOutcome) {
    let condition = match outcome {
        BarrierOutcome::Complete => "gpu.tessera.dev/group-complete",
        BarrierOutcome::Failed => "gpu.tessera.dev/group-failed",
    };
    let object = json!(claim);
    let results = object["status"]["allocation"]["devices"]["results"].as_array().unwrap();
    let device = |result: &Value| {
        json!({
            "driver": result["driver"], "pool": result["pool"], "device": result["device"],
            "shareID": result["shareID"],
            "conditions": [{"type": condition, "status": "True", "reason": "r", "message": "",
                "lastTransitionTime": "2026-01-01T00:00:00Z"}],
        })
    };
    apply_devices(claim, results.iter().map(device));
}

pub(crate) fn of_group(mut pod: Value, name: &str, size: usize) -> Value {
    pod["metadata"]["annotations"] = json!({
        "gpu.tessera.dev/pod-group": name, "gpu.tessera.dev/pod-group-size": size.to_string(),
    });
    pod
}

/// A node with two GPUs, and a group of two pods that need one each.
fn pair() -> (World, Vec<String>) {
    let mut world = World::new();
    world.add_node("node-a", 2);
    let group = world.add_group("train", 2, "80Gi");
    (world, group)
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
fn pods_of_equal_groups_are_all_told_and_counted() {
    let mut world = World::new();
    world.add_node("node-a", 4);
    let groups: Vec<Vec<String>> =
        (0..40).map(|n| world.add_group(&format!("g{n}"), 5, "80Gi")).collect();
    let pending = world.figures.pending.clone().unwrap();
    assert_eq!(pending.values().sum::<i64>(), 200);
    let tell_all = |world: &mut World| {
        // A few pods at a time, and events of a pod two seconds apart.
        for _ in 0..40 {
            world.report_all_notices();
            world.pass(Duration::from_millis(200));
        }
        world.report_all_notices();
    };
    world.settle();
    tell_all(&mut world);
    for (n, group) in groups.iter().enumerate() {
        let first = format!("there are devices for 4; the first pod that does not fit is `g{n}-4`");
        for pod in group {
            let notes = world.notes_of(pod, events::GROUP_DOES_NOT_FIT);
            assert!(notes.len() == 1 && notes[0].ends_with(&first), "{pod}: {notes:?}");
        }
    }
    // Another pod takes a device.
    world.put(WatchedKind::Claim, objects::claim("single", "80Gi"));
    world.put(WatchedKind::Pod, objects::important(objects::pod("single", &["single"]), 10));
    world.settle();
    tell_all(&mut world);
    for pod in groups.iter().flatten() {
        let notes = world.notes_of(pod, events::GROUP_DOES_NOT_FIT);
        assert!(notes.last().unwrap().contains("there are devices for 3"), "{pod}: {notes:?}");
    }
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
fn pods_of_a_pod_group_wait_for_the_object_and_its_minimum() {
    let mut world = World::new();
    world.add_node("node-a", 4);
    let pods = ["a", "b", "c"].map(str::to_owned);
    for pod in &pods {
        world.put(WatchedKind::Claim, objects::claim(pod, "10Gi"));
        let mut object = objects::pod(pod, &[pod]);
        object["spec"]["schedulingGroup"] = json!({"podGroupName": "train"});
        world.put(WatchedKind::Pod, object);
    }
    world.settle();
    assert!(world.placed(&pods).is_empty());
    let notes = world.notes_of("a", events::GROUP_INCOMPLETE);
    assert!(notes[0].contains("the PodGroup that the pod names does not exist"), "{notes:?}");
    let pod_group = |minimum: u32| {
        json!({
            "metadata": {"namespace": "default", "name": "train"},
            "spec": {"schedulingPolicy": {"gang": {"minCount": minimum}}},
        })
    };
    world.put(WatchedKind::PodGroup, pod_group(4));
    world.settle();
    assert!(world.placed(&pods).is_empty());
    world.put(WatchedKind::PodGroup, pod_group(3));
    world.settle();
    assert_eq!(world.placed(&pods).len(), 3);
    world.bind_group(&pods);
}

#[test]
fn claim_of_a_pod_group_is_allocated_once_for_all_its_pods() {
    let mut world = World::new();
    for node in ["node-a", "node-b"] {
        world.add_node(node, 4);
    }
    let pod_group = json!({
        "metadata": {"namespace": "default", "name": "train"},
        "spec": {"schedulingPolicy": {"gang": {"minCount": 2}}},
    });
    world.put(WatchedKind::PodGroup, pod_group);
    let mut claim = objects::claim("train-gpu-x", "10Gi");
    claim["metadata"]["ownerReferences"] = json!([{
        "apiVersion": "scheduling.k8s.io/v1beta1", "kind": "PodGroup", "name": "train",
        "uid": "uid-train", "controller": true,
    }]);
    world.put(WatchedKind::Claim, claim);
    let pods = ["a", "b", "c"];
    for name in pods {
        let mut pod = objects::pod(name, &[]);
        pod["spec"]["schedulingGroup"] = json!({"podGroupName": "train"});
        pod["spec"]["resourceClaims"] = json!([{"name": "gpu", "resourceClaimTemplateName": "t"}]);
        pod["status"]["resourceClaimStatuses"] =
            json!([{"name": "gpu", "resourceClaimName": "train-gpu-x"}]);
        world.put(WatchedKind::Pod, pod);
        if name == "a" {
            world.settle();
            assert_eq!(world.place("train-gpu-x"), None, "the group has two pods");
        }
    }
    world.settle();
    let place = world.place("train-gpu-x").unwrap();
    assert_eq!(world.writes.len(), 1);
    assert!(world.has_met_conditions("train-gpu-x"), "no barrier");
    // kube-scheduler reserves it for the PodGroup and binds the pods.
    world.edit(WatchedKind::Claim, "train-gpu-x", |claim| {
        claim["status"]["reservedFor"] = json!([{
            "apiGroup": "scheduling.k8s.io", "resource": "podgroups",
            "name": "train", "uid": "uid-train",
        }]);
    });
    let node = place.split('/').next().unwrap();
    for name in pods {
        world.edit(WatchedKind::Pod, name, |pod| pod["spec"]["nodeName"] = node.into());
    }
    world.settle();
    world.pass(Duration::from_secs(120));
    for name in pods {
        world.edit(WatchedKind::Pod, name, |pod| pod["status"]["phase"] = "Succeeded".into());
    }
    world.settle();
    world.pass(Duration::from_secs(120));
    assert_eq!(world.place("train-gpu-x"), Some(place), "the PodGroup keeps it");
    assert_eq!(world.writes.len(), 1);
    let expected = events::GROUP_INCOMPLETE.name();
    let mut notices = world.notices.iter();
    assert!(notices.all(|notice| notice.reason.name() == expected), "{:?}", world.notices);
}

#[test]
fn pods_get_devices_alone_where_no_pod_groups_are_served() {
    let mut world = World::new();
    world.add_node("node-a", 4);
    world.change(Change::NotServed(WatchedKind::VolcanoPodGroup));
    world.put(WatchedKind::Claim, objects::claim("a", "10Gi"));
    let mut pod = objects::pod("a", &["a"]);
    pod["metadata"]["annotations"] = json!({"scheduling.k8s.io/group-name": "left-over"});
    world.put(WatchedKind::Pod, pod);
    world.settle();
    assert!(world.place("a").is_some());
}

#[test]
fn pod_whose_write_failed_gets_its_devices_beside_the_others() {
    let (mut world, group) = pair();
    world.deliver_all();
    let failed = world.open_of("train-1").unwrap();
    world.refuse(failed, false);
    world.answer(failed);
    world.settle();
    assert_eq!(world.placed(&group), ["train-0"]);
    world.pass(Duration::from_secs(5));
    world.settle();
    assert_eq!(world.placed(&group).len(), 2);
    world.bind_group(&group);
}

#[test]
fn pod_that_takes_the_place_of_a_failed_one_joins_its_group() {
    let (mut world, group) = pair();
    world.settle();
    world.bind_group(&group);
    world.end_pod("train-1");
    world.put(WatchedKind::Claim, objects::claim("again", "80Gi"));
    world.put(WatchedKind::Pod, of_group(objects::pod("again", &["again"]), "train", 2));
    world.settle();
    world.pass(Duration::from_secs(3));
    world.settle();
    assert!(world.place("again").is_some());
}

#[test]
fn no_pod_is_bound_before_all_have_a_node() {
    let (mut world, group) = pair();
    world.settle();
    world.bind("train-0");
    world.settle();
    assert!(!world.is_bound("train-0"), "the other has no node");
    world.bind("train-1");
    world.settle();
    world.bind("train-0");
    world.bind("train-1");
    world.settle();
    assert!(group.iter().all(|pod| world.is_bound(pod)));
    world.pass(Duration::from_secs(600));
    world.settle();
    assert_eq!(world.placed(&group).len(), 2);
}

#[test]
fn group_that_is_not_placed_in_time_holds_nothing() {
    let (mut world, group) = pair();
    world.settle();
    world.bind("train-0");
    world.settle();
    world.report_unschedulable("train-1", "0/1 nodes are available: 1 node(s) have no port");
    world.settle();
    for _ in 0..8 {
        world.pass(Duration::from_secs(5));
        world.settle();
        world.end_failed();
        world.settle();
    }
    world.pass(Duration::from_secs(3));
    world.settle();
    assert!(world.placed(&group).is_empty(), "{:?}", world.placed(&group));
    let notes = world.notes_of("train-0", events::RESCHEDULING);
    assert!(notes.iter().any(|note| note.contains("nodes for 1 of the 2 pods")), "{notes:?}");
    world.add_pod("single", "80Gi");
    world.settle();
    assert!(world.place("single").is_some());
}

#[test]
fn group_goes_on_after_a_change_of_the_leader() {
    let (mut world, group) = pair();
    world.settle();
    group.iter().for_each(|pod| world.reserve(pod));
    world.deliver_all();
    // One condition was set, and the other write was not sent.
    let id = world.open_of("train-0").unwrap();
    world.carry_out(id);
    world.new_leader(None);
    world.settle();
    group.iter().for_each(|pod| world.assign(pod));
    world.settle();
    assert!(group.iter().all(|pod| world.is_bound(pod)));
}

#[test]
fn group_gets_devices_in_one_rack_or_is_told_the_label() {
    let mut world = World::new();
    for (node, gpus) in [("node-a", 2), ("node-b", 1)] {
        world.add_node(node, gpus);
        world.edit(WatchedKind::Node, node, |node| {
            let rack = node["metadata"]["name"].clone();
            node["metadata"]["labels"] = json!({"example.com/rack": rack});
        });
    }
    let add = |world: &mut World, name: &str, size: usize| -> Vec<String> {
        let names: Vec<String> = (0..size).map(|number| format!("{name}-{number}")).collect();
        for pod in &names {
            world.put(WatchedKind::Claim, objects::claim(pod, "80Gi"));
            let mut object = of_group(objects::pod(pod, &[pod]), name, size);
            object["metadata"]["annotations"]["gpu.tessera.dev/pod-group-required-topology"] =
                json!("example.com/rack");
            world.put(WatchedKind::Pod, object);
        }
        world.settle();
        names
    };
    let large = add(&mut world, "large", 3);
    assert!(world.placed(&large).is_empty());
    world.report_all_notices();
    world.pass(Duration::from_secs(3));
    let notes = world.notes_of("large-0", events::GROUP_DOES_NOT_FIT);
    let label = "one value of the label `example.com/rack`, which the group requires";
    assert!(notes.iter().any(|note| note.contains(label)), "{notes:?}");
    let small = add(&mut world, "small", 2);
    assert_eq!(world.placed(&small).len(), 2);
    assert!(small.iter().all(|pod| world.place(pod).is_some_and(|place| place.contains("node-a"))));
}

/// A bound group of two pods with a GPU each, and a pod of higher priority that needs one.
fn preempted_pair() -> (World, Vec<String>) {
    let (mut world, group) = pair();
    world.settle();
    world.bind_group(&group);
    world.put(WatchedKind::Claim, objects::claim("urgent", "80Gi"));
    let urgent = objects::important(objects::pod("urgent", &["urgent"]), 9);
    world.put(WatchedKind::Pod, urgent);
    world.deliver_all();
    world.pass(Duration::from_millis(50));
    (world, group)
}

#[test]
fn a_group_is_evicted_as_a_whole_and_waits_as_a_whole() {
    let (mut world, group) = preempted_pair();
    let victims: BTreeSet<String> = world.victims("urgent").into_iter().collect();
    assert_eq!(victims, group.iter().cloned().collect(), "one GPU would be enough");
    world.end_evictions("urgent", |_| EvictionOutcome::Evicted);
    world.deliver_all();
    group.iter().for_each(|pod| world.end_pod(pod));
    world.settle();
    assert!(world.place("urgent").is_some());
    // Their owner creates them again: one GPU is free, and the group has none.
    for name in ["again-0", "again-1"] {
        world.put(WatchedKind::Claim, objects::claim(name, "80Gi"));
        world.put(WatchedKind::Pod, of_group(objects::pod(name, &[name]), "train", 2));
    }
    world.settle();
    assert_eq!((world.place("again-0"), world.place("again-1")), (None, None));
}

#[test]
fn a_refused_eviction_protects_the_group() {
    let (mut world, _) = preempted_pair();
    let message = "the disruption budget needs 2 healthy pods".to_owned();
    world.end_evictions("urgent", |_| EvictionOutcome::Refused { message: message.clone() });
    world.pass(Duration::from_secs(5));
    assert!(world.open_evictions.is_empty(), "not the other one either");
}
