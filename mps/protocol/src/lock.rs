//! Lock of the supervisor: there is only one, and other processes can test if it runs.

use std::{
    fs::{self, File},
    io::{self, Read, Write},
};

use rustix::{fs::FlockOperation, io::Errno};

use crate::layout::MpsPaths;

/// Number of bytes read of the file: a PID and a newline.
const MAX_LENGTH: u64 = 16;

/// Lock of the one supervisor, held until it is dropped or the process exits. Children do not
/// inherit it: the file is closed on exec.
#[derive(Debug)]
pub struct SupervisorLock {
    _file: File,
}

impl SupervisorLock {
    /// Acquires the lock and writes the PID to the file. Returns `None` if the lock is held, be it
    /// only by a process that tests it.
    ///
    /// # Errors
    /// The file cannot be created, locked or written.
    pub fn acquire(paths: &MpsPaths) -> io::Result<Option<Self>> {
        fs::create_dir_all(paths.root())?;
        let mut file =
            File::options().write(true).create(true).truncate(false).open(paths.lock())?;
        if !try_lock(&file, FlockOperation::NonBlockingLockExclusive)? {
            return Ok(None);
        }
        // The file is never replaced: the lock belongs to its inode.
        file.set_len(0)?;
        file.write_all(format!("{}\n", std::process::id()).as_bytes())?;
        Ok(Some(Self { _file: file }))
    }
}

/// Returns true if a supervisor runs. Tests that with a shared lock, which is released at once.
///
/// # Errors
/// The file exists and cannot be opened or locked.
pub fn supervisor_is_running(paths: &MpsPaths) -> io::Result<bool> {
    Ok(open_if_locked(paths)?.is_some())
}

/// Returns the PID of the running supervisor in its PID namespace, which is the host's.
///
/// Returns `None` if none runs, or if it has not written its PID yet. Shortly after a start it may
/// be the PID of the previous supervisor.
///
/// # Errors
/// The file exists and cannot be opened, locked or read.
pub fn supervisor_pid(paths: &MpsPaths) -> io::Result<Option<u32>> {
    let Some(file) = open_if_locked(paths)? else { return Ok(None) };
    let mut text = String::new();
    match file.take(MAX_LENGTH).read_to_string(&mut text) {
        // A PID without newline may be incomplete.
        Ok(_) => Ok(text.strip_suffix('\n').and_then(|pid| pid.parse().ok())),
        Err(error) if error.kind() == io::ErrorKind::InvalidData => Ok(None),
        Err(error) => Err(error),
    }
}

/// Returns the file if a supervisor holds the lock.
fn open_if_locked(paths: &MpsPaths) -> io::Result<Option<File>> {
    match File::open(paths.lock()) {
        Ok(file) => Ok((!try_lock(&file, FlockOperation::NonBlockingLockShared)?).then_some(file)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

fn try_lock(file: &File, operation: FlockOperation) -> io::Result<bool> {
    match rustix::fs::flock(file, operation) {
        Ok(()) => Ok(true),
        Err(Errno::WOULDBLOCK) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Waits until the lock is free: a child that another test starts has every open file of this
    /// process until it executes a program.
    fn wait_until_released(paths: &MpsPaths) {
        let mut polls = 0;
        while supervisor_is_running(paths).expect("readable") {
            polls += 1;
            assert!(polls < 300_000, "the lock is held");
            std::thread::park_timeout(std::time::Duration::from_millis(1));
        }
    }

    #[test]
    fn only_one_supervisor_holds_the_lock() {
        let directory = tempfile::tempdir().expect("a directory");
        let paths = MpsPaths::new(directory.path());
        assert!(!supervisor_is_running(&paths).expect("never locked"));
        let lock = SupervisorLock::acquire(&paths).expect("lockable").expect("free");
        assert!(supervisor_is_running(&paths).expect("readable"));
        assert!(SupervisorLock::acquire(&paths).expect("lockable").is_none(), "already locked");
        drop(lock);
        wait_until_released(&paths);
    }

    #[test]
    fn lock_file_has_pid_of_running_supervisor() {
        let directory = tempfile::tempdir().expect("a directory");
        let paths = MpsPaths::new(directory.path());
        let pid = || supervisor_pid(&paths).expect("readable");
        assert_eq!(pid(), None, "never locked");
        fs::create_dir_all(paths.root()).expect("made");
        fs::write(paths.lock(), "4000000000\n and more").expect("written");
        assert_eq!(pid(), None, "not locked");
        let lock = SupervisorLock::acquire(&paths).expect("lockable").expect("free");
        assert_eq!(pid(), Some(std::process::id()));
        for no_pid in [&b""[..], b"12", b"x\n", b"-1\n", b"\xff\n", b"11111111111111111111\n"] {
            fs::write(paths.lock(), no_pid).expect("written");
            assert_eq!(pid(), None, "{no_pid:?}");
        }
        drop(lock);
        wait_until_released(&paths);
        fs::write(paths.lock(), "1\n").expect("written");
        assert_eq!(pid(), None, "released");
    }
}
