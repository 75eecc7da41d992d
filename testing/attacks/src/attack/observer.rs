//! Observes every change of every claim, and the pods of the honest namespace.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use futures::{StreamExt, TryStreamExt};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client, ResourceExt};
use tessera_e2e::inventory::GpuInventory;
use tessera_e2e::leftovers::{device_results, holds_device};
use tessera_e2e::trials::device_usage::DeviceUsage;
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::report::Violations;

/// Times at which a pod of the honest namespace reached its goals.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Milestones {
    pub(super) allocated: Option<Instant>,
    pub(super) bound: Option<Instant>,
}

/// Milestones of honest pods by name; the claim of a pod has the pod's name.
type AllMilestones = BTreeMap<String, Milestones>;

/// Owner of each share that was ever allocated.
type Shares = Arc<Mutex<BTreeMap<String, String>>>;

/// The running observer. Dropping it stops it.
pub(super) struct Observer {
    milestones: watch::Sender<AllMilestones>,
    shares: Shares,
    _tasks: JoinSet<()>,
}

impl Observer {
    /// Starts to observe; returns when all present claims are known.
    pub(super) async fn start(
        client: &Client,
        honest: &'static str,
        inventory: &GpuInventory,
        violations: Violations,
    ) -> anyhow::Result<Self> {
        let milestones = watch::Sender::new(AllMilestones::new());
        let shares = Shares::default();
        let (ready, mut is_ready) = watch::channel(false);
        let claims = ClaimObserver {
            honest,
            usage: DeviceUsage::new(inventory),
            listed: Vec::new(),
            shares: Arc::clone(&shares),
            milestones: milestones.clone(),
            violations,
            ready,
        };
        let mut tasks = JoinSet::new();
        tasks.spawn(claims.run(Api::all(client.clone())));
        let pods = Api::namespaced(client.clone(), honest);
        tasks.spawn(observe_pods(pods, milestones.clone()));
        tokio::time::timeout(Duration::from_secs(300), is_ready.wait_for(|ready| *ready))
            .await
            .context("the claim watch did not start")??;
        Ok(Self { milestones, shares, _tasks: tasks })
    }

    /// Waits until a pod is bound and its claim allocated.
    pub(super) async fn served(&self, pod: &str) -> Option<Milestones> {
        let mut milestones = self.milestones.subscribe();
        let is_served = |all: &AllMilestones| {
            all.get(pod).is_some_and(|pod| pod.allocated.is_some() && pod.bound.is_some())
        };
        let served = milestones.wait_for(is_served).await.ok()?.get(pod).copied();
        self.milestones.send_modify(|all| {
            all.remove(pod);
        });
        served
    }

    /// Returns the milestones of a pod so far, as text.
    pub(super) fn describe(&self, pod: &str) -> String {
        let all = self.milestones.borrow();
        let Milestones { allocated, bound } = all.get(pod).copied().unwrap_or_default();
        format!("allocated: {}, bound: {}", allocated.is_some(), bound.is_some())
    }

    /// Stops, and returns the number of shares that were allocated.
    pub(super) fn finish(self) -> usize {
        self.shares.lock().unwrap_or_else(PoisonError::into_inner).len()
    }
}

struct ClaimObserver {
    honest: &'static str,
    usage: DeviceUsage,
    /// Claims of a listing in progress.
    listed: Vec<ResourceClaim>,
    shares: Shares,
    milestones: watch::Sender<AllMilestones>,
    violations: Violations,
    ready: watch::Sender<bool>,
}

impl ClaimObserver {
    async fn run(mut self, claims: Api<ResourceClaim>) {
        let mut stream = Box::pin(watcher(claims, watcher::Config::default()).default_backoff());
        while let Some(event) = stream.next().await {
            // The watcher resumes by itself after an error.
            if let Ok(event) = event {
                self.apply(event);
            }
        }
    }

    fn apply(&mut self, event: watcher::Event<ResourceClaim>) {
        match event {
            watcher::Event::Init => self.listed.clear(),
            watcher::Event::InitApply(claim) => {
                self.record(&claim);
                self.listed.push(claim);
            }
            watcher::Event::InitDone => {
                let listed = std::mem::take(&mut self.listed);
                self.usage.clear();
                let replaced = listed.iter().try_for_each(|claim| self.usage.update(claim));
                self.check(replaced);
                self.ready.send_replace(true);
            }
            watcher::Event::Apply(claim) => {
                let updated = self.usage.update(&claim);
                self.check(updated);
                self.record(&claim);
            }
            watcher::Event::Delete(claim) => self.usage.remove(&claim),
        }
    }

    fn check(&self, outcome: Result<(), String>) {
        if let Err(error) = outcome {
            self.violations.add(format!("overcommitted: {error}"));
        }
    }

    /// Records the shares of a claim, and when a claim of the honest namespace got them.
    fn record(&self, claim: &ResourceClaim) {
        let owner = claim.uid().unwrap_or_default();
        let mut shares = self.shares.lock().unwrap_or_else(PoisonError::into_inner);
        for share in device_results(claim).filter_map(|result| result.share_id.clone()) {
            let first = shares.entry(share.clone()).or_insert_with(|| owner.clone());
            if *first != owner {
                let (first, name) = (first.clone(), claim.name_any());
                self.violations.add(format!("share {share} of claim {first} is also of {name}"));
            }
        }
        if claim.namespace().as_deref() == Some(self.honest) && holds_device(claim) {
            reach(&self.milestones, claim.name_any(), |pod| &mut pod.allocated);
        }
    }
}

async fn observe_pods(pods: Api<Pod>, milestones: watch::Sender<AllMilestones>) {
    let mut stream = Box::pin(watcher(pods, watcher::Config::default()).default_backoff());
    loop {
        let event = stream.try_next().await;
        let Ok(Some(watcher::Event::Apply(pod) | watcher::Event::InitApply(pod))) = event else {
            continue;
        };
        if pod.spec.as_ref().is_some_and(|spec| spec.node_name.is_some()) {
            reach(&milestones, pod.name_any(), |pod| &mut pod.bound);
        }
    }
}

/// Sets a milestone to the present unless it was reached before, or the pod is no longer awaited.
fn reach(
    milestones: &watch::Sender<AllMilestones>,
    pod: String,
    milestone: impl Fn(&mut Milestones) -> &mut Option<Instant>,
) {
    milestones.send_if_modified(|all| {
        let milestone = milestone(all.entry(pod).or_default());
        let is_new = milestone.is_none();
        milestone.get_or_insert_with(Instant::now);
        is_new
    });
}
