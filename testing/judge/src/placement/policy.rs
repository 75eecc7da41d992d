//! Policies that can be replayed, by name.

use tessera_allocator::Policy as Placement;

use super::best_fit::BestFit;
use super::churn::{Churn, churn};
use super::cluster::{Cluster, Demand, Models};
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
    /// The allocator's Binpack policy: the fullest node first.
    Binpack,
    /// The allocator's Spread policy: the emptiest node first.
    Spread,
    /// The allocator's first fit, as upstream's.
    FirstFit,
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
            Self::LeastFragmentation
            | Self::Arithmetic
            | Self::Binpack
            | Self::Spread
            | Self::FirstFit => None,
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
    /// True if `LeastFragmentation` knows the whole trace in advance. FGD always does, as
    /// published.
    pub oracle_mix: bool,
    /// Placement of pods without GPUs under the allocator's policies. FGD and BestFit place them
    /// themselves, as published.
    pub without_gpus: WithoutGpus,
}

/// An operation that is generic over the placer.
trait PlacerOperation {
    type Result;
    fn run<P: Placer>(self, placer: P) -> Self::Result;
}

impl Replay<'_> {
    /// Replays the published protocol, in which no pod leaves.
    ///
    /// # Errors
    /// Returns an error if the policy violates a rule.
    pub fn fill(&self, sequence: &Sequence) -> Result<Columns, Violation> {
        struct Fill<'a>(&'a Trace, &'a Sequence);
        impl PlacerOperation for Fill<'_> {
            type Result = Result<Columns, Violation>;
            fn run<P: Placer>(self, mut placer: P) -> Self::Result {
                fill(self.0, self.1, &mut placer)
            }
        }
        self.run(&sequence.node_rank, Fill(self.trace, sequence))
    }

    /// Simulates churn and returns the mean allocated share in percent. Ties go to the first node.
    ///
    /// # Errors
    /// Returns an error if the policy violates a rule.
    pub fn churn(&self, parameters: Churn, seed: u64) -> Result<f64, Violation> {
        struct RunChurn<'a>(&'a Trace, Churn, u64);
        impl PlacerOperation for RunChurn<'_> {
            type Result = Result<f64, Violation>;
            fn run<P: Placer>(self, mut placer: P) -> Self::Result {
                churn(self.0, self.1, self.2, &mut placer)
            }
        }
        let by_name: Vec<usize> = (0..self.trace.nodes.len()).collect();
        let rank = self.trace.sequences.get(&seed).map_or(&by_name, |sequence| &sequence.node_rank);
        self.run(rank, RunChurn(self.trace, parameters, seed))
    }

    fn run<W: PlacerOperation>(&self, node_rank: &[usize], operation: W) -> W::Result {
        let Trace { nodes, pods, .. } = self.trace;
        let models = Models::of(nodes);
        let cluster = Cluster::empty(nodes, &models);
        let engine = |policy| AllocatorPlacer::new(policy, self.without_gpus, nodes, node_rank);
        match self.policy {
            Policy::LeastFragmentation => operation.run(engine(Placement::LeastFragmentation)),
            Policy::Binpack => operation.run(engine(Placement::Binpack)),
            Policy::Spread => operation.run(engine(Placement::Spread)),
            Policy::FirstFit => operation.run(engine(Placement::FirstFit)),
            Policy::Arithmetic if self.oracle_mix => {
                let demands: Vec<Demand> =
                    pods.iter().map(|pod| Demand::of(pod, &models)).collect();
                operation.run(ScoringPlacer::new(
                    LeastFragmentation::oracle(&demands),
                    cluster,
                    node_rank,
                ))
            }
            Policy::Arithmetic => operation.run(ScoringPlacer::new(
                LeastFragmentation::learning(),
                cluster,
                node_rank,
            )),
            Policy::Fgd => {
                operation.run(ScoringPlacer::new(Fgd::new(pods, &models), cluster, node_rank))
            }
            Policy::BestFit => operation.run(ScoringPlacer::new(BestFit, cluster, node_rank)),
        }
    }
}
