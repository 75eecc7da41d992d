//! Processes that a daemon has left behind: its servers, which are no children of the keeper.
//!
//! NVIDIA's control daemon starts a server for its clients. Both have a mark in their environment, which is a secret of the daemon's
//! directory: a container that had it, too, would be taken for one of them.

use std::{
    fs::{self, File},
    io::{self, Write},
    os::unix::fs::OpenOptionsExt,
    path::Path,
    time::Duration,
};

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use tokio::time::{Instant, sleep};
use uuid::Uuid;

/// The variable that has the mark.
pub(crate) const MARK: &str = "TESSERA_MPS_DAEMON";

const FILE: &str = "mark";

const LOOK_EVERY: Duration = Duration::from_millis(20);

/// What the processes of a daemon have in [`MARK`]: the daemon's directory, for people, and the secret. Made if need be.
///
/// # Errors
/// The file cannot be read or made.
pub(crate) fn mark(daemon: &Path) -> io::Result<String> {
    if let Some(mark) = known(daemon)? {
        return Ok(mark);
    }
    let mark = format!("{}:{}", daemon.display(), Uuid::new_v4());
    let path = daemon.join(FILE);
    let new = path.with_extension("new");
    let mut file = File::options().write(true).create(true).truncate(true).mode(0o600).open(&new)?;
    file.write_all(mark.as_bytes())?;
    fs::rename(&new, &path)?;
    Ok(mark)
}

fn known(daemon: &Path) -> io::Result<Option<String>> {
    match fs::read_to_string(daemon.join(FILE)) {
        Ok(mark) => Ok(Some(mark)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Kills what belongs to the daemon of a directory. How many there were; they may take a while to be gone.
///
/// # Errors
/// The mark or `/proc` cannot be read.
pub(crate) fn kill(daemon: &Path) -> io::Result<usize> {
    let Some(mark) = known(daemon)? else { return Ok(0) };
    let mark = format!("{MARK}={mark}");
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
fn has(process: &Path, mark: &str) -> bool {
    let environment = fs::read(process.join("environ")).unwrap_or_default();
    environment.split(|byte| *byte == 0).any(|variable| variable == mark.as_bytes())
}

fn kill_process(process: &Path, mark: &str) -> Option<()> {
    let pid = process.file_name()?.to_str()?.parse().ok().and_then(Pid::from_raw)?;
    let handle = pidfd_open(pid, PidfdFlags::empty()).ok()?;
    // The number may have become another's before the handle was there.
    has(process, mark).then_some(())?;
    pidfd_send_signal(&handle, Signal::KILL).ok()
}

#[cfg(test)]
mod tests {
    use std::{
        os::unix::fs::PermissionsExt,
        process::{Child, Command},
    };

    use super::*;

    fn process_with(mark: &str) -> Child {
        Command::new("sleep").arg("1000").env(MARK, mark).spawn().expect("started")
    }

    #[test]
    fn only_what_has_the_mark_is_killed() {
        let daemon = tempfile::tempdir().expect("a directory");
        assert_eq!(kill(daemon.path()).expect("readable"), 0, "there never was a daemon");
        let mark = mark(daemon.path()).expect("made");
        let (mut its, mut anothers) =
            (process_with(&mark), process_with(&daemon.path().display().to_string()));
        assert_eq!(kill(daemon.path()).expect("readable"), 1);
        assert!(!its.wait().expect("it has ended").success());
        assert!(anothers.try_wait().expect("it can be waited for").is_none());
        anothers.kill().expect("it runs");
        anothers.wait().expect("it has ended");
    }

    #[test]
    fn a_mark_stays_and_is_nobodys_to_read() {
        let daemon = tempfile::tempdir().expect("a directory");
        let made = mark(daemon.path()).expect("made");
        assert_eq!(mark(daemon.path()).expect("readable"), made);
        let mode = fs::metadata(daemon.path().join(FILE)).expect("there").permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    }
}
