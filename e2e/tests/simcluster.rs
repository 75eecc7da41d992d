//! Scenarios and trials on the simulated cluster, with the real driver, controller and interceptor.

use std::process::ExitCode;

use kube::config::{KubeConfigOptions, Kubeconfig};
use tempfile::TempDir;
use tessera_e2e::harness::{self, Report, Trial, all_trials};
use tessera_e2e::operations::Operations;
use tessera_e2e::plugin::Plugin;
use tessera_e2e::served::{ServedCluster, namespaces_unavailable, program};
use tessera_e2e::trials::{Cluster, Sizes};

/// Excluded: the simulated container runtime has no daemon to restart.
const EXCLUDED_TRIAL: &str = "trial/containerd-restart";

#[tokio::main]
async fn main() -> ExitCode {
    harness::main(trials(), run).await
}

fn trials() -> anyhow::Result<Vec<Trial>> {
    let mut trials = all_trials(vec![])?;
    trials.retain(|trial| trial.name() != EXCLUDED_TRIAL);
    Ok(trials)
}

async fn run(trials: Vec<Trial>) -> anyhow::Result<Report> {
    let program = program()?;
    if let Some(reason) = namespaces_unavailable(&program).await? {
        return Ok(Report::skipped(
            "simcluster",
            format!("user namespaces are unavailable: {reason}"),
        ));
    }
    let directory = TempDir::with_prefix("tsim-run-")?;
    let mut served = ServedCluster::start(&program, directory.path(), &[]).await?;
    let path = directory.path().join("kubeconfig");
    let kubeconfig = Kubeconfig::read_from(&path)?;
    let config =
        kube::Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?;
    let operations = Operations::new(directory.path().join("node.sh"));
    let cluster =
        Cluster::new(config, Some(operations))?.with_sizes(Sizes::SIMULATED.with_environment()?);
    let cluster = cluster.with_plugin(Plugin::beside_tests(&path)?);
    let report = Report::run(trials, &cluster, cluster.wait_lost()).await;
    served.stop().await?;
    Ok(report)
}
