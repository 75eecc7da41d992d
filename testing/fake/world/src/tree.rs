//! Files of a machine with these GPUs: its PCI devices in sysfs, and the NVIDIA driver.

use std::fs;
use std::io;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use tessera_runtime::atomic_file;

use crate::locate::WORLD_IN_DRIVER_ROOT;
use crate::pci::PciAddress;
use crate::world::{Gpu, World};

fn at<T>(path: &Path, result: io::Result<T>) -> anyhow::Result<T> {
    result.with_context(|| format!("cannot write `{}`", path.display()))
}

/// Writes the PCI devices of GPUs: `devices/pci.../...` and the links to them in `bus/pci/devices`.
/// Existing files are replaced.
///
/// # Errors
/// A file cannot be written.
pub fn write_sysfs(world: &World, root: &Path) -> anyhow::Result<()> {
    for gpu in &world.gpus {
        let mut directory = PathBuf::from("devices").join(&gpu.pcie_root);
        for bridge in &gpu.bridges {
            directory.push(bridge.to_string());
            let function = Function {
                address: *bridge,
                vendor: 0x8086,
                device: 0x347a,
                class: 0x06_0400,
                gpu,
            };
            function.write(world, root, &directory)?;
        }
        directory.push(gpu.pci.to_string());
        let ids = gpu.model.pci_id;
        let function = Function {
            address: gpu.pci,
            vendor: ids.vendor,
            device: ids.device,
            class: GPU_CLASS,
            gpu,
        };
        function.write(world, root, &directory)?;
    }
    Ok(())
}

/// PCI class of a GPU without a display.
const GPU_CLASS: u32 = 0x03_0200;

/// A PCI function in sysfs. Bridges have the NUMA node of the GPU below them.
struct Function<'a> {
    address: PciAddress,
    vendor: u16,
    device: u16,
    class: u32,
    gpu: &'a Gpu,
}

impl Function<'_> {
    fn write(&self, world: &World, root: &Path, directory: &Path) -> anyhow::Result<()> {
        let full = root.join(directory);
        at(&full, fs::create_dir_all(&full))?;
        let cpus = self.gpu.numa_node.and_then(|node| world.cpus.get(node as usize));
        let files = [
            ("vendor", format!("0x{:04x}", self.vendor)),
            ("device", format!("0x{:04x}", self.device)),
            ("class", format!("0x{:06x}", self.class)),
            // The kernel writes -1 for "no NUMA node".
            (
                "numa_node",
                self.gpu.numa_node.map_or_else(|| "-1".to_owned(), |node| node.to_string()),
            ),
            ("local_cpulist", cpus.cloned().unwrap_or_else(|| world.cpus.join(","))),
        ];
        for (name, content) in files {
            let path = full.join(name);
            at(&path, fs::write(&path, content + "\n"))?;
        }
        let links = root.join("bus/pci/devices");
        at(&links, fs::create_dir_all(&links))?;
        let address = self.address.to_string();
        replace_link(&Path::new("../../..").join(directory), &links.join(&address))?;
        if self.class == GPU_CLASS {
            let bound = root.join("bus/pci/drivers/nvidia");
            at(&bound, fs::create_dir_all(&bound))?;
            let target = Path::new("../../../..").join(directory);
            replace_link(&target, &bound.join(&address))?;
        }
        Ok(())
    }
}

/// The fake libraries to install into a driver root.
#[derive(Debug, Clone)]
pub struct Libraries {
    /// Path of `libnvidia-ml.so.1`.
    pub nvml: PathBuf,
    /// Path of `libcuda.so.1`; `None` for machines whose GPUs are not used.
    pub cuda: Option<PathBuf>,
}

/// Library directory of a Debian-like driver root for this machine's architecture.
pub const LIBRARY_DIRECTORY: &str = if cfg!(target_arch = "aarch64") {
    "usr/lib/aarch64-linux-gnu"
} else {
    "usr/lib/x86_64-linux-gnu"
};

/// Writes a driver root like that of an installed driver: libraries with versioned names and links
/// to them, and the world at its default location. Existing files are replaced.
///
/// # Errors
/// A file cannot be read or written.
pub fn write_driver_root(
    world_file: &Path,
    world: &World,
    libraries: &Libraries,
    root: &Path,
) -> anyhow::Result<()> {
    let directory = root.join(LIBRARY_DIRECTORY);
    create_directories(root, Path::new(LIBRARY_DIRECTORY))?;
    install_library(&directory, "libnvidia-ml.so", &libraries.nvml, world)?;
    if let Some(cuda) = &libraries.cuda {
        install_library(&directory, "libcuda.so", cuda, world)?;
    }
    let target = root.join(WORLD_IN_DRIVER_ROOT);
    let share = target.parent().expect("invariant: the path has directories");
    create_directories(root, Path::new(WORLD_IN_DRIVER_ROOT).parent().unwrap_or(Path::new("")))?;
    at(&target, fs::copy(world_file, &target).map(drop))?;
    set_mode(&target, 0o644)?;
    let state = share.join("state");
    at(&state, fs::create_dir_all(&state))?;
    // Like /tmp: processes of any user create files there.
    set_mode(&state, 0o1777)
}

/// Creates directories that all users can read, like an installer: containers run as any user,
/// regardless of the umask.
fn create_directories(root: &Path, below: &Path) -> anyhow::Result<()> {
    at(root, fs::create_dir_all(root))?;
    let mut directory = root.to_owned();
    for name in below {
        directory.push(name);
        match fs::create_dir(&directory) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                return at(&directory, Err(error));
            }
            _ => set_mode(&directory, 0o755)?,
        }
    }
    Ok(())
}

fn set_mode(path: &Path, mode: u32) -> anyhow::Result<()> {
    at(path, fs::set_permissions(path, fs::Permissions::from_mode(mode)))
}

/// Installs `lib.so -> lib.so.1 -> lib.so.580.95.05`.
fn install_library(
    directory: &Path,
    name: &str,
    source: &Path,
    world: &World,
) -> anyhow::Result<()> {
    let versioned = format!("{name}.{}", world.driver.version);
    let path = directory.join(&versioned);
    remove_other_versions(directory, name, &versioned)?;
    // Replaced by a rename: a process that has the old one loaded keeps it.
    let content = at(source, fs::read(source))?;
    at(&path, atomic_file::write(&path, &content, 0o755))?;
    replace_link(Path::new(&versioned), &directory.join(format!("{name}.1")))?;
    replace_link(Path::new(&format!("{name}.1")), &directory.join(name))
}

/// Removes the libraries of another driver version, like an upgrade.
fn remove_other_versions(directory: &Path, name: &str, versioned: &str) -> anyhow::Result<()> {
    let entries = at(directory, fs::read_dir(directory))?;
    for entry in entries.flatten() {
        let file = entry.file_name();
        let is_version = |file: &str| {
            file != versioned && file.strip_prefix(name).is_some_and(|rest| rest.starts_with('.'))
        };
        if file.to_str().is_some_and(is_version) {
            at(&entry.path(), fs::remove_file(entry.path()))?;
        }
    }
    Ok(())
}

fn replace_link(target: &Path, link: &Path) -> anyhow::Result<()> {
    match fs::remove_file(link) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return at(link, Err(error)),
        _ => {}
    }
    at(link, symlink(target, link))
}

#[cfg(test)]
mod tests;
