//! LeastLoaded: least expected load first; of equally loaded ones the least utilized.
//!
//! The expected load of a GPU is what was measured, plus the reserved compute of the shares that
//! are too young to be in the measurement: without them, all pods of a burst would get the GPU that
//! was idle before it.

use super::scorer::{Rank, ScoredDevice, ScoredNode, Scorer, ppm};

pub(super) struct LeastLoaded;

impl Scorer for LeastLoaded {
    fn device(&self, device: &ScoredDevice<'_>) -> Option<Rank> {
        Some((ppm(device.expected_load()), ppm(device.utilization())))
    }

    fn node(&self, node: &ScoredNode<'_>) -> Rank {
        let loads = node.chosen_devices().map(|device| device.expected_load());
        (ppm(loads.max().unwrap_or(0)), ppm(node.utilization()))
    }
}
