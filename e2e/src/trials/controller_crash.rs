//! Trial that kills the controller at each fault point between its writes. The next instance
//! continues, and no allocation or finalizer leaks.

use std::collections::BTreeSet;

use axum::http::Request;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use kube::api::DeleteParams;
use serde_json::{Value, json};

use super::controller_deployment::{ControllerDeployment, container};
use super::deleted_early::{unbound, user_claim};
use super::gpu_preemption::FullNode;
use super::groups;
use super::preemption::with_priority_classes;
use super::resize;
use super::test_bed::{TestBed, from_template, holder, one_gpu};
use super::{defragmentation, gpu_drain, overcommit, placement};
use crate::harness::TrialOutcome;
use crate::inventory::DRIVER;
use crate::runner::Outcome;

/// Image of a build with fault points (`e2e/cluster/images.sh`).
const IMAGE: &str = "tessera/controller:fault-points";

/// Exit codes above this one mean that a signal ended the process. The signal varies: process 1 of
/// a container cannot send itself SIGKILL, so a fault point uses another one.
const SIGNAL_EXIT_BASE: i32 = 128;

/// Fault points of an allocation, and of a release.
const ALLOCATING: [&str; 3] = ["allocation-decided", "finalizer-written", "allocation-written"];
const RELEASING: [&str; 2] = ["release-decided", "release-written"];

/// Fault points of the barrier of a group.
const CONCLUDING: [&str; 2] = ["barrier-decided", "barrier-written"];

/// Fault points of a change of a share.
const RESIZING: [&str; 2] = ["resize-decided", "resize-written"];

/// Fault points of a preemption.
const PREEMPTING: [&str; 2] = ["evictions-decided", "eviction-written"];

pub(super) async fn killed(test_bed: TestBed) -> TrialOutcome {
    let deployment = ControllerDeployment::new(&test_bed);
    let shipped = deployment.set_image(IMAGE).await?;
    let trial = overcommit::check_during(&test_bed, at_each_point(&test_bed, &deployment));
    let outcome = with_priority_classes(&test_bed, trial).await;
    deployment.set_image(&shipped).await?;
    outcome
}

async fn at_each_point(test_bed: &TestBed, deployment: &ControllerDeployment) -> TrialOutcome {
    test_bed.create_template("share", DRIVER, json!({"memory": "10Gi", "cores": "10"})).await?;
    let pod = deployment.wait_leader("the build with fault points to lead", |_| true).await?;
    let mut controller = Controller::new(test_bed, deployment, &pod);
    controller
        .expect_points(&[&ALLOCATING[..], &RELEASING, &CONCLUDING, &RESIZING, &PREEMPTING].concat())
        .await?;
    for point in ALLOCATING {
        allocates_after_crash(test_bed, &mut controller, point).await?;
        releases_for_deleted_pod(test_bed, &mut controller, point).await?;
    }
    for point in RELEASING {
        completes_release(test_bed, &mut controller, point).await?;
    }
    for point in CONCLUDING {
        runs_group_after_crash(test_bed, &mut controller, point).await?;
    }
    for point in RESIZING {
        resizes_after_crash(test_bed, &mut controller, point).await?;
    }
    test_bed.create_template_with("two", two_gpus()).await?;
    let full = FullNode::fill(test_bed).await?;
    for point in PREEMPTING {
        preempts_after_crash(test_bed, &mut controller, &full, point).await?;
        full.refill(test_bed).await?;
    }
    full.delete(test_bed).await?;
    // On 1.36 no GPU can be drained.
    if test_bed.has_taint_rules().await? {
        moves_despite_crashes(test_bed, &mut controller).await?;
    }
    Ok(Outcome::Passed(vec![]))
}

/// The controller is killed while it allocates for pods that a drain and a defragmentation have
/// moved.
async fn moves_despite_crashes(
    test_bed: &TestBed,
    controller: &mut Controller<'_>,
) -> anyhow::Result<()> {
    for point in ["allocation-decided", "allocation-written"] {
        drains_despite_crash(test_bed, controller, point).await?;
    }
    let point = "allocation-written";
    defragmentation::defragment(test_bed, async || controller.arm(point).await).await?;
    controller.wait_killed(point).await
}

/// The controller is killed while it allocates for a pod: the next instance allocates the pod's
/// claim.
async fn allocates_after_crash(
    test_bed: &TestBed,
    controller: &mut Controller<'_>,
    point: &str,
) -> anyhow::Result<()> {
    let pod = format!("stays-{point}");
    controller.arm(point).await?;
    test_bed.create(from_template(&pod, "share")).await?;
    controller.wait_killed(point).await?;
    placement::check_colocated(test_bed, &pod, &pod).await?;
    test_bed.delete(&[&pod]).await?;
    placement::wait_unallocated(test_bed, &pod).await
}

/// The pod is deleted while no controller runs. The next instance releases the claim, which was
/// never reserved.
async fn releases_for_deleted_pod(
    test_bed: &TestBed,
    controller: &mut Controller<'_>,
    point: &str,
) -> anyhow::Result<()> {
    let pod = format!("deleted-{point}");
    controller.arm(point).await?;
    create_unbound(test_bed, &pod).await?;
    controller.wait_killed(point).await?;
    test_bed.pods().delete(&pod, &DeleteParams::default()).await?;
    check_reusable_and_deletable(test_bed, &pod).await
}

/// The controller is killed while it releases an unused allocation. The next instance completes the
/// release.
async fn completes_release(
    test_bed: &TestBed,
    controller: &mut Controller<'_>,
    point: &str,
) -> anyhow::Result<()> {
    let pod = format!("released-{point}");
    create_unbound(test_bed, &pod).await?;
    placement::wait_allocated(test_bed, &pod, "allocated", |_| true).await?;
    controller.arm(point).await?;
    test_bed.pods().delete(&pod, &DeleteParams::default()).await?;
    controller.wait_killed(point).await?;
    check_reusable_and_deletable(test_bed, &pod).await
}

/// The controller is killed while it changes the size of a share. The next instance completes it.
async fn resizes_after_crash(
    test_bed: &TestBed,
    controller: &mut Controller<'_>,
    point: &str,
) -> anyhow::Result<()> {
    let pod = format!("resized-{point}");
    let running = test_bed.start_holder(&pod, "share").await?;
    let claim = test_bed.claim_of(&running).await?.name_any();
    controller.arm(point).await?;
    resize::request(test_bed, &claim, json!({"memory": "12Gi"})).await?;
    controller.wait_killed(point).await?;
    resize::wait_counted(test_bed, &claim, "12Gi").await?;
    test_bed.check_undisturbed(&running).await?;
    test_bed.delete(&[&pod]).await
}

/// The controller is killed while it opens the barrier of a group. The next instance opens the rest
/// of it, and all pods of the group run.
async fn runs_group_after_crash(
    test_bed: &TestBed,
    controller: &mut Controller<'_>,
    point: &str,
) -> anyhow::Result<()> {
    let pods: Vec<String> = (0..3).map(|number| format!("group-{number}-{point}")).collect();
    controller.arm(point).await?;
    for pod in &pods {
        let pod = from_template(pod, "share");
        test_bed.create(groups::of_group(pod, point, pods.len())).await?;
    }
    controller.wait_killed(point).await?;
    for pod in &pods {
        placement::check_colocated(test_bed, pod, pod).await?;
    }
    test_bed.delete(&pods).await
}

/// The controller is killed while it evicts two pods for another one. The next instance evicts no
/// others, and the pod gets their devices.
async fn preempts_after_crash(
    test_bed: &TestBed,
    controller: &mut Controller<'_>,
    full: &FullNode,
    point: &str,
) -> anyhow::Result<()> {
    let pod = format!("urgent-{point}");
    let before = full.left(test_bed).await?.len();
    controller.arm(point).await?;
    test_bed.create(full.important(&pod, "two")).await?;
    controller.wait_killed(point).await?;
    test_bed.wait_running(&pod).await?;
    let left = full.left(test_bed).await?;
    anyhow::ensure!(left.len() + 2 == before, "{left:?} of {before} are left after {point}");
    test_bed.delete(&[&pod]).await
}

/// The controller is killed while it allocates for the first pod that a drain of a GPU has moved.
/// The drain continues with the next instance.
async fn drains_despite_crash(
    test_bed: &TestBed,
    controller: &mut Controller<'_>,
    point: &str,
) -> anyhow::Result<()> {
    gpu_drain::with_full_gpu(test_bed, async |used| {
        controller.arm(point).await?;
        gpu_drain::drain(test_bed, used).await?;
        controller.wait_killed(point).await
    })
    .await
}

fn two_gpus() -> Value {
    let mut devices = one_gpu(DRIVER, &json!({"memory": "50Gi"}));
    devices["requests"][0]["exactly"]["count"] = json!(2);
    devices
}

/// Creates a pod that no scheduler binds, with a claim that the user created.
async fn create_unbound(test_bed: &TestBed, name: &str) -> anyhow::Result<()> {
    test_bed.create_claim(user_claim(name)).await?;
    let pod = unbound(holder(name, json!({"name": "gpu", "resourceClaimName": name})));
    test_bed.create(pod).await.map(drop)
}

/// Checks that the claim is released, is allocated to the next pod, and can be deleted afterwards.
async fn check_reusable_and_deletable(test_bed: &TestBed, claim: &str) -> anyhow::Result<()> {
    placement::wait_unallocated(test_bed, claim).await?;
    test_bed.create(holder("next", json!({"name": "gpu", "resourceClaimName": claim}))).await?;
    placement::check_colocated(test_bed, "next", claim).await?;
    test_bed.delete(&["next"]).await?;
    placement::delete_claim(test_bed, claim).await
}

/// The leading controller pod, and its container's restart count.
struct Controller<'a> {
    test_bed: &'a TestBed,
    deployment: &'a ControllerDeployment,
    pod: String,
    port: i32,
    restarts: i32,
}

impl<'a> Controller<'a> {
    fn new(test_bed: &'a TestBed, deployment: &'a ControllerDeployment, pod: &Pod) -> Self {
        let container_ports = pod
            .spec
            .iter()
            .flat_map(|spec| &spec.containers)
            .flat_map(|c| c.ports.iter().flatten());
        Self {
            test_bed,
            deployment,
            pod: pod.name_any(),
            port: container_ports.map(|port| port.container_port).next().unwrap_or_default(),
            restarts: container(pod).map_or(0, |status| status.restart_count),
        }
    }

    /// Sends a request to the fault points through the API server's pod proxy.
    async fn call(&self, method: &str, path: &str) -> anyhow::Result<Value> {
        let namespace = super::controller_deployment::NAMESPACE;
        let path =
            format!("/api/v1/namespaces/{namespace}/pods/{}:{}/proxy/{path}", self.pod, self.port);
        let request = Request::builder().method(method).uri(path).body(Vec::new())?;
        Ok(self.test_bed.client.request(request).await?)
    }

    async fn expect_points(&self, expected: &[&str]) -> anyhow::Result<()> {
        let points = self.call("GET", "fault-points").await?;
        let declared: BTreeSet<&str> =
            points.as_object().into_iter().flatten().map(|(name, _)| name.as_str()).collect();
        let expected: BTreeSet<&str> = expected.iter().copied().collect();
        anyhow::ensure!(
            declared == expected,
            "the controller declares fault points {declared:?}, the trial uses {expected:?}"
        );
        Ok(())
    }

    async fn arm(&self, point: &str) -> anyhow::Result<()> {
        self.call("PUT", &format!("fault-points/{point}/kill")).await.map(drop)
    }

    /// Waits until the controller was killed and is ready again.
    async fn wait_killed(&mut self, point: &str) -> anyhow::Result<()> {
        let status = self.deployment.wait_restarted(&self.pod, self.restarts).await?;
        self.restarts = status.restart_count;
        let last = status.last_state.and_then(|state| state.terminated);
        anyhow::ensure!(
            last.as_ref().is_some_and(|last| last.exit_code > SIGNAL_EXIT_BASE),
            "the controller was not killed at {point}: {}",
            json!(last)
        );
        Ok(())
    }
}
