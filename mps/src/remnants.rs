//! Processes that a daemon has left behind: its servers, which are no children of the keeper.
//!
//! NVIDIA's control daemon starts a server for its clients. Both have the mark in their environment, which nobody else gets.

use std::{fs, io, os::unix::ffi::OsStrExt, path::Path, time::Duration};

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use tokio::time::{Instant, sleep};

/// The variable that names the directory of the daemon that a process belongs to.
pub(crate) const MARK: &str = "TESSERA_MPS_DAEMON";

const LOOK_EVERY: Duration = Duration::from_millis(20);

/// Kills what belongs to the daemon of a directory. How many there were; they may take a while to be gone.
///
/// # Errors
/// `/proc` cannot be read.
pub(crate) fn kill(daemon: &Path) -> io::Result<usize> {
    let mark = [MARK.as_bytes(), b"=", daemon.as_os_str().as_bytes()].concat();
    let mut killed = 0;
    for process in fs::read_dir("/proc")? {
        let process = process?.path();
        if has(&process, &mark) && kill_process(&process, &mark).is_some() {
            killed += 1;
        }
    }
    Ok(killed)
}

/// As [`kill`], until none is left or it has taken too long.
pub(crate) async fn end(daemon: &Path, patience: Duration) {
    let deadline = Instant::now() + patience;
    while kill(daemon).unwrap_or(0) > 0 && Instant::now() < deadline {
        sleep(LOOK_EVERY).await;
    }
}

/// One that has ended has no environment any more, though its parent may not have waited for it.
fn has(process: &Path, mark: &[u8]) -> bool {
    let environment = fs::read(process.join("environ")).unwrap_or_default();
    environment.split(|byte| *byte == 0).any(|variable| variable == mark)
}

fn kill_process(process: &Path, mark: &[u8]) -> Option<()> {
    let pid = process.file_name()?.to_str()?.parse().ok().and_then(Pid::from_raw)?;
    let handle = pidfd_open(pid, PidfdFlags::empty()).ok()?;
    // The number may have become another's before the handle was there.
    has(process, mark).then_some(())?;
    pidfd_send_signal(&handle, Signal::KILL).ok()
}
