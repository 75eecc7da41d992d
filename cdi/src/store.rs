//! A directory of CDI spec files that other programs also write to.

use std::{
    collections::BTreeSet,
    fs, io,
    path::{Path, PathBuf},
};

use serde::Deserialize;
use tessera_runtime::atomic_file;

use crate::{name::Kind, spec::Spec, validate::ValidationError};

/// Why the directory could not be read or changed.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// A spec that a runtime would refuse is not written.
    #[error("CDI spec `{path}` was not written because it is not valid", path = .path.display())]
    Invalid {
        /// The file it would have been.
        path: PathBuf,
        /// What is wrong.
        source: ValidationError,
    },
    /// The file is there, is not ours, and stays.
    #[error("CDI spec `{path}` belongs to somebody else: move it away or choose another --cdi-dir", path = .path.display())]
    Foreign {
        /// The file.
        path: PathBuf,
    },
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

/// Names a spec file of ours: `<vendor>-<class>.json`, or `<vendor>-<class>_<id>.json` for one of
/// many.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SpecFile {
    kind: Kind,
    id: Option<String>,
}

impl SpecFile {
    /// The one file of this kind.
    #[must_use]
    pub fn only(kind: Kind) -> Self {
        Self { kind, id: None }
    }

    /// The file of this kind for `id`.
    ///
    /// # Panics
    /// Never for UIDs; an id with a path separator in it is a programming error.
    #[must_use]
    pub fn of(kind: Kind, id: &str) -> Self {
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

/// What [`SpecStore::write`] found and did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Written {
    /// The file was there with this very content and was not touched.
    Unchanged,
    /// The file is new, or has new content.
    Changed,
}

/// What [`SpecStore::retain`] did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cleaned {
    /// Ids whose files were removed.
    pub removed: Vec<String>,
    /// Files that are named like ours and are of another kind, or of none: left alone.
    pub foreign: Vec<PathBuf>,
}

/// The only field that tells whose a file is; the rest of a foreign file may be anything.
#[derive(Deserialize)]
struct KindOnly {
    kind: Kind,
}

/// A directory of CDI specs.
///
/// # Guarantees
/// A reader sees a file's old content or its new one, never a part. A file is ours if its name
/// *and* its kind say so; no other file is changed or removed.
#[derive(Clone, Debug)]
pub struct SpecStore {
    directory: PathBuf,
}

impl SpecStore {
    /// The store at `directory`, which is created by the first write.
    #[must_use]
    pub fn new(directory: impl Into<PathBuf>) -> Self {
        Self { directory: directory.into() }
    }

    /// Where `file` is, or would be.
    #[must_use]
    pub fn path(&self, file: &SpecFile) -> PathBuf {
        self.directory.join(file.file_name())
    }

    /// Writes `spec`: to a temporary name that no runtime reads, then renamed.
    ///
    /// # Errors
    /// [`StoreError::Invalid`], [`StoreError::Foreign`] when a file of another kind has the name,
    /// [`StoreError::Io`].
    pub fn write(&self, file: &SpecFile, spec: &Spec) -> Result<Written, StoreError> {
        let path = self.path(file);
        spec.validate().map_err(|source| StoreError::Invalid { path: path.clone(), source })?;
        debug_assert_eq!(spec.kind, file.kind, "a file's name and content are of one kind");
        let mut content = serde_json::to_vec_pretty(spec)
            .expect("invariant: the models hold nothing that JSON cannot");
        content.push(b'\n');

        match read(&path)? {
            Some(found) if found == content => return Ok(Written::Unchanged),
            Some(found) if !is_of_kind(&found, &file.kind) => {
                return Err(StoreError::Foreign { path });
            }
            _ => {}
        }
        fs::create_dir_all(&self.directory).map_err(io_error("create", &self.directory))?;
        // Runtimes read only `.json` and `.yaml`: the suffix of the temporary file hides it from
        // them.
        atomic_file::write(&path, &content, 0o644).map_err(io_error("write", &path))?;
        Ok(Written::Changed)
    }

    /// The spec in `file`, or `None` if there is no such file or what is there is not a spec that
    /// we could have written.
    ///
    /// # Errors
    /// [`StoreError::Io`].
    pub fn read(&self, file: &SpecFile) -> Result<Option<Spec>, StoreError> {
        let spec: Option<Spec> =
            read(&self.path(file))?.and_then(|bytes| serde_json::from_slice(&bytes).ok());
        Ok(spec.filter(|spec| spec.kind == file.kind))
    }

    /// Removes `file`; `false` when there was nothing of ours to remove.
    ///
    /// # Errors
    /// [`StoreError::Io`].
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

    /// Ids of the files of this kind, in order.
    ///
    /// # Errors
    /// [`StoreError::Io`].
    pub fn ids(&self, kind: &Kind) -> Result<BTreeSet<String>, StoreError> {
        let (ours, _) = self.survey(kind)?;
        Ok(ours)
    }

    /// Removes every file of this kind whose id is not in `keep`, and what interrupted writes left.
    ///
    /// Nobody may be writing files of this kind meanwhile: the caller holds the lock that writers
    /// hold.
    ///
    /// # Errors
    /// [`StoreError::Io`]; the files before it are gone.
    pub fn retain(&self, kind: &Kind, keep: &BTreeSet<String>) -> Result<Cleaned, StoreError> {
        let (ours, foreign) = self.survey(kind)?;
        let mut cleaned = Cleaned { removed: Vec::new(), foreign };
        for id in ours.difference(keep) {
            if self.remove(&SpecFile::of(kind.clone(), id))? {
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

    /// Ids of our files of this kind, and the paths of files that only look like it.
    fn survey(&self, kind: &Kind) -> Result<(BTreeSet<String>, Vec<PathBuf>), StoreError> {
        let prefix = format!("{}-{}_", kind.vendor(), kind.class());
        let (mut ours, mut foreign) = (BTreeSet::new(), Vec::new());
        for name in self.entries()? {
            let id = name.strip_prefix(&prefix).and_then(|rest| rest.strip_suffix(".json"));
            let Some(id) = id.filter(|id| !id.is_empty()) else { continue };
            let path = self.directory.join(&name);
            match read(&path) {
                Ok(None) => {}
                Ok(Some(found)) if is_of_kind(&found, kind) => {
                    ours.insert(id.to_owned());
                }
                // A directory, or a file that we may not read, is no file of ours.
                Ok(Some(_)) | Err(_) => foreign.push(path),
            }
        }
        foreign.sort();
        Ok((ours, foreign))
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

fn temporary_prefix(kind: &Kind) -> String {
    format!(".{}-{}_", kind.vendor(), kind.class())
}

fn is_of_kind(content: &[u8], kind: &Kind) -> bool {
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
