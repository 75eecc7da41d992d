//! The driver's pods on one node: of which image they are, what their fault points do, and one
//! replaced by the next.

use std::collections::BTreeMap;
use std::time::Duration;

use super::bench::PATIENCE;
use crate::wait::{self, Verdict};
use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Patch, PatchParams};
use kube::runtime::watcher;
use kube::{Api, Client, ResourceExt};
use serde::Deserialize;
use serde_json::{Value, json};

/// Of the chart.
const NAMESPACE: &str = "tessera-system";
/// Of DaemonSet, label and port.
const NAME: &str = "tessera-driver";
const PORT: u16 = 9400;

/// The driver with fault points.
pub(super) const WITH_FAULT_POINTS: &str = "tessera/driver:fault-points";

/// What a driver says of one of its fault points.
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
    pub(super) fn of(client: &Client) -> Self {
        let client = client.clone();
        let (pods, sets) = (
            Api::namespaced(client.clone(), NAMESPACE),
            Api::namespaced(client.clone(), NAMESPACE),
        );
        Self { client, pods, sets }
    }

    /// The image that the pods are made of.
    pub(super) async fn image(&self) -> anyhow::Result<String> {
        let spec = self.sets.get(NAME).await?.spec.template.spec;
        let image =
            spec.and_then(|pod| pod.containers.into_iter().next()).and_then(|driver| driver.image);
        image.ok_or_else(|| anyhow::anyhow!("DaemonSet {NAME} has no image"))
    }

    /// Changes the DaemonSet.
    pub(super) async fn change(&self, spec: Value) -> anyhow::Result<()> {
        let change = Patch::Strategic(json!({"spec": spec}));
        self.sets.patch(NAME, &PatchParams::default(), &change).await?;
        Ok(())
    }

    /// Begins to replace all pods by pods of `image`.
    pub(super) async fn set_image(&self, image: &str) -> anyhow::Result<()> {
        let containers = json!([{"name": "driver", "image": image}]);
        self.change(json!({"template": {"spec": {"containers": containers}}})).await
    }

    /// Runs `trial` while all drivers have fault points, and puts back what was there, whatever
    /// comes of it.
    pub(super) async fn with_fault_points<T>(
        &self,
        trial: impl AsyncFnOnce() -> anyhow::Result<T>,
    ) -> anyhow::Result<T> {
        let before = self.image().await?;
        let outcome = async {
            self.set_image(WITH_FAULT_POINTS).await?;
            self.replaced(WITH_FAULT_POINTS).await?;
            trial().await
        };
        let outcome = outcome.await;
        self.set_image(&before).await?;
        let back = self.replaced(&before).await;
        let outcome = outcome?;
        back?;
        Ok(outcome)
    }

    /// Waits until there is one pod of `image` on each node, ready, and no other.
    pub(super) async fn replaced(&self, image: &str) -> anyhow::Result<()> {
        let judge = |set: Option<&DaemonSet>| {
            let Some((set, status)) = set.and_then(|set| Some((set, set.status.as_ref()?))) else {
                return Verdict::NotYet("no DaemonSet".into());
            };
            let settled = status.observed_generation == set.metadata.generation
                && status.updated_number_scheduled == Some(status.desired_number_scheduled)
                && status.number_available == Some(status.desired_number_scheduled);
            if settled { Verdict::Done(()) } else { Verdict::NotYet(json!(status).to_string()) }
        };
        wait::until_one(self.sets.clone(), NAME, "the drivers to be replaced", PATIENCE, judge)
            .await?;
        let judge = |pods: &[Pod]| {
            let others = pods.iter().filter(|pod| image_of(pod) != Some(image)).map(Pod::name_any);
            let others: Vec<_> = others.collect();
            if others.is_empty() { Verdict::Done(()) } else { Verdict::NotYet(others.join(", ")) }
        };
        Ok(wait::until(
            self.pods.clone(),
            selector(),
            "the old drivers to be gone",
            PATIENCE,
            judge,
        )
        .await?)
    }

    /// Waits until every driver runs with that argument, and no other is there any more.
    pub(super) async fn run_with(&self, argument: &str) -> anyhow::Result<()> {
        let judge = |pods: &[Pod]| {
            let others = pods.iter().filter(|pod| !is_ready(pod) || !has_argument(pod, argument));
            let others: Vec<_> = others.map(Pod::name_any).collect();
            if others.is_empty() { Verdict::Done(()) } else { Verdict::NotYet(others.join(", ")) }
        };
        let what = format!("the drivers to run with {argument}");
        Ok(wait::until(self.pods.clone(), selector(), &what, PATIENCE, judge).await?)
    }

    /// The pod of `image` on `node`, once it is ready.
    pub(super) async fn ready(&self, node: &str, image: &str) -> anyhow::Result<Pod> {
        let judge = |pods: &[Pod]| {
            let here =
                pods.iter().find(|pod| node_of(pod) == Some(node) && image_of(pod) == Some(image));
            match here.filter(|pod| is_ready(pod)) {
                Some(pod) => Verdict::Done(pod.clone()),
                None => Verdict::NotYet(format!("{} pods", pods.len())),
            }
        };
        let what = format!("a driver of {image} to be ready on {node}");
        Ok(wait::until(self.pods.clone(), selector(), &what, PATIENCE, judge).await?)
    }

    /// Waits until no driver is on `node`.
    pub(super) async fn gone_from(&self, node: &str) -> anyhow::Result<()> {
        let judge = |pods: &[Pod]| match pods.iter().find(|pod| node_of(pod) == Some(node)) {
            None => Verdict::Done(()),
            Some(pod) => Verdict::NotYet(pod.name_any()),
        };
        let what = format!("the driver of {node} to be gone");
        Ok(wait::until(self.pods.clone(), selector(), &what, PATIENCE, judge).await?)
    }

    /// Waits until the pod's container has been started for the time after the `restarts`th, and is
    /// ready.
    pub(super) async fn restarted(&self, pod: &str, restarts: i32) -> anyhow::Result<()> {
        let judge = |pod: Option<&Pod>| match pod {
            Some(pod) if restarts_of(pod) > restarts && is_ready(pod) => Verdict::Done(()),
            other => Verdict::NotYet(format!("{:?} restarts", other.map(restarts_of))),
        };
        let what = format!("driver {pod} to be started again");
        Ok(wait::until_one(self.pods.clone(), pod, &what, PATIENCE, judge).await?)
    }

    /// What the driver in `pod` says of its fault points.
    pub(super) async fn fault_points(
        &self,
        pod: &str,
    ) -> anyhow::Result<BTreeMap<String, FaultPoint>> {
        Ok(serde_json::from_str(&self.call("GET", pod, "").await?)?)
    }

    /// Kills or holds (`fault`) the driver in `pod` when it comes to that point.
    pub(super) async fn arm(&self, pod: &str, point: &str, fault: &str) -> anyhow::Result<()> {
        self.call("PUT", pod, &format!("/{point}/{fault}")).await.map(drop)
    }

    /// Lets who is held there go on.
    pub(super) async fn release(&self, pod: &str, point: &str) -> anyhow::Result<()> {
        self.call("DELETE", pod, &format!("/{point}")).await.map(drop)
    }

    /// Waits until somebody is held at that point.
    pub(super) async fn held(&self, pod: &str, point: &str) -> anyhow::Result<()> {
        // Nothing tells; each look is a request to the driver.
        let mut ticks = tokio::time::interval(Duration::from_millis(200));
        let looking = async {
            loop {
                ticks.tick().await;
                if self.fault_points(pod).await?.get(point).is_some_and(|point| point.waiting > 0) {
                    return Ok(());
                }
            }
        };
        let looked = tokio::time::timeout(PATIENCE, looking).await;
        looked.map_err(|_| anyhow::anyhow!("nobody came to {point} in {pod}"))?
    }

    /// Through the API server's proxy.
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

fn node_of(pod: &Pod) -> Option<&str> {
    pod.spec.as_ref()?.node_name.as_deref()
}

fn image_of(pod: &Pod) -> Option<&str> {
    pod.spec.as_ref()?.containers.first()?.image.as_deref()
}

fn has_argument(pod: &Pod, argument: &str) -> bool {
    let driver = pod.spec.as_ref().and_then(|spec| spec.containers.first());
    driver.is_some_and(|driver| driver.args.iter().flatten().any(|one| one == argument))
}

fn is_ready(pod: &Pod) -> bool {
    let conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
    let ready = conditions
        .into_iter()
        .any(|condition| condition.type_ == "Ready" && condition.status == "True");
    ready && pod.metadata.deletion_timestamp.is_none()
}

/// How often the pod's containers were started again.
pub(super) fn restarts_of(pod: &Pod) -> i32 {
    let statuses = pod.status.iter().flat_map(|status| status.container_statuses.iter().flatten());
    statuses.map(|status| status.restart_count).sum()
}
