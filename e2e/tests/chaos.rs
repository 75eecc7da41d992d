//! Everything that an API server can do to its clients, by plan, around the real driver, controller
//! and interceptor.
//!
//! `TESSERA_CHAOS_SEED=n` replays a seed; `TESSERA_CHAOS_RUNS=n` tries that many new ones.
//! Otherwise the same few each time.

use std::process::ExitCode;

use anyhow::Context as _;
use kube::config::{KubeConfigOptions, Kubeconfig};
use tempfile::TempDir;
use tessera_e2e::harness::{self, Report, Trial};
use tessera_e2e::operations::Operations;
use tessera_e2e::served::{Served, no_namespaces, program};
use tessera_e2e::trials::{Cluster, on_faulty_cluster};

/// Three take a minute and a half.
const SEEDS: [u64; 3] = [1, 2, 3];

#[tokio::main]
async fn main() -> ExitCode {
    harness::main(seeds().map(on_faulty_cluster), run).await
}

async fn run(trials: Vec<Trial>) -> anyhow::Result<Report> {
    let program = program()?;
    if let Some(reason) = no_namespaces(&program).await? {
        return Ok(Report::skipped("chaos", format!("no namespaces here: {reason}")));
    }
    let directory = TempDir::with_prefix("tchaos-")?;
    let mut served = Served::start(&program, directory.path(), &["--clocks"]).await?;
    // By the entrance that no fault touches.
    let kubeconfig = Kubeconfig::read_from(directory.path().join("observer.kubeconfig"))?;
    let config =
        kube::Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?;
    let operations = Operations::by(directory.path().join("node.sh"));
    let cluster = Cluster::new(config, Some(operations))?;
    let report = Report::of(trials, &cluster, cluster.lost()).await;
    served.stop().await?;
    Ok(report)
}

fn seeds() -> anyhow::Result<Vec<u64>> {
    let number = |variable: &str| match std::env::var(variable) {
        Ok(text) => {
            text.parse().map(Some).with_context(|| format!("{variable} is no number: {text}"))
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
