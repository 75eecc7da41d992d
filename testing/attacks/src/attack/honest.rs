//! The honest namespace: pods with a small share at a fixed interval, whose waiting is measured.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use futures::stream::{FuturesUnordered, StreamExt};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::Api;
use kube::api::DeleteParams;

use super::observer::Observer;
use super::report::{Latency, Violations};
use super::{HONEST, Target};
use crate::cluster;
use crate::objects;

/// Time after which a pod counts as not served: more than the longest back-off of any program.
const SERVED_WITHIN: Duration = Duration::from_secs(300);

/// Memory of an honest share.
const MEMORY: &str = "1Gi";

pub(super) struct Honest<'a> {
    pods: Api<Pod>,
    claims: Api<ResourceClaim>,
    image: String,
    observer: &'a Observer,
    violations: Violations,
    served: AtomicUsize,
    waiting: AtomicUsize,
}

impl<'a> Honest<'a> {
    pub(super) fn new(target: &Target, observer: &'a Observer, violations: Violations) -> Self {
        Self {
            pods: Api::namespaced(target.client.clone(), HONEST),
            claims: Api::namespaced(target.client.clone(), HONEST),
            image: target.image.clone(),
            observer,
            violations,
            served: AtomicUsize::new(0),
            waiting: AtomicUsize::new(0),
        }
    }

    /// Returns the numbers of pods that were served in this phase and that wait.
    pub(super) fn counts(&self) -> (usize, usize) {
        (self.served.load(Ordering::Relaxed), self.waiting.load(Ordering::Relaxed))
    }

    /// Creates pods at an interval for some time, and waits until all of them are served.
    pub(super) async fn run(
        &self,
        phase: &str,
        duration: Duration,
        interval: Duration,
    ) -> anyhow::Result<Vec<Latency>> {
        self.served.store(0, Ordering::Relaxed);
        let (begun, mut ticks) = (Instant::now(), tokio::time::interval(interval));
        let (mut running, mut latencies) = (FuturesUnordered::new(), Vec::new());
        let mut number = 0;
        while begun.elapsed() < duration {
            tokio::select! {
                _ = ticks.tick() => {
                    running.push(self.serve(format!("{phase}-{number}")));
                    number += 1;
                }
                Some(served) = running.next() => latencies.extend(served?),
            }
        }
        while let Some(served) = running.next().await {
            latencies.extend(served?);
        }
        Ok(latencies)
    }

    /// Creates a pod with a claim, waits until it is served, and deletes both.
    async fn serve(&self, name: String) -> anyhow::Result<Option<Latency>> {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let served = self.measure(&name).await;
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        let delete = DeleteParams::default();
        self.pods.delete(&name, &delete).await.context("cannot delete an honest pod")?;
        self.claims.delete(&name, &delete).await.context("cannot delete an honest claim")?;
        served
    }

    async fn measure(&self, name: &str) -> anyhow::Result<Option<Latency>> {
        let claim = objects::claim(name, &objects::share(MEMORY));
        cluster::create(&self.claims, claim).await.context("cannot create an honest claim")?;
        let begun = Instant::now();
        let pod = objects::pod(name, &self.image, &[objects::claim_entry("gpu", name)]);
        cluster::create(&self.pods, pod).await.context("cannot create an honest pod")?;
        let served = tokio::time::timeout(SERVED_WITHIN, self.observer.served(name)).await;
        let Ok(Some(milestones)) = served else {
            let seen = self.observer.describe(name);
            self.violations.add(format!("honest pod {name} was not served: {seen}"));
            return Ok(None);
        };
        self.served.fetch_add(1, Ordering::Relaxed);
        let since = |milestone: Option<Instant>| {
            milestone.map_or(Duration::ZERO, |reached| reached.saturating_duration_since(begun))
        };
        let (allocated, bound) = (since(milestones.allocated), since(milestones.bound));
        Ok(Some(Latency { allocated, bound }))
    }
}
