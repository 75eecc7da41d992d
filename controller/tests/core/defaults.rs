//! Defaults of a namespace: they complete claims when they are allocated.

use serde_json::{Value, json};
use tessera_controller::core::event::WatchedKind;

use crate::objects;
use crate::world::World;

const DEFAULTS: WatchedKind = WatchedKind::Defaults;

/// Returns a GpuConfig with these fields.
fn parameters(fields: &Value) -> Value {
    let mut parameters = json!({"apiVersion": "gpu.tessera.dev/v1alpha1", "kind": "GpuConfig"});
    parameters.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    parameters
}

fn set(world: &mut World, name: &str, fields: &Value) {
    let metadata = json!({"name": name, "namespace": "default", "uid": format!("uid-{name}")});
    world.put(DEFAULTS, json!({"metadata": metadata, "spec": {"parameters": parameters(fields)}}));
    world.deliver_all();
}

/// Adds a pod with a claim that names no amounts and has this config.
fn add_open(world: &mut World, name: &str, config: Option<Value>) {
    let mut claim = objects::claim(name, "0");
    claim["spec"]["devices"]["requests"][0]["exactly"]["capacity"] = Value::Null;
    if let Some(fields) = config {
        let opaque = json!({"driver": "gpu.tessera.dev", "parameters": parameters(&fields)});
        claim["spec"]["devices"]["config"] = json!([{"opaque": opaque}]);
    }
    world.put(WatchedKind::Claim, claim);
    world.put(WatchedKind::Pod, objects::pod(name, &[name]));
    world.deliver_all();
}

/// Returns the memory and the configs of an allocated claim.
fn allocated(world: &World, name: &str) -> (Value, Value) {
    let claim = world.get(WatchedKind::Claim, name).unwrap();
    let devices = &claim["status"]["allocation"]["devices"];
    (devices["results"][0]["consumedCapacity"]["memory"].clone(), devices["config"].clone())
}

fn world() -> World {
    let mut world = World::new();
    world.add_node("node-a", 4);
    world
}

#[test]
fn defaults_complete_a_claim_and_come_before_its_own_config() {
    let mut world = world();
    set(&mut world, "default", &json!({"memory": {"percent": 25}, "compute": {"policy": "Fixed"}}));
    add_open(&mut world, "open", None);
    add_open(&mut world, "own", Some(json!({"compute": {"policy": "None"}})));
    world.settle();
    let (memory, config) = allocated(&world, "open");
    assert_eq!(memory, "20Gi");
    assert_eq!(config[0]["source"], "FromClass");
    assert_eq!(config[0]["opaque"]["parameters"]["compute"], json!({"policy": "Fixed"}));
    let (memory, config) = allocated(&world, "own");
    assert_eq!(memory, "20Gi");
    assert!(config[0]["opaque"]["parameters"]["compute"].is_null(), "only what is open: {config}");
    assert_eq!(config[1]["opaque"]["parameters"]["compute"], json!({"policy": "None"}));
}

#[test]
fn a_default_that_contradicts_the_claim_is_left_out() {
    let mut world = world();
    set(&mut world, "default", &json!({"memory": {"percent": 25}}));
    world.add_pod("amount", "60Gi");
    add_open(&mut world, "exclusive", Some(json!({"exclusive": true})));
    world.settle();
    assert_eq!(allocated(&world, "amount"), (json!("60Gi"), Value::Null));
    let (memory, config) = allocated(&world, "exclusive");
    assert_eq!((memory, config.as_array().unwrap().len()), (json!("80Gi"), 1));
}

#[test]
fn a_change_concerns_pods_that_wait_and_no_allocated_claim() {
    let mut world = world();
    set(&mut world, "default", &json!({"exclusive": true}));
    (0..4).for_each(|pod| add_open(&mut world, &format!("p{pod}"), None));
    add_open(&mut world, "waits", None);
    world.settle();
    assert_eq!(world.place("waits"), None, "each of four GPUs is taken");
    set(&mut world, "default", &json!({"memory": {"percent": 10}}));
    world.delete(WatchedKind::Pod, "p0");
    world.delete(WatchedKind::Claim, "p0");
    world.settle();
    assert_eq!(allocated(&world, "waits").0, "8Gi");
    assert_eq!(allocated(&world, "p1").0, "80Gi");
    world.delete(DEFAULTS, "default");
    world.deliver_all();
    world.delete(WatchedKind::Pod, "p1");
    world.delete(WatchedKind::Claim, "p1");
    add_open(&mut world, "later", None);
    world.settle();
    assert_eq!(allocated(&world, "later"), (json!("80Gi"), Value::Null));
}

#[test]
fn only_the_object_named_default_counts_and_only_if_valid() {
    let mut world = world();
    set(&mut world, "other", &json!({"memory": {"percent": 10}}));
    set(&mut world, "default", &json!({"memory": {"percent": 50}}));
    set(&mut world, "default", &json!({"memory": {"percents": 20}}));
    add_open(&mut world, "a", None);
    world.settle();
    assert_eq!(allocated(&world, "a").0, "40Gi", "the last valid one");
}
