//! The lock of what only one instance of the driver does at a time, and the others leave to it.

use std::{fs::File, io, path::Path};

use rustix::{fs::FlockOperation, io::Errno};

/// Takes the lock of a file, which is made if need be, without waiting; `None` where another has
/// it. Closing the file gives the lock back, also when this process dies.
///
/// # Errors
/// The file cannot be opened or locked.
pub fn take(path: &Path) -> io::Result<Option<File>> {
    let file = File::options().write(true).create(true).truncate(false).open(path)?;
    match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(Some(file)),
        Err(Errno::WOULDBLOCK) => Ok(None),
        Err(error) => Err(error.into()),
    }
}
