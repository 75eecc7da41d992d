//! Capability devices of MIG instances, read from the kernel driver's files in procfs.
//!
//! `nvidia-container-toolkit` reads the same files (`internal/nvcaps`).

use std::fs;
use std::path::Path;

use crate::mig::{CapabilityNode, MigLibraryError};

/// Returns the nodes of a GPU instance and of one of its compute instances.
pub(crate) fn nodes(
    proc_root: &Path,
    gpu_minor: u32,
    gpu_instance: u32,
    compute_instance: u32,
) -> Result<[CapabilityNode; 2], MigLibraryError> {
    let major = major(proc_root)?;
    let directory =
        proc_root.join(format!("driver/nvidia/capabilities/gpu{gpu_minor}/mig/gi{gpu_instance}"));
    let of_gpu_instance = minor(&directory.join("access"))?;
    let of_compute_instance = minor(&directory.join(format!("ci{compute_instance}/access")))?;
    Ok([of_gpu_instance, of_compute_instance].map(|minor| CapabilityNode { major, minor }))
}

/// Returns the major number of `nvidia-caps`, which the kernel assigns.
fn major(proc_root: &Path) -> Result<u32, MigLibraryError> {
    let path = proc_root.join("devices");
    let text = read(&path)?;
    let number = text.lines().find_map(|line| {
        let mut words = line.split_whitespace();
        let number = words.next()?.parse().ok()?;
        (words.next() == Some("nvidia-caps")).then_some(number)
    });
    number.ok_or_else(|| malformed(&path, "it has no character device `nvidia-caps`"))
}

/// Returns the `DeviceFileMinor` of a capability file.
fn minor(path: &Path) -> Result<u32, MigLibraryError> {
    let text = read(path)?;
    let number =
        text.lines().find_map(|line| line.strip_prefix("DeviceFileMinor:")?.trim().parse().ok());
    number.ok_or_else(|| malformed(path, "it has no number `DeviceFileMinor`"))
}

fn read(path: &Path) -> Result<String, MigLibraryError> {
    fs::read_to_string(path).map_err(|error| malformed(path, &error.to_string()))
}

fn malformed(path: &Path, reason: &str) -> MigLibraryError {
    MigLibraryError::Capability { path: path.display().to_string(), reason: reason.to_owned() }
}
