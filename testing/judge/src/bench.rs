//! Speed of the allocator, on the scenarios and with the protocol of the oracle's benchmark.
//!
//! An operation is one claim: on all nodes (`filter`), or on nodes in order until one fits, where
//! it is then allocated (`sequence`). Parsing of JSON is not measured. There are three cache
//! states:
//!
//! - *fresh*: only the parsed objects. Upstream's allocator is always fresh.
//! - *cold*: the cluster is indexed and up to date, the kind of claim is unknown.
//! - *warm*: the same kind of claim has been seen; only changes since then are examined.

use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::Serialize;
use tessera_allocator::model::{
    Claim, DeviceId, PendingPod, PodClaim, PodUid, SchedulingConstraints, Usage,
};
use tessera_allocator::{ClaimAllocation, FeatureGates, PlanSettings, Planner, Policy};
use tessera_api::names::{ClaimName, ClaimUid, Namespace, NodeName, PodName};
use tessera_index::convert;

use crate::scenario::Scenario;

/// State of the allocator's caches at the start of an operation; see the module.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum CacheState {
    /// Empty.
    Fresh,
    /// The cluster is indexed.
    Cold,
    /// The cluster is indexed, and claims like this one have been seen.
    Warm,
}

/// Kind of a measurement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BenchMode {
    /// Searches all nodes, without allocation.
    Filter {
        /// Number of repetitions.
        repeat: usize,
    },
    /// Allocates on the first node that fits.
    Sequence {
        /// True if the oldest share is released before each claim.
        churn: bool,
    },
}

/// Result of a measurement.
#[derive(Debug, Clone, Serialize)]
pub struct BenchReport {
    /// Name of the scenario.
    pub scenario: String,
    /// State of the caches.
    #[serde(rename = "way")]
    pub cache_state: CacheState,
    /// Number of operations.
    pub ops: usize,
    /// Sequence: claims that got devices. Filter: nodes that fit.
    pub fits: usize,
    /// Nodes that were not decided within the step limit.
    pub undecided: usize,
    /// Median time of an operation in nanoseconds.
    pub p50_ns: u64,
    /// 99th percentile in nanoseconds.
    pub p99_ns: u64,
    /// Total time of all operations in nanoseconds.
    pub total_ns: u64,
    /// Time to index the cluster once from parsed objects, in nanoseconds.
    pub index_ns: u64,
}

/// Runs a scenario with one state of the caches.
pub fn run(scenario: &Scenario, mode: BenchMode, cache_state: CacheState) -> BenchReport {
    let (planner, index) = timed(|| indexed(scenario));
    let mut bench = Bench {
        scenario,
        cache_state,
        planner,
        usage: scenario.snapshot.usage.clone(),
        undecided: 0,
    };
    let mut times = Vec::new();
    let fits = match mode {
        BenchMode::Filter { repeat } => bench.filter(repeat, &mut times),
        BenchMode::Sequence { churn } => bench.sequence(churn, &mut times),
    };
    times.sort_unstable();
    let at = |percent: usize| {
        times.get((times.len() * percent / 100).min(times.len().saturating_sub(1)))
    };
    let nanos = |time: Option<&Duration>| time.map_or(0, |t| t.as_nanos() as u64);
    BenchReport {
        scenario: scenario.name.clone(),
        cache_state,
        ops: times.len(),
        fits,
        undecided: bench.undecided,
        p50_ns: nanos(at(50)),
        p99_ns: nanos(at(99)),
        total_ns: times.iter().sum::<Duration>().as_nanos() as u64,
        index_ns: index.as_nanos() as u64,
    }
}

/// Step limit of one claim; no scenario needs as many.
const STEPS: u64 = 50_000_000;

fn indexed(scenario: &Scenario) -> Planner {
    let mut planner = Planner::from_snapshot(&scenario.snapshot, scenario.features);
    planner.collect_devices();
    planner
}

fn timed<T>(work: impl FnOnce() -> T) -> (T, Duration) {
    let start = Instant::now();
    let result = work();
    (result, start.elapsed())
}

struct Bench<'s> {
    scenario: &'s Scenario,
    cache_state: CacheState,
    planner: Planner,
    usage: Usage,
    undecided: usize,
}

impl Bench<'_> {
    fn filter(&mut self, repeat: usize, times: &mut Vec<Duration>) -> usize {
        let mut fits = 0;
        if self.cache_state == CacheState::Warm {
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

    /// Sets the planner's state at the start of an operation.
    fn begin(&mut self) {
        match self.cache_state {
            CacheState::Fresh => {
                let mut snapshot = self.scenario.snapshot.clone();
                snapshot.usage = self.usage.clone();
                self.planner = Planner::from_snapshot(&snapshot, self.scenario.features);
            }
            CacheState::Cold => self.planner.clear_caches(),
            CacheState::Warm => {}
        }
    }

    fn sequence(&mut self, churn: bool, times: &mut Vec<Duration>) -> usize {
        let mut release = self.scenario.allocated.iter();
        let mut fits = 0;
        if self.cache_state == CacheState::Warm {
            self.sequence_once(&self.scenario.claims[0].clone());
        }
        for (n, claim) in self.scenario.claims.iter().enumerate() {
            let released = if churn { release.next() } else { None };
            let released = released.and_then(|claim| claim.status.as_ref()?.allocation.as_ref());
            let released = released.and_then(|a| convert::allocated("old", a, &[]).ok());
            let (chosen, time) = timed(|| {
                if let Some(released) = &released {
                    self.usage.remove(&released.results);
                    self.update_planner(released.results.iter().map(|r| &r.device));
                }
                self.sequence_once(&named(claim, n))
            });
            times.push(time);
            if let Some(claim_allocations) = chosen {
                fits += 1;
                let results = claim_allocations.iter().flat_map(|a| &a.results);
                results.clone().for_each(|r| self.usage.add(std::slice::from_ref(r)));
                self.update_planner(results.map(|r| &r.device));
            }
        }
        fits
    }

    fn update_planner<'d>(&mut self, devices: impl Iterator<Item = &'d DeviceId>) {
        for device in devices {
            self.planner.set_device_use(device, self.usage.get(device));
        }
    }

    fn sequence_once(&mut self, claim: &Arc<Claim>) -> Option<Vec<ClaimAllocation>> {
        self.begin();
        let claims = std::slice::from_ref(claim);
        if self.cache_state == CacheState::Warm {
            let settings = PlanSettings {
                policy: Policy::FirstFit,
                steps_per_pod: STEPS,
                ..PlanSettings::default()
            };
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
) -> Option<Vec<ClaimAllocation>> {
    match planner.allocate_on(node, claims, Policy::FirstFit, STEPS) {
        Ok(claim_allocations) => Some(claim_allocations),
        Err(tessera_allocator::AllocateError::OutOfSteps) => {
            *undecided += 1;
            None
        }
        Err(_) => None,
    }
}

/// Returns the claim with its own name and UID.
fn named(claim: &Arc<Claim>, n: usize) -> Arc<Claim> {
    let uid = ClaimUid::new(format!("uid-{n}")).expect("invariant: a valid UID by its form");
    let name = ClaimName::new(format!("claim-{n}")).expect("invariant: a valid name by its form");
    Arc::new(Claim { uid, name, ..Claim::clone(claim) })
}

/// Returns the claim with this number of devices in each of its requests.
fn with_devices(claim: Arc<Claim>, devices: Option<u64>) -> Arc<Claim> {
    let Some(devices) = devices else { return claim };
    let mut claim = Arc::unwrap_or_clone(claim);
    let requests = Arc::make_mut(&mut claim.requests);
    let alternatives = requests.iter_mut().flat_map(|request| &mut request.alternatives);
    alternatives.for_each(|alternative| {
        alternative.mode = tessera_allocator::model::AllocationMode::Exact(devices)
    });
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
        scheduling: Arc::new(SchedulingConstraints::default()),
        nominated_node: None,
        excluded_nodes: Default::default(),
        together_with: Vec::new(),
        topology: None,
    }
}

/// Result of planning many pods in one run.
#[derive(Debug, Clone, Serialize)]
pub struct BatchReport {
    /// Name of the scenario.
    pub scenario: String,
    /// Number of pending pods.
    pub pods: usize,
    /// Number of pods that got devices.
    pub placed: usize,
    /// Time of the whole plan in nanoseconds.
    pub plan_ns: u64,
    /// Median time of an update of one device's usage, in nanoseconds.
    pub update_ns: u64,
}

/// Pods to plan in one run.
#[derive(Debug, Clone, Copy)]
pub struct PendingBatch {
    /// Number of pods.
    pub pods: usize,
    /// Devices per request; `None`: as in the scenario.
    pub devices: Option<u64>,
    /// Seconds that the pods have waited.
    pub waited: u32,
}

/// Plans pods with the scenario's claims, and measures the update of one device's usage.
pub fn batch(scenario: &Scenario, batch: PendingBatch, policy: Policy) -> BatchReport {
    let PendingBatch { pods, devices, waited } = batch;
    let mut planner = Planner::from_snapshot(&scenario.snapshot, FeatureGates::default());
    planner.collect_devices();
    let claims = scenario.claims.iter().cycle().take(pods).enumerate();
    let pending: Vec<PendingPod> =
        claims.map(|(n, claim)| pod(&with_devices(named(claim, n), devices))).collect();
    let settings = PlanSettings { policy, now: i64::from(waited), ..PlanSettings::default() };
    let (plan, time) = timed(|| planner.plan(&pending, settings));
    let results: Vec<_> =
        plan.decisions.iter().flat_map(|d| &d.claims).flat_map(|c| &c.results).collect();
    let mut usage = scenario.snapshot.usage.clone();
    let mut updates: Vec<Duration> = results
        .iter()
        .map(|result| {
            usage.add(std::slice::from_ref(result));
            timed(|| planner.set_device_use(&result.device, usage.get(&result.device))).1
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
