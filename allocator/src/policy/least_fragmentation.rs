//! Least fragmentation: minimizes the capacity stranded for expected requests.
//!
//! Ties occur, for example, on a node without free CPU. Then the device with less free capacity
//! comes first, then the one with fewer allocations.

use super::scorer::{Rank, ScoredDevice, ScoredNode, Scorer};

pub(super) struct LeastFragmentation;

impl Scorer for LeastFragmentation {
    fn device(&self, device: &ScoredDevice<'_>) -> Option<Rank> {
        let gpu_state = device.ranking.gpu_state();
        let share = gpu_state.share(device.ranking, device.alternative, device.candidate);
        let rise = gpu_state.rise(&device.ranking.forecast_view, &[(device.candidate, share)]);
        let left = i64::from(gpu_state.left(device.candidate).thousandths());
        Some((rise.steps(), (left << 32) + i64::from(device.allocation_count())))
    }

    fn node(&self, node: &ScoredNode<'_>) -> Rank {
        let (ranking, gpu_state) = (node.ranking, node.ranking.gpu_state());
        let taken: Vec<_> = node
            .shape
            .chosen(node.chosen)
            .filter(|(alternative, _)| alternative.request.admin != Some(true))
            .map(|(alternative, candidate)| {
                (candidate, gpu_state.share(ranking, alternative, candidate))
            })
            .collect();
        (gpu_state.rise(&ranking.forecast_view, &taken).steps(), 0)
    }
}
