//! The installed interceptor library, which containers get.

use std::{
    collections::BTreeSet,
    fs, io,
    path::{Path, PathBuf},
};

use sha2::{Digest, Sha256};
use tessera_runtime::atomic_file;

use crate::intercept::{InterceptMode, ProxiedLibrary};

use super::{
    StatePaths,
    journal::{JournalError, JournalStore},
    mounts::{Mounts, Tmpfs},
};

/// File name of the library.
pub const FILE_NAME: &str = "libtessera_intercept.so";

/// Path of the library in containers.
pub const CONTAINER_PATH: &str = "/usr/local/lib/tessera/libtessera_intercept.so";

/// Path of the list of preloaded libraries in containers.
pub const CONTAINER_PRELOAD_PATH: &str = "/etc/ld.so.preload";

/// Errors of installing the library.
#[derive(Debug, thiserror::Error)]
pub enum InstallError {
    /// The file cannot be read.
    #[error("cannot read interceptor library `{path}`: set --intercept-library to its path", path = .path.display())]
    Missing {
        /// The path.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// The file has changed since the driver started.
    #[error("interceptor library `{path}` was replaced while the driver runs: restart the driver", path = .path.display())]
    Replaced {
        /// The path.
        path: PathBuf,
    },
    /// The journal could not be locked.
    #[error("cannot lock the journal")]
    Lock(#[from] JournalError),
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

/// The installed library.
///
/// Its path contains the hash of its content, so that an upgrade installs another directory: a file
/// that containers have mounted is never replaced.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InstalledLibrary {
    /// SHA-256 of its files, in hexadecimal.
    pub hash: String,
    /// The files that it was installed from.
    sources: Vec<Source>,
}

/// A file to install.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Source {
    /// The name of the installed file.
    name: &'static str,
    path: PathBuf,
}

impl InstalledLibrary {
    /// Installs the library at `source`, unless it is installed. Takes the journal's lock: another
    /// instance may be installing at the same time.
    ///
    /// # Errors
    /// [`InstallError`]. Without the library no limit is enforced, so no claim can be prepared.
    pub fn install(
        source: &Path,
        intercept: InterceptMode,
        paths: &StatePaths,
        journal: &JournalStore,
        mounts: &dyn Mounts,
    ) -> Result<Self, InstallError> {
        let sources = sources(source, intercept);
        let (contents, hash) = read(&sources)?;
        journal.exclusively(|| {
            let length = contents.iter().map(Vec::len).sum();
            make_executable_directory(&paths.libraries(), length, mounts)?;
            write_missing(&sources, &contents, paths, &hash)?;
            write_if_changed(&paths.preload(), format!("{CONTAINER_PATH}\n").as_bytes())
        })??;
        Ok(Self { hash, sources })
    }

    /// Installs the library again if it was removed: during an update of the driver, the new
    /// instance removes libraries that no claim uses, while the old one may still prepare
    /// claims. Callers hold the journal's lock, as the instance that removes does.
    ///
    /// # Errors
    /// [`InstallError`].
    pub fn ensure(&self, paths: &StatePaths) -> Result<(), InstallError> {
        let is_missing = |source: &Source| {
            let installed = path(paths, &self.hash, source.name);
            installed.try_exists().map(|exists| !exists).map_err(io_error("stat", &installed))
        };
        let mut missing = Vec::new();
        for source in &self.sources {
            missing.extend(is_missing(source)?.then_some(source));
        }
        let Some(first) = missing.first() else { return Ok(()) };
        let (contents, hash) = read(&self.sources)?;
        if hash != self.hash {
            return Err(InstallError::Replaced { path: first.path.clone() });
        }
        write_missing(&self.sources, &contents, paths, &hash)
    }

    /// Removes libraries that no prepared claim uses, except this one.
    ///
    /// # Errors
    /// [`InstallError::Io`].
    pub fn remove_others(
        &self,
        paths: &StatePaths,
        in_use: &BTreeSet<String>,
    ) -> Result<(), InstallError> {
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

/// Returns the host path of a file of the library with this hash.
#[must_use]
pub fn path(paths: &StatePaths, hash: &str, file: &str) -> PathBuf {
    paths.libraries().join(hash).join(file)
}

/// Returns the files to install. The proxies are in the directory of the library.
fn sources(library: &Path, intercept: InterceptMode) -> Vec<Source> {
    let mut sources = Vec::new();
    if intercept.preloads() {
        sources.push(Source { name: FILE_NAME, path: library.to_owned() });
    }
    if intercept.replaces() {
        let proxies = ProxiedLibrary::ALL.map(ProxiedLibrary::proxy);
        sources.extend(proxies.map(|name| Source { name, path: library.with_file_name(name) }));
    }
    sources
}

/// Returns the content of the files and their hash.
fn read(sources: &[Source]) -> Result<(Vec<Vec<u8>>, String), InstallError> {
    let content = |Source { path, .. }: &Source| {
        fs::read(path).map_err(|source| InstallError::Missing { path: path.clone(), source })
    };
    let contents = sources.iter().map(content).collect::<Result<Vec<_>, _>>()?;
    let hash = contents.iter().fold(Sha256::new(), |hash, content| hash.chain_update(content));
    Ok((contents, hex(&hash.finalize())))
}

fn write_missing(
    sources: &[Source],
    contents: &[Vec<u8>],
    paths: &StatePaths,
    hash: &str,
) -> Result<(), InstallError> {
    let mut files = sources.iter().zip(contents);
    files.try_for_each(|(source, content)| {
        write_if_changed(&path(paths, hash, source.name), content)
    })
}

/// Creates a directory whose file system allows execution.
///
/// Some distributions mount `/run` with `noexec`, and the loader refuses libraries from there, also
/// in containers. The libraries get a tmpfs of their own then.
fn make_executable_directory(
    directory: &Path,
    length: usize,
    mounts: &dyn Mounts,
) -> Result<(), InstallError> {
    /// Room for several versions at the same time.
    const VERSIONS: u64 = 16;
    fs::create_dir_all(directory).map_err(io_error("create", directory))?;
    if mounts.forbids_execution(directory).map_err(io_error("stat", directory))? {
        let size_bytes = (length as u64 * VERSIONS).next_multiple_of(1 << 20);
        let tmpfs = Tmpfs { size_bytes, inodes: 4 * VERSIONS, executable: true };
        mounts.mount_tmpfs(directory, tmpfs).map_err(io_error("mount tmpfs at", directory))?;
    }
    Ok(())
}

/// Writes a file, unless it exists with this content. Never changes an existing file in place.
fn write_if_changed(path: &Path, content: &[u8]) -> Result<(), InstallError> {
    if fs::read(path).is_ok_and(|found| found == content) {
        return Ok(());
    }
    let directory = path.parent().expect("invariant: files of the state directory have a parent");
    fs::create_dir_all(directory).map_err(io_error("create", directory))?;
    atomic_file::write(path, content, 0o755).map_err(io_error("write", path))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn io_error(operation: &'static str, path: &Path) -> impl FnOnce(io::Error) -> InstallError {
    let path = path.to_owned();
    move |source| InstallError::Io { operation, path, source }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::mounts::KernelMounts;

    fn install(source: &Path, paths: &StatePaths) -> Result<InstalledLibrary, InstallError> {
        install_as(InterceptMode::Preload, source, paths)
    }

    fn install_as(
        intercept: InterceptMode,
        source: &Path,
        paths: &StatePaths,
    ) -> Result<InstalledLibrary, InstallError> {
        let journal = JournalStore::new(paths.clone());
        InstalledLibrary::install(source, intercept, paths, &journal, &KernelMounts)
    }

    fn path(paths: &StatePaths, hash: &str) -> PathBuf {
        super::path(paths, hash, FILE_NAME)
    }

    #[test]
    fn installs_proxies_with_their_library() {
        let directory = tempfile::tempdir().expect("a directory");
        let paths = StatePaths::new(directory.path().join("state"));
        let source = directory.path().join(FILE_NAME);
        fs::write(&source, "library").expect("written");
        let error = install_as(InterceptMode::Both, &source, &paths).expect_err("no proxies");
        assert!(error.to_string().contains(ProxiedLibrary::Cuda.proxy()), "{error}");
        for library in ProxiedLibrary::ALL {
            fs::write(source.with_file_name(library.proxy()), library.soname()).expect("written");
        }

        let installed = install_as(InterceptMode::Both, &source, &paths).expect("installed");
        let file = |name| super::path(&paths, &installed.hash, name);
        for library in ProxiedLibrary::ALL {
            assert_eq!(fs::read_to_string(file(library.proxy())).expect("there"), library.soname());
        }
        fs::remove_file(file(ProxiedLibrary::Nvml.proxy())).expect("removed");
        installed.ensure(&paths).expect("installed again");
        assert!(file(ProxiedLibrary::Nvml.proxy()).exists() && file(FILE_NAME).exists());
        let alone = install_as(InterceptMode::Proxy, &source, &paths).expect("installed");
        assert_ne!(alone.hash, installed.hash);
        assert!(!path(&paths, &alone.hash).exists(), "nothing is preloaded");
    }

    #[test]
    fn new_version_does_not_replace_version_in_use() {
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
    fn reinstalls_removed_library_but_no_other_version() {
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
        assert!(matches!(error, InstallError::Replaced { .. }), "{error}");
        assert!(!path(&paths, &library.hash).exists());
    }

    #[test]
    fn concurrent_instances_install_without_conflict() {
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
    fn installed_library_keeps_its_inode() {
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
    fn missing_library_error_names_the_flag() {
        let directory = tempfile::tempdir().expect("a directory");
        let paths = StatePaths::new(directory.path());
        let error = install(Path::new("/no/such.so"), &paths).expect_err("missing");
        assert!(error.to_string().contains("--intercept-library"), "{error}");
    }
}
