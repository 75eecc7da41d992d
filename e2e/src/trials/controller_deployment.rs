//! The controller as the chart deploys it: how many there are, of which image, and who leads.

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{ContainerStatus, Pod};
use kube::Api;
use kube::api::{DynamicObject, GroupVersionKind, ListParams, Patch, PatchParams};
use kube::core::ApiResource;
use serde_json::{Value, json};

use super::bench::{Bench, PATIENCE};
use crate::wait::{self, Verdict};

/// Of the chart.
pub(super) const NAMESPACE: &str = "tessera-system";
/// Of Deployment, container label and Lease.
const NAME: &str = "tessera-controller";

/// Deployment, pods and Lease of the controller.
pub(super) struct ControllerDeployment {
    deployments: Api<DynamicObject>,
    pub(super) pods: Api<Pod>,
    pub(super) leases: Api<Lease>,
}

impl ControllerDeployment {
    pub(super) fn of(bench: &Bench) -> Self {
        let resource = ApiResource::from_gvk(&GroupVersionKind::gvk("apps", "v1", "Deployment"));
        Self {
            deployments: Api::namespaced_with(bench.client.clone(), NAMESPACE, &resource),
            pods: Api::namespaced(bench.client.clone(), NAMESPACE),
            leases: Api::namespaced(bench.client.clone(), NAMESPACE),
        }
    }

    /// The number of replicas asked for; none where the controller is no Deployment.
    pub(super) async fn replicas(&self) -> anyhow::Result<Option<i64>> {
        let deployment = self.deployments.get_opt(NAME).await?;
        Ok(deployment.map(|deployment| deployment.data["spec"]["replicas"].as_i64().unwrap_or(1)))
    }

    /// Waits until there are that many, and none that is on its way out.
    pub(super) async fn scale(&self, replicas: i64) -> anyhow::Result<()> {
        self.change(json!({"spec": {"replicas": replicas}})).await
    }

    /// Waits until all are of that image, and none of another is left. Returns the image from
    /// before.
    pub(super) async fn set_image(&self, image: &str) -> anyhow::Result<String> {
        let deployment = self.deployments.get(NAME).await?;
        let before = &deployment.data["spec"]["template"]["spec"]["containers"][0];
        let (container, before) =
            (before["name"].clone(), before["image"].as_str().unwrap_or_default());
        let containers = json!([{"name": container, "image": image}]);
        self.change(json!({"spec": {"template": {"spec": {"containers": containers}}}})).await?;
        Ok(before.to_owned())
    }

    async fn change(&self, change: Value) -> anyhow::Result<()> {
        let changed = self
            .deployments
            .patch(NAME, &PatchParams::default(), &Patch::Strategic(change))
            .await?;
        let replicas = changed.data["spec"]["replicas"].as_i64().unwrap_or(1);
        let generation = changed.metadata.generation.unwrap_or_default();
        let judge = |deployment: Option<&DynamicObject>| {
            let status =
                deployment.map(|deployment| deployment.data["status"].clone()).unwrap_or_default();
            let count = |field: &str| status[field].as_i64().unwrap_or(0);
            // Pods that are on their way out are no replicas any more, but may still write.
            let done = count("observedGeneration") >= generation
                && ["replicas", "updatedReplicas", "readyReplicas"]
                    .iter()
                    .all(|field| count(field) == replicas)
                && count("terminatingReplicas") == 0;
            if done { Verdict::Done(()) } else { Verdict::NotYet(status.to_string()) }
        };
        let what = format!("{NAME} to have {replicas} replicas");
        Ok(wait::until_one(self.deployments.clone(), NAME, &what, PATIENCE, judge).await?)
    }

    /// Waits until a pod that is there leads, and `is_it` is content with its name; returns it.
    pub(super) async fn leader(
        &self,
        what: &str,
        is_it: impl Fn(&str) -> bool,
    ) -> anyhow::Result<Pod> {
        let selector = ListParams::default().labels(&format!("app.kubernetes.io/name={NAME}"));
        let pods = self.pods.list(&selector).await?.items;
        let named = |name: &str| {
            pods.iter().find(|pod| pod.metadata.name.as_deref() == Some(name)).cloned()
        };
        let judge = |lease: Option<&Lease>| match holder(lease) {
            Some(holder) if is_it(&holder) => named(&holder).map_or_else(
                || Verdict::NotYet(format!("{holder}, which is no pod")),
                Verdict::Done,
            ),
            other => Verdict::NotYet(format!("{other:?}")),
        };
        Ok(wait::until_one(self.leases.clone(), NAME, what, PATIENCE, judge).await?)
    }

    /// Waits until the container of that pod has been started more than `times` times again, and is
    /// ready.
    pub(super) async fn restarted(&self, pod: &str, times: i32) -> anyhow::Result<ContainerStatus> {
        let judge = |pod: Option<&Pod>| match pod.and_then(container) {
            Some(status) if status.restart_count > times && status.ready => {
                Verdict::Done(status.clone())
            }
            status => Verdict::NotYet(json!(status).to_string()),
        };
        let what = format!("the controller in pod {pod} to be started again");
        Ok(wait::until_one(self.pods.clone(), pod, &what, PATIENCE, judge).await?)
    }
}

/// Who holds the Lease.
pub(super) fn holder(lease: Option<&Lease>) -> Option<String> {
    lease?.spec.as_ref()?.holder_identity.clone().filter(|holder| !holder.is_empty())
}

/// The state of the only container of a pod.
pub(super) fn container(pod: &Pod) -> Option<&ContainerStatus> {
    pod.status.as_ref()?.container_statuses.as_ref()?.first()
}
