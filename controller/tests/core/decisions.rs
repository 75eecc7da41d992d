//! Decisions: allocation, failed writes, release, repair and overcommitment.

use std::time::Duration;

use serde_json::{Value, json};
use tessera_controller::core::effect::ClaimChange;
use tessera_controller::core::event::WatchedKind;

use crate::objects;
use crate::world::World;

fn seconds(n: u64) -> Duration {
    Duration::from_secs(n)
}

fn millis(n: u64) -> Duration {
    Duration::from_millis(n)
}

/// A cluster with one node of this number of GPUs.
fn cluster(gpus: usize) -> World {
    let mut world = World::new();
    world.add_node("node-a", gpus);
    world
}

/// Changes of claims that the core has started, by name of the claim.
fn changes(world: &World) -> Vec<(String, &'static str)> {
    let changes = world.writes.iter().map(|write| {
        let change = match &write.change {
            ClaimChange::Allocate(_) => "allocate",
            ClaimChange::Restore(_) => "restore",
            ClaimChange::Resize(_) => "resize",
            ClaimChange::Release => "release",
            ClaimChange::Deallocate => "deallocate",
            ClaimChange::Conclude(_) => "conclude",
        };
        (write.object.metadata.name.clone().unwrap(), change)
    });
    changes.collect()
}

fn count(world: &World, claim: &str, change: &str) -> usize {
    changes(world).iter().filter(|(of, what)| of == claim && *what == change).count()
}

#[test]
fn pod_is_allocated_when_all_kinds_are_listed() {
    let mut world = cluster(1);
    world.add_pod("a", "50Gi");
    assert_eq!(changes(&world), [("a".to_owned(), "allocate")]);
    world.settle();
    assert_eq!(world.place("a").unwrap(), "node-a/gpu-0");
    assert!(!world.has_open_writes());
}

#[test]
fn open_write_counts_as_taken() {
    let mut world = cluster(1);
    world.add_pod("a", "50Gi");
    world.add_pod("b", "50Gi");
    assert_eq!(changes(&world), [("a".to_owned(), "allocate")]);
    world.settle();
    assert_eq!(world.place("b"), None);
    // The answer to a write that was not stored frees the devices.
    world.end_pod("a");
    world.settle();
    world.pass(seconds(3));
    world.settle();
    assert_eq!(world.place("b").unwrap(), "node-a/gpu-0");
}

#[test]
fn conflict_is_decided_again_at_once_and_then_after_pauses() {
    let mut world = cluster(1);
    world.add_pod("a", "50Gi");
    for (conflicts, pause) in [(1, 0), (2, 50), (3, 100), (4, 200)] {
        let id = world.open_of("a").unwrap();
        world.touch("a");
        world.carry_out(id);
        world.answer(id);
        if pause > 0 {
            assert_eq!(world.open_of("a"), None, "after {conflicts} conflicts");
            world.pass(millis(pause - 1));
            assert_eq!(world.open_of("a"), None, "after {conflicts} conflicts");
            world.pass(millis(1));
        }
        assert!(world.open_of("a").is_some(), "after {conflicts} conflicts");
    }
    world.settle();
    assert!(world.place("a").is_some());
}

#[test]
fn refused_write_is_repeated_ever_more_rarely() {
    for (is_lasting, pauses) in [(false, [1, 2, 4, 8, 10, 10]), (true, [1, 2, 4, 8, 16, 32])] {
        let mut world = cluster(1);
        world.add_pod("a", "50Gi");
        for pause in pauses {
            let id = world.open_of("a").unwrap();
            world.refuse(id, is_lasting);
            world.pass(seconds(pause) - millis(1));
            assert_eq!(world.open_of("a"), None);
            world.pass(millis(1));
            assert!(world.open_of("a").is_some(), "{pause} s after a refusal");
        }
    }
}

/// Has the API server refuse all writes of the claim until the pod waits for a minute.
fn deny(world: &mut World, claim: &str) {
    for pause in [1, 2, 4, 8, 16, 32] {
        let id = world.open_of(claim).unwrap();
        world.refuse(id, true);
        world.pass(seconds(pause));
    }
    let id = world.open_of(claim).unwrap();
    world.refuse(id, true);
    // The claim itself is left alone for as long.
    world.pass(seconds(2));
}

#[test]
fn denied_pod_is_planned_again_when_its_claim_changes() {
    let mut world = cluster(1);
    world.add_pod("a", "50Gi");
    deny(&mut world, "a");
    world.touch("a");
    world.report_unschedulable("a", "0/1 nodes are available: 1 cannot allocate all claims.");
    world.add_node("node-b", 1);
    assert_eq!(world.open_of("a"), None, "no policy sees a difference");
    world.edit(WatchedKind::Claim, "a", |claim| claim["metadata"]["labels"] = json!({"team": "x"}));
    world.deliver_all();
    let id = world.open_of("a").expect("a policy may allow it now");
    world.refuse(id, true);
    world.pass(seconds(2));
    assert!(world.open_of("a").is_some(), "the pauses start again");
}

#[test]
fn denied_pod_is_planned_again_when_a_class_changes() {
    let mut world = cluster(1);
    world.add_pod("a", "50Gi");
    deny(&mut world, "a");
    world.edit(WatchedKind::Class, "gpu.tessera.dev", |_| {});
    world.deliver_all();
    assert!(world.open_of("a").is_some());
}

#[test]
fn undecided_pod_is_planned_again_when_what_it_requests_changes() {
    let mut world = World::with_steps_per_pod(1);
    world.add_node("node-a", 2);
    world.add_pod("a", "20Gi");
    let is_searched = |world: &World| world.figures.undecided_plans == 1;
    assert!(is_searched(&world));
    for pause in [1, 2, 4, 8, 16, 32] {
        world.pass(seconds(pause));
        assert!(is_searched(&world), "{pause} s after the last search");
    }
    world.add_node("node-b", 2);
    assert!(!is_searched(&world), "other devices do not make the search cheaper");
    world.edit(WatchedKind::Claim, "a", |claim| claim["metadata"]["labels"] = json!({"team": "x"}));
    world.deliver_all();
    assert!(!is_searched(&world), "a tenant cannot have the search repeated");
    world.edit(WatchedKind::Class, "gpu.tessera.dev", |_| {});
    world.deliver_all();
    assert!(is_searched(&world));
    world.pass(seconds(1));
    assert!(is_searched(&world), "the pauses start again");
}

#[test]
fn denied_claim_of_two_is_written_ever_more_rarely() {
    let mut world = cluster(1);
    for name in ["x", "y"] {
        world.put(WatchedKind::Claim, objects::claim(name, "20Gi"));
    }
    world.put(WatchedKind::Pod, objects::pod("both", &["x", "y"]));
    world.deliver_all();
    let first = world.open_of("x").unwrap();
    world.carry_out(first);
    world.answer(first);
    world.deliver_all();
    for pause in [1, 2, 4, 8] {
        let id = world.open_of("y").unwrap();
        world.refuse(id, true);
        world.pass(seconds(pause) - millis(1));
        assert_eq!(world.open_of("y"), None, "{pause} s after a refusal");
        world.pass(millis(1));
    }
    assert!(world.open_of("y").is_some());
}

/// A pod of which kube-scheduler reports that claims are not allocated, with claim `x` allocated
/// and the write of claim `y` open.
fn half_allocated() -> World {
    let mut world = cluster(1);
    for name in ["x", "y"] {
        world.put(WatchedKind::Claim, objects::claim(name, "20Gi"));
    }
    world.put(WatchedKind::Pod, objects::pod("both", &["x", "y"]));
    world.deliver_all();
    let first = world.open_of("x").unwrap();
    world.carry_out(first);
    world.answer(first);
    world.report_unschedulable("both", "0/1 nodes are available: 1 cannot allocate all claims.");
    world.deliver_all();
    world
}

/// Refuses every write of `y` for this number of seconds and stores those of `x`. Returns the
/// number of seconds in which `x` was allocated.
fn refuse_second(world: &mut World, for_seconds: u64, is_lasting: bool) -> usize {
    let mut allocated = 0;
    for _ in 0..for_seconds {
        world.open_of("y").iter().for_each(|id| world.refuse(*id, is_lasting));
        if let Some(id) = world.open_of("x") {
            world.carry_out(id);
            world.answer(id);
            world.deliver_all();
        }
        world.open_of("y").iter().for_each(|id| world.refuse(*id, is_lasting));
        world.pass(seconds(1));
        allocated += usize::from(world.place("x").is_some());
    }
    allocated
}

#[test]
fn half_allocated_pod_releases_its_devices_in_time() {
    for is_lasting in [true, false] {
        let mut world = half_allocated();
        refuse_second(&mut world, 19, is_lasting);
        assert_eq!(count(&world, "x", "release"), 0, "the write may succeed soon");
        refuse_second(&mut world, 3, is_lasting);
        assert_eq!(count(&world, "x", "release"), 1);
        assert_eq!(world.place("x"), None);
        let note = world.notices.iter().find(|notice| notice.reason.name() == "Rescheduling");
        assert!(note.unwrap().note.contains("another claim of the pod"));
    }
}

#[test]
fn half_allocated_pod_is_allocated_again_ever_more_rarely() {
    let mut world = half_allocated();
    refuse_second(&mut world, 600, true);
    let allocated = refuse_second(&mut world, 3600, true);
    assert!(allocated < 400, "allocated for {allocated} s of an hour");
    world.edit(WatchedKind::Claim, "y", |claim| claim["metadata"]["labels"] = json!({"team": "x"}));
    world.settle();
    world.pass(seconds(10));
    world.settle();
    assert!(world.place("x").is_some() && world.place("y").is_some(), "no node is blamed");
}

#[test]
fn shared_claim_written_for_another_pod_keeps_the_deadline() {
    let mut world = half_allocated();
    world.put(WatchedKind::Pod, objects::pod("another", &["y"]));
    world.deliver_all();
    refuse_second(&mut world, 22, true);
    assert_eq!(count(&world, "x", "release"), 1);
}

#[test]
fn repeated_outcome_of_an_ended_write_is_ignored() {
    let mut world = cluster(1);
    world.add_pod("a", "50Gi");
    let first = world.open_of("a").unwrap();
    world.touch("a");
    world.carry_out(first);
    world.answer(first);
    let second = world.open_of("a").unwrap();
    world.answer_again(0);
    assert_eq!(world.open_of("a"), Some(second), "the second write is not ended by the first");
    world.add_pod("b", "50Gi");
    assert_eq!(world.open_of("b"), None, "its devices stay taken");
}

#[test]
fn claim_with_an_unanswered_release_is_not_allocated() {
    let mut world = cluster(1);
    world.add_pod("a", "50Gi");
    world.settle();
    world.delete(WatchedKind::Pod, "a");
    world.deliver_all();
    let release = world.open_of("a").unwrap();
    // The release is carried out, its answer is lost, and the watch shows it.
    world.carry_out(release);
    world.lose_answer(release);
    world.deliver_all();
    world.put(WatchedKind::Pod, objects::pod("next", &["a"]));
    world.deliver_all();
    world.pass(seconds(10));
    assert_eq!(world.open_of("a"), Some(release), "nothing is decided before its outcome");
    world.add_pod("b", "50Gi");
    world.settle();
    world.pass(seconds(3));
    world.settle();
    let places = [world.place("a"), world.place("b")];
    assert_eq!(places.iter().flatten().count(), 1, "{places:?}");
}

#[test]
fn deleted_pod_releases_its_claim_unless_it_is_reserved() {
    let mut world = cluster(1);
    world.add_pod("a", "20Gi");
    world.add_pod("b", "20Gi");
    world.settle();
    world.reserve("b");
    world.delete(WatchedKind::Pod, "a");
    world.delete(WatchedKind::Pod, "b");
    world.settle();
    world.pass(seconds(60));
    assert_eq!(count(&world, "a", "release"), 1);
    assert_eq!(count(&world, "b", "release"), 0);
    assert_eq!(world.place("a"), None);
    assert!(world.place("b").is_some());
}

#[test]
fn new_failure_of_kube_scheduler_moves_the_pod() {
    let mut world = cluster(1);
    world.add_pod("a", "20Gi");
    world.settle();
    world.add_node("node-b", 1);
    world.report_unschedulable("a", "0/2 nodes are available: 1 Insufficient cpu.");
    world.deliver_all();
    world.pass(seconds(2) - millis(1));
    assert_eq!(count(&world, "a", "release"), 0, "an attempt may have been under way");
    world.pass(millis(1));
    assert_eq!(count(&world, "a", "release"), 1);
    world.settle();
    world.pass(seconds(3));
    world.settle();
    assert_eq!(world.place("a").unwrap(), "node-b/gpu-0");
}

#[test]
fn cleared_claim_is_held_before_it_is_allocated_again() {
    let mut world = cluster(1);
    world.add_pod("a", "20Gi");
    world.settle();
    world.add_node("node-b", 1);
    world.clear("a");
    world.deliver_all();
    world.pass(seconds(2) - millis(1));
    assert_eq!(count(&world, "a", "allocate"), 1, "a PreBind under way has to find none");
    world.pass(millis(1));
    assert_eq!(count(&world, "a", "allocate"), 2);
    world.settle();
    assert_eq!(world.place("a").unwrap(), "node-b/gpu-0", "node-a is excluded");
}

#[test]
fn overcommitted_device_loses_its_youngest_claim_first() {
    let mut world = cluster(1);
    for name in ["a", "b", "c"] {
        world.add_pod(name, "20Gi");
        world.settle();
    }
    world.reserve("c");
    world.deliver_all();
    let mut smaller = objects::slice("node-a", 1);
    smaller["spec"]["devices"][0]["capacity"]["memory"]["value"] = "50Gi".into();
    world.put_slice_of_less(smaller);
    assert_eq!(count(&world, "c", "release"), 0, "it is reserved");
    assert_eq!(count(&world, "b", "release"), 1);
    assert_eq!(count(&world, "a", "release"), 0, "what is left fits");
    assert!(
        world
            .notices
            .iter()
            .any(|n| n.reason.name() == "Overcommitted" && n.pod.name.as_str() == "b")
    );
}

/// A pod that is bound to `node-a` while its claim is allocated on `node-b`.
fn misplaced() -> World {
    let mut world = cluster(1);
    world.add_node("node-b", 1);
    let claim = objects::claim("a", "20Gi");
    world.put(
        WatchedKind::Claim,
        objects::allocated(claim, objects::given("node-b", "gpu-0", "20Gi")),
    );
    world.put(WatchedKind::Pod, objects::assigned(objects::pod("a", &["a"]), "node-a"));
    // The claim alone would be released, since no pod needs it.
    world.deliver(WatchedKind::Pod);
    world.deliver_all();
    world
}

#[test]
fn misplaced_claim_is_moved_to_the_node_of_its_pod() {
    let mut world = misplaced();
    world.pass(seconds(2) - millis(1));
    assert_eq!(changes(&world), [], "it may be so only between two events");
    world.pass(millis(1));
    assert_eq!(changes(&world), [("a".to_owned(), "deallocate")]);
    world.settle();
    world.pass(seconds(10));
    world.settle();
    assert_eq!(world.place("a").unwrap(), "node-a/gpu-0");
    let reasons: Vec<_> = world.notices.iter().map(|notice| notice.reason.name()).collect();
    assert_eq!(reasons, ["ClaimNodeMismatch"]);
}

#[test]
fn repair_without_room_is_planned_ever_more_rarely() {
    let mut world = misplaced();
    world.put(
        WatchedKind::Claim,
        objects::reserved(
            objects::allocated(
                objects::claim("large", "79Gi"),
                objects::given("node-a", "gpu-0", "79Gi"),
            ),
            &["large"],
        ),
    );
    world.put(WatchedKind::Pod, objects::bound(objects::pod("large", &["large"]), "node-a"));
    world.deliver_all();
    world.pass(seconds(2));
    world.settle();
    world.pass(seconds(60));
    assert_eq!(count(&world, "a", "allocate"), 0);
    let said = |text: &str| world.notices.iter().filter(|n| n.note.contains(text)).count();
    assert_eq!(said("make room on the node"), 1, "{:?}", world.notices);
}

#[test]
fn claim_cleared_under_running_containers_is_restored() {
    let mut world = cluster(2);
    world.add_bound_pod("a", "20Gi");
    let before = world.get(WatchedKind::Claim, "a").unwrap()["status"]["allocation"].clone();
    world.edit(WatchedKind::Claim, "a", |claim| claim["status"] = Value::Null);
    world.settle();
    world.pass(seconds(3));
    world.settle();
    assert_eq!(count(&world, "a", "restore"), 1);
    let after = world.get(WatchedKind::Claim, "a").unwrap();
    assert_eq!(after["status"]["allocation"], before);
}

#[test]
fn stopped_core_absorbs_outcomes_and_decides_nothing() {
    let mut world = cluster(1);
    world.add_pod("a", "20Gi");
    world.stop();
    world.add_pod("b", "20Gi");
    world.settle();
    world.pass(seconds(600));
    assert_eq!(changes(&world), [("a".to_owned(), "allocate")]);
    assert!(!world.has_open_writes());
}

#[test]
fn nothing_is_decided_before_all_kinds_are_listed() {
    let mut world = World::unlisted();
    world.add_node("node-a", 1);
    world.add_pod("a", "20Gi");
    for kind in WatchedKind::ALL {
        assert_eq!(changes(&world), [], "{kind:?} is not listed");
        world.relist(kind);
    }
    assert_eq!(changes(&world), [("a".to_owned(), "allocate")]);
}

#[test]
fn two_claims_of_a_pod_are_on_one_node_or_pending() {
    let mut world = cluster(1);
    world.add_node("node-b", 1);
    for name in ["x", "y"] {
        world.put(WatchedKind::Claim, objects::claim(name, "50Gi"));
    }
    world.put(WatchedKind::Pod, objects::pod("both", &["x", "y"]));
    world.settle();
    assert_eq!(changes(&world), [], "no node has room for both");
    world.edit(WatchedKind::Slice, "slice-node-b", |slice| {
        *slice = objects::slice("node-b", 2);
        slice["spec"]["pool"]["generation"] = json!(2);
    });
    world.settle();
    let node = |claim: &str| world.place(claim).unwrap().split('/').next().unwrap().to_owned();
    assert_eq!((node("x"), node("y")), ("node-b".to_owned(), "node-b".to_owned()));
}

/// A cluster of 1,200 nodes, of which nothing is listed yet.
fn large_cluster() -> World {
    let mut world = World::unlisted();
    for node in 0..1200 {
        let name = format!("node-{node:04}");
        world.put(WatchedKind::Node, objects::node(&name));
        world.put(WatchedKind::Slice, objects::slice(&name, 1));
    }
    world
}

/// A rule that taints all devices of ours.
fn taint_rule() -> Value {
    json!({
        "metadata": {"name": "all", "uid": "uid-of-all"},
        "spec": {
            "deviceSelector": {"driver": "gpu.tessera.dev"},
            "taint": {"key": "example.com/maintenance", "effect": "NoSchedule"},
        },
    })
}

#[test]
fn taint_rule_for_all_devices_delays_no_other_pod() {
    let mut world = large_cluster();
    WatchedKind::ALL.iter().for_each(|kind| world.relist(*kind));
    world.put(WatchedKind::TaintRule, taint_rule());
    world.deliver(WatchedKind::TaintRule);
    assert!(world.is_due(), "some slices are left");
    let mut tolerant = objects::claim("tolerant", "50Gi");
    tolerant["spec"]["devices"]["requests"][0]["exactly"]["tolerations"] =
        json!([{"key": "example.com/maintenance", "operator": "Exists"}]);
    world.put(WatchedKind::Claim, tolerant);
    world.put(WatchedKind::Pod, objects::pod("tolerant", &["tolerant"]));
    world.deliver_all();
    assert_eq!(count(&world, "tolerant", "allocate"), 1);
    world.pass(millis(1));
    assert!(!world.is_due(), "all slices have the taint");
    world.add_pod("other", "50Gi");
    world.settle();
    assert_eq!(count(&world, "other", "allocate"), 0);
}

/// A rule that taints the device on which the claim is allocated.
fn taint_of(world: &World, claim: &str) -> Value {
    let claim = world.get(WatchedKind::Claim, claim).unwrap();
    let result = &claim["status"]["allocation"]["devices"]["results"][0];
    let selector =
        json!({"driver": "gpu.tessera.dev", "pool": result["pool"], "device": result["device"]});
    let mut rule = taint_rule();
    rule["metadata"] = json!({"name": "cordon", "uid": "uid-of-cordon"});
    rule["spec"]["deviceSelector"] = selector;
    rule
}

#[test]
fn waiting_pod_leaves_a_device_that_is_tainted() {
    let mut world = cluster(2);
    world.add_pod("waits", "50Gi");
    world.settle();
    let first = world.place("waits");
    world.put(WatchedKind::TaintRule, taint_of(&world, "waits"));
    world.settle();
    assert_eq!(count(&world, "waits", "release"), 1);
    world.pass(seconds(3));
    world.settle();
    assert!(world.place("waits").is_some() && world.place("waits") != first);
    let note = world.notices.iter().find(|notice| notice.reason.name() == "Rescheduling").unwrap();
    assert!(note.note.contains("has the taint example.com/maintenance"), "{}", note.note);
    world.pass(seconds(120));
    world.settle();
    assert_eq!(count(&world, "waits", "release"), 1, "no node is blamed, and it stays there");
}

#[test]
fn reserved_and_tolerating_claims_stay_on_a_tainted_device() {
    let mut world = cluster(1);
    world.add_pod("runs", "20Gi");
    let mut tolerant = objects::claim("tolerates", "20Gi");
    tolerant["spec"]["devices"]["requests"][0]["exactly"]["tolerations"] =
        json!([{"key": "example.com/maintenance", "operator": "Exists"}]);
    world.put(WatchedKind::Claim, tolerant);
    world.put(WatchedKind::Pod, objects::pod("tolerates", &["tolerates"]));
    world.settle();
    world.bind("runs");
    world.settle();
    let before = (world.place("runs"), world.place("tolerates"));
    world.put(WatchedKind::TaintRule, taint_of(&world, "runs"));
    world.settle();
    world.pass(seconds(1));
    world.settle();
    assert_eq!((world.place("runs"), world.place("tolerates")), before);
    assert_eq!(count(&world, "runs", "release") + count(&world, "tolerates", "release"), 0);
}

#[test]
fn pod_on_a_tainted_device_waits_where_nothing_else_fits() {
    let mut world = cluster(1);
    world.add_pod("waits", "50Gi");
    world.settle();
    world.put(WatchedKind::TaintRule, taint_of(&world, "waits"));
    world.settle();
    assert_eq!((count(&world, "waits", "release"), world.place("waits")), (1, None));
    world.pass(seconds(60));
    world.settle();
    assert_eq!(world.place("waits"), None);
    world.delete(WatchedKind::TaintRule, "cordon");
    world.settle();
    assert!(world.place("waits").is_some());
}

#[test]
fn new_leader_decides_after_all_taint_rules_are_applied() {
    let mut world = large_cluster();
    world.relist(WatchedKind::Node);
    world.relist(WatchedKind::Slice);
    world.put(WatchedKind::TaintRule, taint_rule());
    world.put(WatchedKind::Claim, objects::claim("a", "50Gi"));
    world.put(WatchedKind::Pod, objects::pod("a", &["a"]));
    world.relist(WatchedKind::TaintRule);
    WatchedKind::ALL.iter().for_each(|kind| world.relist(*kind));
    world.settle();
    assert_eq!(changes(&world), []);
    world.delete(WatchedKind::TaintRule, "all");
    world.settle();
    assert_eq!(count(&world, "a", "allocate"), 1);
}

/// Adds a pod whose claim has a selector of more than this number of bytes.
fn add_pod_with_selector(world: &mut World, name: &str, bytes: usize) {
    let mut claim = objects::claim(name, "1Gi");
    let cel = json!({"expression": format!("'{}' != '{name}'", "x".repeat(bytes))});
    claim["spec"]["devices"]["requests"][0]["exactly"]["selectors"] = json!([{"cel": cel}]);
    world.put(WatchedKind::Claim, claim);
    world.put(WatchedKind::Pod, objects::pod(name, &[name]));
    world.deliver_all();
}

#[test]
fn long_selectors_are_compiled_beside_the_decisions() {
    let mut world = cluster(1);
    add_pod_with_selector(&mut world, "long-a", 9_000);
    add_pod_with_selector(&mut world, "long-b", 9_001);
    world.add_pod("plain", "1Gi");
    world.settle();
    assert_eq!(changes(&world), [("plain".to_owned(), "allocate")], "others do not wait");
    assert!(world.notices.is_empty(), "{:?}", world.notices);
    assert_eq!(world.compile().len(), 1, "one of a namespace at a time");
    assert_eq!(count(&world, "long-a", "allocate"), 1);
    assert_eq!(world.compile().len(), 1);
    assert_eq!(count(&world, "long-b", "allocate"), 1);
    assert!(world.compile().is_empty());
}

#[test]
fn compiled_selectors_are_charged_to_the_namespace() {
    let mut world = cluster(1);
    // Each is charged with 50,000 of 4,000,000 steps.
    for number in 0..90 {
        add_pod_with_selector(&mut world, &format!("long-{number}"), 10_000);
    }
    let mut compiled = 0;
    while !world.compile().is_empty() {
        compiled += 1;
    }
    // Evaluation is charged, too.
    assert!((75..=80).contains(&compiled), "{compiled}");
    world.pass(seconds(120));
    assert!((1..10).contains(&world.compile().len()), "two percent of a core");
}
