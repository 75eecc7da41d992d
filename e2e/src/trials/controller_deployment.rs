//! The chart's controller Deployment: its replicas, image and leader.

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{ContainerStatus, Pod};
use kube::Api;
use kube::api::{DynamicObject, GroupVersionKind, ListParams, Patch, PatchParams};
use kube::core::ApiResource;
use serde_json::{Value, json};

use super::test_bed::{TestBed, wait_one};
use crate::wait::CheckResult;

/// Namespace of the chart.
pub(super) const NAMESPACE: &str = "tessera-system";
/// Name of the Deployment, of its pods' label and of the Lease.
const NAME: &str = "tessera-controller";

/// Deployment, pods and Lease of the controller.
pub(super) struct ControllerDeployment {
    deployments: Api<DynamicObject>,
    pub(super) pods: Api<Pod>,
    pub(super) leases: Api<Lease>,
}

impl ControllerDeployment {
    pub(super) fn new(test_bed: &TestBed) -> Self {
        let resource = ApiResource::from_gvk(&GroupVersionKind::gvk("apps", "v1", "Deployment"));
        Self {
            deployments: Api::namespaced_with(test_bed.client.clone(), NAMESPACE, &resource),
            pods: Api::namespaced(test_bed.client.clone(), NAMESPACE),
            leases: Api::namespaced(test_bed.client.clone(), NAMESPACE),
        }
    }

    /// Returns the desired number of replicas; `None` if the controller is not a Deployment.
    pub(super) async fn replicas(&self) -> anyhow::Result<Option<i64>> {
        let deployment = self.deployments.get_opt(NAME).await?;
        Ok(deployment.map(|deployment| deployment.data["spec"]["replicas"].as_i64().unwrap_or(1)))
    }

    /// Sets the number of replicas, and waits until they are ready and all others are deleted.
    pub(super) async fn scale(&self, replicas: i64) -> anyhow::Result<()> {
        self.change(json!({"spec": {"replicas": replicas}})).await
    }

    /// Sets the image, and waits until all replicas use it. Returns the previous image.
    pub(super) async fn set_image(&self, image: &str) -> anyhow::Result<String> {
        let deployment = self.deployments.get(NAME).await?;
        let before = &deployment.data["spec"]["template"]["spec"]["containers"][0];
        let (container, before) =
            (before["name"].clone(), before["image"].as_str().unwrap_or_default());
        let containers = json!([{"name": container, "image": image}]);
        self.change(json!({"spec": {"template": {"spec": {"containers": containers}}}})).await?;
        Ok(before.to_owned())
    }

    /// Replaces all replicas, as `kubectl rollout restart` does, and waits until that is done.
    pub(super) async fn restart(&self, reason: &str) -> anyhow::Result<()> {
        let annotations = json!({"metadata": {"annotations": {"trial": reason}}});
        self.change(json!({"spec": {"template": annotations}})).await
    }

    async fn change(&self, change: Value) -> anyhow::Result<()> {
        let changed = self
            .deployments
            .patch(NAME, &PatchParams::default(), &Patch::Strategic(change))
            .await?;
        let replicas = changed.data["spec"]["replicas"].as_i64().unwrap_or(1);
        let generation = changed.metadata.generation.unwrap_or_default();
        let check = |deployment: Option<&DynamicObject>| {
            let status =
                deployment.map(|deployment| deployment.data["status"].clone()).unwrap_or_default();
            let count = |field: &str| status[field].as_i64().unwrap_or(0);
            // Terminating pods do not count as replicas, but may still write.
            let done = count("observedGeneration") >= generation
                && ["replicas", "updatedReplicas", "readyReplicas"]
                    .iter()
                    .all(|field| count(field) == replicas)
                && count("terminatingReplicas") == 0;
            CheckResult::done_if(done, || status.to_string())
        };
        let what = format!("{NAME} to have {replicas} replicas");
        wait_one(self.deployments.clone(), NAME, &what, check).await
    }

    /// Waits until an existing pod leads whose name `accept` accepts; returns the pod.
    pub(super) async fn wait_leader(
        &self,
        what: &str,
        accept: impl Fn(&str) -> bool,
    ) -> anyhow::Result<Pod> {
        let selector = ListParams::default().labels(&format!("app.kubernetes.io/name={NAME}"));
        let pods = self.pods.list(&selector).await?.items;
        let named = |name: &str| {
            pods.iter().find(|pod| pod.metadata.name.as_deref() == Some(name)).cloned()
        };
        let check = |lease: Option<&Lease>| match lease_holder(lease) {
            Some(holder) if accept(&holder) => named(&holder).map_or_else(
                || CheckResult::Pending(format!("{holder}, which is not a pod")),
                CheckResult::Done,
            ),
            other => CheckResult::Pending(format!("{other:?}")),
        };
        wait_one(self.leases.clone(), NAME, what, check).await
    }

    /// Waits until the pod's container was restarted more than `times` times and is ready.
    pub(super) async fn wait_restarted(
        &self,
        pod: &str,
        times: i32,
    ) -> anyhow::Result<ContainerStatus> {
        let check = |pod: Option<&Pod>| match pod.and_then(container) {
            Some(status) if status.restart_count > times && status.ready => {
                CheckResult::Done(status.clone())
            }
            status => CheckResult::Pending(json!(status).to_string()),
        };
        let what = format!("the controller in pod {pod} to be restarted");
        wait_one(self.pods.clone(), pod, &what, check).await
    }
}

/// Returns the holder of the Lease.
pub(super) fn lease_holder(lease: Option<&Lease>) -> Option<String> {
    lease?.spec.as_ref()?.holder_identity.clone().filter(|holder| !holder.is_empty())
}

/// Returns the status of a pod's only container.
pub(super) fn container(pod: &Pod) -> Option<&ContainerStatus> {
    pod.status.as_ref()?.container_statuses.as_ref()?.first()
}
