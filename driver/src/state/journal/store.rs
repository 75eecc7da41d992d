//! The file of the journal.

use std::{
    fs::{self, File},
    io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, TryLockError},
    thread,
    time::{Duration, Instant},
};

use rustix::{fs::FlockOperation, io::Errno};
use serde::{Deserialize, Serialize};
use tessera_api::names::ClaimUid;
use tessera_runtime::atomic_file;
use tokio::sync::watch;

use super::schema::{ClaimRecord, Journal};
use crate::state::{
    StatePaths,
    shares::{ShareError, claims_with_files},
};

/// Newest version that this driver reads. It writes the oldest version that can represent the
/// content, so that an older driver can read it if possible. An older driver refuses a newer
/// version and changes nothing; an unreadable journal it would rebuild, without the claims it does
/// not understand.
const VERSION: u32 = 5;

/// Longest wait for the lock. Within a Prepare, 40 s, it can be tried again.
const LOCK_TIMEOUT: Duration = Duration::from_secs(15);

/// First and longest pause between attempts to lock.
const FIRST_LOCK_PAUSE: Duration = Duration::from_micros(200);
const LONGEST_LOCK_PAUSE: Duration = Duration::from_millis(10);

/// Errors of reading or writing the journal.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    /// The content is not a journal.
    #[error("journal `{path}` is unreadable: restart the driver, which sets it aside and rebuilds it", path = .path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: serde_json::Error,
    },
    /// The file is missing although claims are prepared.
    #[error("journal `{path}` is missing although claims are prepared: restart the driver, which rebuilds it", path = .path.display())]
    Lost {
        /// The file.
        path: PathBuf,
    },
    /// A newer driver wrote it.
    #[error("journal `{path}` has version {found}, newer than {VERSION} of this driver: run the newer driver, or drain the node before the downgrade", path = .path.display())]
    Newer {
        /// The file.
        path: PathBuf,
        /// Its version.
        found: u32,
    },
    /// The files of claims cannot be listed, so it is unknown whether claims are prepared.
    #[error("cannot list files of claims")]
    Shares(#[from] ShareError),
    /// Another thread or process held the lock for too long.
    #[error("journal lock `{path}` is held by another thread or instance for too long", path = .path.display())]
    Busy {
        /// The lock file.
        path: PathBuf,
    },
    /// An operation failed.
    #[error("cannot {operation} `{path}`", path = .path.display())]
    Io {
        /// The operation.
        operation: &'static str,
        /// The path.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
}

/// The format of the file. The version is first, so that it can be read even if the rest cannot.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Written<'a> {
    version: u32,
    #[serde(flatten)]
    journal: &'a Journal,
}

#[derive(Deserialize)]
struct VersionOnly {
    version: u32,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Read {
    #[serde(rename = "version")]
    _version: u32,
    claims: std::collections::BTreeMap<ClaimUid, ClaimRecord>,
}

/// The identity of the file that was read or written last. A rename changes the inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Identity {
    device: u64,
    inode: u64,
    length: u64,
    changed: (i64, i64),
}

#[derive(Debug)]
struct Cache {
    identity: Option<Identity>,
    journal: Arc<Journal>,
}

/// The journal of this node.
///
/// # Guarantees
/// Changes happen under [`JournalStore::lock`], which excludes other threads and other instances of
/// the driver, and replace the file by a rename. The files that the journal describes (grants,
/// ledgers, CDI specs of claims) are also changed only under that lock. So no process is working on
/// a `Started` claim that is found under it.
#[derive(Debug)]
pub struct JournalStore {
    paths: StatePaths,
    cache: Mutex<Cache>,
    latest: watch::Sender<Arc<Journal>>,
}

/// Result of [`JournalStore::replace_unreadable`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Replaced {
    /// The journal was replaced.
    Now {
        /// The copy of the unreadable journal, or `None` if there was none.
        aside: Option<PathBuf>,
    },
    /// The journal was not replaced: another instance has rebuilt it.
    ByAnother,
}

/// The locked journal. Dropping it unlocks.
#[derive(Debug)]
pub struct LockedJournal<'a> {
    store: &'a JournalStore,
    cache: MutexGuard<'a, Cache>,
    /// Closing it releases the lock, also when the process dies.
    _lock: File,
}

impl JournalStore {
    /// Returns the journal below these paths. Nothing is read yet.
    #[must_use]
    pub fn new(paths: StatePaths) -> Self {
        let cache = Mutex::new(Cache { identity: None, journal: Arc::default() });
        Self { paths, cache, latest: watch::Sender::default() }
    }

    /// Returns a channel of the journal as it was last read or written under the lock.
    #[must_use]
    pub fn watch(&self) -> watch::Receiver<Arc<Journal>> {
        self.latest.subscribe()
    }

    /// Locks the journal and reads it, if another instance changed it. Blocks while it is locked,
    /// normally for milliseconds: no holder waits for the network. A process that is stopped under
    /// the lock blocks others for 15 s at most.
    ///
    /// # Errors
    /// [`JournalError`]. The lock is not held then.
    pub fn lock(&self) -> Result<LockedJournal<'_>, JournalError> {
        self.lock_within(LOCK_TIMEOUT)
    }

    /// As [`lock`](Self::lock), with this longest wait.
    pub(super) fn lock_within(&self, wait: Duration) -> Result<LockedJournal<'_>, JournalError> {
        let (mut cache, lock) = self.lock_both(wait)?;
        let path = self.paths.journal();
        let identity = identity(&path)?;
        if identity.is_none() && !claims_with_files(&self.paths)?.is_empty() {
            return Err(JournalError::Lost { path });
        }
        if identity.is_none() || identity != cache.identity {
            let journal = Arc::new(read(&path)?);
            *cache = Cache { identity, journal };
            self.publish(&cache.journal);
        }
        Ok(LockedJournal { store: self, cache, _lock: lock })
    }

    /// Replaces an unreadable or lost journal by `journal`. Keeps a copy of an unreadable one.
    ///
    /// # Guarantees
    /// The journal is never missing or incomplete in between: an instance that starts then would
    /// remove the files of missing claims.
    ///
    /// # Errors
    /// [`JournalError`]. The unreadable file is unchanged then.
    pub fn replace_unreadable(&self, journal: Journal) -> Result<Replaced, JournalError> {
        let (mut cache, _lock) = self.lock_both(LOCK_TIMEOUT)?;
        let path = self.paths.journal();
        let mut aside = None;
        if identity(&path)?.is_some() {
            match read(&path) {
                Ok(_) => return Ok(Replaced::ByAnother),
                Err(JournalError::Unreadable { .. }) => {}
                Err(error) => return Err(error),
            }
            let copy = aside.insert(path.with_extension("json.unreadable"));
            fs::copy(&path, copy).map_err(io_error("copy", &path))?;
        }
        let identity = write(&path, &journal)?;
        *cache = Cache { identity: Some(identity), journal: Arc::new(journal) };
        self.publish(&cache.journal);
        Ok(Replaced::Now { aside })
    }

    /// Runs `work` under the lock, without reading the journal.
    ///
    /// # Errors
    /// [`JournalError`]. `work` was not run then.
    pub fn exclusively<T>(&self, work: impl FnOnce() -> T) -> Result<T, JournalError> {
        let (_cache, _lock) = self.lock_both(LOCK_TIMEOUT)?;
        Ok(work())
    }

    fn flock(&self, deadline: Instant) -> Result<File, JournalError> {
        fs::create_dir_all(self.paths.root()).map_err(io_error("create", self.paths.root()))?;
        let path = self.paths.journal_lock();
        let options = File::options().create(true).truncate(false).write(true).open(&path);
        let file = options.map_err(io_error("open", &path))?;
        let mut pause = FIRST_LOCK_PAUSE;
        loop {
            match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(file),
                Err(Errno::WOULDBLOCK) if Instant::now() < deadline => {
                    // flock(2) has no deadline, and no event when the lock is released.
                    thread::park_timeout(pause);
                    pause = (pause * 2).min(LONGEST_LOCK_PAUSE);
                }
                Err(Errno::WOULDBLOCK) => return Err(JournalError::Busy { path }),
                Err(errno) => return Err(io_error("lock", &path)(errno.into())),
            }
        }
    }

    /// Locks out other threads, then other instances.
    fn lock_both(&self, wait: Duration) -> Result<(MutexGuard<'_, Cache>, File), JournalError> {
        let deadline = Instant::now() + wait;
        let mut pause = FIRST_LOCK_PAUSE;
        let cache = loop {
            match self.cache.try_lock() {
                Ok(cache) => break cache,
                // A thread that panicked under the lock may have changed files, not the cache:
                // they are read again.
                Err(TryLockError::Poisoned(error)) => break error.into_inner(),
                Err(TryLockError::WouldBlock) if Instant::now() < deadline => {
                    thread::park_timeout(pause);
                    pause = (pause * 2).min(LONGEST_LOCK_PAUSE);
                }
                Err(TryLockError::WouldBlock) => {
                    return Err(JournalError::Busy { path: self.paths.journal_lock() });
                }
            }
        };
        let lock = self.flock(deadline)?;
        Ok((cache, lock))
    }

    fn publish(&self, journal: &Arc<Journal>) {
        self.latest.send_if_modified(|latest| {
            let is_changed = **latest != **journal;
            *latest = Arc::clone(journal);
            is_changed
        });
    }
}

impl LockedJournal<'_> {
    /// Returns the content.
    #[must_use]
    pub fn journal(&self) -> &Journal {
        &self.cache.journal
    }

    /// Returns true if there is no file yet.
    #[must_use]
    pub fn is_new(&self) -> bool {
        self.cache.identity.is_none()
    }

    /// Returns the record of a claim.
    #[must_use]
    pub fn get(&self, claim: &ClaimUid) -> Option<&ClaimRecord> {
        self.cache.journal.claims.get(claim)
    }

    /// Stores the record of `claim` and writes the file.
    ///
    /// # Errors
    /// [`JournalError::Io`]. The file is unchanged then.
    pub fn put(&mut self, claim: ClaimUid, record: ClaimRecord) -> Result<(), JournalError> {
        self.change(|journal| {
            journal.claims.insert(claim, record);
        })
    }

    /// Removes the record of `claim` and writes the file.
    ///
    /// # Errors
    /// [`JournalError::Io`]. The file is unchanged then.
    pub fn remove(&mut self, claim: &ClaimUid) -> Result<(), JournalError> {
        self.change(|journal| {
            journal.claims.remove(claim);
        })
    }

    fn change(&mut self, change: impl FnOnce(&mut Journal)) -> Result<(), JournalError> {
        let mut journal = Journal::clone(&self.cache.journal);
        change(&mut journal);
        let identity = write(&self.store.paths.journal(), &journal)?;
        *self.cache = Cache { identity: Some(identity), journal: Arc::new(journal) };
        self.store.publish(&self.cache.journal);
        Ok(())
    }
}

fn identity(path: &Path) -> Result<Option<Identity>, JournalError> {
    match fs::metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(JournalError::Io { operation: "stat", path: path.to_owned(), source }),
        Ok(metadata) => Ok(Some(Identity {
            device: metadata.dev(),
            inode: metadata.ino(),
            length: metadata.len(),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
        })),
    }
}

fn read(path: &Path) -> Result<Journal, JournalError> {
    let bytes = match fs::read(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Journal::default()),
        bytes => bytes.map_err(io_error("read", path))?,
    };
    let unreadable = |source| JournalError::Unreadable { path: path.to_owned(), source };
    let VersionOnly { version } = serde_json::from_slice(&bytes).map_err(unreadable)?;
    if version > VERSION {
        return Err(JournalError::Newer { path: path.to_owned(), found: version });
    }
    let Read { claims, .. } = serde_json::from_slice(&bytes).map_err(unreadable)?;
    Ok(Journal { claims })
}

fn write(path: &Path, journal: &Journal) -> Result<Identity, JournalError> {
    let content = serde_json::to_vec(&Written { version: journal.version(), journal })
        .expect("invariant: the journal holds nothing that JSON cannot");
    atomic_file::write(path, &content, 0o644).map_err(io_error("write", path))?;
    identity(path)?.ok_or_else(|| io_error("stat", path)(io::ErrorKind::NotFound.into()))
}

fn io_error(operation: &'static str, path: &Path) -> impl FnOnce(io::Error) -> JournalError {
    let path = path.to_owned();
    move |source| JournalError::Io { operation, path, source }
}
