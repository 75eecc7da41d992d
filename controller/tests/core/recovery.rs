//! Recovery: which pods are evicted for the trouble of their GPUs, and when.

use std::time::Duration;

use serde_json::{Value, json};
use tessera_api::events;
use tessera_controller::core::event::{EvictionOutcome, WatchedKind};
use tessera_controller::core::{RecoveryPolicy, RecoverySettings};

use crate::objects;
use crate::world::World;

const DELAY: Duration = Duration::from_secs(60);

/// A cluster with one node of one GPU that these pods share, each with 20 GiB.
fn world(policy: RecoveryPolicy, pods: &[&str]) -> World {
    let mut world = World::new();
    world.add_node("node-a", 1);
    for name in pods {
        world.add_bound_pod(name, "20Gi");
    }
    world.recover(RecoverySettings { policy, delay: DELAY });
    world.settle();
    world
}

impl World {
    fn edit_gpu(&mut self, node: &str, edit: impl FnOnce(&mut Value)) {
        let slice = format!("slice-{node}");
        self.edit(WatchedKind::Slice, &slice, |slice| edit(&mut slice["spec"]["devices"]));
        self.deliver_all();
    }

    fn set_health(&mut self, cause: Option<&str>) {
        self.set_health_of("node-a", cause);
    }

    fn set_health_of(&mut self, node: &str, cause: Option<&str>) {
        let fence = json!({"key": "gpu.tessera.dev/managed", "effect": "NoSchedule"});
        let taint = cause.map(|cause| {
            json!({"key": "gpu.tessera.dev/unhealthy", "value": cause, "effect": "NoSchedule"})
        });
        let taints: Vec<Value> = [fence].into_iter().chain(taint).collect();
        self.edit_gpu(node, |devices| devices[0]["taints"] = taints.into());
    }

    fn evicting(&self) -> Vec<&str> {
        self.open_evictions.keys().map(String::as_str).collect()
    }
}

#[test]
fn pods_of_an_unhealthy_gpu_are_evicted_after_the_delay() {
    let mut world = world(RecoveryPolicy::Unhealthy, &["one", "two"]);
    world.set_health(Some("Xid79"));
    world.pass(DELAY - Duration::from_secs(1));
    assert!(world.evicting().is_empty());
    world.pass(Duration::from_secs(1));
    assert_eq!(world.evicting(), ["one", "two"]);
    for pod in ["one", "two"] {
        world.end_evictions(pod, |_| EvictionOutcome::Evicted);
    }
    world.deliver_all();
    world.pass(DELAY * 2);
    assert!(world.evicting().is_empty(), "they are ending");
    let told = |notice: &&_| {
        let notice: &tessera_controller::core::effect::Notice = notice;
        notice.reason.name() == events::EVICTED_FROM_GPU.name() && notice.note.contains("Xid79")
    };
    assert_eq!(world.notices.iter().filter(told).count(), 2);
}

#[test]
fn gpu_that_recovers_in_time_keeps_its_pods() {
    let mut world = world(RecoveryPolicy::Always, &["one"]);
    world.set_health(Some("Xid79"));
    world.pass(DELAY / 2);
    world.set_health(None);
    world.pass(DELAY * 2);
    assert!(world.evicting().is_empty());
    // The time begins anew.
    world.set_health(Some("Xid79"));
    world.pass(DELAY / 2);
    assert!(world.evicting().is_empty());
}

#[test]
fn policy_never_evicts_nothing() {
    let mut world = world(RecoveryPolicy::Never, &["one"]);
    world.set_health(Some("Xid79"));
    world.pass(DELAY * 10);
    assert!(world.evicting().is_empty());
}

#[test]
fn claim_that_tolerates_the_taint_is_left_alone() {
    let mut world = World::new();
    world.add_node("node-a", 1);
    let mut claim = objects::claim("brave", "20Gi");
    claim["spec"]["devices"]["requests"][0]["exactly"]["tolerations"] =
        json!([{"key": "gpu.tessera.dev/unhealthy", "operator": "Exists"}]);
    world.put(WatchedKind::Claim, claim);
    world.put(WatchedKind::Pod, objects::pod("brave", &["brave"]));
    world.settle();
    world.bind("brave");
    world.settle();
    world.recover(RecoverySettings { policy: RecoveryPolicy::Always, delay: DELAY });
    world.settle();
    world.set_health(Some("Xid79"));
    world.pass(DELAY * 2);
    assert!(world.evicting().is_empty());
}

#[test]
fn refused_eviction_is_tried_again_later() {
    let mut world = world(RecoveryPolicy::Unhealthy, &["one", "two"]);
    world.set_health(Some("Xid79"));
    world.pass(DELAY);
    let refused = || EvictionOutcome::Refused { message: "a budget".to_owned() };
    world.end_evictions("one", |_| refused());
    assert_eq!(world.evicting(), ["two"], "one refusal does not stop the others");
    world.end_evictions("two", |_| EvictionOutcome::Failed { message: "no answer".to_owned() });
    assert!(world.evicting().is_empty());
    world.pass(Duration::from_secs(10));
    assert_eq!(world.evicting(), ["one", "two"]);
}

#[test]
fn gpu_that_is_not_published_is_trouble_for_policy_always() {
    for (policy, expected) in
        [(RecoveryPolicy::Unhealthy, vec![]), (RecoveryPolicy::Always, vec!["one"])]
    {
        let mut world = world(policy, &["one"]);
        world.edit_gpu("node-a", |devices| *devices = json!([]));
        world.pass(DELAY);
        assert_eq!(world.evicting(), expected, "{policy:?}");
    }
}

#[test]
fn slices_that_the_kubelet_deletes_are_no_trouble() {
    let mut world = world(RecoveryPolicy::Always, &["one"]);
    let slice = world.get(WatchedKind::Slice, "slice-node-a").unwrap();
    world.delete(WatchedKind::Slice, "slice-node-a");
    world.deliver_all();
    world.pass(DELAY * 2);
    assert!(world.evicting().is_empty(), "no slice");
    let mut part = slice;
    part["spec"]["pool"]["resourceSliceCount"] = 2.into();
    part["spec"]["devices"] = json!([]);
    world.put(WatchedKind::Slice, part);
    world.deliver_all();
    world.pass(DELAY * 2);
    assert!(world.evicting().is_empty(), "one slice of two");
}

#[test]
fn overcommitted_gpu_loses_as_few_pods_as_necessary() {
    let mut world = world(RecoveryPolicy::Always, &["one", "two", "three"]);
    world.edit(WatchedKind::Pod, "three", |pod| pod["spec"]["priority"] = 9.into());
    world.deliver_all();
    let mut slice = world.get(WatchedKind::Slice, "slice-node-a").unwrap();
    slice["spec"]["devices"][0]["capacity"]["memory"]["value"] = "40Gi".into();
    world.put_slice_of_less(slice);
    world.pass(DELAY);
    assert_eq!(world.evicting(), ["two"], "the youngest of the lowest priority");
}

#[test]
fn failed_rack_is_emptied_in_portions() {
    let mut world = World::new();
    let nodes = ["node-1", "node-2", "node-3", "node-4", "node-5"];
    // A GPU has room for the cores of four of them.
    for node in nodes {
        world.add_node(node, 1);
    }
    for number in 0..20 {
        let name = format!("pod-{number:02}");
        world.add_bound_pod(&name, "1Gi");
    }
    world.recover(RecoverySettings { policy: RecoveryPolicy::Unhealthy, delay: DELAY });
    world.settle();
    for node in nodes {
        world.set_health_of(node, Some("Xid79"));
    }
    world.pass(DELAY);
    assert_eq!(world.evicting().len(), 16);
    let first = world.evicting()[0].to_owned();
    world.end_evictions(&first, |_| EvictionOutcome::Evicted);
    assert_eq!(world.evicting().len(), 16, "the next one follows");
}
