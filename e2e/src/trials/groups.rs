//! Trials of groups: two groups of pods that each fit alone and not together. One gets all of its
//! devices, the other none, and no round ends in a deadlock.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::api::{DeleteParams, Patch, PatchParams};
use kube::{Api, ResourceExt};
use serde_json::{Value, json};
use tessera_api::events;

use super::claim_watch::{self, ClaimSums};
use super::refused_node::{on_node, with_port};
use super::test_bed::{TestBed, from_template, phase, wait_all};
use super::{overcommit, placement};
use crate::harness::TrialOutcome;
use crate::inventory::{DRIVER, GpuInventory};
use crate::leftovers::device_results;
use crate::runner::Outcome;
use crate::wait::CheckResult;

/// The pods of a group.
pub(super) const SIZE: usize = 8;

/// The names of the groups.
pub(super) const GROUPS: [&str; 2] = ["left", "right"];

pub(super) async fn run_in_turn(test_bed: TestBed) -> TrialOutcome {
    let member = |name: &str, group: &str| of_group(from_template(name, "share"), group, SIZE);
    let trial = one_at_a_time(&test_bed, rounds(&test_bed, member));
    overcommit::check_during(&test_bed, trial).await
}

/// Checks during a trial that the two groups never hold devices at the same time.
pub(super) async fn one_at_a_time(
    test_bed: &TestBed,
    trial: impl Future<Output = TrialOutcome>,
) -> TrialOutcome {
    let sums =
        HoldersByGroup { namespace: test_bed.namespace().to_owned(), holders: BTreeMap::new() };
    claim_watch::check_during(test_bed, sums, trial).await
}

/// Runs the two groups in turn. `member` returns a pod by its name and its group.
pub(super) async fn rounds(
    test_bed: &TestBed,
    member: impl Fn(&str, &str) -> Value,
) -> TrialOutcome {
    let node = test_bed.node_with("h100", 2).await?;
    let inventory = test_bed.published_gpus().await?;
    let gpus = inventory.of_pool(&node).count();
    // As many shares on each GPU as give all GPUs together one group, and never two.
    let shares = SIZE.div_ceil(gpus);
    let memory = format!("{}Gi", 72 / shares);
    test_bed.create_template("share", DRIVER, json!({"memory": memory})).await?;
    for _ in 0..test_bed.sizes().group_rounds {
        for number in 0..SIZE {
            for group in GROUPS {
                let pod = member(&name_of(group, number), group);
                test_bed.create(on_node(pod, &node)).await?;
            }
        }
        let first = wait_group(test_bed, &GROUPS).await?;
        let second = if first == GROUPS[0] { GROUPS[1] } else { GROUPS[0] };
        let reason = events::GROUP_DOES_NOT_FIT.name();
        placement::wait_event_reason(test_bed, &name_of(second, SIZE - 1), reason).await?;
        delete_group(test_bed, first).await?;
        wait_group(test_bed, &[second]).await?;
        delete_group(test_bed, second).await?;
    }
    println!("    {} rounds", test_bed.sizes().group_rounds);
    Ok(Outcome::Passed(vec![]))
}

/// kube-scheduler cannot place one pod of a group: none of them runs, and the group gives its
/// devices back, until the pod can be placed. kube-scheduler restarts in the second attempt.
pub(super) async fn wait_for_all(test_bed: TestBed) -> TrialOutcome {
    overcommit::check_during(&test_bed, refuse_one(&test_bed)).await
}

async fn refuse_one(test_bed: &TestBed) -> TrialOutcome {
    let operations = test_bed.operations()?;
    let node = test_bed.node_with("h100", 2).await?;
    test_bed.create_template("share", DRIVER, json!({"memory": "10Gi"})).await?;
    test_bed.create(on_node(with_port(from_template("blocker", "share")), &node)).await?;
    test_bed.wait_running("blocker").await?;
    let pod = |name: &str| on_node(of_group(from_template(name, "share"), "pair", 2), &node);
    test_bed.create(pod("free")).await?;
    test_bed.create(with_port(pod("refused"))).await?;
    let started = tokio::time::Instant::now();
    placement::wait_allocated(test_bed, "free", "reserved", placement::is_reserved).await?;
    let text = ["kube-scheduler has found nodes for 1 of the 2 pods"];
    placement::wait_event_text(test_bed, "free", &text).await?;
    for name in ["free", "refused"] {
        placement::wait_unallocated(test_bed, name).await?;
        let found = test_bed.pods().get(name).await?;
        anyhow::ensure!(placement::node_name(&found).is_none(), "{name} was bound");
    }
    let took = started.elapsed();
    println!("    the group holds nothing after {:.1} s", took.as_secs_f64());
    anyhow::ensure!(took.as_secs() < 60, "the group held devices for {took:?}");
    // Tried again, and kube-scheduler forgets the node that it had for the pod.
    placement::wait_allocated(test_bed, "free", "reserved", placement::is_reserved).await?;
    for action in ["stop", "start"] {
        operations.run(&[action, "control-plane", "kube-scheduler"]).await?;
    }
    test_bed.delete(&["blocker"]).await?;
    for name in ["free", "refused"] {
        test_bed.wait_running(name).await?;
    }
    test_bed.delete(&["free", "refused"]).await?;
    Ok(Outcome::Passed(vec![]))
}

/// The label of nodes that the pods of one group require to have one value.
const RACK: &str = "e2e.tessera.dev/rack";

/// A group needs one GPU more than any node has. With a rack for each node it gets none; once two
/// nodes are in one rack, all of it runs.
pub(super) async fn require_one_rack(test_bed: TestBed) -> TrialOutcome {
    let inventory = test_bed.published_gpus().await?;
    let nodes: Vec<String> = inventory.nodes().map(str::to_owned).collect();
    if nodes.len() < 2 {
        return Ok(Outcome::Skipped("one node with GPUs".into()));
    }
    for node in &nodes {
        label(&test_bed, node, json!(node)).await?;
    }
    let trial = overcommit::check_during(&test_bed, join_racks(&test_bed, &inventory, &nodes));
    let outcome = trial.await;
    for node in &nodes {
        label(&test_bed, node, Value::Null).await?;
    }
    outcome
}

async fn join_racks(
    test_bed: &TestBed,
    inventory: &GpuInventory,
    nodes: &[String],
) -> TrialOutcome {
    let of_node = |node: &String| {
        inventory.devices().filter(|((pool, _), _)| inventory.node_of(pool) == Some(node)).count()
    };
    let size = nodes.iter().map(of_node).max().unwrap_or_default() + 1;
    // One on each GPU.
    test_bed.create_template("most", DRIVER, json!({"memory": "1Gi", "cores": "60"})).await?;
    let names: Vec<String> = (0..size).map(|number| name_of("racked", number)).collect();
    for name in &names {
        let mut pod = of_group(from_template(name, "most"), "racked", size);
        pod["metadata"]["annotations"]["gpu.tessera.dev/pod-group-required-topology"] = json!(RACK);
        test_bed.create(pod).await?;
    }
    let text = format!("one value of the label `{RACK}`");
    placement::wait_event_text(test_bed, &names[0], &[&text]).await?;
    for node in nodes {
        label(test_bed, node, json!("joined")).await?;
    }
    for name in &names {
        test_bed.wait_running(name).await?;
    }
    test_bed.delete(&names.iter().map(String::as_str).collect::<Vec<_>>()).await?;
    Ok(Outcome::Passed(vec![]))
}

/// Sets the rack of a node.
async fn label(test_bed: &TestBed, node: &str, rack: Value) -> anyhow::Result<()> {
    let nodes: Api<Node> = Api::all(test_bed.client.clone());
    let labels = json!({"metadata": {"labels": {RACK: rack}}});
    nodes.patch(node, &PatchParams::default(), &Patch::Merge(labels)).await?;
    Ok(())
}

fn name_of(group: &str, number: usize) -> String {
    format!("{group}-{number}")
}

/// Returns the pod as one of a group of this size.
pub(super) fn of_group(mut pod: Value, group: &str, size: usize) -> Value {
    pod["metadata"]["annotations"] = json!({
        "gpu.tessera.dev/pod-group": group, "gpu.tessera.dev/pod-group-size": size.to_string(),
    });
    pod
}

fn is_member(pod: &Pod, group: &str) -> bool {
    (0..SIZE).any(|number| pod.name_any() == name_of(group, number))
}

/// Waits until all pods of one of these groups run, and returns its name.
async fn wait_group(test_bed: &TestBed, groups: &[&'static str]) -> anyhow::Result<&'static str> {
    let check = |pods: &[Pod]| {
        let running = |group: &str| {
            pods.iter().filter(|pod| is_member(pod, group) && phase(pod) == "Running").count()
        };
        let found = groups.iter().find(|group| running(group) == SIZE);
        found.map_or_else(
            || CheckResult::Pending(format!("not running: {groups:?}")),
            |group| CheckResult::Done(*group),
        )
    };
    wait_all(test_bed.pods(), "a group to run", check).await
}

async fn delete_group(test_bed: &TestBed, group: &str) -> anyhow::Result<()> {
    for number in 0..SIZE {
        test_bed.pods().delete(&name_of(group, number), &DeleteParams::default()).await?;
    }
    let check = |pods: &[Pod]| {
        let left = pods.iter().filter(|pod| is_member(pod, group)).count();
        CheckResult::done_if(left == 0, || format!("{left} pods left"))
    };
    wait_all(test_bed.pods(), "the group to be deleted", check).await
}

/// The claims that hold devices, by group. Two groups never hold devices at the same time.
struct HoldersByGroup {
    namespace: String,
    /// The group of each claim with devices.
    holders: BTreeMap<String, &'static str>,
}

impl ClaimSums for HoldersByGroup {
    fn update(&mut self, claim: &ResourceClaim) -> Result<(), String> {
        if claim.namespace().as_deref() != Some(&self.namespace) {
            return Ok(());
        }
        let owners = claim.owner_references();
        let is_of = |group: &&&str| owners.iter().any(|owner| owner.name.starts_with(**group));
        let group = GROUPS.iter().find(is_of);
        match group.filter(|_| device_results(claim).next().is_some()) {
            Some(group) => self.holders.insert(claim.name_any(), group),
            None => self.holders.remove(&claim.name_any()),
        };
        let groups: BTreeSet<&str> = self.holders.values().copied().collect();
        match groups.len() {
            0 | 1 => Ok(()),
            _ => Err(format!("both groups hold devices: {:?}", self.holders)),
        }
    }

    fn remove(&mut self, claim: &ResourceClaim) {
        if claim.namespace().as_deref() == Some(&self.namespace) {
            self.holders.remove(&claim.name_any());
        }
    }

    fn clear(&mut self) {
        self.holders.clear();
    }
}
