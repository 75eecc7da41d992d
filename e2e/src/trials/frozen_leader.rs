//! Two controllers, and the leader frozen past its lease: the other takes over, and the one that
//! thaws writes nothing more.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::ResourceExt;
use serde_json::json;

use super::bench::{Bench, PATIENCE, phase};
use super::controller_deployment::{ControllerDeployment, container};
use super::{overcommit, placement};
use crate::harness::TrialOutcome;
use crate::leftovers::holds_device;
use crate::operations::Operations;
use crate::runner::Outcome;
use crate::wait::{self, Verdict};

/// More pods than the four GPUs of the node, so that whoever believes one to be free has a pod to
/// give it to.
const PODS: usize = 6;

/// As many as there are GPUs beside the one that is taken from the beginning.
const FIT: usize = 3;

pub(super) async fn replaced(bench: Bench) -> TrialOutcome {
    let hands = bench.hands()?;
    bench.node_with("a100", 4).await?;
    let deployment = ControllerDeployment::of(&bench);
    let replicas = deployment
        .replicas()
        .await?
        .ok_or_else(|| anyhow::anyhow!("the controller is no Deployment"))?;
    deployment.scale(2).await?;
    let outcome = overcommit::never_during(&bench, taken_over(&bench, hands, &deployment)).await;
    deployment.scale(replicas).await?;
    outcome
}

async fn taken_over(
    bench: &Bench,
    hands: &Operations,
    deployment: &ControllerDeployment,
) -> TrialOutcome {
    bench.template("whole", "a100.gpu.tessera.dev", json!(null)).await?;
    bench.holder("before", "whole").await?;
    bench.holds("before").await?;

    let old = deployment.leader("a controller to lead", |_| true).await?;
    let frozen = Frozen::freeze(hands, &old).await?;
    let later = later(bench, deployment, &old).await;
    let claims = claims(bench).await;
    // Whatever was seen, the process goes on. It has not seen anything of the pods yet, nor that
    // others have the GPUs.
    frozen.thaw(hands).await?;
    let (new, claims) = (later?, claims?);
    let ended = deployment.restarted(&old.name_any(), frozen.restarts).await?;
    let last = ended.last_state.as_ref().and_then(|state| state.terminated.as_ref());
    anyhow::ensure!(
        last.is_some_and(|last| last.exit_code != 0 && last.signal.unwrap_or(0) == 0),
        "the old leader did not end by itself: {}",
        json!(last)
    );
    let now = self::claims(bench).await?;
    anyhow::ensure!(now == claims, "claims were written after the thaw: {claims:?}, then {now:?}");
    let leader = deployment.leader("the new leader to lead", |_| true).await?;
    anyhow::ensure!(leader.name_any() == new.name_any(), "{} leads again", leader.name_any());

    // The new one has not lost track.
    bench.delete(&["before".to_owned()]).await?;
    running(bench, FIT + 1).await?;
    bench.delete(&names()).await?;
    Ok(Outcome::Held(vec![]))
}

fn names() -> Vec<String> {
    (1..=PODS).map(|number| format!("pod-{number}")).collect()
}

/// Pods come while nobody leads; somebody else leads; as many of them run as fit.
async fn later(bench: &Bench, deployment: &ControllerDeployment, old: &Pod) -> anyhow::Result<Pod> {
    for name in names() {
        bench.holder(&name, "whole").await?;
    }
    let new =
        deployment.leader("another controller to lead", |name| name != old.name_any()).await?;
    running(bench, FIT).await?;
    let waiting = bench.pods().list(&Default::default()).await?;
    let waiting = waiting.iter().filter(|pod| phase(pod) == "Pending").map(ResourceExt::name_any);
    for pod in waiting.collect::<Vec<_>>() {
        placement::told(bench, &pod, "InsufficientDevices").await?;
    }
    Ok(new)
}

/// Waits until that many of the pods that came later run.
async fn running(bench: &Bench, count: usize) -> anyhow::Result<()> {
    let names = names();
    let judge = |pods: &[Pod]| {
        let running = pods
            .iter()
            .filter(|pod| names.contains(&pod.name_any()) && phase(pod) == "Running")
            .count();
        if running == count { Verdict::Done(()) } else { Verdict::NotYet(format!("{running} run")) }
    };
    let what = format!("{count} pods to run");
    Ok(wait::until(bench.pods(), Default::default(), &what, PATIENCE, judge).await?)
}

/// The versions of all claims, and whether they hold a device.
async fn claims(bench: &Bench) -> anyhow::Result<BTreeMap<String, (Option<String>, bool)>> {
    let claims = bench.claims().list(&Default::default()).await?;
    let version = |claim: &ResourceClaim| (claim.resource_version(), holds_device(claim));
    Ok(claims.iter().map(|claim| (claim.name_any(), version(claim))).collect())
}

/// A controller whose process is stopped.
struct Frozen {
    node: String,
    container: String,
    restarts: i32,
}

impl Frozen {
    async fn freeze(hands: &Operations, pod: &Pod) -> anyhow::Result<Self> {
        let status = container(pod);
        let id = status.and_then(|status| status.container_id.as_deref()).unwrap_or_default();
        let frozen = Self {
            node: placement::node_name(pod).unwrap_or_default().to_owned(),
            container: id.trim_start_matches("containerd://").to_owned(),
            restarts: status.map_or(0, |status| status.restart_count),
        };
        hands.run(&["freeze", &frozen.node, &frozen.container]).await?;
        Ok(frozen)
    }

    async fn thaw(&self, hands: &Operations) -> anyhow::Result<()> {
        Ok(hands.run(&["thaw", &self.node, &self.container]).await.map(drop)?)
    }
}
