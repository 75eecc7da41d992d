//! Random API server faults, planned from a seed, with the real driver, controller and interceptor.
//!
//! `TESSERA_CHAOS_SEED=n` replays a seed; `TESSERA_CHAOS_RUNS=n` runs `n` new ones. By default the
//! seeds are fixed.

use std::process::ExitCode;

use anyhow::Context as _;
use kube::config::{KubeConfigOptions, Kubeconfig};
use tempfile::TempDir;
use tessera_e2e::harness::{self, Report, Trial};
use tessera_e2e::operations::Operations;
use tessera_e2e::served::{ServedCluster, namespaces_unavailable, program};
use tessera_e2e::trials::{Cluster, on_faulty_cluster};

/// Default seeds; they take 90 seconds together.
const SEEDS: [u64; 3] = [1, 2, 3];

#[tokio::main]
async fn main() -> ExitCode {
    harness::main(seeds().map(on_faulty_cluster), run).await
}

async fn run(trials: Vec<Trial>) -> anyhow::Result<Report> {
    let program = program()?;
    if let Some(reason) = namespaces_unavailable(&program).await? {
        return Ok(Report::skipped("chaos", format!("user namespaces are unavailable: {reason}")));
    }
    let directory = TempDir::with_prefix("tchaos-")?;
    let mut served = ServedCluster::start(&program, directory.path(), &["--clocks"]).await?;
    // This endpoint has no faults.
    let kubeconfig = Kubeconfig::read_from(directory.path().join("observer.kubeconfig"))?;
    let config =
        kube::Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?;
    let operations = Operations::new(directory.path().join("node.sh"));
    let cluster = Cluster::new(config, Some(operations))?;
    let report = Report::run(trials, &cluster, cluster.wait_lost()).await;
    served.stop().await?;
    Ok(report)
}

fn seeds() -> anyhow::Result<Vec<u64>> {
    let number = |variable: &str| match std::env::var(variable) {
        Ok(text) => {
            text.parse().map(Some).with_context(|| format!("{variable} is not a number: {text}"))
        }
        Err(_) => Ok(None),
    };
    if let Some(seed) = number("TESSERA_CHAOS_SEED")? {
        return Ok(vec![seed]);
    }
    let Some(runs) = number("TESSERA_CHAOS_RUNS")? else { return Ok(SEEDS.into()) };
    let first = jiff::Timestamp::now().as_second().unsigned_abs();
    Ok((first..first + runs).collect())
}
