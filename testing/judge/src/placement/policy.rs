//! The policies that can be replayed, by name.

use tessera_allocator::Policy as Placement;

use super::best_fit::BestFit;
use super::churn::{Churn, churn};
use super::cluster::{Cluster, Demand, Models};
use super::engine::{Engine, WithoutGpus};
use super::fgd::Fgd;
use super::fill::{Columns, fill};
use super::least_fragmentation::LeastFragmentation;
use super::placer::{Placer, Scoring};
use super::trace::{Sequence, Trace};
use super::violation::Violation;

/// A policy to replay.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
#[value(rename_all = "PascalCase")]
pub enum Policy {
    /// The allocator's least rise of the potential, with a mix of requests that it learns on the
    /// way.
    LeastFragmentation,
    /// The same arithmetic without the allocator.
    Arithmetic,
    /// The allocator's fullest first.
    Binpack,
    /// The allocator's emptiest first.
    Spread,
    /// The allocator's first fit, as upstream has it.
    FirstFit,
    /// FGD as published (ATC'23).
    #[value(name = "FGD")]
    Fgd,
    /// BestFit as published there.
    BestFit,
}

impl Policy {
    /// The name under which the authors of FGD published results for it.
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

/// A trace, and the policy that is replayed on it.
#[derive(Debug, Clone, Copy)]
pub struct Replay<'t> {
    /// The trace.
    pub trace: &'t Trace,
    /// The policy.
    pub policy: Policy,
    /// Whether `LeastFragmentation` knows the whole trace in advance. FGD always does, as
    /// published.
    pub oracle_mix: bool,
    /// Where the allocator's policies leave pods without GPUs. FGD and BestFit place them
    /// themselves, as published.
    pub without_gpus: WithoutGpus,
}

/// Something to be done with a policy, whichever it is.
trait With {
    type Result;
    fn with<P: Placer>(self, placer: P) -> Self::Result;
}

impl Replay<'_> {
    /// The published protocol: no pod leaves.
    ///
    /// # Errors
    /// If the policy breaks a rule.
    pub fn fill(&self, sequence: &Sequence) -> Result<Columns, Violation> {
        struct Fill<'a>(&'a Trace, &'a Sequence);
        impl With for Fill<'_> {
            type Result = Result<Columns, Violation>;
            fn with<P: Placer>(self, mut placer: P) -> Self::Result {
                fill(self.0, self.1, &mut placer)
            }
        }
        self.run(&sequence.node_rank, Fill(self.trace, sequence))
    }

    /// Pods come and go; the mean of what is allocated, in percent. Ties go to the node that comes
    /// first.
    ///
    /// # Errors
    /// If the policy breaks a rule.
    pub fn churn(&self, parameters: Churn, seed: u64) -> Result<f64, Violation> {
        struct Come<'a>(&'a Trace, Churn, u64);
        impl With for Come<'_> {
            type Result = Result<f64, Violation>;
            fn with<P: Placer>(self, mut placer: P) -> Self::Result {
                churn(self.0, self.1, self.2, &mut placer)
            }
        }
        let by_name: Vec<usize> = (0..self.trace.nodes.len()).collect();
        let rank = self.trace.sequences.get(&seed).map_or(&by_name, |sequence| &sequence.node_rank);
        self.run(rank, Come(self.trace, parameters, seed))
    }

    fn run<W: With>(&self, node_rank: &[usize], with: W) -> W::Result {
        let Trace { nodes, pods, .. } = self.trace;
        let models = Models::of(nodes);
        let cluster = Cluster::empty(nodes, &models);
        let engine = |policy| Engine::new(policy, self.without_gpus, nodes, node_rank);
        match self.policy {
            Policy::LeastFragmentation => with.with(engine(Placement::LeastFragmentation)),
            Policy::Binpack => with.with(engine(Placement::Binpack)),
            Policy::Spread => with.with(engine(Placement::Spread)),
            Policy::FirstFit => with.with(engine(Placement::FirstFit)),
            Policy::Arithmetic if self.oracle_mix => {
                let demands: Vec<Demand> =
                    pods.iter().map(|pod| Demand::of(pod, &models)).collect();
                with.with(Scoring::new(LeastFragmentation::oracle(&demands), cluster, node_rank))
            }
            Policy::Arithmetic => {
                with.with(Scoring::new(LeastFragmentation::learning(), cluster, node_rank))
            }
            Policy::Fgd => with.with(Scoring::new(Fgd::new(pods, &models), cluster, node_rank)),
            Policy::BestFit => with.with(Scoring::new(BestFit, cluster, node_rank)),
        }
    }
}
