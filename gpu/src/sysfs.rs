//! Where a PCI device is, by the kernel's word.
//!
//! NVML knows the distance between two GPUs and not the place of one: PCIe root and NUMA node come
//! from `<sysfs>/bus/pci/devices/<address>`, a link into
//! `<sysfs>/devices/pci<domain>:<bus>/<bridge>/.../<address>`.

use std::fs;
use std::io;
use std::path::{Component, Path, PathBuf};

use tessera_api::names::PciBusId;

/// Why the place of a device could not be read.
#[derive(Debug, thiserror::Error)]
pub enum SysfsError {
    /// The device is not in sysfs, or its link leads nowhere.
    #[error("PCI device {device} is not in sysfs at `{path}`: check --sysfs-root")]
    Missing {
        /// The device.
        device: PciBusId,
        /// Where it was looked for.
        path: PathBuf,
        /// Why it was not found.
        source: io::Error,
    },
    /// The link does not lead through a host bridge.
    #[error("PCI device {device} is at `{path}`, which has no `pci<domain>:<bus>` in it")]
    NoRoot {
        /// The device.
        device: PciBusId,
        /// Where its link leads.
        path: PathBuf,
    },
    /// `numa_node` is not a number.
    #[error("`{path}` says `{content}`, which is not a NUMA node")]
    NumaNode {
        /// The file.
        path: PathBuf,
        /// What it says.
        content: String,
    },
}

/// Where a device is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// The host bridge's name, `pci0000:16`: the value of `resource.kubernetes.io/pcieRoot`.
    pub pcie_root: String,
    /// The NUMA node; `None` on machines without NUMA.
    pub numa_node: Option<i32>,
}

/// Reads where a device is, from the sysfs mounted at `root`.
///
/// # Errors
/// The device is not there, or sysfs does not look as the kernel's does.
pub fn place(root: &Path, device: &PciBusId) -> Result<Place, SysfsError> {
    let link = root.join("bus/pci/devices").join(device.to_string());
    let missing =
        |source| SysfsError::Missing { device: device.clone(), path: link.clone(), source };
    let path = fs::canonicalize(&link).map_err(missing)?;
    let pcie_root = host_bridge(&path)
        .ok_or_else(|| SysfsError::NoRoot { device: device.clone(), path: path.clone() })?;
    Ok(Place { pcie_root, numa_node: numa_node(&path.join("numa_node"))? })
}

fn host_bridge(path: &Path) -> Option<String> {
    let names = path.components().filter_map(|component| match component {
        Component::Normal(name) => name.to_str(),
        _ => None,
    });
    let is_bridge = |name: &&str| name.strip_prefix("pci").is_some_and(|rest| rest.contains(':'));
    names.into_iter().find(is_bridge).map(str::to_owned)
}

/// The kernel writes -1 where there is no NUMA; kernels built without it have no such file.
fn numa_node(path: &Path) -> Result<Option<i32>, SysfsError> {
    let Ok(content) = fs::read_to_string(path) else { return Ok(None) };
    let content = content.trim();
    match content.parse::<i32>() {
        Ok(node) => Ok((node >= 0).then_some(node)),
        Err(_) => Err(SysfsError::NumaNode { path: path.to_owned(), content: content.to_owned() }),
    }
}

#[cfg(test)]
mod tests;
