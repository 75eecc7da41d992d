//! `kubectl tessera resize`: changes the size of a claim's share while containers use it.
//!
//! ```text
//! GpuResize.spec --> controller: room? --> status Granted --> driver --> status Applied
//! ```
//!
//! The command writes the spec and reads the status. What cannot be done now is withdrawn, so that
//! it does not happen by surprise later.

use std::collections::BTreeSet;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::{DeviceRequestAllocationResult, ResourceClaim};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::api::{DeleteParams, PostParams, Preconditions};
use kube::{Api, Client, Resource as _, ResourceExt};
use serde::Serialize;
use serde_json::Value;
use tessera_api::names::DRIVER_NAME;
use tessera_api::names::capacity::{CORES, MEMORY};
use tessera_api::quantity::Quantity;
use tessera_api::resize::{
    GRANTED_CONDITION, GpuResize, GpuResizeSpec, RequestedSize, ShareSize, apply_sizes,
};
use tokio::time::Instant;

use crate::pod_claims::claim_names;

/// Name of the writer of the objects.
const MANAGER: &str = "kubectl-tessera";

/// Attempts to write a spec, whose object's status others write.
const WRITES: usize = 5;

/// Time between two looks at the status.
const INTERVAL: Duration = Duration::from_millis(250);

/// Time between two lines about what is waited for.
const REPORT_INTERVAL: Duration = Duration::from_secs(10);

/// A change that a user asks for.
#[derive(Debug, Clone)]
pub struct ResizeRequest {
    /// The claim, or `pod/` and a pod.
    pub claim: String,
    /// The request; none = the claim's only one.
    pub request: Option<String>,
    /// The new amounts.
    pub size: ShareSize,
    /// Time after which the change is withdrawn; none = it is not waited for.
    pub timeout: Option<Duration>,
}

/// The effect of a change.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ResizeReport {
    /// Namespace of the claim.
    pub namespace: String,
    /// Name of the claim.
    pub claim: String,
    /// The request.
    pub request: String,
    /// True if the containers are held to the new size.
    pub is_applied: bool,
    /// The shares of the request.
    pub shares: Vec<ShareChange>,
}

/// The change of one share.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ShareChange {
    /// The node.
    pub node: String,
    /// The device.
    pub device: String,
    /// The size before.
    pub before: Amounts,
    /// The size after; as it was asked for, if it is not applied yet.
    pub after: Amounts,
}

/// Amounts of a share, as quantities.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Amounts {
    /// Device memory.
    pub memory: String,
    /// Percent of the GPU.
    pub cores: String,
}

/// Errors of a change. Each message says what to do.
#[derive(Debug, thiserror::Error)]
pub enum ResizeCommandError {
    /// The claim or the pod does not exist.
    #[error("{kind} {namespace}/{name} does not exist")]
    NotFound {
        /// The kind.
        kind: &'static str,
        /// Its namespace.
        namespace: String,
        /// Its name.
        name: String,
    },
    /// The pod has no claim of Tessera, or several.
    #[error("pod {pod} has {}; name the ResourceClaim", claims_text(.claims))]
    PodClaims {
        /// The pod.
        pod: String,
        /// Its claims with shares.
        claims: Vec<String>,
    },
    /// The claim has no share of a GPU.
    #[error(
        "ResourceClaim {claim} has no share of a GPU of gpu.tessera.dev; a claim that is not \
         allocated gets the size in its spec, or in its template"
    )]
    NoShare {
        /// The claim.
        claim: String,
    },
    /// The claim has several requests, or not the one that was named.
    #[error("ResourceClaim {claim} has shares of the requests {requests}; name one by --request")]
    Request {
        /// The claim.
        claim: String,
        /// Its requests.
        requests: String,
    },
    /// The definition is not installed.
    #[error(
        "the cluster has no GpuResizes: shares can be changed in mode managed of the Helm chart of \
         this version"
    )]
    NoDefinition,
    /// The user has no permission.
    #[error("not permitted to {verb} gpuresizes ({message}): that takes the ClusterRole edit")]
    Forbidden {
        /// The verb.
        verb: &'static str,
        /// The answer of the API server.
        message: String,
    },
    /// The controller or the driver has refused.
    #[error("refused: {message}; nothing was changed")]
    Refused {
        /// The reason.
        message: String,
    },
    /// The time is over.
    #[error("not applied within {} s: {message}; the change was withdrawn", after.as_secs())]
    TimedOut {
        /// The time.
        after: Duration,
        /// The state at that time.
        message: String,
    },
    /// Another client has changed or deleted the object.
    #[error("GpuResize {name} was changed by another client meanwhile; try again")]
    Changed {
        /// Its name.
        name: String,
    },
    /// A request failed.
    #[error("cannot {verb} {object}")]
    Api {
        /// The verb.
        verb: &'static str,
        /// Kind and name.
        object: String,
        /// The cause.
        #[source]
        source: Box<kube::Error>,
    },
}

fn claims_text(claims: &[String]) -> String {
    match claims {
        [] => "no ResourceClaim with a share of a GPU".to_owned(),
        all => format!("several ResourceClaims with shares of a GPU ({})", all.join(", ")),
    }
}

/// The state of a change.
enum Progress {
    Applied,
    Refused(String),
    Waiting(String),
}

/// A change under way.
pub struct Resize<'p> {
    client: Client,
    resizes: Api<GpuResize>,
    namespace: String,
    progress: &'p mut dyn FnMut(&str),
}

impl<'p> Resize<'p> {
    /// Returns the means to change shares of a namespace. `progress` receives lines for the user.
    pub fn new(client: Client, namespace: String, progress: &'p mut dyn FnMut(&str)) -> Self {
        let resizes = Api::namespaced(client.clone(), &namespace);
        Self { client, resizes, namespace, progress }
    }

    /// Asks for the change, and waits until the containers are held to it.
    ///
    /// # Errors
    /// [`ResizeCommandError`]. A change that was refused or timed out is withdrawn.
    pub async fn run(mut self, asked: &ResizeRequest) -> Result<ResizeReport, ResizeCommandError> {
        let claim = self.claim(&asked.claim).await?;
        let (request, before) = shares(&claim, asked.request.as_deref())?;
        let known = self.resizes.get_opt(&claim.name_any()).await;
        let known = known.map_err(|error| of_resizes("get", error))?;
        let wanted = wanted(&claim, known.clone(), &request, asked.size);
        let written = match known {
            Some(_) => self.replace(wanted).await?,
            None => self.create(&wanted).await?,
        };
        let is_applied = match asked.timeout {
            Some(timeout) => {
                let waited = self.wait(&written, timeout).await;
                if let Err(error) = &waited {
                    let is_refused = matches!(error, ResizeCommandError::Refused { .. });
                    // The sizes before count again, where something was granted.
                    let before = before.first().map(amounts).filter(|_| !is_refused);
                    self.withdraw(&written, known, before.as_ref()).await?;
                }
                waited.map(|()| true)?
            }
            None => false,
        };
        let share = |share: &DeviceRequestAllocationResult| ShareChange {
            node: share.pool.clone(),
            device: share.device.clone(),
            before: amounts(share),
            after: changed(amounts(share), asked.size),
        };
        Ok(ResizeReport {
            namespace: self.namespace,
            claim: claim.name_any(),
            request,
            is_applied,
            shares: before.iter().map(share).collect(),
        })
    }

    /// Returns the claim of this name, or that of a pod.
    async fn claim(&self, name: &str) -> Result<ResourceClaim, ResizeCommandError> {
        let claims: Api<ResourceClaim> = Api::namespaced(self.client.clone(), &self.namespace);
        let get = async |name: &str| {
            let found = claims.get_opt(name).await;
            found.map_err(|source| self.failed("get", format!("ResourceClaim {name}"), source))
        };
        let Some(pod) = name.strip_prefix("pod/") else {
            return get(name).await?.ok_or_else(|| self.missing("ResourceClaim", name));
        };
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), &self.namespace);
        let found = pods.get_opt(pod).await;
        let found = found.map_err(|source| self.failed("get", format!("pod {pod}"), source))?;
        let found = found.ok_or_else(|| self.missing("pod", pod))?;
        let mut with_shares = Vec::new();
        for claim in claims_of(&found) {
            with_shares.extend(get(&claim).await?.filter(|claim| shares(claim, None).is_ok()));
        }
        if with_shares.len() > 1 || with_shares.is_empty() {
            let claims = with_shares.iter().map(ResourceExt::name_any).collect();
            return Err(ResizeCommandError::PodClaims { pod: pod.to_owned(), claims });
        }
        Ok(with_shares.remove(0))
    }

    fn missing(&self, kind: &'static str, name: &str) -> ResizeCommandError {
        let (namespace, name) = (self.namespace.clone(), name.to_owned());
        ResizeCommandError::NotFound { kind, namespace, name }
    }

    fn failed(
        &self,
        verb: &'static str,
        object: String,
        source: kube::Error,
    ) -> ResizeCommandError {
        let object = format!("{object} of namespace {}", self.namespace);
        ResizeCommandError::Api { verb, object, source: Box::new(source) }
    }

    async fn create(&self, wanted: &GpuResize) -> Result<GpuResize, ResizeCommandError> {
        let created = self.resizes.create(&parameters(), wanted).await;
        created.map_err(|error| match error {
            kube::Error::Api(status) if status.code == 409 => {
                ResizeCommandError::Changed { name: wanted.name_any() }
            }
            other => of_resizes("create", other),
        })
    }

    /// Writes the spec of an object as it was read. A status that was written meanwhile, by
    /// controller or driver, is no obstacle.
    async fn replace(&self, mut wanted: GpuResize) -> Result<GpuResize, ResizeCommandError> {
        let name = wanted.name_any();
        for _ in 0..WRITES {
            match self.resizes.replace(&name, &parameters(), &wanted).await {
                Err(kube::Error::Api(status)) if status.code == 409 => {}
                other => return other.map_err(|error| of_resizes("update", error)),
            }
            let now =
                self.resizes.get_opt(&name).await.map_err(|error| of_resizes("get", error))?;
            let Some(now) = now.filter(|now| is_same(now, &wanted)) else { break };
            wanted = GpuResize { spec: wanted.spec, ..now };
        }
        Err(ResizeCommandError::Changed { name })
    }

    async fn wait(
        &mut self,
        written: &GpuResize,
        timeout: Duration,
    ) -> Result<(), ResizeCommandError> {
        let (name, started) = (written.name_any(), Instant::now());
        let mut reported = started;
        loop {
            let now =
                self.resizes.get_opt(&name).await.map_err(|error| of_resizes("get", error))?;
            let now = now
                .filter(|now| is_same(now, written))
                .ok_or_else(|| ResizeCommandError::Changed { name: name.clone() })?;
            let message = match progress(&now) {
                Progress::Applied => return Ok(()),
                Progress::Refused(message) => return Err(ResizeCommandError::Refused { message }),
                Progress::Waiting(message) => message,
            };
            if started.elapsed() >= timeout {
                return Err(ResizeCommandError::TimedOut { after: timeout, message });
            }
            if reported.elapsed() >= REPORT_INTERVAL {
                reported = Instant::now();
                (self.progress)(&format!("{message}, after {} s", started.elapsed().as_secs()));
            }
            tokio::time::sleep(INTERVAL).await;
        }
    }

    /// Gives the object the spec that it had. One that is new gets these amounts, or is deleted.
    async fn withdraw(
        &self,
        written: &GpuResize,
        known: Option<GpuResize>,
        before: Option<&Amounts>,
    ) -> Result<(), ResizeCommandError> {
        let name = written.name_any();
        let amounts = |before: &Amounts| {
            let mut spec = written.spec.clone();
            for request in &mut spec.requests {
                request.memory = Some(Value::String(before.memory.clone()));
                request.cores = Some(Value::String(before.cores.clone()));
            }
            spec
        };
        let Some(spec) = known.map(|known| known.spec).or_else(|| before.map(amounts)) else {
            let preconditions = Preconditions { uid: written.uid(), resource_version: None };
            let parameters =
                DeleteParams { preconditions: Some(preconditions), ..DeleteParams::default() };
            return match self.resizes.delete(&name, &parameters).await {
                Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => Ok(()),
                other => other.map(drop).map_err(|error| of_resizes("delete", error)),
            };
        };
        let now = self.resizes.get_opt(&name).await.map_err(|error| of_resizes("get", error))?;
        match now.filter(|now| is_same(now, written)) {
            Some(now) => self.replace(GpuResize { spec, ..now }).await.map(drop),
            // Another client has asked for something else.
            None => Ok(()),
        }
    }
}

fn parameters() -> PostParams {
    PostParams { field_manager: Some(MANAGER.to_owned()), dry_run: false }
}

/// Returns true if both are one object with the same spec.
fn is_same(now: &GpuResize, other: &GpuResize) -> bool {
    now.uid() == other.uid() && now.metadata.generation == other.metadata.generation
}

/// Returns the state of the change that the spec asks for.
fn progress(resize: &GpuResize) -> Progress {
    let generation = resize.metadata.generation;
    let granted = resize.condition(GRANTED_CONDITION);
    let Some(granted) = granted.filter(|one| one.observed_generation == generation) else {
        return Progress::Waiting("tessera-controller has not answered; does it run?".to_owned());
    };
    if granted.status != "True" {
        return Progress::Refused(granted.message.clone());
    }
    let node = resize.status.as_ref().and_then(|status| status.node.as_deref());
    let driver = format!("the driver of node {} has not answered", node.unwrap_or_default());
    match resize.answer() {
        Some(answer) if answer.status == "True" => Progress::Applied,
        Some(answer) => Progress::Waiting(answer.message.clone()),
        None => Progress::Waiting(driver),
    }
}

/// Returns the names of the claims of a pod, with that of its extended resources.
fn claims_of(pod: &Pod) -> BTreeSet<String> {
    let extended = pod.status.iter().filter_map(|status| {
        Some(status.extended_resource_claim_status.as_ref()?.resource_claim_name.clone())
    });
    claim_names(pod).into_iter().chain(extended).collect()
}

/// Returns the request of this name, or the only one, and its shares with the sizes that count.
fn shares(
    claim: &ResourceClaim,
    request: Option<&str>,
) -> Result<(String, Vec<DeviceRequestAllocationResult>), ResizeCommandError> {
    let mut status = claim.status.clone().unwrap_or_default();
    apply_sizes(&mut status);
    let devices = status.allocation.and_then(|allocation| allocation.devices);
    let results = devices.and_then(|devices| devices.results).unwrap_or_default();
    let is_share =
        |one: &DeviceRequestAllocationResult| one.driver == DRIVER_NAME && one.share_id.is_some();
    let shares: Vec<_> = results.into_iter().filter(is_share).collect();
    let requests: BTreeSet<&str> = shares.iter().map(|share| share.request.as_str()).collect();
    let named = match request {
        Some(request) => requests.get(request).copied(),
        None => requests.first().copied().filter(|_| requests.len() == 1),
    };
    let name = || claim.name_any();
    match named.map(ToOwned::to_owned) {
        _ if requests.is_empty() => Err(ResizeCommandError::NoShare { claim: name() }),
        Some(named) => {
            let of_request = shares.into_iter().filter(|share| share.request == named).collect();
            Ok((named, of_request))
        }
        None => {
            let requests = requests.into_iter().collect::<Vec<_>>().join(", ");
            Err(ResizeCommandError::Request { claim: name(), requests })
        }
    }
}

/// Returns the object with the new size of one request. Other requests, and an amount that is not
/// named, stay as they were asked for.
fn wanted(
    claim: &ResourceClaim,
    known: Option<GpuResize>,
    request: &str,
    size: ShareSize,
) -> GpuResize {
    let owner = OwnerReference {
        api_version: ResourceClaim::api_version(&()).into_owned(),
        kind: ResourceClaim::kind(&()).into_owned(),
        name: claim.name_any(),
        uid: claim.uid().unwrap_or_default(),
        ..OwnerReference::default()
    };
    let mut resize = known.unwrap_or_else(|| GpuResize {
        metadata: ObjectMeta {
            name: claim.metadata.name.clone(),
            namespace: claim.metadata.namespace.clone(),
            owner_references: Some(vec![owner]),
            ..ObjectMeta::default()
        },
        spec: GpuResizeSpec::default(),
        status: None,
    });
    let requests = &mut resize.spec.requests;
    if !requests.iter().any(|known| known.name == request) {
        requests.push(RequestedSize { name: request.to_owned(), ..RequestedSize::default() });
    }
    for known in requests.iter_mut().filter(|known| known.name == request) {
        let text = |amount: Quantity| Value::String(amount.to_string());
        known.memory = size.memory.map(text).or(known.memory.take());
        known.cores = size.cores.map(text).or(known.cores.take());
    }
    resize
}

fn amounts(share: &DeviceRequestAllocationResult) -> Amounts {
    let amount = |name: &str| {
        let consumed = share.consumed_capacity.as_ref().and_then(|all| all.get(name));
        consumed.map(|amount| amount.0.clone()).unwrap_or_default()
    };
    Amounts { memory: amount(MEMORY), cores: amount(CORES) }
}

fn changed(before: Amounts, size: ShareSize) -> Amounts {
    let text = |amount: Option<Quantity>| amount.map(|amount| amount.to_string());
    Amounts {
        memory: text(size.memory).unwrap_or(before.memory),
        cores: text(size.cores).unwrap_or(before.cores),
    }
}

fn of_resizes(verb: &'static str, error: kube::Error) -> ResizeCommandError {
    match error {
        // A missing object is no error of these requests but that of a missing definition.
        kube::Error::Api(status) if status.code == 404 => ResizeCommandError::NoDefinition,
        kube::Error::Api(status) if status.code == 403 => {
            ResizeCommandError::Forbidden { verb, message: status.message.clone() }
        }
        other => ResizeCommandError::Api {
            verb,
            object: "GpuResize".to_owned(),
            source: Box::new(other),
        },
    }
}

/// Returns the effect as text.
#[must_use]
pub fn text(report: &ResizeReport) -> String {
    let ResizeReport { namespace, claim, request, .. } = report;
    let end = if report.is_applied { "" } else { " (asked for)" };
    let line = |share: &ShareChange| {
        let ShareChange { node, device, before, after } = share;
        format!(
            "claim {namespace}/{claim} request {request} on {node}/{device}: memory {} -> {}, \
             cores {} -> {}{end}\n",
            before.memory, after.memory, before.cores, after.cores
        )
    };
    report.shares.iter().map(line).collect()
}

#[cfg(test)]
mod tests;
