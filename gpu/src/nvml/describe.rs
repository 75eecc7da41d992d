//! What one GPU is.

use std::path::Path;

use nvml_wrapper::Device;
use nvml_wrapper::enums::device::DeviceArchitecture;
use nvml_wrapper::error::NvmlError;
use tessera_api::gpu::{ComputeCapability, Gpu, Health, Unpublished, UnpublishedReason};
use tessera_api::names::{GpuUuid, PciBusId};

use super::session::{Session, Versions};
use crate::sysfs::{self, Place};

/// A call that failed.
struct Failed {
    call: &'static str,
    error: String,
    lost: bool,
}

impl Failed {
    fn nvml(call: &'static str) -> impl FnOnce(NvmlError) -> Self {
        move |error| Self {
            call,
            lost: matches!(error, NvmlError::GpuLost),
            error: error.to_string(),
        }
    }

    /// NVML answered, and not in the form that it documents.
    fn form(call: &'static str) -> impl FnOnce(tessera_api::names::NameError) -> Self {
        move |error| Self { call, lost: false, error: error.to_string() }
    }
}

/// Reads the GPU with that index. What must be known and cannot be read makes it unpublished.
pub(super) fn gpu(
    session: &Session,
    index: u32,
    versions: &Versions,
    sysfs_root: &Path,
) -> Result<Gpu, Unpublished> {
    let mut uuid = None;
    read(session, index, versions, sysfs_root, &mut uuid).map_err(|failed| Unpublished {
        uuid,
        index: Some(index),
        pci_bus_id: None,
        reason: if failed.lost {
            UnpublishedReason::Lost
        } else {
            UnpublishedReason::Unreadable { call: failed.call.to_owned(), error: failed.error }
        },
    })
}

/// `identity` is set as soon as it is known, so that a failure after it can name the GPU.
fn read(
    session: &Session,
    index: u32,
    versions: &Versions,
    sysfs_root: &Path,
    identity: &mut Option<GpuUuid>,
) -> Result<Gpu, Failed> {
    let device = session
        .nvml()
        .device_by_index(index)
        .map_err(Failed::nvml("nvmlDeviceGetHandleByIndex_v2"))?;
    let uuid = device.uuid().map_err(Failed::nvml("nvmlDeviceGetUUID"))?;
    let uuid = GpuUuid::new(uuid).map_err(Failed::form("nvmlDeviceGetUUID"))?;
    *identity = Some(uuid.clone());
    let pci = device.pci_info().map_err(Failed::nvml("nvmlDeviceGetPciInfo_v3"))?;
    let pci_bus_id = PciBusId::new(pci.bus_id).map_err(Failed::form("nvmlDeviceGetPciInfo_v3"))?;
    let capability = device
        .cuda_compute_capability()
        .map_err(Failed::nvml("nvmlDeviceGetCudaComputeCapability"))?;
    let place = place(sysfs_root, &pci_bus_id);
    Ok(Gpu {
        uuid,
        index,
        minor: device.minor_number().map_err(Failed::nvml("nvmlDeviceGetMinorNumber"))?,
        product_name: device.name().map_err(Failed::nvml("nvmlDeviceGetName"))?,
        architecture: architecture(&device),
        memory_bytes: device
            .memory_info()
            .map_err(Failed::nvml("nvmlDeviceGetMemoryInfo_v2"))?
            .total,
        cuda_compute_capability: ComputeCapability {
            major: u32::try_from(capability.major).unwrap_or(0),
            minor: u32::try_from(capability.minor).unwrap_or(0),
        },
        driver_version: versions.driver.clone(),
        cuda_driver_version: versions.cuda,
        pcie_root: place.as_ref().map(|place| place.pcie_root.clone()),
        numa_node: place.and_then(|place| place.numa_node),
        pci_bus_id,
        mig_enabled: mig_is_on(&device)?,
        health: Health::Healthy,
    })
}

/// A GPU whose place is unknown can be used; only constraints on the place cannot be met with it.
fn place(root: &Path, device: &PciBusId) -> Option<Place> {
    match sysfs::place(root, device) {
        Ok(place) => Some(place),
        Err(error) => {
            tracing::warn!(%device, %error, "PCIe root and NUMA node of the GPU are unknown");
            None
        }
    }
}

/// Empty where NVML, or the wrapper, is older than the GPU.
fn architecture(device: &Device<'_>) -> String {
    match device.architecture() {
        Ok(DeviceArchitecture::Unknown) | Err(_) => String::new(),
        Ok(architecture) => architecture.to_string(),
    }
}

/// GPUs that cannot do MIG do not support the question.
fn mig_is_on(device: &Device<'_>) -> Result<bool, Failed> {
    match device.mig_mode() {
        Ok(mode) => Ok(mode.current != 0),
        // The symbol is missing in drivers from before MIG.
        Err(NvmlError::NotSupported | NvmlError::FailedToLoadSymbol(_)) => Ok(false),
        Err(error) => Err(Failed::nvml("nvmlDeviceGetMigMode")(error)),
    }
}
