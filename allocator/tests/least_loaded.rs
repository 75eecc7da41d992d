//! LeastLoaded: pods get the GPU with the least expected load.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod builders;

use builders::*;
use serde_json::json;
use tessera_allocator::model::{DeviceLoad, PendingPod};
use tessera_allocator::{AllocationPlan, FeatureGates, PlanSettings, Planner};

/// Creates a pod that wants a quarter of the least loaded GPU.
fn quarter(name: &str) -> PendingPod {
    let policy = json!({"placement": {"node": "LeastLoaded", "device": "LeastLoaded"}});
    let request = request("gpu", 1, &[("memory", "10Gi"), ("cores", "25")]);
    pod(name, vec![configured(claim(name, vec![request]), policy)])
}

/// Creates a planner for two nodes of two GPUs, with the load of each in percent.
fn planner(cluster: &Cluster, loads: &[(&str, &str, u8)]) -> Planner {
    let mut planner = Planner::from_snapshot(&cluster.0, FeatureGates::default());
    for (node, device, busy) in loads {
        set_load(&mut planner, node, device, *busy, 0);
    }
    planner
}

fn set_load(planner: &mut Planner, node: &str, device: &str, busy: u8, settled: u32) {
    let load = DeviceLoad { busy_percent: busy, settled_cores_percent: settled };
    planner.set_device_load(&device_id(node, device), Some(load));
}

fn four_gpus() -> Cluster {
    let gpus = || (0..2).map(|i| gpu(&format!("gpu-{i}"), "80Gi")).collect();
    Cluster::new().node("node-a", gpus()).node("node-b", gpus())
}

fn place(planner: &mut Planner, pods: &[PendingPod]) -> Vec<String> {
    let plan: AllocationPlan = planner.plan(pods, PlanSettings::default());
    placements(&plan).concat()
}

const LOADS: [(&str, &str, u8); 4] = [
    ("node-a", "gpu-0", 40),
    ("node-a", "gpu-1", 90),
    ("node-b", "gpu-0", 60),
    ("node-b", "gpu-1", 10),
];

#[test]
fn idle_gpu_comes_first_even_if_most_is_reserved() {
    let mut cluster = four_gpus();
    cluster.use_share("node-b", "gpu-1", "60Gi", "75");
    let mut planner = planner(&cluster, &LOADS);
    set_load(&mut planner, "node-b", "gpu-1", 10, 75);
    assert_eq!(place(&mut planner, &[quarter("p")]), ["node-b/gpu-1"]);
}

#[test]
fn pods_of_a_burst_do_not_all_get_the_idle_gpu() {
    // Each reserves 25 percent, which is expected until it is measured: 10, 35, 40, then 60 twice.
    let pods: Vec<_> = (0..4).map(|i| quarter(&format!("p{i}"))).collect();
    let got = place(&mut planner(&four_gpus(), &LOADS), &pods);
    assert_eq!(got, ["node-b/gpu-1", "node-b/gpu-1", "node-a/gpu-0", "node-b/gpu-0"]);
}

#[test]
fn young_shares_are_expected_and_settled_ones_measured() {
    let mut cluster = four_gpus();
    cluster.use_share("node-b", "gpu-1", "10Gi", "50");
    let mut planner = planner(&cluster, &LOADS);
    assert_eq!(place(&mut planner, &[quarter("p")]), ["node-a/gpu-0"], "10 and 50 are expected");
    set_load(&mut planner, "node-b", "gpu-1", 10, 50);
    assert_eq!(place(&mut planner, &[quarter("p")]), ["node-b/gpu-1"], "10 are measured");
}

#[test]
fn gpu_without_a_load_counts_what_is_reserved() {
    let mut cluster = four_gpus();
    cluster.use_share("node-a", "gpu-0", "40Gi", "30");
    let loads = [("node-a", "gpu-1", 70), ("node-b", "gpu-0", 60), ("node-b", "gpu-1", 55)];
    let mut planner = planner(&cluster, &loads);
    assert_eq!(place(&mut planner, &[quarter("p")]), ["node-a/gpu-0"], "half of its memory");
    for (node, device, _) in loads {
        planner.set_device_load(&device_id(node, device), None);
    }
    assert_eq!(place(&mut planner, &[quarter("p")]), ["node-b/gpu-0"], "as Spread does");
}

#[test]
fn each_change_of_a_load_changes_the_next_choice() {
    let cluster = four_gpus();
    let mut planner = planner(&cluster, &[]);
    assert_eq!(place(&mut planner, &[quarter("p")]), ["node-a/gpu-0"]);
    for idle in LOADS {
        for gpu in LOADS {
            set_load(&mut planner, gpu.0, gpu.1, if gpu == idle { 5 } else { 80 }, 0);
        }
        let expected = [format!("{}/{}", idle.0, idle.1)];
        assert_eq!(place(&mut planner, &[quarter("p")]), expected);
    }
}

#[test]
fn loads_cost_nothing_while_no_pod_wants_them() {
    let cluster = four_gpus();
    let mut planner = planner(&cluster, &LOADS);
    let pods = [share_pod("p", "10Gi", "25")];
    let mut searched = || planner.plan(&pods, PlanSettings::default()).work.nodes_searched;
    let (_, again) = (searched(), searched());
    for (node, device, _) in LOADS {
        set_load(&mut planner, node, device, 95, 0);
    }
    let after = planner.plan(&pods, PlanSettings::default()).work.nodes_searched;
    assert_eq!(after, again);
}

#[test]
fn equal_nodes_with_different_loads_are_told_apart() {
    // From eight nodes on, nodes in the same state share results.
    let mut cluster = Cluster::new();
    for node in 0..20 {
        cluster = cluster.node(&format!("node-{node:02}"), vec![gpu("gpu-0", "80Gi")]);
    }
    let mut planner = planner(&cluster, &[]);
    for node in 0..20 {
        set_load(&mut planner, &format!("node-{node:02}"), "gpu-0", 100 - 5 * node, 0);
    }
    assert_eq!(place(&mut planner, &[quarter("p")]), ["node-19/gpu-0"]);
}
