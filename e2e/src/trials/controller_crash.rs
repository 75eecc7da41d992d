//! The controller killed at each point between its writes: the next one finds what it needs, and
//! nothing leaks.

use std::collections::BTreeSet;

use axum::http::Request;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use kube::api::{DeleteParams, PostParams};
use serde_json::{Value, json};

use super::bench::{Bench, from_template, holder};
use super::controller_deployment::{ControllerDeployment, container};
use super::deleted_early::{own_claim, unbound};
use super::{overcommit, placement};
use crate::harness::TrialOutcome;
use crate::inventory::DRIVER;
use crate::runner::Outcome;

/// A build with fault points (`e2e/cluster/images.sh`).
const IMAGE: &str = "tessera/controller:fault-points";

/// Exit codes above this one are those of a process that a signal ended. Which signal: process 1 of
/// a container cannot kill itself with SIGKILL, so a fault point ends it in another way as abrupt.
const SIGNALLED: i32 = 128;

/// What it passes on the way to an allocation, and on the way back.
const ALLOCATING: [&str; 3] = ["allocation-decided", "finalizer-written", "allocation-written"];
const RELEASING: [&str; 2] = ["release-decided", "release-written"];

pub(super) async fn killed(bench: Bench) -> TrialOutcome {
    let deployment = ControllerDeployment::of(&bench);
    let ships = deployment.set_image(IMAGE).await?;
    let outcome = overcommit::never_during(&bench, at_each_point(&bench, &deployment)).await;
    deployment.set_image(&ships).await?;
    outcome
}

async fn at_each_point(bench: &Bench, deployment: &ControllerDeployment) -> TrialOutcome {
    bench.template("share", DRIVER, json!({"memory": "10Gi", "cores": "10"})).await?;
    let pod = deployment.leader("the build with fault points to lead", |_| true).await?;
    let mut controller = Controller::of(bench, deployment, &pod);
    controller.expect_points(&[&ALLOCATING[..], &RELEASING].concat()).await?;
    for point in ALLOCATING {
        gets_its_claim(bench, &mut controller, point).await?;
        goes_meanwhile(bench, &mut controller, point).await?;
    }
    for point in RELEASING {
        is_released(bench, &mut controller, point).await?;
    }
    Ok(Outcome::Held(vec![]))
}

/// The pod for which the controller was at work gets its claim from the next one.
async fn gets_its_claim(
    bench: &Bench,
    controller: &mut Controller<'_>,
    point: &str,
) -> anyhow::Result<()> {
    let pod = format!("stays-{point}");
    controller.arm(point).await?;
    bench.create(from_template(&pod, "share")).await?;
    controller.killed(point).await?;
    placement::together(bench, &pod, &pod).await?;
    bench.delete(std::slice::from_ref(&pod)).await?;
    placement::unallocated(bench, &pod).await
}

/// The pod for which the controller was at work is gone when the next one begins, and nobody had
/// reserved the claim.
async fn goes_meanwhile(
    bench: &Bench,
    controller: &mut Controller<'_>,
    point: &str,
) -> anyhow::Result<()> {
    let pod = format!("goes-{point}");
    controller.arm(point).await?;
    own(bench, &pod).await?;
    controller.killed(point).await?;
    bench.pods().delete(&pod, &DeleteParams::default()).await?;
    free_and_deletable(bench, &pod).await
}

/// The claim from which the controller was about to take, or had just taken, an allocation that
/// nobody uses.
async fn is_released(
    bench: &Bench,
    controller: &mut Controller<'_>,
    point: &str,
) -> anyhow::Result<()> {
    let pod = format!("leaves-{point}");
    own(bench, &pod).await?;
    placement::allocated(bench, &pod, "allocated", |_| true).await?;
    controller.arm(point).await?;
    bench.pods().delete(&pod, &DeleteParams::default()).await?;
    controller.killed(point).await?;
    free_and_deletable(bench, &pod).await
}

/// A pod that nobody binds, with a claim of the user's own of the same name.
async fn own(bench: &Bench, name: &str) -> anyhow::Result<()> {
    bench
        .claims()
        .create(&PostParams::default(), &serde_json::from_value(own_claim(name))?)
        .await?;
    let pod = unbound(holder(name, json!({"name": "gpu", "resourceClaimName": name})));
    bench.create(pod).await.map(drop)
}

/// The claim is nobody's, serves the next pod, and then goes without a finalizer that holds it.
async fn free_and_deletable(bench: &Bench, claim: &str) -> anyhow::Result<()> {
    placement::unallocated(bench, claim).await?;
    bench.create(holder("next", json!({"name": "gpu", "resourceClaimName": claim}))).await?;
    placement::together(bench, "next", claim).await?;
    bench.delete(&["next".to_owned()]).await?;
    placement::delete_claim(bench, claim).await
}

/// The leading controller, and how often its container has been started again.
struct Controller<'a> {
    bench: &'a Bench,
    deployment: &'a ControllerDeployment,
    pod: String,
    port: i32,
    restarts: i32,
}

impl<'a> Controller<'a> {
    fn of(bench: &'a Bench, deployment: &'a ControllerDeployment, pod: &Pod) -> Self {
        let container_ports = pod
            .spec
            .iter()
            .flat_map(|spec| &spec.containers)
            .flat_map(|c| c.ports.iter().flatten());
        Self {
            bench,
            deployment,
            pod: pod.name_any(),
            port: container_ports.map(|port| port.container_port).next().unwrap_or_default(),
            restarts: container(pod).map_or(0, |status| status.restart_count),
        }
    }

    /// Asks its fault points, by the API server's way to pods.
    async fn ask(&self, method: &str, path: &str) -> anyhow::Result<Value> {
        let namespace = super::controller_deployment::NAMESPACE;
        let path =
            format!("/api/v1/namespaces/{namespace}/pods/{}:{}/proxy/{path}", self.pod, self.port);
        let request = Request::builder().method(method).uri(path).body(Vec::new())?;
        Ok(self.bench.client.request(request).await?)
    }

    async fn expect_points(&self, tried: &[&str]) -> anyhow::Result<()> {
        let points = self.ask("GET", "fault-points").await?;
        let declared: BTreeSet<&str> =
            points.as_object().into_iter().flatten().map(|(name, _)| name.as_str()).collect();
        let tried: BTreeSet<&str> = tried.iter().copied().collect();
        anyhow::ensure!(
            declared == tried,
            "the controller has the points {declared:?}, tried are {tried:?}"
        );
        Ok(())
    }

    async fn arm(&self, point: &str) -> anyhow::Result<()> {
        self.ask("PUT", &format!("fault-points/{point}/kill")).await.map(drop)
    }

    /// Waits until it has been killed and is there again.
    async fn killed(&mut self, point: &str) -> anyhow::Result<()> {
        let status = self.deployment.restarted(&self.pod, self.restarts).await?;
        self.restarts = status.restart_count;
        let last = status.last_state.and_then(|state| state.terminated);
        anyhow::ensure!(
            last.as_ref().is_some_and(|last| last.exit_code > SIGNALLED),
            "at {point} the controller ended differently: {}",
            json!(last)
        );
        Ok(())
    }
}
