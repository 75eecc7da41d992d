//! Churn: Poisson arrivals from the trace, and exponential lifetimes. Pods that do not fit on
//! arrival are dropped.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::cluster::{Cluster, Demand, Models, Placement};
use super::placer::Placer;
use super::trace::Trace;
use super::violation::{Audit, Violation};
use crate::random::Random;

/// Parameters of a churn simulation.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Churn {
    /// Offered load: the mean number of GPUs in use if no pod were dropped, as a fraction of all
    /// GPUs.
    pub load: f64,
    /// Number of arrivals and departures. The second half is averaged.
    pub events: u64,
}

/// A time in mean lifetimes since the start, as the bits of a non-negative float, which have the
/// float's order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Instant(u64);

impl Instant {
    fn new(lifetimes: f64) -> Self {
        Self(lifetimes.to_bits())
    }

    fn lifetimes(self) -> f64 {
        f64::from_bits(self.0)
    }
}

/// Replays one seed and returns the mean allocated share of the GPUs in percent.
///
/// Arrivals and lifetimes depend only on the seed and not on the placer, since both are drawn on
/// arrival.
///
/// # Errors
/// Returns an error if the placer places a pod where it does not fit, or rejects a pod that fits.
#[expect(
    clippy::cast_precision_loss,
    reason = "fewer than 2^52 thousandths of a GPU, pods, events"
)]
pub fn churn(
    trace: &Trace,
    churn: Churn,
    seed: u64,
    placer: &mut dyn Placer,
) -> Result<f64, Violation> {
    let models = Models::of(&trace.nodes);
    let demands: Vec<Demand> = trace.pods.iter().map(|pod| Demand::of(pod, &models)).collect();
    let mean_milli =
        demands.iter().map(Demand::total_gpu_milli).sum::<u64>() as f64 / demands.len() as f64;
    let arrivals_per_lifetime = churn.load * trace.capacity_milli() as f64 / mean_milli;
    let mut random = Random::new(seed);
    let mut audit = Audit::new(Cluster::empty(&trace.nodes, &models), placer);
    let mut running: Vec<Option<(usize, Placement)>> = Vec::new();
    let mut departures: BinaryHeap<Reverse<(Instant, usize)>> = BinaryHeap::new();
    let mut next_arrival = random.exponential() / arrivals_per_lifetime;
    let mut sum = 0.0;
    for event in 0..churn.events {
        match departures.peek() {
            Some(&Reverse((at, pod))) if at.lifetimes() < next_arrival => {
                departures.pop();
                if let Some((demand, placement)) = running[pod].take() {
                    audit.release(&demands[demand], &placement);
                }
            }
            _ => {
                let demand = random.below(demands.len());
                let end = next_arrival + random.exponential();
                if let Some(placement) = audit.place(&demands[demand])? {
                    departures.push(Reverse((Instant::new(end), running.len())));
                    running.push(Some((demand, placement)));
                }
                next_arrival += random.exponential() / arrivals_per_lifetime;
            }
        }
        if event >= churn.events / 2 {
            sum += audit.allocated_percent();
        }
    }
    Ok(sum / (churn.events - churn.events / 2) as f64)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::super::best_fit::BestFit;
    use super::super::placer::ScoringPlacer;
    use super::super::trace::{NodeRow, PodRow};
    use super::*;

    fn trace() -> Trace {
        let node = |n| NodeRow {
            sn: format!("n{n}"),
            cpu_milli: 64_000,
            memory_mib: 1000,
            gpu: 8,
            model: "T4".into(),
        };
        let pod = |n, gpu_milli| PodRow {
            name: format!("p{n}"),
            cpu_milli: 100,
            memory_mib: 1,
            num_gpu: 1,
            gpu_milli,
            gpu_spec: String::new(),
        };
        let pods = vec![pod(0, 500), pod(1, 1000)];
        Trace {
            name: "tiny".into(),
            nodes: (0..10).map(node).collect(),
            pods,
            sequences: BTreeMap::new(),
        }
    }

    fn allocated(load: f64, seed: u64) -> f64 {
        let trace = trace();
        let cluster = Cluster::empty(&trace.nodes, &Models::of(&trace.nodes));
        let ranks: Vec<usize> = (0..10).collect();
        churn(
            &trace,
            Churn { load, events: 40_000 },
            seed,
            &mut ScoringPlacer::new(BestFit, cluster, &ranks),
        )
        .unwrap()
    }

    #[test]
    fn utilization_equals_load_without_drops() {
        // Without drops the mean usage is the load (Little's law).
        assert!((allocated(0.4, 1) - 40.0).abs() < 1.5, "{}", allocated(0.4, 1));
    }

    #[test]
    fn overload_uses_nearly_all_gpus() {
        assert!((95.0..=100.0).contains(&allocated(1.5, 1)));
    }

    #[test]
    fn same_seed_repeats_and_others_differ() {
        assert!((allocated(0.9, 1) - allocated(0.9, 1)).abs() < f64::EPSILON);
        assert!((allocated(0.9, 1) - allocated(0.9, 2)).abs() > 1e-6);
    }
}
