//! Prepares under way, as every instance of the driver on the node sees them.
//!
//! During a rolling update the kubelet may send a claim's Prepare to one instance and its Unprepare
//! to another. So whoever prepares a claim first has the file `asked/<claim>`, and Unprepare
//! removes it: an attempt whose file has no name any more has been unprepared meanwhile, whoever
//! did it, and gives up. The open file is the token; nothing is written into it.

use std::{
    collections::BTreeSet,
    fs::{self, File},
    io,
    os::unix::fs::MetadataExt,
    path::PathBuf,
};

use rustix::{fs::FlockOperation, io::Errno};
use tessera_api::names::ClaimUid;

use super::{StatePaths, journal::LockedJournal};

/// Why an attempt could not be begun, looked at or ended.
#[derive(Debug, thiserror::Error)]
#[error("failed to {operation} `{path}`", path = .path.display())]
pub struct AttemptError {
    /// What was tried.
    operation: &'static str,
    /// On what.
    path: PathBuf,
    /// What the operating system said.
    source: io::Error,
}

/// A Prepare under way. It lasts until the claim's next Unprepare, also beyond the end of the
/// process.
#[derive(Debug)]
pub struct Attempt {
    /// Open, and locked by whoever has it: a lock dies with its process, so that the attempts of
    /// the dead can be told.
    file: File,
    path: PathBuf,
}

impl Attempt {
    /// Begins to prepare `claim`, or joins those who have.
    ///
    /// # Errors
    /// [`AttemptError`].
    pub fn begin(paths: &StatePaths, claim: &ClaimUid) -> Result<Self, AttemptError> {
        let path = paths.asked().join(claim.as_str());
        loop {
            let file = open(paths, &path)?;
            rustix::fs::flock(&file, FlockOperation::LockShared)
                .map_err(|errno| error("lock", &path)(errno.into()))?;
            let attempt = Self { file, path: path.clone() };
            // Between opening and locking, it may have been removed.
            if attempt.stands()? {
                return Ok(attempt);
            }
        }
    }

    /// Whether nobody has unprepared the claim since the attempt began. Under the journal's lock
    /// the answer stays true.
    ///
    /// # Errors
    /// [`AttemptError`].
    pub fn stands(&self) -> Result<bool, AttemptError> {
        let metadata = self.file.metadata().map_err(error("look at", &self.path))?;
        Ok(metadata.nlink() > 0)
    }
}

/// Ends all attempts to prepare `claim`, in whichever instance.
///
/// # Errors
/// [`AttemptError`]; none is no error.
pub fn end(
    paths: &StatePaths,
    claim: &ClaimUid,
    _: &LockedJournal<'_>,
) -> Result<(), AttemptError> {
    let path = paths.asked().join(claim.as_str());
    match fs::remove_file(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        result => result.map_err(error("remove", &path)),
    }
}

/// Removes what attempts have left that are over: of the dead, and of those that were answered.
/// Returns whose they were.
///
/// # Errors
/// [`AttemptError`]; what came before it is done.
pub fn sweep(paths: &StatePaths, _: &LockedJournal<'_>) -> Result<BTreeSet<String>, AttemptError> {
    let directory = paths.asked();
    let entries = match fs::read_dir(&directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(BTreeSet::new()),
        entries => entries.map_err(error("list", &directory))?,
    };
    let mut swept = BTreeSet::new();
    for entry in entries {
        let entry = entry.map_err(error("list", &directory))?;
        let Ok(claim) = entry.file_name().into_string() else { continue };
        if !entry.file_type().is_ok_and(|kind| kind.is_file()) {
            continue;
        }
        let path = entry.path();
        let file = File::open(&path).map_err(error("open", &path))?;
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            // Who opens it now waits for the lock, and sees then that it has no name.
            Ok(()) => fs::remove_file(&path).map_err(error("remove", &path))?,
            // Somebody is at it: the other instance of an update.
            Err(Errno::WOULDBLOCK) => continue,
            Err(errno) => return Err(error("lock", &path)(errno.into())),
        }
        swept.insert(claim);
    }
    Ok(swept)
}

/// Whether somebody is at an attempt to prepare `claim`, once those that are over have been swept.
#[must_use]
pub fn is_under_way(paths: &StatePaths, claim: &ClaimUid) -> bool {
    paths.asked().join(claim.as_str()).exists()
}

fn open(paths: &StatePaths, path: &PathBuf) -> Result<File, AttemptError> {
    let open = || File::options().create(true).truncate(false).write(true).open(path);
    match open() {
        Err(missing) if missing.kind() == io::ErrorKind::NotFound => {
            let directory = paths.asked();
            fs::create_dir_all(&directory).map_err(error("create", &directory))?;
            open().map_err(error("open", path))
        }
        file => file.map_err(error("open", path)),
    }
}

fn error(
    operation: &'static str,
    path: &std::path::Path,
) -> impl FnOnce(io::Error) -> AttemptError {
    let path = path.to_owned();
    move |source| AttemptError { operation, path, source }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::journal::JournalStore;

    fn uid(text: &str) -> ClaimUid {
        ClaimUid::new(text).expect("a UID")
    }

    fn node() -> (tempfile::TempDir, StatePaths) {
        let directory = tempfile::tempdir().expect("a directory");
        let paths = StatePaths::new(directory.path().join("state"));
        (directory, paths)
    }

    #[test]
    fn an_unprepare_ends_all_attempts_before_it_and_none_after_it() {
        let (_directory, paths) = node();
        let journal = JournalStore::new(paths.clone());
        let begin = |claim: &str| Attempt::begin(&paths, &uid(claim)).expect("begun");
        let (one, two, other) = (begin("a"), begin("a"), begin("b"));
        end(&paths, &uid("a"), &journal.lock().expect("locked")).expect("ended");
        let after = begin("a");

        let stands = |attempt: &Attempt| attempt.stands().expect("looked at");
        assert_eq!([&one, &two, &other, &after].map(stands), [false, false, true, true]);
        end(&paths, &uid("never"), &journal.lock().expect("locked")).expect("no error");
    }

    #[test]
    fn attempts_of_the_dead_are_swept_and_those_of_the_living_stay() {
        let (_directory, paths) = node();
        let journal = JournalStore::new(paths.clone());
        let living = Attempt::begin(&paths, &uid("living")).expect("begun");
        drop(Attempt::begin(&paths, &uid("dead")).expect("begun"));
        fs::create_dir(paths.asked().join("stray")).expect("made");

        let swept = sweep(&paths, &journal.lock().expect("locked")).expect("swept");
        assert_eq!(swept, BTreeSet::from(["dead".to_owned()]));
        assert!(living.stands().expect("looked at"));
        assert!(is_under_way(&paths, &uid("living")) && !is_under_way(&paths, &uid("dead")));
        assert!(!paths.asked().join("dead").exists());
    }
}
