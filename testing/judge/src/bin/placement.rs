//! `placement`: replays a trace of pods with a placement policy, and prints the unallocated share
//! of the GPUs.
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

/// Replay a trace and print the share of a cluster's GPUs that a placement policy leaves
/// unallocated.
///
/// Without --churn this is FGD's published protocol: pods arrive in the trace's order for each
/// seed, and none leaves. The last line is `TRACE POLICY unallocated@130 VALUE`: the percentage of
/// all GPUs that is unallocated when pods for 130 % of them have arrived, averaged over the seeds.
#[derive(Debug, Parser)]
#[command(version)]
struct PlacementArgs {
    /// Directory of the trace: lists of nodes and pods, and `sequences/`.
    #[arg(long)]
    data: PathBuf,
    /// Name of the trace, such as `default` for `openb_pod_list_default.csv`.
    #[arg(long)]
    trace: String,
    /// Placement policy.
    #[arg(long, value_enum, default_value = "LeastFragmentation")]
    policy: Policy,
    /// Seeds, as an inclusive range `42..46` or a single one. Without --churn the trace must have
    /// a sequence for each.
    #[arg(long)]
    seeds: Seeds,
    /// Let pods leave: Poisson arrivals from the trace with this offered load (1.0: all GPUs), and
    /// exponential lifetimes. Pods that do not fit are dropped. Prints the mean over the second
    /// half of the events.
    #[arg(long, value_name = "LOAD")]
    churn: Option<f64>,
    /// Number of arrivals and departures with --churn.
    #[arg(long, default_value_t = 120_000, requires = "churn")]
    events: u64,
    /// Placement of pods without GPUs by the allocator. FGD and BestFit place them themselves, as
    /// published.
    #[arg(long, value_enum, default_value = "LeastRise")]
    without_gpus: WithoutGpus,
}

/// An inclusive range of seeds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Seeds {
    first: u64,
    last: u64,
}

impl FromStr for Seeds {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (first, last) = text.split_once("..").unwrap_or((text, text));
        let number = |part: &str| {
            part.parse().map_err(|_| {
                format!("invalid seeds {text:?}: expected a range such as 42..46, or a number")
            })
        };
        let seeds = Self { first: number(first)?, last: number(last)? };
        if seeds.first > seeds.last {
            Err(format!("invalid seeds {text:?}: the first is after the last"))
        } else {
            Ok(seeds)
        }
    }
}

/// Printed percentages of arrivals.
const PRINTED: [usize; 9] = [50, 70, 80, 90, 100, 110, 115, 120, 130];

fn main() -> anyhow::Result<()> {
    let args = PlacementArgs::parse();
    if args.churn.is_some_and(|load| !load.is_finite() || load <= 0.0) {
        bail!("invalid --churn: the load must be greater than 0");
    }
    let trace = Trace::read(&args.data, &args.trace)?;
    let replay = Replay { trace: &trace, policy: args.policy, without_gpus: args.without_gpus };
    match args.churn {
        Some(load) => churn(&args, &replay, Churn { load, events: args.events }),
        None => fill(&args, &replay),
    }
}

/// Returns the policy's name in the output.
fn name(args: &PlacementArgs) -> String {
    args.policy.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
}

fn fill(args: &PlacementArgs, replay: &Replay<'_>) -> anyhow::Result<()> {
    println!("unallocated % of all GPUs, by % of arrivals");
    println!("seed {}", PRINTED.map(|percent| format!("{percent:>7}")).join(""));
    let mut sums = [0.0; PRINTED.len()];
    let mut seeds = 0.0;
    for seed in args.seeds.first..=args.seeds.last {
        let sequence = replay.trace.sequences.get(&seed);
        let sequence = sequence
            .with_context(|| format!("trace {} has no sequence for seed {seed}", args.trace))?;
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

fn churn(args: &PlacementArgs, replay: &Replay<'_>, parameters: Churn) -> anyhow::Result<()> {
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
    fn parses_inclusive_range_or_single_seed() {
        assert_eq!("42..46".parse(), Ok(Seeds { first: 42, last: 46 }));
        assert_eq!("42".parse(), Ok(Seeds { first: 42, last: 42 }));
        assert!("42..".parse::<Seeds>().is_err());
        assert!("46..42".parse::<Seeds>().unwrap_err().contains("after the last"));
    }
}
