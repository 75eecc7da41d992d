//! Acting on the machines of a cluster: restarting components, breaking GPUs, looking for residue.
//!
//! `$TESSERA_E2E_NODE` names the program that does it: `e2e/cluster/node.sh` on the real cluster,
//! what `tessera-simcluster serve` writes on the stand-ins. Without it, trials that need it are
//! skipped.

use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use tokio::process::Command;

/// Time for one action: more than `e2e/cluster/node.sh` takes until it gives up by itself, and says
/// what it has waited for.
const PATIENCE: Duration = Duration::from_secs(600);

/// An action failed.
#[derive(Debug, thiserror::Error)]
pub enum OperationError {
    /// The program could not be run.
    #[error("failed to run `{program}`")]
    Run {
        /// The program.
        program: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// It said no.
    #[error("`{action}`: {said}")]
    Failed {
        /// What was to be done.
        action: String,
        /// What the program said.
        said: String,
    },
    /// It did not end.
    #[error("`{action}` took more than {PATIENCE:?}")]
    TooLong {
        /// What was to be done.
        action: String,
    },
}

/// The program that acts on machines.
#[derive(Clone, Debug)]
pub struct Operations {
    program: PathBuf,
}

impl Operations {
    /// With this program.
    pub fn by(program: PathBuf) -> Self {
        Self { program }
    }

    /// What the environment names.
    pub fn from_environment() -> Option<Self> {
        std::env::var_os("TESSERA_E2E_NODE").map(|program| Self::by(program.into()))
    }

    /// Runs it; returns what it printed.
    ///
    /// # Errors
    /// See [`OperationError`].
    pub async fn run(&self, words: &[&str]) -> Result<String, OperationError> {
        let action = words.join(" ");
        let failed = |source| OperationError::Run { program: self.program.clone(), source };
        let running = Command::new(&self.program)
            .args(words)
            .stdin(Stdio::null())
            .kill_on_drop(true)
            .output();
        let output = tokio::time::timeout(PATIENCE, running)
            .await
            .map_err(|_| OperationError::TooLong { action: action.clone() })?
            .map_err(failed)?;
        if output.status.success() {
            return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
        }
        let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        Err(OperationError::Failed { action, said })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SETTINGS: &str = include_str!("../cluster/lib/settings.sh");

    #[test]
    fn an_action_has_time_for_two_waits_of_node_sh() {
        let patience = SETTINGS.lines().find_map(|line| line.strip_prefix("patience=")).unwrap();
        let wait = Duration::from_secs(patience.parse().unwrap());
        // What is done between them is no wait, and takes seconds.
        assert!(
            PATIENCE >= 2 * wait + Duration::from_secs(120),
            "{PATIENCE:?} for two waits of {wait:?}"
        );
    }
}
