//! A place of its own for the stage: mount and pid namespaces, without root also a user namespace.
//!
//! Whatever runs in it is gone when its first process is, however that ends, and so are its mounts:
//! nothing has to be cleaned up but one directory, by the process outside.

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

/// Tells the program that it is inside, and where its directory is.
const INSIDE: &str = "TESSERA_SIMCLUSTER_INSIDE";

/// The directory of the process inside; none outside.
pub(crate) fn directory() -> Option<std::path::PathBuf> {
    std::env::var_os(INSIDE).map(Into::into)
}

/// Runs this program again, with the same arguments, as the first process of new namespaces; ends
/// with it.
///
/// Must be called before the process has any other thread.
pub(crate) fn run_inside() -> anyhow::Result<ExitCode> {
    let directory =
        TempDir::with_prefix("tsim-").context("no temporary directory; is TMPDIR writable?")?;
    namespaces::enter(UnshareFlags::NEWPID).context("failed to enter new namespaces")?;
    let reactor = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let status = reactor.block_on(accompany(directory.path()))?;
    directory.close().context("failed to remove the temporary directory")?;
    Ok(status
        .code()
        .and_then(|code| u8::try_from(code).ok())
        .map_or(ExitCode::FAILURE, ExitCode::from))
}

async fn accompany(directory: &Path) -> anyhow::Result<ExitStatus> {
    let mut terminate = signal(SignalKind::terminate())?;
    // A terminal sends this one to both; it is the inner process that decides what it means.
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut child = Command::new(std::env::current_exe()?)
        .args(std::env::args_os().skip(1))
        .env(INSIDE, directory)
        .stdin(Stdio::inherit())
        .spawn()?;
    loop {
        tokio::select! {
            status = child.wait() => return Ok(status?),
            _ = terminate.recv() => pass_on(&child, Signal::TERM),
            _ = interrupt.recv() => pass_on(&child, Signal::INT),
        }
    }
}

fn pass_on(child: &Child, signal: Signal) {
    if let Some(pid) = child.id().and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw) {
        // It may have just ended, which `wait` tells.
        let _ = kill_process(pid, signal);
    }
}

/// What the first process inside does before anything else: it dies with the one outside, has its
/// mounts to itself (the one outside could not remove the directory with them in it), and sees its
/// own processes.
pub(crate) fn settle() -> anyhow::Result<()> {
    set_parent_process_death_signal(Some(Signal::KILL))?;
    namespaces::enter(UnshareFlags::empty()).context("failed to enter a mount namespace")?;
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    // Where parts of /proc are masked, a new one is refused. The old one does: nobody here looks
    // for other processes.
    let _ = mount("proc", "/proc", "proc", flags, None);
    Ok(())
}
