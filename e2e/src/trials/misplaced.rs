//! A pod that is bound, past kube-scheduler, to another node than its claim's: the claim comes to
//! the pod.

use kube::api::PostParams;
use serde_json::json;

use super::bench::{Bench, from_template};
use super::deleted_early::unbound;
use super::{overcommit, placement};
use crate::harness::TrialOutcome;
use crate::inventory::{DRIVER, GpuInventory};
use crate::runner::Outcome;

pub(super) async fn repaired(bench: Bench) -> TrialOutcome {
    overcommit::never_during(&bench, follows(&bench)).await
}

async fn follows(bench: &Bench) -> TrialOutcome {
    bench.template("share", DRIVER, json!({"memory": "10Gi", "cores": "10"})).await?;
    bench.create(unbound(from_template("stray", "share"))).await?;
    let claim = placement::allocated(bench, "stray", "allocated", |_| true).await?;
    let inventory = GpuInventory::read(&bench.client).await?;
    let other = inventory.nodes().find(|node| placement::node_of(&claim) != Some(node));
    let other = other.ok_or_else(|| anyhow::anyhow!("one node has all the GPUs"))?;
    bind(bench, "stray", other).await?;
    let on_it = |claim: &_| placement::node_of(claim) == Some(other);
    placement::allocated(bench, "stray", "allocated where the pod is", on_it).await?;
    placement::together(bench, "stray", "stray").await?;
    bench.delete(&["stray".to_owned()]).await?;
    Ok(Outcome::Held(vec![]))
}

/// Binds the pod as an administrator can, who asks nobody.
async fn bind(bench: &Bench, pod: &str, node: &str) -> anyhow::Result<()> {
    let binding = json!({
        "apiVersion": "v1",
        "kind": "Binding",
        "metadata": {"name": pod, "namespace": bench.namespace()},
        "target": {"apiVersion": "v1", "kind": "Node", "name": node},
    });
    let _: serde_json::Value =
        bench.pods().create_subresource("binding", pod, &PostParams::default(), &binding).await?;
    Ok(())
}
