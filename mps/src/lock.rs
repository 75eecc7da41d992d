//! The lock that the keeper holds while it runs: there is one keeper, and others can see whether there is.

use std::{
    fs::{self, File},
    io,
    os::unix::fs::FileExt,
};

use rustix::{fs::FlockOperation, io::Errno};

use crate::layout::MpsPaths;

/// Held by the one keeper, until it is dropped or the process ends. Children do not have it: the file closes when they execute.
#[derive(Debug)]
pub struct KeeperLock {
    _file: File,
}

impl KeeperLock {
    /// Takes the lock; `None` where it is held, be it only by somebody who looks whether it is.
    ///
    /// # Errors
    /// The file cannot be made or locked.
    pub fn take(paths: &MpsPaths) -> io::Result<Option<Self>> {
        fs::create_dir_all(paths.root())?;
        let file = File::options().write(true).create(true).truncate(false).open(paths.lock())?;
        if !locked(&file, FlockOperation::NonBlockingLockExclusive)? {
            return Ok(None);
        }
        file.set_len(0)?;
        file.write_all_at(std::process::id().to_string().as_bytes(), 0)?;
        Ok(Some(Self { _file: file }))
    }
}

/// Whether a keeper runs, so that somebody does what is wanted. Looks by a lock that others can share, and lets go of it at once.
///
/// # Errors
/// The file is there and cannot be opened or locked.
pub fn keeper_is_alive(paths: &MpsPaths) -> io::Result<bool> {
    match File::open(paths.lock()) {
        Ok(file) => Ok(!locked(&file, FlockOperation::NonBlockingLockShared)?),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

/// The keeper's PID, as the keeper counts; `None` where there is no keeper, or it has not said yet.
///
/// # Errors
/// The file is there and cannot be read or locked.
pub fn keeper_pid(paths: &MpsPaths) -> io::Result<Option<u32>> {
    if !keeper_is_alive(paths)? {
        return Ok(None);
    }
    Ok(fs::read_to_string(paths.lock())?.parse().ok())
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

    #[test]
    fn a_keeper_is_alive_while_it_holds_the_lock_and_there_is_one() {
        let directory = tempfile::tempdir().expect("a directory");
        let paths = MpsPaths::new(directory.path());
        assert!(!keeper_is_alive(&paths).expect("nobody was ever there"));
        let keeper = KeeperLock::take(&paths).expect("lockable").expect("free");
        assert!(keeper_is_alive(&paths).expect("readable"));
        assert_eq!(keeper_pid(&paths).expect("readable"), Some(std::process::id()));
        assert!(KeeperLock::take(&paths).expect("lockable").is_none(), "there is one");
        drop(keeper);
        assert!(!keeper_is_alive(&paths).expect("readable"));
        assert_eq!(keeper_pid(&paths).expect("readable"), None);
    }
}
