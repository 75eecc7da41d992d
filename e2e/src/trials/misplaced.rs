//! Trial that binds a pod, without kube-scheduler, to another node than its claim's. The claim is
//! reallocated on the pod's node.

use kube::api::PostParams;
use serde_json::json;

use super::deleted_early::unbound;
use super::test_bed::{TestBed, from_template};
use super::{overcommit, placement};
use crate::harness::TrialOutcome;
use crate::inventory::DRIVER;
use crate::runner::Outcome;

pub(super) async fn check_reallocated(test_bed: TestBed) -> TrialOutcome {
    overcommit::check_during(&test_bed, bind_to_other_node(&test_bed)).await
}

async fn bind_to_other_node(test_bed: &TestBed) -> TrialOutcome {
    test_bed.create_template("share", DRIVER, json!({"memory": "10Gi", "cores": "10"})).await?;
    test_bed.create(unbound(from_template("misplaced", "share"))).await?;
    let claim = placement::wait_allocated(test_bed, "misplaced", "allocated", |_| true).await?;
    let inventory = test_bed.published_gpus().await?;
    let other = inventory.nodes().find(|node| placement::node_of(&claim) != Some(node));
    let other = other.ok_or_else(|| anyhow::anyhow!("only one node has GPUs"))?;
    bind(test_bed, "misplaced", other).await?;
    let on_pod_node = |claim: &_| placement::node_of(claim) == Some(other);
    placement::wait_allocated(test_bed, "misplaced", "allocated on the pod's node", on_pod_node)
        .await?;
    placement::check_colocated(test_bed, "misplaced", "misplaced").await?;
    test_bed.delete(&["misplaced"]).await?;
    Ok(Outcome::Passed(vec![]))
}

/// Binds the pod as the administrator, without the scheduler's checks.
async fn bind(test_bed: &TestBed, pod: &str, node: &str) -> anyhow::Result<()> {
    let binding = json!({
        "apiVersion": "v1",
        "kind": "Binding",
        "metadata": {"name": pod, "namespace": test_bed.namespace()},
        "target": {"apiVersion": "v1", "kind": "Node", "name": node},
    });
    let _: serde_json::Value = test_bed
        .pods()
        .create_subresource("binding", pod, &PostParams::default(), &binding)
        .await?;
    Ok(())
}
