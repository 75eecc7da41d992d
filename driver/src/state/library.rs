//! The interceptor library, as containers get it.

use std::{
    collections::BTreeSet,
    fs::{self, Permissions},
    io,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

use sha2::{Digest, Sha256};

use crate::intercept::{Intercept, Library};

use super::{
    StatePaths,
    journal::{JournalError, JournalStore},
    mounts::{Mounts, Tmpfs},
};

/// The library's file name.
pub const FILE_NAME: &str = "libtessera_intercept.so";

/// Where containers find it.
pub const CONTAINER_PATH: &str = "/usr/local/lib/tessera/libtessera_intercept.so";

/// Where containers find the list of what to preload.
pub const CONTAINER_PRELOAD_PATH: &str = "/etc/ld.so.preload";

/// Why the library could not be installed.
#[derive(Debug, thiserror::Error)]
pub enum LibraryError {
    /// There is none to install.
    #[error("the interceptor library `{path}` cannot be read: set --intercept-library to where it is", path = .path.display())]
    Missing {
        /// Where it was looked for.
        path: PathBuf,
        /// What the operating system said.
        source: io::Error,
    },
    /// It is another one than at the driver's start.
    #[error("the interceptor library `{path}` was replaced while the driver runs: restart the driver", path = .path.display())]
    Replaced {
        /// Where it is.
        path: PathBuf,
    },
    /// Another instance cannot be kept from installing at the same time.
    #[error("the journal cannot be locked")]
    Lock(#[from] JournalError),
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

/// Where an installed library is on the host.
///
/// Its path holds the hash of its content, so that an upgrade installs beside it: a file that
/// containers have mounted is never replaced.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InstalledLibrary {
    /// SHA-256 of its content, in hexadecimal; of all its files together where it has proxies.
    pub hash: String,
    /// What it was installed from.
    sources: Vec<Source>,
}

/// One file.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Source {
    /// What it is called where it is installed.
    name: &'static str,
    path: PathBuf,
}

impl InstalledLibrary {
    /// Installs the library at `source`, or finds that it is. Under the journal's lock: another
    /// instance may be installing its own.
    ///
    /// # Errors
    /// [`LibraryError`]. Without the library nothing can be enforced, so nothing can be prepared.
    pub fn install(
        source: &Path,
        intercept: Intercept,
        paths: &StatePaths,
        journal: &JournalStore,
        mounts: &dyn Mounts,
    ) -> Result<Self, LibraryError> {
        let sources = sources(source, intercept);
        let (contents, hash) = read(&sources)?;
        journal.exclusively(|| {
            let length = contents.iter().map(Vec::len).sum();
            make_executable_directory(&paths.libraries(), length, mounts)?;
            write_all_once(&sources, &contents, paths, &hash)?;
            write_once(&paths.preload(), format!("{CONTAINER_PATH}\n").as_bytes())
        })??;
        Ok(Self { hash, sources })
    }

    /// Installs it again if it is gone: during an update of the driver, the new instance removes
    /// libraries that no claim uses while the old one may still prepare claims. Callers hold
    /// the journal's lock, and so does who removes.
    ///
    /// # Errors
    /// [`LibraryError`].
    pub fn ensure(&self, paths: &StatePaths) -> Result<(), LibraryError> {
        let is_missing = |source: &Source| {
            let installed = path(paths, &self.hash, source.name);
            installed.try_exists().map(|exists| !exists).map_err(io_error("look at", &installed))
        };
        let mut missing = Vec::new();
        for source in &self.sources {
            missing.extend(is_missing(source)?.then_some(source));
        }
        let Some(first) = missing.first() else { return Ok(()) };
        let (contents, hash) = read(&self.sources)?;
        if hash != self.hash {
            return Err(LibraryError::Replaced { path: first.path.clone() });
        }
        write_all_once(&self.sources, &contents, paths, &hash)
    }

    /// Removes libraries that no prepared claim uses, except this one.
    ///
    /// # Errors
    /// [`LibraryError::Io`].
    pub fn remove_others(
        &self,
        paths: &StatePaths,
        in_use: &BTreeSet<String>,
    ) -> Result<(), LibraryError> {
        let directory = paths.libraries();
        let entries = fs::read_dir(&directory).map_err(io_error("list", &directory))?;
        for entry in entries {
            let entry = entry.map_err(io_error("list", &directory))?;
            let name = entry.file_name().to_string_lossy().into_owned();
            if name != self.hash && !in_use.contains(&name) {
                fs::remove_dir_all(entry.path()).map_err(io_error("remove", &entry.path()))?;
            }
        }
        Ok(())
    }
}

/// The host's path of a file of the library with this hash.
#[must_use]
pub fn path(paths: &StatePaths, hash: &str, file: &str) -> PathBuf {
    paths.libraries().join(hash).join(file)
}

/// The files that are needed; the proxies lie beside the library.
fn sources(library: &Path, intercept: Intercept) -> Vec<Source> {
    let mut sources = Vec::new();
    if intercept.preloads() {
        sources.push(Source { name: FILE_NAME, path: library.to_owned() });
    }
    if intercept.replaces() {
        let proxies = Library::ALL.map(Library::proxy);
        sources.extend(proxies.map(|name| Source { name, path: library.with_file_name(name) }));
    }
    sources
}

/// The content of the files, and their hash.
fn read(sources: &[Source]) -> Result<(Vec<Vec<u8>>, String), LibraryError> {
    let content = |Source { path, .. }: &Source| {
        fs::read(path).map_err(|source| LibraryError::Missing { path: path.clone(), source })
    };
    let contents = sources.iter().map(content).collect::<Result<Vec<_>, _>>()?;
    let hash = contents.iter().fold(Sha256::new(), |hash, content| hash.chain_update(content));
    Ok((contents, hex(&hash.finalize())))
}

fn write_all_once(
    sources: &[Source],
    contents: &[Vec<u8>],
    paths: &StatePaths,
    hash: &str,
) -> Result<(), LibraryError> {
    let mut files = sources.iter().zip(contents);
    files.try_for_each(|(source, content)| write_once(&path(paths, hash, source.name), content))
}

/// Some distributions mount `/run` with `noexec`, which a user-namespaced container cannot take off
/// the mount that it gets: the library would not load there. Then the libraries get a tmpfs of
/// their own.
fn make_executable_directory(
    directory: &Path,
    length: usize,
    mounts: &dyn Mounts,
) -> Result<(), LibraryError> {
    /// Room for a few versions side by side during upgrades.
    const VERSIONS: u64 = 16;
    fs::create_dir_all(directory).map_err(io_error("create", directory))?;
    if mounts.forbids_execution(directory).map_err(io_error("look at", directory))? {
        let size_bytes = (length as u64 * VERSIONS).next_multiple_of(1 << 20);
        let tmpfs = Tmpfs { size_bytes, inodes: 4 * VERSIONS, executable: true };
        mounts.mount_tmpfs(directory, tmpfs).map_err(io_error("mount a tmpfs at", directory))?;
    }
    Ok(())
}

/// Writes a file unless it is there with this very content; never changes one that is. The
/// temporary name is the same for all instances: only the holder of the journal's lock writes.
fn write_once(path: &Path, content: &[u8]) -> Result<(), LibraryError> {
    if fs::read(path).is_ok_and(|found| found == content) {
        return Ok(());
    }
    let directory = path.parent().expect("invariant: files of the state directory have a parent");
    fs::create_dir_all(directory).map_err(io_error("create", directory))?;
    let temporary = path.with_extension("new");
    fs::write(&temporary, content).map_err(io_error("write", &temporary))?;
    fs::set_permissions(&temporary, Permissions::from_mode(0o755))
        .map_err(io_error("open up", &temporary))?;
    fs::rename(&temporary, path).map_err(io_error("rename to", path))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn io_error(operation: &'static str, path: &Path) -> impl FnOnce(io::Error) -> LibraryError {
    let path = path.to_owned();
    move |source| LibraryError::Io { operation, path, source }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::mounts::KernelMounts;

    fn install(source: &Path, paths: &StatePaths) -> Result<InstalledLibrary, LibraryError> {
        install_as(Intercept::Preload, source, paths)
    }

    fn install_as(
        intercept: Intercept,
        source: &Path,
        paths: &StatePaths,
    ) -> Result<InstalledLibrary, LibraryError> {
        let journal = JournalStore::new(paths.clone());
        InstalledLibrary::install(source, intercept, paths, &journal, &KernelMounts)
    }

    fn path(paths: &StatePaths, hash: &str) -> PathBuf {
        super::path(paths, hash, FILE_NAME)
    }

    #[test]
    fn proxies_are_installed_beside_the_library_that_they_belong_to() {
        let directory = tempfile::tempdir().expect("a directory");
        let paths = StatePaths::new(directory.path().join("state"));
        let source = directory.path().join(FILE_NAME);
        fs::write(&source, "library").expect("written");
        let error = install_as(Intercept::Both, &source, &paths).expect_err("no proxies");
        assert!(error.to_string().contains(Library::Cuda.proxy()), "{error}");
        for library in Library::ALL {
            fs::write(source.with_file_name(library.proxy()), library.soname()).expect("written");
        }

        let installed = install_as(Intercept::Both, &source, &paths).expect("installed");
        let file = |name| super::path(&paths, &installed.hash, name);
        for library in Library::ALL {
            assert_eq!(fs::read_to_string(file(library.proxy())).expect("there"), library.soname());
        }
        fs::remove_file(file(Library::Nvml.proxy())).expect("removed");
        installed.ensure(&paths).expect("installed again");
        assert!(file(Library::Nvml.proxy()).exists() && file(FILE_NAME).exists());
        let alone = install_as(Intercept::Proxy, &source, &paths).expect("installed");
        assert_ne!(alone.hash, installed.hash);
        assert!(!path(&paths, &alone.hash).exists(), "nothing is preloaded");
    }

    #[test]
    fn another_version_is_installed_beside_the_one_in_use() {
        let directory = tempfile::tempdir().expect("a directory");
        let paths = StatePaths::new(directory.path().join("state"));
        let source = directory.path().join("source.so");

        fs::write(&source, "one").expect("written");
        let one = install(&source, &paths).expect("installed");
        let before = path(&paths, &one.hash);
        fs::write(&source, "two").expect("written");
        let two = install(&source, &paths).expect("installed");

        assert_ne!(one.hash, two.hash);
        assert_eq!(fs::read_to_string(&before).expect("still there"), "one");
        assert_eq!(
            fs::read_to_string(paths.preload()).expect("there"),
            format!("{CONTAINER_PATH}\n")
        );

        two.remove_others(&paths, &BTreeSet::from([one.hash.clone()])).expect("removed");
        assert!(before.exists(), "a prepared claim uses it");
        two.remove_others(&paths, &BTreeSet::new()).expect("removed");
        assert!(!before.exists());
        assert!(path(&paths, &two.hash).exists());
    }

    #[test]
    fn a_library_that_was_removed_is_installed_again_and_never_another_in_its_place() {
        let directory = tempfile::tempdir().expect("a directory");
        let paths = StatePaths::new(directory.path().join("state"));
        let source = directory.path().join("source.so");
        fs::write(&source, "one").expect("written");
        let library = install(&source, &paths).expect("installed");
        let remove = || fs::remove_dir_all(paths.libraries().join(&library.hash)).expect("removed");

        remove();
        library.ensure(&paths).expect("installed again");
        assert_eq!(fs::read_to_string(path(&paths, &library.hash)).expect("there"), "one");

        remove();
        fs::write(&source, "two").expect("written");
        let error = library.ensure(&paths).expect_err("not the library of that hash");
        assert!(matches!(error, LibraryError::Replaced { .. }), "{error}");
        assert!(!path(&paths, &library.hash).exists());
    }

    #[test]
    fn instances_that_start_at_once_install_side_by_side() {
        let directory = tempfile::tempdir().expect("a directory");
        let sources = ["one", "two"].map(|content| {
            let source = directory.path().join(content);
            fs::write(&source, content.repeat(100_000)).expect("written");
            source
        });
        for round in 0..20 {
            let paths = StatePaths::new(directory.path().join(format!("state-{round}")));
            std::thread::scope(|scope| {
                let started = sources.iter().map(|source| scope.spawn(|| install(source, &paths)));
                for installed in started.collect::<Vec<_>>() {
                    let library = installed.join().expect("no panic").expect("installed");
                    assert!(path(&paths, &library.hash).exists());
                }
            });
            let preload = fs::read_to_string(paths.preload()).expect("there");
            assert_eq!(preload, format!("{CONTAINER_PATH}\n"));
        }
    }

    #[test]
    fn an_installed_library_keeps_its_inode() {
        use std::os::unix::fs::MetadataExt;
        let directory = tempfile::tempdir().expect("a directory");
        let paths = StatePaths::new(directory.path().join("state"));
        let source = directory.path().join("source.so");
        fs::write(&source, "one").expect("written");
        let inode = || {
            let library = install(&source, &paths).expect("installed");
            let inode = |path: &Path| fs::metadata(path).expect("there").ino();
            (inode(&path(&paths, &library.hash)), inode(&paths.preload()))
        };
        assert_eq!(inode(), inode());
    }

    #[test]
    fn a_missing_library_is_an_error_that_names_the_flag() {
        let directory = tempfile::tempdir().expect("a directory");
        let paths = StatePaths::new(directory.path());
        let error = install(Path::new("/no/such.so"), &paths).expect_err("missing");
        assert!(error.to_string().contains("--intercept-library"), "{error}");
    }
}
