//! The same scenarios and trials on the cluster of stand-ins, around the real driver, controller
//! and interceptor.

use std::process::ExitCode;

use kube::config::{KubeConfigOptions, Kubeconfig};
use tempfile::TempDir;
use tessera_e2e::harness::{self, Report, Trial, everything};
use tessera_e2e::operations::Operations;
use tessera_e2e::plugin::Plugin;
use tessera_e2e::served::{Served, no_namespaces, program};
use tessera_e2e::trials::{Cluster, Sizes};

/// The container runtime of the stand-ins is no daemon that could be restarted.
const NO_DAEMON: &str = "trial/containerd-restart";

#[tokio::main]
async fn main() -> ExitCode {
    harness::main(trials(), run).await
}

fn trials() -> anyhow::Result<Vec<Trial>> {
    let mut trials = everything(vec![])?;
    trials.retain(|trial| trial.name() != NO_DAEMON);
    Ok(trials)
}

async fn run(trials: Vec<Trial>) -> anyhow::Result<Report> {
    let program = program()?;
    if let Some(reason) = no_namespaces(&program).await? {
        return Ok(Report::skipped("simcluster", format!("no namespaces here: {reason}")));
    }
    let directory = TempDir::with_prefix("tsim-run-")?;
    let mut served = Served::start(&program, directory.path(), &[]).await?;
    let path = directory.path().join("kubeconfig");
    let kubeconfig = Kubeconfig::read_from(&path)?;
    let config =
        kube::Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?;
    let operations = Operations::by(directory.path().join("node.sh"));
    let cluster =
        Cluster::new(config, Some(operations))?.with_sizes(Sizes::SIMULATED.or_from_environment()?);
    let cluster = cluster.with_plugin(Plugin::beside_tests(&path)?);
    let report = Report::of(trials, &cluster, cluster.lost()).await;
    served.stop().await?;
    Ok(report)
}
