//! Requests with topology terms.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod builders;

use std::collections::BTreeMap;
use std::sync::Arc;

use builders::*;
use proptest::prelude::*;
use serde_json::{Value, json};
use tessera_allocator::model::{Attribute, PendingPod, PoolTopology};
use tessera_allocator::topology::{DeviceLinks, DeviceLocation, LinkMatrix};
use tessera_allocator::{AllocationPlan, PlanSettings, Policy, RefusalCause, plan};
use tessera_api::config::TopologyScope;
use tessera_api::gpu::PcieLevel;
use tessera_api::names::DeviceName;
use tessera_api::reason::Reason;

/// Eight GPUs with four NVLinks between 0 and 4, 1 and 5, 2 and 6, 3 and 7. GPUs 0 to 3 are on one
/// NUMA node.
fn link_pairs(cluster: &mut Cluster, node: &str) {
    link_gpus(cluster, node, |a, b| b == a + 4, |gpu| gpu / 4);
}

fn link_gpus(
    cluster: &mut Cluster,
    node: &str,
    linked: impl Fn(usize, usize) -> bool,
    numa: impl Fn(u32) -> u32,
) {
    let place = |gpu| DeviceLocation { pcie_root: Some(gpu), numa_node: Some(numa(gpu)) };
    let pair =
        |a, b| DeviceLinks { nvlinks: if linked(a, b) { 4 } else { 0 }, pcie: PcieLevel::System };
    let matrix = LinkMatrix::new(&(0..8).map(place).collect::<Vec<_>>(), pair).unwrap();
    let name = |gpu: usize| DeviceName::new(format!("gpu-{gpu}")).unwrap();
    let topology =
        PoolTopology::new((0..8).map(|gpu| (name(gpu), gpu)).collect(), Arc::new(matrix));
    let mut pools = BTreeMap::clone(&cluster.0.topology);
    pools.insert(device_id(node, "gpu-0").pool, Arc::new(topology));
    cluster.0.topology = Arc::new(pools);
}

fn eight() -> Cluster {
    let gpus = (0..8).map(|i| gpu(&format!("gpu-{i}"), "80Gi"));
    Cluster::new().node("node-a", gpus.collect())
}

fn linked_pairs() -> Cluster {
    let mut cluster = eight();
    link_pairs(&mut cluster, "node-a");
    cluster
}

/// Creates a pod that requests whole GPUs with these topology terms.
fn requesting(count: u64, topology: Value) -> PendingPod {
    let whole = request("gpu", count, &[("memory", "80Gi"), ("cores", "100")]);
    pod("p", vec![configured(claim("p", vec![whole]), json!({ "topology": topology }))])
}

fn gpus(plan: &AllocationPlan) -> Vec<String> {
    let results = plan.decisions.iter().flat_map(|d| &d.claims).flat_map(|c| &c.results);
    results.map(|result| result.device.device.to_string()).collect()
}

fn chosen(cluster: &Cluster, policy: Policy, pod: PendingPod) -> Vec<String> {
    gpus(&plan(&cluster.0, &[pod], PlanSettings { policy, ..PlanSettings::default() }))
}

fn require(scope: &str) -> Value {
    json!([{"scope": scope, "mode": "Require"}])
}

fn prefer(scope: &str) -> Value {
    json!([{"scope": scope, "mode": "Prefer"}])
}

#[test]
fn required_nvlink_pair_is_linked_under_every_policy() {
    for policy in [Policy::Binpack, Policy::Spread, Policy::Random, Policy::LeastFragmentation] {
        let pair = chosen(&linked_pairs(), policy, requesting(2, require("NVLink")));
        let number = |name: &String| name["gpu-".len()..].parse::<u32>().unwrap();
        assert_eq!(pair.iter().map(number).reduce(|a, b| b - a), Some(4), "{policy:?}: {pair:?}");
    }
}

#[test]
fn preferred_scope_is_optional_and_required_scope_is_not() {
    assert_eq!(chosen(&linked_pairs(), Policy::Binpack, requesting(4, prefer("NUMA"))).len(), 4);
    let four_on_one: Vec<String> = (0..4).map(|gpu| format!("gpu-{gpu}")).collect();
    assert_eq!(
        chosen(&linked_pairs(), Policy::Binpack, requesting(4, prefer("NUMA"))),
        four_on_one
    );
    assert_eq!(chosen(&linked_pairs(), Policy::Binpack, requesting(5, prefer("NUMA"))).len(), 5);
    assert!(chosen(&linked_pairs(), Policy::Binpack, requesting(5, require("NUMA"))).is_empty());
}

#[test]
fn unknown_topology_shares_no_scope() {
    assert_eq!(chosen(&eight(), Policy::Binpack, requesting(2, prefer("NVLink"))).len(), 2);
    assert!(chosen(&eight(), Policy::Binpack, requesting(2, require("NVLink"))).is_empty());
    assert_eq!(chosen(&eight(), Policy::Binpack, requesting(1, require("NVLink"))).len(), 1);
}

#[test]
fn refusal_counts_devices_missing_for_required_scope() {
    let waiting =
        plan(&linked_pairs().0, &[requesting(3, require("NVLink"))], PlanSettings::default());
    let RefusalCause::NoFit(explanation) = &*waiting.refusals[0].cause else {
        panic!("{:?}", waiting.refusals)
    };
    let scattered = Reason::TopologyTooSmall { scopes: vec![TopologyScope::NvLink] };
    let (reason, tally) = explanation.tallies().next().unwrap();
    assert_eq!(
        (reason, tally.devices(), tally.least_missing()),
        (&scattered, 8, Some(quantity("1")))
    );
    assert_eq!(
        explanation.render(200),
        "8/8 GPUs available: 8 available but too few share NVLink (at least 1 short)"
    );
}

#[test]
fn tries_next_set_if_other_requests_do_not_fit() {
    let mut cluster = Cluster::new();
    let color = |i: u32| Attribute::String(if i.is_multiple_of(4) { "red" } else { "blue" }.into());
    let gpus = (0..8).map(|i| gpu(&format!("gpu-{i}"), "80Gi").with("color", color(i)));
    cluster = cluster.node("node-a", gpus.collect());
    link_pairs(&mut cluster, "node-a");
    let whole = |name, count| request(name, count, &[("memory", "80Gi"), ("cores", "100")]);
    let mut both = claim("p", vec![whole("pair", 2), whole("one", 1)]);
    both.constraints.push(matching("gpu.tessera.dev/color"));
    let config = json!({"topology": [{"scope": "NVLink", "mode": "Require"}]});
    // Only two GPUs are red: a red pair leaves none for the other request.
    let devices = chosen(&cluster, Policy::Binpack, pod("p", vec![configured(both, config)]));
    assert_eq!(devices.len(), 3);
    assert!(!devices.iter().any(|name| name == "gpu-0" || name == "gpu-4"), "{devices:?}");
}

#[test]
fn all_mode_fails_without_required_scope() {
    let mut all = requesting(1, require("NUMA"));
    let claim = claim(
        "p",
        vec![{
            let mut request = request("gpu", 1, &[]);
            request.alternatives[0].mode = tessera_allocator::model::AllocationMode::All;
            request
        }],
    );
    all.claims =
        pod("p", vec![configured(claim.clone(), json!({"topology": require("NUMA")}))]).claims;
    assert!(chosen(&linked_pairs(), Policy::Binpack, all.clone()).is_empty());
    let mut cluster = eight();
    link_gpus(&mut cluster, "node-a", |_, _| true, |_| 0);
    assert_eq!(chosen(&cluster, Policy::Binpack, all).len(), 8);
}

#[test]
fn least_fragmentation_uses_topology_without_terms() {
    let mut cluster = linked_pairs();
    let silent = |count| {
        let mut pod = requesting(count, json!([]));
        pod.claims = pod_of(count).claims;
        pod
    };
    let pair = chosen(&cluster, Policy::LeastFragmentation, silent(2));
    assert_eq!(pair, ["gpu-0", "gpu-4"]);
    // GPU 1 is used, so GPU 5 has no free NVLink peer.
    cluster.use_share("node-a", "gpu-1", "80Gi", "100");
    assert_eq!(chosen(&cluster, Policy::LeastFragmentation, silent(1)), ["gpu-5"]);
    assert_eq!(chosen(&cluster, Policy::Binpack, silent(1)), ["gpu-0"]);
}

fn pod_of(count: u64) -> PendingPod {
    pod("p", vec![claim("p", vec![request("gpu", count, &[("memory", "80Gi"), ("cores", "100")])])])
}

#[test]
fn planner_uses_latest_topology() {
    let cluster = linked_pairs();
    let mut planner = tessera_allocator::Planner::from_snapshot(&cluster.0, Default::default());
    let mut planned = |topology| {
        planner.set_topology(&device_id("node-a", "gpu-0").pool, topology);
        gpus(&planner.plan(&[requesting(2, require("NVLink"))], PlanSettings::default()))
    };
    let known = cluster.0.topology.values().next().unwrap();
    assert_eq!(planned(Some(known)).len(), 2);
    assert!(planned(None).is_empty());
    assert_eq!(planned(Some(known)).len(), 2);
}

/// Adds sixteen GPUs with equal links between all of them.
fn switched(cluster: &mut Cluster, node: &str) {
    let place = |_| DeviceLocation { pcie_root: Some(0), numa_node: Some(0) };
    let pair = |_, _| DeviceLinks { nvlinks: 4, pcie: PcieLevel::System };
    let matrix = LinkMatrix::new(&(0..16).map(place).collect::<Vec<_>>(), pair).unwrap();
    let name = |gpu: usize| DeviceName::new(format!("gpu-{gpu}")).unwrap();
    let topology =
        PoolTopology::new((0..16).map(|gpu| (name(gpu), gpu)).collect(), Arc::new(matrix));
    let mut pools = BTreeMap::clone(&cluster.0.topology);
    pools.insert(device_id(node, "gpu-0").pool, Arc::new(topology));
    cluster.0.topology = Arc::new(pools);
}

#[test]
fn interchangeable_sets_are_not_all_tried() {
    let mut cluster = Cluster::new();
    for node in ["node-a", "node-b", "node-c"] {
        cluster = cluster.node(node, (0..16).map(|i| gpu(&format!("gpu-{i}"), "80Gi")).collect());
        switched(&mut cluster, node);
    }
    let whole = |name, count| request(name, count, &[("memory", "80Gi"), ("cores", "100")]);
    let two = || claim("p", vec![whole("eight", 8), whole("nine", 9)]);
    let wanting =
        |topology: Value| pod("p", vec![configured(two(), json!({ "topology": topology }))]);
    for (pod, most) in [
        (pod("p", vec![two()]), 1_000),
        (wanting(prefer("NVLink")), 1_000),
        // A required topology is searched over all sets, which are enumerated but not tried.
        (wanting(require("NVLink")), 3 * 2 * 12_870),
    ] {
        let settings =
            PlanSettings { policy: Policy::LeastFragmentation, ..PlanSettings::default() };
        let plan = plan(&cluster.0, &[pod], settings);
        assert!(matches!(*plan.refusals[0].cause, RefusalCause::NoFit(_)), "{:?}", plan.refusals);
        assert!(plan.steps < most, "{} of {most}", plan.steps);
    }
}

/// Returns true if a set of `count` of the `free` GPUs exists in which every two are linked.
fn exists(linked: &[Vec<bool>], free: &[usize], count: usize, set: &mut Vec<usize>) -> bool {
    if set.len() == count {
        return true;
    }
    free.iter().enumerate().any(|(at, &gpu)| {
        if !set.iter().all(|&other| linked[other][gpu]) {
            return false;
        }
        set.push(gpu);
        let found = exists(linked, &free[at + 1..], count, set);
        set.pop();
        found
    })
}

proptest! {
    #[test]
    fn required_scope_is_found_exactly_if_it_exists(
        links in prop::collection::vec(prop::bool::weighted(0.6), 28),
        taken in prop::collection::btree_set(0_usize..8, 0..5),
        count in 2_u64..6,
    ) {
        let mut linked = vec![vec![false; 8]; 8];
        let pairs = (0..8).flat_map(|a| (a + 1..8).map(move |b| (a, b)));
        for ((a, b), link) in pairs.zip(links) {
            linked[a][b] = link;
            linked[b][a] = link;
        }
        let mut cluster = eight();
        link_gpus(&mut cluster, "node-a", |a, b| linked[a][b], |_| 0);
        taken
            .iter()
            .for_each(|gpu| cluster.use_share("node-a", &format!("gpu-{gpu}"), "80Gi", "100"));
        let free: Vec<usize> = (0..8).filter(|gpu| !taken.contains(gpu)).collect();
        for policy in
            [Policy::FirstFit, Policy::Binpack, Policy::Spread, Policy::LeastFragmentation]
        {
            let devices = chosen(&cluster, policy, requesting(count, require("NVLink")));
            prop_assert_eq!(
                !devices.is_empty(),
                exists(&linked, &free, count as usize, &mut Vec::new())
            );
            let numbers: Vec<usize> =
                devices.iter().map(|name| name["gpu-".len()..].parse().unwrap()).collect();
            for a in &numbers {
                prop_assert!(!taken.contains(a));
                prop_assert!(numbers.iter().all(|b| a == b || linked[*a][*b]));
            }
        }
    }
}
