//! The published protocol: pods arrive one by one, none leaves, and none is retried.

use super::cluster::{Cluster, Demand, Models};
use super::placer::Placer;
use super::trace::{Sequence, Trace};
use super::violation::{Audit, Violation};

/// Allocated share of the GPUs in percent, by arrived share in whole percent of all GPUs.
#[derive(Debug, Clone, PartialEq)]
pub struct Columns(Vec<Option<f64>>);

impl Columns {
    /// Returns the mean over the events at which `percent` (rounded) of all GPUs had arrived, if
    /// any.
    #[must_use]
    pub fn allocated(&self, percent: usize) -> Option<f64> {
        self.0.get(percent).copied().flatten()
    }
}

/// Replays the arrivals of one seed.
///
/// # Errors
/// Returns an error if the placer places a pod where it does not fit, or rejects a pod that fits.
pub fn fill(
    trace: &Trace,
    sequence: &Sequence,
    placer: &mut dyn Placer,
) -> Result<Columns, Violation> {
    let models = Models::of(&trace.nodes);
    let demands: Vec<Demand> = trace.pods.iter().map(|pod| Demand::of(pod, &models)).collect();
    let mut audit = Audit::new(Cluster::empty(&trace.nodes, &models), placer);
    let capacity = trace.capacity_milli();
    let mut sums: Vec<(f64, u32)> = Vec::new();
    let mut arrived = 0;
    for &pod in &sequence.order {
        audit.place(&demands[pod])?;
        arrived += demands[pod].total_gpu_milli();
        let column = rounded_percent(arrived, capacity);
        if sums.len() <= column {
            sums.resize(column + 1, (0.0, 0));
        }
        sums[column].0 += audit.allocated_percent();
        sums[column].1 += 1;
    }
    Ok(Columns(
        sums.into_iter()
            .map(|(sum, events)| (events > 0).then(|| sum / f64::from(events)))
            .collect(),
    ))
}

/// Rounds half to even, as in the published columns.
fn rounded_percent(part: u64, whole: u64) -> usize {
    let (down, rest) = (100 * part / whole, 100 * part % whole);
    let is_up = 2 * rest > whole || 2 * rest == whole && down % 2 == 1;
    usize::try_from(down + u64::from(is_up)).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::rounded_percent;

    #[test]
    fn half_percents_round_to_even() {
        assert_eq!(
            [4, 5, 14, 15, 16, 25].map(|part| rounded_percent(part, 1000)),
            [0, 0, 1, 2, 2, 2]
        );
    }
}
