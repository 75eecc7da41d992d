//! Description of one GPU.

use std::path::Path;

use nvml_wrapper::Device;
use nvml_wrapper::enums::device::DeviceArchitecture;
use nvml_wrapper::error::NvmlError;
use tessera_api::gpu::{ComputeCapability, Gpu, Health, Mig, Unpublished, UnpublishedReason};
use tessera_api::names::{GpuUuid, PciBusId};

use super::session::{Session, Versions};
use super::{NvmlOptions, mig};
use crate::sysfs::{self, PciLocation};

/// A call that failed.
struct FailedCall {
    call: &'static str,
    error: String,
    lost: bool,
}

impl FailedCall {
    fn nvml(call: &'static str) -> impl FnOnce(NvmlError) -> Self {
        move |error| Self {
            call,
            lost: matches!(error, NvmlError::GpuLost),
            error: error.to_string(),
        }
    }

    /// Returns the error of an answer that does not have the documented format.
    fn format(call: &'static str) -> impl FnOnce(tessera_api::names::NameError) -> Self {
        move |error| Self { call, lost: false, error: error.to_string() }
    }
}

/// Reads the GPU of an index. A GPU with unreadable required properties is unpublished.
pub(super) fn gpu(
    session: &Session,
    index: u32,
    versions: &Versions,
    options: &NvmlOptions,
) -> Result<Gpu, Unpublished> {
    let mut uuid = None;
    read(session, index, versions, options, &mut uuid).map_err(|failed| Unpublished {
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

/// Reads the GPU. Sets `identity` as soon as it is known, so that a later error can name the GPU.
fn read(
    session: &Session,
    index: u32,
    versions: &Versions,
    options: &NvmlOptions,
    identity: &mut Option<GpuUuid>,
) -> Result<Gpu, FailedCall> {
    let device = session
        .nvml()
        .device_by_index(index)
        .map_err(FailedCall::nvml("nvmlDeviceGetHandleByIndex_v2"))?;
    let uuid = device.uuid().map_err(FailedCall::nvml("nvmlDeviceGetUUID"))?;
    let uuid = GpuUuid::new(uuid).map_err(FailedCall::format("nvmlDeviceGetUUID"))?;
    *identity = Some(uuid.clone());
    let pci = device.pci_info().map_err(FailedCall::nvml("nvmlDeviceGetPciInfo_v3"))?;
    let pci_bus_id =
        PciBusId::new(pci.bus_id).map_err(FailedCall::format("nvmlDeviceGetPciInfo_v3"))?;
    let capability = device
        .cuda_compute_capability()
        .map_err(FailedCall::nvml("nvmlDeviceGetCudaComputeCapability"))?;
    let location = pci_location(&options.sysfs_root, &pci_bus_id);
    Ok(Gpu {
        uuid,
        index,
        minor: device.minor_number().map_err(FailedCall::nvml("nvmlDeviceGetMinorNumber"))?,
        product_name: device.name().map_err(FailedCall::nvml("nvmlDeviceGetName"))?,
        architecture: architecture(&device),
        memory_bytes: device
            .memory_info()
            .map_err(FailedCall::nvml("nvmlDeviceGetMemoryInfo_v2"))?
            .total,
        cuda_compute_capability: ComputeCapability {
            major: u32::try_from(capability.major).unwrap_or(0),
            minor: u32::try_from(capability.minor).unwrap_or(0),
        },
        driver_version: versions.driver.clone(),
        cuda_driver_version: versions.cuda,
        pcie_root: location.as_ref().map(|location| location.pcie_root.clone()),
        numa_node: location.and_then(|location| location.numa_node),
        pci_bus_id,
        mig: mig_of(&device, options)?,
        health: Health::Healthy,
    })
}

/// Reads the location. A GPU of unknown location is usable, but satisfies no constraint on it.
fn pci_location(root: &Path, device: &PciBusId) -> Option<PciLocation> {
    match sysfs::pci_location(root, device) {
        Ok(location) => Some(location),
        Err(error) => {
            tracing::warn!(%device, %error, "cannot read PCIe root and NUMA node of GPU");
            None
        }
    }
}

/// Returns the architecture, or an empty string if NVML or the wrapper does not know it.
fn architecture(device: &Device<'_>) -> String {
    match device.architecture() {
        Ok(DeviceArchitecture::Unknown) | Err(_) => String::new(),
        Ok(architecture) => architecture.to_string(),
    }
}

/// Returns MIG if its mode is on.
fn mig_of(device: &Device<'_>, options: &NvmlOptions) -> Result<Option<Mig>, FailedCall> {
    if !is_mig_enabled(device)? {
        return Ok(None);
    }
    if !options.mig {
        return Ok(Some(Mig::default()));
    }
    let call = "nvmlDeviceGetGpuInstanceProfileInfoV";
    mig::describe(device).map(Some).map_err(FailedCall::nvml(call))
}

/// Returns true if MIG is enabled. GPUs without MIG do not support the call.
fn is_mig_enabled(device: &Device<'_>) -> Result<bool, FailedCall> {
    match device.mig_mode() {
        Ok(mode) => Ok(mode.current != 0),
        // Drivers older than MIG do not have the symbol.
        Err(NvmlError::NotSupported | NvmlError::FailedToLoadSymbol(_)) => Ok(false),
        Err(error) => Err(FailedCall::nvml("nvmlDeviceGetMigMode")(error)),
    }
}
