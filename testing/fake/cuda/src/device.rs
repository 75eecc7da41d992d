//! Devices: the GPUs of the world.

use std::ffi::{c_char, c_int, c_uint};

use crate::abi::{CuResult, InPtr, OutPtr, export};
use crate::attribute;
use crate::driver;
use crate::status::Status;

/// `CUdevice`: the ordinal of a GPU among those that are visible to this process.
#[repr(transparent)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Device(c_int);

impl Device {
    /// Returns the device of a GPU of the world, given by index. An invisible GPU gets an invalid
    /// ordinal.
    pub(crate) fn of(gpu: usize) -> Self {
        let visible = driver::visible().unwrap_or_default();
        let ordinal = visible.iter().position(|&index| index == gpu);
        Self(ordinal.and_then(|ordinal| c_int::try_from(ordinal).ok()).unwrap_or(c_int::MAX))
    }

    /// Returns the ordinal.
    pub(crate) fn ordinal(self) -> c_int {
        self.0
    }

    /// Returns the device with the ordinal of an application.
    pub(crate) fn at(ordinal: c_int) -> Self {
        Self(ordinal)
    }
}

/// Returns the index of an existing GPU that is not lost.
pub(crate) fn gpu(device: Device) -> CuResult<usize> {
    let machine = driver::machine()?;
    let ordinal = usize::try_from(device.0).map_err(|_| Status::InvalidDevice)?;
    let index = *driver::visible()?.get(ordinal).ok_or(Status::InvalidDevice)?;
    let board = &machine.world().gpus[index];
    if machine.is_lost(board) { Err(Status::DeviceUnavailable) } else { Ok(index) }
}

fn with<T>(device: Device, read: impl FnOnce(&tessera_fake_world::Gpu) -> T) -> CuResult<T> {
    Ok(read(&driver::machine()?.world().gpus[gpu(device)?]))
}

/// Returns the sixteen bytes of `GPU-1f0c2d3e-…`.
fn uuid_bytes(uuid: &str) -> CuResult<[u8; 16]> {
    let digits: Vec<u8> = uuid
        .trim_start_matches("GPU-")
        .chars()
        .filter_map(|c| c.to_digit(16))
        .map(|digit| digit as u8)
        .collect();
    let bytes: Vec<u8> = digits.chunks_exact(2).map(|pair| pair[0] << 4 | pair[1]).collect();
    bytes.try_into().map_err(|_| Status::Unknown)
}

/// Returns the bytes of a device that the answer to the integrity check depends on: its UUID, and
/// domain, bus and slot as 32-bit numbers.
pub(crate) fn hash_input(device: Device) -> CuResult<[u8; 28]> {
    let (uuid, pci) = with(device, |gpu| (gpu.uuid.clone(), gpu.pci))?;
    let mut bytes = [0; 28];
    bytes[..16].copy_from_slice(&uuid_bytes(&uuid)?);
    let place = [pci.domain, pci.bus.into(), pci.device.into()];
    for (at, number) in place.into_iter().enumerate() {
        bytes[16 + at * 4..20 + at * 4].copy_from_slice(&number.to_le_bytes());
    }
    Ok(bytes)
}

fn write_uuid(uuid: OutPtr<[u8; 16]>, device: Device) -> CuResult {
    uuid.set(with(device, |gpu| uuid_bytes(&gpu.uuid))??)
}

/// Returns the usable memory of a GPU, which CUDA reports as its total.
pub(crate) fn usable_bytes(device: Device) -> CuResult<u64> {
    with(device, |gpu| gpu.model.usable_bytes())
}

export! {
    fn cuDeviceGetCount(count: OutPtr<c_int>) {
        count.set(c_int::try_from(driver::visible()?.len()).unwrap_or(c_int::MAX))
    }

    fn cuDeviceGet(device: OutPtr<Device>, ordinal: c_int) {
        device.check()?;
        gpu(Device(ordinal))?;
        device.set(Device(ordinal))
    }

    fn cuDeviceGetName(name: OutPtr<c_char>, length: c_int, device: Device) {
        with(device, |gpu| name.set_text(length, &gpu.model.name))?
    }

    fn cuDeviceGetUuid(uuid: OutPtr<[u8; 16]>, device: Device) { write_uuid(uuid, device) }
    fn cuDeviceGetUuid_v2(uuid: OutPtr<[u8; 16]>, device: Device) { write_uuid(uuid, device) }

    fn cuDeviceTotalMem(bytes: OutPtr<c_uint>, device: Device) {
        // The 32-bit form of CUDA 2.
        bytes.set(c_uint::try_from(usable_bytes(device)?).unwrap_or(c_uint::MAX))
    }

    fn cuDeviceTotalMem_v2(bytes: OutPtr<usize>, device: Device) { bytes.set(usable_bytes(device)? as usize) }

    fn cuDeviceComputeCapability(major: OutPtr<c_int>, minor: OutPtr<c_int>, device: Device) {
        let capability = with(device, |gpu| gpu.model.compute_capability)?;
        major.set(capability.major as c_int)?;
        minor.set(capability.minor as c_int)
    }

    fn cuDeviceGetAttribute(value: OutPtr<c_int>, attribute: c_int, device: Device) {
        value.set(with(device, |gpu| attribute::value(gpu, attribute))??)
    }

    fn cuDeviceGetPCIBusId(id: OutPtr<c_char>, length: c_int, device: Device) {
        with(device, |gpu| id.set_text(length, &gpu.pci.to_string().to_uppercase()))?
    }

    fn cuDeviceGetByPCIBusId(device: OutPtr<Device>, id: InPtr<c_char>) {
        let wanted = tessera_fake_world::PciAddress::parse(id.text()?).ok_or(Status::InvalidValue)?;
        let machine = driver::machine()?;
        let found = driver::visible()?.iter().find(|&&gpu| machine.world().gpus[gpu].pci == wanted);
        device.set(Device::of(*found.ok_or(Status::InvalidDevice)?))
    }

    fn cuDeviceCanAccessPeer(can: OutPtr<c_int>, device: Device, peer: Device) {
        can.set(c_int::from(gpu(device)? != gpu(peer)?))
    }

    fn cuDeviceGetP2PAttribute(value: OutPtr<c_int>, attribute: c_int, device: Device, peer: Device) {
        let (a, b) = (gpu(device)?, gpu(peer)?);
        if a == b {
            return Err(Status::InvalidDevice);
        }
        let nvlink = driver::machine()?.world().direct_links(a, b) > 0;
        match attribute {
            // Performance rank (0 is best), access, native atomics, access from arrays.
            1 => value.set(c_int::from(!nvlink)),
            2 | 4 => value.set(1),
            3 => value.set(c_int::from(nvlink)),
            _ => Err(Status::InvalidValue),
        }
    }
}
