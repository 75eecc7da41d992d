//! Finds the files of the NVIDIA driver under a root.

use std::{
    collections::BTreeMap,
    ffi::OsStr,
    fmt, fs,
    os::unix::fs::FileTypeExt,
    path::{Component, Path, PathBuf},
};

/// The root of the NVIDIA driver's files: `/` if it is installed on the host itself.
#[derive(Clone, Debug)]
pub struct DriverRoot {
    /// The path in this process.
    inside: PathBuf,
    /// The path for the container runtime on the host.
    host: PathBuf,
}

/// The files under a driver root.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DriverFiles {
    /// Files and directories to mount, by container path.
    pub mounts: Vec<DriverFile>,
    /// Device nodes, by name.
    pub device_nodes: Vec<DriverNode>,
}

/// A file or directory of the driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DriverFile {
    /// The path on the host.
    pub host_path: PathBuf,
    /// The path in the container.
    pub container_path: PathBuf,
}

/// A device node of the driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DriverNode {
    /// The name, such as `nvidia0`.
    pub name: String,
    /// The path on the host.
    pub host_path: PathBuf,
    /// The path in the container.
    pub container_path: PathBuf,
}

/// Library directories of distributions. Of several paths of the same directory (`/usr/lib64` is
/// often a link) the first is used.
const LIBRARY_DIRECTORIES: [&str; 5] = [
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "usr/lib64",
    "usr/lib",
    "usr/local/nvidia/lib64",
];

/// Prefixes of the names of the driver's libraries.
const LIBRARIES: [&str; 7] = [
    "libcuda.so",
    "libcudadebugger.so",
    "libnvidia-",
    "libnvcuvid.so",
    "libnvoptix.so",
    "libGLX_nvidia.so",
    "libEGL_nvidia.so",
];

/// Prefix of libraries of the NVIDIA container toolkit, which runs on the host.
const TOOLKIT_LIBRARY: &str = "libnvidia-container";

/// The driver's tools that are useful in a container.
const TOOLS: [&str; 2] = ["usr/bin/nvidia-smi", "usr/bin/nvidia-debugdump"];

/// The driver's data: application profiles, OptiX data and others.
const DATA_DIRECTORIES: [&str; 1] = ["usr/share/nvidia"];

impl DriverRoot {
    /// Returns the root `inside` of this process, which the container runtime sees as `host`.
    #[must_use]
    pub fn new(inside: impl Into<PathBuf>, host: impl Into<PathBuf>) -> Self {
        Self { inside: inside.into(), host: host.into() }
    }

    /// Returns the files under the root, without those that cannot be read.
    #[must_use]
    pub fn files(&self) -> DriverFiles {
        let mut mounts = BTreeMap::new();
        let mut seen_directories = Vec::new();
        for directory in LIBRARY_DIRECTORIES {
            let Some(resolved) = self.resolve(Path::new(directory)) else { continue };
            if seen_directories.contains(&resolved) {
                continue;
            }
            seen_directories.push(resolved);
            for name in names(&self.inside.join(directory)) {
                if is_library(&name) {
                    self.add(&mut mounts, &Path::new(directory).join(name));
                }
            }
        }
        for path in TOOLS.iter().chain(&DATA_DIRECTORIES) {
            self.add(&mut mounts, Path::new(path));
        }
        DriverFiles { mounts: mounts.into_values().collect(), device_nodes: self.device_nodes() }
    }

    fn add(&self, mounts: &mut BTreeMap<PathBuf, DriverFile>, relative: &Path) {
        let Some(resolved) = self.resolve(relative) else { return };
        let container_path = Path::new("/").join(relative);
        let file = DriverFile {
            host_path: self.host.join(resolved),
            container_path: container_path.clone(),
        };
        mounts.insert(container_path, file);
    }

    fn device_nodes(&self) -> Vec<DriverNode> {
        let mut nodes: Vec<_> = names(&self.inside.join("dev"))
            .into_iter()
            .filter(|name| name.starts_with("nvidia"))
            .filter(|name| {
                let metadata = fs::metadata(self.inside.join("dev").join(name));
                metadata.is_ok_and(|metadata| metadata.file_type().is_char_device())
            })
            .map(|name| DriverNode {
                host_path: self.host.join("dev").join(&name),
                container_path: Path::new("/dev").join(&name),
                name,
            })
            .collect();
        nodes.sort_by(|a, b| a.name.cmp(&b.name));
        nodes
    }

    /// Resolves links as in a chroot: absolute links stay below the root. Returns `None` if the
    /// file does not exist, or has too many links.
    fn resolve(&self, relative: &Path) -> Option<PathBuf> {
        /// Limit of the kernel.
        const MAX_LINKS: usize = 40;
        let mut todo: Vec<PathBuf> = components(relative);
        let mut resolved = PathBuf::new();
        let mut links = 0;
        while let Some(next) = todo.pop() {
            if next == Path::new("..") {
                resolved.pop();
                continue;
            }
            let candidate = resolved.join(&next);
            let metadata = fs::symlink_metadata(self.inside.join(&candidate)).ok()?;
            if !metadata.file_type().is_symlink() {
                resolved = candidate;
                continue;
            }
            links += 1;
            if links > MAX_LINKS {
                return None;
            }
            let target = fs::read_link(self.inside.join(&candidate)).ok()?;
            if target.is_absolute() {
                resolved = PathBuf::new();
            }
            todo.extend(components(&target));
        }
        Some(resolved)
    }
}

/// Returns the components of a path, last first, without the root and `.`.
fn components(path: &Path) -> Vec<PathBuf> {
    let parts = path
        .components()
        .filter(|part| matches!(part, Component::Normal(_) | Component::ParentDir));
    parts.rev().map(|part| PathBuf::from(AsRef::<OsStr>::as_ref(&part))).collect()
}

fn is_library(name: &str) -> bool {
    name.contains(".so")
        && LIBRARIES.iter().any(|library| name.starts_with(library))
        && !name.starts_with(TOOLKIT_LIBRARY)
}

fn names(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).into_iter().flatten();
    entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok()).collect()
}

impl fmt::Display for DriverRoot {
    /// Writes the path on the host.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.host.display().fmt(f)
    }
}
