//! Installs, upgrades and uninstalls the chart with the `helm` program of `$PATH`.
//!
//! `$TESSERA_E2E_HELM_VALUES` names the values file with which the cluster's release was installed.
//! Without it the trials that change the release are skipped, because they could not restore it.

use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::Context;
use tokio::process::Command;

/// Name of the release, as in `run.sh` and the README.
const RELEASE: &str = "tessera";
/// Namespace of the release.
pub const NAMESPACE: &str = "tessera-system";

/// The `helm` program with this repository's chart and the cluster's values.
#[derive(Clone, Debug)]
pub struct Helm {
    values: PathBuf,
}

impl Helm {
    /// Returns the helm client that the environment configures, if any.
    pub fn from_environment() -> Option<Self> {
        std::env::var_os("TESSERA_E2E_HELM_VALUES").map(|values| Self { values: values.into() })
    }

    /// Installs the chart and waits until it is ready.
    ///
    /// # Errors
    /// Returns an error if helm fails.
    pub async fn install(&self) -> anyhow::Result<()> {
        self.release("install", &[]).await
    }

    /// Upgrades the release with these settings, replacing those of earlier upgrades, and waits
    /// until it is ready.
    ///
    /// # Errors
    /// Returns an error if helm fails.
    pub async fn upgrade(&self, settings: &[&str]) -> anyhow::Result<()> {
        self.release("upgrade", settings).await
    }

    /// Uninstalls the release and waits until its objects are deleted.
    ///
    /// # Errors
    /// Returns an error if helm fails.
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
    let output = helm.output().await.context("cannot run helm")?;
    anyhow::ensure!(
        output.status.success(),
        "{:?}: {}",
        helm.as_std(),
        String::from_utf8_lossy(&output.stderr).trim()
    );
    Ok(())
}
