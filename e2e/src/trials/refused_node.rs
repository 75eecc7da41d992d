//! Pods that a node refuses for something that the controller does not look at: ports, affinity to
//! other pods.

use serde_json::{Value, json};

use super::bench::{Bench, from_template};
use super::deleted_early::unbound;
use super::{overcommit, placement};
use crate::harness::TrialOutcome;
use crate::inventory::DRIVER;
use crate::runner::Outcome;

/// Of all the ports of a node, one that nothing else here uses.
const PORT: u16 = 18_765;

/// Of the event that says so.
const RESCHEDULING: &str = "Rescheduling";

/// The pod, with a port of the node for itself.
pub(super) fn with_port(mut pod: Value) -> Value {
    pod["spec"]["containers"][0]["ports"] = json!([{"containerPort": PORT, "hostPort": PORT}]);
    pod
}

/// The pod, on that node and no other.
pub(super) fn on_node(mut pod: Value, node: &str) -> Value {
    pod["spec"]["nodeSelector"] = json!({"kubernetes.io/hostname": node});
    pod
}

/// A pod that no other of its kind may share a node with.
fn solitary(mut pod: Value) -> Value {
    let selector = json!({"matchLabels": {"e2e.tessera.dev/solitary": "true"}});
    let term = json!({"labelSelector": selector, "topologyKey": "kubernetes.io/hostname"});
    pod["metadata"]["labels"] = json!({"e2e.tessera.dev/solitary": "true"});
    pod["spec"]["affinity"] =
        json!({"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}});
    pod
}

pub(super) async fn by_port(bench: Bench) -> TrialOutcome {
    overcommit::never_during(&bench, moves(&bench, with_port)).await
}

pub(super) async fn by_affinity(bench: Bench) -> TrialOutcome {
    overcommit::never_during(&bench, moves(&bench, solitary)).await
}

pub(super) async fn everywhere(bench: Bench) -> TrialOutcome {
    overcommit::never_during(&bench, released(&bench)).await
}

/// The node that the controller takes for a pod like those to come.
pub(super) async fn first_choice(bench: &Bench, template: &str) -> anyhow::Result<String> {
    bench.create(unbound(from_template("scout", template))).await?;
    let claim = placement::allocated(bench, "scout", "allocated", |_| true).await?;
    bench.delete(&["scout".to_owned()]).await?;
    placement::unallocated(bench, "scout").await?;
    Ok(placement::node_of(&claim).unwrap_or_default().to_owned())
}

/// The first pod stands in the way of the second, on the node where the controller puts both: the
/// second's claim moves.
async fn moves(bench: &Bench, rival: fn(Value) -> Value) -> TrialOutcome {
    bench.template("share", DRIVER, json!({"memory": "10Gi", "cores": "10"})).await?;
    let node = first_choice(bench, "share").await?;
    bench.create(on_node(rival(from_template("first", "share")), &node)).await?;
    bench.holds("first").await?;
    let on_it = |claim: &_| placement::node_of(claim) == Some(&node);
    // From before the pod is there: what is written may be taken back within milliseconds.
    let mut claims = placement::watch(bench).await?;
    bench.create(rival(from_template("second", "share"))).await?;
    placement::seen_allocated(&mut claims, "second", "on the first one's node", on_it).await?;
    let said = placement::told(bench, "second", RESCHEDULING).await?;
    anyhow::ensure!(said.contains(&node), "the event does not name {node}: {said}");
    let other = placement::together(bench, "second", "second").await?;
    anyhow::ensure!(other != node, "both run on {node}");
    bench.delete(&["first".to_owned(), "second".to_owned()]).await?;
    Ok(Outcome::Held(vec![]))
}

/// One node has such GPUs, and it refuses the pod: others get them.
async fn released(bench: &Bench) -> TrialOutcome {
    let node = bench.node_with("a100", 4).await?;
    let class = "a100.gpu.tessera.dev";
    bench.template("share", class, json!({"memory": "10Gi", "cores": "10"})).await?;
    for (name, count) in [("two", 2), ("three", 3)] {
        let exactly = json!({"deviceClassName": class, "count": count});
        bench.template_of(name, json!({"requests": [{"name": "gpu", "exactly": exactly}]})).await?;
    }
    bench.create(with_port(from_template("blocker", "share"))).await?;
    bench.holds("blocker").await?;
    let mut claims = placement::watch(bench).await?;
    bench.create(with_port(from_template("refused", "three"))).await?;
    placement::seen_allocated(&mut claims, "refused", "allocated", |_| true).await?;
    // One GPU is free and one in part: it has to wait for the others.
    bench.holder("other", "two").await?;
    let said = placement::told(bench, "refused", RESCHEDULING).await?;
    anyhow::ensure!(said.contains(&node), "the event does not name {node}: {said}");
    placement::together(bench, "other", "other").await?;
    placement::unallocated(bench, "refused").await?;
    placement::told(bench, "refused", "InsufficientDevices").await?;
    bench.delete(&["blocker".to_owned(), "refused".to_owned(), "other".to_owned()]).await?;
    Ok(Outcome::Held(vec![]))
}
