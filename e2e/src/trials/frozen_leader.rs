//! Trial with two controllers whose leader is frozen past its lease. The other takes over, and the
//! resumed one writes nothing.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::ResourceExt;
use serde_json::json;

use super::controller_deployment::{ControllerDeployment, container};
use super::test_bed::{A100, TestBed, phase, wait_all};
use super::{overcommit, placement};
use crate::harness::TrialOutcome;
use crate::leftovers::holds_device;
use crate::operations::Operations;
use crate::runner::Outcome;
use crate::wait::CheckResult;

/// More pods than the node's four GPUs. A controller with stale state would allocate to a pending
/// pod.
const PODS: usize = 6;

/// Number of GPUs besides the one that is allocated from the start.
const FIT: usize = 3;

pub(super) async fn check_takeover(test_bed: TestBed) -> TrialOutcome {
    let operations = test_bed.operations()?;
    test_bed.node_with("a100", 4).await?;
    let deployment = ControllerDeployment::new(&test_bed);
    let replicas = deployment
        .replicas()
        .await?
        .ok_or_else(|| anyhow::anyhow!("the controller is not a Deployment"))?;
    deployment.scale(2).await?;
    let outcome =
        overcommit::check_during(&test_bed, take_over(&test_bed, operations, &deployment)).await;
    deployment.scale(replicas).await?;
    outcome
}

async fn take_over(
    test_bed: &TestBed,
    operations: &Operations,
    deployment: &ControllerDeployment,
) -> TrialOutcome {
    test_bed.create_template("whole", A100, json!(null)).await?;
    test_bed.start_holder("before", "whole").await?;

    let old = deployment.wait_leader("a controller to lead", |_| true).await?;
    let frozen = FrozenController::freeze(operations, &old).await?;
    let new_leader = wait_new_leader(test_bed, deployment, &old).await;
    let claims = claims(test_bed).await;
    // Resume the process in every case. It has not observed the pods or the other controller's
    // allocations.
    frozen.thaw(operations).await?;
    let (new, claims) = (new_leader?, claims?);
    let ended = deployment.wait_restarted(&old.name_any(), frozen.restarts).await?;
    let last = ended.last_state.as_ref().and_then(|state| state.terminated.as_ref());
    anyhow::ensure!(
        last.is_some_and(|last| last.exit_code != 0 && last.signal.unwrap_or(0) == 0),
        "the old leader did not exit: {}",
        json!(last)
    );
    let now = self::claims(test_bed).await?;
    anyhow::ensure!(
        now == claims,
        "claims were written after the process resumed: {claims:?}, then {now:?}"
    );
    let leader = deployment.wait_leader("the new leader to lead", |_| true).await?;
    anyhow::ensure!(leader.name_any() == new.name_any(), "{} leads again", leader.name_any());

    // The new leader still works.
    test_bed.delete(&["before"]).await?;
    wait_running(test_bed, FIT + 1).await?;
    test_bed.delete(&names()).await?;
    Ok(Outcome::Passed(vec![]))
}

fn names() -> Vec<String> {
    (1..=PODS).map(|number| format!("pod-{number}")).collect()
}

/// Creates pods while no controller leads. Waits for the new leader, and checks that as many pods
/// run as fit.
async fn wait_new_leader(
    test_bed: &TestBed,
    deployment: &ControllerDeployment,
    old: &Pod,
) -> anyhow::Result<Pod> {
    for name in names() {
        test_bed.create_holder(&name, "whole").await?;
    }
    let new =
        deployment.wait_leader("another controller to lead", |name| name != old.name_any()).await?;
    wait_running(test_bed, FIT).await?;
    let pending = test_bed.pods().list(&Default::default()).await?;
    let pending = pending.iter().filter(|pod| phase(pod) == "Pending").map(ResourceExt::name_any);
    for pod in pending.collect::<Vec<_>>() {
        placement::wait_event_reason(test_bed, &pod, "InsufficientDevices").await?;
    }
    Ok(new)
}

/// Waits until that many of the new pods run.
async fn wait_running(test_bed: &TestBed, count: usize) -> anyhow::Result<()> {
    let names = names();
    let check = |pods: &[Pod]| {
        let running = pods
            .iter()
            .filter(|pod| names.contains(&pod.name_any()) && phase(pod) == "Running")
            .count();
        CheckResult::done_if(running == count, || format!("{running} pods"))
    };
    let what = format!("{count} pods to run");
    wait_all(test_bed.pods(), &what, check).await
}

/// Returns the resource versions of all claims, and whether each has a device.
async fn claims(test_bed: &TestBed) -> anyhow::Result<BTreeMap<String, (Option<String>, bool)>> {
    let claims = test_bed.claims().list(&Default::default()).await?;
    let version = |claim: &ResourceClaim| (claim.resource_version(), holds_device(claim));
    Ok(claims.iter().map(|claim| (claim.name_any(), version(claim))).collect())
}

/// A controller whose process is stopped.
struct FrozenController {
    node: String,
    container: String,
    restarts: i32,
}

impl FrozenController {
    async fn freeze(operations: &Operations, pod: &Pod) -> anyhow::Result<Self> {
        let status = container(pod);
        let id = status.and_then(|status| status.container_id.as_deref()).unwrap_or_default();
        let frozen = Self {
            node: placement::node_name(pod).unwrap_or_default().to_owned(),
            container: id.trim_start_matches("containerd://").to_owned(),
            restarts: status.map_or(0, |status| status.restart_count),
        };
        operations.run(&["freeze", &frozen.node, &frozen.container]).await?;
        Ok(frozen)
    }

    async fn thaw(&self, operations: &Operations) -> anyhow::Result<()> {
        operations.run(&["thaw", &self.node, &self.container]).await.map(drop)
    }
}
