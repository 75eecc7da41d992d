//! Worker of one pod, from its binding to its deletion.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Container, Pod};
use kube::ResourceExt;
use kube::api::{DeleteParams, Patch, PatchParams, Preconditions};
use serde_json::{Value, json};
use tessera_runtime::error_chain::chain;
use tokio::sync::watch;
use tokio::time::Instant;

use super::Shared;
use super::podspec::{self, ConfigError};
use super::progress::{self, Outcome};
use super::status::{StatusInputs, Waiting, pod_status};
use crate::node::container::{ContainerState, StartError};

/// Latest known state of the worker's pod.
#[derive(Clone, Debug)]
pub(crate) enum PodUpdate {
    Present(Arc<Pod>),
    /// The object is deleted, with its last state if known.
    Gone(Option<Arc<Pod>>),
}

/// Grace period used by the kubelet if a pod sets none.
const DEFAULT_GRACE: i64 = 30;

/// Task of one pod.
pub(crate) struct Worker {
    shared: Arc<Shared>,
    uid: String,
    input: watch::Receiver<PodUpdate>,
    prepared: bool,
    outcome: Option<Outcome>,
    waiting: BTreeMap<String, Waiting>,
    written: Option<Value>,
}

/// Pause before the next round, unless something happens earlier.
type RetryAfter = Option<Duration>;

impl Worker {
    pub(crate) fn new(shared: Arc<Shared>, uid: String, input: watch::Receiver<PodUpdate>) -> Self {
        Self {
            shared,
            uid,
            input,
            prepared: false,
            outcome: None,
            waiting: BTreeMap::new(),
            written: None,
        }
    }

    pub(crate) fn uid(&self) -> &str {
        &self.uid
    }

    pub(crate) async fn run(mut self) {
        let mut containers = self.shared.runtime.subscribe();
        let mut health = self.shared.health.subscribe();
        loop {
            containers.mark_unchanged();
            health.mark_unchanged();
            let input = self.input.borrow_and_update().clone();
            let again = match input {
                PodUpdate::Present(pod) if pod.metadata.deletion_timestamp.is_none() => {
                    self.advance(&pod).await
                }
                PodUpdate::Present(pod) => return self.terminate(Some(&pod), true).await,
                PodUpdate::Gone(pod) => return self.terminate(pod.as_deref(), false).await,
            };
            let pause = async {
                match again {
                    Some(pause) => tokio::time::sleep(pause).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                changed = self.input.changed() => if changed.is_err() { return },
                _ = containers.changed() => {}
                _ = health.changed() => {}
                () = pause => {}
            }
        }
    }

    /// Runs one round for a pod that is not being deleted.
    async fn advance(&mut self, pod: &Pod) -> RetryAfter {
        if self.outcome.is_none() {
            self.outcome = ended_before(pod);
        }
        let again =
            if self.outcome.is_some() { self.unprepare(pod).await } else { self.sync(pod).await };
        let written = self.write_status(pod).await;
        again.or(written)
    }

    async fn sync(&mut self, pod: &Pod) -> RetryAfter {
        if let Err(again) = self.prepare(pod).await {
            return again;
        }
        loop {
            let containers = self.shared.runtime.containers(&self.uid);
            let next = progress::next_actions(pod, &containers, Timestamp::now());
            if let Some(outcome) = next.outcome {
                // The kubelet unprepares after the last container and before it reports the end of
                // the pod.
                let again = self.unprepare(pod).await;
                self.outcome = again.is_none().then_some(outcome);
                return again;
            }
            if next.start.is_empty() {
                return next.again_in;
            }
            let mut failed = false;
            for (container, attempt) in next.start {
                failed |= !self.start(pod, container, attempt).await;
            }
            if failed {
                return Some(self.shared.sync_period);
            }
        }
    }

    /// Prepares the claims. A deletion meanwhile cancels the call, as in the kubelet.
    async fn prepare(&mut self, pod: &Pod) -> Result<(), RetryAfter> {
        if self.prepared {
            return Ok(());
        }
        let mut input = self.input.clone();
        let ending = input.wait_for(|input| match input {
            PodUpdate::Present(pod) => pod.metadata.deletion_timestamp.is_some(),
            PodUpdate::Gone(_) => true,
        });
        let outcome = tokio::select! {
            outcome = self.shared.claims.prepare(pod) => outcome,
            _ = ending => return Err(Some(Duration::ZERO)),
        };
        match outcome {
            Ok(()) => {
                self.prepared = true;
                Ok(())
            }
            Err(error) => {
                let message = format!(
                    "Failed to prepare dynamic resources: prepare dynamic resources: {}",
                    chain(&error)
                );
                self.shared.events.warn(pod, "FailedPrepareDynamicResources", message).await;
                Err(Some(self.shared.sync_period))
            }
        }
    }

    /// Unprepares the claims. Returns the pause before a retry if that fails.
    async fn unprepare(&mut self, pod: &Pod) -> RetryAfter {
        match self.shared.claims.unprepare(&self.uid).await {
            Ok(()) => None,
            Err(error) => {
                let message = format!("unprepare dynamic resources: {}", chain(&error));
                self.shared.events.warn(pod, "FailedUnprepareDynamicResources", message).await;
                Some(self.shared.sync_period)
            }
        }
    }

    /// Starts a container, or records the failure. Returns true if it was created.
    async fn start(&mut self, pod: &Pod, container: &Container, attempt: u32) -> bool {
        let waiting = match self.try_start(pod, container, attempt).await {
            Ok(()) => {
                self.waiting.remove(&container.name);
                return true;
            }
            Err(waiting) => waiting,
        };
        self.shared.events.warn(pod, "Failed", format!("Error: {}", waiting.message)).await;
        self.waiting.insert(container.name.clone(), waiting);
        false
    }

    async fn try_start(
        &self,
        pod: &Pod,
        container: &Container,
        attempt: u32,
    ) -> Result<(), Waiting> {
        let config_error =
            |message: String| Waiting { reason: "CreateContainerConfigError", message };
        let ids = self
            .shared
            .claims
            .cdi_devices(pod, container)
            .map_err(|error| config_error(chain(&error)))?;
        self.make_volumes(pod).map_err(config_error)?;
        let config = podspec::container_config(pod, container, attempt, ids, &self.shared.root)
            .map_err(|error: ConfigError| config_error(error.to_string()))?;
        self.shared.runtime.start(config).await.map_err(|error| Waiting {
            reason: match error {
                StartError::NoImage { .. } => "ErrImageNeverPull",
                _ => "CreateContainerError",
            },
            message: chain(&error),
        })
    }

    fn make_volumes(&self, pod: &Pod) -> Result<(), String> {
        let directory = podspec::volumes_directory(&self.shared.root, pod);
        let names = pod
            .spec
            .iter()
            .flat_map(|spec| spec.volumes.iter().flatten())
            .map(|volume| &volume.name);
        let mut paths: Vec<_> = names.map(|name| directory.join(name)).collect();
        paths.push(podspec::shared_memory(&self.shared.root, pod));
        paths.iter().try_for_each(|path| {
            make_volume(path).map_err(|error| format!("`{}`: {error}", path.display()))
        })
    }

    /// Stops the containers, unprepares the claims, and deletes the object.
    async fn terminate(mut self, pod: Option<&Pod>, delete: bool) {
        self.stop_containers(pod.map_or(Duration::ZERO, grace_period)).await;
        let containers = self.shared.runtime.containers(&self.uid);
        let failed =
            containers.iter().any(|c| !matches!(c.state, ContainerState::Exited { code: 0, .. }));
        let outcome = if failed { Outcome::Failed } else { Outcome::Succeeded };
        while let Err(error) = self.shared.claims.unprepare(&self.uid).await {
            let message = format!("unprepare dynamic resources: {}", chain(&error));
            tracing::warn!(uid = self.uid, error = message, "cannot unprepare claims; retrying");
            if let Some(pod) = pod {
                self.shared.events.warn(pod, "FailedUnprepareDynamicResources", message).await;
            }
            tokio::time::sleep(self.shared.sync_period).await;
        }
        self.outcome = self.outcome.or(pod.and_then(ended_before)).or(Some(outcome));
        if let (Some(pod), true) = (pod, delete) {
            self.write_status(pod).await;
        }
        self.remove_files();
        if let (Some(pod), true) = (pod, delete) {
            self.delete(pod).await;
        }
    }

    async fn stop_containers(&self, grace: Duration) {
        let runtime = &self.shared.runtime;
        let mut changes = runtime.subscribe();
        let deadline = Instant::now() + grace;
        let mut asked = false;
        loop {
            let containers = runtime.containers(&self.uid);
            let alive =
                || containers.iter().filter(|c| !matches!(c.state, ContainerState::Exited { .. }));
            if alive().next().is_none() {
                return;
            }
            if Instant::now() >= deadline {
                alive().for_each(|container| runtime.kill(&container.id));
                let _ = changes.changed().await;
                continue;
            }
            if !asked {
                alive().for_each(|container| runtime.terminate(&container.id));
                asked = true;
            }
            // Past the deadline the next round kills.
            let _ = tokio::time::timeout_at(deadline, changes.changed()).await;
        }
    }

    fn remove_files(&self) {
        let pod_directory = self.shared.root.join("pods").join(&self.uid);
        for result in [self.shared.runtime.remove_ended(&self.uid), remove_tree(&pod_directory)] {
            if let Err(error) = result {
                tracing::warn!(%error, uid = self.uid, "cannot remove pod files");
            }
        }
    }

    async fn delete(&self, pod: &Pod) {
        let api = self.shared.pods_api(&pod.namespace().unwrap_or_default());
        let preconditions =
            Some(Preconditions { uid: Some(self.uid.clone()), resource_version: None });
        let parameters = DeleteParams {
            grace_period_seconds: Some(0),
            preconditions,
            ..DeleteParams::default()
        };
        loop {
            match api.delete(&pod.name_any(), &parameters).await {
                Ok(_) => return,
                // Already deleted, or another pod has this name.
                Err(kube::Error::Api(status)) if status.is_not_found() || status.is_conflict() => {
                    return;
                }
                Err(error) => {
                    tracing::warn!(
                        %error,
                        namespace = pod.namespace(),
                        pod = pod.name_any(),
                        "cannot delete pod; retrying"
                    )
                }
            }
            tokio::time::sleep(self.shared.sync_period).await;
        }
    }

    /// Writes the status if it has changed. Returns the pause before a retry if that fails.
    async fn write_status(&mut self, pod: &Pod) -> RetryAfter {
        let containers = self.shared.runtime.containers(&self.uid);
        let host_ip = self.shared.host_ip.to_string();
        let status = pod_status(&StatusInputs {
            pod,
            containers: &containers,
            waiting: &self.waiting,
            health: &self.device_health(pod),
            prepared: self.prepared,
            outcome: self.outcome,
            host_ip: &host_ip,
            now: Timestamp::now(),
        });
        if self.written.as_ref().is_some_and(|written| same_status(written, &status)) {
            return None;
        }
        let api = self.shared.pods_api(&pod.namespace().unwrap_or_default());
        let patch = json!({"metadata": {"uid": self.uid}, "status": status});
        match api.patch_status(&pod.name_any(), &PatchParams::default(), &Patch::Merge(patch)).await
        {
            Ok(_) => {
                self.written = Some(status);
                None
            }
            // The watch reports the rest: deletion, or another pod of this name.
            Err(kube::Error::Api(status)) if status.is_not_found() || status.is_conflict() => None,
            Err(error) => {
                tracing::warn!(
                    %error,
                    namespace = pod.namespace(),
                    pod = pod.name_any(),
                    "cannot write pod status; retrying"
                );
                Some(self.shared.sync_period)
            }
        }
    }

    /// Returns `allocatedResourcesStatus` by container.
    fn device_health(&self, pod: &Pod) -> BTreeMap<String, Value> {
        let containers = pod.spec.iter().flat_map(|spec| &spec.containers);
        containers
            .filter_map(|container| {
                let claims = self.shared.claims.container_claims(pod, container).ok()?;
                let statuses: Vec<Value> = claims
                    .iter()
                    .map(|(name, request, info)| {
                        let name = request
                            .as_ref()
                            .map_or(format!("claim:{name}"), |r| format!("claim:{name}/{r}"));
                        let mut resources: Vec<Value> = Vec::new();
                        for (driver, device) in info.devices(request.as_deref()) {
                            let id = device.cdi_ids.first().cloned();
                            let id = id.unwrap_or_else(|| {
                                format!("{driver}/{}/{}", device.pool, device.device)
                            });
                            if resources.iter().any(|seen| seen["resourceID"] == id.as_str()) {
                                continue;
                            }
                            let health = self.shared.health.get(
                                driver,
                                &device.pool,
                                &device.device,
                                Instant::now(),
                            );
                            let mut resource = json!({"resourceID": id, "health": health.status});
                            if let Some(message) = health.message {
                                resource["message"] = message.into();
                            }
                            resources.push(resource);
                        }
                        json!({"name": name, "resources": resources})
                    })
                    .filter(|status| {
                        status["resources"]
                            .as_array()
                            .is_some_and(|resources| !resources.is_empty())
                    })
                    .collect();
                (!statuses.is_empty()).then(|| (container.name.clone(), Value::from(statuses)))
            })
            .collect()
    }
}

/// Returns the result of a pod that ended under an earlier kubelet.
fn ended_before(pod: &Pod) -> Option<Outcome> {
    match pod.status.as_ref()?.phase.as_deref()? {
        "Succeeded" => Some(Outcome::Succeeded),
        "Failed" => Some(Outcome::Failed),
        _ => None,
    }
}

fn grace_period(pod: &Pod) -> Duration {
    let of_spec = pod.spec.as_ref().and_then(|spec| spec.termination_grace_period_seconds);
    let seconds = pod.metadata.deletion_grace_period_seconds.or(of_spec).unwrap_or(DEFAULT_GRACE);
    Duration::from_secs(u64::try_from(seconds).unwrap_or(0))
}

/// Returns true if both statuses are equal. Condition times follow from their statuses.
fn same_status(one: &Value, other: &Value) -> bool {
    let timeless = |status: &Value| {
        let mut status = status.clone();
        status["startTime"] = Value::Null;
        for condition in status["conditions"].as_array_mut().into_iter().flatten() {
            condition["lastTransitionTime"] = Value::Null;
        }
        status
    };
    timeless(one) == timeless(other)
}

/// Every user of the pod may write to the volume.
fn make_volume(path: &std::path::Path) -> std::io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    std::fs::create_dir_all(path)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o777))
}

fn remove_tree(path: &std::path::Path) -> std::io::Result<()> {
    match std::fs::remove_dir_all(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}
