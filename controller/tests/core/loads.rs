//! Measured loads: they decide where pods go, and are forgotten when they are old.

use std::time::Duration;

use serde_json::json;
use tessera_api::load::{GpuLoad, NodeLoad};
use tessera_api::names::{GpuUuid, NodeName};
use tessera_controller::core::event::{Change, WatchedKind};

use crate::objects;
use crate::world::World;

fn uuid(number: u32) -> GpuUuid {
    GpuUuid::new(format!("GPU-00000000-0000-0000-0000-{number:012}")).unwrap()
}

/// A node with two GPUs whose names follow from their UUIDs, as the driver publishes them.
fn world() -> World {
    let mut world = World::new();
    let mut slice = objects::slice("node-a", 2);
    for number in 0..2 {
        let name = uuid(number).device_name();
        slice["spec"]["devices"][number as usize]["name"] = json!(name.as_str());
    }
    world.put(WatchedKind::Node, objects::node("node-a"));
    world.put(WatchedKind::Slice, slice);
    world.deliver_all();
    world
}

/// Reports the loads of both GPUs, in percent.
fn measure(world: &mut World, percents: [u8; 2]) {
    let gpus = percents.iter().zip(0..).map(|(percent, number)| GpuLoad {
        uuid: uuid(number),
        busy_percent: *percent,
        settled_cores_percent: 100,
    });
    let (node, load) = (NodeName::new("node-a").unwrap(), NodeLoad { gpus: gpus.collect() });
    world.change(Change::Measured { node, load });
}

/// Adds a pod that wants the least loaded GPU, and returns the number of the one that it gets.
fn place(world: &mut World, name: &str) -> u32 {
    let placement = json!({"node": "LeastLoaded", "device": "LeastLoaded"});
    let parameters = json!({
        "apiVersion": "gpu.tessera.dev/v1alpha1", "kind": "GpuConfig", "placement": placement,
    });
    let mut claim = objects::claim(name, "1Gi");
    let opaque = json!({"driver": "gpu.tessera.dev", "parameters": parameters});
    claim["spec"]["devices"]["config"] = json!([{"opaque": opaque}]);
    world.put(WatchedKind::Claim, claim);
    world.put(WatchedKind::Pod, objects::pod(name, &[name]));
    world.settle();
    let place = world.place(name).unwrap();
    (0..2).find(|number| place.ends_with(uuid(*number).device_name().as_str())).unwrap()
}

#[test]
fn pods_follow_the_loads_and_old_loads_are_forgotten() {
    let mut world = world();
    measure(&mut world, [90, 10]);
    assert_eq!(place(&mut world, "a"), 1);
    measure(&mut world, [10, 90]);
    assert_eq!(place(&mut world, "b"), 0);
    assert_eq!(place(&mut world, "c"), 0, "also beside another share: the other GPU works more");
    world.pass(Duration::from_secs(89));
    assert_eq!(place(&mut world, "d"), 0, "the load is of the present");
    world.pass(Duration::from_secs(2));
    assert_eq!(place(&mut world, "e"), 1, "three shares are on one GPU, and one on the other");
}

#[test]
fn a_load_alone_is_no_reason_to_plan() {
    let mut world = world();
    place(&mut world, "a");
    for percent in [20, 40, 60, 80] {
        measure(&mut world, [percent, percent]);
        assert!(!world.figures.is_planned);
    }
    assert_eq!(world.figures.measured_nodes, Some(1));
}

#[test]
fn the_load_of_an_unknown_gpu_or_node_changes_nothing() {
    let mut world = world();
    let gpus = vec![GpuLoad { uuid: uuid(7), busy_percent: 0, settled_cores_percent: 0 }];
    let node = |name| NodeName::new(name).unwrap();
    world.change(Change::Measured { node: node("node-b"), load: NodeLoad { gpus: gpus.clone() } });
    world.change(Change::Measured { node: node("node-a"), load: NodeLoad { gpus } });
    assert_eq!(place(&mut world, "a"), 0);
}
