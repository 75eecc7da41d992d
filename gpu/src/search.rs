//! Where `libnvidia-ml.so.1` is looked for.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// The library's name to the dynamic loader.
pub const NVML: &str = "libnvidia-ml.so.1";

/// Library directories of the distributions that NVIDIA packages its driver for: Debian's
/// multiarch, Fedora's, the plain ones. The order is that of NVIDIA's own container toolkit.
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

/// Where the GPU Operator's driver container shows its root file system, seen from the host's root.
const DRIVER_CONTAINER: &str = "run/nvidia/driver";

/// A place where the library was, or would have been.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Candidate {
    /// A file.
    File(PathBuf),
    /// Wherever the dynamic loader finds it.
    Loader,
}

impl Candidate {
    /// What to hand to `dlopen`.
    pub fn to_os_string(&self) -> OsString {
        match self {
            Self::File(path) => path.clone().into_os_string(),
            Self::Loader => OsString::from(NVML),
        }
    }
}

impl std::fmt::Display for Candidate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::File(path) => write!(f, "{}", path.display()),
            Self::Loader => write!(f, "{NVML} (dynamic loader)"),
        }
    }
}

/// The places to look at, best first.
///
/// An explicit path is the only candidate: who names a library does not want another. Else the
/// existing files below the driver root, then below a driver container's root in it, and at last
/// what the loader finds.
pub fn candidates(explicit: Option<&Path>, driver_root: &Path) -> Vec<Candidate> {
    if let Some(path) = explicit {
        return vec![Candidate::File(path.to_owned())];
    }
    let roots = [driver_root.to_owned(), driver_root.join(DRIVER_CONTAINER)];
    let files = roots
        .iter()
        .flat_map(|root| DIRECTORIES.iter().map(|directory| root.join(directory).join(NVML)));
    files.filter(|path| path.exists()).map(Candidate::File).chain([Candidate::Loader]).collect()
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
    fn a_named_library_is_the_only_one() {
        let path = Path::new("/opt/libnvidia-ml.so.1");
        assert_eq!(candidates(Some(path), Path::new("/")), [Candidate::File(path.to_owned())]);
    }

    #[test]
    fn the_driver_root_comes_before_a_driver_container_and_the_loader() {
        let inner = "run/nvidia/driver/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1";
        let outer = "usr/lib/aarch64-linux-gnu/libnvidia-ml.so.1";
        let root = with_files(&[inner, outer]);
        let file = |name: &str| Candidate::File(root.path().join(name));
        assert_eq!(candidates(None, root.path()), [file(outer), file(inner), Candidate::Loader]);
    }

    #[test]
    fn without_any_file_the_loader_is_asked() {
        assert_eq!(candidates(None, TempDir::new().unwrap().path()), [Candidate::Loader]);
    }
}
