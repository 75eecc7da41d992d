//! Locks of work that only one instance of the driver does at a time.

use std::{fs::File, io, path::Path};

use rustix::{fs::FlockOperation, io::Errno};

/// Locks a file, which is created if missing, without waiting. Returns `None` if another process
/// holds the lock. Closing the file releases it, also when the process dies.
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

/// Takes the lock of a file unless `held` has it already. Returns true if `held` has it now.
///
/// # Errors
/// As [`take`].
pub fn hold(held: &mut Option<File>, path: &Path) -> io::Result<bool> {
    if held.is_none() {
        *held = take(path)?;
    }
    Ok(held.is_some())
}
