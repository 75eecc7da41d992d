//! Searches that take exponential time upstream end after few steps with the correct result.
//!
//! A step is one device tested. Upstream needs from a million steps to more than its 10 s for each
//! of these cases (`exp-*` of the oracle's benchmark).
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod builders;

use std::sync::Arc;

use builders::*;
use tessera_allocator::model::{
    Attribute, Constraint, CounterSet, CounterUse, Device, DeviceClass, DeviceSelector, NameMap,
    Request, Slice,
};
use tessera_allocator::{PlanSettings, Policy, plan};
use tessera_api::names::DeviceName;

/// Maximum number of steps of a search.
const MAX_STEPS: u64 = 20_000;

fn first_fit() -> PlanSettings {
    PlanSettings { policy: Policy::FirstFit, ..PlanSettings::default() }
}

/// Returns true if the claim fits on the cluster, and asserts that few steps were needed.
fn fits(cluster: &Cluster, requests: Vec<Request>, constraints: Vec<Constraint>) -> bool {
    let mut claim = claim("c", requests);
    claim.constraints = constraints;
    let plan = plan(&cluster.0, &[pod("p", vec![claim])], first_fit());
    assert!(plan.steps < MAX_STEPS, "it took {} steps", plan.steps);
    !plan.decisions.is_empty()
}

fn exclusive_gpu(name: &str, numa: i64) -> Device {
    Device { shared: false, ..gpu(name, "80Gi") }.with("numa", Attribute::Int(numa))
}

fn exclusive_gpus(count: i64, in_numa: impl Fn(i64) -> i64) -> Vec<Device> {
    (0..count).map(|i| exclusive_gpu(&format!("gpu-{i:02}"), in_numa(i))).collect()
}

fn single(n: usize) -> Request {
    request(&format!("r{n}"), 1, &[])
}

fn selecting(request: Request, expression: &str) -> Request {
    let mut request = request;
    request.alternatives[0].selectors.push(DeviceSelector::new(expression));
    request
}

#[test]
fn refuses_one_device_more_than_available() {
    let cluster = Cluster::new().node("node-0", exclusive_gpus(31, |_| 0));
    assert!(!fits(&cluster, vec![request("all", 32, &[])], Vec::new()));
    assert!(fits(&cluster, vec![request("all", 31, &[])], Vec::new()));
}

#[test]
fn refuses_unsatisfiable_request_after_many_others() {
    let cluster = Cluster::new().node("node-0", exclusive_gpus(16, |_| 0));
    let mut requests: Vec<Request> = (0..8).map(single).collect();
    requests.push(selecting(single(8), "device.driver == 'nic.example.com'"));
    assert!(!fits(&cluster, requests, Vec::new()));
}

#[test]
fn refuses_one_device_more_than_a_numa_node_has() {
    let cluster = Cluster::new().node("node-0", exclusive_gpus(14, |i| i % 2));
    let requests = |n| (0..n).map(single).collect();
    assert!(!fits(&cluster, requests(8), vec![matching("gpu.tessera.dev/numa")]));
    assert!(fits(&cluster, requests(7), vec![matching("gpu.tessera.dev/numa")]));
}

#[test]
fn refuses_one_share_more_than_capacity() {
    let gpus = (0..8).map(|i| gpu(&format!("gpu-{i}"), "80Gi")).collect();
    let cluster = Cluster::new().node("node-0", gpus);
    let shares =
        |n: usize| (0..n).map(|i| request(&format!("r{i}"), 1, &[("memory", "40Gi")])).collect();
    assert!(!fits(&cluster, shares(17), Vec::new()));
    assert!(fits(&cluster, shares(16), Vec::new()));
}

#[test]
fn finds_solution_that_needs_backtracking() {
    let cluster = Cluster::new().node("node-0", exclusive_gpus(12, |i| i64::from(i >= 3)));
    let mut requests: Vec<Request> = (0..9).map(single).collect();
    requests.extend(
        (9..12).map(|n| selecting(single(n), "device.attributes['gpu.tessera.dev'].numa == 0")),
    );
    assert!(fits(&cluster, requests, Vec::new()));
}

/// Creates GPUs that can be partitioned in two sizes, with shared counters.
fn partitioned(gpus: usize) -> Cluster {
    let mut cluster = Cluster::new();
    cluster.put_node("node-0", |_| {});
    let counters = |slices: &str| NameMap::from_iter([("slices".to_owned(), quantity(slices))]);
    let set = |g: usize| CounterSet { name: format!("gpu-{g}"), counters: counters("8") };
    let partition = |g: usize, size: &str, n: usize, slices: &str| Device {
        consumes: vec![CounterUse { set: format!("gpu-{g}"), counters: counters(slices) }],
        ..Device::new(DeviceName::new(format!("gpu-{g}-{size}-{n}")).unwrap())
            .with("size", Attribute::String(size.into()))
    };
    let cut = |g: usize| {
        let large = (0..3).map(move |n| partition(g, "large", n, "4"));
        large.chain((0..8).map(move |n| partition(g, "small", n, "1")))
    };
    let put = |cluster: &mut Cluster, slice: Slice| {
        cluster.0.slices.insert(slice.name.clone(), Arc::new(Slice { slice_count: 2, ..slice }));
    };
    put(
        &mut cluster,
        Slice {
            name: "a-devices".to_owned(),
            ..slice("node-0", (0..gpus).flat_map(cut).collect())
        },
    );
    let sets = (0..gpus).map(set).collect();
    put(
        &mut cluster,
        Slice { name: "b-counters".to_owned(), counter_sets: sets, ..slice("node-0", Vec::new()) },
    );
    let class = |size: &str| {
        let expression = format!("device.attributes['gpu.tessera.dev'].size == '{size}'");
        let name = tessera_api::names::DeviceClassName::new(size).unwrap();
        Arc::new(DeviceClass {
            name,
            selectors: vec![DeviceSelector::new(&expression)],
            configs: Vec::new(),
        })
    };
    for size in ["large", "small"] {
        let class = class(size);
        cluster.0.classes.insert(class.name.clone(), class);
    }
    cluster
}

fn of_class(request: Request, class: &str) -> Request {
    let mut request = request;
    request.alternatives[0].class = Some(tessera_api::names::DeviceClassName::new(class).unwrap());
    request
}

#[test]
fn refuses_one_partition_more_than_counters_allow() {
    let cluster = partitioned(8);
    let large = |n| vec![of_class(request("large", n, &[]), "large")];
    assert!(!fits(&cluster, large(17), Vec::new()));
    assert!(fits(&cluster, large(16), Vec::new()));
    let one_by_one = |n: usize| (0..n).map(|i| of_class(single(i), "large")).collect();
    assert!(!fits(&cluster, one_by_one(17), Vec::new()));
    assert!(fits(&cluster, one_by_one(16), Vec::new()));
}

#[test]
fn partitions_of_two_sizes_share_the_counters() {
    let cluster = partitioned(2);
    let mixed = |large, small| {
        vec![
            of_class(request("large", large, &[]), "large"),
            of_class(request("small", small, &[]), "small"),
        ]
    };
    assert!(fits(&cluster, mixed(3, 4), Vec::new()));
    assert!(!fits(&cluster, mixed(3, 5), Vec::new()));
}

#[test]
fn refuses_unsatisfiable_alternatives() {
    let cluster = Cluster::new().node("node-0", exclusive_gpus(8, |_| 0));
    let three = |n: usize| {
        let alternatives = (0..3).map(|a| request(&format!("a{a}"), 1, &[])).collect();
        first_available(&format!("r{n}"), alternatives)
    };
    let mut requests: Vec<Request> = (0..8).map(three).collect();
    assert!(fits(&cluster, requests.clone(), Vec::new()));
    requests.push(three(8));
    assert!(!fits(&cluster, requests, Vec::new()));
}
