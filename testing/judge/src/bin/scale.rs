//! `scale`: measures the controller's index and planner on a generated cluster.

use clap::Parser;
use tessera_judge::scale::{self, ClusterSize, ScaleReport};

/// Measure memory and CPU time of the controller's index and planner on a generated cluster.
///
/// Nodes have eight H100. Each event is followed by what the controller does then: the check for
/// overcommitted devices, the update of the planner, and a plan for one pending pod. The times are
/// CPU time of one thread. The last line is the result as JSON.
#[derive(Parser)]
#[command(name = "scale", version)]
struct ScaleArgs {
    /// Number of nodes.
    #[arg(long, default_value_t = 5000, value_parser = clap::value_parser!(u32).range(1..))]
    nodes: u32,
    /// Number of allocated shares, at most four per GPU.
    #[arg(long, default_value_t = 10_000)]
    shares: u32,
    /// Number of times that each event is measured.
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u32).range(1..))]
    events: u32,
}

fn main() -> anyhow::Result<()> {
    let ScaleArgs { nodes, shares, events } = ScaleArgs::parse();
    anyhow::ensure!(
        u64::from(shares) <= u64::from(nodes) * 32 && shares >= events && nodes >= events,
        "--shares must be at least --events and at most 32 for each of --nodes; --nodes must be at \
         least --events"
    );
    let size =
        ClusterSize { nodes: nodes as usize, shares: shares as usize, events: events as usize };
    let report = scale::run(size)?;
    let ScaleReport { apply_ms, planner_ms, first_plan_ms, memory_mib, index_mib, events } =
        &report;
    println!("{nodes} nodes, {} GPUs, {shares} shares", nodes * 8);
    println!("memory: {memory_mib:.0} MiB, of which the index {index_mib:.0} MiB");
    println!(
        "first list: apply {apply_ms:.0} ms, planner {planner_ms:.0} ms, first plan {first_plan_ms:.0} ms"
    );
    println!("\n| event and plan | p50 | p99 |\n|---|---|---|");
    for cost in events {
        println!("| {} | {:.2} ms | {:.2} ms |", cost.event, cost.p50_ms, cost.p99_ms);
    }
    println!("{}", serde_json::to_string(&report)?);
    Ok(())
}
