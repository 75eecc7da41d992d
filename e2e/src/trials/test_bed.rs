//! Test bed of a trial: a namespace, claim templates, and pods with a share of a GPU.

use std::collections::BTreeSet;
use std::time::Duration;

use k8s_openapi::api::apps::v1::ReplicaSet;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::{
    DeviceRequestAllocationResult, DeviceTaintRule, ResourceClaim, ResourceClaimTemplate,
};
use kube::api::{DeleteParams, ListParams, LogParams, PostParams};
use kube::runtime::watcher;
use kube::{Api, Client, Config, Resource, ResourceExt};
use serde::Serialize;
use serde_json::{Value, json};
use tessera_api::config::{API_VERSION, KIND};

use super::{Cluster, Sizes, unfinished_pods};
use crate::harness::TrialOutcome;
use crate::inventory::{DRIVER, GpuInventory, GpuNodes};
use crate::leftovers;
use crate::operations::Operations;
use crate::plugin::Plugin;
use crate::wait::{self, CheckResult, Watched};

/// Time limit for a pod to run or to be deleted on a loaded machine.
pub(super) const TIMEOUT: Duration = Duration::from_secs(300);

/// Device class of A100.
pub(super) const A100: &str = "a100.gpu.tessera.dev";

/// Device class of H100.
pub(super) const H100: &str = "h100.gpu.tessera.dev";

/// Clients and helpers of one trial.
#[derive(Clone)]
pub struct TestBed {
    config: Config,
    /// The administrator's client.
    pub client: Client,
    /// Operations on the cluster's machines, where available.
    pub operations: Option<Operations>,
    plugin: Option<Plugin>,
    sizes: Sizes,
    gpu_nodes: GpuNodes,
    namespace: String,
}

/// Reason to skip a trial, as an error that [`TestBed::run`] converts.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Skip(pub String);

impl TestBed {
    /// Creates the test bed of the trial with that name.
    pub(super) fn new(cluster: &Cluster, name: &str) -> Self {
        let Cluster { config, client, operations, plugin, sizes, gpu_nodes } = cluster.clone();
        let namespace = format!("trial-{name}");
        Self { config, client, operations, plugin, sizes, gpu_nodes, namespace }
    }

    /// Waits until all nodes publish their GPUs, as at the first trial, and returns these.
    pub(super) async fn published_gpus(&self) -> anyhow::Result<GpuInventory> {
        Ok(self.gpu_nodes.inventory(&self.client).await?)
    }

    /// Returns the sizes of the long trials.
    pub(super) fn sizes(&self) -> Sizes {
        self.sizes
    }

    /// Returns a client that impersonates another user.
    pub(super) fn client_of(&self, user: &str) -> anyhow::Result<Client> {
        let mut config = self.config.clone();
        config.auth_info.impersonate = Some(user.to_owned());
        Ok(Client::try_from(config)?)
    }

    /// Returns the URL of the API server.
    pub(super) fn server(&self) -> &axum::http::Uri {
        &self.config.cluster_url
    }

    /// Returns the minor version of Kubernetes 1.
    pub(super) async fn minor_version(&self) -> anyhow::Result<u32> {
        let version = self.client.apiserver_version().await?;
        // Some distributions append a plus sign.
        Ok(version.minor.trim_end_matches('+').parse()?)
    }

    /// Creates the namespace, runs the trial, and clears the namespace.
    pub(super) async fn run<F>(self, trial: impl FnOnce(Self) -> F) -> TrialOutcome
    where
        F: Future<Output = TrialOutcome>,
    {
        // Left by an interrupted run.
        leftovers::delete_namespace(&self.client, &self.namespace, TIMEOUT).await?;
        leftovers::none_allocated(&self.client).await?;
        self.published_gpus().await?;
        leftovers::create_namespace(&self.client, &self.namespace).await?;
        let outcome = match trial(self.clone()).await {
            Err(error) => match error.downcast::<Skip>() {
                Ok(Skip(reason)) => Ok(crate::runner::Outcome::Skipped(reason)),
                Err(error) => {
                    let report = unfinished_pods::report(&self.client, &self.namespace).await;
                    Err(anyhow::anyhow!("{error:#}\n{report}"))
                }
            },
            other => other,
        };
        let cleared = leftovers::clear_namespace(&self.client, &self.namespace, TIMEOUT).await;
        let outcome = outcome?;
        cleared?;
        Ok(outcome)
    }

    /// Returns the trial's namespace.
    pub fn namespace(&self) -> &str {
        &self.namespace
    }

    /// Returns the operations on machines, or a reason to skip the trial.
    pub fn operations(&self) -> Result<&Operations, Skip> {
        self.operations.as_ref().ok_or_else(|| Skip("TESSERA_E2E_NODE is not set".into()))
    }

    /// Returns `kubectl tessera`, or a reason to skip the trial.
    pub fn plugin(&self) -> Result<&Plugin, Skip> {
        self.plugin
            .as_ref()
            .ok_or_else(|| Skip("kubectl-tessera is not built, or there is no kubeconfig".into()))
    }

    /// Returns a node with that many GPUs of a product, or a reason to skip the trial.
    pub async fn node_with(&self, word: &str, count: usize) -> anyhow::Result<String> {
        let node = self.published_gpus().await?.node_with(word, count).map(str::to_owned);
        node.ok_or_else(|| Skip(format!("no node with {count} {word} GPUs")).into())
    }

    /// Returns the API of the namespace's pods.
    pub fn pods(&self) -> Api<Pod> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    /// Returns the API of the namespace's claims.
    pub fn claims(&self) -> Api<ResourceClaim> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    /// Creates a template for claims of one device of that class. `capacity` is the value of
    /// `capacity.requests`.
    pub async fn create_template(
        &self,
        name: &str,
        class: &str,
        capacity: Value,
    ) -> anyhow::Result<()> {
        self.create_template_with(name, one_gpu(class, &capacity)).await
    }

    /// Creates a template as [`create_template`](Self::create_template) does, with these fields of
    /// a GpuConfig.
    pub(super) async fn create_configured_template(
        &self,
        name: &str,
        class: &str,
        capacity: Value,
        config: Value,
    ) -> anyhow::Result<()> {
        let devices = configured(one_gpu(class, &capacity), config);
        self.create_template_with(name, devices).await
    }

    /// Creates a [`replica_set`].
    pub(super) async fn create_replica_set(
        &self,
        name: &str,
        replicas: usize,
        template: &str,
    ) -> anyhow::Result<Api<ReplicaSet>> {
        let sets: Api<ReplicaSet> = Api::namespaced(self.client.clone(), &self.namespace);
        let object = serde_json::from_value(replica_set(name, replicas, template))?;
        sets.create(&PostParams::default(), &object).await?;
        Ok(sets)
    }

    /// Returns the DeviceTaintRules, or a reason to skip the trial.
    pub(super) async fn taint_rules(&self) -> anyhow::Result<Api<DeviceTaintRule>> {
        if !self.has_taint_rules().await? {
            return Err(Skip("the cluster has no DeviceTaintRules".into()).into());
        }
        Ok(Api::all(self.client.clone()))
    }

    /// Returns true if the cluster has DeviceTaintRules, which Kubernetes 1.36 does not have.
    pub(super) async fn has_taint_rules(&self) -> anyhow::Result<bool> {
        let rules: Api<DeviceTaintRule> = Api::all(self.client.clone());
        match rules.list(&ListParams::default()).await {
            Err(kube::Error::Api(status)) if status.code == 404 => Ok(false),
            listed => Ok(listed.map(|_| true)?),
        }
    }

    /// Creates a template for claims with these devices.
    pub async fn create_template_with(&self, name: &str, devices: Value) -> anyhow::Result<()> {
        let templates: Api<ResourceClaimTemplate> =
            Api::namespaced(self.client.clone(), &self.namespace);
        let template = serde_json::from_value(json!({
            "metadata": {"name": name}, "spec": {"spec": {"devices": devices}},
        }))?;
        templates.create(&PostParams::default(), &template).await?;
        Ok(())
    }

    /// Creates a pod that allocates some memory of a claim from `template` until it is deleted.
    pub async fn create_holder(&self, name: &str, template: &str) -> anyhow::Result<()> {
        self.create(from_template(name, template)).await.map(drop)
    }

    /// Creates a pod as [`Self::create_holder`] does, and waits until it runs.
    pub(super) async fn start_holder(&self, name: &str, template: &str) -> anyhow::Result<Pod> {
        self.create_holder(name, template).await?;
        self.wait_running(name).await
    }

    /// Creates a pod.
    pub(super) async fn create(&self, pod: Value) -> anyhow::Result<Pod> {
        Ok(self.pods().create(&PostParams::default(), &serde_json::from_value(pod)?).await?)
    }

    /// Creates a claim.
    pub(super) async fn create_claim(&self, claim: Value) -> anyhow::Result<ResourceClaim> {
        Ok(self.claims().create(&PostParams::default(), &serde_json::from_value(claim)?).await?)
    }

    /// Checks that the pod still runs with the same containers.
    pub(super) async fn check_undisturbed(&self, before: &Pod) -> anyhow::Result<()> {
        let name = before.name_any();
        let now = self.pods().get(&name).await?;
        anyhow::ensure!(
            container_ids(&now) == container_ids(before) && phase(&now) == "Running",
            "pod {name} was restarted or stopped: {:?}, then {} {:?}",
            container_ids(before),
            phase(&now),
            container_ids(&now)
        );
        Ok(())
    }

    /// Waits until the pod runs.
    pub async fn wait_running(&self, name: &str) -> anyhow::Result<Pod> {
        let check = |pod: Option<&Pod>| {
            let pod = pod.filter(|pod| phase(pod) == "Running");
            pod.map_or_else(
                || CheckResult::Pending("not running".into()),
                |pod| CheckResult::Done(pod.clone()),
            )
        };
        let what = format!("pod {name} to run");
        wait_one(self.pods(), name, &what, check).await
    }

    /// Returns the claim that was generated for the pod.
    pub(super) async fn claim_of(&self, pod: &Pod) -> anyhow::Result<ResourceClaim> {
        let statuses =
            pod.status.iter().flat_map(|status| status.resource_claim_statuses.iter().flatten());
        let name = statuses.into_iter().find_map(|status| status.resource_claim_name.as_deref());
        let name = name.ok_or_else(|| anyhow::anyhow!("pod {} has no claim", pod.name_any()))?;
        Ok(self.claims().get(name).await?)
    }

    /// Returns the devices of the pods' claims, each as POOL/DEVICE.
    pub(super) async fn gpus_of(&self, pods: &[Pod]) -> anyhow::Result<BTreeSet<String>> {
        let mut gpus = BTreeSet::new();
        for pod in pods {
            let claim = self.claim_of(pod).await?;
            let name = |result: &DeviceRequestAllocationResult| {
                format!("{}/{}", result.pool, result.device)
            };
            gpus.extend(leftovers::device_results(&claim).map(name));
        }
        Ok(gpus)
    }

    /// Returns the only GPU of the pods' claims, as POOL/DEVICE.
    pub(super) async fn common_gpu(&self, pods: &[Pod]) -> anyhow::Result<String> {
        let gpus = self.gpus_of(pods).await?;
        let only = gpus.first().filter(|_| gpus.len() == 1).cloned();
        only.ok_or_else(|| anyhow::anyhow!("not all on one GPU: {gpus:?}"))
    }

    /// Waits until the pod has succeeded, and returns the output lines of its container.
    pub(super) async fn output_of(&self, name: &str) -> anyhow::Result<Vec<String>> {
        let check = |pod: Option<&Pod>| match pod.map(phase) {
            Some(ended @ ("Succeeded" | "Failed")) => CheckResult::Done(ended == "Succeeded"),
            other => CheckResult::Pending(format!("{other:?}")),
        };
        let what = format!("pod {name} to end");
        let succeeded = wait_one(self.pods(), name, &what, check).await?;
        let output = self.pods().logs(name, &LogParams::default()).await?;
        anyhow::ensure!(succeeded, "pod {name} failed: {output}");
        Ok(output.lines().map(str::to_owned).collect())
    }

    /// Deletes a pod that may be deleted already, without waiting.
    pub(super) async fn delete_if_exists(
        &self,
        pod: &str,
        parameters: &DeleteParams,
    ) -> anyhow::Result<()> {
        delete_if_exists(&self.pods(), pod, parameters).await
    }

    /// Deletes pods and waits until they are deleted.
    pub async fn delete(&self, names: &[impl AsRef<str>]) -> anyhow::Result<()> {
        for name in names {
            self.pods().delete(name.as_ref(), &DeleteParams::default()).await?;
        }
        for name in names {
            wait_deleted(self.pods(), name.as_ref()).await?;
        }
        Ok(())
    }

    /// Waits until the scheduler has reported each of these pods as unschedulable.
    pub async fn wait_unschedulable(&self, names: &[String]) -> anyhow::Result<()> {
        for name in names {
            let check = |pod: Option<&Pod>| {
                let condition = pod.and_then(|pod| pod.status.as_ref()).and_then(|status| {
                    status
                        .conditions
                        .iter()
                        .flatten()
                        .find(|condition| condition.type_ == "PodScheduled")
                        .cloned()
                });
                match condition {
                    Some(condition) if condition.status == "False" => CheckResult::Done(()),
                    other => CheckResult::Pending(format!("{other:?}")),
                }
            };
            let what = format!("the scheduler to report pod {name} as unschedulable");
            wait_one(self.pods(), name, &what, check).await?;
        }
        Ok(())
    }
}

/// Waits until `check` accepts one object, as [`wait::until_one`] within [`TIMEOUT`].
pub(super) async fn wait_one<K: Watched, T>(
    api: Api<K>,
    name: &str,
    condition: &str,
    check: impl FnMut(Option<&K>) -> CheckResult<T>,
) -> anyhow::Result<T> {
    Ok(wait::until_one(api, name, condition, TIMEOUT, check).await?)
}

/// Waits until `check` accepts the selected objects, as [`wait::until`] within [`TIMEOUT`].
pub(super) async fn wait_selected<K: Watched, T>(
    api: Api<K>,
    selector: watcher::Config,
    condition: &str,
    check: impl FnMut(&[K]) -> CheckResult<T>,
) -> anyhow::Result<T> {
    Ok(wait::until(api, selector, condition, TIMEOUT, check).await?)
}

/// Waits until `check` accepts all objects, as [`wait::until`] within [`TIMEOUT`].
pub(super) async fn wait_all<K: Watched, T>(
    api: Api<K>,
    condition: &str,
    check: impl FnMut(&[K]) -> CheckResult<T>,
) -> anyhow::Result<T> {
    wait_selected(api, watcher::Config::default(), condition, check).await
}

/// Waits until the object is deleted.
pub(super) async fn wait_deleted<K: Watched + Resource<DynamicType = ()> + Serialize>(
    api: Api<K>,
    name: &str,
) -> anyhow::Result<()> {
    let condition = format!("{} {name} to be deleted", K::kind(&()));
    wait_one(api, name, &condition, CheckResult::deleted).await
}

/// Returns a pod of one container that allocates memory of its claim.
pub(super) fn holder(name: &str, claim: Value) -> Value {
    json!({
        "metadata": {"name": name},
        "spec": {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 5,
            "containers": [{
                "name": "probe",
                "image": "tessera/probe:e2e",
                "imagePullPolicy": "Never",
                "command": ["tessera-probe", "hold", "--take", "64Mi"],
                "resources": {"claims": [{"name": claim["name"]}]},
            }],
            "resourceClaims": [claim],
        },
    })
}

/// Returns a pod of one container that allocates memory of a claim from that template.
pub(super) fn from_template(name: &str, template: &str) -> Value {
    holder(name, json!({"name": "gpu", "resourceClaimTemplateName": template}))
}

/// Deletes an object that may be deleted already, without waiting.
pub(super) async fn delete_if_exists<K: Watched>(
    api: &Api<K>,
    name: &str,
    parameters: &DeleteParams,
) -> anyhow::Result<()> {
    match api.delete(name, parameters).await {
        Err(kube::Error::Api(status)) if status.is_not_found() => Ok(()),
        answer => Ok(answer.map(drop)?),
    }
}

/// Returns the devices of a claim with these fields of a GpuConfig.
pub(super) fn configured(mut devices: Value, config: Value) -> Value {
    let mut parameters = json!({"apiVersion": API_VERSION, "kind": KIND});
    for (field, value) in config.as_object().into_iter().flatten() {
        parameters[field] = value.clone();
    }
    devices["config"] = json!([{"opaque": {"driver": DRIVER, "parameters": parameters}}]);
    devices
}

/// Returns the request for one device of that class. `capacity` is the value of
/// `capacity.requests`.
pub(super) fn one_gpu(class: &str, capacity: &Value) -> Value {
    let mut exactly = json!({"deviceClassName": class});
    if !capacity.is_null() {
        exactly["capacity"] = json!({"requests": capacity});
    }
    json!({"requests": [{"name": "gpu", "exactly": exactly}]})
}

/// Returns a ReplicaSet of such pods, which have the label `app` with its name.
fn replica_set(name: &str, replicas: usize, template: &str) -> Value {
    let mut spec = from_template("unused", template)["spec"].clone();
    // A ReplicaSet restarts its containers always.
    spec["restartPolicy"] = Value::Null;
    let labels = json!({"app": name});
    json!({
        "metadata": {"name": name},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": spec},
        },
    })
}

/// Returns a pod's phase.
pub(super) fn phase(pod: &Pod) -> &str {
    pod.status.as_ref().and_then(|status| status.phase.as_deref()).unwrap_or_default()
}

/// Returns the identities of a pod's containers, which change if a container is restarted.
pub(super) fn container_ids(pod: &Pod) -> Vec<String> {
    let statuses = pod.status.iter().flat_map(|status| status.container_statuses.iter().flatten());
    statuses
        .map(|status| format!("{} {:?} {}", status.name, status.container_id, status.restart_count))
        .collect()
}

/// Returns the UID of a pod.
pub(super) fn uid(pod: &Pod) -> String {
    pod.uid().unwrap_or_default()
}
