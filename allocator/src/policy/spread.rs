//! The emptiest first; of two equally empty ones that with fewer tasks.

use super::{DeviceView, NodeView, Rank, Rule};

pub(super) struct Spread;

impl Rule for Spread {
    fn device(&self, device: &DeviceView<'_>) -> Option<Rank> {
        Some((i128::from(device.taken()), i128::from(device.tasks())))
    }

    fn node(&self, node: &NodeView<'_>) -> Rank {
        (i128::from(node.taken()), i128::from(node.tasks()))
    }
}
