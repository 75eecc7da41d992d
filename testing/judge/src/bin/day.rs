//! `day`: simulates a rolling day of a large cluster with the controller's core.

use clap::Parser;
use tessera_judge::day::{self, DayReport, DaySize};

/// Simulate a rolling day: shares, GPUs and groups of three priorities come and go.
///
/// The controller's core decides; the API server and kube-scheduler are models, and the clock
/// advances by the CPU time of each step. All that arrives asks for 3 % more than the cluster has,
/// so pods wait and are preempted. Panics if a device is allocated twice or a group runs in part.
/// The last line is the result as JSON.
#[derive(Parser)]
#[command(name = "day", version)]
struct DayArgs {
    /// Number of nodes, with eight H100 each.
    #[arg(long, default_value_t = 5000, value_parser = clap::value_parser!(u32).range(2..))]
    nodes: u32,
    /// Number of shares that run at the begin.
    #[arg(long, default_value_t = 100_000)]
    shares: u32,
    /// Arrivals per second.
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..))]
    rate: u32,
    /// Length of the simulation in seconds.
    #[arg(long, default_value_t = 600, value_parser = clap::value_parser!(u64).range(4..))]
    seconds: u64,
    /// Seed of the random numbers.
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

fn main() -> anyhow::Result<()> {
    let DayArgs { nodes, shares, rate, seconds, seed } = DayArgs::parse();
    let size = DaySize {
        nodes: nodes as usize,
        shares: shares as usize,
        rate: rate as usize,
        seconds,
        seed,
    };
    let report = day::run(size)?;
    let DayReport { steps, counts, memory_mib: [before, after], .. } = &report;
    println!("{nodes} nodes, {} GPUs, {shares} shares, {rate} arrivals a second", nodes * 8);
    for step in steps {
        println!("{}: p50 {:.2} ms, p99 {:.2} ms", step.event, step.p50_ms, step.p99_ms);
    }
    println!("longest step: {:.0} ms", report.longest_step_ms);
    println!("one thread is busy for {:.0} % of the time", report.busy_percent);
    let DayReport { decision_p50_ms: p50, decision_p99_ms: p99, .. } = report;
    println!("decision about what fits at once: p50 {p50:.1} ms, p99 {p99:.1} ms");
    println!("GPU memory allocated: {:.1} %", report.allocated_percent);
    println!("of it for groups that are not bound yet: {:.2} %", report.waiting_groups_percent);
    println!("of it for single pods that are not bound yet: {:.2} %", report.waiting_pods_percent);
    println!("memory: {before:.0} MiB, at the end {after:.0} MiB");
    for (what, count) in counts {
        println!("{what}: {count}");
    }
    println!("{}", serde_json::to_string(&report)?);
    Ok(())
}
