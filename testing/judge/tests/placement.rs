//! Comparison with the published results of FGD's artefact (`testing/data/traces/openb`).

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::PathBuf;

use tessera_judge::placement::engine::WithoutGpus;
use tessera_judge::placement::policy::{Policy, Replay};
use tessera_judge::placement::trace::{Published, Trace, published};
use tessera_test_support::data;

/// Tolerance: published numbers have two decimals and may differ by as much again.
const TOLERANCE: f64 = 0.02;

const TRACES: [&str; 5] = ["default", "cpu100", "gpushare40", "gpuspec10", "multigpu20"];

fn openb() -> PathBuf {
    data::directory().join("traces/openb")
}

fn published_of(policy: Policy, trace: &str, seed: u64) -> Published {
    let mut all = published(&openb(), trace).unwrap().into_iter();
    all.find(|row| row.seed == seed && Some(row.policy.as_str()) == policy.published_name())
        .unwrap()
}

fn reproduces(policy: Policy, trace: &Trace, seed: u64) {
    let replay = Replay { trace, policy, without_gpus: WithoutGpus::LeastRise };
    let columns = replay.fill(&trace.sequences[&seed]).unwrap();
    let published = published_of(policy, &trace.name, seed).allocated;
    assert_eq!(published.len(), 131);
    for (percent, expected) in published.into_iter().enumerate() {
        let actual = columns.allocated(percent).unwrap();
        let context = format!("{} {policy:?} seed {seed} at {percent} %", trace.name);
        assert!(
            (actual - expected).abs() <= TOLERANCE,
            "{context}: {actual}, published {expected}"
        );
    }
}

#[test]
fn every_trace_is_complete() {
    let pods = [8152, 7853, 8152, 8152, 8324];
    for (name, pods) in TRACES.into_iter().zip(pods) {
        let trace = Trace::read(&openb(), name).unwrap();
        assert_eq!((trace.nodes.len(), trace.capacity_milli()), (1213, 6_212_000), "nodes, GPUs");
        assert_eq!(trace.pods.len(), pods, "pods of {name}");
        assert!(trace.sequences.keys().copied().eq(42..=46), "seeds of {name}");
        // Six policies with each seed.
        assert_eq!(published(&openb(), name).unwrap().len(), 30, "published results of {name}");
    }
}

/// Uses the seed for which the order of floating-point sums breaks a tie.
#[test]
fn fgd_and_best_fit_reproduce_published_columns_of_one_seed() {
    let trace = Trace::read(&openb(), "multigpu20").unwrap();
    reproduces(Policy::BestFit, &trace, 45);
    reproduces(Policy::Fgd, &trace, 45);
}

/// All traces and seeds: takes minutes without optimisation, so only in a release build (`make
/// judge`).
#[cfg(not(debug_assertions))]
mod in_full {
    use tessera_judge::placement::churn::Churn;

    use super::*;

    fn unallocated(policy: Policy, trace: &Trace, seed: u64) -> f64 {
        let replay = Replay { trace, policy, without_gpus: WithoutGpus::LeastRise };
        100.0 - replay.fill(&trace.sequences[&seed]).unwrap().allocated(130).unwrap()
    }

    /// Returns the mean over the seeds, as in the goals.
    fn mean(trace: &Trace, of_seed: impl Fn(u64) -> f64) -> f64 {
        trace.sequences.keys().map(|&seed| of_seed(seed)).sum::<f64>()
            / f64::from(u32::try_from(trace.sequences.len()).unwrap())
    }

    #[test]
    fn fgd_and_best_fit_reproduce_all_published_columns() {
        for name in TRACES {
            let trace = Trace::read(&openb(), name).unwrap();
            for &seed in trace.sequences.keys() {
                reproduces(Policy::BestFit, &trace, seed);
                reproduces(Policy::Fgd, &trace, seed);
            }
        }
    }

    #[test]
    fn least_fragmentation_beats_fgd_on_all_traces_and_seeds() {
        for name in TRACES {
            let trace = Trace::read(&openb(), name).unwrap();
            for &seed in trace.sequences.keys() {
                let (tessera, fgd) = (
                    unallocated(Policy::LeastFragmentation, &trace, seed),
                    unallocated(Policy::Fgd, &trace, seed),
                );
                assert!(tessera < fgd, "{name} seed {seed}: {tessera} against {fgd}");
            }
        }
    }

    /// Only the arithmetic: the allocator would take many minutes.
    #[test]
    fn least_rise_beats_fgd_under_churn() {
        for name in ["default", "gpuspec10"] {
            let trace = Trace::read(&openb(), name).unwrap();
            let unallocated = |policy| {
                let without_gpus = WithoutGpus::LeastRise;
                let replay = Replay { trace: &trace, policy, without_gpus };
                mean(&trace, |seed| {
                    100.0 - replay.churn(Churn { load: 1.0, events: 120_000 }, seed).unwrap()
                })
            };
            let (tessera, fgd) = (unallocated(Policy::Arithmetic), unallocated(Policy::Fgd));
            assert!(tessera < fgd, "{name}: {tessera} against {fgd}");
        }
    }

    #[test]
    fn least_fragmentation_meets_its_goal_on_the_default_trace() {
        let trace = Trace::read(&openb(), "default").unwrap();
        let tessera = mean(&trace, |seed| unallocated(Policy::LeastFragmentation, &trace, seed));
        assert!(tessera <= 3.80, "{tessera}");
    }
}
