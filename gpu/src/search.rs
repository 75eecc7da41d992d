//! Search paths of `libnvidia-ml.so.1`.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// Name of the library for the dynamic loader.
pub const NVML: &str = "libnvidia-ml.so.1";

/// Library directories of the distributions for which NVIDIA packages its driver: Debian's
/// multiarch, Fedora's, the plain ones. The order is that of NVIDIA's container toolkit.
const DIRECTORIES: [&str; 8] = [
    "usr/lib64",
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "lib64",
    "lib/x86_64-linux-gnu",
    "lib/aarch64-linux-gnu",
    "usr/lib",
    "lib",
];

/// Root of the GPU Operator's driver container, relative to the host's root.
const DRIVER_CONTAINER: &str = "run/nvidia/driver";

/// A candidate for the library.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LibraryCandidate {
    /// A file.
    File(PathBuf),
    /// The library that the dynamic loader finds.
    Loader,
}

impl LibraryCandidate {
    /// Returns the argument for `dlopen`.
    pub fn to_os_string(&self) -> OsString {
        match self {
            Self::File(path) => path.clone().into_os_string(),
            Self::Loader => OsString::from(NVML),
        }
    }
}

impl std::fmt::Display for LibraryCandidate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::File(path) => write!(f, "{}", path.display()),
            Self::Loader => write!(f, "{NVML} (dynamic loader)"),
        }
    }
}

/// Returns the candidates, best first.
///
/// An explicit path is the only candidate, so that no other library is used by mistake. Otherwise
/// the candidates are the existing files below the driver root, then below a driver container's
/// root in it, and last the library that the loader finds.
pub fn candidates(explicit: Option<&Path>, driver_root: &Path) -> Vec<LibraryCandidate> {
    if let Some(path) = explicit {
        return vec![LibraryCandidate::File(path.to_owned())];
    }
    let roots = [driver_root.to_owned(), driver_root.join(DRIVER_CONTAINER)];
    let files = roots
        .iter()
        .flat_map(|root| DIRECTORIES.iter().map(|directory| root.join(directory).join(NVML)));
    files
        .filter(|path| path.exists())
        .map(LibraryCandidate::File)
        .chain([LibraryCandidate::Loader])
        .collect()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use tempfile::TempDir;

    use super::*;

    fn with_files(files: &[&str]) -> TempDir {
        let root = TempDir::new().unwrap();
        for file in files {
            let path = root.path().join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "").unwrap();
        }
        root
    }

    #[test]
    fn explicit_library_is_the_only_candidate() {
        let path = Path::new("/opt/libnvidia-ml.so.1");
        assert_eq!(
            candidates(Some(path), Path::new("/")),
            [LibraryCandidate::File(path.to_owned())]
        );
    }

    #[test]
    fn driver_root_precedes_driver_container_and_loader() {
        let inner = "run/nvidia/driver/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1";
        let outer = "usr/lib/aarch64-linux-gnu/libnvidia-ml.so.1";
        let root = with_files(&[inner, outer]);
        let file = |name: &str| LibraryCandidate::File(root.path().join(name));
        assert_eq!(
            candidates(None, root.path()),
            [file(outer), file(inner), LibraryCandidate::Loader]
        );
    }

    #[test]
    fn falls_back_to_loader_without_files() {
        assert_eq!(candidates(None, TempDir::new().unwrap().path()), [LibraryCandidate::Loader]);
    }
}
