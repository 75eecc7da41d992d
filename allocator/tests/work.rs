//! Work of plans: proportional to what has changed, not to pods, shapes and nodes.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod builders;

use std::sync::Arc;

use builders::*;
use tessera_allocator::model::{
    DeviceClass, DeviceSelector, PendingPod, SchedulingConstraints, Usage,
};
use tessera_allocator::{
    AllocationPlan, FeatureGates, PlanSettings, PlanWork, Planner, Policy, RefusalCause,
};
use tessera_api::names::{DeviceClassName, NodeName};

const NODES: usize = 50;

/// Creates nodes with two GPUs each, of which 50Gi are in use.
fn cluster() -> Cluster {
    let gpus = || (0..2).map(|i| gpu(&format!("gpu-{i}"), "80Gi")).collect();
    let nodes = (0..NODES).map(|node| format!("node-{node:02}"));
    let mut cluster =
        nodes.clone().fold(Cluster::new(), |cluster, name| cluster.node(&name, gpus()));
    for name in nodes {
        (0..2).for_each(|i| cluster.use_share(&name, &format!("gpu-{i}"), "50Gi", "1"));
    }
    cluster
}

fn planner() -> Planner {
    Planner::from_snapshot(&cluster().0, FeatureGates::default())
}

fn settings() -> PlanSettings {
    PlanSettings { policy: Policy::FirstFit, ..PlanSettings::default() }
}

/// Creates pods of `shapes` shapes that lack memory on every node.
fn too_large(pods: usize, shapes: usize) -> Vec<PendingPod> {
    let pod = |n: usize| share_pod(&format!("pod-{n:05}"), &format!("{}Gi", 40 + n % shapes), "1");
    (0..pods).map(pod).collect()
}

fn plan(planner: &mut Planner, pods: &[PendingPod]) -> AllocationPlan {
    planner.plan(pods, settings())
}

/// Sets the memory in use on a device.
fn set_use(planner: &mut Planner, node: &str, device: &str, memory: &str) {
    let mut usage = Usage::default();
    usage.add(&[share(node, device, memory, "1")]);
    let id = device_id(node, device);
    planner.set_device_use(&id, usage.get(&id));
}

fn text(plan: &AllocationPlan, pod: &PendingPod) -> String {
    let refusal = plan.refusals.iter().find(|refusal| refusal.pod == pod.uid).unwrap();
    let RefusalCause::NoFit(explanation) = &*refusal.cause else { panic!("{refusal:?}") };
    explanation.render(1024)
}

#[test]
fn plan_without_changes_searches_and_explains_nothing() {
    let mut planner = planner();
    let pods = too_large(10_000, 7);
    let first = plan(&mut planner, &pods);
    assert_eq!(first.refusals.len(), pods.len());
    let expected = PlanWork {
        pods_classified: 10_000,
        pods_searched: 7,
        nodes_searched: 7 * NODES as u64,
        nodes_explained: 7 * NODES as u64,
        ..first.work
    };
    assert_eq!(first.work, expected, "one search per shape and node");
    let second = plan(&mut planner, &pods);
    assert_eq!(second.refusals.len(), pods.len());
    assert_eq!(second.steps, 0);
    assert_eq!(second.work, PlanWork { turns: 10_000, ..PlanWork::default() });
    let is_same = |(a, b): (&tessera_allocator::Refusal, &tessera_allocator::Refusal)| {
        a.pod == b.pod && Arc::ptr_eq(&a.cause, &b.cause)
    };
    assert!(first.refusals.iter().zip(&second.refusals).all(is_same), "explanations are kept");
}

#[test]
fn change_that_does_not_help_examines_one_node_per_shape() {
    let mut planner = planner();
    let pods = too_large(1000, 5);
    let before = text(&plan(&mut planner, &pods), &pods[0]);
    set_use(&mut planner, "node-07", "gpu-1", "79Gi");
    let after = plan(&mut planner, &pods);
    assert_eq!(after.refusals.len(), pods.len());
    let expected = PlanWork {
        turns: 1000,
        pods_searched: 5,
        nodes_searched: 5,
        nodes_explained: 5,
        ..PlanWork::default()
    };
    assert_eq!(after.work, expected);
    assert_eq!(text(&after, &pods[0]), before, "the least missing amount is the same");
}

#[test]
fn new_pod_of_known_shape_is_only_classified() {
    let mut planner = planner();
    let mut pods = too_large(100, 1);
    plan(&mut planner, &pods);
    pods.push(share_pod("new", "40Gi", "1"));
    let work = plan(&mut planner, &pods).work;
    assert_eq!(work, PlanWork { turns: 101, pods_classified: 1, ..PlanWork::default() });
}

#[test]
fn freed_device_is_given_to_first_pod_of_refused_class() {
    let mut planner = planner();
    let pods = too_large(100, 1);
    plan(&mut planner, &pods);
    planner.set_device_use(&device_id("node-31", "gpu-0"), None);
    let freed = plan(&mut planner, &pods);
    assert_eq!(placements(&freed), [["node-31/gpu-0"], ["node-31/gpu-0"]], "two times 40Gi");
    assert_eq!(freed.refusals.len(), 98);
    // The decisions were not applied, so the plan repeats.
    assert_eq!(placements(&plan(&mut planner, &pods)), placements(&freed));
}

#[test]
fn pods_that_select_no_node_test_only_changed_nodes() {
    let mut cluster = cluster();
    let mut planner = Planner::from_snapshot(&cluster.0, FeatureGates::default());
    let constraints = SchedulingConstraints {
        node_selector: [("pool".to_owned(), "a".to_owned())].into(),
        ..Default::default()
    };
    let scheduling = Arc::new(constraints);
    let pods: Vec<PendingPod> = (0..100)
        .map(|n| PendingPod {
            scheduling: Arc::clone(&scheduling),
            ..share_pod(&format!("pod-{n:03}"), "10Gi", "1")
        })
        .collect();
    assert_eq!(plan(&mut planner, &pods).work.nodes_tested, NODES as u64);
    let nothing = PlanWork { turns: 100, ..PlanWork::default() };
    assert_eq!(plan(&mut planner, &pods).work, nothing);
    cluster.put_node("node-03", |node| node.cordoned = true);
    planner.set_node(&cluster.0.nodes[&NodeName::new("node-03").unwrap()]);
    let expected = PlanWork { pods_searched: 1, nodes_tested: 1, nodes_explained: 1, ..nothing };
    assert_eq!(plan(&mut planner, &pods).work, expected);
    cluster.put_node("node-05", |node| {
        node.labels.insert("pool".to_owned(), "a".to_owned());
    });
    planner.set_node(&cluster.0.nodes[&NodeName::new("node-05").unwrap()]);
    let labeled = plan(&mut planner, &pods);
    assert_eq!(labeled.decisions.len(), 6, "30Gi are free on each of two devices");
    assert!(labeled.decisions.iter().all(|d| d.node.as_str() == "node-05"));
}

#[test]
fn change_of_class_drops_only_its_own_results() {
    let mut planner = planner();
    let pods = too_large(10, 2);
    plan(&mut planner, &pods);
    let class = |name: &str, selector: &str| {
        let name = DeviceClassName::new(name).unwrap();
        let selectors = vec![DeviceSelector::new(selector)];
        Arc::new(DeviceClass { name, selectors, configs: Vec::new() })
    };
    planner.set_class(&class("other", "device.driver == 'other'"));
    planner.set_class(&class(CLASS, "device.driver == 'gpu.tessera.dev'"));
    let nothing = PlanWork { turns: 10, ..PlanWork::default() };
    assert_eq!(plan(&mut planner, &pods).work, nothing);
    planner.set_class(&class(CLASS, "device.driver == 'none'"));
    let changed = plan(&mut planner, &pods);
    assert_eq!(changed.work.nodes_explained, 2 * NODES as u64);
    assert!(
        text(&changed, &pods[0]).contains("100 not selected by DeviceClass"),
        "{}",
        text(&changed, &pods[0])
    );
}

#[test]
fn explaining_is_charged_and_continues_in_next_plan() {
    let mut planner = planner();
    let pods = too_large(20, 20);
    let limited = PlanSettings { steps_per_pod: 120, steps_per_plan: 120, ..settings() };
    let (mut explained, mut plans) = (0, 0);
    loop {
        let plan = planner.plan(&pods, limited);
        explained += plan.work.nodes_explained;
        plans += 1;
        assert!(plan.work.nodes_explained <= 120, "a step per node: {:?}", plan.work);
        if plan.unreached.is_empty() {
            break;
        }
        assert!(plans < 100, "no progress");
    }
    assert!(plans > 5, "{plans}");
    assert_eq!(explained, 20 * NODES as u64, "each node once per shape");
    let all = plan(&mut planner, &pods);
    assert_eq!(all.refusals.len(), pods.len());
}

#[test]
fn kept_explanation_equals_new_one_after_changes() {
    let mut planner = planner();
    let mut cluster = cluster();
    let pods = too_large(6, 3);
    plan(&mut planner, &pods);
    let name = |n: usize| NodeName::new(format!("node-{n:02}")).unwrap();
    let gone = [3, 9];
    for n in gone {
        planner.remove_node(&name(n));
        cluster.0.nodes.remove(&name(n));
    }
    for (n, memory) in [(11, "45Gi"), (12, "79Gi"), (20, "60Gi")] {
        let node = format!("node-{n}");
        set_use(&mut planner, &node, "gpu-0", memory);
        cluster.0.usage.set(&device_id(&node, "gpu-0"), {
            let mut usage = Usage::default();
            usage.add(&[share(&node, "gpu-0", memory, "1")]);
            usage.get(&device_id(&node, "gpu-0")).cloned()
        });
    }
    let cluster = cluster.node("node-aa", vec![gpu("gpu-0", "20Gi")]);
    planner.set_slice(&cluster.0.slices["node-aa"]);
    planner.set_node(&cluster.0.nodes[&NodeName::new("node-aa").unwrap()]);
    let kept = plan(&mut planner, &pods);
    let new = plan(&mut Planner::from_snapshot(&cluster.0, FeatureGates::default()), &pods);
    assert_eq!(kept.refusals.len(), new.refusals.len());
    for (kept, new) in kept.refusals.iter().zip(&new.refusals) {
        assert_eq!(kept.cause, new.cause);
        let (RefusalCause::NoFit(kept), RefusalCause::NoFit(new)) = (&*kept.cause, &*new.cause)
        else {
            panic!()
        };
        assert_eq!(kept.counts(), new.counts());
    }
}

#[test]
fn new_forecast_searches_only_feasible_nodes_again() {
    let mut cluster = cluster();
    for node in 0..5 {
        cluster.0.usage.set(&device_id(&format!("node-{node:02}"), "gpu-0"), None);
    }
    let mut planner = Planner::from_snapshot(&cluster.0, FeatureGates::default());
    let settings = PlanSettings { policy: Policy::LeastFragmentation, ..PlanSettings::default() };
    let wanted = [share_pod("wanted", "80Gi", "1")];
    let first = planner.plan(&wanted, settings);
    assert_eq!((first.decisions.len(), first.work.nodes_searched), (1, NODES as u64));
    assert_eq!(planner.plan(&wanted, settings).work.nodes_searched, 1, "the undone decision");
    // Enough other requests for a new forecast; none fits.
    let pair = |n: usize| request(&format!("gpu-{n}"), 2, &[("memory", "60Gi")]);
    let other = |n: usize| pod(&format!("other-{n}"), vec![claim(&format!("c{n}"), vec![pair(n)])]);
    let others: Vec<PendingPod> = (0..100).map(other).collect();
    assert!(planner.plan(&others, settings).decisions.is_empty());
    let again = planner.plan(&wanted, settings);
    assert_eq!((again.decisions.len(), again.work.nodes_searched), (1, 5));
}

#[test]
fn places_of_removed_nodes_are_given_to_new_ones() {
    let cluster = cluster();
    let mut planner = Planner::from_snapshot(&cluster.0, FeatureGates::default());
    let pods = [share_pod("large", "40Gi", "1"), share_pod("small", "10Gi", "1")];
    let node = |name: &str| {
        let mut node = (*cluster.0.nodes[&NodeName::new("node-00").unwrap()]).clone();
        node.name = NodeName::new(name).unwrap();
        Arc::new(node)
    };
    let mut last = "node-00".to_owned();
    for round in 0..200 {
        planner.remove_node(&NodeName::new(&last).unwrap());
        planner.remove_slice(&last);
        last = format!("autoscaled-{round:03}");
        planner.set_slice(&Arc::new(slice(&last, vec![gpu("gpu-0", "30Gi")])));
        planner.set_node(&node(&last));
        let plan = plan(&mut planner, &pods);
        assert_eq!(placements(&plan), [[format!("{last}/gpu-0")]], "the first by name");
        let text = text(&plan, &pods[0]);
        assert!(
            text.contains("0/99 GPUs") && text.contains("1 insufficient total memory"),
            "{text}"
        );
    }
    planner.clear_caches();
    assert_eq!(plan(&mut planner, &pods).work.nodes_searched, 2 * NODES as u64);
}
