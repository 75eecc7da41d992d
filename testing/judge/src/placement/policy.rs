//! Policies that can be replayed, by name.

use super::best_fit::BestFit;
use super::churn::{Churn, churn};
use super::cluster::{Cluster, Models};
use super::engine::{AllocatorPlacer, WithoutGpus};
use super::fgd::Fgd;
use super::fill::{Columns, fill};
use super::least_fragmentation::LeastFragmentation;
use super::placer::{Placer, ScoringPlacer};
use super::trace::{Sequence, Trace};
use super::violation::Violation;

/// A policy to replay.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
#[value(rename_all = "PascalCase")]
pub enum Policy {
    /// The allocator's LeastFragmentation policy, which learns the request mix from arrivals.
    LeastFragmentation,
    /// Arithmetic of the allocator without the allocator itself.
    Arithmetic,
    /// FGD as published (ATC'23).
    #[value(name = "FGD")]
    Fgd,
    /// BestFit as published by FGD's authors.
    BestFit,
}

impl Policy {
    /// Returns the policy's name in the published results of FGD's authors.
    #[must_use]
    pub fn published_name(self) -> Option<&'static str> {
        match self {
            Self::LeastFragmentation | Self::Arithmetic => None,
            Self::Fgd => Some("06-FGD"),
            Self::BestFit => Some("05-BestFit"),
        }
    }
}

/// A trace and the policy to replay on it.
#[derive(Debug, Clone, Copy)]
pub struct Replay<'t> {
    /// Trace.
    pub trace: &'t Trace,
    /// Policy.
    pub policy: Policy,
    /// Placement of pods without GPUs by the allocator. FGD and BestFit place them
    /// themselves, as published.
    pub without_gpus: WithoutGpus,
}

impl Replay<'_> {
    /// Replays the published protocol, in which no pod leaves.
    ///
    /// # Errors
    /// Returns an error if the policy violates a rule.
    pub fn fill(&self, sequence: &Sequence) -> Result<Columns, Violation> {
        fill(self.trace, sequence, self.placer(&sequence.node_rank).as_mut())
    }

    /// Simulates churn and returns the mean allocated share in percent. Ties go to the first node.
    ///
    /// # Errors
    /// Returns an error if the policy violates a rule.
    pub fn churn(&self, parameters: Churn, seed: u64) -> Result<f64, Violation> {
        let by_name: Vec<usize> = (0..self.trace.nodes.len()).collect();
        let rank = self.trace.sequences.get(&seed).map_or(&by_name, |sequence| &sequence.node_rank);
        churn(self.trace, parameters, seed, self.placer(rank).as_mut())
    }

    fn placer(&self, node_rank: &[usize]) -> Box<dyn Placer> {
        let Trace { nodes, pods, .. } = self.trace;
        let models = Models::of(nodes);
        let cluster = Cluster::empty(nodes, &models);
        match self.policy {
            Policy::LeastFragmentation => {
                Box::new(AllocatorPlacer::new(self.without_gpus, nodes, node_rank))
            }
            Policy::Arithmetic => {
                Box::new(ScoringPlacer::new(LeastFragmentation::default(), cluster, node_rank))
            }
            Policy::Fgd => {
                Box::new(ScoringPlacer::new(Fgd::new(pods, &models), cluster, node_rank))
            }
            Policy::BestFit => Box::new(ScoringPlacer::new(BestFit, cluster, node_rank)),
        }
    }
}
