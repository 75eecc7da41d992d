//! Trial of preemption: the pod's claim is on a node where a pod of lower priority blocks it.
//! kube-scheduler evicts that pod, and the claim stays allocated.

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::ResourceClaim;
use k8s_openapi::api::scheduling::v1::PriorityClass;
use kube::Api;
use kube::api::{DeleteParams, PostParams};
use serde_json::{Value, json};

use super::refused_node::{create_packed_template, run_first, with_port};
use super::test_bed::{TestBed, from_template, wait_all};
use super::{overcommit, placement};
use crate::harness::TrialOutcome;
use crate::leftovers::holds_device;
use crate::runner::Outcome;
use crate::wait::CheckResult;

/// PriorityClasses of trials.
pub(super) const UNIMPORTANT: &str = "e2e-unimportant";
pub(super) const IMPORTANT: &str = "e2e-important";
/// Its pods have others evicted for them never.
pub(super) const PATIENT: &str = "e2e-patient";
const CLASSES: [(&str, i32, &str); 3] = [
    (UNIMPORTANT, 10, "PreemptLowerPriority"),
    (IMPORTANT, 1000, "PreemptLowerPriority"),
    (PATIENT, 1000, "Never"),
];

pub(super) async fn keeps_allocation(test_bed: TestBed) -> TrialOutcome {
    let trial = overcommit::check_during(&test_bed, preempt(&test_bed));
    with_priority_classes(&test_bed, trial).await
}

/// Runs a part of a trial while the PriorityClasses exist.
pub(super) async fn with_priority_classes(
    test_bed: &TestBed,
    trial: impl Future<Output = TrialOutcome>,
) -> TrialOutcome {
    let classes: Api<PriorityClass> = Api::all(test_bed.client.clone());
    for (name, value, policy) in CLASSES {
        let class = json!({"metadata": {"name": name}, "value": value, "preemptionPolicy": policy});
        match classes.create(&PostParams::default(), &serde_json::from_value(class)?).await {
            Ok(_) => {}
            // Left by an interrupted run.
            Err(kube::Error::Api(status)) if status.is_already_exists() => {}
            Err(error) => return Err(error.into()),
        }
    }
    let outcome = trial.await;
    for (name, ..) in CLASSES {
        classes.delete(name, &DeleteParams::default()).await?;
    }
    outcome
}

/// Returns the pod with this PriorityClass.
pub(super) fn of_class(mut pod: Value, class: &str) -> Value {
    pod["spec"]["priorityClassName"] = class.into();
    pod
}

async fn preempt(test_bed: &TestBed) -> TrialOutcome {
    create_packed_template(test_bed, "share").await?;
    let victim = of_class(with_port(from_template("victim", "share")), UNIMPORTANT);
    let node = run_first(test_bed, victim).await?;
    tokio::select! {
        moved = fail_if_moved(test_bed, "important", &node) => { moved?; }
        placed = async {
            test_bed.create(of_class(with_port(from_template("important", "share")), IMPORTANT)).await?;
            placement::check_colocated(test_bed, "important", "important").await
        } => { placed?; }
    }
    let victim = test_bed.pods().get_opt("victim").await?;
    let evicted = victim.as_ref().is_none_or(is_ending);
    anyhow::ensure!(
        evicted,
        "pod `victim` was not evicted: {}",
        json!(victim.map(|victim| victim.status))
    );
    test_bed.delete(&["important"]).await?;
    Ok(Outcome::Passed(vec![]))
}

/// Returns true if the pod is being deleted, as one that is evicted.
pub(super) fn is_ending(pod: &Pod) -> bool {
    pod.metadata.deletion_timestamp.is_some()
}

/// Returns an error when the pod's claim is allocated on another node, where there is capacity for
/// it.
async fn fail_if_moved(test_bed: &TestBed, pod: &str, node: &str) -> anyhow::Result<()> {
    let check = |claims: &[ResourceClaim]| {
        let elsewhere = claims.iter().find(|claim| {
            placement::belongs_to(claim, pod)
                && holds_device(claim)
                && placement::node_of(claim) != Some(node)
        });
        match elsewhere {
            Some(claim) => CheckResult::<()>::Impossible(json!(claim.status).to_string()),
            None => CheckResult::Pending("not allocated on another node".into()),
        }
    };
    let what = format!("the claim of {pod} to stay on {node}");
    wait_all(test_bed.claims(), &what, check).await
}
