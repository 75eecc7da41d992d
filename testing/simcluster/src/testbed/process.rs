//! Programs run as child processes.

use std::ffi::OsString;
use std::fs::File;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::Context as _;
use rustix::process::{Pid, Signal, kill_process};
use tokio::process::{Child, Command};

/// Time limit for a program to end after SIGTERM: far more than needed.
const TIMEOUT: Duration = Duration::from_secs(120);

/// Number of log lines shown after a failure.
const TAIL_LINES: usize = 40;

/// Returns a free port of the loopback interface.
///
/// Another process may take it before the program listens; then the program exits with an error.
pub(crate) fn free_address() -> std::io::Result<SocketAddr> {
    TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()
}

/// Returns the value of `--metrics-address`: empty for none.
pub(crate) fn address_text(address: Option<SocketAddr>) -> String {
    address.map(|address| address.to_string()).unwrap_or_default()
}

/// Command line, environment and log of a program.
#[derive(Clone, Debug)]
pub(crate) struct ProcessSpec {
    program: PathBuf,
    arguments: Vec<OsString>,
    environment: Vec<(&'static str, OsString)>,
    log: PathBuf,
}

impl ProcessSpec {
    /// Returns a program whose output is appended to `log`.
    pub(crate) fn new(program: &Path, log: PathBuf) -> Self {
        Self { program: program.to_owned(), arguments: Vec::new(), environment: Vec::new(), log }
    }

    #[must_use]
    pub(crate) fn argument(mut self, flag: &str, value: impl Into<OsString>) -> Self {
        self.arguments.extend([flag.into(), value.into()]);
        self
    }

    /// Sets an environment variable.
    #[must_use]
    pub(crate) fn variable(mut self, name: &'static str, value: impl Into<OsString>) -> Self {
        self.environment.push((name, value.into()));
        self
    }
}

/// A program that runs, or was stopped and may be started again.
#[derive(Debug)]
pub(crate) struct Process {
    spec: ProcessSpec,
    child: Option<Child>,
}

impl Process {
    pub(crate) async fn start(spec: ProcessSpec) -> anyhow::Result<Self> {
        let mut process = Self { spec, child: None };
        process.start_again()?;
        Ok(process)
    }

    /// Starts the program unless it runs.
    pub(crate) fn start_again(&mut self) -> anyhow::Result<()> {
        if self.child.is_some() {
            return Ok(());
        }
        let ProcessSpec { program, arguments, environment, log } = &self.spec;
        let output = File::options()
            .create(true)
            .append(true)
            .open(log)
            .with_context(|| format!("cannot open `{}`", log.display()))?;
        let mut command = Command::new(program);
        command
            .args(arguments)
            .envs(environment.iter().cloned())
            .stdin(Stdio::null())
            .stdout(output.try_clone()?)
            .stderr(output)
            .kill_on_drop(true);
        if std::env::var_os("RUST_LOG").is_none() {
            command.env("RUST_LOG", "info");
        }
        self.child =
            Some(command.spawn().with_context(|| format!("cannot start `{}`", program.display()))?);
        Ok(())
    }

    /// Sends SIGTERM and waits. Does nothing if the program does not run.
    pub(crate) async fn stop(&mut self) -> anyhow::Result<()> {
        self.end(Signal::TERM).await
    }

    /// Kills the program, as a crash would end it.
    pub(crate) async fn kill(&mut self) -> anyhow::Result<()> {
        self.end(Signal::KILL).await
    }

    async fn end(&mut self, signal: Signal) -> anyhow::Result<()> {
        let Some(mut child) = self.child.take() else { return Ok(()) };
        if let Some(pid) = child.id().and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw)
        {
            // It may have ended just now.
            let _ = kill_process(pid, signal);
        }
        let name = self.spec.program.display();
        let ended = tokio::time::timeout(TIMEOUT, child.wait()).await;
        // Dropping the child kills it if it ignored the signal.
        ended.with_context(|| {
            format!("`{name}` did not end within {TIMEOUT:?} after {signal:?}")
        })??;
        Ok(())
    }

    /// Restarts the program if it has exited by itself, as Kubernetes would. A stopped program
    /// stays stopped.
    pub(crate) fn restart_if_exited(&mut self) -> anyhow::Result<()> {
        let Some(child) = &mut self.child else { return Ok(()) };
        if let Some(status) = child.try_wait()? {
            tracing::warn!(program = %self.spec.program.display(), %status, "program exited; restarting");
            self.child = None;
            self.start_again()?;
        }
        Ok(())
    }

    pub(crate) fn log(&self) -> &Path {
        &self.spec.log
    }

    /// Returns the last lines of its output.
    pub(crate) fn tail(&self) -> String {
        let output = std::fs::read_to_string(&self.spec.log).unwrap_or_default();
        let lines: Vec<_> = output.lines().collect();
        lines[lines.len().saturating_sub(TAIL_LINES)..]
            .iter()
            .map(|line| format!("{line}\n"))
            .collect()
    }

    /// Resolves when the program exits by itself, which is an error. Never resolves for a stopped
    /// program.
    pub(crate) async fn exited(&mut self) -> anyhow::Error {
        let Some(child) = &mut self.child else { return std::future::pending().await };
        let status = child.wait().await;
        let (name, log) = (self.spec.program.display(), self.spec.log.display());
        anyhow::anyhow!(
            "`{name}` exited: {status:?}; last lines of {log}:
{}",
            self.tail()
        )
    }
}
