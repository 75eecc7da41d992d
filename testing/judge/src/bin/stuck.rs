//! `stuck`: measures the controller's steps beside pods that get no devices until a user changes
//! them.

use clap::{Parser, ValueEnum};
use tessera_judge::stuck::{self, StuckCause, StuckReport, StuckSize};

/// Measure the CPU time of the controller's steps beside pods that are stuck.
///
/// Any tenant can create such pods. A step contains all that the controller decides; watches and
/// the API server are left out. The last line is the result as JSON.
#[derive(Parser)]
#[command(name = "stuck", version)]
struct StuckArgs {
    /// Number of nodes.
    #[arg(long, default_value_t = 500, value_parser = clap::value_parser!(u32).range(1..))]
    nodes: u32,
    /// Number of pods that are stuck.
    #[arg(long, default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(1..))]
    pods: u32,
    /// Number of times that each event is measured.
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..))]
    events: u32,
    /// Cause; all if none is given.
    #[arg(long)]
    cause: Option<StuckCause>,
}

fn main() -> anyhow::Result<()> {
    let StuckArgs { nodes, pods, events, cause } = StuckArgs::parse();
    let size = StuckSize { nodes: nodes as usize, pods: pods as usize, events: events as usize };
    let causes = cause.map_or_else(|| StuckCause::value_variants().to_vec(), |cause| vec![cause]);
    println!("{nodes} nodes, {pods} pods that are stuck");
    println!("\n| cause | ten minutes | event | step p50 | p99 |\n|---|---|---|---|---|");
    let mut reports = Vec::new();
    for cause in causes {
        let report = stuck::run(cause, size);
        let StuckReport { ten_minutes_ms, events, .. } = &report;
        for event in events {
            println!(
                "| {cause:?} | {ten_minutes_ms:.0} ms | {} | {:.2} ms | {:.2} ms |",
                event.event, event.p50_ms, event.p99_ms
            );
        }
        reports.push(report);
    }
    println!("{}", serde_json::to_string(&reports)?);
    Ok(())
}
