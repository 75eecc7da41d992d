//! The journal's file.

use std::{
    fs::{self, File},
    io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use rustix::fs::FlockOperation;
use serde::{Deserialize, Serialize};
use tessera_api::names::ClaimUid;
use tokio::sync::watch;

use super::schema::{ClaimRecord, Journal};
use crate::state::{
    StatePaths,
    shares::{ShareError, claims_with_files},
};

/// The newest version that is read. What is written is the oldest that can say it, so that an older
/// driver reads it where it can, and where it cannot leaves everything alone: one that it finds
/// unreadable it rebuilds, without the claims that it does not understand.
const VERSION: u32 = 3;

/// Why the journal cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    /// Its content is not a journal.
    #[error("journal `{path}` is unreadable: restart the driver, which sets it aside and rebuilds it", path = .path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: serde_json::Error,
    },
    /// It is not there, and claims are prepared.
    #[error("journal `{path}` is gone, and claims are prepared: restart the driver, which rebuilds it", path = .path.display())]
    Lost {
        /// The file.
        path: PathBuf,
    },
    /// A newer driver wrote it, and is or was at work on this node.
    #[error("journal `{path}` has version {found}, this driver knows {VERSION}: let the newer driver work, or drain the node before going back", path = .path.display())]
    Newer {
        /// The file.
        path: PathBuf,
        /// Its version.
        found: u32,
    },
    /// Whether claims are prepared cannot be told.
    #[error("the files of claims cannot be looked at")]
    Shares(#[from] ShareError),
    /// The operating system said no.
    #[error("failed to {operation} `{path}`", path = .path.display())]
    Io {
        /// What was tried.
        operation: &'static str,
        /// On what.
        path: PathBuf,
        /// What it said.
        source: io::Error,
    },
}

/// The file's form: the version first, so that it can be read when the rest cannot.
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

/// Tells whether the file is still the one that was read or written last: a rename brings another
/// inode.
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
/// the driver, and reach the file by rename. Everything that the journal describes (grants,
/// ledgers, CDI specs of claims) is changed only under that lock too; so a `Started` claim that is
/// found under it is nobody's work any more.
#[derive(Debug)]
pub struct JournalStore {
    paths: StatePaths,
    cache: Mutex<Cache>,
    latest: watch::Sender<Arc<Journal>>,
}

/// What [`JournalStore::replace_unreadable`] did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Replaced {
    /// The journal is there now.
    Now {
        /// Where the unreadable one is kept; `None` where there was none.
        aside: Option<PathBuf>,
    },
    /// Nothing: the journal can be read after all. Another instance has rebuilt it, and knows
    /// better.
    ByAnother,
}

/// The journal, locked. Dropping it unlocks.
#[derive(Debug)]
pub struct LockedJournal<'a> {
    store: &'a JournalStore,
    cache: MutexGuard<'a, Cache>,
    /// Closing it gives the lock back, also when this process dies.
    _lock: File,
}

impl JournalStore {
    /// The journal below these paths; nothing is read yet.
    #[must_use]
    pub fn new(paths: StatePaths) -> Self {
        let cache = Mutex::new(Cache { identity: None, journal: Arc::default() });
        Self { paths, cache, latest: watch::Sender::default() }
    }

    /// The journal as it was last seen under the lock, and word of every change.
    #[must_use]
    pub fn watch(&self) -> watch::Receiver<Arc<Journal>> {
        self.latest.subscribe()
    }

    /// Locks the journal and reads it, if somebody else changed it. Blocks while another holds it,
    /// which is milliseconds: nobody waits for the network under it.
    ///
    /// # Errors
    /// [`JournalError`]; the lock is not held then.
    pub fn lock(&self) -> Result<LockedJournal<'_>, JournalError> {
        // A thread that panicked under the lock left files, not this cache, in between: read them
        // again.
        let mut cache = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        let lock = self.flock()?;
        let path = self.paths.journal();
        let identity = identity(&path)?;
        if identity.is_none() && !claims_with_files(&self.paths)?.is_empty() {
            return Err(JournalError::Lost { path });
        }
        if identity.is_none() || identity != cache.identity {
            let journal = Arc::new(read(&path)?);
            *cache = Cache { identity, journal };
            self.tell(&cache.journal);
        }
        Ok(LockedJournal { store: self, cache, _lock: lock })
    }

    /// Writes `journal` in place of an unreadable or lost one. An unreadable one is kept as a copy,
    /// so that it can be looked at.
    ///
    /// # Guarantees
    /// At no instant is there no journal, or one with a part of the claims: whoever starts then
    /// would take the rest for nobody's.
    ///
    /// # Errors
    /// [`JournalError`]; the unreadable file is still there.
    pub fn replace_unreadable(&self, journal: Journal) -> Result<Replaced, JournalError> {
        let mut cache = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        let _lock = self.flock()?;
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
        self.tell(&cache.journal);
        Ok(Replaced::Now { aside })
    }

    /// Does `work` under the lock, whatever the journal says.
    ///
    /// # Errors
    /// [`JournalError::Io`]; nothing was done.
    pub fn exclusively<T>(&self, work: impl FnOnce() -> T) -> Result<T, JournalError> {
        let _cache = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        let _lock = self.flock()?;
        Ok(work())
    }

    fn flock(&self) -> Result<File, JournalError> {
        fs::create_dir_all(self.paths.root()).map_err(io_error("create", self.paths.root()))?;
        let path = self.paths.journal_lock();
        let options = File::options().create(true).truncate(false).write(true).open(&path);
        let file = options.map_err(io_error("open", &path))?;
        rustix::fs::flock(&file, FlockOperation::LockExclusive)
            .map_err(|errno| io_error("lock", &path)(errno.into()))?;
        Ok(file)
    }

    fn tell(&self, journal: &Arc<Journal>) {
        self.latest.send_if_modified(|latest| {
            let news = **latest != **journal;
            *latest = Arc::clone(journal);
            news
        });
    }
}

impl LockedJournal<'_> {
    /// What it says.
    #[must_use]
    pub fn journal(&self) -> &Journal {
        &self.cache.journal
    }

    /// Whether there is no file yet.
    #[must_use]
    pub fn is_new(&self) -> bool {
        self.cache.identity.is_none()
    }

    /// What it says about one claim.
    #[must_use]
    pub fn get(&self, claim: &ClaimUid) -> Option<&ClaimRecord> {
        self.cache.journal.claims.get(claim)
    }

    /// Records `claim` and writes the file.
    ///
    /// # Errors
    /// [`JournalError::Io`]; the file is as before.
    pub fn put(&mut self, claim: ClaimUid, record: ClaimRecord) -> Result<(), JournalError> {
        self.change(|journal| {
            journal.claims.insert(claim, record);
        })
    }

    /// Forgets `claim` and writes the file.
    ///
    /// # Errors
    /// [`JournalError::Io`]; the file is as before.
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
        self.store.tell(&self.cache.journal);
        Ok(())
    }
}

fn identity(path: &Path) -> Result<Option<Identity>, JournalError> {
    match fs::metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => {
            Err(JournalError::Io { operation: "look at", path: path.to_owned(), source })
        }
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
    // One name suffices: only the holder of the lock writes.
    let temporary = path.with_extension("json.new");
    fs::write(&temporary, content).map_err(io_error("write", &temporary))?;
    fs::rename(&temporary, path).map_err(io_error("rename to", path))?;
    identity(path)?.ok_or_else(|| io_error("look at", path)(io::ErrorKind::NotFound.into()))
}

fn io_error(operation: &'static str, path: &Path) -> impl FnOnce(io::Error) -> JournalError {
    let path = path.to_owned();
    move |source| JournalError::Io { operation, path, source }
}
