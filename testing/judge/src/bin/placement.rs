//! Replays a trace of pods under a placement policy, and prints how much of the GPUs stays
//! unallocated.
//!
//! ```text
//! placement --data testing/data/traces/openb --trace default --policy LeastFragmentation --seeds 42..46
//! ```

use std::path::PathBuf;
use std::str::FromStr;

use anyhow::{Context as _, bail};
use clap::{Parser, ValueEnum as _};
use tessera_judge::placement::churn::Churn;
use tessera_judge::placement::engine::WithoutGpus;
use tessera_judge::placement::policy::{Policy, Replay};
use tessera_judge::placement::trace::Trace;

/// How much of a cluster's GPUs a placement policy leaves unused when a trace is replayed.
///
/// Without --churn, the published protocol of FGD: pods arrive in the order that the trace gives
/// for each seed, none leaves. The last line is `TRACE POLICY unallocated@130 VALUE`: the mean over
/// the seeds of the percentage of all GPUs that is not allocated when pods for 130 % of them have
/// arrived.
#[derive(Debug, Parser)]
#[command(version)]
struct Args {
    /// The directory of the trace: lists of nodes and pods, and `sequences/`.
    #[arg(long)]
    data: PathBuf,
    /// The trace, as `default` for `openb_pod_list_default.csv`.
    #[arg(long)]
    trace: String,
    /// The policy.
    #[arg(long, value_enum, default_value = "LeastFragmentation")]
    policy: Policy,
    /// The seeds, both ends included: `42..46`, or one: `42`. Without --churn the trace must have
    /// a sequence for each.
    #[arg(long)]
    seeds: Seeds,
    /// Let pods leave: Poisson arrivals drawn from the trace that offer this part of all GPUs (1.0
    /// = as many as there are), exponential lifetimes, what does not fit is lost. Prints the
    /// mean over the second half of the events.
    #[arg(long, value_name = "LOAD")]
    churn: Option<f64>,
    /// How many arrivals and departures, with --churn.
    #[arg(long, default_value_t = 120_000, requires = "churn")]
    events: u64,
    /// Let LeastFragmentation know the whole trace in advance, in place of learning from what has
    /// arrived.
    #[arg(long)]
    oracle_mix: bool,
    /// Where the allocator's policies leave pods without GPUs. FGD and BestFit place them
    /// themselves, as published.
    #[arg(long, value_enum, default_value = "LeastRise")]
    without_gpus: WithoutGpus,
}

/// A range of seeds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Seeds {
    first: u64,
    last: u64,
}

impl FromStr for Seeds {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (first, last) = text.split_once("..").unwrap_or((text, text));
        let number =
            |part: &str| part.parse().map_err(|_| format!("seeds {text:?}: write 42..46, or 42"));
        let seeds = Self { first: number(first)?, last: number(last)? };
        if seeds.first > seeds.last {
            Err(format!("seeds {text:?}: the first is after the last"))
        } else {
            Ok(seeds)
        }
    }
}

/// Which percentages of arrivals are printed.
const PRINTED: [usize; 9] = [50, 70, 80, 90, 100, 110, 115, 120, 130];

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    if args.churn.is_some_and(|load| !load.is_finite() || load <= 0.0) {
        bail!("--churn: the load must be greater than 0");
    }
    let trace = Trace::read(&args.data, &args.trace)?;
    let replay = Replay {
        trace: &trace,
        policy: args.policy,
        oracle_mix: args.oracle_mix,
        without_gpus: args.without_gpus,
    };
    match args.churn {
        Some(load) => churn(&args, &replay, Churn { load, events: args.events }),
        None => fill(&args, &replay),
    }
}

/// The policy as the output names it: an oracle is never mistaken for a policy that learns.
fn name(args: &Args) -> String {
    let oracle = if args.oracle_mix { "+oracle-mix" } else { "" };
    let policy = args.policy.to_possible_value();
    format!("{}{oracle}", policy.as_ref().map_or("", |value| value.get_name()))
}

fn fill(args: &Args, replay: &Replay<'_>) -> anyhow::Result<()> {
    println!("unallocated % of all GPUs, by % of arrivals");
    println!("seed {}", PRINTED.map(|percent| format!("{percent:>7}")).join(""));
    let mut sums = [0.0; PRINTED.len()];
    let mut seeds = 0.0;
    for seed in args.seeds.first..=args.seeds.last {
        let sequence = replay.trace.sequences.get(&seed);
        let sequence =
            sequence.with_context(|| format!("{} has no sequence for seed {seed}", args.trace))?;
        let columns = replay.fill(sequence).with_context(|| format!("seed {seed}"))?;
        let row = PRINTED.map(|percent| {
            columns.allocated(percent).map_or(f64::NAN, |allocated| 100.0 - allocated)
        });
        println!("{seed:<4} {}", row.map(|value| format!("{value:>7.2}")).join(""));
        sums.iter_mut().zip(row).for_each(|(sum, value)| *sum += value);
        seeds += 1.0;
    }
    let mean = sums.map(|sum| sum / seeds);
    println!("mean {}", mean.map(|value| format!("{value:>7.2}")).join(""));
    println!("{} {} unallocated@130 {:.3}", args.trace, name(args), mean[PRINTED.len() - 1]);
    Ok(())
}

fn churn(args: &Args, replay: &Replay<'_>, parameters: Churn) -> anyhow::Result<()> {
    println!("unallocated % of all GPUs, mean of the second half of {} events", parameters.events);
    let (mut sum, mut seeds) = (0.0, 0.0);
    for seed in args.seeds.first..=args.seeds.last {
        let unallocated =
            100.0 - replay.churn(parameters, seed).with_context(|| format!("seed {seed}"))?;
        println!("{seed:<4} {unallocated:>7.2}");
        sum += unallocated;
        seeds += 1.0;
    }
    println!("mean {:>7.2}", sum / seeds);
    println!(
        "{} {} unallocated@churn{:?} {:.3}",
        args.trace,
        name(args),
        parameters.load,
        sum / seeds
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeds_are_a_range_with_both_ends_or_one() {
        assert_eq!("42..46".parse(), Ok(Seeds { first: 42, last: 46 }));
        assert_eq!("42".parse(), Ok(Seeds { first: 42, last: 42 }));
        assert!("42..".parse::<Seeds>().is_err());
        assert!("46..42".parse::<Seeds>().unwrap_err().contains("after the last"));
    }
}
