//! Reports of memory by NVML: as by CUDA.

use core::ffi::{c_int, c_uint};

use super::route::hooks;
use crate::driver::nvml::{Device, SUCCESS, moves_managed_memory, uuid};
use crate::pools;
use crate::state::{Memory, with_state};

/// `nvmlMemory_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct MemoryInfo {
    total: u64,
    free: u64,
    used: u64,
}

/// `nvmlMemory_v2_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct MemoryInfo2 {
    version: c_uint,
    total: u64,
    reserved: u64,
    free: u64,
    used: u64,
}

/// `nvmlBAR1Memory_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Bar1 {
    total: u64,
    free: u64,
    used: u64,
}

/// `nvmlConfComputeMemSizeInfo_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Sizes {
    protected_kib: u64,
    unprotected_kib: u64,
}

/// `nvmlDeviceAttributes_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Attributes {
    engines: [c_uint; 8],
    memory_mib: u64,
}

/// Changes a result that the driver has written.
///
/// # Safety
/// `out` is NULL, or the driver has written there if the call succeeded.
pub(super) unsafe fn adjust<T: Copy>(
    result: c_int,
    out: *mut T,
    change: impl FnOnce(T) -> T,
) -> c_int {
    if result == SUCCESS && !out.is_null() {
        // SAFETY: by this function's contract.
        unsafe { out.write_unaligned(change(out.read_unaligned())) };
    }
    result
}

/// Returns the memory of a device as the container is to see it; nothing without a grant.
fn granted(device: Device) -> Memory {
    pools::refresh();
    let memory = uuid(device).and_then(|uuid| with_state(|state| state.memory(uuid)));
    let memory = memory.unwrap_or(Memory::NONE);
    Memory { spills: memory.spills && moves_managed_memory(device), ..memory }
}

/// Returns the memory of a part of a device that does not spill.
fn granted_of_part(device: Device) -> Memory {
    Memory { spills: false, ..granted(device) }
}

/// Returns total, used and free bytes as the container is to see them, of a device with these total
/// and free bytes.
fn seen(memory: Memory, total: u64, free: u64) -> (u64, u64, u64) {
    let total = memory.total_of(total);
    let free = memory.free_of(free).min(total.saturating_sub(memory.used));
    (total, total - free, free)
}

fn plain(device: Device, reported: MemoryInfo) -> MemoryInfo {
    let (total, used, free) = seen(granted(device), reported.total, reported.free);
    MemoryInfo { total, free, used }
}

/// Returns a size, limited by the grants.
fn within(device: Device, bytes: u64) -> u64 {
    granted_of_part(device).total_of(bytes)
}

fn attributes(device: Device, reported: Attributes) -> Attributes {
    Attributes { memory_mib: within(device, reported.memory_mib << 20) >> 20, ..reported }
}

hooks! {
    fn nvmlDeviceGetMemoryInfo(device: Device, memory: *mut MemoryInfo) |real| {
        // SAFETY: the program's own call.
        unsafe { adjust(real(device, memory), memory, |reported| plain(device, reported)) }
    }

    fn nvmlDeviceGetMemoryInfo_v2(device: Device, memory: *mut MemoryInfo2) |real| {
        let change = |reported: MemoryInfo2| {
            let (total, used, free) = seen(granted(device), reported.total, reported.free);
            MemoryInfo2 { total, reserved: 0, free, used, ..reported }
        };
        // SAFETY: the program's own call.
        unsafe { adjust(real(device, memory), memory, change) }
    }

    fn nvmlDeviceGetConfComputeProtectedMemoryUsage(device: Device, memory: *mut MemoryInfo) |real| {
        // SAFETY: the program's own call.
        unsafe { adjust(real(device, memory), memory, |reported| plain(device, reported)) }
    }

    fn nvmlDeviceGetConfComputeMemSizeInfo(device: Device, sizes: *mut Sizes) |real| {
        let kib = |kib: u64| within(device, kib << 10) >> 10;
        let change = |reported: Sizes| Sizes {
            protected_kib: kib(reported.protected_kib),
            unprotected_kib: kib(reported.unprotected_kib),
        };
        // SAFETY: the program's own call.
        unsafe { adjust(real(device, sizes), sizes, change) }
    }

    // Its use is by all containers: the container's use of GPU memory is reported in its place.
    fn nvmlDeviceGetBAR1MemoryInfo(device: Device, memory: *mut Bar1) |real| {
        let change = |reported: Bar1| {
            let (total, used, free) = seen(granted_of_part(device), reported.total, reported.total);
            Bar1 { total, free, used }
        };
        // SAFETY: the program's own call.
        unsafe { adjust(real(device, memory), memory, change) }
    }

    fn nvmlDeviceGetAttributes(device: Device, out: *mut Attributes) |real| {
        // SAFETY: the program's own call.
        unsafe { adjust(real(device, out), out, |reported| attributes(device, reported)) }
    }

    fn nvmlDeviceGetAttributes_v2(device: Device, out: *mut Attributes) |real| {
        // SAFETY: the program's own call.
        unsafe { adjust(real(device, out), out, |reported| attributes(device, reported)) }
    }
}
