//! Trial that deletes a Node with allocated claims and registers it again.

use std::time::Duration;

use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::Api;
use kube::api::DeleteParams;
use serde_json::json;

use super::residue;
use super::test_bed::{A100, H100, TestBed, container_ids};
use crate::harness::TrialOutcome;
use crate::inventory::DRIVER;
use crate::operations::Operations;
use crate::runner::Outcome;
use crate::wait::{self, CheckResult};

/// kube-controller-manager checks for pods of deleted nodes every 20 s, and waits another 40 s. A
/// started kubelet checks for claims without pods every 60 s.
const TIMEOUT: Duration = Duration::from_secs(400);

pub(super) async fn delete_and_register(test_bed: TestBed) -> TrialOutcome {
    let operations = test_bed.operations()?;
    let (deleted_node, other_node) =
        (test_bed.node_with("a100", 4).await?, test_bed.node_with("h100", 8).await?);
    test_bed.create_template("lost", A100, json!({"memory": "30Gi", "cores": "50"})).await?;
    test_bed.create_template("kept", H100, json!({"memory": "30Gi", "cores": "50"})).await?;
    for (name, template) in [("lost-1", "lost"), ("lost-2", "lost"), ("kept", "kept")] {
        test_bed.create_holder(name, template).await?;
    }
    test_bed.wait_running("lost-1").await?;
    test_bed.wait_running("lost-2").await?;
    let kept = test_bed.wait_running("kept").await?;
    operations.run(&["stop", &deleted_node, "kubelet"]).await?;
    let deleted = delete_node(&test_bed, &deleted_node).await;
    operations.run(&["start", &deleted_node, "kubelet"]).await?;
    deleted?;
    // The other node is not affected, and this node's full capacity is available again.
    test_bed.check_undisturbed(&kept).await?;
    anyhow::ensure!(!container_ids(&kept).is_empty(), "no container on {other_node}");
    wait_registered(&test_bed, operations, &deleted_node).await?;
    let names: Vec<_> = (1..=4).map(|number| format!("whole-{number}")).collect();
    test_bed.create_template("whole", A100, json!(null)).await?;
    for name in &names {
        test_bed.create_holder(name, "whole").await?;
    }
    for name in &names {
        test_bed.wait_running(name).await?;
    }
    test_bed.delete(&names.into_iter().chain(["kept".to_owned()]).collect::<Vec<_>>()).await?;
    Ok(Outcome::Passed(vec![]))
}

/// Deletes the Node, and waits until its pods and their claims are deleted.
async fn delete_node(test_bed: &TestBed, node: &str) -> anyhow::Result<()> {
    let nodes: Api<Node> = Api::all(test_bed.client.clone());
    nodes.delete(node, &DeleteParams::default()).await?;
    let check =
        |pods: &[Pod]| CheckResult::done_if(pods.len() == 1, || format!("{} pods", pods.len()));
    wait::until(
        test_bed.pods(),
        Default::default(),
        "the node's pods to be deleted",
        TIMEOUT,
        check,
    )
    .await?;
    let check = |claims: &[ResourceClaim]| {
        CheckResult::done_if(claims.len() == 1, || json!(claims).to_string())
    };
    Ok(wait::until(
        test_bed.claims(),
        Default::default(),
        "their claims to be deleted",
        TIMEOUT,
        check,
    )
    .await?)
}

/// Waits until the restarted kubelet has unprepared the old claims, and the driver has published
/// again.
async fn wait_registered(
    test_bed: &TestBed,
    operations: &Operations,
    node: &str,
) -> anyhow::Result<()> {
    residue::wait_removed_within(operations, node, TIMEOUT).await?;
    let selector = kube::runtime::watcher::Config::default()
        .fields(&format!("spec.driver={DRIVER},spec.nodeName={node}"));
    let check = |slices: &[k8s_openapi::api::resource::v1::ResourceSlice]| {
        let devices = slices
            .iter()
            .filter_map(|slice| slice.spec.devices.as_ref())
            .map(Vec::len)
            .sum::<usize>();
        CheckResult::done_if(devices == 4, || format!("{devices} devices"))
    };
    Ok(wait::until(
        Api::all(test_bed.client.clone()),
        selector,
        "the node's slices",
        TIMEOUT,
        check,
    )
    .await?)
}
