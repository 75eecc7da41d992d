//! The lock that the keeper holds while it runs: there is one keeper, and others can see whether
//! there is.

use std::{
    fs::{self, File},
    io::{self, Read, Write},
};

use rustix::{fs::FlockOperation, io::Errno};

use crate::layout::MpsPaths;

/// Of the file so much is read: a PID and the end of its line.
const PID: u64 = 16;

/// Held by the one keeper, until it is dropped or the process ends. Children do not have it: the
/// file closes when they execute.
#[derive(Debug)]
pub struct KeeperLock {
    _file: File,
}

impl KeeperLock {
    /// Takes the lock, and says in the file which process that is; `None` where it is held, be it
    /// only by somebody who looks whether it is.
    ///
    /// # Errors
    /// The file cannot be made, locked or written.
    pub fn take(paths: &MpsPaths) -> io::Result<Option<Self>> {
        fs::create_dir_all(paths.root())?;
        let mut file =
            File::options().write(true).create(true).truncate(false).open(paths.lock())?;
        if !locked(&file, FlockOperation::NonBlockingLockExclusive)? {
            return Ok(None);
        }
        // Never another file in its place: that would be another lock.
        file.set_len(0)?;
        file.write_all(format!("{}\n", std::process::id()).as_bytes())?;
        Ok(Some(Self { _file: file }))
    }
}

/// Whether a keeper runs, so that somebody does what is wanted. Looks by a lock that others can
/// share, and lets go of it at once.
///
/// # Errors
/// The file is there and cannot be opened or locked.
pub fn keeper_is_alive(paths: &MpsPaths) -> io::Result<bool> {
    Ok(held(paths)?.is_some())
}

/// The PID of the keeper that runs, in its own PID namespace, which is the host's; `None` where
/// none runs, or has not said so yet. For a moment after its start it may be that of the one
/// before.
///
/// # Errors
/// The file is there and cannot be opened, locked or read.
pub fn keeper_pid(paths: &MpsPaths) -> io::Result<Option<u32>> {
    let Some(file) = held(paths)? else { return Ok(None) };
    let mut text = String::new();
    match file.take(PID).read_to_string(&mut text) {
        // Without the end of its line it is not all of it.
        Ok(_) => Ok(text.strip_suffix('\n').and_then(|pid| pid.parse().ok())),
        Err(error) if error.kind() == io::ErrorKind::InvalidData => Ok(None),
        Err(error) => Err(error),
    }
}

/// The file, while a keeper holds the lock.
fn held(paths: &MpsPaths) -> io::Result<Option<File>> {
    match File::open(paths.lock()) {
        Ok(file) => Ok((!locked(&file, FlockOperation::NonBlockingLockShared)?).then_some(file)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

fn locked(file: &File, operation: FlockOperation) -> io::Result<bool> {
    match rustix::fs::flock(file, operation) {
        Ok(()) => Ok(true),
        Err(Errno::WOULDBLOCK) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Waits until nobody holds the lock: what another test starts has every open file of this
    /// process until it executes a program.
    fn gone(paths: &MpsPaths) {
        let mut looks = 0;
        while keeper_is_alive(paths).expect("readable") {
            looks += 1;
            assert!(looks < 300_000, "the lock is held");
            std::thread::park_timeout(std::time::Duration::from_millis(1));
        }
    }

    #[test]
    fn a_keeper_is_alive_while_it_holds_the_lock_and_there_is_one() {
        let directory = tempfile::tempdir().expect("a directory");
        let paths = MpsPaths::new(directory.path());
        assert!(!keeper_is_alive(&paths).expect("nobody was ever there"));
        let keeper = KeeperLock::take(&paths).expect("lockable").expect("free");
        assert!(keeper_is_alive(&paths).expect("readable"));
        assert!(KeeperLock::take(&paths).expect("lockable").is_none(), "there is one");
        drop(keeper);
        gone(&paths);
    }

    #[test]
    fn the_file_says_which_process_the_keeper_is_while_there_is_one() {
        let directory = tempfile::tempdir().expect("a directory");
        let paths = MpsPaths::new(directory.path());
        let pid = || keeper_pid(&paths).expect("readable");
        assert_eq!(pid(), None, "nobody was ever there");
        fs::create_dir_all(paths.root()).expect("made");
        fs::write(paths.lock(), "4000000000\n and more").expect("written");
        assert_eq!(pid(), None, "nobody holds the lock");
        let keeper = KeeperLock::take(&paths).expect("lockable").expect("free");
        assert_eq!(pid(), Some(std::process::id()));
        for no_pid in [&b""[..], b"12", b"x\n", b"-1\n", b"\xff\n", b"11111111111111111111\n"] {
            fs::write(paths.lock(), no_pid).expect("written");
            assert_eq!(pid(), None, "{no_pid:?}");
        }
        drop(keeper);
        gone(&paths);
        fs::write(paths.lock(), "1\n").expect("written");
        assert_eq!(pid(), None, "it is gone");
    }
}
