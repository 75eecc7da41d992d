//! Claims of this node's pods: validated, prepared by their drivers, and unprepared after use.
//!
//! Follows the kubelet's DRA manager. First everything is checked without any change, so that a pod
//! that fails here leaves nothing behind. Then the claims are recorded with the pod as a user. Then
//! the drivers are called, without a lock, one batch per driver.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use k8s_openapi::api::core::v1::{Container, Pod};
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::{Api, Client, ResourceExt};
use tessera_proto::dra_v1;

use super::checkpoint::{CheckpointFile, ClaimInfo, ClaimKey, PreparedDevice};
use super::plugin::Plugin;
use super::plugins::PluginRegistry;

/// Failure to prepare or unprepare a pod's claims. Every one of these is retried.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ClaimError {
    #[error("pod {pod}: the ResourceClaim for `{claim}` has not been created yet")]
    NotCreated { pod: String, claim: String },
    #[error("fetch ResourceClaim {claim}")]
    Fetch { claim: String, source: Box<kube::Error> },
    #[error("ResourceClaim {claim} was not created for pod {pod} (pod is not owner)")]
    NotOwner { claim: String, pod: String },
    #[error("pod {pod} is not allowed to use ResourceClaim {claim} ({uid})")]
    NotReserved { pod: String, claim: String, uid: String },
    #[error("ResourceClaim {claim}: claim is not allocated")]
    NotAllocated { claim: String },
    #[error("DRA driver {driver} is not registered")]
    NotRegistered { driver: String },
    #[error(
        "old ResourceClaim with same name {claim} and different UID {uid} still exists (previous pod force-deleted?!)"
    )]
    Replaced { claim: String, uid: String },
    #[error("ResourceClaim {claim} is being unprepared")]
    BeingUnprepared { claim: String },
    #[error("checkpoint ResourceClaim cache")]
    Checkpoint { source: io::Error },
    #[error("{call}: {message}")]
    Call { call: &'static str, message: String },
    #[error("{call} failed for ResourceClaim {claim}: {message}")]
    Claim { call: &'static str, claim: String, message: String },
    #[error("{call} skipped {count} ResourceClaims")]
    Skipped { call: &'static str, count: usize },
    #[error("{call} returned result for unknown claim UID {uid}")]
    Unknown { call: &'static str, uid: String },
}

const PREPARE: &str = "NodePrepareResources";
const UNPREPARE: &str = "NodeUnprepareResources";

/// Claims of one node.
pub(crate) struct Claims {
    client: Client,
    plugins: Arc<PluginRegistry>,
    checkpoint: CheckpointFile,
    known: Mutex<BTreeMap<ClaimKey, ClaimInfo>>,
}

/// One entry of `pod.spec.resourceClaims`, resolved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PodClaim {
    /// Name by which containers refer to it.
    pub(crate) name: String,
    /// The claim object, or `None` if no claim is needed.
    pub(crate) object: Option<String>,
    /// True if the claim was generated from a template for this pod.
    generated: bool,
}

type Batches = BTreeMap<String, (Arc<Plugin>, Vec<dra_v1::Claim>)>;

impl Claims {
    /// Loads the claims recorded by an earlier kubelet.
    pub(crate) fn new(
        client: Client,
        plugins: Arc<PluginRegistry>,
        kubelet_root: &Path,
    ) -> io::Result<Self> {
        let checkpoint = CheckpointFile::new(kubelet_root);
        let known = Mutex::new(checkpoint.load()?);
        Ok(Self { client, plugins, checkpoint, known })
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<ClaimKey, ClaimInfo>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Prepares the pod's claims. Claims that are already prepared cause no call.
    pub(crate) async fn prepare(&self, pod: &Pod) -> Result<(), ClaimError> {
        let namespace = pod.namespace().unwrap_or_default();
        let pod_uid = pod.uid().unwrap_or_default();
        let mut infos = Vec::new();
        let mut plugins = BTreeMap::new();
        for claim in pod_claims(pod)? {
            let Some(name) = &claim.object else { continue };
            let api: Api<ResourceClaim> = Api::namespaced(self.client.clone(), &namespace);
            let object = api.get(name).await.map_err(|source| ClaimError::Fetch {
                claim: name.clone(),
                source: Box::new(source),
            })?;
            let info = check(pod, &claim, &object)?;
            for driver in info.drivers.keys() {
                let plugin = self.plugins.get(driver);
                let plugin =
                    plugin.ok_or_else(|| ClaimError::NotRegistered { driver: driver.clone() })?;
                plugins.insert(driver.clone(), plugin);
            }
            infos.push(info);
        }
        let (batches, fresh) = self.record(&pod_uid, infos, &plugins)?;
        for (driver, (plugin, claims)) in batches {
            let answers = plugin.prepare(claims.clone()).await.map_err(|status| {
                ClaimError::Call { call: PREPARE, message: status.to_string() }
            })?;
            let answers =
                answers.into_iter().map(|(uid, answer)| (uid, (answer.error.clone(), answer)));
            for (claim, answer) in match_responses(PREPARE, &claims, answers)? {
                let key = (claim.namespace.clone(), claim.name.clone());
                if let Some(info) = self.lock().get_mut(&key) {
                    let devices = answer.devices.into_iter().map(PreparedDevice::from).collect();
                    info.drivers.insert(driver.clone(), devices);
                }
            }
        }
        let mut known = self.lock();
        for key in fresh {
            if let Some(info) = known.get_mut(&key) {
                info.prepared = true;
            }
        }
        self.save(&known)
    }

    /// Records the pod as a user of its claims before any driver is called. Returns the calls that
    /// are needed.
    fn record(
        &self,
        pod_uid: &str,
        infos: Vec<ClaimInfo>,
        plugins: &BTreeMap<String, Arc<Plugin>>,
    ) -> Result<(Batches, Vec<ClaimKey>), ClaimError> {
        let mut known = self.lock();
        for info in &infos {
            match known.get(&info.key()) {
                Some(old) if old.uid != info.uid => {
                    return Err(ClaimError::Replaced {
                        claim: info.name.clone(),
                        uid: old.uid.clone(),
                    });
                }
                Some(old) if old.unpreparing => {
                    return Err(ClaimError::BeingUnprepared { claim: info.name.clone() });
                }
                _ => {}
            }
        }
        let (mut batches, mut fresh) = (Batches::new(), Vec::new());
        for info in infos {
            let info = known.entry(info.key()).or_insert(info);
            info.pods.insert(pod_uid.to_owned());
            if info.prepared {
                continue;
            }
            fresh.push(info.key());
            for driver in info.drivers.keys() {
                let batch = batches
                    .entry(driver.clone())
                    .or_insert_with(|| (plugins[driver].clone(), Vec::new()));
                batch.1.push(info.to_proto());
            }
        }
        self.save(&known)?;
        Ok((batches, fresh))
    }

    /// Releases the pod's claims. A claim without local users is unprepared.
    pub(crate) async fn unprepare(&self, pod_uid: &str) -> Result<(), ClaimError> {
        let mut batches: BTreeMap<String, Vec<dra_v1::Claim>> = BTreeMap::new();
        let mut ending = Vec::new();
        for info in self.lock().values_mut().filter(|info| info.pods.contains(pod_uid)) {
            if info.pods.len() > 1 {
                info.pods.remove(pod_uid);
                continue;
            }
            info.unpreparing = true;
            ending.push(info.key());
            for driver in info.drivers.keys() {
                batches.entry(driver.clone()).or_default().push(info.to_proto());
            }
        }
        for (driver, claims) in batches {
            let plugin = self.plugins.get(&driver).ok_or(ClaimError::NotRegistered { driver })?;
            let answers = plugin.unprepare(claims.clone()).await.map_err(|status| {
                ClaimError::Call { call: UNPREPARE, message: status.to_string() }
            })?;
            match_responses(
                UNPREPARE,
                &claims,
                answers.into_iter().map(|(uid, answer)| (uid, (answer.error, ()))),
            )?;
        }
        let mut known = self.lock();
        ending.iter().for_each(|key| drop(known.remove(key)));
        self.save(&known)
    }

    fn save(&self, known: &BTreeMap<ClaimKey, ClaimInfo>) -> Result<(), ClaimError> {
        self.checkpoint.save(known).map_err(|source| ClaimError::Checkpoint { source })
    }

    /// Returns the UIDs of pods that use claims on this node.
    pub(crate) fn users(&self) -> BTreeSet<String> {
        self.lock().values().flat_map(|info| info.pods.iter().cloned()).collect()
    }

    /// Returns a container's CDI devices in the order in which the runtime gets them.
    pub(crate) fn cdi_devices(
        &self,
        pod: &Pod,
        container: &Container,
    ) -> Result<Vec<String>, ClaimError> {
        let infos = self.container_claims(pod, container)?;
        let ids = infos.iter().flat_map(|(_, request, info)| {
            info.devices(request.as_deref()).flat_map(|(_, device)| device.cdi_ids.iter().cloned())
        });
        Ok(ids.collect())
    }

    /// Returns each entry of the container's `resources.claims` with name, request and prepared
    /// claim.
    pub(crate) fn container_claims(
        &self,
        pod: &Pod,
        container: &Container,
    ) -> Result<Vec<(String, Option<String>, ClaimInfo)>, ClaimError> {
        let pod_claims = pod_claims(pod)?;
        let known = self.lock();
        let namespace = pod.namespace().unwrap_or_default();
        let wanted = container.resources.as_ref().and_then(|resources| resources.claims.as_ref());
        let mut infos = Vec::new();
        for entry in wanted.into_iter().flatten() {
            let object = pod_claims
                .iter()
                .find(|claim| claim.name == entry.name)
                .and_then(|claim| claim.object.clone());
            let info = object.and_then(|object| known.get(&(namespace.clone(), object)));
            if let Some(info) = info {
                infos.push((entry.name.clone(), entry.request.clone(), info.clone()));
            }
        }
        Ok(infos)
    }
}

/// Returns the pod's claims by name. An entry whose claim is not generated yet is an error.
pub(crate) fn pod_claims(pod: &Pod) -> Result<Vec<PodClaim>, ClaimError> {
    let spec = pod.spec.as_ref();
    let statuses = pod.status.as_ref().and_then(|status| status.resource_claim_statuses.as_ref());
    let entries = spec.and_then(|spec| spec.resource_claims.as_ref());
    let resolve = |entry: &k8s_openapi::api::core::v1::PodResourceClaim| {
        if let Some(object) = &entry.resource_claim_name {
            return Ok(PodClaim {
                name: entry.name.clone(),
                object: Some(object.clone()),
                generated: false,
            });
        }
        let status = statuses.into_iter().flatten().find(|status| status.name == entry.name);
        let status = status.ok_or_else(|| ClaimError::NotCreated {
            pod: pod.name_any(),
            claim: entry.name.clone(),
        })?;
        let object = status.resource_claim_name.clone();
        Ok(PodClaim { name: entry.name.clone(), object, generated: true })
    };
    entries.into_iter().flatten().map(resolve).collect()
}

/// Validates a claim before it is prepared, as the kubelet does.
fn check(pod: &Pod, claim: &PodClaim, object: &ResourceClaim) -> Result<ClaimInfo, ClaimError> {
    let (name, uid) = (object.name_any(), object.uid().unwrap_or_default());
    let pod_uid = pod.uid().unwrap_or_default();
    if claim.generated && !object.owner_references().iter().any(|owner| owner.uid == pod_uid) {
        return Err(ClaimError::NotOwner { claim: name, pod: pod.name_any() });
    }
    let status = object.status.as_ref();
    let reserved = status.and_then(|status| status.reserved_for.as_ref());
    if !reserved
        .into_iter()
        .flatten()
        .any(|consumer| consumer.resource == "pods" && consumer.uid == pod_uid)
    {
        return Err(ClaimError::NotReserved {
            pod: format!("{} ({pod_uid})", pod.name_any()),
            claim: name,
            uid,
        });
    }
    let allocation = status.and_then(|status| status.allocation.as_ref());
    let allocation = allocation.ok_or_else(|| ClaimError::NotAllocated { claim: name.clone() })?;
    let results = allocation.devices.as_ref().and_then(|devices| devices.results.as_ref());
    let drivers =
        results.into_iter().flatten().map(|result| (result.driver.clone(), Vec::new())).collect();
    let namespace = object.namespace().unwrap_or_default();
    Ok(ClaimInfo {
        namespace,
        name,
        uid,
        pods: BTreeSet::new(),
        drivers,
        prepared: false,
        unpreparing: false,
    })
}

/// Matches responses to the requested claims: exactly those, and none with an error.
fn match_responses<'a, T>(
    call: &'static str,
    asked: &'a [dra_v1::Claim],
    answers: impl Iterator<Item = (String, (String, T))>,
) -> Result<Vec<(&'a dra_v1::Claim, T)>, ClaimError> {
    let mut pairs = Vec::new();
    for (uid, (error, answer)) in answers {
        let claim =
            asked.iter().find(|claim| claim.uid == uid).ok_or(ClaimError::Unknown { call, uid })?;
        if !error.is_empty() {
            return Err(ClaimError::Claim { call, claim: claim.name.clone(), message: error });
        }
        pairs.push((claim, answer));
    }
    match asked.len() - pairs.len() {
        0 => Ok(pairs),
        count => Err(ClaimError::Skipped { call, count }),
    }
}
