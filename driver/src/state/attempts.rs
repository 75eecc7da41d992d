//! Prepares under way, visible to all instances of the driver on the node.
//!
//! During a rolling update the kubelet may send the Prepare of a claim to one instance and its
//! Unprepare to another. So each Prepare opens the file `asked/<claim>`, and Unprepare removes it.
//! An attempt whose file was removed is canceled. The open file is the token and stays empty.
//!
//! An attempt whose call was canceled is over, too. The kubelet cancels the Prepare of a deleted
//! pod and then calls Unprepare. Tasks of the two calls run in any order, so the attempt may begin
//! after Unprepare has ended all attempts, and nothing would ever undo what it prepares.

use std::{
    collections::BTreeSet,
    fs::{self, File},
    io,
    os::unix::fs::MetadataExt,
    path::PathBuf,
};

use rustix::{fs::FlockOperation, io::Errno};
use tessera_api::names::ClaimUid;
use tokio_util::sync::CancellationToken;

use super::{StatePaths, journal::LockedJournal};

/// Errors of beginning, checking or ending an attempt.
#[derive(Debug, thiserror::Error)]
#[error("cannot {operation} `{path}`", path = .path.display())]
pub struct AttemptError {
    operation: &'static str,
    path: PathBuf,
    source: io::Error,
}

/// A Prepare under way. It lasts until the claim's next Unprepare, even if the process ends before,
/// or until its call is canceled.
#[derive(Debug)]
pub struct Attempt {
    /// Open, with a shared lock: the lock of a dead process is released, so that its attempts are
    /// found.
    file: File,
    path: PathBuf,
    /// Canceled when the kubelet cancels the call or closes the connection.
    call: CancellationToken,
}

impl Attempt {
    /// Begins an attempt to prepare `claim` for `call`, beside others of the same claim.
    ///
    /// # Errors
    /// [`AttemptError`].
    pub fn begin(
        paths: &StatePaths,
        claim: &ClaimUid,
        call: CancellationToken,
    ) -> Result<Self, AttemptError> {
        let path = paths.asked().join(claim.as_str());
        loop {
            let file = open(paths, &path)?;
            rustix::fs::flock(&file, FlockOperation::LockShared)
                .map_err(|errno| error("lock", &path)(errno.into()))?;
            // The file may have been removed between open and lock.
            if is_linked(&file, &path)? {
                return Ok(Self { file, path, call });
            }
        }
    }

    /// Returns true if the claim was not unprepared since the attempt began, and the kubelet waits
    /// for its result. Under the journal's lock no Unprepare changes the result.
    ///
    /// # Errors
    /// [`AttemptError`].
    pub fn is_current(&self) -> Result<bool, AttemptError> {
        Ok(!self.call.is_cancelled() && is_linked(&self.file, &self.path)?)
    }

    /// Resolves when the call is canceled.
    pub async fn canceled(&self) {
        self.call.cancelled().await;
    }
}

/// Ends all attempts to prepare `claim`, in all instances. No attempt is no error.
///
/// # Errors
/// [`AttemptError`].
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

/// Removes the files of attempts that are over: of dead processes, and of answered calls. Returns
/// their claims.
///
/// # Errors
/// [`AttemptError`]. Files before it are removed.
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
            // A process that opens it now waits for the lock, and then sees that it was removed.
            Ok(()) => fs::remove_file(&path).map_err(error("remove", &path))?,
            // The other instance of an update is preparing the claim.
            Err(Errno::WOULDBLOCK) => continue,
            Err(errno) => return Err(error("lock", &path)(errno.into())),
        }
        swept.insert(claim);
    }
    Ok(swept)
}

/// Returns true if an attempt to prepare `claim` is under way, after [`sweep`].
#[must_use]
pub fn is_under_way(paths: &StatePaths, claim: &ClaimUid) -> bool {
    paths.asked().join(claim.as_str()).exists()
}

fn is_linked(file: &File, path: &std::path::Path) -> Result<bool, AttemptError> {
    let metadata = file.metadata().map_err(error("stat", path))?;
    Ok(metadata.nlink() > 0)
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

    fn begin(paths: &StatePaths, claim: &str) -> Attempt {
        Attempt::begin(paths, &uid(claim), CancellationToken::new()).expect("begun")
    }

    #[test]
    fn unprepare_ends_earlier_attempts_only() {
        let (_directory, paths) = node();
        let journal = JournalStore::new(paths.clone());
        let begin = |claim: &str| begin(&paths, claim);
        let (one, two, other) = (begin("a"), begin("a"), begin("b"));
        end(&paths, &uid("a"), &journal.lock().expect("locked")).expect("ended");
        let after = begin("a");

        let is_current = |attempt: &Attempt| attempt.is_current().expect("checked");
        assert_eq!([&one, &two, &other, &after].map(is_current), [false, false, true, true]);
        end(&paths, &uid("never"), &journal.lock().expect("locked")).expect("no error");
    }

    #[test]
    fn sweeps_attempts_of_dead_processes_only() {
        let (_directory, paths) = node();
        let journal = JournalStore::new(paths.clone());
        let living = begin(&paths, "living");
        drop(begin(&paths, "dead"));
        fs::create_dir(paths.asked().join("stray")).expect("made");

        let swept = sweep(&paths, &journal.lock().expect("locked")).expect("swept");
        assert_eq!(swept, BTreeSet::from(["dead".to_owned()]));
        assert!(living.is_current().expect("checked"));
        assert!(is_under_way(&paths, &uid("living")) && !is_under_way(&paths, &uid("dead")));
        assert!(!paths.asked().join("dead").exists());
    }
}
