//! Runs `kubectl-tessera` as a user does.

use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::Context as _;
use kube::config::Kubeconfig;
use serde_json::Value;
use tokio::io::AsyncWriteExt;
use tokio::process::Command;

/// The plugin's program and the kubeconfig passed to it.
#[derive(Clone, Debug)]
pub struct Plugin {
    program: PathBuf,
    kubeconfig: PathBuf,
}

/// Result of one call.
#[derive(Clone, Debug, PartialEq)]
pub struct PluginOutput {
    /// Exit code: 0 for success, 2 if something is pending or does not fit.
    pub code: i32,
    /// Standard output, parsed from JSON.
    pub result: Value,
}

impl Plugin {
    /// Returns the plugin built beside the test program, or `None` if it is not built.
    ///
    /// # Errors
    /// Returns an error if the path of the test program is unknown.
    pub fn beside_tests(kubeconfig: &Path) -> anyhow::Result<Option<Self>> {
        let test = std::env::current_exe()?;
        let directory =
            test.ancestors().nth(2).context("test program is not in target/PROFILE/deps")?;
        let program = directory.join("kubectl-tessera");
        Ok(program.is_file().then(|| Self { program, kubeconfig: kubeconfig.to_owned() }))
    }

    /// Returns the plugin of a user that this plugin's user may impersonate. Its kubeconfig is
    /// written to `directory`.
    ///
    /// # Errors
    /// Returns an error if a kubeconfig cannot be read or written.
    pub fn as_user(&self, user: &str, directory: &Path) -> anyhow::Result<Self> {
        let mut config = Kubeconfig::read_from(&self.kubeconfig)?;
        for named in &mut config.auth_infos {
            named.auth_info.get_or_insert_default().impersonate = Some(user.to_owned());
        }
        let kubeconfig = directory.join(user);
        std::fs::write(&kubeconfig, serde_json::to_vec(&config)?)?;
        Ok(Self { program: self.program.clone(), kubeconfig })
    }

    /// Runs the plugin with these arguments and `input`, and parses its JSON output.
    ///
    /// # Errors
    /// Returns an error if the plugin cannot be run, fails, or prints invalid JSON.
    pub async fn call(&self, arguments: &[&str], input: &str) -> anyhow::Result<PluginOutput> {
        let all = [arguments, &["--output", "json"]].concat();
        let (code, output) = self.run(&all, input).await?;
        let result = serde_json::from_slice(&output).context("the output is not valid JSON")?;
        Ok(PluginOutput { code, result })
    }

    /// Runs the plugin with these arguments and `input`, and returns its output.
    ///
    /// # Errors
    /// Returns an error if the plugin cannot be run or does not succeed.
    pub async fn text(&self, arguments: &[&str], input: &str) -> anyhow::Result<String> {
        let (code, output) = self.run(arguments, input).await?;
        anyhow::ensure!(code == 0, "kubectl tessera {}: exit code {code}", arguments.join(" "));
        String::from_utf8(output).context("the output is not UTF-8")
    }

    /// Returns the exit code, 0 or 2, and the standard output.
    async fn run(&self, arguments: &[&str], input: &str) -> anyhow::Result<(i32, Vec<u8>)> {
        let mut command = Command::new(&self.program);
        command.args(arguments).arg("--kubeconfig").arg(&self.kubeconfig).kill_on_drop(true);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child =
            command.spawn().with_context(|| format!("cannot run {}", self.program.display()))?;
        let mut stdin = child.stdin.take().context("invariant: stdin is piped")?;
        stdin.write_all(input.as_bytes()).await?;
        drop(stdin);
        let output = child.wait_with_output().await?;
        let code = output.status.code().unwrap_or(-1);
        anyhow::ensure!(
            matches!(code, 0 | 2),
            "kubectl tessera {}: {}",
            arguments.join(" "),
            String::from_utf8_lossy(&output.stderr).trim()
        );
        Ok((code, output.stdout))
    }
}
