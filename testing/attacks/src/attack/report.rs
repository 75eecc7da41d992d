//! Figures and violations of an attack.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use serde::Serialize;

/// Result of an attack.
#[derive(Clone, Debug, Serialize)]
pub struct AttackReport {
    /// Seed of the attacker's choices.
    pub seed: u64,
    /// Latencies of the honest namespace while it was alone.
    pub peace: LatencySummary,
    /// Latencies of the honest namespace during the attack.
    pub attack: LatencySummary,
    /// Number of the attacker's requests by verb and kind, and by outcome.
    pub requests: BTreeMap<String, BTreeMap<&'static str, u64>>,
    /// Number of shares that were allocated, in both namespaces.
    pub shares: usize,
    /// Number of times that the controller was killed or stopped, and started again.
    pub restarts: usize,
    /// Number of times that the leader changed or was restarted.
    pub leader_changes: i64,
    /// Resources of the measured processes.
    pub processes: Vec<ProcessReport>,
    /// Violated invariants.
    pub violations: Vec<String>,
}

/// Resources of a process.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ProcessReport {
    /// Program and node.
    pub process: String,
    /// Resident memory at the begin, in MiB.
    pub begin_rss_mib: f64,
    /// Highest resident memory in MiB.
    pub peak_rss_mib: f64,
    /// Share of one core in peace and during the attack, with what follows each.
    pub cores: [f64; 2],
    /// Number of times that the process was restarted.
    pub restarts: usize,
}

/// WaitUntil times of the pods of one phase, in milliseconds from the creation of the pod.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct LatencySummary {
    /// Duration of the phase in seconds.
    pub seconds: f64,
    /// Number of pods.
    pub pods: usize,
    /// Until the claim is allocated: median, 99th percentile, longest.
    pub allocated_ms: [f64; 3],
    /// Until the pod is bound: median, 99th percentile, longest.
    pub bound_ms: [f64; 3],
}

/// WaitUntil times of one pod.
#[derive(Clone, Copy, Debug)]
pub(super) struct Latency {
    pub(super) allocated: Duration,
    pub(super) bound: Duration,
}

impl LatencySummary {
    pub(super) fn new(duration: Duration, latencies: &[Latency]) -> Self {
        Self {
            seconds: duration.as_secs_f64(),
            pods: latencies.len(),
            allocated_ms: quantiles(latencies.iter().map(|latency| latency.allocated)),
            bound_ms: quantiles(latencies.iter().map(|latency| latency.bound)),
        }
    }
}

/// Returns median, 99th percentile and maximum in milliseconds, by the nearest-rank method; zeros
/// without samples.
fn quantiles(samples: impl Iterator<Item = Duration>) -> [f64; 3] {
    let mut sorted: Vec<_> = samples.collect();
    sorted.sort_unstable();
    [50, 99, 100].map(|percent| {
        let rank = (sorted.len() * percent).div_ceil(100).max(1);
        sorted.get(rank - 1).map_or(0.0, |sample| sample.as_secs_f64() * 1000.0)
    })
}

impl AttackReport {
    /// Returns the ratio of the 99th percentiles until the allocation, attack to peace.
    pub fn ratio(&self) -> f64 {
        self.attack.allocated_ms[1] / self.peace.allocated_ms[1].max(f64::MIN_POSITIVE)
    }
}

impl fmt::Display for AttackReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let requests: u64 = self.requests.values().flat_map(BTreeMap::values).sum();
        writeln!(f, "seed {}: {requests} hostile requests, {} shares", self.seed, self.shares)?;
        writeln!(f, "\n| phase | honest pods | allocated p50, p99, max | bound p50, p99, max |")?;
        writeln!(f, "|---|---|---|---|")?;
        for (name, phase) in [("peace", &self.peace), ("attack", &self.attack)] {
            let [allocated, bound] = [phase.allocated_ms, phase.bound_ms]
                .map(|[p50, p99, max]| format!("{p50:.0}, {p99:.0}, {max:.0} ms"));
            let (pods, seconds) = (phase.pods, phase.seconds);
            writeln!(f, "| {name}, {seconds:.0} s | {pods} | {allocated} | {bound} |")?;
        }
        writeln!(f, "\np99 until allocated, attack to peace: {:.2}", self.ratio())?;
        let (restarts, changes) = (self.restarts, self.leader_changes);
        writeln!(f, "restarts of the controller: {restarts}, leader changes: {changes}")?;
        writeln!(
            f,
            "\n| process | memory at first, highest | cores in peace, attack | restarts |"
        )?;
        writeln!(f, "|---|---|---|---|")?;
        for process in &self.processes {
            let ProcessReport { process, begin_rss_mib, peak_rss_mib, cores, restarts } = process;
            let memory = format!("{begin_rss_mib:.0}, {peak_rss_mib:.0} MiB");
            let cores = format!("{:.2}, {:.2}", cores[0], cores[1]);
            writeln!(f, "| {process} | {memory} | {cores} | {restarts} |")?;
        }
        writeln!(f, "\n| request | accepted | refused | failed |\n|---|---|---|---|")?;
        for (request, outcomes) in &self.requests {
            let count = |outcome| outcomes.get(outcome).copied().unwrap_or_default();
            let counts =
                ["accepted", "refused", "failed"].map(|outcome| count(outcome).to_string());
            writeln!(f, "| {request} | {} |", counts.join(" | "))?;
        }
        match &self.violations[..] {
            [] => writeln!(f, "\nno invariant was violated"),
            violations => writeln!(f, "\nviolated: {}", violations.join("\nviolated: ")),
        }
    }
}

/// Violated invariants so far. Clones share them.
#[derive(Clone, Debug, Default)]
pub(super) struct Violations(Arc<Mutex<Vec<String>>>);

impl Violations {
    pub(super) fn add(&self, violation: String) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(violation);
    }

    pub(super) fn add_error(&self, what: &str, outcome: anyhow::Result<()>) {
        if let Err(error) = outcome {
            self.add(format!("{what}: {error:#}"));
        }
    }

    pub(super) fn take(&self) -> Vec<String> {
        std::mem::take(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_samples() {
        let samples = |count| (1..=count).map(Duration::from_millis);
        assert_eq!(quantiles(samples(200)), [100.0, 198.0, 200.0]);
        assert_eq!(quantiles(samples(1)), [1.0, 1.0, 1.0]);
        assert_eq!(quantiles(samples(0)), [0.0, 0.0, 0.0]);
    }
}
