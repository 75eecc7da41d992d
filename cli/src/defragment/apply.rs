//! Carries out the moves.
//!
//! The GPUs that the pod gets are cordoned while the others leave, because their replacements would
//! be placed there again. An interrupted run leaves them cordoned.

use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::{Api, Client, ResourceExt};
use tessera_runtime::cluster::{self, EvictionAnswer, PodEviction};
use tokio::time::Instant;

use super::{Defragmentation, PodMove};
use crate::maintenance::{Cordons, GpuError, TargetGpu, refuse_unmanaged};
use crate::pod_claims::claim_names;

/// Time between two looks at the pod's claims.
const INTERVAL: Duration = Duration::from_secs(1);

/// Time between two lines about what is waited for.
const REPORT_INTERVAL: Duration = Duration::from_secs(10);

/// Settings of the moves.
#[derive(Debug, Clone, Copy, Default)]
pub struct ApplyOptions {
    /// Evicts also pods that no controller creates again.
    pub force: bool,
    /// Time limit; none = without end.
    pub timeout: Option<Duration>,
}

/// Errors of the moves.
#[derive(Debug, thiserror::Error)]
pub enum ApplyError {
    /// The API server refuses an eviction. Those of the pods before it may be carried out.
    #[error("pod {pod} cannot be evicted: {message}")]
    Refused {
        /// The pod.
        pod: String,
        /// The answer.
        message: String,
    },
    /// A GPU cannot be cordoned, a request failed, or no controller creates a pod again.
    #[error(transparent)]
    Gpu(#[from] GpuError),
    /// The time is over.
    #[error("pod {pod} has no devices after {} s; its events tell why", after.as_secs())]
    TimedOut {
        /// The pod.
        pod: String,
        /// The time limit.
        after: Duration,
    },
}

/// Moves under way.
pub struct Apply<'p> {
    client: Client,
    /// Does not repeat refused requests.
    evictions: Client,
    options: ApplyOptions,
    last_report: Instant,
    progress: &'p mut dyn FnMut(&str),
}

impl<'p> Apply<'p> {
    /// Returns the means to carry out moves. `evictions` is a client that does not repeat refused
    /// requests, and `progress` receives lines for the user.
    pub fn new(
        client: Client,
        evictions: Client,
        options: ApplyOptions,
        progress: &'p mut dyn FnMut(&str),
    ) -> Self {
        Self { client, evictions, options, last_report: Instant::now(), progress }
    }

    /// Evicts the pods, none of them if the API server would refuse one, and waits until the pod
    /// has its devices.
    ///
    /// # Errors
    /// [`ApplyError`]. The GPUs are not cordoned any more, unless that fails.
    pub async fn run(mut self, found: &Defragmentation) -> Result<(), ApplyError> {
        if !self.options.force {
            self.refuse_unmanaged(&found.moves).await?;
        }
        for one in &found.moves {
            self.evict(one, true).await?;
        }
        let started = Instant::now();
        let gpus = targets(found);
        let cordons = Cordons::new(self.client.clone(), false);
        let moved = self.move_pods(found, &gpus, &cordons, started).await;
        for gpu in &gpus {
            let change = cordons.uncordon(gpu).await?;
            (self.progress)(&format!("gpu {gpu} {}", change.text()));
        }
        moved?;
        self.wait_allocated(found, started).await
    }

    /// Cordons the GPUs, evicts the pods, and waits until they have ended.
    async fn move_pods(
        &mut self,
        found: &Defragmentation,
        gpus: &[TargetGpu],
        cordons: &Cordons,
        started: Instant,
    ) -> Result<(), ApplyError> {
        for gpu in gpus {
            let change = cordons.cordon(gpu).await?;
            (self.progress)(&format!("gpu {gpu} {}", change.text()));
        }
        for one in &found.moves {
            self.evict(one, false).await?;
        }
        for one in &found.moves {
            while !self.has_ended(one).await? {
                self.pause(found, started, &format!("pod {} ends", name(one))).await?;
            }
        }
        Ok(())
    }

    async fn has_ended(&self, one: &PodMove) -> Result<bool, ApplyError> {
        let pod = self.pod(&one.namespace, &one.pod).await?;
        Ok(pod.is_none_or(|pod| pod.uid().as_deref() != Some(&one.uid)))
    }

    /// Waits a moment, unless the time is over. Tells from time to time what is waited for.
    async fn pause(
        &mut self,
        found: &Defragmentation,
        started: Instant,
        what: &str,
    ) -> Result<(), ApplyError> {
        if let Some(after) = self.options.timeout.filter(|limit| started.elapsed() >= *limit) {
            let pod = format!("{}/{}", found.namespace, found.pod);
            return Err(ApplyError::TimedOut { pod, after });
        }
        if self.last_report.elapsed() >= REPORT_INTERVAL {
            self.last_report = Instant::now();
            (self.progress)(&format!("{what}, after {} s", started.elapsed().as_secs()));
        }
        tokio::time::sleep(INTERVAL).await;
        Ok(())
    }

    async fn refuse_unmanaged(&self, moves: &[PodMove]) -> Result<(), ApplyError> {
        let mut pods = Vec::new();
        for one in moves {
            pods.extend(self.pod(&one.namespace, &one.pod).await?);
        }
        Ok(refuse_unmanaged(&pods)?)
    }

    async fn pod(&self, namespace: &str, name: &str) -> Result<Option<Pod>, GpuError> {
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), namespace);
        let object = format!("pod {namespace}/{name}");
        pods.get_opt(name).await.map_err(|error| GpuError::of("get", "pods", object, error))
    }

    async fn evict(&mut self, one: &PodMove, is_dry_run: bool) -> Result<(), ApplyError> {
        let eviction = PodEviction {
            namespace: &one.namespace,
            name: &one.pod,
            uid: &one.uid,
            grace_period: None,
            is_dry_run,
        };
        match cluster::evict(&self.evictions, eviction).await {
            EvictionAnswer::Evicted if is_dry_run => Ok(()),
            EvictionAnswer::Evicted => {
                (self.progress)(&format!("pod {} evicted", name(one)));
                Ok(())
            }
            EvictionAnswer::Gone => Ok(()),
            EvictionAnswer::Refused(message) => {
                Err(ApplyError::Refused { pod: name(one), message })
            }
            EvictionAnswer::Failed(error) => {
                let object = format!("an eviction of pod {}", name(one));
                Err(GpuError::of("create", "pods/eviction", object, error).into())
            }
        }
    }

    async fn wait_allocated(
        &mut self,
        found: &Defragmentation,
        started: Instant,
    ) -> Result<(), ApplyError> {
        let pod = format!("pod {}/{}", found.namespace, found.pod);
        while !self.is_allocated(found).await? {
            self.pause(found, started, &format!("{pod} waits for its devices")).await?;
        }
        (self.progress)(&format!("{pod} has its devices"));
        Ok(())
    }

    /// Returns true if all claims of the pod are allocated.
    async fn is_allocated(&self, found: &Defragmentation) -> Result<bool, ApplyError> {
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), &found.namespace);
        let object = format!("pod {}/{}", found.namespace, found.pod);
        let pod = pods.get(&found.pod).await;
        let pod = pod.map_err(|error| GpuError::of("get", "pods", object, error))?;
        let api: Api<ResourceClaim> = Api::namespaced(self.client.clone(), &found.namespace);
        for claim in claim_names(&pod) {
            let name = format!("ResourceClaim {}/{claim}", found.namespace);
            let object = api.get(&claim).await;
            let object =
                object.map_err(|error| GpuError::of("get", "resourceclaims", name, error))?;
            if object.status.and_then(|status| status.allocation).is_none() {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// Returns the GPUs that the pod gets.
fn targets(found: &Defragmentation) -> Vec<TargetGpu> {
    let node = found.node.iter();
    let gpus = node.flat_map(|node| found.devices.iter().map(move |device| (node, device)));
    gpus.map(|(node, device)| TargetGpu { node: node.clone(), device: device.clone() }).collect()
}

fn name(one: &PodMove) -> String {
    format!("{}/{}", one.namespace, one.pod)
}
