//! The published protocol: pods arrive one by one, none leaves, none is tried again.

use super::cluster::{Cluster, Demand, Models};
use super::placer::Placer;
use super::trace::{Sequence, Trace};
use super::violation::{Audit, Violation};

/// What share of the GPUs is allocated, in percent, by how much has arrived, in whole percent of
/// all GPUs.
#[derive(Debug, Clone, PartialEq)]
pub struct Columns(Vec<Option<f64>>);

impl Columns {
    /// The mean over the events at which `percent` (rounded) of all GPUs had arrived, if there was
    /// one.
    #[must_use]
    pub fn allocated(&self, percent: usize) -> Option<f64> {
        self.0.get(percent).copied().flatten()
    }

    /// How many columns there are, the empty ones included.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether nothing arrived.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// Replays the arrivals of one seed.
///
/// # Errors
/// If the placer places where nothing fits, or refuses what fits.
pub fn fill(
    trace: &Trace,
    sequence: &Sequence,
    placer: &mut impl Placer,
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

/// Halves go to the even number, as in the published columns.
fn rounded_percent(part: u64, whole: u64) -> usize {
    let (down, rest) = (100 * part / whole, 100 * part % whole);
    let is_up = 2 * rest > whole || 2 * rest == whole && down % 2 == 1;
    usize::try_from(down + u64::from(is_up)).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::rounded_percent;

    #[test]
    fn halves_of_a_percent_go_to_the_even_column() {
        assert_eq!(
            [4, 5, 14, 15, 16, 25].map(|part| rounded_percent(part, 1000)),
            [0, 0, 1, 2, 2, 2]
        );
    }
}
