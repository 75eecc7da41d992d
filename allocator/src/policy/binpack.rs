//! The fullest first. Of two equally full devices the smaller one, so that large ones stay for
//! those who need them.

use super::{DeviceView, NodeView, Rank, Rule, WHOLE, ppm};

pub(super) struct Binpack;

impl Rule for Binpack {
    fn device(&self, device: &DeviceView<'_>) -> Option<Rank> {
        Some((ppm(WHOLE - device.taken()), device.memory()))
    }

    fn node(&self, node: &NodeView<'_>) -> Rank {
        (ppm(WHOLE.saturating_sub(node.taken())), 0)
    }
}
