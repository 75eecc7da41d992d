//! First fit: upstream's order.

use super::scorer::{Rank, ScoredDevice, ScoredNode, Scorer};

pub(super) struct FirstFit;

impl Scorer for FirstFit {
    fn device(&self, _: &ScoredDevice<'_>) -> Option<Rank> {
        None
    }

    fn node(&self, _: &ScoredNode<'_>) -> Rank {
        (0, 0)
    }
}
