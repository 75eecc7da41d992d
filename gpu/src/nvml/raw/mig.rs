//! NVML calls of MIG. The wrapper has none that create, destroy or list instances
//! (nvml-wrapper 0.13.0).
//!
//! Handles borrow the device, and so its session. NVML answers `NOT_FOUND` or `INVALID_ARGUMENT`
//! for the handle of an instance that was destroyed since.

use nvml_wrapper::Device;
use nvml_wrapper::error::{NvmlError, nvml_sym, nvml_try};
use nvml_wrapper_sys::bindings::{
    NvmlLib, nvmlComputeInstance_t, nvmlComputeInstanceInfo_t, nvmlComputeInstancePlacement_t,
    nvmlComputeInstanceProfileInfo_t, nvmlGpuInstance_t, nvmlGpuInstanceInfo_t,
    nvmlGpuInstancePlacement_t, nvmlGpuInstanceProfileInfo_v2_t,
    nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_RESOURCES,
};
use tessera_api::gpu::{MigInstance, MigPlacement};

/// More than the instances or placements of any profile: a GPU has at most 8 memory slices, and a
/// placement of a profile begins at one of them.
const ROOM: usize = 32;

/// Engines of a compute instance: shared by those of its GPU instance.
const SHARED_ENGINES: u32 = 0;

/// Returns true if the error says that memory slices or engines are in use.
pub(in crate::nvml) fn is_insufficient_resources(error: &NvmlError) -> bool {
    // The wrapper has no variant for it.
    matches!(error, NvmlError::UnexpectedVariant(code)
        if *code == nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_RESOURCES)
}

/// Returns the profile of a value of `NVML_GPU_INSTANCE_PROFILE_*`.
pub(in crate::nvml) fn profile_info(
    device: &Device<'_>,
    kind: u32,
) -> Result<nvmlGpuInstanceProfileInfo_v2_t, NvmlError> {
    let call = nvml_sym(lib(device).nvmlDeviceGetGpuInstanceProfileInfoV.as_ref())?;
    let mut info = nvmlGpuInstanceProfileInfo_v2_t {
        // nvmlGpuInstanceProfileInfo_v2: the size, and version 2.
        version: size_of::<nvmlGpuInstanceProfileInfo_v2_t>() as u32 | 2 << 24,
        id: 0,
        isP2pSupported: 0,
        sliceCount: 0,
        instanceCount: 0,
        multiprocessorCount: 0,
        copyEngineCount: 0,
        decoderCount: 0,
        encoderCount: 0,
        jpegCount: 0,
        ofaCount: 0,
        memorySizeMB: 0,
        name: [0; 96],
    };
    // SAFETY: the handle belongs to the device's session, and the struct, which says its version,
    // outlives the call.
    nvml_try(unsafe { call(device.handle(), kind, &mut info) })?;
    Ok(info)
}

/// Returns the placements of a profile.
pub(in crate::nvml) fn placements(
    device: &Device<'_>,
    profile: u32,
) -> Result<Vec<MigPlacement>, NvmlError> {
    let call = nvml_sym(lib(device).nvmlDeviceGetGpuInstancePossiblePlacements_v2.as_ref())?;
    let mut found = [nvmlGpuInstancePlacement_t { start: 0, size: 0 }; ROOM];
    let mut count = 0;
    // SAFETY: as in `profile_info`; the array has room for all placements of a profile.
    nvml_try(unsafe { call(device.handle(), profile, found.as_mut_ptr(), &mut count) })?;
    Ok(found[..(count as usize).min(ROOM)].iter().map(placement).collect())
}

fn placement(raw: &nvmlGpuInstancePlacement_t) -> MigPlacement {
    MigPlacement { start: raw.start, size: raw.size }
}

/// Returns the GPU instances of a profile.
pub(in crate::nvml) fn gpu_instances<'d>(
    device: &'d Device<'d>,
    profile: u32,
) -> Result<Vec<GpuInstanceHandle<'d>>, NvmlError> {
    let call = nvml_sym(lib(device).nvmlDeviceGetGpuInstances.as_ref())?;
    let mut found: [nvmlGpuInstance_t; ROOM] = [std::ptr::null_mut(); ROOM];
    let mut count = 0;
    // SAFETY: as in `profile_info`; the array has room for all instances of a profile.
    nvml_try(unsafe { call(device.handle(), profile, found.as_mut_ptr(), &mut count) })?;
    let found = &found[..(count as usize).min(ROOM)];
    Ok(found.iter().map(|raw| GpuInstanceHandle { device, raw: *raw }).collect())
}

/// Returns the GPU instance with this ID.
pub(in crate::nvml) fn gpu_instance<'d>(
    device: &'d Device<'d>,
    id: u32,
) -> Result<GpuInstanceHandle<'d>, NvmlError> {
    let call = nvml_sym(lib(device).nvmlDeviceGetGpuInstanceById.as_ref())?;
    let mut raw: nvmlGpuInstance_t = std::ptr::null_mut();
    // SAFETY: as in `profile_info`.
    nvml_try(unsafe { call(device.handle(), id, &mut raw) })?;
    Ok(GpuInstanceHandle { device, raw })
}

/// Creates a GPU instance.
pub(in crate::nvml) fn create_gpu_instance<'d>(
    device: &'d Device<'d>,
    profile: u32,
    placement: MigPlacement,
) -> Result<GpuInstanceHandle<'d>, NvmlError> {
    let call = nvml_sym(lib(device).nvmlDeviceCreateGpuInstanceWithPlacement.as_ref())?;
    let placement = nvmlGpuInstancePlacement_t { start: placement.start, size: placement.size };
    let mut raw: nvmlGpuInstance_t = std::ptr::null_mut();
    // SAFETY: as in `profile_info`; the placement is only read.
    nvml_try(unsafe { call(device.handle(), profile, &placement, &mut raw) })?;
    Ok(GpuInstanceHandle { device, raw })
}

fn lib<'d>(device: &'d Device<'_>) -> &'d NvmlLib {
    device.nvml().lib()
}

/// A GPU instance of a device.
pub(in crate::nvml) struct GpuInstanceHandle<'d> {
    device: &'d Device<'d>,
    raw: nvmlGpuInstance_t,
}

impl<'d> GpuInstanceHandle<'d> {
    /// Returns the device.
    pub(in crate::nvml) fn device(&self) -> &'d Device<'d> {
        self.device
    }

    /// Returns ID, profile and placement.
    pub(in crate::nvml) fn info(&self) -> Result<(u32, MigInstance), NvmlError> {
        let call = nvml_sym(lib(self.device).nvmlGpuInstanceGetInfo.as_ref())?;
        let mut info = nvmlGpuInstanceInfo_t {
            device: std::ptr::null_mut(),
            id: 0,
            profileId: 0,
            placement: nvmlGpuInstancePlacement_t { start: 0, size: 0 },
        };
        // SAFETY: the handle is of this session, which checks it, and the struct outlives the call.
        nvml_try(unsafe { call(self.raw, &mut info) })?;
        let placement = placement(&info.placement);
        Ok((info.id, MigInstance { profile: info.profileId, placement }))
    }

    /// Returns the ID of the profile of a value of `NVML_COMPUTE_INSTANCE_PROFILE_*`.
    pub(in crate::nvml) fn compute_profile(&self, kind: u32) -> Result<u32, NvmlError> {
        let lib = lib(self.device);
        let call = nvml_sym(lib.nvmlGpuInstanceGetComputeInstanceProfileInfo.as_ref())?;
        let mut info = nvmlComputeInstanceProfileInfo_t {
            id: 0,
            sliceCount: 0,
            instanceCount: 0,
            multiprocessorCount: 0,
            sharedCopyEngineCount: 0,
            sharedDecoderCount: 0,
            sharedEncoderCount: 0,
            sharedJpegCount: 0,
            sharedOfaCount: 0,
        };
        // SAFETY: as in `info`.
        nvml_try(unsafe { call(self.raw, kind, SHARED_ENGINES, &mut info) })?;
        Ok(info.id)
    }

    /// Returns the compute instances of a profile.
    pub(in crate::nvml) fn compute_instances(
        &self,
        profile: u32,
    ) -> Result<Vec<ComputeInstanceHandle<'d>>, NvmlError> {
        let call = nvml_sym(lib(self.device).nvmlGpuInstanceGetComputeInstances.as_ref())?;
        let mut found: [nvmlComputeInstance_t; ROOM] = [std::ptr::null_mut(); ROOM];
        let mut count = 0;
        // SAFETY: as in `info`; the array has room for all compute instances of a GPU instance.
        nvml_try(unsafe { call(self.raw, profile, found.as_mut_ptr(), &mut count) })?;
        let found = &found[..(count as usize).min(ROOM)];
        let handle =
            |raw: &nvmlComputeInstance_t| ComputeInstanceHandle { device: self.device, raw: *raw };
        Ok(found.iter().map(handle).collect())
    }

    /// Creates a compute instance.
    pub(in crate::nvml) fn create_compute_instance(
        &self,
        profile: u32,
    ) -> Result<ComputeInstanceHandle<'d>, NvmlError> {
        let call = nvml_sym(lib(self.device).nvmlGpuInstanceCreateComputeInstance.as_ref())?;
        let mut raw: nvmlComputeInstance_t = std::ptr::null_mut();
        // SAFETY: as in `info`.
        nvml_try(unsafe { call(self.raw, profile, &mut raw) })?;
        Ok(ComputeInstanceHandle { device: self.device, raw })
    }

    /// Destroys the instance, which has no compute instances.
    pub(in crate::nvml) fn destroy(&self) -> Result<(), NvmlError> {
        let call = nvml_sym(lib(self.device).nvmlGpuInstanceDestroy.as_ref())?;
        // SAFETY: as in `info`. NVML checks handles of destroyed instances.
        nvml_try(unsafe { call(self.raw) })
    }
}

/// A compute instance of a device.
pub(in crate::nvml) struct ComputeInstanceHandle<'d> {
    device: &'d Device<'d>,
    raw: nvmlComputeInstance_t,
}

impl ComputeInstanceHandle<'_> {
    /// Returns its ID and its MIG device, a device of the same session as `parent`.
    pub(in crate::nvml) fn info<'n>(
        &self,
        parent: &Device<'n>,
    ) -> Result<(u32, Device<'n>), NvmlError> {
        let call = nvml_sym(lib(self.device).nvmlComputeInstanceGetInfo_v2.as_ref())?;
        let mut info = nvmlComputeInstanceInfo_t {
            device: std::ptr::null_mut(),
            gpuInstance: std::ptr::null_mut(),
            id: 0,
            profileId: 0,
            placement: nvmlComputeInstancePlacement_t { start: 0, size: 0 },
        };
        // SAFETY: the handle is of this session, and the struct outlives the call.
        nvml_try(unsafe { call(self.raw, &mut info) })?;
        // SAFETY: NVML returned the handle of a MIG device of the same session.
        Ok((info.id, unsafe { Device::new(info.device, parent.nvml()) }))
    }

    /// Destroys the instance.
    pub(in crate::nvml) fn destroy(&self) -> Result<(), NvmlError> {
        let call = nvml_sym(lib(self.device).nvmlComputeInstanceDestroy.as_ref())?;
        // SAFETY: the handle is of this session, which checks it.
        nvml_try(unsafe { call(self.raw) })
    }
}
