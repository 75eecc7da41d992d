//! Placement policies: rank candidate nodes and devices (feasibility is decided elsewhere).
//!
//! Each policy is a [`Scorer`] in a file of its own.

mod binpack;
mod first_fit;
mod kind;
mod least_fragmentation;
mod least_loaded;
mod node_gpus;
mod partitions;
mod random;
mod scorer;
mod spread;

use crate::shape::{AlternativeShape, Chosen, Shape};

pub use kind::Policy;
pub(crate) use node_gpus::{ForecastView, share};
pub(crate) use random::seeded_hash;
pub(crate) use scorer::{Rank, Ranking};

use scorer::{ScoredDevice, ScoredNode, Scorer};

impl Policy {
    fn scorer(self) -> &'static dyn Scorer {
        match self {
            Self::FirstFit => &first_fit::FirstFit,
            Self::Binpack => &binpack::Binpack,
            Self::Spread => &spread::Spread,
            Self::Random => &random::Random,
            Self::LeastFragmentation => &least_fragmentation::LeastFragmentation,
            Self::LeastLoaded => &least_loaded::LeastLoaded,
        }
    }

    /// Returns the candidates in the order of the policy; `None` keeps upstream's order.
    pub(crate) fn order(
        self,
        ranking: &Ranking<'_>,
        alternative: &AlternativeShape,
    ) -> Option<Vec<usize>> {
        let count = ranking.reachable.candidates.len();
        let rank =
            |candidate| Some((self.rank_device(ranking, alternative, candidate)?, candidate));
        let mut ranked = (0..count).map(rank).collect::<Option<Vec<_>>>()?;
        ranked.sort_unstable();
        Some(ranked.into_iter().map(|(_, candidate)| candidate).collect())
    }

    /// Returns the rank of a device on its node; `None` keeps upstream's order.
    pub(crate) fn rank_device(
        self,
        ranking: &Ranking<'_>,
        alternative: &AlternativeShape,
        candidate: usize,
    ) -> Option<Rank> {
        if self.packs_partitions()
            && let Some(loss) = partitions::loss(ranking.reachable, candidate)
        {
            return Some((loss, 0));
        }
        self.scorer().device(&ScoredDevice { ranking, alternative, candidate })
    }

    /// Returns the rank of a node on which the claims of a shape fit.
    pub(crate) fn rank_node(
        self,
        ranking: &Ranking<'_>,
        shape: &Shape,
        chosen: &[Vec<Chosen>],
    ) -> Rank {
        if self.packs_partitions()
            && let Some(loss) = partition_loss(ranking, chosen)
        {
            return (loss, 0);
        }
        self.scorer().node(&ScoredNode { ranking, shape, chosen })
    }

    /// Returns true if the policy ranks partitions by what they make impossible.
    fn packs_partitions(self) -> bool {
        match self {
            Self::Binpack | Self::LeastFragmentation | Self::LeastLoaded => true,
            Self::FirstFit | Self::Spread | Self::Random => false,
        }
    }
}

/// Returns the loss of all chosen partitions; `None` if none was chosen.
fn partition_loss(ranking: &Ranking<'_>, chosen: &[Vec<Chosen>]) -> Option<i64> {
    let chosen = chosen.iter().flatten();
    let losses = chosen.filter_map(|c| partitions::loss(ranking.reachable, c.candidate));
    losses.reduce(i64::saturating_add)
}
