//! Drains: cordons GPUs and evicts the pods that use them, until no claim is allocated there.
//!
//! Pods are evicted by the Eviction API, so PodDisruptionBudgets hold: a refused eviction is tried
//! again. A claim is free once its pods have ended and their controller or the kubelet has released
//! it. Only claims and pods of the GPUs are read meanwhile; the cluster is read again at the end,
//! for what was allocated before the controller saw the cordon.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::{Api, Client, ResourceExt};
use serde::Serialize;
use tessera_api::names::DRIVER_NAME;
use tessera_runtime::cluster::{self, EvictionAnswer, PodEviction};
use tokio::time::Instant;

use super::{Cordons, GpuChange, GpuError, TargetGpu};

/// Time between two rounds.
const INTERVAL: Duration = Duration::from_secs(1);

/// Time between two lines about what is waited for.
const REPORT_INTERVAL: Duration = Duration::from_secs(10);

/// Settings of a drain.
#[derive(Debug, Clone, Copy, Default)]
pub struct DrainOptions {
    /// Evicts also pods that no controller creates again.
    pub force: bool,
    /// Seconds for the pods to end; none = as each pod says.
    pub grace_period: Option<u32>,
    /// Time limit; none = without end.
    pub timeout: Option<Duration>,
    /// Changes nothing.
    pub is_dry_run: bool,
}

/// A claim that is allocated on a GPU to drain.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct GpuClaim {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// The pods that use a claim that was deleted; none of an existing claim, which names them.
    pub orphans: Vec<String>,
}

/// The result of a drain.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DrainReport {
    /// The GPUs, each with the effect of the cordon.
    pub gpus: Vec<GpuChange>,
    /// The evicted pods, as `namespace/name`; in a dry run, those that would be.
    pub evicted: BTreeSet<String>,
}

/// A drain under way.
pub struct Drain<'p> {
    client: Client,
    /// Does not repeat refused requests.
    evictions: Client,
    options: DrainOptions,
    gpus: Vec<TargetGpu>,
    /// Claims that may still be allocated on the GPUs.
    claims: BTreeSet<GpuClaim>,
    report: DrainReport,
    /// The last line about each pod or claim.
    told: BTreeMap<String, String>,
    progress: &'p mut dyn FnMut(&str),
}

/// The state of a claim.
enum ClaimUse {
    /// It is not allocated on the GPUs any more.
    Released,
    /// It is; by the reason of each of its users, or of its own.
    Held(Vec<String>),
}

impl<'p> Drain<'p> {
    /// Returns a drain of these GPUs. `evictions` is a client that does not repeat refused
    /// requests, and `progress` receives lines for the user.
    pub fn new(
        client: Client,
        evictions: Client,
        gpus: Vec<TargetGpu>,
        options: DrainOptions,
        progress: &'p mut dyn FnMut(&str),
    ) -> Self {
        let (claims, told) = (BTreeSet::new(), BTreeMap::new());
        let report = DrainReport::default();
        Self { client, evictions, options, gpus, claims, report, told, progress }
    }

    /// Cordons the GPUs and evicts the pods until no claim is allocated on them. `read` returns the
    /// claims that are allocated on the GPUs now.
    ///
    /// # Errors
    /// [`GpuError`]; the error of `read`.
    pub async fn run<E: From<GpuError>>(
        mut self,
        read: impl AsyncFn() -> Result<BTreeSet<GpuClaim>, E>,
    ) -> Result<DrainReport, E> {
        self.claims = read().await?;
        let pods = self.pods().await?;
        if !self.options.force {
            refuse_unmanaged(&pods)?;
        }
        let cordons = Cordons::new(self.client.clone(), self.options.is_dry_run);
        for gpu in self.gpus.clone() {
            let change = cordons.cordon(&gpu).await?;
            (self.progress)(&format!("gpu {gpu} {}", change.text()));
            self.report.gpus.push(GpuChange::new(gpu, change, self.options.is_dry_run));
        }
        if self.options.is_dry_run {
            self.report.evicted = pods.iter().map(pod_name).collect();
            return Ok(self.report);
        }
        let started = Instant::now();
        loop {
            self.wait_released(started).await?;
            // What was allocated before the controller saw the cordon.
            self.claims = read().await?;
            if self.claims.is_empty() {
                return Ok(self.report);
            }
        }
    }

    /// Evicts pods until none of the claims is allocated on the GPUs.
    async fn wait_released(&mut self, started: Instant) -> Result<(), GpuError> {
        let mut last_report = Instant::now();
        loop {
            let left = self.round().await?;
            if left.is_empty() {
                return Ok(());
            }
            if let Some(timeout) = self.options.timeout.filter(|limit| started.elapsed() >= *limit)
            {
                return Err(GpuError::TimedOut { after: seconds(timeout), left });
            }
            if last_report.elapsed() >= REPORT_INTERVAL {
                last_report = Instant::now();
                let (claims, after) = (self.claims.len(), seconds(started.elapsed()));
                let waiting = left.join("; ");
                (self.progress)(&format!("{claims} claims left after {after}: {waiting}"));
            }
            tokio::time::sleep(INTERVAL).await;
        }
    }

    /// Looks at each claim once, and evicts its pods. Returns what is waited for.
    async fn round(&mut self) -> Result<Vec<String>, GpuError> {
        let mut left = Vec::new();
        for claim in self.claims.clone() {
            match self.release(&claim).await {
                Ok(ClaimUse::Released) => drop(self.claims.remove(&claim)),
                Ok(ClaimUse::Held(reasons)) => left.extend(reasons),
                // The API server may be away for a moment.
                Err(GpuError::Request { verb, object, source }) => {
                    let reason = format!("cannot {verb} {object}: {}", cause(&source));
                    self.tell(&object, format!("{reason}; trying again"));
                    left.push(reason);
                }
                Err(error) => return Err(error),
            }
        }
        Ok(left)
    }

    async fn release(&mut self, claim: &GpuClaim) -> Result<ClaimUse, GpuError> {
        let object = self.claim(claim).await?.filter(|object| self.is_on_gpus(object));
        let Some(object) = object else { return self.evict_orphans(claim).await };
        let name = format!("claim {}/{}", claim.namespace, claim.name);
        let users = object.status.and_then(|status| status.reserved_for).unwrap_or_default();
        if users.is_empty() {
            return Ok(ClaimUse::Held(vec![format!("{name} waits to be released")]));
        }
        let mut reasons = Vec::new();
        for user in users {
            if user.resource == "pods" {
                let uid = Some(user.uid.as_str());
                reasons.extend(self.evict(&claim.namespace, &user.name, uid).await?);
            } else {
                let kind = &user.resource;
                reasons.push(format!("{name} is reserved for {kind}/{}: delete it", user.name));
            }
        }
        if reasons.is_empty() {
            reasons.push(format!("{name} waits to be released"));
        }
        Ok(ClaimUse::Held(reasons))
    }

    /// Evicts the pods that use a claim that was deleted.
    async fn evict_orphans(&mut self, claim: &GpuClaim) -> Result<ClaimUse, GpuError> {
        let mut reasons = Vec::new();
        for pod in &claim.orphans {
            reasons.extend(self.evict(&claim.namespace, pod, None).await?);
        }
        Ok(if reasons.is_empty() { ClaimUse::Released } else { ClaimUse::Held(reasons) })
    }

    /// Evicts a pod, if it has this UID. Returns what it is waited for; none if it has ended.
    async fn evict(
        &mut self,
        namespace: &str,
        name: &str,
        uid: Option<&str>,
    ) -> Result<Option<String>, GpuError> {
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), namespace);
        let pod = format!("{namespace}/{name}");
        let found = pods.get_opt(name).await;
        let found = found.map_err(|error| GpuError::of("get", "pods", pod.clone(), error))?;
        let is_it = |found: &Pod| uid.is_none() || found.uid().as_deref() == uid;
        let Some(found) = found.filter(|found| is_it(found) && !has_ended(found)) else {
            return Ok(None);
        };
        if found.metadata.deletion_timestamp.is_some() {
            return Ok(Some(format!("pod {pod} ends")));
        }
        let uid = found.uid().unwrap_or_default();
        let grace_period = self.options.grace_period;
        let eviction = PodEviction { namespace, name, uid: &uid, grace_period, is_dry_run: false };
        match cluster::evict(&self.evictions, eviction).await {
            EvictionAnswer::Evicted => {
                self.report.evicted.insert(pod.clone());
                self.tell(&pod, format!("pod {pod} evicted"));
                Ok(Some(format!("pod {pod} ends")))
            }
            EvictionAnswer::Refused(message) => {
                let reason = format!("pod {pod}: {message}");
                self.tell(&pod, format!("{reason} Trying again."));
                Ok(Some(reason))
            }
            EvictionAnswer::Gone => Ok(None),
            EvictionAnswer::Failed(error) => {
                let object = format!("an eviction of pod {pod}");
                Err(GpuError::of("create", "pods/eviction", object, error))
            }
        }
    }

    /// Tells the user about a pod, unless the last line about it was the same.
    fn tell(&mut self, pod: &str, line: String) {
        if self.told.get(pod) != Some(&line) {
            (self.progress)(&line);
            self.told.insert(pod.to_owned(), line);
        }
    }

    async fn claim(&self, claim: &GpuClaim) -> Result<Option<ResourceClaim>, GpuError> {
        let claims: Api<ResourceClaim> = Api::namespaced(self.client.clone(), &claim.namespace);
        let name = format!("ResourceClaim {}/{}", claim.namespace, claim.name);
        let found = claims.get_opt(&claim.name).await;
        found.map_err(|error| GpuError::of("get", "resourceclaims", name, error))
    }

    fn is_on_gpus(&self, claim: &ResourceClaim) -> bool {
        let allocation = claim.status.as_ref().and_then(|status| status.allocation.as_ref());
        let devices = allocation.and_then(|allocation| allocation.devices.as_ref());
        let mut results = devices.iter().flat_map(|devices| devices.results.iter().flatten());
        results.any(|result| {
            result.driver == DRIVER_NAME
                && self
                    .gpus
                    .iter()
                    .any(|gpu| gpu.node == result.pool && gpu.device == result.device)
        })
    }

    /// Returns the pods of the claims, without those that have ended.
    async fn pods(&self) -> Result<Vec<Pod>, GpuError> {
        let mut found = Vec::new();
        let mut seen = BTreeSet::new();
        for claim in &self.claims {
            let Some(object) = self.claim(claim).await? else { continue };
            let users = object.status.and_then(|status| status.reserved_for).unwrap_or_default();
            for user in users.into_iter().filter(|user| user.resource == "pods") {
                if !seen.insert(user.uid.clone()) {
                    continue;
                }
                let pods: Api<Pod> = Api::namespaced(self.client.clone(), &claim.namespace);
                let name = format!("Pod {}/{}", claim.namespace, user.name);
                let pod = pods.get_opt(&user.name).await;
                let pod = pod.map_err(|error| GpuError::of("get", "pods", name, error))?;
                let is_it = |pod: &Pod| pod.uid() == Some(user.uid.clone()) && !has_ended(pod);
                found.extend(pod.filter(is_it));
            }
        }
        Ok(found)
    }
}

/// Returns an error if no controller creates one of the pods again.
pub(crate) fn refuse_unmanaged(pods: &[Pod]) -> Result<(), GpuError> {
    let is_managed = |pod: &Pod| pod.owner_references().iter().any(|o| o.controller == Some(true));
    let unmanaged: Vec<String> = pods.iter().filter(|pod| !is_managed(pod)).map(pod_name).collect();
    if unmanaged.is_empty() { Ok(()) } else { Err(GpuError::Unmanaged(unmanaged)) }
}

fn pod_name(pod: &Pod) -> String {
    format!("{}/{}", pod.namespace().unwrap_or_default(), pod.name_any())
}

fn has_ended(pod: &Pod) -> bool {
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    matches!(phase, Some("Succeeded" | "Failed"))
}

/// Returns the message of the API server, or the error.
fn cause(error: &kube::Error) -> String {
    match error {
        kube::Error::Api(status) if !status.message.is_empty() => status.message.clone(),
        other => other.to_string(),
    }
}

/// Returns a time in whole seconds, as `90s`.
fn seconds(time: Duration) -> String {
    format!("{}s", time.as_secs())
}
