//! Which files of the NVIDIA driver are under a root.

use std::{
    collections::BTreeMap,
    ffi::OsStr,
    fmt, fs,
    os::unix::fs::FileTypeExt,
    path::{Component, Path, PathBuf},
};

/// The root of the NVIDIA driver's files: `/` where it is installed on the host itself.
#[derive(Clone, Debug)]
pub struct DriverRoot {
    /// As this process sees it.
    inside: PathBuf,
    /// As the container runtime on the host sees it.
    host: PathBuf,
}

/// What was found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DriverFiles {
    /// Files and directories to mount, by container path.
    pub mounts: Vec<DriverFile>,
    /// Device nodes.
    pub device_nodes: Vec<DriverNode>,
}

/// A file or directory of the driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DriverFile {
    /// What the runtime mounts.
    pub host_path: PathBuf,
    /// Where.
    pub container_path: PathBuf,
}

/// A device node of the driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DriverNode {
    /// Such as `nvidia0`.
    pub name: String,
    /// On the host.
    pub host_path: PathBuf,
    /// In the container.
    pub container_path: PathBuf,
}

/// Where distributions keep libraries. The first that has a library wins where two are one
/// directory (`/usr/lib64` is often a link).
const LIBRARY_DIRECTORIES: [&str; 5] = [
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "usr/lib64",
    "usr/lib",
    "usr/local/nvidia/lib64",
];

/// The driver's libraries, by how their names begin.
const LIBRARIES: [&str; 7] = [
    "libcuda.so",
    "libcudadebugger.so",
    "libnvidia-",
    "libnvcuvid.so",
    "libnvoptix.so",
    "libGLX_nvidia.so",
    "libEGL_nvidia.so",
];

/// Named like the driver's, but the container toolkit's own: it works on the host.
const NOT_OF_THE_DRIVER: &str = "libnvidia-container";

/// The driver's tools that are of use in a container.
const TOOLS: [&str; 2] = ["usr/bin/nvidia-smi", "usr/bin/nvidia-debugdump"];

/// The driver's data: application profiles, OptiX data, and what else it brings.
const DATA_DIRECTORIES: [&str; 1] = ["usr/share/nvidia"];

impl DriverRoot {
    /// The root `inside` for this process, which is `host` for the container runtime.
    #[must_use]
    pub fn new(inside: impl Into<PathBuf>, host: impl Into<PathBuf>) -> Self {
        Self { inside: inside.into(), host: host.into() }
    }

    /// Looks. What cannot be read is not there.
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

    /// Follows links as a process would that has this root, so that absolute ones stay below it.
    /// `None` where there is nothing, or the links go in circles.
    fn resolve(&self, relative: &Path) -> Option<PathBuf> {
        /// As many as the kernel follows.
        const MOST_LINKS: usize = 40;
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
            if links > MOST_LINKS {
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

/// The parts of a path, last first; the root and `.` are none.
fn components(path: &Path) -> Vec<PathBuf> {
    let parts = path
        .components()
        .filter(|part| matches!(part, Component::Normal(_) | Component::ParentDir));
    parts.rev().map(|part| PathBuf::from(AsRef::<OsStr>::as_ref(&part))).collect()
}

fn is_library(name: &str) -> bool {
    name.contains(".so")
        && LIBRARIES.iter().any(|library| name.starts_with(library))
        && !name.starts_with(NOT_OF_THE_DRIVER)
}

fn names(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).into_iter().flatten();
    entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok()).collect()
}

impl fmt::Display for DriverRoot {
    /// As people find it on the host.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.host.display().fmt(f)
    }
}
