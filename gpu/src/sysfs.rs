//! Location of a PCI device, read from sysfs.
//!
//! NVML reports the distance between two GPUs, but not the location of one. PCIe root and NUMA node
//! come from `<sysfs>/bus/pci/devices/<address>`, a link into
//! `<sysfs>/devices/pci<domain>:<bus>/<bridge>/.../<address>`.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Component, Path, PathBuf};

use tessera_api::names::PciBusId;

/// Error of reading a device's location.
#[derive(Debug, thiserror::Error)]
pub enum SysfsError {
    /// The device is not in sysfs, or its link is broken.
    #[error("PCI device {device} not found in sysfs at `{path}`: check --sysfs-root")]
    Missing {
        /// PCI address of the device.
        device: PciBusId,
        /// Path of the link.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
    /// The link's target is not below a host bridge.
    #[error("PCI device {device} has no host bridge `pci<domain>:<bus>` in its path `{path}`")]
    NoRoot {
        /// PCI address of the device.
        device: PciBusId,
        /// Target of the link.
        path: PathBuf,
    },
    /// The content of `numa_node` is not a number.
    #[error("invalid NUMA node `{content}` in `{path}`")]
    NumaNode {
        /// Path of the file.
        path: PathBuf,
        /// Content of the file.
        content: String,
    },
}

/// Location of a PCI device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PciLocation {
    /// Name of the host bridge, such as `pci0000:16`: the value of
    /// `resource.kubernetes.io/pcieRoot`.
    pub pcie_root: String,
    /// NUMA node; `None` on machines without NUMA.
    pub numa_node: Option<i32>,
}

/// Returns the PCI addresses of the devices that are bound to NVIDIA's kernel driver; none if sysfs
/// has no such driver.
pub fn bound_gpus(root: &Path) -> Option<BTreeSet<String>> {
    let entries = fs::read_dir(root.join("bus/pci/drivers/nvidia")).ok()?;
    let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    // Beside the links there are files such as `bind` and `new_id`.
    Some(names.filter(|name| name.parse::<PciBusId>().is_ok()).collect())
}

/// Reads the location of a device from the sysfs mounted at `root`.
///
/// # Errors
/// The device does not exist, or sysfs does not have the kernel's layout.
pub fn pci_location(root: &Path, device: &PciBusId) -> Result<PciLocation, SysfsError> {
    let link = root.join("bus/pci/devices").join(device.to_string());
    let missing =
        |source| SysfsError::Missing { device: device.clone(), path: link.clone(), source };
    let path = fs::canonicalize(&link).map_err(missing)?;
    let pcie_root = host_bridge(&path)
        .ok_or_else(|| SysfsError::NoRoot { device: device.clone(), path: path.clone() })?;
    Ok(PciLocation { pcie_root, numa_node: numa_node(&path.join("numa_node"))? })
}

fn host_bridge(path: &Path) -> Option<String> {
    let names = path.components().filter_map(|component| match component {
        Component::Normal(name) => name.to_str(),
        _ => None,
    });
    let is_bridge = |name: &&str| name.strip_prefix("pci").is_some_and(|rest| rest.contains(':'));
    names.into_iter().find(is_bridge).map(str::to_owned)
}

/// Reads the NUMA node. The kernel writes -1 on machines without NUMA; kernels built without NUMA
/// have no such file.
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
