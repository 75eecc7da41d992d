//! Installing, upgrading and removing the chart as an operator does: the program `helm` of $PATH.
//!
//! `$TESSERA_E2E_HELM_VALUES` names the values with which the cluster's Tessera was installed;
//! without it the trials that need it are skipped, since they could not put back what was there.

use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::Context;
use tokio::process::Command;

/// The release and its namespace, as `run.sh` and the README install them.
const RELEASE: &str = "tessera";
/// Namespace of the release.
pub const NAMESPACE: &str = "tessera-system";

/// The program helm, the chart of this repository, and the values of the cluster.
#[derive(Clone, Debug)]
pub struct Helm {
    values: PathBuf,
}

impl Helm {
    /// What the environment names.
    pub fn from_environment() -> Option<Self> {
        std::env::var_os("TESSERA_E2E_HELM_VALUES").map(|values| Self { values: values.into() })
    }

    /// Installs the chart and waits until it is ready.
    ///
    /// # Errors
    /// helm's own.
    pub async fn install(&self) -> anyhow::Result<()> {
        self.release("install", &[]).await
    }

    /// Upgrades the release to the chart with these settings and no others, and waits until it is
    /// ready.
    ///
    /// # Errors
    /// helm's own.
    pub async fn upgrade(&self, settings: &[&str]) -> anyhow::Result<()> {
        self.release("upgrade", settings).await
    }

    /// Removes the release and waits until its objects are gone.
    ///
    /// # Errors
    /// helm's own.
    pub async fn uninstall(&self) -> anyhow::Result<()> {
        run(Command::new("helm").args(["uninstall", RELEASE, "--wait", "--timeout", "120s"])).await
    }

    async fn release(&self, action: &str, settings: &[&str]) -> anyhow::Result<()> {
        let chart = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/chart/tessera");
        let mut helm = Command::new("helm");
        helm.arg(action).arg(RELEASE).arg(chart).arg("--values").arg(&self.values);
        for setting in settings {
            helm.arg("--set").arg(setting);
        }
        run(helm.args(["--wait", "--timeout", "120s"])).await
    }
}

async fn run(helm: &mut Command) -> anyhow::Result<()> {
    let helm = helm.args(["--namespace", NAMESPACE]).stdin(Stdio::null()).kill_on_drop(true);
    let output = helm.output().await.context("failed to run helm")?;
    anyhow::ensure!(
        output.status.success(),
        "{:?}: {}",
        helm.as_std(),
        String::from_utf8_lossy(&output.stderr).trim()
    );
    Ok(())
}
