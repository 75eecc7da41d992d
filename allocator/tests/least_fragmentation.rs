//! Policy `LeastFragmentation`, which uses the forecast.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod builders;

use std::sync::Arc;

use builders::*;
use serde_json::json;
use tessera_allocator::model::{Attribute, Mode, PendingPod, PodClaim, Scheduling, Selector};
use tessera_allocator::{Plan, Planner, Policy, Settings};

const SETTINGS: Settings = Settings {
    steps_per_plan: u64::MAX,
    policy: Policy::LeastFragmentation,
    steps_per_pod: 1_000_000,
    seed: 0,
    now: 0,
    patience: None,
};

/// Creates a pod with a share of one GPU, in percent, and a CPU request.
fn share(name: &str, percent: u32, cpu: &str) -> PendingPod {
    let amounts = [("memory", format!("{}Mi", percent * 800)), ("cores", percent.to_string())];
    let amounts: Vec<(&str, &str)> =
        amounts.iter().map(|(name, amount)| (*name, amount.as_str())).collect();
    let mut pod = pod(name, vec![claim(name, vec![request("gpu", 1, &amounts)])]);
    let requests = [("cpu".to_owned(), quantity(cpu)), ("pods".to_owned(), quantity("1"))].into();
    pod.scheduling = Arc::new(Scheduling { requests, ..Scheduling::default() });
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
    Planner::of(&cluster.0, Default::default())
}

fn place(plan: &Plan) -> String {
    let decision = &plan.decisions[0];
    format!("{}/{}", decision.node, decision.claims[0].results[0].device.device)
}

/// Plans these pods without recording their usage, so that the planner learns their requests.
fn teach(planner: &mut Planner, pods: impl IntoIterator<Item = PendingPod>) {
    let pods: Vec<PendingPod> = pods.into_iter().collect();
    planner.plan(&pods, SETTINGS);
}

fn many(count: usize, percent: u32, cpu: &str) -> Vec<PendingPod> {
    (0..count).map(|i| share(&format!("past-{percent}-{i}"), percent, cpu)).collect()
}

#[test]
fn a_share_goes_beside_the_one_that_it_makes_a_whole_with() {
    let mut cluster = node(node(Cluster::new(), "node-a", 2), "node-b", 2);
    use_percent(&mut cluster, "node-a", "gpu-1", 50);
    use_percent(&mut cluster, "node-b", "gpu-0", 65);
    let mut planner = planner(&cluster);
    teach(&mut planner, many(100, 65, "1").into_iter().chain(many(100, 35, "1")));
    assert_eq!(place(&planner.plan(&[share("p", 35, "1")], SETTINGS)), "node-b/gpu-0");
}

#[test]
fn what_is_learned_decides_where_the_same_pod_goes() {
    let cluster = || {
        let mut cluster = node(Cluster::new(), "node-a", 3);
        use_percent(&mut cluster, "node-a", "gpu-0", 40);
        use_percent(&mut cluster, "node-a", "gpu-1", 70);
        cluster
    };
    // Beside 40 percent 30 stay free, which requests for 30 can use.
    let mut of_30 = planner(&cluster());
    teach(&mut of_30, many(300, 30, "1"));
    assert_eq!(place(&of_30.plan(&[share("p", 30, "1")], SETTINGS)), "node-a/gpu-1");
    let mut of_60 = planner(&cluster());
    teach(&mut of_60, many(300, 60, "1"));
    // No request can use the rest of GPU 1, and 60 would still fit beside 40.
    assert_eq!(place(&of_60.plan(&[share("p", 30, "1")], SETTINGS)), "node-a/gpu-1");
    assert_eq!(place(&of_60.plan(&[share("q", 60, "1")], SETTINGS)), "node-a/gpu-0");
}

#[test]
fn a_gpu_whose_node_has_no_cpu_for_others_is_taken_by_whoever_needs_little() {
    let mut cluster = node(node(Cluster::new(), "node-a", 1), "node-b", 1);
    cluster.put_node("node-b", |node| {
        node.used.insert("cpu".to_owned(), quantity("63"));
    });
    let mut planner = planner(&cluster);
    teach(&mut planner, many(100, 50, "8"));
    assert_eq!(place(&planner.plan(&[share("p", 50, "500m")], SETTINGS)), "node-b/gpu-0");
}

#[test]
fn cpu_that_is_taken_later_counts_from_then_on() {
    let mut cluster = node(node(Cluster::new(), "node-a", 1), "node-b", 1);
    let mut planner = planner(&cluster);
    teach(&mut planner, many(100, 50, "8"));
    assert_eq!(place(&planner.plan(&[share("p", 50, "500m")], SETTINGS)), "node-a/gpu-0");
    cluster.put_node("node-b", |node| {
        node.used.insert("cpu".to_owned(), quantity("63"));
    });
    planner.set_node(cluster.0.nodes.values().last().unwrap());
    assert_eq!(place(&planner.plan(&[share("p", 50, "500m")], SETTINGS)), "node-b/gpu-0");
}

#[test]
fn a_pod_that_is_planned_and_refused_again_and_again_is_counted_once() {
    let cluster = || {
        let mut cluster = node(Cluster::new(), "node-a", 2);
        use_percent(&mut cluster, "node-a", "gpu-0", 100);
        use_percent(&mut cluster, "node-a", "gpu-1", 90);
        cluster
    };
    let waiting: Vec<PendingPod> = many(3, 60, "1");
    let mut patient = planner(&cluster());
    let mut hasty = planner(&cluster());
    hasty.plan(&waiting, SETTINGS);
    (0..500).for_each(|_| {
        patient.plan(&waiting, SETTINGS);
    });
    // The next potential is computed at the 32nd request.
    teach(&mut patient, many(32, 20, "1"));
    teach(&mut hasty, many(32, 20, "1"));
    assert_eq!(patient.expected(), hasty.expected());
}

#[test]
fn the_types_that_a_pod_names_are_spared_by_those_who_name_none() {
    let typed = |name: &str, product: &str| {
        gpu(name, "80000Mi").with("productName", Attribute::String(product.into()))
    };
    let cluster = Cluster::new()
        .node("node-a", vec![typed("gpu-0", "H100")])
        .node("node-b", vec![typed("gpu-0", "T4")]);
    let picky = |i: usize| {
        let mut pod = share(&format!("picky-{i}"), 100, "1");
        let PodClaim::Pending(claim) = &mut pod.claims[0] else { unreachable!() };
        let selector = Selector::new("device.attributes['gpu.tessera.dev'].productName == 'H100'");
        Arc::make_mut(claim).requests[0].alternatives[0].selectors.push(selector);
        pod
    };
    let mut planner = planner(&cluster);
    teach(&mut planner, (0..100).map(picky).chain(many(100, 100, "1")));
    assert_eq!(place(&planner.plan(&[share("p", 100, "1")], SETTINGS)), "node-b/gpu-0");
}

#[test]
fn the_types_on_the_nodes_that_pods_select_count_as_named() {
    let typed = |product: &str| {
        gpu("gpu-0", "80000Mi").with("productName", Attribute::String(product.into()))
    };
    let mut cluster =
        Cluster::new().node("node-a", vec![typed("H100")]).node("node-b", vec![typed("T4")]);
    cluster.put_node("node-a", |node| {
        node.labels.insert("gpu".to_owned(), "H100".to_owned());
    });
    let picky = |i: usize| {
        let mut pod = share(&format!("picky-{i}"), 100, "1");
        let selected = [("gpu".to_owned(), "H100".to_owned())].into();
        pod.scheduling =
            Arc::new(Scheduling { node_selector: selected, ..(*pod.scheduling).clone() });
        pod
    };
    let mut planner = planner(&cluster);
    teach(&mut planner, (0..100).map(picky).chain(many(100, 100, "1")));
    assert_eq!(place(&planner.plan(&[share("p", 100, "1")], SETTINGS)), "node-b/gpu-0");
}

#[test]
fn a_pod_that_is_not_in_every_plan_is_counted_once_all_the_same() {
    let cluster = || {
        let mut cluster = node(Cluster::new(), "node-a", 1);
        use_percent(&mut cluster, "node-a", "gpu-0", 90);
        cluster
    };
    let mut patient = planner(&cluster());
    let mut hasty = planner(&cluster());
    hasty.plan(&many(3, 60, "1"), SETTINGS);
    for _ in 0..200 {
        patient.plan(&many(3, 60, "1"), SETTINGS);
        patient.plan(&[], SETTINGS);
    }
    teach(&mut patient, many(32, 20, "1"));
    teach(&mut hasty, many(32, 20, "1"));
    assert_eq!(patient.expected(), hasty.expected());
}

#[test]
fn requests_that_nobody_can_ever_serve_change_nothing_of_what_is_expected() {
    let with = |strange: Vec<PendingPod>| {
        let mut planner = planner(&node(Cluster::new(), "node-a", 2));
        teach(&mut planner, strange);
        teach(&mut planner, many(40, 50, "8"));
        format!("{:?}", planner.expected())
    };
    let count = |count: u64| {
        let mut pod = share("strange", 100, "1m");
        let PodClaim::Pending(claim) = &mut pod.claims[0] else { unreachable!() };
        Arc::make_mut(claim).requests[0].alternatives[0].mode = Mode::Exact(count);
        pod
    };
    let usual = with(Vec::new());
    assert_eq!(with(vec![count(4_000_000_000)]), usual);
    assert_eq!(with(vec![count(u64::MAX)]), usual);
    let by_mps = |claim: &PodClaim| {
        let PodClaim::Pending(claim) = claim else { unreachable!() };
        PodClaim::Pending(Arc::new(configured((**claim).clone(), json!({"sharing": "MPS"}))))
    };
    let mut strange = share("strange", 100, "1m");
    strange.claims = strange.claims.iter().map(by_mps).collect();
    assert_eq!(with(vec![strange]), usual, "no node shares so");
    let nowhere = Scheduling {
        node_selector: [("gpu".to_owned(), "none".to_owned())].into(),
        ..Scheduling::default()
    };
    let nowhere = PendingPod { scheduling: Arc::new(nowhere), ..share("strange", 100, "1m") };
    assert_eq!(with(vec![nowhere]), usual);
}

#[test]
fn pods_that_share_a_claim_ask_for_it_once() {
    let cluster = || node(Cluster::new(), "node-a", 2);
    let twice = || {
        let mut pod = share("shared", 70, "1");
        pod.claims.push(pod.claims[0].clone());
        pod
    };
    let expected = |pod: PendingPod| {
        let mut planner = planner(&cluster());
        teach(&mut planner, [pod].into_iter().chain(many(40, 50, "8")));
        format!("{:?}", planner.expected())
    };
    assert_eq!(expected(twice()), expected(share("shared", 70, "1")));
}

#[test]
fn amounts_of_cpu_that_hardly_differ_are_one_shape() {
    let nodes = (0..50).fold(Cluster::new(), |cluster, i| node(cluster, &format!("node-{i}"), 4));
    let mut planner = planner(&nodes);
    let pods: Vec<PendingPod> =
        (0..100).map(|i| share(&format!("p{i}"), 30, &format!("{}m", 1000 + i))).collect();
    let steps = planner.plan(&pods, SETTINGS).steps;
    assert!(steps < 2000, "{steps} devices were looked at, where 100 shapes come to 20,000");
}

#[test]
fn where_nobody_could_use_the_rest_anyway_halves_still_share_a_gpu() {
    let mut cluster = node(Cluster::new(), "node-a", 8);
    cluster.put_node("node-a", |node| {
        node.allocatable.insert("cpu".to_owned(), quantity("1"));
    });
    use_percent(&mut cluster, "node-a", "gpu-3", 50);
    let plan = planner(&cluster).plan(&[share("p", 50, "0")], SETTINGS);
    assert_eq!(place(&plan), "node-a/gpu-3");
}
