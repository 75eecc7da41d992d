//! Spread: least utilized first; of equally utilized ones the one with fewer allocations.

use super::scorer::{Rank, ScoredDevice, ScoredNode, Scorer, ppm};

pub(super) struct Spread;

impl Scorer for Spread {
    fn device(&self, device: &ScoredDevice<'_>) -> Option<Rank> {
        Some((ppm(device.utilization()), i64::from(device.allocation_count())))
    }

    fn node(&self, node: &ScoredNode<'_>) -> Rank {
        (ppm(node.utilization()), i64::from(node.allocation_count()))
    }
}
