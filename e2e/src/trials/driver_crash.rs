//! Trials that kill the driver at every step of Prepare and Unprepare, and delete pods during
//! Prepare. Running pods continue, new pods start, and no files are left.

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use kube::api::{DeleteParams, Patch, PatchParams};
use serde_json::json;

use super::driver_instances::{DriverInstances, WITH_FAULT_POINTS, restarts_of};
use super::test_bed::{A100, H100, TIMEOUT, TestBed, wait_deleted};
use super::{residue, resize};
use crate::harness::TrialOutcome;
use crate::runner::Outcome;

/// A node, its driver, and the test bed.
struct DriverNode<'a> {
    test_bed: &'a TestBed,
    drivers: &'a DriverInstances,
    node: String,
    driver: String,
    /// Name of the template for shares of its GPUs.
    template: &'a str,
}

/// Kills the driver at each of its fault points in turn: at every second one on one node, at the
/// others on another node at the same time.
pub(super) async fn killed(test_bed: TestBed) -> TrialOutcome {
    let drivers = DriverInstances::new(&test_bed.client);
    let run = async || {
        let a100 = DriverNode::new(&test_bed, &drivers, "a100", A100).await?;
        let h100 = DriverNode::new(&test_bed, &drivers, "h100", H100).await?;
        let points: Vec<String> = drivers.fault_points(&a100.driver).await?.into_keys().collect();
        tokio::try_join!(
            a100.killed_at(points.iter().step_by(2)),
            h100.killed_at(points.iter().skip(1).step_by(2)),
        )
    };
    drivers.with_fault_points(run).await?;
    Ok(Outcome::Passed(vec![]))
}

/// Deletes a pod while the driver prepares its claim: before the first step, and after some steps.
pub(super) async fn pod_deleted_during_prepare(test_bed: TestBed) -> TrialOutcome {
    let drivers = DriverInstances::new(&test_bed.client);
    let run = async || {
        let node = DriverNode::new(&test_bed, &drivers, "a100", A100).await?;
        // A Prepare held before its first step does not block Unprepare.
        node.hold("before", "prepare-claim-read").await?;
        test_bed.delete(&["before"]).await?;
        drivers.release(&node.driver, "prepare-claim-read").await?;
        node.wait_no_files().await?;

        // After some steps, Unprepare waits for Prepare.
        node.hold("during", "prepare-ledger").await?;
        test_bed.pods().delete("during", &DeleteParams::default()).await?;
        drivers.release(&node.driver, "prepare-ledger").await?;
        wait_deleted(test_bed.pods(), "during").await?;
        node.wait_no_files().await
    };
    drivers.with_fault_points(run).await?;
    Ok(Outcome::Passed(vec![]))
}

impl<'a> DriverNode<'a> {
    /// Returns a node with GPUs of a product, and creates a template for shares of them.
    async fn new(
        test_bed: &'a TestBed,
        drivers: &'a DriverInstances,
        product: &'a str,
        class: &str,
    ) -> anyhow::Result<Self> {
        let node = test_bed.node_with(product, 4).await?;
        test_bed.create_template(product, class, json!({"memory": "1Gi", "cores": "1"})).await?;
        let driver = drivers.wait_ready(&node, WITH_FAULT_POINTS).await?.name_any();
        Ok(Self { test_bed, drivers, node, driver, template: product })
    }

    /// Kills the driver at each of these points. A running pod stays undisturbed.
    async fn killed_at(&self, points: impl Iterator<Item = &String>) -> anyhow::Result<()> {
        let name = format!("bystander-{}", self.template);
        let bystander = self.create_running_pod(&name).await?;
        let files = self.files_of(&bystander).await?;
        for point in points {
            let outcome = match point.split('-').next() {
                Some("prepare") => self.killed_in_prepare(point).await,
                Some("resize") => self.killed_in_resize(point).await,
                _ => self.killed_in_unprepare(point).await,
            };
            outcome.map_err(|error| {
                error.context(format!("driver of {} killed at {point}", self.node))
            })?;
        }
        self.test_bed.check_undisturbed(&bystander).await?;
        anyhow::ensure!(
            self.files_of(&bystander).await? == files,
            "files of running pod `{name}` were replaced"
        );
        self.test_bed.delete(&[&name]).await
    }

    async fn create_running_pod(&self, name: &str) -> anyhow::Result<Pod> {
        self.create_pod(name).await?;
        self.test_bed.wait_running(name).await
    }

    async fn create_pod(&self, name: &str) -> anyhow::Result<()> {
        self.test_bed.create_holder(name, self.template).await
    }

    /// Arms the fault point, runs `act`, and waits until the driver was killed and is ready again.
    async fn killed_during(
        &self,
        point: &str,
        act: impl AsyncFnOnce() -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let restarts = restarts_of(&self.drivers.pods.get(&self.driver).await?);
        self.drivers.arm(&self.driver, point, "kill").await?;
        act().await?;
        self.drivers.wait_restarted(&self.driver, restarts).await
    }

    async fn killed_in_prepare(&self, point: &str) -> anyhow::Result<()> {
        self.killed_during(point, async || self.create_pod(point).await).await?;
        self.trigger_sync(point).await?;
        let pod = self.test_bed.wait_running(point).await?;
        let files = self.files_of(&pod).await?;
        anyhow::ensure!(files.lines().count() == 2, "expected one grant and one ledger: {files}");
        self.test_bed.delete(&[point]).await?;
        self.wait_no_files_of(&files).await
    }

    async fn killed_in_resize(&self, point: &str) -> anyhow::Result<()> {
        let pod = self.create_running_pod(point).await?;
        let files = self.files_of(&pod).await?;
        let claim = self.test_bed.claim_of(&pod).await?.name_any();
        let shrink = json!({"memory": "512Mi"});
        self.killed_during(point, async || resize::request(self.test_bed, &claim, shrink).await)
            .await?;
        resize::wait_counted(self.test_bed, &claim, "512Mi").await?;
        self.test_bed.check_undisturbed(&pod).await?;
        self.test_bed.delete(&[point]).await?;
        self.wait_no_files_of(&files).await
    }

    async fn killed_in_unprepare(&self, point: &str) -> anyhow::Result<()> {
        let pod = self.create_running_pod(point).await?;
        let files = self.files_of(&pod).await?;
        let delete = async || {
            self.test_bed.pods().delete(point, &DeleteParams::default()).await?;
            Ok(())
        };
        self.killed_during(point, delete).await?;
        self.trigger_sync(point).await?;
        wait_deleted(self.test_bed.pods(), point).await?;
        self.wait_no_files_of(&files).await
    }

    /// Creates a pod and waits until its Prepare is held at that point.
    async fn hold(&self, pod: &str, point: &str) -> anyhow::Result<()> {
        self.drivers.arm(&self.driver, point, "hold").await?;
        self.create_pod(pod).await?;
        self.drivers.wait_held(&self.driver, point).await
    }

    /// Changes the pod, so that the kubelet syncs it now. The pod may be deleted already.
    async fn trigger_sync(&self, pod: &str) -> anyhow::Result<()> {
        let change =
            Patch::Merge(json!({"metadata": {"annotations": {"e2e.tessera.dev/sync": "true"}}}));
        match self.test_bed.pods().patch(pod, &PatchParams::default(), &change).await {
            Err(kube::Error::Api(status)) if status.is_not_found() => Ok(()),
            result => Ok(result.map(drop)?),
        }
    }

    /// Returns the inodes and paths of the grants and ledgers of the pod's claim.
    async fn files_of(&self, pod: &Pod) -> anyhow::Result<String> {
        let uid = self.test_bed.claim_of(pod).await?.uid().unwrap_or_default();
        let command = format!(
            "stat -c '%d %i %n' /run/tessera/grants/{uid}/*/grant /run/tessera/ledgers/{uid}/*/ledger"
        );
        self.test_bed.operations()?.run(&["exec", &self.node, "sh", "-c", &command]).await
    }

    /// Waits until the node has no files of the claim with these files.
    async fn wait_no_files_of(&self, files: &str) -> anyhow::Result<()> {
        let uid = files.split("/grants/").nth(1).and_then(|rest| rest.split('/').next());
        let uid =
            uid.ok_or_else(|| anyhow::anyhow!("not the files of a claim: {files}"))?.to_owned();
        let operations = self.test_bed.operations()?;
        let is_left = |residue: &str| residue.contains(&uid);
        residue::wait_residue(operations, &self.node, TIMEOUT, is_left).await
    }

    async fn wait_no_files(&self) -> anyhow::Result<()> {
        residue::wait_removed(self.test_bed.operations()?, &self.node).await
    }
}
