//! Trial of `kubectl drain` of a node: it is cordoned, and its pods are evicted while the driver
//! stays. Their replacements get devices on the other node, and nothing is allocated on the drained
//! one.

use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::api::{DeleteParams, EvictParams, Patch, PatchParams};
use kube::{Api, ResourceExt};
use serde_json::json;

use super::placement::node_name;
use super::test_bed::{TestBed, phase, wait_all};
use crate::harness::TrialOutcome;
use crate::inventory::DRIVER;
use crate::leftovers::device_results;
use crate::runner::Outcome;
use crate::wait::CheckResult;

/// Enough for both nodes.
const REPLICAS: usize = 8;

pub(super) async fn moves_all_pods(test_bed: TestBed) -> TrialOutcome {
    let node = test_bed.node_with("a100", 4).await?;
    let spread = json!({"placement": {"node": "Spread", "device": "Spread"}});
    test_bed.create_configured_template("share", DRIVER, json!({"memory": "2Gi"}), spread).await?;
    let replica_sets = test_bed.create_replica_set("model", REPLICAS, "share").await?;
    let before = wait_running(&test_bed, None).await?;
    let on_node: Vec<&Pod> =
        before.iter().filter(|pod| node_name(pod) == Some(node.as_str())).collect();
    anyhow::ensure!(!on_node.is_empty(), "no pod runs on {node}");
    set_unschedulable(&test_bed, &node, true).await?;
    let outcome = async {
        for pod in &on_node {
            test_bed.pods().evict(&pod.name_any(), &EvictParams::default()).await?;
        }
        wait_running(&test_bed, Some(&node)).await?;
        wait_released(&test_bed, &node).await
    };
    let outcome = outcome.await;
    // Later trials need the node.
    set_unschedulable(&test_bed, &node, false).await?;
    outcome?;
    println!("    {} of {REPLICAS} pods moved", on_node.len());
    replica_sets.delete("model", &DeleteParams::default()).await?;
    wait_all(test_bed.pods(), "the pods to be deleted", CheckResult::none_left).await?;
    Ok(Outcome::Passed(vec![]))
}

async fn set_unschedulable(test_bed: &TestBed, node: &str, is: bool) -> anyhow::Result<()> {
    let nodes: Api<Node> = Api::all(test_bed.client.clone());
    let patch = Patch::Merge(json!({"spec": {"unschedulable": is}}));
    nodes.patch(node, &PatchParams::default(), &patch).await?;
    Ok(())
}

/// Waits until all replicas run, none of them on the node `but`.
async fn wait_running(test_bed: &TestBed, but: Option<&str>) -> anyhow::Result<Vec<Pod>> {
    let check = |pods: &[Pod]| {
        let is_there =
            |pod: &&Pod| phase(pod) == "Running" && (but.is_none() || node_name(pod) != but);
        let running = pods.iter().filter(is_there).count();
        match running == REPLICAS && pods.len() == REPLICAS {
            true => CheckResult::Done(pods.to_vec()),
            false => CheckResult::Pending(format!("{running} of {} run", pods.len())),
        }
    };
    wait_all(test_bed.pods(), "all replicas to run", check).await
}

/// Waits until no claim is allocated on the node.
pub(super) async fn wait_released(test_bed: &TestBed, node: &str) -> anyhow::Result<()> {
    let check = |claims: &[ResourceClaim]| {
        let is_on = |claim: &&ResourceClaim| device_results(claim).any(|r| r.pool == node);
        let left = claims.iter().filter(is_on).count();
        CheckResult::done_if(left == 0, || format!("{left} claims"))
    };
    wait_all(test_bed.claims(), "the claims of the node to be released", check).await
}
