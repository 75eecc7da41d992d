//! Step budgets of plans, and plans for a pod that is bound to a node.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod builders;

use std::collections::BTreeSet;
use std::sync::Arc;

use builders::*;
use tessera_allocator::model::{Attribute, DeviceSelector, PendingPod, PodUid};
use tessera_allocator::selector::CompiledSelector;
use tessera_allocator::{AllocationPlan, FeatureGates, PlanSettings, Planner, RefusalCause};
use tessera_api::names::{Namespace, NodeName};

const NODES: usize = 20;

/// Creates nodes with eight GPUs each; every GPU has its own index.
fn cluster(nodes: usize) -> Cluster {
    let gpus = |node: usize| {
        let index = move |i: usize| i64::try_from(node * 8 + i).unwrap();
        (0..8)
            .map(|i| gpu(&format!("gpu-{i}"), "80Gi").with("index", Attribute::Int(index(i))))
            .collect()
    };
    (0..nodes)
        .fold(Cluster::new(), |cluster, node| cluster.node(&format!("node-{node:02}"), gpus(node)))
}

fn planner(nodes: usize) -> Planner {
    Planner::from_snapshot(&cluster(nodes).0, FeatureGates::default())
}

/// Budget for two or three shapes on all nodes, which are equal apart from names.
fn bounded() -> PlanSettings {
    PlanSettings { steps_per_pod: 120, steps_per_plan: 120, ..PlanSettings::default() }
}

/// Creates a pod with a shape of its own that fits on no node.
fn too_large(number: usize) -> PendingPod {
    share_pod(&format!("large-{number:03}"), &format!("{}Gi", 100 + number), "1")
}

/// Creates a pod whose selector costs thousands of steps per device and matches none.
fn expensive(number: usize) -> PendingPod {
    let mut request = request("gpu", 1, &[("memory", "1Gi")]);
    let selector = format!(
        "lists.range(2000).all(i, i >= -{number}) && device.attributes['gpu.tessera.dev'].index == -1"
    );
    request.alternatives[0].selectors.push(DeviceSelector::new(&selector));
    let name = format!("expensive-{number:03}");
    PendingPod { namespace: namespace("tenant"), ..pod(&name, vec![claim(&name, vec![request])]) }
}

fn namespace(name: &str) -> Namespace {
    Namespace::new(name).unwrap()
}

fn decided(plan: &AllocationPlan) -> BTreeSet<PodUid> {
    plan.decisions.iter().map(|decision| decision.pod.clone()).collect()
}

/// Plans until a plan reaches all pods. Panics after a hundred plans.
fn plan_until_all_reached(planner: &mut Planner, pods: &[PendingPod]) {
    let settings =
        PlanSettings { steps_per_pod: 10_000, steps_per_plan: 10_000, ..PlanSettings::default() };
    let mut plans = 0;
    while !planner.plan(pods, settings).unreached.is_empty() {
        plans += 1;
        assert!(plans < 100, "no progress");
    }
}

#[test]
fn partial_plan_continues_in_next_plan() {
    let mut planner = planner(NODES);
    let mut pods: Vec<PendingPod> = (0..30).map(too_large).collect();
    pods.push(PendingPod { created: 1, ..share_pod("small", "1Gi", "1") });
    let mut refused = BTreeSet::new();
    let mut plans = 0;
    loop {
        let plan = planner.plan(&pods, bounded());
        plans += 1;
        refused.extend(plan.refusals.iter().map(|refusal| refusal.pod.clone()));
        if plan.unreached.is_empty() {
            assert_eq!(decided(&plan), [PodUid::new("small")].into());
            break;
        }
        assert!(plan.decisions.is_empty(), "the small pod is the last");
        assert!(plans < 100, "no progress: {} are not reached", plan.unreached.len());
    }
    assert!(plans > 5, "{plans}");
    assert_eq!(refused.len(), 30);
}

#[test]
fn plans_reach_all_pods_with_more_shapes_than_cached() {
    // 4,096 shapes are cached on few nodes, 64 on 40,000.
    let mut planner = planner(1);
    let pods: Vec<PendingPod> = (0..5000).map(too_large).collect();
    plan_until_all_reached(&mut planner, &pods);
}

#[test]
fn plans_reach_all_pods_beside_idle_pod_of_other_namespace() {
    let mut planner = planner(1);
    let mut pods: Vec<PendingPod> = (0..5600).map(too_large).collect();
    pods.push(PendingPod { namespace: namespace("other"), ..share_pod("idle", "81Gi", "1") });
    plan_until_all_reached(&mut planner, &pods);
}

#[test]
fn pod_with_cached_result_keeps_its_position() {
    let mut cluster = cluster(1);
    for gpu in 0..8 {
        cluster.use_share("node-00", &format!("gpu-{gpu}"), "80Gi", "1");
    }
    let mut planner = Planner::from_snapshot(&cluster.0, FeatureGates::default());
    let settings =
        PlanSettings { steps_per_pod: 60, steps_per_plan: 60, ..PlanSettings::default() };
    let mut pods = vec![PendingPod { priority: 1000, ..share_pod("urgent", "80Gi", "1") }];
    pods.extend((0..20).map(too_large));
    let first = planner.plan(&pods, settings);
    assert!(!first.unreached.is_empty() && first.decisions.is_empty());
    planner.set_device_use(&device_id("node-00", "gpu-3"), None);
    pods.push(PendingPod { namespace: namespace("other"), ..share_pod("other", "80Gi", "1") });
    assert_eq!(decided(&planner.plan(&pods, settings)), [PodUid::new("urgent")].into());
}

#[test]
fn refused_pod_is_planned_again_after_change() {
    let mut cluster = cluster(1);
    for gpu in 0..8 {
        cluster.use_share("node-00", &format!("gpu-{gpu}"), "80Gi", "1");
    }
    let mut planner = Planner::from_snapshot(&cluster.0, FeatureGates::default());
    let settings =
        PlanSettings { steps_per_pod: 60, steps_per_plan: 60, ..PlanSettings::default() };
    let mut pods: Vec<PendingPod> = (0..20).map(too_large).collect();
    pods.insert(0, PendingPod { created: -1, ..share_pod("a", "80Gi", "1") });
    assert!(!planner.plan(&pods, settings).unreached.is_empty());
    planner.set_device_use(&device_id("node-00", "gpu-3"), None);
    for _ in 0..20 {
        let plan = planner.plan(&pods, settings);
        if plan.decisions.is_empty() {
            assert!(!plan.unreached.is_empty(), "no further plan is triggered");
            continue;
        }
        assert_eq!(decided(&plan), [PodUid::new("a")].into());
        return;
    }
    panic!("a device was freed for it");
}

#[test]
fn reduced_budget_never_places_on_partial_results() {
    // Only the last node can serve the first alternative.
    let mut cluster = cluster(NODES);
    let last = format!("node-{:02}", NODES - 1);
    let large =
        (0..8).map(|i| gpu(&format!("gpu-{i}"), "90Gi").with("index", Attribute::Int(1000 + i)));
    cluster.0.slices.insert(last.clone(), Arc::new(slice(&last, large.collect())));
    let alternatives = [("large", "90Gi"), ("small", "40Gi")];
    let requests = alternatives.map(|(name, memory)| request(name, 1, &[("memory", memory)]));
    let selective =
        pod("choosy", vec![claim("choosy", vec![first_available("gpu", requests.into())])]);
    let pods = [PendingPod { created: -1, ..too_large(1) }, selective];
    for steps in (NODES as u64 * 8)..(NODES as u64 * 8 * 4) {
        let mut planner = Planner::from_snapshot(&cluster.0, FeatureGates::default());
        let settings =
            PlanSettings { steps_per_pod: steps, steps_per_plan: steps, ..PlanSettings::default() };
        let plan = planner.plan(&pods, settings);
        for decision in &plan.decisions {
            assert_eq!(decision.node.as_str(), last, "with {steps} steps");
        }
        let is_unreached = plan.unreached.contains(&pods[1].uid);
        assert_ne!(plan.decisions.len() == 1, is_unreached, "with {steps} steps: {plan:?}");
    }
}

#[test]
fn expensive_requests_delay_only_their_namespace() {
    let mut planner = planner(NODES);
    let settings =
        PlanSettings { steps_per_pod: 50_000, steps_per_plan: 100_000, ..PlanSettings::default() };
    let mut pods: Vec<PendingPod> = (0..50).map(expensive).collect();
    pods.push(PendingPod { created: 1, ..share_pod("neighbor", "1Gi", "1") });
    let first = planner.plan(&pods, settings);
    assert!(first.decisions.is_empty(), "the older pods come first");
    assert!(first.unreached.contains(&PodUid::new("neighbor")));
    assert!(first.steps < 2 * 100_000, "{} steps", first.steps);
    let second = planner.plan(&pods, settings);
    assert_eq!(decided(&second), [PodUid::new("neighbor")].into());
    assert!(!second.unreached.is_empty(), "the others continue after it");
    assert!(second.steps < 10_000, "it is written first: {} steps", second.steps);
    pods.pop();
    let third = planner.plan(&pods, settings);
    assert!(third.steps > 50_000, "now they continue: {} steps", third.steps);
}

/// Plans until the pods are decided or refused. Returns the plans.
fn plans_until_reached(
    planner: &mut Planner,
    pods: &[PendingPod],
    steps: u64,
) -> Vec<AllocationPlan> {
    let settings = PlanSettings { steps_per_plan: steps, ..PlanSettings::default() };
    let mut plans = Vec::new();
    loop {
        plans.push(planner.plan(pods, settings));
        if plans.last().unwrap().unreached.is_empty() {
            return plans;
        }
        assert!(plans.len() < 1000, "no progress");
    }
}

#[test]
fn search_of_one_pod_continues_in_next_plan() {
    let mut planner = planner(NODES);
    let mut selective = share_pod("p", "1Gi", "1");
    // Each node is in a state of its own, because the index of its GPUs is read.
    let mut request = request("gpu", 1, &[("memory", "1Gi")]);
    let last = NODES * 8 - 1;
    let selector = format!("device.attributes['gpu.tessera.dev'].index == {last}");
    request.alternatives[0].selectors.push(DeviceSelector::new(&selector));
    selective.claims = pod("p", vec![claim("p", vec![request])]).claims;
    let plans = plans_until_reached(&mut planner, &[selective], 50);
    let searched: u64 = plans.iter().map(|plan| plan.work.nodes_searched).sum();
    assert!(plans.len() > 3, "{} plans", plans.len());
    assert!(searched <= (NODES + plans.len()) as u64, "each node once: {searched} searches");
    assert_eq!(plans.last().unwrap().decisions.len(), 1, "on the last node");
}

#[test]
fn steps_end_between_selectors_of_a_request() {
    const SELECTORS: usize = 16;
    let mut planner = planner(1);
    let mut request = request("gpu", 1, &[("memory", "1Gi")]);
    for number in 0..SELECTORS {
        let selector = format!("lists.range(2000).all(i, i >= -{number})");
        request.alternatives[0].selectors.push(DeviceSelector::new(&selector));
    }
    let pods = [pod("p", vec![claim("p", vec![request])])];
    let plans = plans_until_reached(&mut planner, &pods, 100);
    let most = plans.iter().map(|plan| plan.steps).max().unwrap();
    let all: u64 = plans.iter().map(|plan| plan.steps).sum();
    assert!(plans.len() >= SELECTORS, "{} plans", plans.len());
    assert!(most * 4 < all, "a plan of {most} steps of {all}");
    assert_eq!(plans.last().unwrap().decisions.len(), 1);
}

#[test]
fn search_of_one_node_gets_the_steps_it_needs() {
    for steps in 1..20 {
        let mut planner = planner(2);
        let pods = [share_pod("p", "80Gi", "1"), pod_for_all("all")];
        let plans = plans_until_reached(&mut planner, &pods, steps);
        let decided: usize = plans.iter().map(|plan| plan.decisions.len()).sum();
        assert!(decided >= 1 && plans.len() < 50, "{} plans with {steps} steps", plans.len());
    }
}

#[test]
fn pod_explained_for_itself_does_not_starve_later_pods() {
    let mut planner = planner(NODES);
    // Its reasons are not those of its class, so each plan that reaches it explains all nodes.
    let mut pods = vec![PendingPod { created: -1, ..too_large(0) }];
    pods[0].excluded_nodes.insert(NodeName::new("node-00").unwrap());
    pods.extend((1..10).map(too_large));
    pods.push(PendingPod { created: 1, ..share_pod("small", "1Gi", "1") });
    let settings = PlanSettings { steps_per_plan: 30, ..PlanSettings::default() };
    let mut plans = (0..100).map(|_| planner.plan(&pods, settings));
    assert!(plans.any(|plan| decided(&plan) == [PodUid::new("small")].into()));
}

#[test]
fn pod_is_undecided_once_its_steps_are_spent() {
    let mut planner = planner(NODES);
    let settings =
        PlanSettings { steps_per_pod: 3_000, steps_per_plan: 500, ..PlanSettings::default() };
    let pods = [expensive(1)];
    for plans in 1..100 {
        let plan = planner.plan(&pods, settings);
        if let [refusal] = plan.refusals.as_slice() {
            assert!(plans > 1 && refusal.is_undecided(), "{plan:?}");
            return;
        }
        assert_eq!(plan.unreached, [pods[0].uid.clone()]);
    }
    panic!("its steps are never spent");
}

#[test]
fn withheld_namespace_is_planned_with_known_results_only() {
    let mut planner = planner(NODES);
    let in_tenant = |pod| PendingPod { namespace: namespace("tenant"), ..pod };
    let pods = [expensive(1), in_tenant(share_pod("plain", "1Gi", "1"))];
    // Another pod has had the selectors of the class evaluated.
    planner.plan(&[share_pod("other", "1Gi", "1")], PlanSettings::default());
    planner.withhold_selectors([namespace("tenant")].into());
    for _ in 0..3 {
        let plan = planner.plan(&pods, PlanSettings::default());
        assert_eq!(decided(&plan), [PodUid::new("plain")].into());
        assert!(plan.unreached.is_empty() && plan.refusals[0].is_undecided(), "{plan:?}");
        assert!(plan.selector_steps.is_empty(), "{:?}", plan.selector_steps);
    }
    planner.withhold_selectors(BTreeSet::new());
    let plan = planner.plan(&pods, PlanSettings::default());
    assert!(plan.selector_steps[&namespace("tenant")] > 1000, "{:?}", plan.selector_steps);
    assert!(!plan.refusals[0].is_undecided());
}

/// Creates a pod that fits on no node of eight GPUs: seventeen shares, of which two fit on a GPU.
/// Their sizes differ, so the search does not know that before it has tried a million devices.
fn combined(name: &str) -> PendingPod {
    let share =
        |i: u32| request(&format!("r{i:02}"), 1, &[("memory", &format!("{}Mi", 30_000 + i))]);
    let requests = (0..17).map(share).collect();
    PendingPod { namespace: namespace("tenant"), ..pod(name, vec![claim(name, requests)]) }
}

#[test]
fn long_search_is_charged_to_its_namespace() {
    let mut planner = planner(1);
    let pods = [combined("combined")];
    let settings = PlanSettings { steps_per_plan: 10_000, ..PlanSettings::default() };
    let (mut spent, mut plans) = (0, 0);
    loop {
        let plan = planner.plan(&pods, settings);
        let long: u64 = plan.long_search_steps.values().sum();
        spent += long;
        plans += 1;
        assert!(plans < 20, "no end");
        if plan.unreached.is_empty() {
            assert!(plan.refusals[0].is_undecided() && long >= 500_000, "{plan:?}");
            break;
        }
    }
    // All but the first searches, each with twice the steps of the one before.
    assert_eq!(spent, 80_000 + 160_000 + 320_000 + 640_000);
}

#[test]
fn namespace_without_steps_begins_no_long_search() {
    let mut planner = planner(1);
    let pods = [combined("combined"), PendingPod { created: 1, ..share_pod("plain", "1Gi", "1") }];
    planner.withhold_long_searches([namespace("tenant")].into());
    let settings = PlanSettings { steps_per_plan: 10_000, ..PlanSettings::default() };
    let plans: Vec<_> = (0..10).map(|_| planner.plan(&pods[..1], settings)).collect();
    assert!(plans.iter().all(|plan| plan.long_search_steps.is_empty()));
    let last = planner.plan(&pods, settings);
    assert_eq!(decided(&last), [PodUid::new("plain")].into());
    assert!(last.unreached.is_empty() && last.refusals[0].is_undecided(), "{last:?}");
    assert!(last.steps < 100, "the search does not begin anew: {}", last.steps);
    planner.withhold_long_searches(BTreeSet::new());
    assert_eq!(planner.plan(&pods[..1], settings).unreached, [PodUid::new("combined")]);
}

/// Creates a pod of the tenant with a selector of this size that selects all devices.
fn long(name: &str, bytes: usize) -> PendingPod {
    let mut request = request("gpu", 1, &[("memory", "1Gi")]);
    let selector = format!("'{}' != '{name}'", "x".repeat(bytes));
    request.alternatives[0].selectors.push(DeviceSelector::new(&selector));
    PendingPod { namespace: namespace("tenant"), ..pod(name, vec![claim(name, vec![request])]) }
}

#[test]
fn long_selectors_are_left_to_the_caller() {
    let mut planner = planner(NODES);
    planner.leave_long_selectors();
    let pods = [long("long-a", 500), long("long-b", 501), long("short", 100)];
    let settings = PlanSettings::default();
    for _ in 0..2 {
        let plan = planner.plan(&pods, settings);
        assert_eq!(decided(&plan), [PodUid::new("short")].into(), "others are decided meanwhile");
        assert!(plan.refusals.is_empty() && plan.unreached.is_empty(), "{plan:?}");
        assert_eq!(plan.to_compile.len(), 1, "one of each namespace");
        assert!(plan.to_compile[&namespace("tenant")].contains("long-a"));
    }
    for wanted in ["long-a", "long-b"] {
        planner.clear_caches();
        let plan = planner.plan(&pods, settings);
        let expression = &plan.to_compile[&namespace("tenant")];
        assert!(expression.contains(wanted), "{expression}");
        CompiledSelector::cached(expression).unwrap();
    }
    let plan = planner.plan(&pods, settings);
    assert!(plan.decisions.len() == 3 && plan.to_compile.is_empty(), "{plan:?}");
}

#[test]
fn bound_pod_with_expensive_selectors_is_planned_in_parts() {
    let mut planner = planner(1);
    let settings = PlanSettings { steps_per_plan: 500, ..PlanSettings::default() };
    let node = NodeName::new("node-00").unwrap();
    let mut plans = 0;
    while let plan = planner.plan_bound_pod(&node, &expensive(1), settings)
        && !plan.unreached.is_empty()
    {
        plans += 1;
        assert!(plan.refusals.is_empty() && plans < 100, "no progress");
    }
    assert!(plans > 1, "{plans}");
    assert_eq!(planner.plan_bound_pod(&node, &expensive(1), settings).refusals.len(), 1);
}

#[test]
fn priority_decides_while_steps_suffice() {
    let mut planner = planner(1);
    let mut pods: Vec<PendingPod> =
        (0..8).map(|i| share_pod(&format!("p{i}"), "80Gi", "1")).collect();
    pods.extend((0..4).map(|i| {
        let urgent = share_pod(&format!("urgent-{i}"), "80Gi", "1");
        PendingPod { priority: 1, namespace: namespace("other"), ..urgent }
    }));
    for _ in 0..3 {
        let plan = planner
            .plan(&pods, PlanSettings { steps_per_plan: 1_000_000, ..PlanSettings::default() });
        let urgent = plan.decisions.iter().filter(|d| d.pod.as_str().starts_with("urgent")).count();
        assert_eq!((urgent, plan.decisions.len(), plan.unreached.len()), (4, 8, 0));
    }
}

#[test]
fn pods_of_one_shape_share_final_explanation() {
    let mut planner = planner(1);
    // One pod is placed between every two refused ones, which changes the explanation each time.
    let pods: Vec<PendingPod> = (0..10)
        .flat_map(|i| {
            let refused =
                PendingPod { created: 2 * i, ..share_pod(&format!("refused-{i}"), "81Gi", "1") };
            let placed =
                PendingPod { created: 2 * i + 1, ..share_pod(&format!("placed-{i}"), "60Gi", "1") };
            [refused, placed]
        })
        .collect();
    let plan = planner.plan(&pods, PlanSettings::default());
    assert_eq!(plan.decisions.len(), 8);
    let too_large: Vec<_> = plan
        .refusals
        .iter()
        .filter(|refusal| refusal.pod.as_str().starts_with("refused"))
        .collect();
    assert_eq!(too_large.len(), 10);
    assert!(too_large.iter().all(|refusal| Arc::ptr_eq(&refusal.cause, &too_large[0].cause)));
}

#[test]
fn explanation_reflects_state_after_all_decisions() {
    let mut planner = planner(1);
    let mut pods = vec![PendingPod { priority: 1, ..pod_for_all("all") }];
    pods.push(share_pod("small", "10Gi", "1"));
    let plan = planner.plan(&pods, PlanSettings::default());
    assert_eq!(decided(&plan), [PodUid::new("small")].into());
    let RefusalCause::NoFit(explanation) = &*plan.refusals[0].cause else {
        panic!("{:?}", plan.refusals)
    };
    let text = explanation.render(1024);
    assert!(text.contains("10Gi"), "the share of the small pod counts: {text}");
}

/// Creates a pod with nine shares that need a whole GPU's memory each; there are eight GPUs.
fn pod_for_all(name: &str) -> PendingPod {
    let shares = (0..9).map(|i| request(&format!("r{i}"), 1, &[("memory", "80Gi")])).collect();
    pod(name, vec![claim(name, shares)])
}

#[test]
fn bound_pod_is_planned_only_on_its_node() {
    let mut cluster = cluster(3);
    for gpu in 0..8 {
        cluster.use_share("node-01", &format!("gpu-{gpu}"), "70Gi", "1");
    }
    cluster.put_node("node-02", |node| (node.ready, node.cordoned) = (false, true));
    let mut planner = Planner::from_snapshot(&cluster.0, FeatureGates::default());
    let node = |name: &str| NodeName::new(name).unwrap();
    let bound = share_pod("p", "20Gi", "1");
    for free in ["node-00", "node-02"] {
        let plan = planner.plan_bound_pod(&node(free), &bound, PlanSettings::default());
        assert_eq!(plan.decisions[0].node, node(free), "conditions of the node are ignored");
    }
    for _ in 0..2 {
        let plan = planner.plan_bound_pod(&node("node-01"), &bound, PlanSettings::default());
        assert!(plan.decisions.is_empty());
        let RefusalCause::NoFit(explanation) = &*plan.refusals[0].cause else {
            panic!("{:?}", plan.refusals)
        };
        assert!(
            explanation.render(1024).contains("/8 GPUs available"),
            "{}",
            explanation.render(1024)
        );
    }
    assert_eq!(
        planner.plan_bound_pod(&node("node-01"), &bound, PlanSettings::default()).steps,
        0,
        "the node has not changed"
    );
    planner.set_device_use(&device_id("node-01", "gpu-3"), None);
    assert_eq!(
        planner.plan_bound_pod(&node("node-01"), &bound, PlanSettings::default()).decisions.len(),
        1
    );
    assert_eq!(
        planner.plan(&[bound], PlanSettings::default()).decisions.len(),
        1,
        "planning on all nodes still works"
    );
}
