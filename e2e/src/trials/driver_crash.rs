//! The driver is killed at every step of Prepare and Unprepare, and calls are cancelled in the
//! middle: what runs goes on, what is new starts, and nothing is left.

use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use kube::api::{DeleteParams, Patch, PatchParams};
use serde_json::json;

use super::bench::{Bench, PATIENCE, container_ids, phase};
use super::driver_instances::{DriverInstances, WITH_FAULT_POINTS, restarts_of};
use crate::harness::TrialOutcome;
use crate::runner::Outcome;
use crate::wait::{self, Verdict};

/// Nothing tells when a file is gone.
const LOOK_EVERY: Duration = Duration::from_millis(250);

/// What the trials of this file work on: one node, its driver, a pod that must not notice anything.
struct Site<'a> {
    bench: &'a Bench,
    drivers: &'a DriverInstances,
    node: String,
    driver: String,
}

/// Kills the driver at each of its fault points in turn.
pub(super) async fn killed(bench: Bench) -> TrialOutcome {
    let drivers = DriverInstances::of(&bench.client);
    let run = async || {
        let site = Site::on(&bench, &drivers).await?;
        let bystander = site.pod_that_runs("bystander").await?;
        let files = site.files_of(&bystander).await?;
        for point in drivers.fault_points(&site.driver).await?.into_keys() {
            let outcome = match point.starts_with("prepare-") {
                true => site.killed_in_prepare(&point).await,
                false => site.killed_in_unprepare(&point).await,
            };
            outcome.map_err(|error| error.context(format!("killed at {point}")))?;
        }
        let still = bench.pods().get("bystander").await?;
        anyhow::ensure!(
            container_ids(&still) == container_ids(&bystander) && phase(&still) == "Running",
            "the pod beside noticed: {:?}, then {:?}",
            container_ids(&bystander),
            container_ids(&still)
        );
        anyhow::ensure!(
            site.files_of(&still).await? == files,
            "files of a pod that runs were replaced"
        );
        bench.delete(&["bystander".to_owned()]).await
    };
    drivers.with_fault_points(run).await?;
    Ok(Outcome::Held(vec![]))
}

/// Deletes a pod while the driver prepares its claim: before anything is done, and in the middle of
/// it.
pub(super) async fn cancelled(bench: Bench) -> TrialOutcome {
    let drivers = DriverInstances::of(&bench.client);
    let run = async || {
        let site = Site::on(&bench, &drivers).await?;
        // Held before it acts, a Prepare keeps nobody waiting.
        site.hold("before", "prepare-claim-read").await?;
        bench.delete(&["before".to_owned()]).await?;
        drivers.release(&site.driver, "prepare-claim-read").await?;
        site.nothing_is_left().await?;

        // In the middle, Unprepare waits for it.
        site.hold("amid", "prepare-ledger").await?;
        bench.pods().delete("amid", &DeleteParams::default()).await?;
        drivers.release(&site.driver, "prepare-ledger").await?;
        site.gone("amid").await?;
        site.nothing_is_left().await
    };
    drivers.with_fault_points(run).await?;
    Ok(Outcome::Held(vec![]))
}

impl<'a> Site<'a> {
    async fn on(bench: &'a Bench, drivers: &'a DriverInstances) -> anyhow::Result<Self> {
        let node = bench.node_with("a100", 4).await?;
        bench
            .template("share", "a100.gpu.tessera.dev", json!({"memory": "1Gi", "cores": "1"}))
            .await?;
        let driver = drivers.ready(&node, WITH_FAULT_POINTS).await?.name_any();
        Ok(Self { bench, drivers, node, driver })
    }

    async fn pod_that_runs(&self, name: &str) -> anyhow::Result<Pod> {
        self.bench.holder(name, "share").await?;
        self.bench.holds(name).await
    }

    /// Arms the point, does `act`, and waits until the driver has died of it and is back.
    async fn killed_during(
        &self,
        point: &str,
        act: impl AsyncFnOnce() -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let restarts = restarts_of(&self.drivers.pods.get(&self.driver).await?);
        self.drivers.arm(&self.driver, point, "kill").await?;
        act().await?;
        self.drivers.restarted(&self.driver, restarts).await
    }

    async fn killed_in_prepare(&self, point: &str) -> anyhow::Result<()> {
        self.killed_during(point, async || self.bench.holder(point, "share").await).await?;
        self.nudge(point).await?;
        let pod = self.bench.holds(point).await?;
        let files = self.files_of(&pod).await?;
        anyhow::ensure!(files.lines().count() == 2, "a grant and a ledger, once each: {files}");
        self.bench.delete(&[point.to_owned()]).await?;
        self.nothing_is_left_of(&files).await
    }

    async fn killed_in_unprepare(&self, point: &str) -> anyhow::Result<()> {
        let pod = self.pod_that_runs(point).await?;
        let files = self.files_of(&pod).await?;
        let delete = async || {
            self.bench.pods().delete(point, &DeleteParams::default()).await?;
            Ok(())
        };
        self.killed_during(point, delete).await?;
        self.nudge(point).await?;
        self.gone(point).await?;
        self.nothing_is_left_of(&files).await
    }

    /// Creates a pod whose Prepare is held at that point.
    async fn hold(&self, pod: &str, point: &str) -> anyhow::Result<()> {
        self.drivers.arm(&self.driver, point, "hold").await?;
        self.bench.holder(pod, "share").await?;
        self.drivers.held(&self.driver, point).await
    }

    /// Changes the pod, so that its kubelet looks at it now and not with its next sync. It may be
    /// gone.
    async fn nudge(&self, pod: &str) -> anyhow::Result<()> {
        let change =
            Patch::Merge(json!({"metadata": {"annotations": {"e2e.tessera.dev/nudged": "true"}}}));
        match self.bench.pods().patch(pod, &PatchParams::default(), &change).await {
            Err(kube::Error::Api(status)) if status.is_not_found() => Ok(()),
            result => Ok(result.map(drop)?),
        }
    }

    async fn gone(&self, pod: &str) -> anyhow::Result<()> {
        let judge = |pod: Option<&Pod>| match pod {
            None => Verdict::Done(()),
            Some(pod) => Verdict::NotYet(phase(pod).to_owned()),
        };
        let what = format!("pod {pod} to be gone");
        Ok(wait::until_one(self.bench.pods(), pod, &what, PATIENCE, judge).await?)
    }

    /// Inodes and paths of the grants and ledgers of the pod's claim.
    async fn files_of(&self, pod: &Pod) -> anyhow::Result<String> {
        let uid = self.bench.claim_of(pod).await?.uid().unwrap_or_default();
        let look = format!(
            "stat -c '%d %i %n' /run/tessera/grants/{uid}/*/grant /run/tessera/ledgers/{uid}/*/ledger"
        );
        Ok(self.bench.hands()?.run(&["exec", &self.node, "sh", "-c", &look]).await?)
    }

    /// Waits until the node has nothing more of the claim whose files these were.
    async fn nothing_is_left_of(&self, files: &str) -> anyhow::Result<()> {
        let uid = files.split("/grants/").nth(1).and_then(|rest| rest.split('/').next());
        let uid = uid.ok_or_else(|| anyhow::anyhow!("no claim's files: {files}"))?.to_owned();
        self.without(|residue| residue.contains(&uid)).await
    }

    async fn nothing_is_left(&self) -> anyhow::Result<()> {
        self.without(|residue| !residue.trim().is_empty()).await
    }

    async fn without(&self, is_left: impl Fn(&str) -> bool) -> anyhow::Result<()> {
        let hands = self.bench.hands()?;
        let mut last = String::new();
        let looking = async {
            let mut ticks = tokio::time::interval(LOOK_EVERY);
            loop {
                ticks.tick().await;
                last = hands.run(&["residue", &self.node]).await?;
                if !is_left(&last) {
                    return Ok::<_, anyhow::Error>(());
                }
            }
        };
        let looked = tokio::time::timeout(PATIENCE, looking).await;
        looked.map_err(|_| anyhow::anyhow!("left on {}:\n{last}", self.node))?
    }
}
