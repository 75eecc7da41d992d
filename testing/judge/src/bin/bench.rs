//! `bench`: how long the allocator takes, beside upstream's.

use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, bail};
use clap::{Parser, ValueEnum};
use serde_json::Value;
use tessera_allocator::Policy;
use tessera_judge::bench::{self, Batch, BatchReport, Mode, Report, Way};
use tessera_judge::scenario::Scenario;

/// Measures the allocator on benchmark scenarios, by the protocol of the oracle's own benchmark.
///
/// A scenario is a JSON document with `bench: {mode, repeat, churn}` in it: a file, `-` for
/// standard input, or, with `--oracle`, a name that `oracle scenario list` shows. With `--oracle`
/// upstream is measured too, in turn and on the same machine, and the table has the ratios. An
/// operation is one claim; `fresh` begins with nothing but parsed objects, as upstream does, `cold`
/// with an indexed cluster and a claim never seen before, `warm` with one that has been seen.
#[derive(Parser)]
#[command(name = "bench", version)]
struct Args {
    /// Scenarios: files, or names with `--oracle`; none = all that the oracle has.
    #[arg(value_name = "SCENARIO")]
    scenarios: Vec<String>,
    /// The oracle's binary (`make oracle` builds it from testing/oracle).
    #[arg(long, value_name = "PATH")]
    oracle: Option<PathBuf>,
    /// Rounds; the table shows medians.
    #[arg(long, default_value_t = 3)]
    runs: usize,
    /// Measure planning of so many pending pods on each scenario's cluster, and nothing else.
    #[arg(long, value_name = "PODS")]
    pending: Option<usize>,
    /// With --pending: each request wants so many devices, in place of what the scenario says.
    #[arg(long, value_name = "DEVICES", requires = "pending")]
    devices: Option<u64>,
    /// With --pending: the pods have waited for so many seconds. From 300 on a node is kept free
    /// for one that does not fit.
    #[arg(long, value_name = "SECONDS", default_value_t = 0)]
    waited: u32,
    /// `table`, or `json`: one object per line.
    #[arg(short, long, value_enum, default_value = "table")]
    output: Output,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Output {
    Table,
    Json,
}

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    let names = match (&args.oracle, args.scenarios.is_empty()) {
        (Some(oracle), true) => listed(oracle)?,
        (None, true) => {
            bail!("no scenario: name files, or give --oracle to measure all of its scenarios")
        }
        _ => args.scenarios.clone(),
    };
    if args.output == Output::Table {
        println!("{}", if args.pending.is_some() { BATCH_HEAD } else { HEAD });
    }
    for name in names {
        let text = read(&name, args.oracle.as_deref())?;
        let scenario = Scenario::parse(&text)
            .with_context(|| format!("scenario {name}; `oracle scenario list` shows the names"))?;
        drop(text);
        match args.pending {
            Some(pods) => {
                let batch = Batch { pods, devices: args.devices, waited: args.waited };
                show_batch(&bench::batch(&scenario, batch, Policy::default()), args.output)?;
            }
            None => measure(&scenario, mode(&scenario)?, &args, &name)?,
        }
    }
    Ok(())
}

const HEAD: &str = "| scenario | fits | upstream p50 | fresh p50 | cold p50 | warm p50 | upstream/fresh | upstream/cold | upstream/warm | index, once |\n|---|---|---|---|---|---|---|---|---|---|";
const BATCH_HEAD: &str =
    "| cluster | pods | placed | plan | one change | peak memory |\n|---|---|---|---|---|---|";

fn measure(scenario: &Scenario, mode: Mode, args: &Args, name: &str) -> anyhow::Result<()> {
    let ways = [Way::Fresh, Way::Cold, Way::Warm];
    let mut ours: Vec<Vec<Report>> = vec![Vec::new(); ways.len()];
    let mut upstream = Vec::new();
    for _ in 0..args.runs.max(1) {
        if let Some(oracle) = &args.oracle {
            upstream.push(run_oracle(oracle, name)?);
        }
        for (reports, way) in ours.iter_mut().zip(ways) {
            reports.push(bench::run(scenario, mode, way));
        }
    }
    if args.output == Output::Json {
        for report in ours.iter().flatten() {
            println!("{}", serde_json::to_string(report)?);
        }
        return Ok(());
    }
    let p50 = |reports: &Vec<Report>| median(reports.iter().map(|r| r.p50_ns).collect());
    let theirs = median(upstream.iter().map(|(p50, _)| *p50).collect());
    let expected = upstream.first().map(|(_, fits)| *fits);
    let fits = ours[1][0].fits;
    let ratio = |ours: u64| {
        if theirs == 0 {
            "-".to_owned()
        } else {
            format!("{:.0}", theirs as f64 / ours.max(1) as f64)
        }
    };
    let times: Vec<u64> = ours.iter().map(p50).collect();
    println!(
        "| {name} | {fits}{} | {} | {} | {} | {} | {} | {} | {} | {} |",
        expected
            .filter(|e| *e != fits as u64)
            .map_or(String::new(), |e| format!(" (upstream: {e})")),
        if theirs == 0 { "-".to_owned() } else { time(theirs) },
        time(times[0]),
        time(times[1]),
        time(times[2]),
        ratio(times[0]),
        ratio(times[1]),
        ratio(times[2]),
        time(median(ours[1].iter().map(|r| r.index_ns).collect())),
    );
    Ok(())
}

fn show_batch(report: &BatchReport, output: Output) -> anyhow::Result<()> {
    if output == Output::Json {
        println!("{}", serde_json::to_string(report)?);
        return Ok(());
    }
    let BatchReport { scenario, pods, placed, plan_ns, update_ns } = report;
    println!(
        "| {scenario} | {pods} | {placed} | {} | {} | {} |",
        time(*plan_ns),
        time(*update_ns),
        peak_memory()?
    );
    Ok(())
}

/// The most memory that this process has had, reading of the scenario included.
fn peak_memory() -> anyhow::Result<String> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap_or("unknown");
    Ok(line.trim().to_owned())
}

fn listed(oracle: &Path) -> anyhow::Result<Vec<String>> {
    let output = Command::new(oracle)
        .args(["scenario", "list"])
        .output()
        .with_context(|| format!("cannot run {}", oracle.display()))?;
    let text = String::from_utf8(output.stdout)?;
    Ok(text.lines().filter_map(|line| line.split('\t').next()).map(str::to_owned).collect())
}

fn read(name: &str, oracle: Option<&Path>) -> anyhow::Result<String> {
    Ok(match oracle {
        _ if name == "-" => {
            let mut text = String::new();
            std::io::stdin().read_to_string(&mut text)?;
            text
        }
        Some(oracle) if !Path::new(name).exists() => {
            String::from_utf8(Command::new(oracle).args(["scenario", name]).output()?.stdout)?
        }
        _ => {
            std::fs::read_to_string(name).with_context(|| format!("cannot read scenario {name}"))?
        }
    })
}

fn mode(scenario: &Scenario) -> anyhow::Result<Mode> {
    let bench = scenario.bench.clone().unwrap_or_default();
    match bench.mode.as_str() {
        "filter" => Ok(Mode::Filter { repeat: bench.repeat.max(1) }),
        "sequence" => Ok(Mode::Sequence { churn: bench.churn }),
        other => bail!("bench.mode is \"{other}\"; it must be \"filter\" or \"sequence\""),
    }
}

/// Upstream's median of an operation, and how much fitted.
fn run_oracle(oracle: &Path, name: &str) -> anyhow::Result<(u64, u64)> {
    let output = Command::new(oracle).args(["bench", "--json", "--scenario", name]).output()?;
    if !output.status.success() {
        bail!("oracle bench --scenario {name}: {}", String::from_utf8_lossy(&output.stderr));
    }
    let report: Value = serde_json::from_slice(&output.stdout)?;
    let number =
        |field: &str| report[field].as_u64().with_context(|| format!("oracle bench: no `{field}`"));
    Ok((number("p50_ns")?, number("fits")?))
}

fn median(mut values: Vec<u64>) -> u64 {
    values.sort_unstable();
    values.get(values.len() / 2).copied().unwrap_or(0)
}

fn time(nanos: u64) -> String {
    match nanos {
        0..10_000 => format!("{:.2} us", nanos as f64 / 1e3),
        10_000..1_000_000 => format!("{:.0} us", nanos as f64 / 1e3),
        1_000_000..1_000_000_000 => format!("{:.2} ms", nanos as f64 / 1e6),
        _ => format!("{:.2} s", nanos as f64 / 1e9),
    }
}
