//! Binpack: most utilized first; of equally utilized devices the smaller one, so that large devices
//! stay free for large requests.

use super::scorer::{Rank, ScoredDevice, ScoredNode, Scorer, WHOLE, ppm};

pub(super) struct Binpack;

impl Scorer for Binpack {
    fn device(&self, device: &ScoredDevice<'_>) -> Option<Rank> {
        Some((ppm(WHOLE - device.utilization()), device.memory()))
    }

    fn node(&self, node: &ScoredNode<'_>) -> Rank {
        (ppm(WHOLE.saturating_sub(node.utilization())), 0)
    }
}
