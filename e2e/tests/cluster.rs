//! Scenarios and trials on the cluster of $KUBECONFIG: `make e2e` starts a real one, any other will do.

use std::path::Path;
use std::process::ExitCode;

use tessera_e2e::harness::{Report, Selection, everything};
use tessera_e2e::operations::Operations;
use tessera_e2e::plugin::Plugin;
use tessera_e2e::trials::{self, Cluster, Sizes};

#[tokio::main]
async fn main() -> ExitCode {
    let selection = Selection::from_arguments(std::env::args().skip(1));
    if selection.lists() {
        return ExitCode::SUCCESS;
    }
    let Some(kubeconfig) = std::env::var_os("KUBECONFIG") else {
        println!("SKIPPED: cluster: KUBECONFIG is not set; `make e2e` starts a cluster");
        return ExitCode::SUCCESS;
    };
    match run(&selection, kubeconfig.as_ref()).await {
        Ok(report) => report.finish(),
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

async fn run(selection: &Selection, kubeconfig: &Path) -> anyhow::Result<Report> {
    let cluster = Cluster::new(kube::Config::infer().await?, Operations::from_environment())?;
    let cluster = cluster.with_plugin(Plugin::beside_tests(kubeconfig)?);
    let cluster = cluster.with_sizes(Sizes::REAL.or_from_environment()?);
    let trials = everything(&cluster, trials::on_real_cluster(&cluster))?;
    Ok(Report::of(selection, trials, cluster.lost()).await)
}
