//! The simulated cluster as a child process. `tessera-simcluster serve` runs the real driver and
//! controller against a simulated Kubernetes.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context as _, bail};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};

/// Packages that must be built for a test on the simulated cluster; `make test` builds them.
const PACKAGES: &str = "-p tessera-simcluster -p tessera-driver -p tessera-controller -p tessera-probe -p tessera-fake-world \
                        -p tessera-fake-nvml -p tessera-fake-cuda -p tessera-fake-clock -p tessera-intercept -p tessera-cli";

/// Time limit for the start. It takes two seconds, and longer with a debug build on a loaded
/// machine. It is longer than the limits of the child process, whose own error names the cause.
const TIMEOUT: Duration = Duration::from_secs(900);

/// Returns the path of `tessera-simcluster`. Cargo puts the programs of all packages into the
/// parent of the directory of the test programs.
///
/// # Errors
/// Returns an error if the program is not built.
pub fn program() -> anyhow::Result<PathBuf> {
    let test = std::env::current_exe()?;
    let directory =
        test.ancestors().nth(2).context("test program is not in target/PROFILE/deps")?;
    let program = directory.join("tessera-simcluster");
    if !program.is_file() {
        bail!("{} is not built: run `cargo build {PACKAGES}`, or `make test`", program.display());
    }
    Ok(program)
}

/// Returns the reason why this machine cannot create user namespaces; `None` if it can.
///
/// # Errors
/// Returns an error if the program cannot be started.
pub async fn namespaces_unavailable(program: &Path) -> anyhow::Result<Option<String>> {
    let output =
        Command::new(program).arg("namespaces-try-out").stdin(Stdio::null()).output().await?;
    let reason = String::from_utf8_lossy(&output.stderr);
    let reason = reason.trim().trim_start_matches("tessera-simcluster: ");
    Ok((!output.status.success()).then(|| reason.to_owned()))
}

/// A running simulated cluster. The process is killed when this value is dropped.
pub struct ServedCluster {
    child: Child,
}

impl ServedCluster {
    /// Starts the cluster and waits until it is ready. It writes its kubeconfig and `node.sh` to
    /// `run_directory`.
    ///
    /// # Errors
    /// Returns an error if the cluster does not start.
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
        let output = child.stdout.take().context("invariant: stdout is piped")?;
        let mut lines = BufReader::new(output).lines();
        // The first line is printed when the cluster is ready. If the output ends before, the start
        // failed.
        let line = tokio::time::timeout(TIMEOUT, lines.next_line()).await;
        match line.context("the cluster did not start in time")?? {
            Some(_) => Ok(Self { child }),
            None => bail!("the cluster did not start: {}", child.wait().await?),
        }
    }

    /// Returns the process ID of the cluster, whose programs are its descendants; `None` if it has
    /// exited.
    pub fn pid(&self) -> Option<u32> {
        self.child.id()
    }

    /// Stops the cluster. The process cleans up and reports the result by its exit code.
    ///
    /// # Errors
    /// Returns an error if the process does not stop or fails.
    pub async fn stop(&mut self) -> anyhow::Result<()> {
        let pid = self.child.id().context("the cluster stopped unexpectedly")?;
        let signal = Command::new("kill").arg(pid.to_string()).status().await?;
        anyhow::ensure!(signal.success(), "cannot signal the cluster");
        let status = tokio::time::timeout(TIMEOUT, self.child.wait())
            .await
            .context("the cluster did not stop in time")??;
        anyhow::ensure!(status.success(), "the cluster stopped with {status}");
        Ok(())
    }
}
