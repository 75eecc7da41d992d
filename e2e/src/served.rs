//! A cluster of stand-ins in a process of its own: `tessera-simcluster serve`, around the real
//! programs.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context as _, bail};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};

/// What has to be built besides a test that serves; `make test` does.
const PACKAGES: &str = "-p tessera-simcluster -p tessera-driver -p tessera-controller -p tessera-probe -p tessera-fake-world \
                        -p tessera-fake-nvml -p tessera-fake-cuda -p tessera-fake-clock -p tessera-intercept -p tessera-cli";

/// From nothing to a ready cluster takes two seconds; a debug build on a busy machine needs more.
/// It gives up by itself before this, and says what it has waited for.
const PATIENCE: Duration = Duration::from_secs(900);

/// Cargo puts the programs of all packages into the parent of the directory that tests are in.
/// The program that serves.
///
/// # Errors
/// It is not built.
pub fn program() -> anyhow::Result<PathBuf> {
    let test = std::env::current_exe()?;
    let directory = test.ancestors().nth(2).context("a test lies in target/PROFILE/deps")?;
    let program = directory.join("tessera-simcluster");
    if !program.is_file() {
        bail!("no {}: run `cargo build {PACKAGES}` first (`make test` does)", program.display());
    }
    Ok(program)
}

/// Why this machine allows no namespaces, where it does not.
///
/// # Errors
/// The program does not start.
pub async fn no_namespaces(program: &Path) -> anyhow::Result<Option<String>> {
    let output =
        Command::new(program).arg("namespaces-try-out").stdin(Stdio::null()).output().await?;
    let reason = String::from_utf8_lossy(&output.stderr);
    let reason = reason.trim().trim_start_matches("tessera-simcluster: ");
    Ok((!output.status.success()).then(|| reason.to_owned()))
}

/// A cluster that runs. It ends with this.
pub struct Served {
    child: Child,
}

impl Served {
    /// Starts it and waits until it is ready; its kubeconfig and `node.sh` are in `run_directory`
    /// then.
    ///
    /// # Errors
    /// It does not start.
    pub async fn start(
        program: &Path,
        run_directory: &Path,
        flags: &[&str],
    ) -> anyhow::Result<Self> {
        let mut child = Command::new(program)
            .arg("serve")
            .arg("--run-directory")
            .arg(run_directory)
            .args(flags)
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

    /// Ends it. It takes everything down by itself, and says so by its exit code.
    ///
    /// # Errors
    /// It does not end, or not well.
    pub async fn stop(&mut self) -> anyhow::Result<()> {
        let pid = self.child.id().context("the cluster ended by itself")?;
        let asked = Command::new("kill").arg(pid.to_string()).status().await?;
        anyhow::ensure!(asked.success(), "cannot signal the cluster");
        let status = tokio::time::timeout(PATIENCE, self.child.wait())
            .await
            .context("the cluster does not end")??;
        anyhow::ensure!(status.success(), "the cluster ended with {status}");
        Ok(())
    }
}
