//! Ranking of nodes and devices by the placement policies.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod builders;

use std::collections::BTreeSet;

use builders::*;
use serde_json::json;
use tessera_allocator::model::PendingPod;
use tessera_allocator::{AllocationPlan, PlanSettings, Policy, plan};
use tessera_api::names::NodeName;

fn four_pods(parameters: &serde_json::Value) -> Vec<PendingPod> {
    let claim = |i| {
        let name = format!("p{i}");
        configured(
            claim(&name, vec![request("gpu", 1, &[("memory", "19Gi"), ("cores", "25")])]),
            parameters.clone(),
        )
    };
    (0..4).map(|i| pod(&format!("p{i}"), vec![claim(i)])).collect()
}

#[test]
fn binpack_places_four_quarters_on_one_gpu() {
    let policy = json!({"placement": {"node": "Binpack", "device": "Binpack"}});
    let got = placements(&decide(&two_nodes(), &four_pods(&policy)));
    assert_eq!(got, vec![vec!["node-a/gpu-0".to_owned()]; 4]);
}

#[test]
fn spread_devices_use_four_gpus_of_one_node() {
    let policy = json!({"placement": {"node": "Binpack", "device": "Spread"}});
    let got: BTreeSet<_> =
        placements(&decide(&two_nodes(), &four_pods(&policy))).concat().into_iter().collect();
    let expected: Vec<_> = (0..4).map(|i| format!("node-a/gpu-{i}")).collect();
    assert_eq!(got.into_iter().collect::<Vec<_>>(), expected);
}

#[test]
fn spread_nodes_and_devices_alternate_between_nodes() {
    let policy = json!({"placement": {"node": "Spread", "device": "Spread"}});
    let got = placements(&decide(&two_nodes(), &four_pods(&policy))).concat();
    assert_eq!(got, ["node-a/gpu-0", "node-b/gpu-0", "node-a/gpu-1", "node-b/gpu-1"]);
}

#[test]
fn binpack_prefers_smaller_of_two_empty_gpus() {
    let cluster = Cluster::new().node("node-a", vec![gpu("gpu-0", "80Gi"), gpu("gpu-1", "16Gi")]);
    assert_eq!(placements(&decide(&cluster, &[share_pod("p", "10Gi", "10")])), [["node-a/gpu-1"]]);
}

#[test]
fn better_alternative_outranks_node_policy() {
    // Binpack ranks node-b first, as more utilized. But only node-a has two free GPUs.
    let mut cluster = Cluster::new()
        .node("node-a", (0..2).map(|i| gpu(&format!("gpu-{i}"), "80Gi")).collect())
        .node("node-b", (0..2).map(|i| gpu(&format!("gpu-{i}"), "80Gi")).collect());
    cluster.use_share("node-b", "gpu-0", "40Gi", "50");
    let either = || {
        first_available(
            "gpu",
            vec![request("two", 2, &[]), request("share", 1, &[("memory", "10Gi")])],
        )
    };
    let chosen = |plan: &AllocationPlan| -> Vec<String> {
        plan.decisions
            .iter()
            .flat_map(|d| &d.claims[0].results)
            .map(|r| r.request.to_string())
            .collect()
    };
    let binpack = PlanSettings { policy: Policy::Binpack, ..PlanSettings::default() };
    let decide = |cluster: &Cluster, pods: &[PendingPod]| plan(&cluster.0, pods, binpack);
    let first = decide(&cluster, &[pod("p", vec![claim("c", vec![either()])])]);
    assert_eq!(placements(&first), [["node-a/gpu-0", "node-a/gpu-1"]]);
    assert_eq!(chosen(&first), ["gpu/two", "gpu/two"]);

    cluster.use_share("node-a", "gpu-1", "1Gi", "0");
    let second = decide(&cluster, &[pod("p", vec![claim("c", vec![either()])])]);
    assert_eq!(
        (placements(&second), chosen(&second)),
        (vec![vec!["node-b/gpu-0".to_owned()]], vec!["gpu/share".to_owned()])
    );
}

#[test]
fn nominated_node_outranks_better_alternative() {
    // Pods were evicted from node-b for this pod; kube-scheduler rejected node-a, which has the
    // better devices.
    let cluster = Cluster::new()
        .node("node-a", (0..2).map(|i| gpu(&format!("gpu-{i}"), "80Gi")).collect())
        .node("node-b", vec![gpu("gpu-0", "80Gi")]);
    let either = first_available(
        "gpu",
        vec![request("two", 2, &[]), request("share", 1, &[("memory", "10Gi")])],
    );
    let mut nominated = pod("p", vec![claim("c", vec![either])]);
    nominated.nominated_node = Some(NodeName::new("node-b").unwrap());
    assert_eq!(placements(&decide(&cluster, &[nominated])), [["node-b/gpu-0"]]);
}
