//! Upstream's order.

use super::{DeviceView, NodeView, Rank, Rule};

pub(super) struct FirstFit;

impl Rule for FirstFit {
    fn device(&self, _: &DeviceView<'_>) -> Option<Rank> {
        None
    }

    fn node(&self, _: &NodeView<'_>) -> Rank {
        (0, 0)
    }
}
