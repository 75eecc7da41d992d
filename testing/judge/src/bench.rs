//! How long the allocator takes, on the scenarios and by the protocol of the oracle's own
//! benchmark.
//!
//! An operation is one claim: on all nodes (`filter`), or on nodes in order until one fits, which
//! then counts as taken (`sequence`). Reading JSON is not counted. It is measured in three ways:
//!
//! - *fresh*: nothing is there but the parsed objects. Upstream's allocator is always fresh.
//! - *cold*: the cluster is indexed and kept up to date, the claim is of a kind never seen before.
//! - *warm*: the same kind of claim has come before; what changed since is looked at again.

use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::Serialize;
use tessera_allocator::model::{Claim, DeviceId, PendingPod, PodClaim, PodUid, Scheduling, Usage};
use tessera_allocator::{Allotment, Features, Planner, Policy, Settings};
use tessera_api::names::{ClaimName, ClaimUid, Namespace, NodeName, PodName};
use tessera_index::convert;

use crate::scenario::Scenario;

/// What the allocator remembers when an operation begins. See the module.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Way {
    /// Nothing.
    Fresh,
    /// The cluster.
    Cold,
    /// The cluster, and claims like this one.
    Warm,
}

/// How a scenario is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// All nodes, nothing is taken.
    Filter {
        /// How often.
        repeat: usize,
    },
    /// The first node that fits, which is then taken.
    Sequence {
        /// The oldest share is released before each claim.
        churn: bool,
    },
}

/// What was measured in one way.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    /// The scenario.
    pub scenario: String,
    /// What was remembered.
    pub way: Way,
    /// Operations.
    pub ops: usize,
    /// Sequence: claims that got devices. Filter: nodes that fit.
    pub fits: usize,
    /// Nodes that were not decided within the steps.
    pub undecided: usize,
    /// Median of an operation, in nanoseconds.
    pub p50_ns: u64,
    /// 99th percentile.
    pub p99_ns: u64,
    /// All operations.
    pub total_ns: u64,
    /// Indexing the cluster once, from parsed objects, in nanoseconds.
    pub index_ns: u64,
}

/// Runs a scenario in one way.
pub fn run(scenario: &Scenario, mode: Mode, way: Way) -> Report {
    let (planner, index) = timed(|| indexed(scenario));
    let mut bench =
        Bench { scenario, way, planner, usage: scenario.snapshot.usage.clone(), undecided: 0 };
    let mut times = Vec::new();
    let fits = match mode {
        Mode::Filter { repeat } => bench.filter(repeat, &mut times),
        Mode::Sequence { churn } => bench.sequence(churn, &mut times),
    };
    times.sort_unstable();
    let at = |percent: usize| {
        times.get((times.len() * percent / 100).min(times.len().saturating_sub(1)))
    };
    let nanos = |time: Option<&Duration>| time.map_or(0, |t| t.as_nanos() as u64);
    Report {
        scenario: scenario.name.clone(),
        way,
        ops: times.len(),
        fits,
        undecided: bench.undecided,
        p50_ns: nanos(at(50)),
        p99_ns: nanos(at(99)),
        total_ns: times.iter().sum::<Duration>().as_nanos() as u64,
        index_ns: index.as_nanos() as u64,
    }
}

/// One claim for the first policy: steps beyond any that a scenario takes.
const STEPS: u64 = 50_000_000;

fn indexed(scenario: &Scenario) -> Planner {
    let mut planner = Planner::of(&scenario.snapshot, scenario.features);
    planner.gather();
    planner
}

fn timed<T>(work: impl FnOnce() -> T) -> (T, Duration) {
    let start = Instant::now();
    let result = work();
    (result, start.elapsed())
}

struct Bench<'s> {
    scenario: &'s Scenario,
    way: Way,
    planner: Planner,
    usage: Usage,
    undecided: usize,
}

impl Bench<'_> {
    fn filter(&mut self, repeat: usize, times: &mut Vec<Duration>) -> usize {
        let mut fits = 0;
        if self.way == Way::Warm {
            self.filter_once(&self.scenario.claims[0].clone());
        }
        for claim in std::iter::repeat_n(&self.scenario.claims, repeat).flatten() {
            let (found, time) = timed(|| self.filter_once(claim));
            fits = found;
            times.push(time);
        }
        fits
    }

    fn filter_once(&mut self, claim: &Arc<Claim>) -> usize {
        self.begin();
        let claims = std::slice::from_ref(claim);
        self.planner.count_fits(claims, Policy::FirstFit, STEPS)
    }

    /// Brings the planner into the state in which an operation of this way begins.
    fn begin(&mut self) {
        match self.way {
            Way::Fresh => {
                let mut snapshot = self.scenario.snapshot.clone();
                snapshot.usage = self.usage.clone();
                self.planner = Planner::of(&snapshot, self.scenario.features);
            }
            Way::Cold => self.planner.forget(),
            Way::Warm => {}
        }
    }

    fn sequence(&mut self, churn: bool, times: &mut Vec<Duration>) -> usize {
        let mut release = self.scenario.allocated.iter();
        let mut fits = 0;
        if self.way == Way::Warm {
            self.sequence_once(&self.scenario.claims[0].clone());
        }
        for (n, claim) in self.scenario.claims.iter().enumerate() {
            let released = if churn { release.next() } else { None };
            let released = released.and_then(|claim| claim.status.as_ref()?.allocation.as_ref());
            let released = released.and_then(|a| convert::allocated("old", a).ok());
            let (chosen, time) = timed(|| {
                if let Some(released) = &released {
                    self.usage.remove(&released.results);
                    self.tell(released.results.iter().map(|r| &r.device));
                }
                self.sequence_once(&named(claim, n))
            });
            times.push(time);
            if let Some(allotments) = chosen {
                fits += 1;
                let results = allotments.iter().flat_map(|a| &a.results);
                results.clone().for_each(|r| self.usage.add(std::slice::from_ref(r)));
                self.tell(results.map(|r| &r.device));
            }
        }
        fits
    }

    fn tell<'d>(&mut self, devices: impl Iterator<Item = &'d DeviceId>) {
        for device in devices {
            self.planner.set_use(device, self.usage.of(device));
        }
    }

    fn sequence_once(&mut self, claim: &Arc<Claim>) -> Option<Vec<Allotment>> {
        self.begin();
        let claims = std::slice::from_ref(claim);
        if self.way == Way::Warm {
            let settings =
                Settings { policy: Policy::FirstFit, steps_per_pod: STEPS, ..Settings::default() };
            return self.planner.plan(&[pod(claim)], settings).decisions.pop().map(|d| d.claims);
        }
        let mut nodes = self.scenario.nodes.iter();
        nodes.find_map(|node| allocate(&mut self.planner, node, claims, &mut self.undecided))
    }
}

fn allocate(
    planner: &mut Planner,
    node: &NodeName,
    claims: &[Arc<Claim>],
    undecided: &mut usize,
) -> Option<Vec<Allotment>> {
    match planner.allocate_on(node, claims, Policy::FirstFit, STEPS) {
        Ok(allotments) => Some(allotments),
        Err(tessera_allocator::Unallocated::OutOfSteps) => {
            *undecided += 1;
            None
        }
        Err(_) => None,
    }
}

/// The claim as one of its own.
fn named(claim: &Arc<Claim>, n: usize) -> Arc<Claim> {
    let uid = ClaimUid::new(format!("uid-{n}")).expect("invariant: a valid UID by its form");
    let name = ClaimName::new(format!("claim-{n}")).expect("invariant: a valid name by its form");
    Arc::new(Claim { uid, name, ..Claim::clone(claim) })
}

/// The claim with so many devices for each of its requests.
fn wanting(claim: Arc<Claim>, devices: Option<u64>) -> Arc<Claim> {
    let Some(devices) = devices else { return claim };
    let mut claim = Arc::unwrap_or_clone(claim);
    let alternatives = claim.requests.iter_mut().flat_map(|request| &mut request.alternatives);
    alternatives
        .for_each(|alternative| alternative.mode = tessera_allocator::model::Mode::Exact(devices));
    Arc::new(claim)
}

fn pod(claim: &Arc<Claim>) -> PendingPod {
    PendingPod {
        uid: PodUid::new(claim.uid.as_str()),
        namespace: Namespace::new("default").expect("invariant: a valid name"),
        name: PodName::new(claim.name.as_str()).expect("invariant: a claim's name is a pod's name"),
        priority: 0,
        created: 0,
        claims: vec![PodClaim::Pending(Arc::clone(claim))],
        scheduling: Arc::new(Scheduling::default()),
        nominated: None,
        excluded: Default::default(),
    }
}

/// Many pods, planned at once.
#[derive(Debug, Clone, Serialize)]
pub struct BatchReport {
    /// The scenario whose cluster it is.
    pub scenario: String,
    /// Pods that were pending.
    pub pods: usize,
    /// Pods that got devices.
    pub placed: usize,
    /// The whole plan, in nanoseconds.
    pub plan_ns: u64,
    /// What one change of a device's use takes, in nanoseconds: median over all devices.
    pub update_ns: u64,
}

/// The pods of a batch.
#[derive(Debug, Clone, Copy)]
pub struct Batch {
    /// How many.
    pub pods: usize,
    /// How many devices each request wants; none = as many as in the scenario.
    pub devices: Option<u64>,
    /// For how many seconds they have waited.
    pub waited: u32,
}

/// Plans so many pods with the scenario's claims, and measures what telling the planner of one
/// change takes.
pub fn batch(scenario: &Scenario, batch: Batch, policy: Policy) -> BatchReport {
    let Batch { pods, devices, waited } = batch;
    let mut planner = Planner::of(&scenario.snapshot, Features::default());
    planner.gather();
    let claims = scenario.claims.iter().cycle().take(pods).enumerate();
    let pending: Vec<PendingPod> =
        claims.map(|(n, claim)| pod(&wanting(named(claim, n), devices))).collect();
    let settings = Settings { policy, now: i64::from(waited), ..Settings::default() };
    let (plan, time) = timed(|| planner.plan(&pending, settings));
    let results: Vec<_> =
        plan.decisions.iter().flat_map(|d| &d.claims).flat_map(|c| &c.results).collect();
    let mut usage = scenario.snapshot.usage.clone();
    let mut updates: Vec<Duration> = results
        .iter()
        .map(|result| {
            usage.add(std::slice::from_ref(result));
            timed(|| planner.set_use(&result.device, usage.of(&result.device))).1
        })
        .collect();
    updates.sort_unstable();
    BatchReport {
        scenario: scenario.name.clone(),
        pods,
        placed: plan.decisions.len(),
        plan_ns: time.as_nanos() as u64,
        update_ns: updates.get(updates.len() / 2).map_or(0, |t| t.as_nanos() as u64),
    }
}
