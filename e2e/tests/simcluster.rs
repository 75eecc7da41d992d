//! The same scenarios and trials on the cluster of stand-ins, around the real driver, controller and interceptor.

use std::process::ExitCode;

use kube::config::{KubeConfigOptions, Kubeconfig};
use tempfile::TempDir;
use tessera_e2e::harness::{Report, Selection, everything};
use tessera_e2e::operations::Operations;
use tessera_e2e::plugin::Plugin;
use tessera_e2e::served::{Served, no_namespaces, program};
use tessera_e2e::trials::{Cluster, Sizes};

/// The container runtime of the stand-ins is no daemon that could be restarted.
const NO_DAEMON: &str = "trial/containerd-restart";

#[tokio::main]
async fn main() -> ExitCode {
    let selection = Selection::from_arguments(std::env::args().skip(1));
    if selection.lists() {
        return ExitCode::SUCCESS;
    }
    match run(&selection).await {
        Ok(Some(report)) => report.finish(),
        Ok(None) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

async fn run(selection: &Selection) -> anyhow::Result<Option<Report>> {
    let program = program()?;
    if let Some(reason) = no_namespaces(&program).await? {
        println!("SKIPPED: simcluster: no namespaces here: {reason}");
        return Ok(None);
    }
    let directory = TempDir::with_prefix("tsim-run-")?;
    let mut served = Served::start(&program, directory.path(), &[]).await?;
    let path = directory.path().join("kubeconfig");
    let kubeconfig = Kubeconfig::read_from(&path)?;
    let config = kube::Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?;
    let operations = Operations::by(directory.path().join("node.sh"));
    let cluster = Cluster::new(config, Some(operations))?.with_sizes(Sizes::SIMULATED.or_from_environment()?);
    let cluster = cluster.with_plugin(Plugin::beside_tests(&path)?);
    let mut trials = everything(&cluster, vec![])?;
    trials.retain(|trial| trial.name != NO_DAEMON);
    let report = Report::of(selection, trials, cluster.lost()).await;
    served.stop().await?;
    Ok(Some(report))
}
