//! The GPUs of the world.

use std::ffi::{c_char, c_int, c_uint};

use crate::abi::{Answer, In, Out, export};
use crate::attribute;
use crate::driver;
use crate::status::Status;

/// `CUdevice`: the ordinal of a GPU among those that this process sees.
#[repr(transparent)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Device(c_int);

impl Device {
    /// The GPU with that index in the world. One that is not to be seen has an ordinal that no GPU
    /// has.
    pub(crate) fn of(gpu: usize) -> Self {
        let seen = driver::machine().map(|machine| machine.visible()).unwrap_or_default();
        let ordinal = seen.iter().position(|&index| index == gpu);
        Self(ordinal.and_then(|ordinal| c_int::try_from(ordinal).ok()).unwrap_or(c_int::MAX))
    }

    /// The ordinal.
    pub(crate) fn ordinal(self) -> c_int {
        self.0
    }

    /// What an application means by this ordinal.
    pub(crate) fn at(ordinal: c_int) -> Self {
        Self(ordinal)
    }
}

/// The index of a GPU that exists and is not lost.
pub(crate) fn gpu(device: Device) -> Answer<usize> {
    let machine = driver::machine()?;
    let ordinal = usize::try_from(device.0).map_err(|_| Status::InvalidDevice)?;
    let index = *machine.visible().get(ordinal).ok_or(Status::InvalidDevice)?;
    let board = &machine.world().gpus[index];
    if machine.is_lost(board) { Err(Status::DeviceUnavailable) } else { Ok(index) }
}

fn with<T>(device: Device, read: impl FnOnce(&tessera_fake_world::Gpu) -> T) -> Answer<T> {
    Ok(read(&driver::machine()?.world().gpus[gpu(device)?]))
}

/// The sixteen bytes of `GPU-1f0c2d3e-…`.
fn uuid_bytes(uuid: &str) -> Answer<[u8; 16]> {
    let digits: Vec<u8> = uuid
        .trim_start_matches("GPU-")
        .chars()
        .filter_map(|c| c.to_digit(16))
        .map(|digit| digit as u8)
        .collect();
    let bytes: Vec<u8> = digits.chunks_exact(2).map(|pair| pair[0] << 4 | pair[1]).collect();
    bytes.try_into().map_err(|_| Status::Unknown)
}

fn give_uuid(uuid: Out<[u8; 16]>, device: Device) -> Answer {
    uuid.set(with(device, |gpu| uuid_bytes(&gpu.uuid))??)
}

/// Memory of a GPU that programs can have: what CUDA calls its total.
pub(crate) fn usable_bytes(device: Device) -> Answer<u64> {
    with(device, |gpu| gpu.model.usable_bytes())
}

export! {
    fn cuDeviceGetCount(count: Out<c_int>) {
        count.set(c_int::try_from(driver::machine()?.visible().len()).unwrap_or(c_int::MAX))
    }

    fn cuDeviceGet(device: Out<Device>, ordinal: c_int) {
        device.check()?;
        gpu(Device(ordinal))?;
        device.set(Device(ordinal))
    }

    fn cuDeviceGetName(name: Out<c_char>, length: c_int, device: Device) {
        with(device, |gpu| name.set_text(length, &gpu.model.name))?
    }

    fn cuDeviceGetUuid(uuid: Out<[u8; 16]>, device: Device) { give_uuid(uuid, device) }
    fn cuDeviceGetUuid_v2(uuid: Out<[u8; 16]>, device: Device) { give_uuid(uuid, device) }

    fn cuDeviceTotalMem(bytes: Out<c_uint>, device: Device) {
        // The form of CUDA 2, which counts in 32 bits.
        bytes.set(c_uint::try_from(usable_bytes(device)?).unwrap_or(c_uint::MAX))
    }

    fn cuDeviceTotalMem_v2(bytes: Out<usize>, device: Device) { bytes.set(usable_bytes(device)? as usize) }

    fn cuDeviceComputeCapability(major: Out<c_int>, minor: Out<c_int>, device: Device) {
        let capability = with(device, |gpu| gpu.model.compute_capability)?;
        major.set(capability.major as c_int)?;
        minor.set(capability.minor as c_int)
    }

    fn cuDeviceGetAttribute(value: Out<c_int>, attribute: c_int, device: Device) {
        value.set(with(device, |gpu| attribute::of(gpu, attribute))??)
    }

    fn cuDeviceGetPCIBusId(id: Out<c_char>, length: c_int, device: Device) {
        with(device, |gpu| id.set_text(length, &gpu.pci.to_string().to_uppercase()))?
    }

    fn cuDeviceGetByPCIBusId(device: Out<Device>, id: In<c_char>) {
        let wanted = tessera_fake_world::PciAddress::parse(id.text()?).ok_or(Status::InvalidValue)?;
        let machine = driver::machine()?;
        let found = machine.visible().iter().find(|&&gpu| machine.world().gpus[gpu].pci == wanted);
        device.set(Device::of(*found.ok_or(Status::InvalidDevice)?))
    }

    fn cuDeviceCanAccessPeer(can: Out<c_int>, device: Device, peer: Device) {
        can.set(c_int::from(gpu(device)? != gpu(peer)?))
    }

    fn cuDeviceGetP2PAttribute(value: Out<c_int>, attribute: c_int, device: Device, peer: Device) {
        let (a, b) = (gpu(device)?, gpu(peer)?);
        if a == b {
            return Err(Status::InvalidDevice);
        }
        let nvlink = driver::machine()?.world().direct_links(a, b) > 0;
        match attribute {
            // Performance rank (0 is best); access; native atomics; access from arrays.
            1 => value.set(c_int::from(!nvlink)),
            2 | 4 => value.set(1),
            3 => value.set(c_int::from(nvlink)),
            _ => Err(Status::InvalidValue),
        }
    }
}
