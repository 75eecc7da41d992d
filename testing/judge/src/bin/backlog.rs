//! `backlog`: measures the controller's steps beside pods that wait for devices.

use clap::Parser;
use tessera_judge::backlog::{self, BacklogReport, BacklogSize};

/// Measure the CPU time of the controller's steps beside pods that wait for devices.
///
/// Nodes have eight H100, each with a share of up to 60,000 MiB; the pods request 45,000 MiB or
/// more. A step contains all that the controller decides; watches and the API server are left out.
/// The last line is the result as JSON.
#[derive(Parser)]
#[command(name = "backlog", version)]
struct BacklogArgs {
    /// Number of nodes.
    #[arg(long, default_value_t = 5000, value_parser = clap::value_parser!(u32).range(1..))]
    nodes: u32,
    /// Number of waiting pods.
    #[arg(long, default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(1..))]
    pods: u32,
    /// Number of different requests among the pods.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=20_000))]
    shapes: u32,
    /// Number of pods that get devices together.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=512))]
    group: u32,
    /// Number of times that each event is measured.
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u32).range(1..))]
    events: u32,
    /// Give almost every GPU another amount of free memory, so that nodes share no results.
    #[arg(long)]
    mixed: bool,
}

fn main() -> anyhow::Result<()> {
    let BacklogArgs { nodes, pods, shapes, group, events, mixed } = BacklogArgs::parse();
    anyhow::ensure!(pods % group == 0, "--pods must be a multiple of --group");
    anyhow::ensure!(
        events <= pods && u64::from(events) <= u64::from(nodes),
        "--events must be at most --pods and at most --nodes"
    );
    let size = BacklogSize {
        nodes: nodes as usize,
        pods: pods as usize,
        shapes: shapes as usize,
        group: group as usize,
        events: events as usize,
        is_mixed: mixed,
    };
    let report = backlog::run(size);
    let BacklogReport { first_decision_ms, first_plan_ms, longest_step_ms, .. } = &report;
    let BacklogReport { notices_ms, audit_ms, events, rest, .. } = &report;
    let gpus = nodes * 8;
    println!("{nodes} nodes, {gpus} GPUs, {pods} pods of {shapes} shapes, groups of {group}");
    println!("first decision after the lists: {first_decision_ms:.0} ms");
    println!("all refused: {first_plan_ms:.0} ms, longest step {longest_step_ms:.0} ms");
    println!("events about the pods: {notices_ms:.0} ms; audit, once a minute: {audit_ms:.0} ms");
    println!("\n| event | step p50 | p99 | the 100 ms after it p50 | p99 |\n|---|---|---|---|---|");
    for (step, rest) in events.iter().zip(rest) {
        println!(
            "| {} | {:.2} ms | {:.2} ms | {:.2} ms | {:.2} ms |",
            step.event, step.p50_ms, step.p99_ms, rest.p50_ms, rest.p99_ms
        );
    }
    println!("{}", serde_json::to_string(&report)?);
    Ok(())
}
