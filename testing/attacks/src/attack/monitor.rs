//! Memory, CPU time and restarts of Tessera's processes, and changes of the leader.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use k8s_openapi::api::coordination::v1::Lease;
use kube::Api;
use tessera_api::names::CONTROLLER_LEASE;
use tokio::task::JoinSet;

use super::Target;
use super::report::ProcessReport;
use crate::cluster::SYSTEM_NAMESPACE;

/// Interval of samples.
const INTERVAL: Duration = Duration::from_millis(250);

/// CPU time of each process at some time.
#[derive(Clone, Debug)]
pub(super) struct CpuTimes {
    at: Instant,
    seconds: BTreeMap<String, f64>,
}

#[derive(Clone, Debug, Default)]
struct Sampled {
    pids: BTreeSet<u32>,
    begin_rss_mib: f64,
    rss_mib: f64,
    peak_rss_mib: f64,
    /// CPU time of earlier processes of the same label.
    earlier_cpu_s: f64,
    cpu_s: f64,
}

type Samples = Arc<Mutex<BTreeMap<String, Sampled>>>;

/// The running monitor. Dropping it stops it.
pub(super) struct Monitor {
    target: Target,
    samples: Samples,
    transitions: i32,
    _task: JoinSet<()>,
}

impl Monitor {
    pub(super) async fn start(target: Target) -> anyhow::Result<Self> {
        let (samples, mut task) = (Samples::default(), JoinSet::new());
        let (sampled, of) = (Arc::clone(&samples), target.clone());
        sample(&target, &samples);
        task.spawn(async move {
            let mut ticks = tokio::time::interval(INTERVAL);
            loop {
                ticks.tick().await;
                sample(&of, &sampled);
            }
        });
        let transitions = transitions(&target).await?;
        Ok(Self { target, samples, transitions, _task: task })
    }

    /// Returns the resident memory of each process in MiB.
    pub(super) fn memory(&self) -> Vec<(String, f64)> {
        lock(&self.samples).iter().map(|(label, s)| (label.clone(), s.rss_mib)).collect()
    }

    pub(super) fn cpu_times(&self) -> CpuTimes {
        sample(&self.target, &self.samples);
        let seconds = |(label, s): (&String, &Sampled)| (label.clone(), s.earlier_cpu_s + s.cpu_s);
        CpuTimes { at: Instant::now(), seconds: lock(&self.samples).iter().map(seconds).collect() }
    }

    /// Returns the number of changes of the leader, and the resources of each process. `times` are
    /// the begin, the end of the peace, and the end of the attack.
    pub(super) async fn finish(
        self,
        times: [&CpuTimes; 3],
    ) -> anyhow::Result<(i64, Vec<ProcessReport>)> {
        let changes = transitions(&self.target).await? - self.transitions;
        let samples = lock(&self.samples);
        let report = |(label, sampled): (&String, &Sampled)| ProcessReport {
            process: label.clone(),
            begin_rss_mib: sampled.begin_rss_mib,
            peak_rss_mib: sampled.peak_rss_mib,
            cores: [0, 1].map(|phase| cores(label, times[phase], times[phase + 1])),
            restarts: sampled.pids.len().saturating_sub(1),
        };
        let reports: Vec<_> = samples.iter().map(report).collect();
        let controllers = reports.iter().filter(|report| report.process == "tessera-controller");
        let restarts: usize = controllers.map(|report| report.restarts).sum();
        Ok((i64::from(changes).max(i64::try_from(restarts)?), reports))
    }
}

fn cores(label: &str, from: &CpuTimes, to: &CpuTimes) -> f64 {
    let seconds = |times: &CpuTimes| times.seconds.get(label).copied().unwrap_or_default();
    (seconds(to) - seconds(from)) / (to.at - from.at).as_secs_f64().max(f64::MIN_POSITIVE)
}

/// Adds a sample of each process that runs at the moment.
fn sample(target: &Target, samples: &Samples) {
    for process in target.processes.find().unwrap_or_default() {
        // It may have just exited.
        let Ok(usage) = process.usage() else { continue };
        let mut samples = lock(samples);
        let sampled = samples.entry(process.label()).or_default();
        if sampled.pids.is_empty() {
            sampled.begin_rss_mib = usage.rss_mib;
        }
        if sampled.pids.insert(process.pid) {
            sampled.earlier_cpu_s += sampled.cpu_s;
        }
        sampled.rss_mib = usage.rss_mib;
        sampled.peak_rss_mib = sampled.peak_rss_mib.max(usage.peak_rss_mib);
        sampled.cpu_s = usage.cpu_s;
    }
}

fn lock(samples: &Samples) -> MutexGuard<'_, BTreeMap<String, Sampled>> {
    samples.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the number of changes of the leader so far.
async fn transitions(target: &Target) -> anyhow::Result<i32> {
    let leases: Api<Lease> = Api::namespaced(target.client.clone(), SYSTEM_NAMESPACE);
    let spec = leases.get(CONTROLLER_LEASE).await?.spec.unwrap_or_default();
    Ok(spec.lease_transitions.unwrap_or_default())
}
