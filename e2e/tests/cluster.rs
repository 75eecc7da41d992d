//! Scenarios and trials on the cluster of `$KUBECONFIG`, which may be any cluster; `make e2e`
//! starts one.

use std::path::PathBuf;
use std::process::ExitCode;

use tessera_e2e::harness::{self, Report, Trial, all_trials};
use tessera_e2e::operations::Operations;
use tessera_e2e::plugin::Plugin;
use tessera_e2e::trials::{self, Cluster, Sizes};

#[tokio::main]
async fn main() -> ExitCode {
    harness::main(all_trials(trials::on_real_cluster()), run).await
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
    let cluster = cluster.with_sizes(Sizes::REAL.with_environment()?);
    Ok(Report::run(trials, &cluster, cluster.wait_lost()).await)
}
