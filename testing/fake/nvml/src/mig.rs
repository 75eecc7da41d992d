//! MIG: profiles, GPU instances, compute instances and MIG devices.

use std::ffi::c_uint;
use std::sync::{Mutex, PoisonError};

use nvml_wrapper_sys::bindings::{
    nvmlComputeInstanceInfo_t, nvmlComputeInstancePlacement_t, nvmlComputeInstanceProfileInfo_t,
    nvmlGpuInstanceInfo_t, nvmlGpuInstancePlacement_t, nvmlGpuInstanceProfileInfo_t,
    nvmlGpuInstanceProfileInfo_v2_t,
};
use tessera_fake_world::MigError;
use tessera_fake_world::mig::{ComputeInstance, GpuInstance, MigProfile, MigState};

use crate::abi::{Code, Device, Handle, NvmlResult, OutPtr, export};

/// An object of MIG that a handle names.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Object {
    /// GPU instance, by index of the GPU and serial number.
    GpuInstance(usize, u64),
    /// Compute instance, by index of the GPU and UUID.
    ComputeInstance(usize, String),
    /// MIG device, by index of the GPU and UUID.
    Device(usize, String),
}

/// Objects by the number of their handle. A handle is not used again for another object.
static OBJECTS: Mutex<Vec<Object>> = Mutex::new(Vec::new());

/// `nvmlGpuInstance_t` and `nvmlComputeInstance_t`: opaque to the caller, never dereferenced.
#[repr(transparent)]
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct InstanceHandle(Handle);

fn handle_of(object: Object) -> Handle {
    let mut objects = OBJECTS.lock().unwrap_or_else(PoisonError::into_inner);
    let known = objects.iter().position(|other| *other == object);
    let number = known.unwrap_or_else(|| {
        objects.push(object);
        objects.len() - 1
    });
    Handle::of_mig(number)
}

fn object_of(handle: Handle) -> NvmlResult<Object> {
    let objects = OBJECTS.lock().unwrap_or_else(PoisonError::into_inner);
    let object = handle.mig_number().and_then(|number| objects.get(number));
    object.cloned().ok_or(Code::InvalidArgument)
}

impl From<MigError> for Code {
    fn from(error: MigError) -> Self {
        match error {
            MigError::NotSupported => Self::NotSupported,
            MigError::InvalidArgument => Self::InvalidArgument,
            MigError::InsufficientResources => Self::InsufficientResources,
            MigError::NotFound => Self::NotFound,
            MigError::InUse => Self::InUse,
            MigError::NoPermission => Self::NoPermission,
        }
    }
}

impl Device {
    fn mig_state(&self) -> MigState {
        self.machine.mig_state(self)
    }
}

impl InstanceHandle {
    /// Returns the GPU and GPU instance of the handle.
    fn gpu_instance(self) -> NvmlResult<(Device, GpuInstance)> {
        let Object::GpuInstance(gpu, serial) = object_of(self.0)? else {
            return Err(Code::InvalidArgument);
        };
        let device = Handle::of(gpu).device()?;
        let found = device.mig_state().gpu_instance(serial).cloned();
        Ok((device, found.ok_or(Code::NotFound)?))
    }

    /// Returns the GPU, GPU instance and compute instance of the handle.
    fn compute_instance(self) -> NvmlResult<(Device, GpuInstance, ComputeInstance)> {
        match object_of(self.0)? {
            Object::ComputeInstance(gpu, uuid) => by_uuid(gpu, &uuid),
            _ => Err(Code::InvalidArgument),
        }
    }
}

fn by_uuid(gpu: usize, uuid: &str) -> NvmlResult<(Device, GpuInstance, ComputeInstance)> {
    let device = Handle::of(gpu).device()?;
    let state = device.mig_state();
    let found = state.gpu_instances.iter().find_map(|instance| {
        let compute = instance.compute.iter().find(|compute| compute.uuid == uuid)?;
        Some((instance.clone(), compute.clone()))
    });
    let (instance, compute) = found.ok_or(Code::NotFound)?;
    Ok((device, instance, compute))
}

/// A MIG device during one call.
pub(crate) struct MigDevice {
    pub(crate) gpu: Handle,
    pub(crate) uuid: String,
    pub(crate) name: String,
    pub(crate) memory_mib: u64,
    gpu_instance: u32,
    compute_instance: u32,
}

impl MigDevice {
    /// Returns the MIG device of a handle, or `None` if it is the handle of a GPU.
    pub(crate) fn of(handle: Handle) -> NvmlResult<Option<Self>> {
        if handle.mig_number().is_none() {
            return Ok(None);
        }
        let Object::Device(gpu, uuid) = object_of(handle)? else {
            return Err(Code::InvalidArgument);
        };
        let (device, instance, compute) = by_uuid(gpu, &uuid)?;
        let table = device.machine.mig_table(&device)?;
        let profile = table.profile(instance.profile).ok_or(Code::NotFound)?;
        Ok(Some(Self {
            gpu: Handle::of(gpu),
            name: format!("{} MIG {}", device.model.name, profile.name),
            memory_mib: profile.memory_mib,
            uuid,
            gpu_instance: instance.id,
            compute_instance: compute.id,
        }))
    }

    fn required(handle: Handle) -> NvmlResult<Self> {
        Self::of(handle)?.ok_or(Code::InvalidArgument)
    }
}

/// Compute slices of a profile of compute instances: the enum and the IDs of NVIDIA's drivers.
fn slices_of_compute_profile(kind: c_uint) -> NvmlResult<u32> {
    [1, 2, 3, 4, 7, 8, 6].get(kind as usize).copied().ok_or(Code::NotSupported)
}

fn compute_profile(slices: u32) -> c_uint {
    [1, 2, 3, 4, 7, 8, 6].iter().position(|of| *of == slices).unwrap_or(0) as c_uint
}

fn profile_info(profile: &MigProfile) -> nvmlGpuInstanceProfileInfo_t {
    nvmlGpuInstanceProfileInfo_t {
        id: profile.id,
        isP2pSupported: 0,
        sliceCount: profile.slices,
        instanceCount: profile.max,
        multiprocessorCount: profile.multiprocessors,
        copyEngineCount: profile.copy_engines,
        decoderCount: profile.decoders,
        encoderCount: 0,
        jpegCount: profile.jpeg_engines,
        ofaCount: profile.ofa_engines,
        memorySizeMB: profile.memory_mib,
    }
}

fn placement_info(placement: &tessera_fake_world::mig::MigPlacement) -> nvmlGpuInstancePlacement_t {
    nvmlGpuInstancePlacement_t { start: placement.start, size: placement.size }
}

fn create_gpu_instance(
    handle: Handle,
    profile: c_uint,
    start: Option<u32>,
    out: OutPtr<InstanceHandle>,
) -> NvmlResult {
    let device = handle.device()?;
    if out.is_null() {
        return Err(Code::InvalidArgument);
    }
    let serial = device
        .machine
        .change_mig(&device, |state, table| state.create_gpu_instance(table, profile, start))?;
    out.set(InstanceHandle(handle_of(Object::GpuInstance(device.gpu_index(), serial))))
}

export! {
    fn nvmlDeviceGetGpuInstanceProfileInfo(
        device: Handle, kind: c_uint, info: OutPtr<nvmlGpuInstanceProfileInfo_t>,
    ) {
        let device = device.device()?;
        let table = device.machine.mig_table(&device)?;
        info.set(profile_info(table.profile_of_kind(kind).ok_or(Code::NotSupported)?))
    }
    fn nvmlDeviceGetGpuInstanceProfileInfoV(
        device: Handle, kind: c_uint, info: OutPtr<nvmlGpuInstanceProfileInfo_v2_t>,
    ) {
        let device = device.device()?;
        let table = device.machine.mig_table(&device)?;
        let profile = table.profile_of_kind(kind).ok_or(Code::NotSupported)?;
        let version = size_of::<nvmlGpuInstanceProfileInfo_v2_t>() as c_uint | 2 << 24;
        let mut answer = info.get()?;
        if answer.version != version {
            return Err(Code::ArgumentVersionMismatch);
        }
        let plain = profile_info(profile);
        answer.id = plain.id;
        answer.isP2pSupported = plain.isP2pSupported;
        answer.sliceCount = plain.sliceCount;
        answer.instanceCount = plain.instanceCount;
        answer.multiprocessorCount = plain.multiprocessorCount;
        answer.copyEngineCount = plain.copyEngineCount;
        answer.decoderCount = plain.decoderCount;
        answer.encoderCount = plain.encoderCount;
        answer.jpegCount = plain.jpegCount;
        answer.ofaCount = plain.ofaCount;
        answer.memorySizeMB = plain.memorySizeMB;
        // NVIDIA's driver prefixes the name with "MIG ".
        answer.name = crate::identity::padded(&format!("MIG {}", profile.name));
        info.set(answer)
    }
    fn nvmlDeviceGetGpuInstancePossiblePlacements_v2(
        device: Handle, profile: c_uint, placements: OutPtr<nvmlGpuInstancePlacement_t>,
        count: OutPtr<c_uint>,
    ) {
        let device = device.device()?;
        let table = device.machine.mig_table(&device)?;
        let profile = table.profile(profile).ok_or(Code::NotSupported)?;
        count.set(profile.placements.len() as c_uint)?;
        if placements.is_null() {
            return Ok(());
        }
        placements.set_all(profile.placements.iter().map(placement_info))
    }
    fn nvmlDeviceGetGpuInstanceRemainingCapacity(device: Handle, profile: c_uint, count: OutPtr<c_uint>) {
        let device = device.device()?;
        let table = device.machine.mig_table(&device)?;
        let profile = table.profile(profile).ok_or(Code::NotSupported)?;
        count.set(device.mig_state().remaining(&table, profile))
    }
    fn nvmlDeviceCreateGpuInstance(device: Handle, profile: c_uint, instance: OutPtr<InstanceHandle>) {
        create_gpu_instance(device, profile, None, instance)
    }
    fn nvmlDeviceCreateGpuInstanceWithPlacement(
        device: Handle, profile: c_uint, placement: OutPtr<nvmlGpuInstancePlacement_t>,
        instance: OutPtr<InstanceHandle>,
    ) {
        create_gpu_instance(device, profile, Some(placement.get()?.start), instance)
    }
    fn nvmlDeviceGetGpuInstances(
        device: Handle, profile: c_uint, instances: OutPtr<InstanceHandle>, count: OutPtr<c_uint>,
    ) {
        let device = device.device()?;
        device.machine.mig_table(&device)?.profile(profile).ok_or(Code::NotSupported)?;
        let state = device.mig_state();
        let found = state.gpu_instances.iter().filter(|instance| instance.profile == profile);
        let handle = |instance: &GpuInstance| {
            InstanceHandle(handle_of(Object::GpuInstance(device.gpu_index(), instance.serial)))
        };
        let found: Vec<InstanceHandle> = found.map(handle).collect();
        count.set(found.len() as c_uint)?;
        instances.set_all(found)
    }
    fn nvmlDeviceGetGpuInstanceById(device: Handle, id: c_uint, instance: OutPtr<InstanceHandle>) {
        let device = device.device()?;
        device.machine.mig_table(&device)?;
        let state = device.mig_state();
        let found = state.gpu_instances.iter().find(|instance| instance.id == id);
        let serial = found.ok_or(Code::NotFound)?.serial;
        instance.set(InstanceHandle(handle_of(Object::GpuInstance(device.gpu_index(), serial))))
    }
    fn nvmlGpuInstanceDestroy(instance: InstanceHandle) {
        let (device, found) = instance.gpu_instance()?;
        device.machine.change_mig(&device, |state, _| state.destroy_gpu_instance(found.serial))?;
        Ok(())
    }
    fn nvmlGpuInstanceGetInfo(instance: InstanceHandle, info: OutPtr<nvmlGpuInstanceInfo_t>) {
        let (device, instance) = instance.gpu_instance()?;
        let table = device.machine.mig_table(&device)?;
        let profile = table.profile(instance.profile).ok_or(Code::NotFound)?;
        let mut placements = profile.placements.iter();
        let placement = placements.find(|place| place.start == instance.start).ok_or(Code::NotFound)?;
        info.set(nvmlGpuInstanceInfo_t {
            device: Handle::of(device.gpu_index()).as_raw(),
            id: instance.id,
            profileId: instance.profile,
            placement: placement_info(placement),
        })
    }
    fn nvmlGpuInstanceGetComputeInstanceProfileInfo(
        instance: InstanceHandle, kind: c_uint, engines: c_uint,
        info: OutPtr<nvmlComputeInstanceProfileInfo_t>,
    ) {
        let (device, instance) = instance.gpu_instance()?;
        let table = device.machine.mig_table(&device)?;
        let profile = table.profile(instance.profile).ok_or(Code::NotFound)?;
        let slices = slices_of_compute_profile(kind)?;
        if engines != 0 || slices > profile.slices {
            return Err(Code::NotSupported);
        }
        info.set(nvmlComputeInstanceProfileInfo_t {
            id: compute_profile(slices),
            sliceCount: slices,
            instanceCount: profile.slices / slices,
            multiprocessorCount: profile.multiprocessors * slices / profile.slices,
            sharedCopyEngineCount: profile.copy_engines,
            sharedDecoderCount: profile.decoders,
            sharedEncoderCount: 0,
            sharedJpegCount: profile.jpeg_engines,
            sharedOfaCount: profile.ofa_engines,
        })
    }
    fn nvmlGpuInstanceCreateComputeInstance(
        instance: InstanceHandle, profile: c_uint, compute: OutPtr<InstanceHandle>,
    ) {
        let (device, instance) = instance.gpu_instance()?;
        let slices = slices_of_compute_profile(profile)?;
        let gpu = device.uuid.clone();
        let uuid = device.machine.change_mig(&device, |state, table| {
            state.create_compute_instance(table, &gpu, instance.serial, slices)
        })?;
        compute.set(InstanceHandle(handle_of(Object::ComputeInstance(device.gpu_index(), uuid))))
    }
    fn nvmlComputeInstanceDestroy(compute: InstanceHandle) {
        let (device, _, compute) = compute.compute_instance()?;
        device.machine.change_mig(&device, |state, _| state.destroy_compute_instance(&compute.uuid))?;
        Ok(())
    }
    fn nvmlGpuInstanceGetComputeInstances(
        instance: InstanceHandle, profile: c_uint, computes: OutPtr<InstanceHandle>, count: OutPtr<c_uint>,
    ) {
        let (device, instance) = instance.gpu_instance()?;
        let slices = slices_of_compute_profile(profile)?;
        let found = instance.compute.iter().filter(|compute| compute.slices == slices);
        let handle = |compute: &ComputeInstance| {
            let uuid = compute.uuid.clone();
            InstanceHandle(handle_of(Object::ComputeInstance(device.gpu_index(), uuid)))
        };
        let found: Vec<InstanceHandle> = found.map(handle).collect();
        count.set(found.len() as c_uint)?;
        computes.set_all(found)
    }
    fn nvmlGpuInstanceGetComputeInstanceById(
        instance: InstanceHandle, id: c_uint, compute: OutPtr<InstanceHandle>,
    ) {
        let (device, instance) = instance.gpu_instance()?;
        let found = instance.compute.iter().find(|compute| compute.id == id);
        let uuid = found.ok_or(Code::NotFound)?.uuid.clone();
        compute.set(InstanceHandle(handle_of(Object::ComputeInstance(device.gpu_index(), uuid))))
    }
    fn nvmlComputeInstanceGetInfo_v2(compute: InstanceHandle, info: OutPtr<nvmlComputeInstanceInfo_t>) {
        let (device, instance, compute) = compute.compute_instance()?;
        let mig = handle_of(Object::Device(device.gpu_index(), compute.uuid));
        let parent = handle_of(Object::GpuInstance(device.gpu_index(), instance.serial));
        info.set(nvmlComputeInstanceInfo_t {
            device: mig.as_raw(),
            gpuInstance: parent.as_raw().cast(),
            id: compute.id,
            profileId: compute_profile(compute.slices),
            placement: nvmlComputeInstancePlacement_t { start: 0, size: compute.slices },
        })
    }
    fn nvmlDeviceIsMigDeviceHandle(device: Handle, is: OutPtr<c_uint>) {
        match MigDevice::of(device)? {
            Some(_) => is.set(1),
            None => {
                device.any_device()?;
                is.set(0)
            }
        }
    }
    fn nvmlDeviceGetMigDeviceHandleByIndex(device: Handle, index: c_uint, mig: OutPtr<Handle>) {
        let device = device.device()?;
        if index >= device.model.max_mig_devices || !device.machine.mig(&device) {
            return Err(Code::InvalidArgument);
        }
        let state = device.mig_state();
        let mut devices = state.gpu_instances.iter().flat_map(|instance| &instance.compute);
        let uuid = devices.nth(index as usize).ok_or(Code::NotFound)?.uuid.clone();
        mig.set(handle_of(Object::Device(device.gpu_index(), uuid)))
    }
    fn nvmlDeviceGetDeviceHandleFromMigDeviceHandle(mig: Handle, device: OutPtr<Handle>) {
        device.set(MigDevice::required(mig)?.gpu)
    }
    fn nvmlDeviceGetGpuInstanceId(mig: Handle, id: OutPtr<c_uint>) {
        id.set(MigDevice::required(mig)?.gpu_instance)
    }
    fn nvmlDeviceGetComputeInstanceId(mig: Handle, id: OutPtr<c_uint>) {
        id.set(MigDevice::required(mig)?.compute_instance)
    }
}

/// Layouts of `nvml.h`.
const _: () = {
    assert!(size_of::<nvmlGpuInstanceProfileInfo_t>() == 48);
    assert!(size_of::<nvmlGpuInstanceInfo_t>() == 24);
    assert!(size_of::<nvmlComputeInstanceInfo_t>() == 32);
};
