//! Trials of pods that a node refuses for a reason outside the controller's checks. The reasons are
//! host ports and pod affinity.

use serde_json::{Value, json};

use super::test_bed::{TestBed, from_template};
use super::{overcommit, placement};
use crate::harness::TrialOutcome;
use crate::inventory::DRIVER;
use crate::runner::Outcome;

/// A host port that no other pod uses.
const PORT: u16 = 18_765;

/// Reason of the event about the rescheduled claim.
const RESCHEDULING: &str = "Rescheduling";

/// Returns the pod with a host port.
pub(super) fn with_port(mut pod: Value) -> Value {
    pod["spec"]["containers"][0]["ports"] = json!([{"containerPort": PORT, "hostPort": PORT}]);
    pod
}

/// Returns the pod with a selector for that node.
pub(super) fn on_node(mut pod: Value, node: &str) -> Value {
    pod["spec"]["nodeSelector"] = json!({"kubernetes.io/hostname": node});
    pod
}

/// Returns the pod with anti-affinity to other such pods.
fn with_anti_affinity(mut pod: Value) -> Value {
    let selector = json!({"matchLabels": {"e2e.tessera.dev/exclusive": "true"}});
    let term = json!({"labelSelector": selector, "topologyKey": "kubernetes.io/hostname"});
    pod["metadata"]["labels"] = json!({"e2e.tessera.dev/exclusive": "true"});
    pod["spec"]["affinity"] =
        json!({"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}});
    pod
}

pub(super) async fn by_port(test_bed: TestBed) -> TrialOutcome {
    overcommit::check_during(&test_bed, moves_claim(&test_bed, with_port)).await
}

pub(super) async fn by_affinity(test_bed: TestBed) -> TrialOutcome {
    overcommit::check_during(&test_bed, moves_claim(&test_bed, with_anti_affinity)).await
}

pub(super) async fn everywhere(test_bed: TestBed) -> TrialOutcome {
    overcommit::check_during(&test_bed, releases_claim(&test_bed)).await
}

/// Creates a template for shares that are placed beside the first pod.
pub(super) async fn create_packed_template(test_bed: &TestBed, name: &str) -> anyhow::Result<()> {
    let capacity = json!({"memory": "10Gi", "cores": "10"});
    test_bed.create_configured_template(name, DRIVER, capacity, placement::binpack()).await
}

/// Creates the pod, waits until it runs, and returns its node.
pub(super) async fn run_first(test_bed: &TestBed, pod: Value) -> anyhow::Result<String> {
    let name = pod["metadata"]["name"].as_str().unwrap_or_default().to_owned();
    test_bed.create(pod).await?;
    placement::check_colocated(test_bed, &name, &name).await
}

/// The first pod blocks the second on the node that the controller selects for both. The second
/// pod's claim moves to another node.
async fn moves_claim(test_bed: &TestBed, blocking: fn(Value) -> Value) -> TrialOutcome {
    create_packed_template(test_bed, "share").await?;
    let node = run_first(test_bed, blocking(from_template("first", "share"))).await?;
    let on_it = |claim: &_| placement::node_of(claim) == Some(&node);
    // Starts before the pod is created, because the allocation may be released within milliseconds.
    let mut claims = placement::start_claim_watch(test_bed).await?;
    test_bed.create(blocking(from_template("second", "share"))).await?;
    placement::wait_allocated_in(&mut claims, "second", "on the first pod's node", on_it).await?;
    let message = placement::wait_event_reason(test_bed, "second", RESCHEDULING).await?;
    anyhow::ensure!(message.contains(&node), "the event does not name {node}: {message}");
    let other = placement::check_colocated(test_bed, "second", "second").await?;
    anyhow::ensure!(other != node, "both run on {node}");
    test_bed.delete(&["first", "second"]).await?;
    Ok(Outcome::Passed(vec![]))
}

/// The only node with such GPUs refuses the pod: its claim is released, and others can use the
/// GPUs.
async fn releases_claim(test_bed: &TestBed) -> TrialOutcome {
    let node = test_bed.node_with("a100", 4).await?;
    let class = "a100.gpu.tessera.dev";
    test_bed.create_template("share", class, json!({"memory": "10Gi", "cores": "10"})).await?;
    for (name, count) in [("two", 2), ("three", 3)] {
        let exactly = json!({"deviceClassName": class, "count": count});
        test_bed
            .create_template_with(name, json!({"requests": [{"name": "gpu", "exactly": exactly}]}))
            .await?;
    }
    test_bed.create(with_port(from_template("blocker", "share"))).await?;
    test_bed.wait_running("blocker").await?;
    let mut claims = placement::start_claim_watch(test_bed).await?;
    test_bed.create(with_port(from_template("refused", "three"))).await?;
    placement::wait_allocated_in(&mut claims, "refused", "allocated", |_| true).await?;
    // One GPU is free and one is partly used, so this pod is pending until GPUs are released.
    test_bed.create_holder("other", "two").await?;
    let message = placement::wait_event_reason(test_bed, "refused", RESCHEDULING).await?;
    anyhow::ensure!(message.contains(&node), "the event does not name {node}: {message}");
    placement::check_colocated(test_bed, "other", "other").await?;
    placement::wait_unallocated(test_bed, "refused").await?;
    placement::wait_event_reason(test_bed, "refused", "InsufficientDevices").await?;
    test_bed.delete(&["blocker", "refused", "other"]).await?;
    Ok(Outcome::Passed(vec![]))
}
