//! Devices that consume counters, such as the MIG devices of a GPU: placed so that large ones stay
//! possible.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod builders;

use std::sync::Arc;

use builders::{Cluster, claim, decide, device_id, placements, pod, quantity, request, slice};
use tessera_allocator::model::{
    Capacity, CounterSet, CounterUse, Device, DeviceResult, NameMap, PendingPod,
};
use tessera_allocator::{PlanSettings, Policy, plan};
use tessera_api::config::Sharing;
use tessera_api::names::{DeviceName, RequestName};

/// Profiles of an H100: name, memory in GiB, memory slices, and placements, in the order in which
/// an allocator that takes the first fit does the most harm.
const PROFILES: [(&str, u32, u32, &[u32]); 5] = [
    ("1g", 10, 1, &[0, 1, 2, 3, 4, 5, 6]),
    ("2g", 20, 2, &[0, 2, 4]),
    ("3g", 40, 4, &[0, 4]),
    ("4g", 40, 4, &[0]),
    ("7g", 80, 8, &[0]),
];

fn counters(start: u32, size: u32) -> NameMap<tessera_api::quantity::Quantity> {
    (start..start + size).map(|slice| (format!("memory-slice-{slice}"), quantity("1"))).collect()
}

fn partitions(gpu: &str) -> Vec<Device> {
    let device = |(name, gib, size, start): (&str, u32, u32, u32)| {
        let memory = Capacity { value: quantity(&format!("{gib}Gi")), policy: None };
        Device {
            capacity: Arc::new([("memory".to_owned(), memory)].into_iter().collect()),
            shared: false,
            consumes: vec![CounterUse { set: gpu.to_owned(), counters: counters(start, size) }],
            ..Device::new(DeviceName::new(format!("{gpu}-{name}-{start}")).unwrap())
        }
    };
    let all = PROFILES.iter().flat_map(|(name, gib, size, starts)| {
        starts.iter().map(move |start| device((name, *gib, *size, *start)))
    });
    all.collect()
}

/// Returns a cluster of these nodes, with two GPUs each.
fn cluster(nodes: &[&str]) -> Cluster {
    let mut cluster = Cluster::new();
    for node in nodes {
        cluster.put_node(node, |_| {});
        let gpus = ["a", "b"];
        let mut of_devices = slice(node, gpus.iter().flat_map(|gpu| partitions(gpu)).collect());
        let mut of_counters = slice(node, Vec::new());
        let set = |gpu: &&str| CounterSet { name: (*gpu).to_owned(), counters: counters(0, 8) };
        of_counters.counter_sets = gpus.iter().map(set).collect();
        of_counters.name = format!("{node}-counters");
        (of_devices.slice_count, of_counters.slice_count) = (2, 2);
        for slice in [of_devices, of_counters] {
            cluster.0.slices.insert(slice.name.clone(), Arc::new(slice));
        }
    }
    cluster
}

fn partition_pod(name: &str, memory: &str) -> PendingPod {
    pod(name, vec![claim(name, vec![request("mig", 1, &[("memory", memory)])])])
}

/// Allocates a device, as an earlier plan did.
fn allocate(cluster: &mut Cluster, node: &str, device: &str) {
    let result = DeviceResult {
        request: RequestName::new("mig").unwrap(),
        device: device_id(node, device),
        shared: false,
        consumed: NameMap::new(),
        admin: false,
        sharing: Sharing::Intercept,
        binding: None,
    };
    cluster.0.usage.add(&[result]);
}

fn placed(cluster: &Cluster, memory: &str) -> String {
    let mut placed = placements(&decide(cluster, &[partition_pod("pod", memory)]));
    placed.pop().expect("it fits").pop().expect("a device")
}

#[test]
fn smallest_fitting_partition_is_taken() {
    let cluster = cluster(&["node-a"]);
    assert_eq!(placed(&cluster, "5Gi"), "node-a/a-1g-6");
    assert_eq!(placed(&cluster, "18Gi"), "node-a/a-2g-4");
    assert!(placed(&cluster, "60Gi").ends_with("-7g-0"));
}

#[test]
fn small_partitions_share_a_gpu_and_keep_the_other_whole() {
    let mut cluster = cluster(&["node-a", "node-b"]);
    allocate(&mut cluster, "node-b", "b-1g-6");
    for (memory, expected) in [("10Gi", "node-b/b-1g-"), ("20Gi", "node-b/b-2g-4")] {
        let found = placed(&cluster, memory);
        assert!(found.starts_with(expected), "{memory}: {found}");
    }
    let found = placed(&cluster, "40Gi");
    assert!(found.starts_with("node-b/b-"), "half of a GPU is left: {found}");
}

#[test]
fn every_gpu_is_filled_before_none_fits() {
    let mut cluster = cluster(&["node-a"]);
    for number in 0..14 {
        let found = placed(&cluster, "10Gi");
        let device = found.strip_prefix("node-a/").expect("the node").to_owned();
        assert_eq!(device.starts_with("a-"), number < 7, "one GPU after the other: {device}");
        allocate(&mut cluster, "node-a", &device);
    }
    assert!(decide(&cluster, &[partition_pod("pod", "10Gi")]).decisions.is_empty());
}

#[test]
fn pods_of_one_plan_get_partitions_that_can_exist_together() {
    let cluster = cluster(&["node-a"]);
    let pods: Vec<PendingPod> = ["40Gi", "40Gi", "40Gi", "40Gi", "5Gi"]
        .iter()
        .enumerate()
        .map(|(number, memory)| partition_pod(&format!("pod-{number}"), memory))
        .collect();
    let decided = decide(&cluster, &pods);
    assert_eq!(decided.decisions.len(), 4, "{:?}", placements(&decided));
}

#[test]
fn packing_policies_place_alike() {
    let mut cluster = cluster(&["node-a", "node-b"]);
    allocate(&mut cluster, "node-b", "b-1g-6");
    for policy in [Policy::LeastFragmentation, Policy::Binpack, Policy::LeastLoaded] {
        let settings = PlanSettings { policy, ..PlanSettings::default() };
        let decided = plan(&cluster.0, &[partition_pod("pod", "20Gi")], settings);
        assert_eq!(placements(&decided), [["node-b/b-2g-4"]], "{policy:?}");
    }
}
