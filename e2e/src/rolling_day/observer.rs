//! The state of each pod as its watch shows it, and the time at which its kubelet ends it.

use std::collections::{BTreeMap, BTreeSet};
use std::pin::Pin;
use std::time::Duration;

use anyhow::Context;
use futures::StreamExt;
use futures::stream::{self, BoxStream};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Client, ResourceExt};
use tokio::time::Instant;

use super::arrivals::Unit;

/// Time that an evicted pod takes to end.
const GRACE: Duration = Duration::from_secs(2);

/// A pod and the times of its states. This client takes them when it observes an event.
#[derive(Clone, Debug)]
pub(super) struct PodRecord {
    pub(super) is_of_group: bool,
    pub(super) gpus: f64,
    lifetime: Duration,
    /// The request that creates it is sent.
    pub(super) created: Instant,
    /// The request is answered.
    pub(super) answered: Option<Instant>,
    /// A watch has delivered it.
    pub(super) seen: Option<Instant>,
    pub(super) allocated: Option<Instant>,
    pub(super) bound: Option<Instant>,
    /// It does not exist any more.
    pub(super) ended: Option<Instant>,
    pub(super) is_evicted: bool,
}

/// An event of a watch.
enum Change {
    Pod(Box<Pod>),
    Ended(Box<Pod>),
    Claim(Box<ResourceClaim>),
    /// The initial list of one kind is complete.
    Listed,
}

/// Observes pods and claims of one namespace.
pub(super) struct Observer {
    changes: Pin<Box<BoxStream<'static, anyhow::Result<Change>>>>,
    records: BTreeMap<String, PodRecord>,
    /// The times at which pods end.
    ends: BTreeSet<(Instant, String)>,
    bound: usize,
    began: Instant,
}

#[cfg(test)]
impl PodRecord {
    /// Returns a pod with the times of its creation, allocation, binding and end.
    pub(super) fn of_test(gpus: f64, is_of_group: bool, times: [Instant; 4]) -> Self {
        let [created, allocated, bound, ended] = times;
        Self {
            is_of_group,
            gpus,
            lifetime: Duration::ZERO,
            created,
            answered: None,
            seen: None,
            allocated: Some(allocated),
            bound: Some(bound),
            ended: Some(ended),
            is_evicted: false,
        }
    }
}

impl Observer {
    /// Starts the watches; objects created afterwards are observed.
    pub(super) async fn start(client: &Client, namespace: &str) -> anyhow::Result<Self> {
        let pods: Api<Pod> = Api::namespaced(client.clone(), namespace);
        let claims: Api<ResourceClaim> = Api::namespaced(client.clone(), namespace);
        let changes = stream::select(pod_changes(pods), claim_changes(claims)).boxed();
        let (records, ends) = (BTreeMap::new(), BTreeSet::new());
        let began = Instant::now();
        let mut observer = Self { changes: Box::pin(changes), records, ends, bound: 0, began };
        for _ in 0..2 {
            while !matches!(observer.receive().await?, Change::Listed) {}
        }
        Ok(observer)
    }

    async fn receive(&mut self) -> anyhow::Result<Change> {
        self.changes.next().await.context("invariant: a watcher never ends")?
    }

    /// Records the next event.
    pub(super) async fn next(&mut self) -> anyhow::Result<()> {
        let change = self.receive().await?;
        let now = Instant::now();
        match change {
            Change::Listed => {}
            Change::Pod(pod) => self.record_pod(&pod, now),
            Change::Ended(pod) => {
                if let Some(record) = self.records.get_mut(&pod.name_any()) {
                    record.ended.get_or_insert(now);
                }
            }
            Change::Claim(claim) => self.record_claim(&claim, now),
        }
        Ok(())
    }

    fn record_pod(&mut self, pod: &Pod, now: Instant) {
        let name = pod.name_any();
        let Some(record) = self.records.get_mut(&name) else { return };
        record.seen.get_or_insert(now);
        let is_bound = pod.spec.as_ref().is_some_and(|spec| spec.node_name.is_some());
        if is_bound && record.bound.is_none() {
            record.bound = Some(now);
            self.bound += 1;
            self.ends.insert((now + record.lifetime, name.clone()));
        }
        if pod.metadata.deletion_timestamp.is_some() && !record.is_evicted {
            record.is_evicted = true;
            self.ends.insert((now + GRACE, name));
        }
    }

    fn record_claim(&mut self, claim: &ResourceClaim, now: Instant) {
        let owner = claim.owner_references().iter().find(|owner| owner.kind == "Pod");
        let record = owner.and_then(|owner| self.records.get_mut(&owner.name));
        let is_allocated = claim.status.as_ref().is_some_and(|status| status.allocation.is_some());
        if let Some(record) = record.filter(|_| is_allocated) {
            record.allocated.get_or_insert(now);
        }
    }

    /// Notes that the request for a pod of the unit is sent.
    pub(super) fn created(&mut self, name: &str, unit: &Unit) {
        let record = PodRecord {
            is_of_group: unit.size > 1,
            gpus: unit.gpus,
            lifetime: unit.lifetime,
            created: Instant::now(),
            answered: None,
            seen: None,
            allocated: None,
            bound: None,
            ended: None,
            is_evicted: false,
        };
        self.records.insert(name.to_owned(), record);
    }

    /// Notes that the request for a pod is answered.
    pub(super) fn answered(&mut self, name: &str, at: Instant) {
        if let Some(record) = self.records.get_mut(name) {
            record.answered = Some(at);
        }
    }

    /// Begins the day: earlier times do not count. Returns the time.
    pub(super) fn begin_day(&mut self) -> Instant {
        self.began = Instant::now();
        self.began
    }

    /// Returns the begin of the day.
    pub(super) fn began(&self) -> Instant {
        self.began
    }

    /// Returns the number of pods that have been bound.
    pub(super) fn bound(&self) -> usize {
        self.bound
    }

    /// Returns the time at which the next pod ends.
    pub(super) fn next_end(&self) -> Option<Instant> {
        self.ends.first().map(|(at, _)| *at)
    }

    /// Takes the pods that have ended by now.
    pub(super) fn take_ended(&mut self, now: Instant) -> Vec<String> {
        let mut ended = Vec::new();
        while let Some((at, _)) = self.ends.first()
            && *at <= now
            && let Some((_, name)) = self.ends.pop_first()
        {
            ended.push(name);
        }
        ended
    }

    /// Returns all pods.
    pub(super) fn records(&self) -> impl Iterator<Item = &PodRecord> {
        self.records.values()
    }

    /// Returns a line about the pods so far.
    pub(super) fn line(&self) -> String {
        let count = |of: fn(&PodRecord) -> bool| self.records().filter(|record| of(record)).count();
        format!(
            "{} pods created, {} bound, {} waiting, {} evicted, {} ended",
            self.records.len(),
            self.bound,
            count(|record| record.bound.is_none() && record.ended.is_none()),
            count(|record| record.is_evicted),
            count(|record| record.ended.is_some()),
        )
    }
}

fn pod_changes(pods: Api<Pod>) -> BoxStream<'static, anyhow::Result<Change>> {
    let changes = watcher(pods, watcher::Config::default()).map(|event| match event {
        Ok(Event::Apply(pod) | Event::InitApply(pod)) => Ok(Change::Pod(Box::new(pod))),
        Ok(Event::Delete(pod)) => Ok(Change::Ended(Box::new(pod))),
        Ok(Event::Init) => Err(anyhow::anyhow!("the watch of pods began anew")),
        Ok(Event::InitDone) => Ok(Change::Listed),
        Err(error) => Err(anyhow::Error::new(error).context("the watch of pods failed")),
    });
    // The first list begins with it, too.
    changes.skip(1).boxed()
}

fn claim_changes(claims: Api<ResourceClaim>) -> BoxStream<'static, anyhow::Result<Change>> {
    let changes =
        watcher(claims, watcher::Config::default()).filter_map(async |event| match event {
            Ok(Event::Apply(claim) | Event::InitApply(claim)) => {
                Some(Ok(Change::Claim(Box::new(claim))))
            }
            Ok(Event::InitDone) => Some(Ok(Change::Listed)),
            Ok(Event::Init | Event::Delete(_)) => None,
            Err(error) => {
                Some(Err(anyhow::Error::new(error).context("the watch of claims failed")))
            }
        });
    changes.boxed()
}
