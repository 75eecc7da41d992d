//! Trials of preemption for devices: all GPUs of a node are full of pods of low priority. One is
//! evicted for a pod of high priority, and not the one that a PodDisruptionBudget guards. If they
//! are a group, all are evicted. For a group of high priority, as many are as it needs.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::api::{DeleteParams, PostParams};
use kube::{Api, ResourceExt};
use serde_json::{Value, json};
use tessera_api::events;

use super::groups::of_group;
use super::preemption::{
    IMPORTANT, PATIENT, UNIMPORTANT, is_ending, of_class, with_priority_classes,
};
use super::refused_node::on_node;
use super::test_bed::{TestBed, from_template, holder, one_gpu, phase, wait_all, wait_deleted};
use super::{overcommit, placement};
use crate::harness::TrialOutcome;
use crate::inventory::DRIVER;
use crate::runner::Outcome;
use crate::wait::CheckResult;

/// Most of the memory of one GPU.
const MEMORY: &str = "50Gi";

pub(super) async fn evicts_unimportant(test_bed: TestBed) -> TrialOutcome {
    let trial = overcommit::check_during(&test_bed, preempt(&test_bed));
    with_priority_classes(&test_bed, trial).await
}

async fn preempt(test_bed: &TestBed) -> TrialOutcome {
    let full = FullNode::fill(test_bed).await?;
    let budgets: Api<PodDisruptionBudget> =
        Api::namespaced(test_bed.client.clone(), test_bed.namespace());
    // The youngest is the first choice.
    let guarded = full.pods.last().cloned().unwrap_or_default();
    let budget = json!({
        "metadata": {"name": "guarded"},
        "spec": {"minAvailable": 1, "selector": {"matchLabels": {"e2e.tessera.dev/pod": guarded}}},
    });
    budgets.create(&PostParams::default(), &serde_json::from_value(budget)?).await?;
    let urgent = full.important("urgent", "large");
    check_simulated(test_bed, &urgent, 1).await?;
    let started = tokio::time::Instant::now();
    test_bed.create(urgent).await?;
    // It would fit as soon as a victim has ended.
    test_bed.create(ends_slowly(full.unimportant("late"))).await?;
    test_bed.wait_running("urgent").await?;
    println!("    the pod runs after {:.1} s", started.elapsed().as_secs_f64());
    let left = full.left(test_bed).await?;
    anyhow::ensure!(left.contains(&guarded), "{guarded} was evicted against its budget");
    anyhow::ensure!(left.len() + 1 == full.pods.len(), "{left:?} of {:?}", full.pods);
    let evicted = full.pods.iter().find(|pod| !left.contains(*pod)).cloned().unwrap_or_default();
    placement::wait_event_reason(test_bed, &evicted, events::PREEMPTED.name()).await?;
    let late = test_bed.pods().get("late").await?;
    anyhow::ensure!(late.spec.and_then(|spec| spec.node_name).is_none(), "`late` took the room");
    budgets.delete("guarded", &DeleteParams::default()).await?;
    test_bed.delete(&["urgent"]).await?;
    test_bed.wait_running("late").await?;
    delete_preemptor(test_bed, &full, "late").await?;
    test_bed.delete(&["next"]).await?;
    evict_sharers(test_bed, &full).await?;
    full.delete(test_bed).await?;
    Ok(Outcome::Passed(vec![]))
}

/// Checks for how many victims the plugin makes room for a pod: it knows value and policy of the
/// pod's class.
async fn check_simulated(test_bed: &TestBed, pod: &Value, victims: usize) -> anyhow::Result<()> {
    let mut pod = pod.clone();
    pod["apiVersion"] = json!("v1");
    pod["kind"] = json!("Pod");
    let command = ["simulate", "--preempt", "-f", "-", "-n", test_bed.namespace()];
    let result = test_bed.plugin()?.call(&command, &pod.to_string()).await?.result;
    let found = result["pods"][0]["preemption"]["victims"].as_array().map_or(0, Vec::len);
    anyhow::ensure!(found == victims, "{found} instead of {victims} victims: {result}");
    Ok(())
}

/// The pod that another is evicted for is deleted while its victim ends: the capacity is free for
/// the next pod, and no other pod is evicted.
async fn delete_preemptor(test_bed: &TestBed, full: &FullNode, victim: &str) -> anyhow::Result<()> {
    let left = full.left(test_bed).await?;
    test_bed.create(full.important("cancelled", "large")).await?;
    let ends = |pods: &[Pod]| {
        let is_victim = |pod: &Pod| is_ending(pod) && pod.name_any() == victim;
        CheckResult::done_if(pods.iter().any(is_victim), || "not evicted".into())
    };
    wait_all(test_bed.pods(), &format!("{victim} to be evicted"), ends).await?;
    test_bed.delete(&["cancelled"]).await?;
    let is_left = test_bed.pods().get_opt(victim).await?.as_ref().is_some_and(is_ending);
    anyhow::ensure!(is_left, "{victim} ended before its preemptor");
    test_bed.create(full.unimportant("next")).await?;
    test_bed.wait_running("next").await?;
    let after = full.left(test_bed).await?;
    anyhow::ensure!(after == left, "{after:?} of {left:?} are left");
    Ok(())
}

/// A GPU is free only if both pods that share its claim are evicted. They end without a grace
/// period. For a pod that never preempts they are not evicted.
async fn evict_sharers(test_bed: &TestBed, full: &FullNode) -> anyhow::Result<()> {
    let devices = one_gpu(DRIVER, &json!({"memory": MEMORY}));
    let claim = json!({"metadata": {"name": "shared"}, "spec": {"devices": devices}});
    test_bed.create_claim(claim).await?;
    let mut sharers = Vec::new();
    for name in ["sharer-0", "sharer-1"] {
        let claim = json!({"name": "gpu", "resourceClaimName": "shared"});
        let mut pod = on_node(holder(name, claim), &full.node);
        pod["spec"]["terminationGracePeriodSeconds"] = json!(0);
        test_bed.create(pod).await?;
        sharers.push(test_bed.wait_running(name).await?);
    }
    let patient = of_class(on_node(from_template("patient", "large"), &full.node), PATIENT);
    check_simulated(test_bed, &patient, 0).await?;
    test_bed.create(patient).await?;
    let reason = events::INSUFFICIENT_DEVICES.name();
    placement::wait_event_reason(test_bed, "patient", reason).await?;
    test_bed.delete(&["patient"]).await?;
    for sharer in &sharers {
        test_bed.check_undisturbed(sharer).await?;
    }
    // Above the sharers, and not above the other pods of the node.
    test_bed.create(full.unimportant("rises")).await?;
    test_bed.wait_running("rises").await?;
    for sharer in &sharers {
        wait_deleted(test_bed.pods(), &sharer.name_any()).await?;
    }
    test_bed.delete(&["rises"]).await?;
    placement::delete_claim(test_bed, "shared").await
}

/// Returns the pod, which takes 20 seconds to end.
fn ends_slowly(mut pod: Value) -> Value {
    pod["spec"]["terminationGracePeriodSeconds"] = json!(40);
    pod["spec"]["containers"][0]["lifecycle"] = json!({"preStop": {"sleep": {"seconds": 20}}});
    pod
}

pub(super) async fn evicts_whole_group(test_bed: TestBed) -> TrialOutcome {
    let trials = async {
        preempt_group(&test_bed).await?;
        preempt_for_group(&test_bed).await
    };
    with_priority_classes(&test_bed, overcommit::check_during(&test_bed, trials)).await
}

async fn preempt_group(test_bed: &TestBed) -> TrialOutcome {
    let full = FullNode::empty(test_bed).await?;
    for name in &full.pods {
        let pod = of_group(full.unimportant(name), "train", full.pods.len());
        test_bed.create(pod).await?;
    }
    for name in &full.pods {
        test_bed.wait_running(name).await?;
    }
    // The GPU of one of them would be enough.
    test_bed.create(full.important("urgent", "large")).await?;
    test_bed.wait_running("urgent").await?;
    for name in &full.pods {
        wait_deleted(test_bed.pods(), name).await?;
    }
    test_bed.delete(&["urgent"]).await?;
    Ok(Outcome::Passed(vec![]))
}

async fn preempt_for_group(test_bed: &TestBed) -> TrialOutcome {
    let full = FullNode::of_existing_template(test_bed).await?;
    full.refill(test_bed).await?;
    let group = ["team-0", "team-1"];
    let started = tokio::time::Instant::now();
    for name in group {
        test_bed.create(of_group(full.important(name, "large"), "team", group.len())).await?;
    }
    for name in group {
        test_bed.wait_running(name).await?;
    }
    println!("    the group runs after {:.1} s", started.elapsed().as_secs_f64());
    let left = full.left(test_bed).await?;
    anyhow::ensure!(left.len() + group.len() == full.pods.len(), "{left:?} of {:?}", full.pods);
    placement::wait_event_reason(test_bed, group[1], events::PREEMPTING.name()).await?;
    test_bed.delete(&group).await?;
    full.delete(test_bed).await?;
    Ok(Outcome::Passed(vec![]))
}

/// A node each of whose GPUs is used by a pod of low priority.
pub(super) struct FullNode {
    node: String,
    pods: Vec<String>,
}

impl FullNode {
    /// Starts the pods, one after another.
    pub(super) async fn fill(test_bed: &TestBed) -> anyhow::Result<Self> {
        let full = Self::empty(test_bed).await?;
        full.refill(test_bed).await?;
        Ok(full)
    }

    /// Returns the node with the names of the pods, which do not exist yet.
    async fn empty(test_bed: &TestBed) -> anyhow::Result<Self> {
        test_bed.create_template("large", DRIVER, json!({"memory": MEMORY})).await?;
        Self::of_existing_template(test_bed).await
    }

    async fn of_existing_template(test_bed: &TestBed) -> anyhow::Result<Self> {
        let node = test_bed.node_with("h100", 2).await?;
        let inventory = test_bed.published_gpus().await?;
        let gpus = inventory.of_pool(&node).count();
        let pods = (0..gpus).map(|number| format!("low-{number}")).collect();
        Ok(Self { node, pods })
    }

    /// Starts the pods that do not run, one after another.
    pub(super) async fn refill(&self, test_bed: &TestBed) -> anyhow::Result<()> {
        let left = self.left(test_bed).await?;
        for name in self.pods.iter().filter(|pod| !left.contains(*pod)) {
            wait_deleted(test_bed.pods(), name).await?;
            test_bed.create(self.unimportant(name)).await?;
            test_bed.wait_running(name).await?;
        }
        Ok(())
    }

    /// Returns a pod of high priority for this node.
    pub(super) fn important(&self, name: &str, template: &str) -> Value {
        of_class(on_node(from_template(name, template), &self.node), IMPORTANT)
    }

    fn unimportant(&self, name: &str) -> Value {
        let mut pod = of_class(on_node(from_template(name, "large"), &self.node), UNIMPORTANT);
        pod["metadata"]["labels"] = json!({"e2e.tessera.dev/pod": name});
        pod
    }

    /// Returns the pods that are not evicted.
    pub(super) async fn left(&self, test_bed: &TestBed) -> anyhow::Result<BTreeSet<String>> {
        let pods = test_bed.pods().list(&Default::default()).await?;
        let is_left = |pod: &&Pod| {
            !is_ending(pod) && phase(pod) == "Running" && self.pods.contains(&pod.name_any())
        };
        Ok(pods.iter().filter(is_left).map(ResourceExt::name_any).collect())
    }

    /// Deletes the pods that are left, and waits until all have ended.
    pub(super) async fn delete(&self, test_bed: &TestBed) -> anyhow::Result<()> {
        for pod in self.left(test_bed).await? {
            test_bed.delete(&[&pod]).await?;
        }
        let check = |pods: &[Pod]| {
            let left = pods.iter().any(|pod| self.pods.contains(&pod.name_any()));
            CheckResult::done_if(!left, || "pods left".into())
        };
        wait_all(test_bed.pods(), "the pods to be deleted", check).await
    }
}
