//! `bench`: measures the speed of the allocator, beside upstream's.

use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, bail};
use clap::{Parser, ValueEnum};
use serde_json::Value;
use tessera_allocator::Policy;
use tessera_judge::bench::{self, BatchReport, BenchMode, BenchReport, CacheState, PendingBatch};
use tessera_judge::refused::{self, RefusedBatch};
use tessera_judge::scenario::Scenario;

/// Measure the allocator on benchmark scenarios, with the protocol of the oracle's benchmark.
///
/// A scenario is a JSON document with `bench: {mode, repeat, churn}`: a file, `-` for standard
/// input, or, with `--oracle`, a name of `oracle scenario list`. With `--oracle`, upstream is
/// measured alternately on the same machine, and the table has the ratios. An operation is one
/// claim. `fresh` starts with parsed objects only, as upstream does; `cold` with an indexed cluster
/// and an unknown claim; `warm` with a known claim.
#[derive(Parser)]
#[command(name = "bench", version)]
struct BenchArgs {
    /// Scenarios: files, or names with `--oracle`. Default: all scenarios of the oracle.
    #[arg(value_name = "SCENARIO")]
    scenarios: Vec<String>,
    /// Binary of the oracle (`make oracle` builds it from testing/oracle).
    #[arg(long, value_name = "PATH")]
    oracle: Option<PathBuf>,
    /// Number of rounds; the table has the medians.
    #[arg(long, default_value_t = 3)]
    runs: usize,
    /// Only measure the planning of this number of pending pods on each scenario's cluster.
    #[arg(long, value_name = "PODS")]
    pending: Option<usize>,
    /// With --pending: number of devices per request, instead of the scenario's.
    #[arg(long, value_name = "DEVICES", requires = "pending")]
    devices: Option<u64>,
    /// With --pending: seconds that the pods have waited. From 300 on, a node is reserved for a
    /// pod that does not fit.
    #[arg(long, value_name = "SECONDS", default_value_t = 0)]
    waited: u32,
    /// Only measure plans in which this number of pods is refused, on a generated cluster.
    #[arg(long, value_name = "PODS", conflicts_with = "pending")]
    refused: Option<usize>,
    /// With --refused: number of different requests among the pods.
    #[arg(long, value_name = "SHAPES", default_value_t = 1)]
    shapes: usize,
    /// With --refused: number of nodes, with eight GPUs each.
    #[arg(long, value_name = "NODES", default_value_t = 5000)]
    nodes: usize,
    /// With --refused: devices are free on every node, but the pods select no node.
    #[arg(long, requires = "refused")]
    devices_fit: bool,
    /// Output format: `table`, or `json` with one object per line.
    #[arg(short, long, value_enum, default_value = "table")]
    output: Output,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Output {
    Table,
    Json,
}

fn main() -> anyhow::Result<()> {
    let args = BenchArgs::parse();
    if let Some(pods) = args.refused {
        let BenchArgs { shapes, nodes, devices_fit, .. } = args;
        return show_refused(RefusedBatch { nodes, pods, shapes: shapes.max(1), devices_fit });
    }
    let names = match (&args.oracle, args.scenarios.is_empty()) {
        (Some(oracle), true) => listed(oracle)?,
        (None, true) => {
            bail!("no scenarios: name files, or set --oracle to measure all of its scenarios")
        }
        _ => args.scenarios.clone(),
    };
    if args.output == Output::Table {
        println!("{}", if args.pending.is_some() { BATCH_HEAD } else { HEAD });
    }
    for name in names {
        let text = read(&name, args.oracle.as_deref())?;
        let scenario = Scenario::parse(&text).with_context(|| {
            format!("cannot parse scenario {name} (`oracle scenario list` prints the names)")
        })?;
        drop(text);
        match args.pending {
            Some(pods) => {
                let batch = PendingBatch { pods, devices: args.devices, waited: args.waited };
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

fn measure(
    scenario: &Scenario,
    mode: BenchMode,
    args: &BenchArgs,
    name: &str,
) -> anyhow::Result<()> {
    let states = [CacheState::Fresh, CacheState::Cold, CacheState::Warm];
    let mut reports: Vec<Vec<BenchReport>> = vec![Vec::new(); states.len()];
    let mut upstream = Vec::new();
    for _ in 0..args.runs.max(1) {
        if let Some(oracle) = &args.oracle {
            upstream.push(run_oracle(oracle, name)?);
        }
        for (of_state, state) in reports.iter_mut().zip(states) {
            of_state.push(bench::run(scenario, mode, state));
        }
    }
    if args.output == Output::Json {
        for report in reports.iter().flatten() {
            println!("{}", serde_json::to_string(report)?);
        }
        return Ok(());
    }
    let p50 = |reports: &Vec<BenchReport>| median(reports.iter().map(|r| r.p50_ns).collect());
    let upstream_p50 = median(upstream.iter().map(|(p50, _)| *p50).collect());
    let expected = upstream.first().map(|(_, fits)| *fits);
    let fits = reports[1][0].fits;
    let ratio = |own: u64| {
        if upstream_p50 == 0 {
            "-".to_owned()
        } else {
            format!("{:.0}", upstream_p50 as f64 / own.max(1) as f64)
        }
    };
    let times: Vec<u64> = reports.iter().map(p50).collect();
    println!(
        "| {name} | {fits}{} | {} | {} | {} | {} | {} | {} | {} | {} |",
        expected
            .filter(|e| *e != fits as u64)
            .map_or(String::new(), |e| format!(" (upstream: {e})")),
        if upstream_p50 == 0 { "-".to_owned() } else { time(upstream_p50) },
        time(times[0]),
        time(times[1]),
        time(times[2]),
        ratio(times[0]),
        ratio(times[1]),
        ratio(times[2]),
        time(median(reports[1].iter().map(|r| r.index_ns).collect())),
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

/// Returns the peak memory of this process, including the parsing of the scenario.
fn peak_memory() -> anyhow::Result<String> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap_or("unknown");
    Ok(line.trim().to_owned())
}

fn show_refused(batch: RefusedBatch) -> anyhow::Result<()> {
    let RefusedBatch { nodes, pods, shapes, devices_fit } = batch;
    let report = refused::run(batch);
    println!(
        "| nodes | pods | shapes | devices fit | first plan | nothing changed | one device changed | messages | peak memory |\n|---|---|---|---|---|---|---|---|---|"
    );
    println!(
        "| {nodes} | {pods} | {shapes} | {devices_fit} | {} | {} | {} | {} | {} |",
        time(report.first_ns),
        time(report.unchanged_ns),
        time(report.changed_ns),
        time(report.messages_ns),
        peak_memory()?,
    );
    Ok(())
}

fn listed(oracle: &Path) -> anyhow::Result<Vec<String>> {
    let output = Command::new(oracle)
        .args(["scenario", "list"])
        .output()
        .with_context(|| format!("cannot execute {}", oracle.display()))?;
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

fn mode(scenario: &Scenario) -> anyhow::Result<BenchMode> {
    let bench = scenario.bench.clone().unwrap_or_default();
    match bench.mode.as_str() {
        "filter" => Ok(BenchMode::Filter { repeat: bench.repeat.max(1) }),
        "sequence" => Ok(BenchMode::Sequence { churn: bench.churn }),
        other => bail!("invalid bench.mode \"{other}\": expected \"filter\" or \"sequence\""),
    }
}

/// Returns upstream's median time of an operation, and the number of fits.
fn run_oracle(oracle: &Path, name: &str) -> anyhow::Result<(u64, u64)> {
    let output = Command::new(oracle).args(["bench", "--json", "--scenario", name]).output()?;
    if !output.status.success() {
        bail!("oracle bench --scenario {name}: {}", String::from_utf8_lossy(&output.stderr));
    }
    let report: Value = serde_json::from_slice(&output.stdout)?;
    let number = |field: &str| {
        report[field].as_u64().with_context(|| format!("oracle bench: missing `{field}`"))
    };
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
