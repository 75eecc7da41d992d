//! Trial of a graceful node shutdown: the kubelet ends the pods of the node, the driver's last, and
//! delays the shutdown for it. The pods' replacements get devices on the other node, and after the
//! next boot all devices of the node are free.

use k8s_openapi::api::apps::v1::ReplicaSet;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::jiff::Timestamp;
use kube::api::{DeleteParams, ListParams};
use kube::runtime::watcher;
use kube::{Api, ResourceExt};

use super::controller_deployment::NAMESPACE;
use super::placement::node_name;
use super::refused_node::{create_packed_template, on_node};
use super::test_bed::{TIMEOUT, TestBed, from_template, phase, wait_all};
use super::{node_drain, overcommit, residue};
use crate::harness::TrialOutcome;
use crate::operations::Operations;
use crate::runner::Outcome;
use crate::wait::{CheckResult, Watch};

const REPLICAS: usize = 2;

pub(super) async fn moves_pods(test_bed: TestBed) -> TrialOutcome {
    let operations = test_bed.operations()?.clone();
    let node = test_bed.node_with("h100", 2).await?;
    create_packed_template(&test_bed, "packed").await?;
    operations.run(&["graceful-shutdown", &node, "on"]).await?;
    let moved = overcommit::check_during(&test_bed, shut_down(&test_bed, &operations, &node)).await;
    // Later trials need the node.
    operations.run(&["graceful-shutdown", &node, "off"]).await?;
    operations.run(&["reboot", &node]).await?;
    delete_ended(&test_bed).await?;
    let replica_sets = moved?;
    test_bed.published_gpus().await?;
    test_bed.create(on_node(from_template("next", "packed"), &node)).await?;
    test_bed.wait_running("next").await?;
    replica_sets.delete("model", &DeleteParams::default()).await?;
    test_bed.delete(&["next", "first"]).await?;
    wait_all(test_bed.pods(), "the pods to be deleted", CheckResult::none_left).await?;
    residue::wait_removed(&operations, &node).await?;
    Ok(Outcome::Passed(vec![]))
}

/// Starts pods on the node and shuts it down. Returns once the pods run elsewhere and its devices
/// are free.
async fn shut_down(
    test_bed: &TestBed,
    operations: &Operations,
    node: &str,
) -> anyhow::Result<Api<ReplicaSet>> {
    // The others follow it to its GPU. It is not replaced.
    test_bed.create(on_node(from_template("first", "packed"), node)).await?;
    test_bed.wait_running("first").await?;
    let replica_sets = test_bed.create_replica_set("model", REPLICAS, "packed").await?;
    wait_running(test_bed, |pod| node_name(pod) == Some(node)).await?;
    let system: Api<Pod> = Api::namespaced(test_bed.client.clone(), NAMESPACE);
    // Its controller replaces an ended pod of a DaemonSet at once.
    let drivers = watcher::Config::default().labels("app.kubernetes.io/name=tessera-driver");
    let mut drivers = Watch::started(system, drivers, TIMEOUT).await?;
    let started = tokio::time::Instant::now();
    operations.run(&["shut-down", node]).await?;
    println!("    the kubelet permits it after {:.1} s", started.elapsed().as_secs_f64());
    let left = operations.run(&["residue", node]).await?;
    println!("    left for the next boot: {} files", left.lines().count());
    let driver = |pods: &[Pod]| {
        let mut on_it = pods.iter().filter(|pod| node_name(pod) == Some(node));
        let ended = on_it.find_map(ended_at);
        ended.map_or_else(|| CheckResult::Pending("it runs".into()), CheckResult::Done)
    };
    let driver = drivers.until("the driver to end", TIMEOUT, driver).await?;
    let last = wait_ended(test_bed, node).await?;
    anyhow::ensure!(driver >= last, "the driver ended at {driver}, a pod of it at {last}");
    wait_running(test_bed, |pod| node_name(pod) != Some(node)).await?;
    node_drain::wait_released(test_bed, node).await?;
    Ok(replica_sets)
}

/// Waits until as many pods of the ReplicaSet run as it has, on these nodes.
async fn wait_running(test_bed: &TestBed, is_there: impl Fn(&Pod) -> bool) -> anyhow::Result<()> {
    let check = |pods: &[Pod]| {
        let is_running = |pod: &&Pod| {
            !pod.owner_references().is_empty() && phase(pod) == "Running" && is_there(pod)
        };
        let running = pods.iter().filter(is_running).count();
        CheckResult::done_if(running == REPLICAS, || format!("{running} run"))
    };
    wait_all(test_bed.pods(), "all replicas to run", check).await
}

/// Waits until the kubelet of the node has reported the end of its pods. Returns when the last of
/// them ended.
async fn wait_ended(test_bed: &TestBed, node: &str) -> anyhow::Result<Timestamp> {
    let check = |pods: &[Pod]| {
        let on_it = pods.iter().filter(|pod| node_name(pod) == Some(node));
        let ended: Vec<Timestamp> = on_it.filter_map(ended_at).collect();
        match ended.iter().max() {
            Some(last) if ended.len() > REPLICAS => CheckResult::Done(*last),
            _ => CheckResult::Pending(format!("{} have ended", ended.len())),
        }
    };
    wait_all(test_bed.pods(), "the pods of the node to end", check).await
}

/// Returns when the first container ended.
fn ended_at(pod: &Pod) -> Option<Timestamp> {
    let status = pod.status.as_ref()?.container_statuses.as_ref()?.first()?;
    Some(status.state.as_ref()?.terminated.as_ref()?.finished_at.as_ref()?.0)
}

/// Deletes the ended pods of Tessera: a controller that was on the node stays otherwise.
async fn delete_ended(test_bed: &TestBed) -> anyhow::Result<()> {
    let system: Api<Pod> = Api::namespaced(test_bed.client.clone(), NAMESPACE);
    let ended = ListParams::default().fields("status.phase!=Running,status.phase!=Pending");
    system.delete_collection(&DeleteParams::default(), &ended).await?;
    Ok(())
}
