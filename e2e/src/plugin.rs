//! `kubectl-tessera`, called as a user would.

use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::Context as _;
use serde_json::Value;
use tokio::io::AsyncWriteExt;
use tokio::process::Command;

/// The program and the kubeconfig that it is called with.
#[derive(Clone, Debug)]
pub struct Plugin {
    program: PathBuf,
    kubeconfig: PathBuf,
}

/// What a call came to.
#[derive(Clone, Debug, PartialEq)]
pub struct Answer {
    /// The exit code: 0 all is well, 2 something waits or does not fit.
    pub code: i32,
    /// The standard output, as data.
    pub result: Value,
}

impl Plugin {
    /// The program that lies beside the tests; none where it is not built.
    ///
    /// # Errors
    /// The test does not know where it is itself.
    pub fn beside_tests(kubeconfig: &Path) -> anyhow::Result<Option<Self>> {
        let test = std::env::current_exe()?;
        let directory = test.ancestors().nth(2).context("a test lies in target/PROFILE/deps")?;
        let program = directory.join("kubectl-tessera");
        Ok(program.is_file().then(|| Self { program, kubeconfig: kubeconfig.to_owned() }))
    }

    /// Calls it with these words and `input`; its result as data.
    ///
    /// # Errors
    /// It does not run, ends with an error, or says what is no JSON.
    pub async fn ask(&self, words: &[&str], input: &str) -> anyhow::Result<Answer> {
        let mut command = Command::new(&self.program);
        command
            .args(words)
            .args(["--output", "json", "--kubeconfig"])
            .arg(&self.kubeconfig)
            .kill_on_drop(true);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child =
            command.spawn().with_context(|| format!("cannot run {}", self.program.display()))?;
        let mut stdin = child.stdin.take().context("the input is piped")?;
        stdin.write_all(input.as_bytes()).await?;
        drop(stdin);
        let output = child.wait_with_output().await?;
        let code = output.status.code().unwrap_or(-1);
        anyhow::ensure!(
            matches!(code, 0 | 2),
            "kubectl tessera {}: {}",
            words.join(" "),
            String::from_utf8_lossy(&output.stderr).trim()
        );
        Ok(Answer {
            code,
            result: serde_json::from_slice(&output.stdout).context("its output is no JSON")?,
        })
    }
}
