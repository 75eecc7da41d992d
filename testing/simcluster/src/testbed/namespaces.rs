//! Namespaces of the test bed: mount and pid, without root also user.
//!
//! All processes and mounts in them end with their first process, however it ends. Only one
//! directory remains to be removed, by the process outside.

use std::path::Path;
use std::process::{ExitCode, ExitStatus, Stdio};

use anyhow::Context as _;
use rustix::mount::{MountFlags, mount};
use rustix::process::{Pid, Signal, kill_process, set_parent_process_death_signal};
use rustix::thread::UnshareFlags;
use tempfile::TempDir;
use tokio::process::{Child, Command};
use tokio::signal::unix::{SignalKind, signal};

use tessera_simcluster::node::namespaces;

/// Environment variable set inside the namespaces: the working directory.
const DIRECTORY_VARIABLE: &str = "TESSERA_SIMCLUSTER_INSIDE";

/// Returns the working directory inside the namespaces, or `None` outside.
pub(crate) fn directory() -> Option<std::path::PathBuf> {
    std::env::var_os(DIRECTORY_VARIABLE).map(Into::into)
}

/// Runs this program again, with the same arguments, as the first process of new namespaces, and
/// returns its exit code.
///
/// Must be called before the process starts any other thread.
pub(crate) fn run_inside() -> anyhow::Result<ExitCode> {
    let directory = TempDir::with_prefix("tsim-")
        .context("cannot create temporary directory; is TMPDIR writable?")?;
    namespaces::enter(UnshareFlags::NEWPID).context("cannot enter new namespaces")?;
    let reactor = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let status = reactor.block_on(supervise(directory.path()))?;
    directory.close().context("cannot remove temporary directory")?;
    Ok(status
        .code()
        .and_then(|code| u8::try_from(code).ok())
        .map_or(ExitCode::FAILURE, ExitCode::from))
}

async fn supervise(directory: &Path) -> anyhow::Result<ExitStatus> {
    let mut terminate = signal(SignalKind::terminate())?;
    // A terminal sends this signal to both processes; the inner one handles it.
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut child = Command::new(std::env::current_exe()?)
        .args(std::env::args_os().skip(1))
        .env(DIRECTORY_VARIABLE, directory)
        .stdin(Stdio::inherit())
        .spawn()?;
    loop {
        tokio::select! {
            status = child.wait() => return Ok(status?),
            _ = terminate.recv() => forward(&child, Signal::TERM),
            _ = interrupt.recv() => forward(&child, Signal::INT),
        }
    }
}

fn forward(child: &Child, signal: Signal) {
    if let Some(pid) = child.id().and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw) {
        // It may have just ended, which `wait` reports.
        let _ = kill_process(pid, signal);
    }
}

/// Prepares the first process inside. It ends with the outer process, has private mounts (otherwise
/// the outer process could not remove the directory), and sees only its own processes.
pub(crate) fn isolate() -> anyhow::Result<()> {
    set_parent_process_death_signal(Some(Signal::KILL))?;
    namespaces::enter(UnshareFlags::empty()).context("cannot enter mount namespace")?;
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    // A new proc is refused if parts of /proc are masked. The old one suffices, since no other
    // processes are inspected.
    let _ = mount("proc", "/proc", "proc", flags, None);
    Ok(())
}
