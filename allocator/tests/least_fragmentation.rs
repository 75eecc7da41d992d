//! Policy `LeastFragmentation`, which uses the forecast.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod builders;

use std::sync::Arc;

use builders::*;
use serde_json::json;
use tessera_allocator::model::{
    AllocationMode, Attribute, DeviceSelector, PendingPod, PodClaim, SchedulingConstraints,
};
use tessera_allocator::{AllocationPlan, PlanSettings, Planner, Policy};

const SETTINGS: PlanSettings = PlanSettings {
    steps_per_plan: u64::MAX,
    steps_for_reasons: None,
    policy: Policy::LeastFragmentation,
    steps_per_pod: 1_000_000,
    seed: 0,
    now: 0,
    reservation_delay: None,
};

/// Creates a pod with a share of one GPU, in percent, and a CPU request.
fn share(name: &str, percent: u32, cpu: &str) -> PendingPod {
    let amounts = [("memory", format!("{}Mi", percent * 800)), ("cores", percent.to_string())];
    let amounts: Vec<(&str, &str)> =
        amounts.iter().map(|(name, amount)| (*name, amount.as_str())).collect();
    let mut pod = pod(name, vec![claim(name, vec![request("gpu", 1, &amounts)])]);
    let requests = [("cpu".to_owned(), quantity(cpu)), ("pods".to_owned(), quantity("1"))]
        .into_iter()
        .collect();
    pod.scheduling =
        Arc::new(SchedulingConstraints { requests, ..SchedulingConstraints::default() });
    pod
}

/// Adds a node with GPUs of 80,000 MiB.
fn node(cluster: Cluster, name: &str, gpus: usize) -> Cluster {
    cluster.node(name, (0..gpus).map(|i| gpu(&format!("gpu-{i}"), "80000Mi")).collect())
}

fn use_percent(cluster: &mut Cluster, node: &str, gpu: &str, percent: u32) {
    cluster.use_share(node, gpu, &format!("{}Mi", percent * 800), &percent.to_string());
}

fn planner(cluster: &Cluster) -> Planner {
    Planner::from_snapshot(&cluster.0, Default::default())
}

fn placement(plan: &AllocationPlan) -> String {
    let decision = &plan.decisions[0];
    format!("{}/{}", decision.node, decision.claims[0].results[0].device.device)
}

/// Plans these pods without recording their usage, so that the planner learns their requests.
fn learn(planner: &mut Planner, pods: impl IntoIterator<Item = PendingPod>) {
    let pods: Vec<PendingPod> = pods.into_iter().collect();
    planner.plan(&pods, SETTINGS);
}

fn many(count: usize, percent: u32, cpu: &str) -> Vec<PendingPod> {
    (0..count).map(|i| share(&format!("past-{percent}-{i}"), percent, cpu)).collect()
}

#[test]
fn share_is_placed_beside_its_complement() {
    let mut cluster = node(node(Cluster::new(), "node-a", 2), "node-b", 2);
    use_percent(&mut cluster, "node-a", "gpu-1", 50);
    use_percent(&mut cluster, "node-b", "gpu-0", 65);
    let mut planner = planner(&cluster);
    learn(&mut planner, many(100, 65, "1").into_iter().chain(many(100, 35, "1")));
    assert_eq!(placement(&planner.plan(&[share("p", 35, "1")], SETTINGS)), "node-b/gpu-0");
}

#[test]
fn forecast_decides_placement() {
    let cluster = || {
        let mut cluster = node(Cluster::new(), "node-a", 3);
        use_percent(&mut cluster, "node-a", "gpu-0", 40);
        use_percent(&mut cluster, "node-a", "gpu-1", 70);
        cluster
    };
    // Beside 40 percent 30 stay free, which requests for 30 can use.
    let mut of_30 = planner(&cluster());
    learn(&mut of_30, many(300, 30, "1"));
    assert_eq!(placement(&of_30.plan(&[share("p", 30, "1")], SETTINGS)), "node-a/gpu-1");
    let mut of_60 = planner(&cluster());
    learn(&mut of_60, many(300, 60, "1"));
    // No request can use the rest of GPU 1, and 60 would still fit beside 40.
    assert_eq!(placement(&of_60.plan(&[share("p", 30, "1")], SETTINGS)), "node-a/gpu-1");
    assert_eq!(placement(&of_60.plan(&[share("q", 60, "1")], SETTINGS)), "node-a/gpu-0");
}

#[test]
fn small_cpu_request_uses_gpu_without_cpu_for_others() {
    let mut cluster = node(node(Cluster::new(), "node-a", 1), "node-b", 1);
    cluster.put_node("node-b", |node| {
        node.used.insert("cpu".to_owned(), quantity("63"));
    });
    let mut planner = planner(&cluster);
    learn(&mut planner, many(100, 50, "8"));
    assert_eq!(placement(&planner.plan(&[share("p", 50, "500m")], SETTINGS)), "node-b/gpu-0");
}

#[test]
fn later_cpu_usage_changes_ranking() {
    let mut cluster = node(node(Cluster::new(), "node-a", 1), "node-b", 1);
    let mut planner = planner(&cluster);
    learn(&mut planner, many(100, 50, "8"));
    assert_eq!(placement(&planner.plan(&[share("p", 50, "500m")], SETTINGS)), "node-a/gpu-0");
    cluster.put_node("node-b", |node| {
        node.used.insert("cpu".to_owned(), quantity("63"));
    });
    planner.set_node(cluster.0.nodes.values().last().unwrap());
    assert_eq!(placement(&planner.plan(&[share("p", 50, "500m")], SETTINGS)), "node-b/gpu-0");
}

#[test]
fn repeatedly_refused_pod_is_counted_once() {
    let cluster = || {
        let mut cluster = node(Cluster::new(), "node-a", 2);
        use_percent(&mut cluster, "node-a", "gpu-0", 100);
        use_percent(&mut cluster, "node-a", "gpu-1", 90);
        cluster
    };
    let waiting: Vec<PendingPod> = many(3, 60, "1");
    let mut repeated = planner(&cluster());
    let mut once = planner(&cluster());
    once.plan(&waiting, SETTINGS);
    (0..500).for_each(|_| {
        repeated.plan(&waiting, SETTINGS);
    });
    // The next potential is computed at the 32nd request.
    learn(&mut repeated, many(32, 20, "1"));
    learn(&mut once, many(32, 20, "1"));
    assert_eq!(repeated.forecast(), once.forecast());
}

#[test]
fn untyped_request_avoids_requested_type() {
    let typed = |name: &str, product: &str| {
        gpu(name, "80000Mi").with("productName", Attribute::String(product.into()))
    };
    let cluster = Cluster::new()
        .node("node-a", vec![typed("gpu-0", "H100")])
        .node("node-b", vec![typed("gpu-0", "T4")]);
    let typed_request = |i: usize| {
        let mut pod = share(&format!("picky-{i}"), 100, "1");
        let PodClaim::Pending(claim) = &mut pod.claims[0] else { unreachable!() };
        let selector =
            DeviceSelector::new("device.attributes['gpu.tessera.dev'].productName == 'H100'");
        Arc::make_mut(&mut Arc::make_mut(claim).requests)[0].alternatives[0]
            .selectors
            .push(selector);
        pod
    };
    let mut planner = planner(&cluster);
    learn(&mut planner, (0..100).map(typed_request).chain(many(100, 100, "1")));
    assert_eq!(placement(&planner.plan(&[share("p", 100, "1")], SETTINGS)), "node-b/gpu-0");
}

#[test]
fn types_of_selected_nodes_count_as_requested() {
    let typed = |product: &str| {
        gpu("gpu-0", "80000Mi").with("productName", Attribute::String(product.into()))
    };
    let mut cluster =
        Cluster::new().node("node-a", vec![typed("H100")]).node("node-b", vec![typed("T4")]);
    cluster.put_node("node-a", |node| {
        node.labels.insert("gpu".to_owned(), "H100".to_owned());
    });
    let typed_request = |i: usize| {
        let mut pod = share(&format!("picky-{i}"), 100, "1");
        let selected = [("gpu".to_owned(), "H100".to_owned())].into();
        pod.scheduling = Arc::new(SchedulingConstraints {
            node_selector: selected,
            ..(*pod.scheduling).clone()
        });
        pod
    };
    let mut planner = planner(&cluster);
    learn(&mut planner, (0..100).map(typed_request).chain(many(100, 100, "1")));
    assert_eq!(placement(&planner.plan(&[share("p", 100, "1")], SETTINGS)), "node-b/gpu-0");
}

#[test]
fn pod_missing_in_some_plans_is_counted_once() {
    let cluster = || {
        let mut cluster = node(Cluster::new(), "node-a", 1);
        use_percent(&mut cluster, "node-a", "gpu-0", 90);
        cluster
    };
    let mut repeated = planner(&cluster());
    let mut once = planner(&cluster());
    once.plan(&many(3, 60, "1"), SETTINGS);
    for _ in 0..200 {
        repeated.plan(&many(3, 60, "1"), SETTINGS);
        repeated.plan(&[], SETTINGS);
    }
    learn(&mut repeated, many(32, 20, "1"));
    learn(&mut once, many(32, 20, "1"));
    assert_eq!(repeated.forecast(), once.forecast());
}

#[test]
fn unsatisfiable_requests_do_not_change_forecast() {
    let with = |unsatisfiable: Vec<PendingPod>| {
        let mut planner = planner(&node(Cluster::new(), "node-a", 2));
        learn(&mut planner, unsatisfiable);
        learn(&mut planner, many(40, 50, "8"));
        format!("{:?}", planner.forecast())
    };
    let count = |count: u64| {
        let mut pod = share("strange", 100, "1m");
        let PodClaim::Pending(claim) = &mut pod.claims[0] else { unreachable!() };
        Arc::make_mut(&mut Arc::make_mut(claim).requests)[0].alternatives[0].mode =
            AllocationMode::Exact(count);
        pod
    };
    let usual = with(Vec::new());
    assert_eq!(with(vec![count(4_000_000_000)]), usual);
    assert_eq!(with(vec![count(u64::MAX)]), usual);
    let by_mps = |claim: &PodClaim| {
        let PodClaim::Pending(claim) = claim else { unreachable!() };
        PodClaim::Pending(Arc::new(configured((**claim).clone(), json!({"sharing": "MPS"}))))
    };
    let mut unsatisfiable = share("strange", 100, "1m");
    unsatisfiable.claims = unsatisfiable.claims.iter().map(by_mps).collect();
    assert_eq!(with(vec![unsatisfiable]), usual, "no node supports MPS");
    let nowhere = SchedulingConstraints {
        node_selector: [("gpu".to_owned(), "none".to_owned())].into(),
        ..SchedulingConstraints::default()
    };
    let nowhere = PendingPod { scheduling: Arc::new(nowhere), ..share("strange", 100, "1m") };
    assert_eq!(with(vec![nowhere]), usual);
}

#[test]
fn shared_claim_counts_once_in_forecast() {
    let cluster = || node(Cluster::new(), "node-a", 2);
    let twice = || {
        let mut pod = share("shared", 70, "1");
        pod.claims.push(pod.claims[0].clone());
        pod
    };
    let expected = |pod: PendingPod| {
        let mut planner = planner(&cluster());
        learn(&mut planner, [pod].into_iter().chain(many(40, 50, "8")));
        format!("{:?}", planner.forecast())
    };
    assert_eq!(expected(twice()), expected(share("shared", 70, "1")));
}

#[test]
fn similar_cpu_requests_share_a_shape() {
    let nodes = (0..50).fold(Cluster::new(), |cluster, i| node(cluster, &format!("node-{i}"), 4));
    let mut planner = planner(&nodes);
    let pods: Vec<PendingPod> =
        (0..100).map(|i| share(&format!("p{i}"), 30, &format!("{}m", 1000 + i))).collect();
    let steps = planner.plan(&pods, SETTINGS).steps;
    assert!(steps < 2000, "{steps} devices were looked at, where 100 shapes come to 20,000");
}

#[test]
fn halves_share_a_gpu_on_node_without_cpu() {
    let mut cluster = node(Cluster::new(), "node-a", 8);
    cluster.put_node("node-a", |node| {
        node.allocatable.insert("cpu".to_owned(), quantity("1"));
    });
    use_percent(&mut cluster, "node-a", "gpu-3", 50);
    let plan = planner(&cluster).plan(&[share("p", 50, "0")], SETTINGS);
    assert_eq!(placement(&plan), "node-a/gpu-3");
}
