//! The same scenarios and trials on the cluster of stand-ins, around the real driver, controller and interceptor.

use std::path::{Path, PathBuf};
use std::process::{ExitCode, Stdio};
use std::time::Duration;

use anyhow::{Context as _, bail};
use kube::config::{KubeConfigOptions, Kubeconfig};
use tempfile::TempDir;
use tessera_e2e::harness::{Report, Selection, everything};
use tessera_e2e::operations::Operations;
use tessera_e2e::trials::{Cluster, Sizes};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};

/// What has to be built besides this test; `make test` does.
const PACKAGES: &str = "-p tessera-simcluster -p tessera-driver -p tessera-controller -p tessera-probe -p tessera-fake-world \
                        -p tessera-fake-nvml -p tessera-fake-cuda -p tessera-intercept";

/// The container runtime of the stand-ins is no daemon that could be restarted.
const NO_DAEMON: &str = "trial/containerd-restart";

/// From nothing to a ready cluster takes two seconds; a debug build on a busy machine needs more.
const PATIENCE: Duration = Duration::from_secs(60);

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
    let mut served = Served::start(&program, directory.path()).await?;
    let kubeconfig = Kubeconfig::read_from(directory.path().join("kubeconfig"))?;
    let config = kube::Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?;
    let operations = Operations::by(directory.path().join("node.sh"));
    let cluster = Cluster::new(config, Some(operations))?.with_sizes(Sizes::SIMULATED.or_from_environment()?);
    let mut trials = everything(&cluster, vec![])?;
    trials.retain(|trial| trial.name != NO_DAEMON);
    let report = Report::of(selection, trials).await;
    served.stop().await?;
    Ok(Some(report))
}

/// Cargo puts the programs of all packages into the parent of the directory that tests are in.
fn program() -> anyhow::Result<PathBuf> {
    let test = std::env::current_exe()?;
    let directory = test.ancestors().nth(2).context("a test lies in target/PROFILE/deps")?;
    let program = directory.join("tessera-simcluster");
    if !program.is_file() {
        bail!("no {}: run `cargo build {PACKAGES}` first (`make test` does)", program.display());
    }
    Ok(program)
}

async fn no_namespaces(program: &Path) -> anyhow::Result<Option<String>> {
    let output = Command::new(program).arg("namespaces-try-out").stdin(Stdio::null()).output().await?;
    let reason = String::from_utf8_lossy(&output.stderr);
    let reason = reason.trim().trim_start_matches("tessera-simcluster: ");
    Ok((!output.status.success()).then(|| reason.to_owned()))
}

struct Served {
    child: Child,
}

impl Served {
    async fn start(program: &Path, run_directory: &Path) -> anyhow::Result<Self> {
        let mut child = Command::new(program)
            .arg("serve")
            .arg("--run-directory")
            .arg(run_directory)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()?;
        let output = child.stdout.take().context("the output is piped")?;
        let mut lines = BufReader::new(output).lines();
        // The line comes when everything is ready; the end of the output, when it never will be.
        let line = tokio::time::timeout(PATIENCE, lines.next_line()).await;
        match line.context("the cluster took too long to start")?? {
            Some(_) => Ok(Self { child }),
            None => bail!("the cluster did not start: {}", child.wait().await?),
        }
    }

    /// It takes everything down by itself, and says so by its exit code.
    async fn stop(&mut self) -> anyhow::Result<()> {
        let pid = self.child.id().context("the cluster ended by itself")?;
        let asked = Command::new("kill").arg(pid.to_string()).status().await?;
        anyhow::ensure!(asked.success(), "cannot signal the cluster");
        let status =
            tokio::time::timeout(PATIENCE, self.child.wait()).await.context("the cluster does not end")??;
        anyhow::ensure!(status.success(), "the cluster ended with {status}");
        Ok(())
    }
}
