//! Soak trial: random pods, while driver, controller and kubelet are killed at random times. No GPU
//! is ever overcommitted, and no claim, finalizer or file is left in the end.
//!
//! `TESSERA_SOAK_SEED` repeats the shapes, the times of deletion and the order of kills of an
//! earlier run. It does not repeat the timing of the cluster, so interleavings may differ.

mod fault_injector;
mod shape;

use std::collections::BTreeMap;
use std::pin::pin;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use k8s_openapi::api::core::v1::{Event, Pod};
use kube::api::{DeleteParams, ListParams, PostParams};
use kube::{Api, ResourceExt};
use serde_json::json;
use tokio_util::sync::CancellationToken;

use self::fault_injector::FaultInjector;
use self::shape::PodShape;
use super::pod_watch::{PodEvent, PodWatch};
use super::progress::Progress;
use super::test_bed::{TestBed, phase, wait_all};
use super::{lost_claims, overcommit, residue};
use crate::harness::TrialOutcome;
use crate::random::Random;
use crate::runner::{Figure, Outcome};
use crate::wait::CheckResult;

/// Maximum number of pods at the same time.
const MAX_PODS: usize = 40;

/// Maximum time without the end of a pod. A kubelet killed while it starts containers takes 3.1 s
/// at its next start for each of them with a cgroup and no task (cAdvisor queries containerd five
/// times), and handles no pods meanwhile: 19 s were observed, twice in succession. It may be killed
/// again several times before that ends.
const STALL_LIMIT: Duration = Duration::from_secs(300);

/// Time limit for the last claims and their files to be deleted. A kubelet killed while a pod was
/// force-deleted detects its claims in a check that runs every 60 s.
const TIMEOUT: Duration = Duration::from_secs(300);

/// Size of the soak trial.
#[derive(Clone, Copy, Debug)]
pub struct SoakSize {
    /// Total number of pods.
    pub pods: usize,
    /// Percentage of pods that run in real containers.
    pub started_percent: u64,
    /// Maximum pause between two kills.
    pub pause: Duration,
}

pub(super) async fn run(test_bed: TestBed) -> TrialOutcome {
    let seed = match std::env::var("TESSERA_SOAK_SEED") {
        Ok(text) => {
            text.parse().with_context(|| format!("$TESSERA_SOAK_SEED is not a number: {text}"))?
        }
        Err(_) => Random::fresh_seed(),
    };
    println!("    TESSERA_SOAK_SEED={seed}");
    soak(&test_bed, seed).await.with_context(|| format!("with TESSERA_SOAK_SEED={seed}"))
}

async fn soak(test_bed: &TestBed, seed: u64) -> TrialOutcome {
    let operations = test_bed.operations()?.clone();
    let nodes: Vec<String> = test_bed.published_gpus().await?.nodes().map(str::to_owned).collect();
    for template in shape::TEMPLATES {
        test_bed.create_template_with(template, shape::devices(template)).await?;
    }
    let size = test_bed.sizes().soak;
    let began = Instant::now();
    let mut injector = FaultInjector::new(&operations, &nodes, Random::new(seed ^ 1), size.pause);
    let mut load = Load::new(test_bed, seed, size);
    let outcome = run_under_faults(
        &mut injector,
        overcommit::check_during(
            test_bed,
            lost_claims::delete_affected_during(test_bed, load.run()),
        ),
    );
    let outcome = outcome.await;
    // Start all components in every case; later trials need them.
    let repaired = injector.restart_stopped().await;
    outcome?;
    repaired?;
    println!(
        "    {} pods and {} kills; warnings: {}",
        size.pods,
        injector.kills,
        warnings(test_bed).await?
    );
    wait_claims_deleted(test_bed).await?;
    residue::check_all_nodes(test_bed, TIMEOUT).await?;
    Ok(Outcome::Passed(vec![Figure {
        name: format!("soak of {} pods", size.pods),
        duration: began.elapsed(),
    }]))
}

/// Runs `load` while faults are injected, then ends the injection after its current action.
async fn run_under_faults(
    injector: &mut FaultInjector<'_>,
    load: impl Future<Output = anyhow::Result<()>>,
) -> anyhow::Result<()> {
    let end = CancellationToken::new();
    let mut injecting = pin!(injector.run(&end));
    tokio::select! {
        // Before cancellation, it returns only with an error.
        outcome = &mut injecting => outcome,
        outcome = load => {
            end.cancel();
            outcome.and(injecting.await)
        }
    }
}

/// Returns the number of warning events by reason.
async fn warnings(test_bed: &TestBed) -> anyhow::Result<String> {
    let events: Api<Event> = Api::namespaced(test_bed.client.clone(), test_bed.namespace());
    let mut times = BTreeMap::<String, i32>::new();
    let all = events.list(&ListParams::default()).await?;
    for event in all.into_iter().filter(|event| event.type_.as_deref() == Some("Warning")) {
        let count = event.series.and_then(|series| series.count).or(event.count).unwrap_or(1);
        *times.entry(event.reason.unwrap_or_default()).or_default() += count;
    }
    let each: Vec<_> = times.iter().map(|(reason, times)| format!("{reason} {times}")).collect();
    Ok(each.join(", "))
}

/// Waits until all claims are deleted with their pods.
async fn wait_claims_deleted(test_bed: &TestBed) -> anyhow::Result<()> {
    let (what, check) = ("all claims to be deleted", CheckResult::none_left);
    wait_all(test_bed.claims(), what, check).await
}

/// The load: pods, each with the time of its deletion.
struct Load<'a> {
    test_bed: &'a TestBed,
    random: Random,
    size: SoakSize,
    created: usize,
    done: usize,
    present: BTreeMap<String, PodShape>,
    shared: Option<SharedClaim>,
    /// Pods that use each shared claim.
    users: BTreeMap<String, Vec<String>>,
}

/// A claim that the next pods share.
struct SharedClaim {
    claim: String,
    pods: u64,
}

impl<'a> Load<'a> {
    fn new(test_bed: &'a TestBed, seed: u64, size: SoakSize) -> Self {
        Self {
            test_bed,
            random: Random::new(seed),
            size,
            created: 0,
            done: 0,
            present: BTreeMap::new(),
            shared: None,
            users: BTreeMap::new(),
        }
    }

    async fn run(&mut self) -> anyhow::Result<()> {
        let mut progress = Progress::new("pods", self.size.pods);
        let mut watch = PodWatch::new(self.test_bed.pods());
        let mut last_end = Instant::now();
        while self.done < self.size.pods {
            while self.present.len() < MAX_PODS && self.created < self.size.pods {
                self.create().await?;
            }
            let remaining = STALL_LIMIT.saturating_sub(last_end.elapsed());
            let Ok(seen) = tokio::time::timeout(remaining, watch.next()).await else {
                return Err(self.stalled());
            };
            let before = self.done;
            match seen? {
                PodEvent::Changed(pod) => self.delete_if_due(&pod).await?,
                PodEvent::Deleted(pod) => self.record_deleted(&pod.name_any()).await?,
                PodEvent::Listed(pods) => self.resync(&pods).await?,
            }
            if self.done > before {
                last_end = Instant::now();
                progress.report(self.done, String::new);
            }
        }
        Ok(())
    }

    async fn create(&mut self) -> anyhow::Result<()> {
        self.created += 1;
        let name = format!("pod-{}", self.created);
        if self.shared.is_none() && self.random.chance(4) {
            self.create_shared_claim().await?;
        }
        let shared = self.shared.as_ref().map(|shared| shared.claim.clone());
        let shape = PodShape::random(&mut self.random, self.size.started_percent, shared.is_some());
        let object = serde_json::from_value(shape.object(&name, shared.as_deref()))?;
        if let (Some(claim), Some(shared)) = (shared, &mut self.shared) {
            self.users.entry(claim).or_default().push(name.clone());
            shared.pods -= 1;
            if shared.pods == 0 {
                self.shared = None;
            }
        }
        // Before the creation, because its first event may arrive before the response.
        self.present.insert(name, shape);
        self.test_bed.pods().create(&PostParams::default(), &object).await?;
        Ok(())
    }

    /// Creates a claim that the next pods share.
    async fn create_shared_claim(&mut self) -> anyhow::Result<()> {
        let shared = SharedClaim {
            claim: format!("shared-{}", self.created),
            pods: self.random.between(2, 4),
        };
        let claim = json!({"metadata": {"name": shared.claim}, "spec": {"devices": shape::devices("eighth")}});
        self.test_bed
            .claims()
            .create(&PostParams::default(), &serde_json::from_value(claim)?)
            .await?;
        self.shared = Some(shared);
        Ok(())
    }

    /// Deletes the pod if its time has come.
    async fn delete_if_due(&mut self, pod: &Pod) -> anyhow::Result<()> {
        let name = pod.name_any();
        let Some(shape) = self.present.get(&name) else { return Ok(()) };
        if pod.metadata.deletion_timestamp.is_some() {
            return Ok(());
        }
        let failed = phase(pod) == "Failed" && !is_start_cancelled(pod);
        anyhow::ensure!(!failed, "{name} failed: {}", json!(pod.status));
        if shape.is_due(pod) {
            let grace = if shape.is_forced { Some(0) } else { None };
            let parameters =
                DeleteParams { grace_period_seconds: grace, ..DeleteParams::default() };
            self.test_bed.delete_if_exists(&name, &parameters).await?;
        }
        Ok(())
    }

    /// Handles a gap in the watch.
    async fn resync(&mut self, pods: &[Pod]) -> anyhow::Result<()> {
        let deleted: Vec<String> = self
            .present
            .keys()
            .filter(|name| !pods.iter().any(|pod| pod.name_any() == **name))
            .cloned()
            .collect();
        for name in deleted {
            self.record_deleted(&name).await?;
        }
        for pod in pods {
            self.delete_if_due(pod).await?;
        }
        Ok(())
    }

    async fn record_deleted(&mut self, name: &str) -> anyhow::Result<()> {
        if self.present.remove(name).is_none() {
            return Ok(());
        }
        self.done += 1;
        // The shared claim is kept while more of its pods are to be created.
        let kept = self
            .shared
            .as_ref()
            .filter(|_| self.created < self.size.pods)
            .map(|shared| shared.claim.clone());
        let mut unused = Vec::new();
        for (claim, users) in &mut self.users {
            users.retain(|user| user != name);
            if users.is_empty() && Some(claim) != kept.as_ref() {
                unused.push(claim.clone());
            }
        }
        for claim in unused {
            self.users.remove(&claim);
            self.test_bed.claims().delete(&claim, &DeleteParams::default()).await?;
        }
        Ok(())
    }

    fn stalled(&self) -> anyhow::Error {
        anyhow::anyhow!("no pod ended for {STALL_LIMIT:?}; expected: {:?}", self.present)
    }
}

/// Returns true if the pod failed because its kubelet was killed while it started a container. The
/// runtime cancels the start with the call, and a pod that is never restarted fails. Kubernetes
/// behaves so with or without claims.
fn is_start_cancelled(pod: &Pod) -> bool {
    let statuses = pod.status.iter().flat_map(|status| {
        status
            .container_statuses
            .iter()
            .flatten()
            .chain(status.init_container_statuses.iter().flatten())
    });
    let mut ends = statuses.filter_map(|status| status.state.as_ref()?.terminated.as_ref());
    ends.any(|end| {
        let message = end.message.as_deref().unwrap_or_default();
        end.reason.as_deref() == Some("StartError") && message.ends_with("context canceled")
    })
}
