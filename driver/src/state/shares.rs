//! Grants and ledgers: the files with the limits and the usage of a share.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{self, File, Permissions},
    io::{self, Write},
    os::unix::fs::{FileExt, OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
    sync::Arc,
};

use nix::fcntl::OFlag;
use tessera_api::names::{ClaimDeviceName, ClaimUid};
use tessera_intercept_abi::{
    GRANT_LEN, GRANTS_TMPFS_INODES, Grant, GrantError, GrantUpdate, LEDGER_LEN,
    LEDGER_TMPFS_INODES, ledger,
};

use tessera_runtime::atomic_file;

use super::{
    StatePaths,
    mounts::{Mounts, Tmpfs},
};
use crate::fault;

/// Errors of writing or removing grants and ledgers.
#[derive(Debug, thiserror::Error)]
pub enum ShareError {
    /// The grant is invalid, or the existing file is the grant of another share.
    #[error("cannot write grant `{path}`", path = .path.display())]
    Grant {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: GrantError,
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

/// Result of [`ShareFiles::retain`].
#[derive(Debug, Default)]
pub struct CleanupResult {
    /// Shares whose files were removed.
    pub removed: BTreeSet<String>,
    /// Unknown files, which stay.
    pub foreign: Vec<PathBuf>,
    /// Errors of files that could not be removed.
    pub failed: Vec<ShareError>,
}

/// The files of all shares on this node. Callers hold the journal's lock.
#[derive(Clone)]
pub struct ShareFiles {
    paths: StatePaths,
    mounts: Arc<dyn Mounts>,
}

impl std::fmt::Debug for ShareFiles {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ShareFiles").field("paths", &self.paths).finish_non_exhaustive()
    }
}

impl ShareFiles {
    /// Returns the files below `paths`.
    #[must_use]
    pub fn new(paths: StatePaths, mounts: Arc<dyn Mounts>) -> Self {
        Self { paths, mounts }
    }

    /// Mounts the tmpfs of grants, unless it is mounted: the interceptor accepts grants only from a
    /// dedicated tmpfs. It stays until the node reboots.
    ///
    /// # Errors
    /// [`ShareError::Io`]; `EPERM` if the driver may not mount.
    pub fn mount_grants(&self) -> Result<(), ShareError> {
        let directory = self.paths.grants();
        fs::create_dir_all(&directory).map_err(io_error("create", &directory))?;
        if self.mounts.is_mounted(&directory).map_err(io_error("stat", &directory))? {
            return Ok(());
        }
        let size_bytes = GRANTS_TMPFS_INODES * GRANT_LEN as u64;
        let tmpfs = Tmpfs { size_bytes, inodes: GRANTS_TMPFS_INODES, executable: false };
        self.mounts.mount_tmpfs(&directory, tmpfs).map_err(io_error("mount tmpfs at", &directory))
    }

    /// Writes the grant of a share.
    ///
    /// # Guarantees
    /// An existing file keeps its inode and is changed in place, under a sequence number that its
    /// readers check. A new file is created in one step.
    ///
    /// # Errors
    /// [`ShareError`].
    pub fn write_grant(&self, share: &ClaimDeviceName, grant: &Grant) -> Result<(), ShareError> {
        let path = self.paths.grant(share);
        let refused = |source| ShareError::Grant { path: path.clone(), source };
        match fs::read(&path) {
            Ok(current) => {
                let same = Grant::parse(&current)
                    .is_ok_and(|found| Grant { sequence: 0, ..found } == *grant);
                if same {
                    return Ok(());
                }
                let update = grant.update(&current).map_err(refused)?;
                change_in_place(&path, &update).map_err(io_error("change", &path))
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let page = grant.encode().map_err(refused)?;
                create(&path, &page)
            }
            Err(source) => Err(ShareError::Io { operation: "read", path, source }),
        }
    }

    /// Removes the grant. Containers that still have it mounted keep it.
    ///
    /// # Errors
    /// [`ShareError::Io`]. A missing file is no error.
    pub fn remove_grant(&self, share: &ClaimDeviceName) -> Result<(), ShareError> {
        let path = self.paths.grant(share);
        let directory = path.parent().expect("invariant: the path of a grant has a parent");
        remove_tree(directory)?;
        remove_if_empty(&self.paths.claim_grants(share.claim()))
    }

    /// Creates an empty ledger on a tmpfs of its own size, unless it exists.
    ///
    /// # Guarantees
    /// An existing ledger is neither read nor changed: processes may be using it.
    ///
    /// # Errors
    /// [`ShareError::Io`]; `EPERM` if the driver may not mount.
    pub fn make_ledger(&self, share: &ClaimDeviceName) -> Result<(), ShareError> {
        let directory = self.paths.ledger_mount(share);
        fs::create_dir_all(&directory).map_err(io_error("create", &directory))?;
        if !self.mounts.is_mounted(&directory).map_err(io_error("stat", &directory))? {
            let tmpfs = Tmpfs {
                size_bytes: LEDGER_LEN as u64,
                inodes: LEDGER_TMPFS_INODES,
                executable: false,
            };
            self.mounts
                .mount_tmpfs(&directory, tmpfs)
                .map_err(io_error("mount tmpfs at", &directory))?;
            fault::point("prepare-ledger-mounted");
        }
        let path = self.paths.ledger(share);
        match File::options().write(true).create_new(true).open(&path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            Err(source) => Err(ShareError::Io { operation: "create", path, source }),
            Ok(file) => initialise_ledger(file).map_err(io_error("write", &path)),
        }
    }

    /// Returns true if the ledger of the share exists.
    ///
    /// # Errors
    /// [`ShareError::Io`].
    pub fn has_ledger(&self, share: &ClaimDeviceName) -> Result<bool, ShareError> {
        let path = self.paths.ledger(share);
        path.try_exists().map_err(io_error("stat", &path))
    }

    /// Removes the ledger and its tmpfs. Containers that still have it mounted keep it.
    ///
    /// # Errors
    /// [`ShareError::Io`]. A missing file is no error.
    pub fn remove_ledger(&self, share: &ClaimDeviceName) -> Result<(), ShareError> {
        self.remove_ledger_mount(&self.paths.ledger_mount(share))?;
        remove_if_empty(&self.paths.claim_ledgers(share.claim()))
    }

    /// Removes every grant and ledger whose share is not in `keep`.
    ///
    /// # Guarantees
    /// Files of unknown names stay. A file that cannot be removed does not keep others from being
    /// removed.
    ///
    /// # Errors
    /// [`ShareError::Io`], if the directories cannot be listed.
    pub fn retain(&self, keep: &BTreeSet<ClaimDeviceName>) -> Result<CleanupResult, ShareError> {
        let mut cleaned = CleanupResult::default();
        for (parent, ledgers) in [(self.paths.grants(), false), (self.paths.ledgers(), true)] {
            let found = survey(&parent)?;
            for (claim, shares) in found.claims {
                let claim = parent.join(claim.as_str());
                for share in shares.iter().filter(|share| !keep.contains(share)) {
                    let directory = claim.join(share.to_string());
                    let removed = if ledgers {
                        self.remove_ledger_mount(&directory)
                    } else {
                        remove_tree(&directory)
                    };
                    match removed {
                        Ok(()) => drop(cleaned.removed.insert(share.to_string())),
                        Err(error) => cleaned.failed.push(error),
                    }
                }
                cleaned.failed.extend(remove_if_empty(&claim).err());
            }
            cleaned.foreign.extend(found.foreign);
        }
        Ok(cleaned)
    }

    /// Returns the claims that have grants or ledgers.
    ///
    /// # Errors
    /// [`ShareError::Io`].
    pub fn claims(&self) -> Result<BTreeSet<ClaimUid>, ShareError> {
        claims_with_files(&self.paths)
    }

    fn remove_ledger_mount(&self, directory: &Path) -> Result<(), ShareError> {
        // More than one, if instances raced before they shared a lock.
        while self.mounts.is_mounted(directory).map_err(io_error("stat", directory))? {
            self.mounts.unmount(directory).map_err(io_error("unmount", directory))?;
        }
        remove_tree(directory)
    }
}

/// Any user of the container may read a grant. Its owner, the driver, changes it in place, even if
/// it is not root. Containers cannot write it, since their mount is read-only.
const GRANT_MODE: u32 = 0o644;

/// Any user of the container may write a ledger, also one of another user namespace.
const LEDGER_MODE: u32 = 0o666;

/// Opens a grant for reading and writing.
///
/// # Errors
/// [`WouldBlock`](io::ErrorKind::WouldBlock) while a container has a lease on its grant, which
/// would delay the caller by most of a minute. The lease ends by that.
pub fn open_grant(path: &Path) -> io::Result<File> {
    File::options().read(true).write(true).custom_flags(OFlag::O_NONBLOCK.bits()).open(path)
}

fn change_in_place(path: &Path, update: &GrantUpdate) -> io::Result<()> {
    let file = open_grant(path)?;
    let sequence = GrantUpdate::SEQUENCE_OFFSET as u64;
    file.write_all_at(&update.begin, sequence)?;
    file.write_all_at(&update.body, GrantUpdate::BODY_OFFSET as u64)?;
    file.write_all_at(&update.end, sequence)
}

fn create(path: &Path, page: &[u8; GRANT_LEN]) -> Result<(), ShareError> {
    let directory = path.parent().expect("invariant: the path of a grant has a parent");
    fs::create_dir_all(directory).map_err(io_error("create", directory))?;
    atomic_file::write(path, page, GRANT_MODE).map_err(io_error("write", path))
}

fn initialise_ledger(mut file: File) -> io::Result<()> {
    file.write_all(&ledger::initial())?;
    // Sparse: pages are charged to the cgroup of the container that first writes them, and not to
    // the driver.
    file.set_len(LEDGER_LEN as u64)?;
    file.set_permissions(Permissions::from_mode(LEDGER_MODE))
}

fn remove_tree(directory: &Path) -> Result<(), ShareError> {
    match fs::remove_dir_all(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        result => result.map_err(io_error("remove", directory)),
    }
}

fn remove_if_empty(directory: &Path) -> Result<(), ShareError> {
    match fs::remove_dir(directory) {
        Err(error)
            if matches!(
                error.kind(),
                io::ErrorKind::NotFound | io::ErrorKind::DirectoryNotEmpty
            ) =>
        {
            Ok(())
        }
        result => result.map_err(io_error("remove", directory)),
    }
}

/// Content of the directory of all grants, or of all ledgers.
#[derive(Debug, Default)]
struct Survey {
    /// Directories of claims with their shares, also empty ones.
    claims: BTreeMap<ClaimUid, Vec<ClaimDeviceName>>,
    /// Unknown files.
    foreign: Vec<PathBuf>,
}

fn survey(parent: &Path) -> Result<Survey, ShareError> {
    let mut survey = Survey::default();
    for (path, name) in directories(parent, &mut survey.foreign)? {
        let Some(claim) = name.and_then(|name| ClaimUid::new(name).ok()) else {
            survey.foreign.push(path);
            continue;
        };
        let shares = survey.claims.entry(claim.clone()).or_default();
        for (path, name) in directories(&path, &mut survey.foreign)? {
            match name.and_then(|name| share_named(&claim, &name)) {
                Some(share) => shares.push(share),
                None => survey.foreign.push(path),
            }
        }
    }
    Ok(survey)
}

/// Returns the subdirectories, with their names if these are UTF-8, or none if the directory does
/// not exist. Adds other entries to `foreign`.
fn directories(
    parent: &Path,
    foreign: &mut Vec<PathBuf>,
) -> Result<Vec<(PathBuf, Option<String>)>, ShareError> {
    let found = match fs::read_dir(parent) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        found => found.map_err(io_error("list", parent))?,
    };
    let mut directories = Vec::new();
    for entry in found {
        let entry = entry.map_err(io_error("list", parent))?;
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            directories.push((entry.path(), entry.file_name().into_string().ok()));
        } else {
            foreign.push(entry.path());
        }
    }
    Ok(directories)
}

fn share_named(claim: &ClaimUid, name: &str) -> Option<ClaimDeviceName> {
    let result = name.strip_prefix(claim.as_str())?.strip_prefix('-')?;
    let share = match result.parse() {
        Ok(index) => ClaimDeviceName::of_result(claim, index, None),
        Err(_) => ClaimDeviceName::of_result(claim, 0, Some(result)),
    };
    share.ok().filter(|share| share.to_string() == name)
}

/// Returns the claims that have grants or ledgers.
pub(super) fn claims_with_files(paths: &StatePaths) -> Result<BTreeSet<ClaimUid>, ShareError> {
    let mut claims = BTreeSet::new();
    for parent in [paths.grants(), paths.ledgers()] {
        let found = survey(&parent)?.claims;
        claims.extend(
            found.into_iter().filter(|(_, shares)| !shares.is_empty()).map(|(claim, _)| claim),
        );
    }
    Ok(claims)
}

fn io_error(operation: &'static str, path: &Path) -> impl FnOnce(io::Error) -> ShareError {
    let path = path.to_owned();
    move |source| ShareError::Io { operation, path, source }
}

#[cfg(test)]
mod tests;
