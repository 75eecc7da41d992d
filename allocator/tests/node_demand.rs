//! Nodes that a cluster autoscaler has to add.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod builders;

use std::sync::Arc;

use builders::{Cluster, claim, gpu, pod, quantity, request, share_pod};
use tessera_allocator::model::{
    Node, NodeAffinityTerm, NodeSelector, NodeTaint, PendingPod, PodUid, Requirement,
    SelectorOperator,
};
use tessera_allocator::{NodeDemand, PlanSettings, Quota, QuotaState, node_demand};
use tessera_api::names::{NodeName, QuotaName};
use tessera_api::quota::QuotaResource;

/// A group with one node of two GPUs of 80 GiB, of which nothing is free.
fn full() -> Cluster {
    let mut cluster =
        Cluster::new().node("node-a", vec![gpu("gpu-0", "80Gi"), gpu("gpu-1", "80Gi")]);
    for gpu in ["gpu-0", "gpu-1"] {
        cluster.use_share("node-a", gpu, "80Gi", "100");
    }
    cluster
}

fn edit_node(cluster: &mut Cluster, edit: impl FnOnce(&mut Node)) {
    let node = cluster.0.nodes.values_mut().next().unwrap();
    edit(Arc::make_mut(node));
}

fn demand(cluster: &Cluster, maximum: usize, pods: &[PendingPod]) -> NodeDemand {
    let template = NodeName::new("node-a").unwrap();
    node_demand(&cluster.0, &template, maximum, pods, PlanSettings::default())
}

fn halves(count: usize) -> Vec<PendingPod> {
    (0..count).map(|number| share_pod(&format!("pod-{number}"), "40Gi", "50")).collect()
}

#[test]
fn pods_need_as_few_nodes_as_hold_them() {
    let cluster = full();
    assert_eq!(demand(&cluster, 9, &halves(0)), NodeDemand::default());
    // A node holds four halves of a GPU.
    for (pods, nodes) in [(1, 1), (4, 1), (5, 2), (9, 3)] {
        let demand = demand(&cluster, 9, &halves(pods));
        assert_eq!((demand.nodes, demand.pods.len()), (nodes, pods));
    }
}

#[test]
fn maximum_bounds_the_nodes_and_the_pods() {
    let demand = demand(&full(), 2, &halves(20));
    assert_eq!((demand.nodes, demand.pods.len()), (2, 8));
}

#[test]
fn free_devices_of_the_group_are_used_first() {
    let mut cluster = Cluster::new();
    cluster = cluster.node("node-a", vec![gpu("gpu-0", "80Gi"), gpu("gpu-1", "80Gi")]);
    cluster.use_share("node-a", "gpu-0", "80Gi", "100");
    assert_eq!(demand(&cluster, 9, &halves(2)).nodes, 0);
    assert_eq!(demand(&cluster, 9, &halves(3)).nodes, 1);
    let unused = cluster.node("node-b", vec![gpu("gpu-0", "80Gi"), gpu("gpu-1", "80Gi")]);
    assert_eq!(demand(&unused, 9, &halves(6)).nodes, 0, "a node comes before an equal copy");
}

#[test]
fn group_needs_nodes_for_all_of_its_pods() {
    let whole =
        |name: &str| pod(name, vec![claim(name, vec![request("gpu", 2, &[("memory", "80Gi")])])]);
    let mut group = whole("first");
    group.together_with = vec![whole("second"), whole("third")];
    let enough = demand(&full(), 3, &[group.clone()]);
    assert_eq!(enough.nodes, 3);
    assert!(enough.pods.contains(&PodUid::new("first")));
    assert_eq!(demand(&full(), 2, &[group]).nodes, 0, "two do not hold the group");
}

#[test]
fn pods_that_fit_on_no_copy_need_none() {
    let large = share_pod("large", "96Gi", "50");
    let mut elsewhere = share_pod("elsewhere", "40Gi", "50");
    let zone = Requirement {
        key: "zone".to_owned(),
        operator: SelectorOperator::In,
        values: vec!["other".to_owned()],
    };
    let terms = vec![NodeAffinityTerm { labels: vec![zone], fields: Vec::new() }];
    Arc::make_mut(&mut elsewhere.scheduling).affinity = Some(NodeSelector { terms });
    let mut on_host = share_pod("on-host", "40Gi", "50");
    Arc::make_mut(&mut on_host.scheduling)
        .node_selector
        .insert("kubernetes.io/hostname".to_owned(), "node-a".to_owned());
    let mut cluster = full();
    edit_node(&mut cluster, |node| {
        node.labels.insert("kubernetes.io/hostname".to_owned(), "node-a".to_owned());
    });
    assert_eq!(demand(&cluster, 9, &[large, elsewhere, on_host]), NodeDemand::default());
}

#[test]
fn copy_has_no_passing_conditions_of_its_template() {
    let mut cluster = full();
    edit_node(&mut cluster, |node| {
        let taint = |key: &str| NodeTaint {
            key: key.to_owned(),
            value: String::new(),
            effect: "NoSchedule".to_owned(),
        };
        (node.ready, node.cordoned) = (false, true);
        node.taints = vec![
            taint("node.kubernetes.io/unschedulable"),
            taint("ToBeDeletedByClusterAutoscaler"),
        ];
    });
    assert_eq!(demand(&cluster, 9, &halves(1)).nodes, 1);
    edit_node(&mut cluster, |node| node.taints[0].key = "nvidia.com/gpu".to_owned());
    assert_eq!(demand(&cluster, 9, &halves(1)).nodes, 0, "a taint of the node's own lasts");
}

#[test]
fn copy_has_the_cpu_that_pods_without_devices_leave() {
    let mut cluster = full();
    edit_node(&mut cluster, |node| {
        node.used.insert("cpu".to_owned(), quantity("60"));
        node.releasable.insert("cpu".to_owned(), quantity("50"));
    });
    let with_cpu = |cpu: &str| {
        let mut pod = share_pod("pod", "40Gi", "50");
        let scheduling = Arc::make_mut(&mut pod.scheduling);
        scheduling.requests.insert("cpu".to_owned(), quantity(cpu));
        pod
    };
    assert_eq!(demand(&cluster, 9, &[with_cpu("54")]).nodes, 1);
    assert_eq!(demand(&cluster, 9, &[with_cpu("55")]).nodes, 0);
}

#[test]
fn quota_bounds_the_demand() {
    let mut cluster = full();
    let hard = [(QuotaResource::Memory, quantity("200Gi"))].into_iter().collect();
    let name = QuotaName::new("team").unwrap();
    let quota = Arc::new(Quota { name, classes: [].into(), hard });
    let states = vec![QuotaState { quota, used: Default::default() }];
    let pods = halves(9);
    cluster.0.quotas = [(pods[0].namespace.clone(), states)].into();
    let demand = demand(&cluster, 9, &pods);
    assert_eq!((demand.nodes, demand.pods.len()), (2, 5));
}
