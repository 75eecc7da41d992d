//! A planner that receives single changes plans like a new planner with the final snapshot.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod builders;

use std::sync::Arc;

use builders::*;
use proptest::prelude::*;
use serde_json::json;
use tessera_allocator::model::{Attribute, Device, DeviceSelector, NodeChoice, PendingPod, Slice};
use tessera_allocator::{FeatureGates, PlanSettings, Planner, RefusalCause, plan};
use tessera_api::names::NodeName;

/// A change of a cluster with a few nodes and GPUs.
#[derive(Debug, Clone)]
enum Change {
    Take { node: usize, gpu: usize, memory: u32 },
    Free { node: usize, gpu: usize },
    Publish { node: usize, memory: Vec<u32>, everywhere: bool },
    Withdraw { node: usize },
    Label { node: usize, value: u32 },
    Remove { node: usize },
    Plan { memory: u32, count: u64, policy: &'static str },
}

fn changes() -> impl Strategy<Value = Vec<Change>> {
    let position = || (0usize..4, 0usize..3);
    let policies = || prop::sample::select(vec!["Binpack", "Spread", "Random"]);
    let change = prop_oneof![
        4 => (position(), 1u32..60)
            .prop_map(|((node, gpu), memory)| Change::Take { node, gpu, memory }),
        2 => position().prop_map(|(node, gpu)| Change::Free { node, gpu }),
        2 => (0usize..4, prop::collection::vec(16u32..96, 1..4), prop::bool::weighted(0.2))
            .prop_map(|(node, memory, everywhere)| Change::Publish { node, memory, everywhere }),
        1 => (0usize..4).prop_map(|node| Change::Withdraw { node }),
        1 => (0usize..4, 0u32..3).prop_map(|(node, value)| Change::Label { node, value }),
        1 => (0usize..4).prop_map(|node| Change::Remove { node }),
        5 => (1u32..80, 1u64..4, policies())
            .prop_map(|(memory, count, policy)| Change::Plan { memory, count, policy }),
    ];
    prop::collection::vec(change, 1..40)
}

fn name(node: usize) -> String {
    format!("node-{node}")
}

fn devices(memory: &[u32]) -> Vec<Device> {
    memory.iter().enumerate().map(|(i, m)| gpu(&format!("gpu-{i}"), &format!("{m}Gi"))).collect()
}

fn published(node: usize, memory: &[u32], everywhere: bool) -> Slice {
    let mut slice = slice(&name(node), devices(memory));
    if everywhere {
        slice.nodes = NodeChoice::All;
    }
    slice
}

fn pods(memory: u32, count: u64, policy: &str) -> Vec<PendingPod> {
    let pod = |p: usize| {
        let amount = format!("{memory}Gi");
        let request = request("gpu", count, &[("memory", amount.as_str())]);
        let claim = configured(
            claim(&format!("c{p}"), vec![request]),
            json!({"placement": {"node": policy, "device": policy}}),
        );
        pod(&format!("p{p}"), vec![claim])
    };
    (0..3).map(pod).collect()
}

/// Applies a change to the snapshot and reports it to the planner.
fn apply(cluster: &mut Cluster, planner: &mut Planner, change: &Change) {
    let report = |cluster: &Cluster, planner: &mut Planner, node: usize, gpu: usize| {
        let id = device_id(&name(node), &format!("gpu-{gpu}"));
        planner.set_device_use(&id, cluster.0.usage.get(&id));
    };
    match change {
        Change::Take { node, gpu, memory } => {
            cluster.use_share(&name(*node), &format!("gpu-{gpu}"), &format!("{memory}Gi"), "1");
            report(cluster, planner, *node, *gpu);
        }
        Change::Free { node, gpu } => {
            cluster.0.usage.set(&device_id(&name(*node), &format!("gpu-{gpu}")), None);
            report(cluster, planner, *node, *gpu);
        }
        Change::Publish { node, memory, everywhere } => {
            let slice = Arc::new(published(*node, memory, *everywhere));
            cluster.0.slices.insert(slice.name.clone(), Arc::clone(&slice));
            planner.set_slice(&slice);
        }
        Change::Withdraw { node } => {
            cluster.0.slices.remove(&name(*node));
            planner.remove_slice(&name(*node));
        }
        Change::Label { node, value } => {
            cluster.put_node(&name(*node), |n| {
                n.labels.insert("zone".to_owned(), value.to_string());
            });
            planner.set_node(&cluster.0.nodes[&NodeName::new(name(*node)).unwrap()]);
        }
        Change::Remove { node } => {
            let name = NodeName::new(name(*node)).unwrap();
            cluster.0.nodes.remove(&name);
            planner.remove_node(&name);
        }
        Change::Plan { .. } => {}
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn cached_and_fresh_plans_are_equal(changes in changes()) {
        let mut cluster =
            (0..3).fold(Cluster::new(), |c, node| c.node(&name(node), devices(&[80, 40])));
        let mut planner = Planner::from_snapshot(&cluster.0, FeatureGates::default());
        for change in &changes {
            apply(&mut cluster, &mut planner, change);
            if let Change::Plan { memory, count, policy } = change {
                let pods = pods(*memory, *count, policy);
                let settings = PlanSettings { seed: 5, ..PlanSettings::default() };
                let (cached, fresh) =
                    (planner.plan(&pods, settings), plan(&cluster.0, &pods, settings));
                prop_assert_eq!(cached.decisions, fresh.decisions);
                prop_assert_eq!(format!("{:?}", cached.refusals), format!("{:?}", fresh.refusals));
            }
        }
    }
}

#[test]
fn decision_is_no_usage_until_reported() {
    let cluster = Cluster::new().node("node-0", devices(&[80]));
    let mut planner = Planner::from_snapshot(&cluster.0, FeatureGates::default());
    let pods = [share_pod("a", "80Gi", "0")];
    let first = planner.plan(&pods, PlanSettings::default());
    assert_eq!(first.decisions.len(), 1);
    assert_eq!(planner.plan(&pods, PlanSettings::default()).decisions, first.decisions);
}

/// Creates a pod whose selector iterates over `numbers` numbers per device.
///
/// It also reads an attribute that differs on all devices.
fn expensive(numbers: u32) -> PendingPod {
    let mut request = request("gpu", 1, &[("memory", "1Gi")]);
    let expression = format!(
        "lists.range({numbers}).all(i, i >= 0) && device.attributes['gpu.tessera.dev'].index == 100"
    );
    request.alternatives[0].selectors.push(DeviceSelector::new(&expression));
    pod("p", vec![claim("c", vec![request])])
}

#[test]
fn selector_evaluation_is_charged_once() {
    let numbered = |i: i64| gpu(&format!("gpu-{i}"), "80Gi").with("index", Attribute::Int(i));
    let cluster = Cluster::new().node("node-0", (0..8).map(numbered).collect());
    let mut planner = Planner::from_snapshot(&cluster.0, FeatureGates::default());
    let (cheap, expensive) = ([expensive(1)], [expensive(2000)]);
    let settings = PlanSettings::default();
    let little = planner.plan(&cheap, settings).steps;
    let first = planner.plan(&expensive, settings).steps;
    assert!(first > 100 * little.max(1), "{first} steps, where an easy one takes {little}");
    planner.set_device_use(&device_id("node-0", "gpu-0"), None);
    assert!(planner.plan(&expensive, settings).steps < first / 10, "selector results are cached");
    let bounded = PlanSettings { steps_per_pod: first / 2, ..settings };
    planner.clear_caches();
    let refusals = planner.plan(&expensive, bounded).refusals;
    assert!(matches!(*refusals[0].cause, RefusalCause::BudgetExceeded), "{refusals:?}");
    assert!(
        matches!(*planner.plan(&expensive, bounded).refusals[0].cause, RefusalCause::NoFit(_)),
        "it continues with cached results"
    );
}

#[test]
fn unused_shapes_are_evicted() {
    let cluster = Cluster::new().node("node-0", devices(&[80]));
    let mut planner = Planner::from_snapshot(&cluster.0, FeatureGates::default());
    for i in 0..10_000u32 {
        let pods = [share_pod("a", &format!("{i}Mi"), "1"), share_pod("b", "90Gi", "1")];
        let plan = planner.plan(&pods, PlanSettings::default());
        assert_eq!((plan.decisions.len(), plan.refusals.len()), (1, 1));
    }
}

#[test]
fn plan_ends_without_steps_to_search_full_nodes() {
    let gpus = || (0..8).map(|i| gpu(&format!("gpu-{i}"), "80Gi")).collect::<Vec<_>>();
    let mut cluster = (0..4).fold(Cluster::new(), |c, node| c.node(&name(node), gpus()));
    let mut planner = Planner::from_snapshot(&cluster.0, FeatureGates::default());
    let settings = PlanSettings { steps_per_pod: 10, ..PlanSettings::default() };
    let pods = [share_pod("a", "80Gi", "1")];
    for _ in 0..6 {
        planner.plan(&pods, settings);
    }
    for (node, gpu) in (0..4).flat_map(|node| (0..8).map(move |gpu| (node, gpu))) {
        let (node, gpu) = (name(node), format!("gpu-{gpu}"));
        cluster.use_share(&node, &gpu, "80Gi", "1");
        planner
            .set_device_use(&device_id(&node, &gpu), cluster.0.usage.get(&device_id(&node, &gpu)));
    }
    assert!(planner.plan(&pods, settings).decisions.is_empty());
}
