//! The chart's driver DaemonSet: its image, its fault points, and the replacement of its pods.

use std::collections::BTreeMap;
use std::time::Duration;

use super::placement::node_name;
use super::test_bed::{TIMEOUT, wait_one, wait_selected};
use crate::wait::CheckResult;
use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Patch, PatchParams};
use kube::runtime::watcher;
use kube::{Api, Client, ResourceExt};
use serde::Deserialize;
use serde_json::{Value, json};

/// Namespace of the chart.
const NAMESPACE: &str = "tessera-system";
/// Name of the DaemonSet and of its pods' label.
const NAME: &str = "tessera-driver";
const PORT: u16 = 9400;

/// Image of the driver with fault points.
pub(super) const WITH_FAULT_POINTS: &str = "tessera/driver:fault-points";

/// State of one fault point of a driver.
#[derive(Debug, Deserialize)]
pub(super) struct FaultPoint {
    pub(super) waiting: u64,
}

/// The DaemonSet and its pods.
#[derive(Clone)]
pub(super) struct DriverInstances {
    client: Client,
    pub(super) pods: Api<Pod>,
    sets: Api<DaemonSet>,
}

impl DriverInstances {
    pub(super) fn new(client: &Client) -> Self {
        let client = client.clone();
        let (pods, sets) = (
            Api::namespaced(client.clone(), NAMESPACE),
            Api::namespaced(client.clone(), NAMESPACE),
        );
        Self { client, pods, sets }
    }

    /// Returns the image of the DaemonSet.
    pub(super) async fn image(&self) -> anyhow::Result<String> {
        let spec = self.sets.get(NAME).await?.spec.template.spec;
        let image =
            spec.and_then(|pod| pod.containers.into_iter().next()).and_then(|driver| driver.image);
        image.ok_or_else(|| anyhow::anyhow!("DaemonSet {NAME} has no image"))
    }

    /// Patches the DaemonSet's spec.
    pub(super) async fn change(&self, spec: Value) -> anyhow::Result<()> {
        let change = Patch::Strategic(json!({"spec": spec}));
        self.sets.patch(NAME, &PatchParams::default(), &change).await?;
        Ok(())
    }

    /// Sets the DaemonSet's image, which starts the replacement of all pods.
    pub(super) async fn set_image(&self, image: &str) -> anyhow::Result<()> {
        let containers = json!([{"name": "driver", "image": image}]);
        self.change(json!({"template": {"spec": {"containers": containers}}})).await
    }

    /// Runs `trial` while all drivers have fault points, and restores the previous image in every
    /// case.
    pub(super) async fn with_fault_points<T>(
        &self,
        trial: impl AsyncFnOnce() -> anyhow::Result<T>,
    ) -> anyhow::Result<T> {
        let before = self.image().await?;
        let outcome = async {
            self.set_image(WITH_FAULT_POINTS).await?;
            self.wait_replaced(WITH_FAULT_POINTS).await?;
            trial().await
        };
        let outcome = outcome.await;
        self.set_image(&before).await?;
        let restored = self.wait_replaced(&before).await;
        let outcome = outcome?;
        restored?;
        Ok(outcome)
    }

    /// Waits until each node has exactly one driver pod, of `image` and ready.
    pub(super) async fn wait_replaced(&self, image: &str) -> anyhow::Result<()> {
        let check = |set: Option<&DaemonSet>| {
            let Some((set, status)) = set.and_then(|set| Some((set, set.status.as_ref()?))) else {
                return CheckResult::Pending("no DaemonSet".into());
            };
            let settled = status.observed_generation == set.metadata.generation
                && status.updated_number_scheduled == Some(status.desired_number_scheduled)
                && status.number_available == Some(status.desired_number_scheduled);
            CheckResult::done_if(settled, || json!(status).to_string())
        };
        wait_one(self.sets.clone(), NAME, "the drivers to be replaced", check).await?;
        let check = |pods: &[Pod]| {
            let others = pods.iter().filter(|pod| image_of(pod) != Some(image)).map(Pod::name_any);
            let others: Vec<_> = others.collect();
            CheckResult::done_if(others.is_empty(), || others.join(", "))
        };
        wait_selected(self.pods.clone(), selector(), "the old drivers to be deleted", check).await
    }

    /// Waits until all driver pods are ready and have that argument.
    pub(super) async fn wait_argument(&self, argument: &str) -> anyhow::Result<()> {
        let check = |pods: &[Pod]| {
            let others = pods.iter().filter(|pod| !is_ready(pod) || !has_argument(pod, argument));
            let others: Vec<_> = others.map(Pod::name_any).collect();
            CheckResult::done_if(others.is_empty(), || others.join(", "))
        };
        let what = format!("the drivers to run with {argument}");
        wait_selected(self.pods.clone(), selector(), &what, check).await
    }

    /// Waits until the driver pod of `image` on `node` is ready, and returns it.
    pub(super) async fn wait_ready(&self, node: &str, image: &str) -> anyhow::Result<Pod> {
        let check = |pods: &[Pod]| {
            let here = pods
                .iter()
                .find(|pod| node_name(pod) == Some(node) && image_of(pod) == Some(image));
            match here.filter(|pod| is_ready(pod)) {
                Some(pod) => CheckResult::Done(pod.clone()),
                None => CheckResult::Pending(format!("{} pods", pods.len())),
            }
        };
        let what = format!("a driver of {image} to be ready on {node}");
        wait_selected(self.pods.clone(), selector(), &what, check).await
    }

    /// Waits until no driver runs on `node`.
    pub(super) async fn wait_no_driver_on(&self, node: &str) -> anyhow::Result<()> {
        let check = |pods: &[Pod]| {
            CheckResult::deleted(pods.iter().find(|pod| node_name(pod) == Some(node)))
        };
        let what = format!("the driver of {node} to be deleted");
        wait_selected(self.pods.clone(), selector(), &what, check).await
    }

    /// Waits until the pod's container was restarted more than `restarts` times and is ready.
    pub(super) async fn wait_restarted(&self, pod: &str, restarts: i32) -> anyhow::Result<()> {
        let check = |pod: Option<&Pod>| match pod {
            Some(pod) if restarts_of(pod) > restarts && is_ready(pod) => CheckResult::Done(()),
            other => CheckResult::Pending(format!("{:?} restarts", other.map(restarts_of))),
        };
        let what = format!("driver {pod} to be restarted");
        wait_one(self.pods.clone(), pod, &what, check).await
    }

    /// Returns the fault points of the driver in `pod`.
    pub(super) async fn fault_points(
        &self,
        pod: &str,
    ) -> anyhow::Result<BTreeMap<String, FaultPoint>> {
        Ok(serde_json::from_str(&self.call("GET", pod, "").await?)?)
    }

    /// Arms a fault point of the driver in `pod`; `fault` is `kill` or `hold`.
    pub(super) async fn arm(&self, pod: &str, point: &str, fault: &str) -> anyhow::Result<()> {
        self.call("PUT", pod, &format!("/{point}/{fault}")).await.map(drop)
    }

    /// Releases the calls that are held at a fault point.
    pub(super) async fn release(&self, pod: &str, point: &str) -> anyhow::Result<()> {
        self.call("DELETE", pod, &format!("/{point}")).await.map(drop)
    }

    /// Waits until a call is held at that point.
    pub(super) async fn wait_held(&self, pod: &str, point: &str) -> anyhow::Result<()> {
        // No watch reports it; each check is a request to the driver.
        let mut ticks = tokio::time::interval(Duration::from_millis(200));
        let check = async {
            loop {
                ticks.tick().await;
                if self.fault_points(pod).await?.get(point).is_some_and(|point| point.waiting > 0) {
                    return Ok(());
                }
            }
        };
        let result = tokio::time::timeout(TIMEOUT, check).await;
        result.map_err(|_| anyhow::anyhow!("no call reached fault point {point} in {pod}"))?
    }

    /// Sends a request through the API server's pod proxy.
    async fn call(&self, verb: &str, pod: &str, path: &str) -> anyhow::Result<String> {
        let path =
            format!("/api/v1/namespaces/{NAMESPACE}/pods/{pod}:{PORT}/proxy/fault-points{path}");
        let request = axum::http::Request::builder().method(verb).uri(path).body(Vec::new())?;
        Ok(self.client.request_text(request).await?)
    }
}

fn selector() -> watcher::Config {
    watcher::Config::default().labels(&format!("app.kubernetes.io/name={NAME}"))
}

fn image_of(pod: &Pod) -> Option<&str> {
    pod.spec.as_ref()?.containers.first()?.image.as_deref()
}

fn has_argument(pod: &Pod, argument: &str) -> bool {
    let driver = pod.spec.as_ref().and_then(|spec| spec.containers.first());
    driver.is_some_and(|driver| driver.args.iter().flatten().any(|one| one == argument))
}

/// Returns true if the pod is ready and not terminating.
pub(super) fn is_ready(pod: &Pod) -> bool {
    let conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
    let ready = conditions
        .into_iter()
        .any(|condition| condition.type_ == "Ready" && condition.status == "True");
    ready && pod.metadata.deletion_timestamp.is_none()
}

/// Returns the number of restarts of the pod's containers.
pub(super) fn restarts_of(pod: &Pod) -> i32 {
    let statuses = pod.status.iter().flat_map(|status| status.container_statuses.iter().flatten());
    statuses.map(|status| status.restart_count).sum()
}
