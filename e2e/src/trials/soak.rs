//! Thousands of pods of random shapes, while driver, controller and kubelet are killed at random
//! moments. At no instant is a GPU over-committed, and in the end nothing of them is left: no
//! claim, no finalizer, nothing on any node.
//!
//! `TESSERA_SOAK_SEED` repeats the shapes, the moments of deletion and the order of kills of an
//! earlier run. What the cluster makes of them in between depends on its timing, so a seed repeats
//! the load and not every interleaving.

mod harm;
mod shape;

use std::collections::BTreeMap;
use std::pin::pin;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use k8s_openapi::api::core::v1::{Event, Pod};
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::api::{DeleteParams, ListParams, PostParams};
use kube::{Api, ResourceExt};
use serde_json::json;
use tokio_util::sync::CancellationToken;

use self::harm::Harm;
use self::shape::Shape;
use super::bench::{Bench, phase};
use super::pod_watch::{PodWatch, Seen};
use super::progress::Progress;
use super::{lost_claims, overcommit, residue};
use crate::harness::TrialOutcome;
use crate::inventory::GpuInventory;
use crate::random::Random;
use crate::runner::{Figure, Outcome};
use crate::wait::{self, Verdict};

/// Pods that are there at a time.
const AT_A_TIME: usize = 40;

/// The longest time without any pod's end. A kubelet that is killed amid starts of containers takes
/// 3.1 s at its next start for each of them that has a cgroup and no task (cAdvisor asks containerd
/// five times), in which it does nothing for pods: 19 s were seen, twice in a row. It may be killed
/// again several times before it is done.
const STALL: Duration = Duration::from_secs(300);

/// Time for the last claims to go, and what nodes have of them: a kubelet that was killed while a
/// pod was deleted by force finds its claims when it looks for claims without pods, every 60 s once
/// it has started.
const PATIENCE: Duration = Duration::from_secs(300);

/// How much there is to soak.
#[derive(Clone, Copy, Debug)]
pub struct SoakSize {
    /// Pods in all.
    pub pods: usize,
    /// How many of a hundred run in real containers.
    pub started_percent: u64,
    /// Longest pause between two kills.
    pub pause: Duration,
}

pub(super) async fn survived(bench: Bench) -> TrialOutcome {
    let seed = match std::env::var("TESSERA_SOAK_SEED") {
        Ok(text) => {
            text.parse().with_context(|| format!("$TESSERA_SOAK_SEED is no number: {text}"))?
        }
        Err(_) => Random::fresh_seed(),
    };
    println!("    TESSERA_SOAK_SEED={seed}");
    soak(&bench, seed).await.with_context(|| format!("with TESSERA_SOAK_SEED={seed}"))
}

async fn soak(bench: &Bench, seed: u64) -> TrialOutcome {
    let hands = bench.hands()?.clone();
    let nodes: Vec<String> =
        GpuInventory::read(&bench.client).await?.nodes().map(str::to_owned).collect();
    for template in shape::TEMPLATES {
        bench.template_of(template, shape::devices(template)).await?;
    }
    let size = bench.sizes().soak;
    let began = Instant::now();
    let mut harm = Harm::new(&hands, &nodes, Random::new(seed ^ 1), size.pause);
    let mut load = Load::new(bench, seed, size);
    let outcome = beside(
        &mut harm,
        overcommit::never_during(bench, lost_claims::given_up_during(bench, load.run())),
    );
    let outcome = outcome.await;
    // Whatever was seen, the cluster goes on with all of its components.
    let repaired = harm.repair().await;
    outcome?;
    repaired?;
    println!(
        "    {} pods and {} kills; warnings: {}",
        size.pods,
        harm.kills,
        warnings(bench).await?
    );
    nothing_claimed(bench).await?;
    residue::nowhere(bench, PATIENCE).await?;
    Ok(Outcome::Held(vec![Figure {
        of: format!("soak of {} pods", size.pods),
        took: began.elapsed(),
    }]))
}

/// Carries out `load` while harm is done, and ends both: harm with all of the actions that it has
/// begun.
async fn beside(
    harm: &mut Harm<'_>,
    load: impl Future<Output = anyhow::Result<()>>,
) -> anyhow::Result<()> {
    let end = CancellationToken::new();
    let mut harming = pin!(harm.go_on(&end));
    tokio::select! {
        // Before it is told to, it ends only with an error.
        harmed = &mut harming => harmed,
        outcome = load => {
            end.cancel();
            outcome.and(harming.await)
        }
    }
}

/// How often each warning was given: what had to be tried again, and why.
async fn warnings(bench: &Bench) -> anyhow::Result<String> {
    let events: Api<Event> = Api::namespaced(bench.client.clone(), bench.namespace());
    let mut times = BTreeMap::<String, i32>::new();
    let all = events.list(&ListParams::default()).await?;
    for event in all.into_iter().filter(|event| event.type_.as_deref() == Some("Warning")) {
        let count = event.series.and_then(|series| series.count).or(event.count).unwrap_or(1);
        *times.entry(event.reason.unwrap_or_default()).or_default() += count;
    }
    let each: Vec<_> = times.iter().map(|(reason, times)| format!("{reason} {times}")).collect();
    Ok(each.join(", "))
}

/// The claims go with their pods.
async fn nothing_claimed(bench: &Bench) -> anyhow::Result<()> {
    let judge = |claims: &[ResourceClaim]| match claims.first() {
        None => Verdict::Done(()),
        Some(claim) => {
            Verdict::NotYet(format!("{}, the first of them: {}", claims.len(), json!(claim)))
        }
    };
    let what = "all claims to be gone";
    Ok(wait::until(bench.claims(), Default::default(), what, PATIENCE, judge).await?)
}

/// The pods, each until its moment has come.
struct Load<'a> {
    bench: &'a Bench,
    random: Random,
    size: SoakSize,
    made: usize,
    done: usize,
    there: BTreeMap<String, Shape>,
    shared: Option<Shared>,
    /// Pods that use each shared claim.
    users: BTreeMap<String, Vec<String>>,
}

/// A claim that the next pods share.
struct Shared {
    claim: String,
    pods: u64,
}

impl<'a> Load<'a> {
    fn new(bench: &'a Bench, seed: u64, size: SoakSize) -> Self {
        Self {
            bench,
            random: Random::new(seed),
            size,
            made: 0,
            done: 0,
            there: BTreeMap::new(),
            shared: None,
            users: BTreeMap::new(),
        }
    }

    async fn run(&mut self) -> anyhow::Result<()> {
        let mut progress = Progress::new("pods", self.size.pods);
        let mut watch = PodWatch::of(self.bench.pods());
        let mut last_end = Instant::now();
        while self.done < self.size.pods {
            while self.there.len() < AT_A_TIME && self.made < self.size.pods {
                self.create().await?;
            }
            let left = STALL.saturating_sub(last_end.elapsed());
            let Ok(seen) = tokio::time::timeout(left, watch.next()).await else {
                return Err(self.stalled().await);
            };
            let before = self.done;
            match seen? {
                Seen::There(pod) => self.look_at(&pod).await?,
                Seen::Gone(pod) => self.ended(&pod.name_any()).await?,
                Seen::All(pods) => self.compare(&pods).await?,
            }
            if self.done > before {
                last_end = Instant::now();
                progress.at(self.done, String::new);
            }
        }
        Ok(())
    }

    async fn create(&mut self) -> anyhow::Result<()> {
        self.made += 1;
        let name = format!("pod-{}", self.made);
        if self.shared.is_none() && self.random.percent(4) {
            self.share().await?;
        }
        let shared = self.shared.as_ref().map(|shared| shared.claim.clone());
        let shape = Shape::random(&mut self.random, self.size.started_percent, shared.is_some());
        let object = serde_json::from_value(shape.object(&name, shared.as_deref()))?;
        if let (Some(claim), Some(shared)) = (shared, &mut self.shared) {
            self.users.entry(claim).or_default().push(name.clone());
            shared.pods -= 1;
            if shared.pods == 0 {
                self.shared = None;
            }
        }
        // Before it is created: its first event may come before the answer.
        self.there.insert(name, shape);
        self.bench.pods().create(&PostParams::default(), &object).await?;
        Ok(())
    }

    /// Makes a claim that the next pods use together.
    async fn share(&mut self) -> anyhow::Result<()> {
        let shared =
            Shared { claim: format!("shared-{}", self.made), pods: self.random.between(2, 4) };
        let claim = json!({"metadata": {"name": shared.claim}, "spec": {"devices": shape::devices("eighth")}});
        self.bench.claims().create(&PostParams::default(), &serde_json::from_value(claim)?).await?;
        self.shared = Some(shared);
        Ok(())
    }

    /// Deletes the pod if its moment has come.
    async fn look_at(&mut self, pod: &Pod) -> anyhow::Result<()> {
        let name = pod.name_any();
        let Some(shape) = self.there.get(&name) else { return Ok(()) };
        if pod.metadata.deletion_timestamp.is_some() {
            return Ok(());
        }
        let failed = phase(pod) == "Failed" && !was_cut_off(pod);
        anyhow::ensure!(!failed, "{name} failed: {}", json!(pod.status));
        if shape.is_due(pod) {
            let grace = if shape.by_force { Some(0) } else { None };
            let parameters =
                DeleteParams { grace_period_seconds: grace, ..DeleteParams::default() };
            self.bench.delete_if_there(&name, &parameters).await?;
        }
        Ok(())
    }

    /// After a gap in the watch.
    async fn compare(&mut self, pods: &[Pod]) -> anyhow::Result<()> {
        let gone: Vec<String> = self
            .there
            .keys()
            .filter(|name| !pods.iter().any(|pod| pod.name_any() == **name))
            .cloned()
            .collect();
        for name in gone {
            self.ended(&name).await?;
        }
        for pod in pods {
            self.look_at(pod).await?;
        }
        Ok(())
    }

    async fn ended(&mut self, name: &str) -> anyhow::Result<()> {
        if self.there.remove(name).is_none() {
            return Ok(());
        }
        self.done += 1;
        // More of its pods are still to come.
        let waits = self
            .shared
            .as_ref()
            .filter(|_| self.made < self.size.pods)
            .map(|shared| shared.claim.clone());
        let mut unused = Vec::new();
        for (claim, users) in &mut self.users {
            users.retain(|user| user != name);
            if users.is_empty() && Some(claim) != waits.as_ref() {
                unused.push(claim.clone());
            }
        }
        for claim in unused {
            self.users.remove(&claim);
            self.bench.claims().delete(&claim, &DeleteParams::default()).await?;
        }
        Ok(())
    }

    async fn stalled(&self) -> anyhow::Error {
        let pods = self.bench.pods().list(&Default::default()).await;
        let states: Vec<String> = pods
            .iter()
            .flat_map(|pods| &pods.items)
            .map(|pod| {
                let deleted = pod.metadata.deletion_timestamp.is_some();
                format!(
                    "{} {:?} deleted: {deleted}: {}",
                    pod.name_any(),
                    self.there.get(&pod.name_any()),
                    json!(pod.status)
                )
            })
            .collect();
        anyhow::anyhow!(
            "no pod ended for {STALL:?}; {} are there:\n{}",
            states.len(),
            states.join("\n")
        )
    }
}

/// Whether its kubelet was killed while it started a container: the runtime then gives up with the
/// call, and a pod that is never restarted has failed. That is Kubernetes' own doing, with or
/// without claims.
fn was_cut_off(pod: &Pod) -> bool {
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
