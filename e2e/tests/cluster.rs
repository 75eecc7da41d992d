//! Scenarios and trials on the cluster of $KUBECONFIG: `make e2e` starts a real one, any other will
//! do.

use std::path::PathBuf;
use std::process::ExitCode;

use tessera_e2e::harness::{self, Report, Trial, everything};
use tessera_e2e::operations::Operations;
use tessera_e2e::plugin::Plugin;
use tessera_e2e::trials::{self, Cluster, Sizes};

#[tokio::main]
async fn main() -> ExitCode {
    harness::main(everything(trials::on_real_cluster()), run).await
}

async fn run(trials: Vec<Trial>) -> anyhow::Result<Report> {
    let Some(kubeconfig) = std::env::var_os("KUBECONFIG").map(PathBuf::from) else {
        return Ok(Report::skipped(
            "cluster",
            "KUBECONFIG is not set; `make e2e` starts a cluster".into(),
        ));
    };
    let cluster = Cluster::new(kube::Config::infer().await?, Operations::from_environment())?;
    let cluster = cluster.with_plugin(Plugin::beside_tests(&kubeconfig)?);
    let cluster = cluster.with_sizes(Sizes::REAL.or_from_environment()?);
    Ok(Report::of(trials, &cluster, cluster.lost()).await)
}
