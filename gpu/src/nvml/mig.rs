//! MIG through NVML.

use std::collections::BTreeSet;

use nvml_wrapper::Device;
use nvml_wrapper::error::NvmlError;
use tessera_api::gpu::{Mig, MigEngines, MigInstance, MigProfile};
use tessera_api::names::{GpuUuid, MigUuid};

use super::NvmlLibrary;
use super::raw::mig::{self as raw, ComputeInstanceHandle, GpuInstanceHandle};
use crate::capabilities;
use crate::library::LibraryError;
use crate::mig::{CapabilityNode, ComputeInstance, GpuInstance, MigLibrary, MigLibraryError};

/// Number of values of `NVML_GPU_INSTANCE_PROFILE_*`, with room for drivers newer than this code:
/// unknown ones are not supported.
const PROFILE_KINDS: u32 = 0x20;

/// Compute slices by value of `NVML_COMPUTE_INSTANCE_PROFILE_*`.
const COMPUTE_SLICES: [u32; 7] = [1, 2, 3, 4, 7, 8, 6];

/// Reads profiles and instances of a GPU in MIG mode. No profiles if the driver is older than the
/// function that names them.
pub(super) fn describe(device: &Device<'_>) -> Result<Mig, NvmlError> {
    let mut profiles: Vec<MigProfile> = Vec::new();
    let mut instances = BTreeSet::new();
    for kind in 0..PROFILE_KINDS {
        let profile = match profile(device, kind) {
            Ok(profile) => profile,
            Err(NvmlError::NotSupported | NvmlError::InvalidArg) => continue,
            Err(NvmlError::FailedToLoadSymbol(_)) => return Ok(Mig::default()),
            Err(error) => return Err(error),
        };
        if profiles.iter().any(|known| known.id == profile.id) {
            continue;
        }
        for instance in raw::gpu_instances(device, profile.id)? {
            match instance.info() {
                Ok((_, instance)) => drop(instances.insert(instance)),
                // It was destroyed meanwhile.
                Err(NvmlError::NotFound) => {}
                Err(error) => return Err(error),
            }
        }
        profiles.push(profile);
    }
    Ok(Mig { profiles, instances: instances.into_iter().collect() })
}

fn profile(device: &Device<'_>, kind: u32) -> Result<MigProfile, NvmlError> {
    let info = raw::profile_info(device, kind)?;
    let placements = raw::placements(device, info.id)?;
    let name: Vec<u8> = info.name.iter().take_while(|c| **c != 0).map(|c| *c as u8).collect();
    let name = String::from_utf8_lossy(&name).into_owned();
    Ok(MigProfile {
        id: info.id,
        name: name.strip_prefix("MIG ").unwrap_or(&name).to_owned(),
        slices: info.sliceCount,
        memory_mib: info.memorySizeMB,
        engines: MigEngines {
            multiprocessors: info.multiprocessorCount,
            copy_engines: info.copyEngineCount,
            decoders: info.decoderCount,
            encoders: info.encoderCount,
            jpeg_engines: info.jpegCount,
            ofa_engines: info.ofaCount,
        },
        placements,
    })
}

impl NvmlLibrary {
    /// Runs a call on a GPU in MIG mode.
    fn with_mig<T>(
        &self,
        gpu: &GpuUuid,
        run: impl FnOnce(&Device<'_>) -> Result<T, Failed>,
    ) -> Result<T, MigLibraryError> {
        let session = self.session()?;
        let found = session.nvml().device_by_uuid(gpu.as_str());
        let device = found.map_err(|source| match source {
            NvmlError::GpuLost | NvmlError::NotFound => LibraryError::Lost { gpu: gpu.clone() },
            source => {
                let call = "nvmlDeviceGetHandleByUUID";
                LibraryError::GpuCall { gpu: gpu.clone(), call, source }
            }
        })?;
        run(&device).map_err(|Failed { call, source }| match source {
            NvmlError::GpuLost => LibraryError::Lost { gpu: gpu.clone() }.into(),
            NvmlError::NotSupported => MigLibraryError::ModeOff { gpu: gpu.clone() },
            NvmlError::NoPermission => MigLibraryError::NotPermitted { gpu: gpu.clone() },
            source => MigLibraryError::Call { gpu: gpu.clone(), call, source },
        })
    }
}

/// A call that failed.
struct Failed {
    call: &'static str,
    source: NvmlError,
}

fn failed(call: &'static str) -> impl FnOnce(NvmlError) -> Failed {
    move |source| Failed { call, source }
}

impl MigLibrary for NvmlLibrary {
    fn gpu_instances(
        &self,
        gpu: &GpuUuid,
        profile: u32,
    ) -> Result<Vec<GpuInstance>, MigLibraryError> {
        let found = self.with_mig(gpu, |device| {
            let handles = match raw::gpu_instances(device, profile) {
                Err(NvmlError::NotSupported | NvmlError::InvalidArg) => Vec::new(),
                found => found.map_err(failed("nvmlDeviceGetGpuInstances"))?,
            };
            let read = |handle: GpuInstanceHandle<'_>| {
                let (id, instance) = handle.info().map_err(failed("nvmlGpuInstanceGetInfo"))?;
                Ok((id, instance, compute_instances(&handle)?))
            };
            handles.into_iter().map(read).collect::<Result<Vec<_>, Failed>>()
        })?;
        let read = |(id, instance, compute): (u32, MigInstance, Vec<(u32, String)>)| {
            let compute = compute.into_iter().map(|(id, uuid)| compute_instance(id, &uuid));
            Ok(GpuInstance { id, instance, compute: compute.collect::<Result<_, _>>()? })
        };
        found.into_iter().map(read).collect()
    }

    fn create_gpu_instance(
        &self,
        gpu: &GpuUuid,
        profile: u32,
        start: u32,
    ) -> Result<u32, MigLibraryError> {
        const CALL: &str = "nvmlDeviceCreateGpuInstanceWithPlacement";
        let created = self.with_mig(gpu, |device| {
            let placements = raw::placements(device, profile)
                .map_err(failed("nvmlDeviceGetGpuInstancePossiblePlacements_v2"))?;
            let placement = placements.into_iter().find(|placement| placement.start == start);
            let placement = placement.ok_or(NvmlError::InvalidArg).map_err(failed(CALL))?;
            match raw::create_gpu_instance(device, profile, placement) {
                Ok(handle) => {
                    let info = handle.info().map_err(failed("nvmlGpuInstanceGetInfo"))?;
                    Ok(Some(info.0))
                }
                Err(error) if raw::is_insufficient_resources(&error) => Ok(None),
                Err(error) => Err(failed(CALL)(error)),
            }
        })?;
        created.ok_or_else(|| MigLibraryError::Taken { gpu: gpu.clone(), profile, start })
    }

    fn create_compute_instance(
        &self,
        gpu: &GpuUuid,
        gpu_instance: u32,
    ) -> Result<ComputeInstance, MigLibraryError> {
        let (id, uuid) = self.with_mig(gpu, |device| {
            let handle = raw::gpu_instance(device, gpu_instance)
                .map_err(failed("nvmlDeviceGetGpuInstanceById"))?;
            let (_, instance) = handle.info().map_err(failed("nvmlGpuInstanceGetInfo"))?;
            let slices = slices_of(device, instance.profile)?;
            let kind = COMPUTE_SLICES.iter().position(|of| *of == slices);
            let kind = u32::try_from(kind.unwrap_or(COMPUTE_SLICES.len())).unwrap_or(u32::MAX);
            let profile = handle
                .compute_profile(kind)
                .map_err(failed("nvmlGpuInstanceGetComputeInstanceProfileInfo"))?;
            let compute = handle
                .create_compute_instance(profile)
                .map_err(failed("nvmlGpuInstanceCreateComputeInstance"))?;
            identity(&compute, device)
        })?;
        compute_instance(id, &uuid)
    }

    fn destroy_gpu_instance(
        &self,
        gpu: &GpuUuid,
        gpu_instance: u32,
    ) -> Result<(), MigLibraryError> {
        let destroyed = self.with_mig(gpu, |device| {
            let handle = match raw::gpu_instance(device, gpu_instance) {
                Ok(handle) => handle,
                // MIG mode is off, so there are no instances.
                Err(NvmlError::NotFound | NvmlError::NotSupported) => return Ok(true),
                Err(error) => return Err(failed("nvmlDeviceGetGpuInstanceById")(error)),
            };
            for compute in all_compute_instances(&handle)? {
                match compute.destroy() {
                    Err(NvmlError::InUse) => return Ok(false),
                    Err(NvmlError::NotFound) | Ok(()) => {}
                    Err(error) => return Err(failed("nvmlComputeInstanceDestroy")(error)),
                }
            }
            match handle.destroy() {
                Err(NvmlError::InUse) => Ok(false),
                Err(NvmlError::NotFound) | Ok(()) => Ok(true),
                Err(error) => Err(failed("nvmlGpuInstanceDestroy")(error)),
            }
        })?;
        let in_use = || MigLibraryError::InUse { gpu: gpu.clone(), gpu_instance };
        destroyed.then_some(()).ok_or_else(in_use)
    }

    fn capability_nodes(
        &self,
        gpu: &GpuUuid,
        gpu_instance: u32,
        compute_instance: u32,
    ) -> Result<[CapabilityNode; 2], MigLibraryError> {
        let minor = self.with_mig(gpu, |device| {
            device.minor_number().map_err(failed("nvmlDeviceGetMinorNumber"))
        })?;
        capabilities::nodes(&self.options.proc_root, minor, gpu_instance, compute_instance)
    }
}

fn compute_instance(id: u32, uuid: &str) -> Result<ComputeInstance, MigLibraryError> {
    let malformed = |source| MigLibraryError::Format { call: "nvmlDeviceGetUUID", source };
    Ok(ComputeInstance { id, uuid: MigUuid::new(uuid).map_err(malformed)? })
}

/// Returns the compute slices of a profile.
fn slices_of(device: &Device<'_>, profile: u32) -> Result<u32, Failed> {
    for kind in 0..PROFILE_KINDS {
        match raw::profile_info(device, kind) {
            Ok(info) if info.id == profile => return Ok(info.sliceCount),
            Ok(_) | Err(NvmlError::NotSupported | NvmlError::InvalidArg) => {}
            Err(error) => return Err(failed("nvmlDeviceGetGpuInstanceProfileInfoV")(error)),
        }
    }
    Err(failed("nvmlDeviceGetGpuInstanceProfileInfoV")(NvmlError::NotFound))
}

fn compute_instances(handle: &GpuInstanceHandle<'_>) -> Result<Vec<(u32, String)>, Failed> {
    let all = all_compute_instances(handle)?;
    all.iter().map(|compute| identity(compute, handle.device())).collect()
}

fn all_compute_instances<'d>(
    handle: &GpuInstanceHandle<'d>,
) -> Result<Vec<ComputeInstanceHandle<'d>>, Failed> {
    let mut all = Vec::new();
    for kind in 0..COMPUTE_SLICES.len() as u32 {
        let profile = match handle.compute_profile(kind) {
            Ok(profile) => profile,
            Err(NvmlError::NotSupported | NvmlError::InvalidArg) => continue,
            Err(error) => {
                return Err(failed("nvmlGpuInstanceGetComputeInstanceProfileInfo")(error));
            }
        };
        all.extend(
            handle
                .compute_instances(profile)
                .map_err(failed("nvmlGpuInstanceGetComputeInstances"))?,
        );
    }
    Ok(all)
}

/// Returns ID and UUID of a compute instance.
fn identity(
    compute: &ComputeInstanceHandle<'_>,
    device: &Device<'_>,
) -> Result<(u32, String), Failed> {
    let (id, mig) = compute.info(device).map_err(failed("nvmlComputeInstanceGetInfo_v2"))?;
    Ok((id, mig.uuid().map_err(failed("nvmlDeviceGetUUID"))?))
}
