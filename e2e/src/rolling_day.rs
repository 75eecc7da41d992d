//! A rolling day on a real control plane (`make bench-day-cluster`): pods and groups of three
//! priorities arrive, run, are preempted and end, on hollow nodes.
//!
//! ```text
//! arrivals --create--> API server --watch--> observer: times of each pod
//!                        ^                      | bound: the lifetime begins
//!                        '---delete-- kubelets -' ends: lifetime over, or evicted and 2 s later
//! ```
//!
//! At the begin most nodes are taken by pods with all GPUs of a node, which end one after the
//! other. Figures depend on the machine; only devices that are allocated twice are an error.

mod arrivals;
mod figures;
mod observer;

use std::path::Path;
use std::time::Duration;

use anyhow::Context;
use clap::Args;
use futures::stream::FuturesUnordered;
use futures::{FutureExt, StreamExt};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::api::{DeleteParams, ListParams, PostParams};
use kube::{Api, Client};
use serde::Serialize;
use serde_json::Value;
use tessera_api::slice::Fence;
use tokio::time::{Instant, interval, sleep_until};

use self::arrivals::{Arrivals, Unit};
pub use self::figures::Figures;
use self::observer::Observer;
use crate::hollow::{HollowNodes, HollowNodesSpec};
use crate::throughput::preparation::{
    self, NAMESPACE, wait_default_service_account, wait_nodes_schedulable, wait_policies_in_force,
};
use crate::throughput::usage;

/// GPUs of each node, of 80 GiB.
const GPUS: u32 = 8;

/// The most requests of the arrivals and the kubelets at a time.
const MAX_REQUESTS: usize = 64;

/// Time between two progress lines, each with a check of all claims.
const REPORT: Duration = Duration::from_secs(30);

/// Time in which the first pods have to be bound, for each node.
const FILL_TIME_PER_NODE: Duration = Duration::from_millis(500);

/// Size of a day.
#[derive(Clone, Copy, Debug, Serialize, Args)]
pub struct DaySize {
    /// Number of hollow nodes, with eight GPUs each.
    #[arg(long, default_value_t = 300, value_name = "NUMBER", value_parser = clap::value_parser!(u32).range(1..=5000))]
    pub nodes: u32,
    /// Arrivals per second: pods with a share, pods with a GPU, and groups of up to 16 pods.
    #[arg(long, default_value_t = 3, value_name = "NUMBER", value_parser = clap::value_parser!(u32).range(1..=100))]
    pub rate: u32,
    /// Length in seconds, after the first pods are bound.
    #[arg(long, default_value_t = 300, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(10..=36_000))]
    pub seconds: u64,
    /// Seed of the random numbers.
    #[arg(long, default_value_t = 1, value_name = "NUMBER")]
    pub seed: u64,
}

/// Runs a day on the control plane of `client`. The files in `pids` contain the process IDs of the
/// components.
///
/// # Errors
/// A request fails, a component exits, or a device is allocated twice.
pub async fn run(size: DaySize, client: &Client, pids: &Path) -> anyhow::Result<Figures> {
    wait_policies_in_force(client).await?;
    let spec = HollowNodesSpec { nodes: size.nodes, gpus: GPUS, fence: Fence::Taint };
    let hollow = HollowNodes::create(client, "day", spec).await?;
    let day = async {
        wait_nodes_schedulable(client, size.nodes).await?;
        wait_default_service_account(client).await?;
        preparation::priority_classes(client, &arrivals::PRIORITY_CLASSES).await?;
        let mut day = Day::begin(size, client, &hollow).await?;
        day.fill(pids).await?;
        day.pass(pids).await
    };
    tokio::select! {
        Err(error) = hollow.keep_ready() => Err(error),
        figures = day => figures,
    }
}

/// A request of the arrivals or the kubelets: the pod that it has created, if it has, and the time
/// of the answer.
type Request = futures::future::BoxFuture<'static, anyhow::Result<Option<(String, Instant)>>>;

/// A day under way.
struct Day {
    size: DaySize,
    pods: Api<Pod>,
    claims: Api<ResourceClaim>,
    placement: (Value, Value),
    arrivals: Arrivals,
    observer: Observer,
    requests: FuturesUnordered<Request>,
}

impl Day {
    async fn begin(size: DaySize, client: &Client, hollow: &HollowNodes) -> anyhow::Result<Self> {
        arrivals::create_templates(client, NAMESPACE, GPUS).await?;
        Ok(Self {
            size,
            pods: Api::namespaced(client.clone(), NAMESPACE),
            claims: Api::namespaced(client.clone(), NAMESPACE),
            placement: hollow.placement(),
            arrivals: Arrivals::new(size, GPUS),
            observer: Observer::start(client, NAMESPACE).await?,
            requests: FuturesUnordered::new(),
        })
    }

    /// Takes most of the nodes, and waits until all of these pods are bound.
    async fn fill(&mut self, pids: &Path) -> anyhow::Result<()> {
        let units = self.arrivals.first(self.size.nodes);
        let count = units.len();
        let began = Instant::now();
        let limit = began + FILL_TIME_PER_NODE * self.size.nodes + REPORT;
        let mut units = units.into_iter();
        while self.observer.bound() < count {
            if self.requests.len() < MAX_REQUESTS
                && let Some(unit) = units.next()
            {
                self.create(unit)?;
                continue;
            }
            tokio::select! {
                event = self.observer.next() => event?,
                Some(ended) = self.requests.next() => self.note_answer(ended?),
                () = sleep_until(limit) => {
                    usage::read(pids)?;
                    anyhow::bail!("{} of {count} first pods are bound", self.observer.bound());
                }
            }
        }
        eprintln!("    {count} nodes are taken after {:.0} s", began.elapsed().as_secs_f64());
        Ok(())
    }

    /// Lets the time of the day pass.
    async fn pass(&mut self, pids: &Path) -> anyhow::Result<Figures> {
        let began = self.observer.begin_day();
        let end = began + Duration::from_secs(self.size.seconds);
        let (before, allocations) = (usage::read(pids)?, figures::allocations().await?);
        let period = Duration::from_secs(1) / self.size.rate;
        let mut arrivals = interval(period);
        let mut reports = interval(REPORT);
        reports.tick().await;
        loop {
            let has_room = self.requests.len() < MAX_REQUESTS;
            let next_end = self.observer.next_end();
            tokio::select! {
                () = sleep_until(end) => break,
                event = self.observer.next() => event?,
                Some(ended) = self.requests.next() => self.note_answer(ended?),
                _ = arrivals.tick(), if has_room => {
                    let unit = self.arrivals.next();
                    self.create(unit)?;
                }
                () = sleep_until(next_end.unwrap_or(end)), if has_room && next_end.is_some() => {
                    self.end_due();
                }
                _ = reports.tick() => {
                    usage::read(pids)?;
                    self.check().await?;
                    eprintln!("    {:.0} s: {}", began.elapsed().as_secs_f64(), self.observer.line());
                }
            }
        }
        self.check().await?;
        let usage = usage::between(&before, &usage::read(pids)?);
        let latency = figures::latency(&allocations, &figures::allocations().await?);
        let figures = figures::of(self.size, &self.observer, usage)?;
        Ok(Figures { allocation_latency: latency, ..figures })
    }

    /// Creates the pods of a unit.
    fn create(&mut self, unit: Unit) -> anyhow::Result<()> {
        for (name, object) in unit.pods(&self.placement) {
            let pod: Pod = serde_json::from_value(object)?;
            self.observer.created(&name, &unit);
            let pods = self.pods.clone();
            let request = async move {
                let created = pods.create(&PostParams::default(), &pod).await;
                created.with_context(|| format!("cannot create pod {name}"))?;
                Ok(Some((name, Instant::now())))
            };
            self.requests.push(request.boxed());
        }
        Ok(())
    }

    fn note_answer(&mut self, answer: Option<(String, Instant)>) {
        if let Some((pod, at)) = answer {
            self.observer.answered(&pod, at);
        }
    }

    /// Deletes the pods that have ended, as their kubelets do.
    fn end_due(&mut self) {
        for name in self.observer.take_ended(Instant::now()) {
            let pods = self.pods.clone();
            let request = async move {
                let at_once = DeleteParams::default().grace_period(0);
                match pods.delete(&name, &at_once).await {
                    Err(kube::Error::Api(status)) if status.is_not_found() => Ok(None),
                    answer => {
                        answer.map(|_| None).with_context(|| format!("cannot delete pod {name}"))
                    }
                }
            };
            self.requests.push(request.boxed());
        }
    }

    /// Checks that no device has more allocated than it has.
    async fn check(&self) -> anyhow::Result<()> {
        let claims = self.claims.list(&ListParams::default()).await?;
        figures::check_devices(&claims.items)
    }
}
