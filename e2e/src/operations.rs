//! Operations on the machines of a cluster: restart components, inject GPU faults, list leftover
//! files.
//!
//! `$TESSERA_E2E_NODE` names the program that does them: `e2e/cluster/node.sh` on a real cluster, a
//! script written by `tessera-simcluster serve` on the simulated one. Without it, trials that need
//! it are skipped.

use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use tokio::process::Command;

/// Time limit for one operation. It is longer than the waits of `e2e/cluster/node.sh`, whose own
/// error names the object.
const TIMEOUT: Duration = Duration::from_secs(600);

/// The program that operates on machines.
#[derive(Clone, Debug)]
pub struct Operations {
    program: PathBuf,
}

impl Operations {
    /// Creates operations that call this program.
    pub fn new(program: PathBuf) -> Self {
        Self { program }
    }

    /// Returns the operations that the environment configures, if any.
    pub fn from_environment() -> Option<Self> {
        std::env::var_os("TESSERA_E2E_NODE").map(|program| Self::new(program.into()))
    }

    /// Runs an operation and returns the program's output.
    ///
    /// # Errors
    /// Returns an error if the program fails or does not end in time.
    pub async fn run(&self, arguments: &[&str]) -> anyhow::Result<String> {
        let action = arguments.join(" ");
        let running = Command::new(&self.program)
            .args(arguments)
            .stdin(Stdio::null())
            .kill_on_drop(true)
            .output();
        let output = tokio::time::timeout(TIMEOUT, running)
            .await
            .with_context(|| format!("`{action}` did not end within {TIMEOUT:?}"))?
            .with_context(|| format!("cannot run `{}`", self.program.display()))?;
        let errors = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "`{action}`: {}", errors.trim());
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SETTINGS: &str = include_str!("../cluster/lib/settings.sh");

    #[test]
    fn time_limit_covers_two_waits_of_node_sh() {
        let limit = SETTINGS.lines().find_map(|line| line.strip_prefix("wait_limit=")).unwrap();
        let wait = Duration::from_secs(limit.parse().unwrap());
        // Work between the two waits takes seconds.
        assert!(
            TIMEOUT >= 2 * wait + Duration::from_secs(120),
            "{TIMEOUT:?} for two waits of {wait:?}"
        );
    }
}
