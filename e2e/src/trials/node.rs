//! A node that is deleted while claims are allocated on it, and comes back.

use std::time::Duration;

use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::Api;
use kube::api::DeleteParams;
use serde_json::json;

use super::bench::{Bench, container_ids};
use super::release::unnoticed;
use super::residue;
use crate::harness::TrialOutcome;
use crate::inventory::DRIVER;
use crate::operations::Operations;
use crate::runner::Outcome;
use crate::wait::{self, Verdict};

/// kube-controller-manager looks for pods of nodes that are gone every 20 s, and takes a node for
/// gone after another 40 s; a kubelet that has just started looks for claims without pods every 60
/// s.
const PATIENCE: Duration = Duration::from_secs(400);

pub(super) async fn deleted(bench: Bench) -> TrialOutcome {
    let hands = bench.hands()?;
    let (goes, stays) = (bench.node_with("a100", 4).await?, bench.node_with("h100", 8).await?);
    bench
        .template("lost", "a100.gpu.tessera.dev", json!({"memory": "30Gi", "cores": "50"}))
        .await?;
    bench
        .template("kept", "h100.gpu.tessera.dev", json!({"memory": "30Gi", "cores": "50"}))
        .await?;
    for (name, template) in [("lost-1", "lost"), ("lost-2", "lost"), ("kept", "kept")] {
        bench.holder(name, template).await?;
    }
    bench.holds("lost-1").await?;
    bench.holds("lost-2").await?;
    let kept = bench.holds("kept").await?;
    hands.run(&["stop", &goes, "kubelet"]).await?;
    let without = without_node(&bench, &goes).await;
    hands.run(&["start", &goes, "kubelet"]).await?;
    without?;
    // The other node goes on, and the capacity of this one is whole again.
    unnoticed(&bench, &kept).await?;
    anyhow::ensure!(!container_ids(&kept).is_empty(), "no container on {stays}");
    back(&bench, hands, &goes).await?;
    let names: Vec<_> = (1..=4).map(|number| format!("whole-{number}")).collect();
    bench.template("whole", "a100.gpu.tessera.dev", json!(null)).await?;
    for name in &names {
        bench.holder(name, "whole").await?;
    }
    for name in &names {
        bench.holds(name).await?;
    }
    bench.delete(&names.into_iter().chain(["kept".to_owned()]).collect::<Vec<_>>()).await?;
    Ok(Outcome::Held(vec![]))
}

/// The node is gone: its pods follow, and with them their claims, finalizers and all.
async fn without_node(bench: &Bench, node: &str) -> anyhow::Result<()> {
    let nodes: Api<Node> = Api::all(bench.client.clone());
    nodes.delete(node, &DeleteParams::default()).await?;
    let judge = |pods: &[Pod]| match pods.len() {
        1 => Verdict::Done(()),
        left => Verdict::NotYet(format!("{left} pods")),
    };
    wait::until(bench.pods(), Default::default(), "the node's pods to go", PATIENCE, judge).await?;
    let judge = |claims: &[ResourceClaim]| match claims.len() {
        1 => Verdict::Done(()),
        left => Verdict::NotYet(format!("{left} claims: {}", json!(claims))),
    };
    Ok(wait::until(bench.claims(), Default::default(), "their claims to go", PATIENCE, judge)
        .await?)
}

/// The node is back: its kubelet ends the pods of before and unprepares their claims, and the
/// driver publishes again.
async fn back(bench: &Bench, hands: &Operations, node: &str) -> anyhow::Result<()> {
    residue::gone_within(hands, node, PATIENCE).await?;
    let ours = kube::runtime::watcher::Config::default()
        .fields(&format!("spec.driver={DRIVER},spec.nodeName={node}"));
    let judge = |slices: &[k8s_openapi::api::resource::v1::ResourceSlice]| {
        let devices = slices
            .iter()
            .filter_map(|slice| slice.spec.devices.as_ref())
            .map(Vec::len)
            .sum::<usize>();
        if devices == 4 { Verdict::Done(()) } else { Verdict::NotYet(format!("{devices} devices")) }
    };
    Ok(wait::until(Api::all(bench.client.clone()), ours, "the node's slices", PATIENCE, judge)
        .await?)
}
