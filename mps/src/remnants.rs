//! Processes that a daemon has left behind: its servers, which are no children of the keeper.
//!
//! NVIDIA's control daemon starts a server for its clients. Both have a mark in their environment,
//! which is a secret of the daemon's directory: a container that had it, too, would be taken for
//! one of them.
//!
//! They are looked for in the keeper's own cgroup only. When a container ends, its runtime kills
//! what is in the container's cgroup, so nothing that is left is elsewhere; and who is elsewhere is
//! somebody else's process, whose environment may be of any size and content.

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

/// The variable that has the mark.
pub(crate) const MARK: &str = "TESSERA_MPS_DAEMON";

const FILE: &str = "mark";

/// Of `/proc/PID/cgroup` so much is read: far more than the kernel writes.
const CGROUP: u64 = 64 << 10;

/// Of an environment so much is read. A process makes its own as long as it likes (`PR_SET_MM_MAP`
/// in prctl(2)); the mark is near the beginning of what the keeper gave it.
const ENVIRONMENT: u64 = 1 << 20;

const LOOK_EVERY: Duration = Duration::from_millis(20);

/// What the processes of a daemon have in [`MARK`]: the daemon's directory, for people, and the
/// secret. Made if need be.
///
/// # Errors
/// The file cannot be read or made.
pub(crate) fn mark(daemon: &Path) -> io::Result<String> {
    if let Some(mark) = known(daemon)? {
        return Ok(mark);
    }
    let mark = format!("{}:{}", daemon.display(), Uuid::new_v4());
    atomic_file::write(&daemon.join(FILE), mark.as_bytes(), 0o600)?;
    Ok(mark)
}

fn known(daemon: &Path) -> io::Result<Option<String>> {
    match fs::read_to_string(daemon.join(FILE)) {
        Ok(mark) => Ok(Some(mark)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Kills what belongs to the daemon of a directory. How many there were; they may take a while to
/// be gone.
///
/// # Errors
/// The mark or `/proc` cannot be read.
pub(crate) fn kill(daemon: &Path) -> io::Result<usize> {
    let Some(mark) = known(daemon)? else { return Ok(0) };
    let sought = Sought {
        mark: format!("{MARK}={mark}"),
        cgroup: read_at_most(Path::new("/proc/self/cgroup"), CGROUP)?,
    };
    let mut killed = 0;
    for process in fs::read_dir("/proc")? {
        killed += usize::from(sought.kill(&process?.path()).is_some());
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

/// What the processes of a daemon have that others do not.
struct Sought {
    mark: String,
    /// As the kernel says it in `/proc/PID/cgroup`.
    cgroup: Vec<u8>,
}

impl Sought {
    /// Whether a process, by its directory in `/proc`, is the daemon's. One that has ended has no
    /// environment any more, though its parent may not have waited for it.
    fn is(&self, process: &Path) -> bool {
        let read = |name, limit| read_at_most(&process.join(name), limit).unwrap_or_default();
        let has_mark = |environment: Vec<u8>| {
            environment.split(|byte| *byte == 0).any(|variable| variable == self.mark.as_bytes())
        };
        read("cgroup", CGROUP) == self.cgroup && has_mark(read("environ", ENVIRONMENT))
    }

    fn kill(&self, process: &Path) -> Option<()> {
        let pid = process.file_name()?.to_str()?.parse().ok().and_then(Pid::from_raw)?;
        self.is(process).then_some(())?;
        let handle = pidfd_open(pid, PidfdFlags::empty()).ok()?;
        // The number may have become another's before the handle was there.
        self.is(process).then_some(())?;
        pidfd_send_signal(&handle, Signal::KILL).ok()
    }
}

/// The beginning of a file. Some that the kernel makes up have no end of their own.
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

    /// Killed when the test is over, however it ends.
    struct Running(Child);

    impl Running {
        /// It has its environment: a moment after it was spawned.
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
    fn only_what_has_the_mark_is_killed() {
        let daemon = tempfile::tempdir().expect("a directory");
        assert_eq!(kill(daemon.path()).expect("readable"), 0, "there never was a daemon");
        let mark = mark(daemon.path()).expect("made");
        let mut its = Running::with(&mark);
        let mut anothers = Running::with(&daemon.path().display().to_string());
        assert_eq!(kill(daemon.path()).expect("readable"), 1);
        assert!(!its.0.wait().expect("it has ended").success());
        assert!(anothers.0.try_wait().expect("it can be waited for").is_none());
    }

    #[test]
    fn a_process_of_another_cgroup_is_nobodys_whatever_its_environment_says() {
        let proc = tempfile::tempdir().expect("a directory");
        let sought = Sought { mark: format!("{MARK}=x"), cgroup: b"0::/keeper\n".to_vec() };
        let is = |cgroup: &str, environment: &str| {
            fs::write(proc.path().join("cgroup"), cgroup).expect("written");
            fs::write(proc.path().join("environ"), environment).expect("written");
            sought.is(proc.path())
        };
        let marked = format!("A=b\0{MARK}=x\0");
        assert!(is("0::/keeper\n", &marked));
        assert!(!is("0::/keeper\n", "A=b\0"));
        for other in ["0::/../tenant\n", "0::/keeper/child\n", ""] {
            assert!(!is(other, &marked), "{other}");
        }
    }

    #[test]
    fn of_an_environment_without_end_a_mebibyte_is_read() {
        let environment = read_at_most(Path::new("/dev/zero"), ENVIRONMENT).expect("readable");
        assert_eq!((environment.len(), environment.capacity() <= 2 << 20), (1 << 20, true));
        let proc = tempfile::tempdir().expect("a directory");
        std::os::unix::fs::symlink("/dev/zero", proc.path().join("environ")).expect("made");
        for cgroup in ["0::/keeper\n", "0::/../tenant\n"] {
            fs::write(proc.path().join("cgroup"), cgroup).expect("written");
            assert!(
                !Sought { mark: "x".to_owned(), cgroup: b"0::/keeper\n".to_vec() }.is(proc.path())
            );
        }
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
