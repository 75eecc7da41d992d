//! The emptiest first; of two equally empty ones that with fewer tasks.

use super::{DeviceView, NodeView, Rank, Rule, ppm};

pub(super) struct Spread;

impl Rule for Spread {
    fn device(&self, device: &DeviceView<'_>) -> Option<Rank> {
        Some((ppm(device.taken()), i64::from(device.tasks())))
    }

    fn node(&self, node: &NodeView<'_>) -> Rank {
        (ppm(node.taken()), i64::from(node.tasks()))
    }
}
