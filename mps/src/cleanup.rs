//! Finds and kills orphaned processes of a daemon: MPS servers, which are not children of the
//! supervisor.
//!
//! NVIDIA's control daemon starts a server for its clients. Both have a mark in their environment.
//! The mark is a secret in the daemon's directory, because a container process with the same mark
//! would be killed, too.
//!
//! Only the supervisor's own cgroup is searched. When a container exits, its runtime kills the
//! processes in the container's cgroup, so no orphan is elsewhere. Processes of other cgroups are
//! not read: their environment may have any size and content.

use std::{
    fs::{self, File},
    io::{self, Read},
    path::Path,
    time::Duration,
};

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use tessera_runtime::atomic_file;
use tokio::time::{Instant, sleep};
use uuid::Uuid;

/// Environment variable that has the mark.
pub(crate) const MARK: &str = "TESSERA_MPS_DAEMON";

const FILE: &str = "mark";

/// Number of bytes read of `/proc/PID/cgroup`; far more than the kernel writes.
const CGROUP: u64 = 64 << 10;

/// Number of bytes read of an environment. A process can make its own arbitrarily long
/// (`PR_SET_MM_MAP` in prctl(2)); the mark is near the beginning of the inherited part.
const ENVIRONMENT: u64 = 1 << 20;

const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Returns the value of [`MARK`] for a daemon's processes: its directory, for people, and the
/// secret. Creates it if it does not exist.
///
/// # Errors
/// The file cannot be read or created.
pub(crate) fn mark(daemon: &Path) -> io::Result<String> {
    if let Some(mark) = read_mark(daemon)? {
        return Ok(mark);
    }
    let mark = format!("{}:{}", daemon.display(), Uuid::new_v4());
    atomic_file::write(&daemon.join(FILE), mark.as_bytes(), 0o600)?;
    Ok(mark)
}

fn read_mark(daemon: &Path) -> io::Result<Option<String>> {
    match fs::read_to_string(daemon.join(FILE)) {
        Ok(mark) => Ok(Some(mark)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Kills the processes of a directory's daemon and returns their number. They may need a while to
/// exit.
///
/// # Errors
/// The mark or `/proc` cannot be read.
pub(crate) fn kill_orphans(daemon: &Path) -> io::Result<usize> {
    let Some(mark) = read_mark(daemon)? else { return Ok(0) };
    let orphans = OrphanMatcher {
        mark: format!("{MARK}={mark}"),
        cgroup: read_at_most(Path::new("/proc/self/cgroup"), CGROUP)?,
    };
    let mut killed = 0;
    for process in fs::read_dir("/proc")? {
        killed += usize::from(orphans.kill(&process?.path()).is_some());
    }
    Ok(killed)
}

/// Calls [`kill_orphans`] until no process is left or `timeout` has passed.
pub(crate) async fn kill_orphans_until_gone(daemon: &Path, timeout: Duration) {
    let deadline = Instant::now() + timeout;
    while kill_orphans(daemon).unwrap_or(0) > 0 && Instant::now() < deadline {
        sleep(POLL_INTERVAL).await;
    }
}

/// Properties that identify the processes of a daemon.
struct OrphanMatcher {
    mark: String,
    /// Content of `/proc/PID/cgroup`.
    cgroup: Vec<u8>,
}

impl OrphanMatcher {
    /// Returns true if a process, given by its directory in `/proc`, is the daemon's. A process
    /// that has exited has no environment, even before its parent has waited for it.
    fn matches(&self, process: &Path) -> bool {
        let read = |name, limit| read_at_most(&process.join(name), limit).unwrap_or_default();
        let has_mark = |environment: Vec<u8>| {
            environment.split(|byte| *byte == 0).any(|variable| variable == self.mark.as_bytes())
        };
        read("cgroup", CGROUP) == self.cgroup && has_mark(read("environ", ENVIRONMENT))
    }

    fn kill(&self, process: &Path) -> Option<()> {
        let pid = process.file_name()?.to_str()?.parse().ok().and_then(Pid::from_raw)?;
        self.matches(process).then_some(())?;
        let handle = pidfd_open(pid, PidfdFlags::empty()).ok()?;
        // The PID may have been reused before the handle was opened.
        self.matches(process).then_some(())?;
        pidfd_send_signal(&handle, Signal::KILL).ok()
    }
}

/// Returns the beginning of a file. Some files of `/proc` and `/dev` have no end.
fn read_at_most(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)?.take(limit).read_to_end(&mut bytes)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use std::{
        os::unix::fs::PermissionsExt,
        process::{Child, Command},
    };

    use super::*;

    /// Child process that is killed on drop.
    struct Running(Child);

    impl Running {
        /// Starts a child and waits until its environment is visible, shortly after the spawn.
        fn with(mark: &str) -> Self {
            let child = Command::new("sleep").arg("1000").env(MARK, mark).spawn().expect("started");
            let this = Self(child);
            let environment = format!("/proc/{}/environ", this.0.id());
            while !String::from_utf8_lossy(&fs::read(&environment).expect("readable"))
                .contains(mark)
            {
                std::thread::yield_now();
            }
            this
        }
    }

    impl Drop for Running {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    #[test]
    fn kills_only_processes_with_mark() {
        let daemon = tempfile::tempdir().expect("a directory");
        assert_eq!(kill_orphans(daemon.path()).expect("readable"), 0, "no daemon existed");
        let mark = mark(daemon.path()).expect("made");
        let mut orphan = Running::with(&mark);
        let mut other = Running::with(&daemon.path().display().to_string());
        assert_eq!(kill_orphans(daemon.path()).expect("readable"), 1);
        assert!(!orphan.0.wait().expect("exited").success());
        assert!(other.0.try_wait().expect("waitable").is_none());
    }

    #[test]
    fn process_of_other_cgroup_does_not_match() {
        let proc = tempfile::tempdir().expect("a directory");
        let orphans =
            OrphanMatcher { mark: format!("{MARK}=x"), cgroup: b"0::/supervisor\n".to_vec() };
        let matches = |cgroup: &str, environment: &str| {
            fs::write(proc.path().join("cgroup"), cgroup).expect("written");
            fs::write(proc.path().join("environ"), environment).expect("written");
            orphans.matches(proc.path())
        };
        let marked = format!("A=b\0{MARK}=x\0");
        assert!(matches("0::/supervisor\n", &marked));
        assert!(!matches("0::/supervisor\n", "A=b\0"));
        for other in ["0::/../tenant\n", "0::/supervisor/child\n", ""] {
            assert!(!matches(other, &marked), "{other}");
        }
    }

    #[test]
    fn reads_at_most_one_mebibyte_of_environment() {
        let environment = read_at_most(Path::new("/dev/zero"), ENVIRONMENT).expect("readable");
        assert_eq!((environment.len(), environment.capacity() <= 2 << 20), (1 << 20, true));
        let proc = tempfile::tempdir().expect("a directory");
        std::os::unix::fs::symlink("/dev/zero", proc.path().join("environ")).expect("made");
        for cgroup in ["0::/supervisor\n", "0::/../tenant\n"] {
            fs::write(proc.path().join("cgroup"), cgroup).expect("written");
            assert!(
                !OrphanMatcher { mark: "x".to_owned(), cgroup: b"0::/supervisor\n".to_vec() }
                    .matches(proc.path())
            );
        }
    }

    #[test]
    fn mark_is_stable_and_private() {
        let daemon = tempfile::tempdir().expect("a directory");
        let made = mark(daemon.path()).expect("made");
        assert_eq!(mark(daemon.path()).expect("readable"), made);
        let mode = fs::metadata(daemon.path().join(FILE)).expect("there").permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    }
}
