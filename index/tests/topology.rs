//! Topologies of pools, read from slices.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::error::Error;
use std::sync::Arc;

use k8s_openapi::api::resource::v1::ResourceSlice;
use serde_json::{Value, json};
use tessera_allocator::model::{PoolId, PoolTopology};
use tessera_api::config::TopologyScope;
use tessera_api::names::{DeviceName, DriverName, PoolName};
use tessera_index::Index;

/// The device of GPU number `gpu` of a node; the tail of its UUID is random on real ones.
fn device_name(node: &str, gpu: u32) -> String {
    let node: String = node.bytes().map(|byte| format!("{byte:02x}")).collect();
    format!(
        "gpu-{:0>8}-0000-4000-8000-{:012x}",
        &node[node.len() - 2..],
        0xffff - gpu * 7 % 5 + gpu / 5 * 5
    )
}

fn gpu(node: &str, gpu: u32, numa: i64) -> Value {
    json!({
        "name": device_name(node, gpu),
        "attributes": {
            "index": {"int": gpu},
            "resource.kubernetes.io/numaNode": {"int": numa},
            "resource.kubernetes.io/pcieRoot": {"string": format!("pci0000:{numa:02x}")},
        },
    })
}

/// A slice of a node: number `part` of `count`.
fn slice(
    node: &str,
    part: u32,
    count: i64,
    generation: i64,
    gpus: &[Value],
    topology: Option<Value>,
) -> ResourceSlice {
    let annotations = topology.map(|value| match value {
        Value::String(text) => json!({"gpu.tessera.dev/topology": text}),
        value => json!({"gpu.tessera.dev/topology": value.to_string()}),
    });
    serde_json::from_value(json!({
        "metadata": {"name": format!("{node}-{generation}-{part}"), "annotations": annotations},
        "spec": {
            "driver": "gpu.tessera.dev", "nodeName": node, "devices": gpus,
            "pool": {"name": node, "generation": generation, "resourceSliceCount": count},
        },
    }))
    .unwrap()
}

fn link(node: &str, one: u32, other: u32, kind: &str, count: u32) -> Value {
    json!([device_name(node, one), device_name(node, other), kind, count])
}

/// Three GPUs, 0 and 2 joined by two NVLinks, 0 and 1 on one switch and one NUMA node.
fn machine(node: &str, order: [u32; 3]) -> ResourceSlice {
    let gpus: Vec<Value> =
        order.iter().map(|number| gpu(node, *number, i64::from(*number == 2))).collect();
    let links = json!({"links": [link(node, 0, 2, "NVLink", 2), link(node, 1, 0, "PIX", 1)]});
    slice(node, 0, 1, 1, &gpus, Some(links))
}

fn topology(index: &Index, node: &str) -> Option<Arc<PoolTopology>> {
    let pool = PoolId { driver: DriverName::ours(), pool: PoolName::new(node).unwrap() };
    index.snapshot().topology.get(&pool).cloned()
}

fn position(topology: &PoolTopology, node: &str, gpu: u32) -> usize {
    topology.position(&DeviceName::new(device_name(node, gpu)).unwrap()).unwrap()
}

#[test]
fn links_and_locations_become_the_pool_matrix() {
    let mut index = Index::default();
    index.apply_slice(&machine("node-a", [2, 0, 1])).unwrap();
    let topology = topology(&index, "node-a").unwrap();
    let at = |gpu| position(&topology, "node-a", gpu);
    let matrix = topology.matrix();
    assert_eq!(matrix.pair(at(0), at(2)), 210);
    assert_eq!(matrix.pair(at(0), at(1)), 50);
    assert_eq!(matrix.pair(at(1), at(2)), 10);
    for (scope, shared) in
        [(TopologyScope::NvLink, 2), (TopologyScope::Numa, 1), (TopologyScope::Pcie, 1)]
    {
        assert_eq!(
            matrix.peers_in_scope(scope, at(0)).iter().collect::<Vec<_>>(),
            [at(shared)],
            "{scope}"
        );
    }
    assert_eq!(topology.position(&DeviceName::new("gpu-7").unwrap()), None);
}

#[test]
fn identical_machines_share_one_matrix() {
    let mut index = Index::default();
    index.apply_slice(&machine("node-a", [0, 1, 2])).unwrap();
    index.apply_slice(&machine("node-b", [2, 1, 0])).unwrap();
    index.apply_slice(&slice("node-c", 0, 1, 1, &[gpu("node-c", 0, 0)], None)).unwrap();
    let (a, b, c) =
        (topology(&index, "node-a"), topology(&index, "node-b"), topology(&index, "node-c"));
    let (a, b, c) = (a.unwrap(), b.unwrap(), c.unwrap());
    assert!(Arc::ptr_eq(a.matrix(), b.matrix()));
    assert_eq!(c.matrix().len(), 1);
    assert_eq!((position(&a, "node-a", 2), position(&b, "node-b", 2)), (2, 2));
}

#[test]
fn newest_generation_makes_the_pool() {
    let mut index = Index::default();
    index.apply_slice(&machine("node-a", [0, 1, 2])).unwrap();
    // The link between 0 and 1 is in the slice of 0.
    let links = json!({"links": [link("node-a", 0, 1, "NVLink", 18)]});
    let first = slice("node-a", 0, 2, 2, &[gpu("node-a", 0, 0)], Some(links));
    let second = slice("node-a", 1, 2, 2, &[gpu("node-a", 1, 0)], None);
    index.apply_slice(&first).unwrap();
    index.apply_slice(&second).unwrap();
    let both = topology(&index, "node-a").unwrap();
    assert_eq!((both.matrix().len(), both.matrix().pair(0, 1)), (2, 1810));
    index.remove_slice(&first);
    assert_eq!(topology(&index, "node-a").unwrap().matrix().len(), 1);
    index.remove_slice(&second);
    assert_eq!(
        topology(&index, "node-a").unwrap().matrix().len(),
        3,
        "what is left of the old generation"
    );
    index.remove_slice(&machine("node-a", [0, 1, 2]));
    assert_eq!(topology(&index, "node-a"), None);
}

#[test]
fn unreadable_annotation_loses_links_not_gpus() {
    let mut index = Index::default();
    index.apply_slice(&machine("node-a", [0, 1, 2])).unwrap();
    let gpus = [gpu("node-a", 0, 0), gpu("node-a", 2, 0)];
    for bad in [
        json!("{\"links\": 7}"),
        json!("["),
        json!("[".repeat(300_000)),
        json!({"links": [["x", "y", "NVLink", 1]]}),
    ] {
        let error = index.apply_slice(&slice("node-a", 0, 1, 1, &gpus, Some(bad))).unwrap_err();
        assert_eq!(error.to_string(), "cannot read the GPU links of ResourceSlice `node-a-1-0`");
        assert!(
            error.source().unwrap().to_string().starts_with("annotation gpu.tessera.dev/topology"),
            "{error:?}"
        );
        assert_eq!(index.snapshot().slices["node-a-1-0"].devices.len(), 2);
        let topology = topology(&index, "node-a").unwrap();
        assert_eq!((topology.matrix().len(), topology.matrix().pair(0, 1)), (2, 10));
        assert_eq!(
            topology.matrix().peers_in_scope(TopologyScope::Numa, 0).len(),
            1,
            "attributes still tell"
        );
    }
}

#[test]
fn pool_too_large_or_without_links_has_no_topology() {
    let mut index = Index::default();
    let bare =
        slice("node-b", 0, 1, 1, &[json!({"name": "gpu-0"}), json!({"name": "gpu-1"})], None);
    index.apply_slice(&bare).unwrap();
    assert_eq!(topology(&index, "node-b"), None);
    let gpus = |count| (0..count).map(|number| gpu("node-a", number, 0)).collect::<Vec<Value>>();
    index.apply_slice(&slice("node-a", 0, 1, 1, &gpus(64), None)).unwrap();
    assert_eq!(topology(&index, "node-a").unwrap().matrix().len(), 64);
    index.apply_slice(&slice("node-a", 0, 1, 1, &gpus(65), None)).unwrap();
    assert_eq!(topology(&index, "node-a"), None);
    assert_eq!(index.snapshot().slices["node-a-1-0"].devices.len(), 65);
}

#[test]
fn links_to_unknown_gpus_are_ignored() {
    let mut index = Index::default();
    let links = json!({"links": [
        link("node-a", 0, 4, "NVLink", 4), link("node-a", 0, 0, "NVLink", 4), link("node-a", 0, 1, "NVLink", u32::MAX),
    ]});
    index
        .apply_slice(&slice(
            "node-a",
            0,
            1,
            1,
            &[gpu("node-a", 0, 0), gpu("node-a", 1, 0)],
            Some(links),
        ))
        .unwrap();
    let topology = topology(&index, "node-a").unwrap();
    assert_eq!(topology.matrix().pair(0, 0), 0);
    assert_eq!(
        topology.matrix().pair(0, 1),
        100_010,
        "more links than any GPU has count as a thousand"
    );
}
