//! `topology`: measures the quality of chosen GPU sets on the machines of a file.
//!
//! Each machine and policy has one row: the sequence score (requests of random sizes until the
//! first that does not fit, relative to a clairvoyant), exactly and by seeds; the score of single
//! requests over every set of free GPUs, relative to the best set; the weakest pairs; the time of a
//! decision. The last line is for Tessera's policy: `tessera sequence VALUE on MACHINE (its worst),
//! decision p99 MICROSECONDS us on MACHINE (its slowest)`.

use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, ensure};
use clap::Parser;
use tessera_judge::topology::machines::{self, Machine};
use tessera_judge::topology::per_request::{self, PerRequest};
use tessera_judge::topology::policies::{CachedPolicy, PolicyName, SetPolicy};
use tessera_judge::topology::sequence::{self, Sequences, Sizes};
use tessera_judge::topology::speed::{self, Speed};
use tessera_judge::topology::{Clairvoyant, MAX_ENUMERATED};

/// Measure the quality of chosen GPU sets on link matrices of real machines.
#[derive(Parser)]
struct TopologyArgs {
    /// Machines: {"name": {"n": 8, "nvlink": [[…]], "pcie": [["X", "PIX", …]], "numa": […]}}.
    #[arg(long, value_name = "FILE")]
    machines: PathBuf,
    /// Only this machine; may be repeated.
    #[arg(long = "machine", value_name = "NAME")]
    only: Vec<String>,
    /// Only this policy; may be repeated.
    #[arg(long = "policy", value_enum)]
    policies: Vec<PolicyName>,
    /// Seeds of the sampled sequences: A, or A..B (inclusive).
    #[arg(long, default_value = "1..5", value_parser = range)]
    seeds: RangeInclusive<u64>,
    /// Number of sequences per seed.
    #[arg(long, default_value_t = 2000)]
    sequences: usize,
    /// Sizes of requests: A..B (inclusive) or a list such as 1,1,2,4,8, drawn with equal
    /// probability.
    #[arg(long, default_value = "1..4", value_parser = sizes)]
    sizes: Sizes,
    /// Number of measured decisions per machine.
    #[arg(long, default_value_t = 4000)]
    decisions: usize,
}

fn range(text: &str) -> Result<RangeInclusive<u64>, String> {
    let number = |text: &str| text.parse::<u64>().map_err(|_| format!("invalid number `{text}`"));
    match text.split_once("..") {
        Some((first, last)) => Ok(number(first)?..=number(last)?),
        None => Ok(number(text)?..=number(text)?),
    }
}

fn sizes(text: &str) -> Result<Sizes, String> {
    let numbers: Vec<u64> = match text.contains("..") {
        true => range(text)?.take(65).collect(),
        false => {
            let number =
                |part: &str| part.parse::<u64>().map_err(|_| format!("invalid size `{part}`"));
            text.split(',').map(number).collect::<Result<_, _>>()?
        }
    };
    if numbers.iter().any(|size| !(1..=64).contains(size)) {
        return Err("invalid size: expected 1 to 64".to_owned());
    }
    Sizes::new(numbers.into_iter().map(|size| size as usize).collect())
        .ok_or_else(|| "no sizes".to_owned())
}

/// Results of one policy on one machine.
struct Row {
    policy: PolicyName,
    expected: Option<Sequences>,
    sampled: Vec<Sequences>,
    per_request: Vec<PerRequest>,
    speed: Option<Speed>,
}

const ALL: [PolicyName; 7] = [
    PolicyName::Tessera,
    PolicyName::Learning,
    PolicyName::Estimate,
    PolicyName::BestEffort,
    PolicyName::Greedy,
    PolicyName::FirstFit,
    PolicyName::Random,
];

fn main() -> anyhow::Result<()> {
    let args = TopologyArgs::parse();
    let mut machines =
        machines::read(&args.machines).with_context(|| args.machines.display().to_string())?;
    if let Some(unknown) =
        args.only.iter().find(|name| machines.iter().all(|machine| machine.name != **name))
    {
        let names: Vec<&str> = machines.iter().map(|machine| machine.name.as_str()).collect();
        anyhow::bail!(
            "unknown machine `{unknown}` in {}: expected one of {}",
            args.machines.display(),
            names.join(", ")
        );
    }
    machines.retain(|machine| args.only.is_empty() || args.only.contains(&machine.name));
    ensure!(!machines.is_empty(), "no machines in {}", args.machines.display());
    let policies = if args.policies.is_empty() { ALL.to_vec() } else { args.policies.clone() };
    let mut summary = Summary::default();
    for machine in &machines {
        header(machine);
        for policy in &policies {
            let row = measure(machine, *policy, &args);
            print(&row);
            summary.add(machine, &row);
        }
        println!();
    }
    println!("{}", summary.line());
    Ok(())
}

fn measure(machine: &Machine, name: PolicyName, args: &TopologyArgs) -> Row {
    let matrix = Arc::new(machine.matrix.clone());
    // Policies that enumerate sets are not timed on large machines, where they would take hours.
    let timed = match name {
        PolicyName::BestEffort => false,
        PolicyName::Greedy => matrix.len() <= MAX_ENUMERATED,
        _ => true,
    };
    let speed = timed.then(|| speed::measure(name, &matrix, args.decisions));
    let mut row =
        Row { policy: name, expected: None, sampled: Vec::new(), per_request: Vec::new(), speed };
    let Some(mut clairvoyant) = Clairvoyant::new(Arc::clone(&matrix)) else { return row };
    let mut policy = name.on(&matrix, 7);
    let mut policy = CachedPolicy::new(policy.as_mut());
    if policy.is_pure() {
        row.expected =
            Some(sequence::expected(&matrix, &mut policy, &mut clairvoyant, &args.sizes));
    }
    let seeds = args.seeds.clone();
    row.sampled = seeds
        .map(|seed| {
            sequence::sampled(
                &matrix,
                &mut policy,
                &mut clairvoyant,
                &args.sizes,
                (seed, args.sequences),
            )
        })
        .collect();
    row.per_request = (2..=4.min(matrix.len()))
        .filter_map(|size| per_request::measure(&matrix, &mut policy, size))
        .collect();
    row
}

fn header(machine: &Machine) {
    let n = machine.matrix.len();
    println!("{} ({n} GPUs, {} kinds)", machine.name, machine.matrix.twins().len());
    if n > MAX_ENUMERATED {
        println!("  more than {MAX_ENUMERATED} GPUs: only speed is measured");
    }
    println!(
        "  {:<12} {:>8} {:>15} {:>8}  {:>20}  {:>20}  {:>20}  {:>11} {:>9} {:>8} {:>8} {:>8}",
        "policy",
        "sequence",
        "by seeds (sd)",
        "mean",
        "k=2 mean/opt/worst",
        "k=3 mean/opt/worst",
        "k=4 mean/opt/worst",
        "min pair",
        "set-up us",
        "p50 us",
        "p99 us",
        "max us"
    );
}

fn print(row: &Row) {
    let value = |read: fn(&Sequences) -> f64| {
        row.expected.as_ref().map_or("-".to_owned(), |s| format!("{:.4}", read(s)))
    };
    let seeds: Vec<f64> = row.sampled.iter().map(Sequences::ratio).collect();
    let by_seeds = if seeds.is_empty() {
        "-".to_owned()
    } else {
        let (mean, deviation) = spread(&seeds);
        format!("{mean:.4} ({deviation:.4})")
    };
    let request = |size: usize| {
        let of_size = row.per_request.iter().find(|result| result.size == size);
        of_size.map_or("-".to_owned(), |r| {
            format!("{:.3} {:>5.1}% {:.3}", r.mean, r.optimal * 100.0, r.worst)
        })
    };
    let sequences = row.expected.as_ref().or(row.sampled.first());
    let weakest = sequences.map_or("-".to_owned(), |s| {
        format!("{:.0} / {}", s.mean_weakest_pair(), s.weakest_pair.map_or(0, |least| least))
    });
    let times = match row.speed {
        None => ["-"; 4].map(str::to_owned),
        Some(speed) => [speed.set_up, speed.p50, speed.p99, speed.longest].map(micros),
    };
    println!(
        "  {:<12} {:>8} {:>15} {:>8}  {:>20}  {:>20}  {:>20}  {:>11} {:>9} {:>8} {:>8} {:>8}",
        row.policy.word(),
        value(Sequences::ratio),
        by_seeds,
        value(Sequences::mean_ratio),
        request(2),
        request(3),
        request(4),
        weakest,
        times[0],
        times[1],
        times[2],
        times[3]
    );
}

fn micros(time: std::time::Duration) -> String {
    format!("{:.1}", time.as_secs_f64() * 1e6)
}

/// Returns mean and standard deviation.
fn spread(values: &[f64]) -> (f64, f64) {
    let count = values.len() as f64;
    let mean = values.iter().sum::<f64>() / count;
    let variance =
        values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / (count - 1.0).max(1.0);
    (mean, variance.sqrt())
}

/// Content of the last line: the worst results of Tessera's policy.
#[derive(Default)]
struct Summary {
    sequence: Option<(f64, String)>,
    slowest: Option<(std::time::Duration, String)>,
}

impl Summary {
    fn add(&mut self, machine: &Machine, row: &Row) {
        if row.policy != PolicyName::Tessera {
            return;
        }
        if let Some(ratio) = row.expected.as_ref().map(Sequences::ratio)
            && self.sequence.as_ref().is_none_or(|(least, _)| ratio < *least)
        {
            self.sequence = Some((ratio, machine.name.clone()));
        }
        if let Some(speed) = row.speed
            && self.slowest.as_ref().is_none_or(|(longest, _)| speed.p99 > *longest)
        {
            self.slowest = Some((speed.p99, machine.name.clone()));
        }
    }

    fn line(&self) -> String {
        let sequence =
            self.sequence.as_ref().map_or("sequence -".to_owned(), |(ratio, machine)| {
                format!("sequence {ratio:.4} on {machine}")
            });
        match &self.slowest {
            Some((time, machine)) => {
                format!("tessera {sequence}, decision p99 {} us on {machine}", micros(*time))
            }
            None => "tessera was not measured".to_owned(),
        }
    }
}
