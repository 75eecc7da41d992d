//! A directory of CDI spec files that is shared with other programs.

use std::{
    collections::BTreeSet,
    fs, io,
    path::{Path, PathBuf},
};

use serde::Deserialize;
use tessera_runtime::atomic_file;

use crate::{name::CdiKind, spec::Spec, validate::ValidationError};

/// Error of a read or change of the directory.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The spec is invalid and was not written.
    #[error("refusing to write invalid CDI spec `{path}`", path = .path.display())]
    Invalid {
        /// Path of the file.
        path: PathBuf,
        /// The violated rule.
        source: ValidationError,
    },
    /// The file exists and was not created by Tessera.
    #[error("refusing to overwrite CDI spec `{path}`: not created by Tessera (remove it or set --cdi-dir)", path = .path.display())]
    NotManaged {
        /// Path of the file.
        path: PathBuf,
    },
    /// An operation of the file system failed.
    #[error("cannot {operation} `{path}`", path = .path.display())]
    Io {
        /// Operation that failed.
        operation: &'static str,
        /// Path of the file or directory.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
}

/// Name of a spec file of Tessera: `<vendor>-<class>.json`, or `<vendor>-<class>_<id>.json` if the
/// kind has several.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SpecFile {
    kind: CdiKind,
    id: Option<String>,
}

impl SpecFile {
    /// Returns the only file of this kind.
    #[must_use]
    pub fn for_kind(kind: CdiKind) -> Self {
        Self { kind, id: None }
    }

    /// Returns the file of this kind for `id`.
    ///
    /// # Panics
    /// Panics if `id` is empty or has a path separator. Callers pass UIDs.
    #[must_use]
    pub fn for_id(kind: CdiKind, id: &str) -> Self {
        assert!(
            !id.is_empty() && !id.contains(['/', '\0']),
            "invariant: ids of CDI files are UIDs"
        );
        Self { kind, id: Some(id.to_owned()) }
    }

    fn file_name(&self) -> String {
        let (vendor, class) = (self.kind.vendor(), self.kind.class());
        match &self.id {
            Some(id) => format!("{vendor}-{class}_{id}.json"),
            None => format!("{vendor}-{class}.json"),
        }
    }
}

/// Result of [`SpecStore::write`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpecWriteOutcome {
    /// The file had the same content and was not written.
    Unchanged,
    /// The file was created or replaced.
    Changed,
}

/// Result of [`SpecStore::retain`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RetainOutcome {
    /// Ids of the removed files.
    pub removed: Vec<String>,
    /// Files with a matching name that are of another kind or invalid. They are left alone.
    pub unmanaged: Vec<PathBuf>,
}

/// The field that identifies the writer of a file; the rest may be anything.
#[derive(Deserialize)]
struct KindOnly {
    kind: CdiKind,
}

/// A directory of CDI specs.
///
/// # Guarantees
/// A reader sees a file's old content or its new one, never a part. A file is managed by Tessera if
/// its name *and* its kind match; no other file is changed or removed.
#[derive(Clone, Debug)]
pub struct SpecStore {
    directory: PathBuf,
}

impl SpecStore {
    /// Returns the store at `directory`, which the first write creates.
    #[must_use]
    pub fn new(directory: impl Into<PathBuf>) -> Self {
        Self { directory: directory.into() }
    }

    /// Returns the path of `file`.
    #[must_use]
    pub fn path(&self, file: &SpecFile) -> PathBuf {
        self.directory.join(file.file_name())
    }

    /// Writes `spec` to a temporary file, which runtimes ignore, and renames it.
    ///
    /// # Errors
    /// Returns [`StoreError::Invalid`] if the spec is invalid, [`StoreError::NotManaged`] if the
    /// file is of another kind, and [`StoreError::Io`] if it cannot be written.
    pub fn write(&self, file: &SpecFile, spec: &Spec) -> Result<SpecWriteOutcome, StoreError> {
        let path = self.path(file);
        spec.validate().map_err(|source| StoreError::Invalid { path: path.clone(), source })?;
        debug_assert_eq!(spec.kind, file.kind, "file name and content have the same kind");
        let mut content =
            serde_json::to_vec_pretty(spec).expect("invariant: the models are plain data");
        content.push(b'\n');

        match read(&path)? {
            Some(found) if found == content => return Ok(SpecWriteOutcome::Unchanged),
            Some(found) if !is_of_kind(&found, &file.kind) => {
                return Err(StoreError::NotManaged { path });
            }
            _ => {}
        }
        fs::create_dir_all(&self.directory).map_err(io_error("create", &self.directory))?;
        // Runtimes read only `.json` and `.yaml`: the suffix of the temporary file hides it from
        // them.
        atomic_file::write(&path, &content, 0o644).map_err(io_error("write", &path))?;
        Ok(SpecWriteOutcome::Changed)
    }

    /// Returns the spec in `file`, or `None` if the file does not exist or is not a spec of this
    /// store.
    ///
    /// # Errors
    /// Returns [`StoreError::Io`] if the file cannot be read.
    pub fn read(&self, file: &SpecFile) -> Result<Option<Spec>, StoreError> {
        let spec: Option<Spec> =
            read(&self.path(file))?.and_then(|bytes| serde_json::from_slice(&bytes).ok());
        Ok(spec.filter(|spec| spec.kind == file.kind))
    }

    /// Removes `file`; returns false if there is no managed file to remove.
    ///
    /// # Errors
    /// Returns [`StoreError::Io`] if the file cannot be read or removed.
    pub fn remove(&self, file: &SpecFile) -> Result<bool, StoreError> {
        let path = self.path(file);
        if path.is_dir() {
            return Ok(false);
        }
        let Some(found) = read(&path)? else { return Ok(false) };
        if !is_of_kind(&found, &file.kind) {
            return Ok(false);
        }
        match fs::remove_file(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(source) => Err(StoreError::Io { operation: "remove", path, source }),
            Ok(()) => Ok(true),
        }
    }

    /// Returns the ids of the files of this kind, sorted.
    ///
    /// # Errors
    /// Returns [`StoreError::Io`] if the directory cannot be read.
    pub fn ids(&self, kind: &CdiKind) -> Result<BTreeSet<String>, StoreError> {
        let (managed, _) = self.scan(kind)?;
        Ok(managed)
    }

    /// Removes every file of this kind whose id is not in `keep`, and temporary files of
    /// interrupted writes.
    ///
    /// The caller holds the writers' lock: no file of this kind may be written at the same time.
    ///
    /// # Errors
    /// Returns [`StoreError::Io`] at the first error; files before it have been removed.
    pub fn retain(
        &self,
        kind: &CdiKind,
        keep: &BTreeSet<String>,
    ) -> Result<RetainOutcome, StoreError> {
        let (managed, foreign) = self.scan(kind)?;
        let mut cleaned = RetainOutcome { removed: Vec::new(), unmanaged: foreign };
        for id in managed.difference(keep) {
            if self.remove(&SpecFile::for_id(kind.clone(), id))? {
                cleaned.removed.push(id.clone());
            }
        }
        for name in self.entries()? {
            if name.starts_with(&temporary_prefix(kind)) && name.ends_with(TEMPORARY_SUFFIX) {
                let path = self.directory.join(name);
                fs::remove_file(&path).map_err(io_error("remove", &path))?;
            }
        }
        Ok(cleaned)
    }

    /// Returns the ids of the managed files of this kind, and the paths of files that only have a
    /// matching name.
    fn scan(&self, kind: &CdiKind) -> Result<(BTreeSet<String>, Vec<PathBuf>), StoreError> {
        let prefix = format!("{}-{}_", kind.vendor(), kind.class());
        let (mut managed, mut foreign) = (BTreeSet::new(), Vec::new());
        for name in self.entries()? {
            let id = name.strip_prefix(&prefix).and_then(|rest| rest.strip_suffix(".json"));
            let Some(id) = id.filter(|id| !id.is_empty()) else { continue };
            let path = self.directory.join(&name);
            match read(&path) {
                Ok(None) => {}
                Ok(Some(found)) if is_of_kind(&found, kind) => {
                    managed.insert(id.to_owned());
                }
                // A directory or an unreadable file is not managed.
                Ok(Some(_)) | Err(_) => foreign.push(path),
            }
        }
        foreign.sort();
        Ok((managed, foreign))
    }

    fn entries(&self) -> Result<Vec<String>, StoreError> {
        let entries = match fs::read_dir(&self.directory) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.map_err(io_error("list", &self.directory))?,
        };
        let mut names = Vec::new();
        for entry in entries {
            let entry = entry.map_err(io_error("list", &self.directory))?;
            names.extend(entry.file_name().into_string());
        }
        Ok(names)
    }
}

/// Suffix of temporary files of [`atomic_file`].
const TEMPORARY_SUFFIX: &str = ".tmp";

fn temporary_prefix(kind: &CdiKind) -> String {
    format!(".{}-{}_", kind.vendor(), kind.class())
}

fn is_of_kind(content: &[u8], kind: &CdiKind) -> bool {
    serde_json::from_slice::<KindOnly>(content).is_ok_and(|found| found.kind == *kind)
}

fn read(path: &Path) -> Result<Option<Vec<u8>>, StoreError> {
    match fs::read(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(StoreError::Io { operation: "read", path: path.to_owned(), source }),
        Ok(bytes) => Ok(Some(bytes)),
    }
}

fn io_error(operation: &'static str, path: &Path) -> impl FnOnce(io::Error) -> StoreError {
    let path = path.to_owned();
    move |source| StoreError::Io { operation, path, source }
}
