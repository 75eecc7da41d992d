//! Random policy: pseudo-random order per pod, see [`seeded_hash`].

use std::hash::BuildHasher;

use super::scorer::{Rank, ScoredDevice, ScoredNode, Scorer};

pub(super) struct Random;

impl Scorer for Random {
    fn device(&self, device: &ScoredDevice<'_>) -> Option<Rank> {
        let name = &device.ranking.reachable.candidates[device.candidate].device().name;
        Some((seeded_hash(device.ranking.seed, name.as_str()).cast_signed(), 0))
    }

    fn node(&self, _: &ScoredNode<'_>) -> Rank {
        (0, 0)
    }
}

/// Returns a hash of `name` that depends only on `name` and `seed`.
pub(crate) fn seeded_hash(seed: u64, name: &str) -> u64 {
    foldhash::quality::FixedState::with_seed(seed).hash_one(name)
}
