//! Any, by lot. The lot of a node is drawn for each pod when it is placed: see [`lot`].

use std::hash::BuildHasher;

use super::{DeviceView, NodeView, Rank, Rule};

pub(super) struct Random;

impl Rule for Random {
    fn device(&self, device: &DeviceView<'_>) -> Option<Rank> {
        let name = &device.ranking.reach.candidates[device.candidate].device().name;
        Some((lot(device.ranking.seed, name.as_str()).cast_signed(), 0))
    }

    fn node(&self, _: &NodeView<'_>) -> Rank {
        (0, 0)
    }
}

/// The lot that `name` draws with this seed: the same each time.
pub(crate) fn lot(seed: u64, name: &str) -> u64 {
    foldhash::quality::FixedState::with_seed(seed).hash_one(name)
}
