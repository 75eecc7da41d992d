//! What NVML says of memory: the same as CUDA.

use core::ffi::{CStr, c_char, c_int, c_uint, c_void};
use core::mem::transmute;
use core::str::FromStr as _;

use tessera_intercept_abi::GpuUuid;

use crate::elf::Library;
use crate::root::with_state;
use crate::route::{Of, hooks};
use crate::state::Memory;

/// `nvmlDevice_t`.
pub(crate) type Device = *mut c_void;

/// `nvmlMemory_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct MemoryInfo {
    total: u64,
    free: u64,
    used: u64,
}

/// `nvmlMemory_v2_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct MemoryInfo2 {
    version: c_uint,
    total: u64,
    reserved: u64,
    free: u64,
    used: u64,
}

/// `NVML_SUCCESS`.
pub(crate) const SUCCESS: c_int = 0;
/// `NVML_ERROR_INVALID_ARGUMENT`.
pub(crate) const INVALID_ARGUMENT: c_int = 2;
/// `NVML_ERROR_NOT_FOUND`.
pub(crate) const NOT_FOUND: c_int = 6;
/// `NVML_ERROR_INSUFFICIENT_SIZE`.
pub(crate) const INSUFFICIENT_SIZE: c_int = 7;
/// `NVML_ERROR_FUNCTION_NOT_FOUND`.
const FUNCTION_NOT_FOUND: c_int = 13;

/// `nvmlBAR1Memory_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Bar1 {
    total: u64,
    free: u64,
    used: u64,
}

/// `nvmlConfComputeMemSizeInfo_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Sizes {
    protected_kib: u64,
    unprotected_kib: u64,
}

/// `nvmlDeviceAttributes_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Attributes {
    engines: [c_uint; 8],
    memory_mib: u64,
}

/// What NVML says is the UUID of a device. Not remembered: NVML is opened and closed at will, and
/// handles then mean others.
///
/// # Errors
/// NVML's own, for what is no device for example.
pub(crate) fn told_uuid(device: Device) -> Result<[u8; UUID_ROOM], c_int> {
    type Real = unsafe extern "C" fn(Device, *mut c_char, c_uint) -> c_int;
    let function = Library::driver(Of::Nvml).and_then(|nvml| nvml.function(c"nvmlDeviceGetUUID"));
    let address = function.ok_or(FUNCTION_NOT_FOUND)?;
    let mut text = [0_u8; UUID_ROOM];
    // SAFETY: the type is that of nvml.h, the buffer as long as is said.
    let result = unsafe {
        transmute::<usize, Real>(address)(device, text.as_mut_ptr().cast(), UUID_ROOM as c_uint)
    };
    if result == SUCCESS { Ok(text) } else { Err(result) }
}

/// `NVML_DEVICE_UUID_V2_BUFFER_SIZE`
const UUID_ROOM: usize = 96;

/// The UUID of a GPU.
pub(crate) fn uuid(device: Device) -> Option<GpuUuid> {
    let text = told_uuid(device).ok()?;
    GpuUuid::from_str(CStr::from_bytes_until_nul(&text).ok()?.to_str().ok()?).ok()
}

/// Changes what the driver has written.
///
/// # Safety
/// `told` is NULL, or the driver has written there, if it was content.
pub(crate) unsafe fn retell<T: Copy>(
    result: c_int,
    told: *mut T,
    tell: impl FnOnce(T) -> T,
) -> c_int {
    if result == SUCCESS && !told.is_null() {
        // SAFETY: by this function's contract.
        unsafe { told.write_unaligned(tell(told.read_unaligned())) };
    }
    result
}

/// Memory of a device as the container is to see it; nothing where there is no grant.
fn granted(device: Device) -> Memory {
    crate::pool::refresh();
    let memory = uuid(device).and_then(|uuid| with_state(|state| state.memory(uuid)));
    let memory = memory.unwrap_or(Memory::NOTHING);
    Memory { spills: memory.spills && moves_managed_memory(device), ..memory }
}

/// The same of a part that nothing spills from.
fn granted_of_part(device: Device) -> Memory {
    Memory { spills: false, ..granted(device) }
}

/// Whether managed memory of a device may be more than the device has: since Pascal. CUDA, which
/// would say it, may not be there.
fn moves_managed_memory(device: Device) -> bool {
    type Real = unsafe extern "C" fn(Device, *mut c_int, *mut c_int) -> c_int;
    const PASCAL: c_int = 6;
    let nvml = Library::driver(Of::Nvml);
    let Some(address) = nvml.and_then(|nvml| nvml.function(c"nvmlDeviceGetCudaComputeCapability"))
    else {
        return false;
    };
    let (mut major, mut minor) = (0, 0);
    // SAFETY: the type is that of nvml.h; the results go to variables of ours.
    let result = unsafe { transmute::<usize, Real>(address)(device, &mut major, &mut minor) };
    result == SUCCESS && major >= PASCAL
}

/// Total, used and free bytes as the container is to see them, where so many are there in total and
/// free.
fn seen(memory: Memory, total: u64, free: u64) -> (u64, u64, u64) {
    let total = memory.total_of(total);
    let free = memory.free_of(free).min(total.saturating_sub(memory.used));
    (total, total - free, free)
}

fn plain(device: Device, told: MemoryInfo) -> MemoryInfo {
    let (total, used, free) = seen(granted(device), told.total, told.free);
    MemoryInfo { total, free, used }
}

/// A size that is no more than what is granted.
fn within(device: Device, bytes: u64) -> u64 {
    granted_of_part(device).total_of(bytes)
}

fn attributes(device: Device, told: Attributes) -> Attributes {
    Attributes { memory_mib: within(device, told.memory_mib << 20) >> 20, ..told }
}

hooks! {
    fn nvmlDeviceGetMemoryInfo(device: Device, memory: *mut MemoryInfo) |real| {
        // SAFETY: the program's own call.
        unsafe { retell(real(device, memory), memory, |told| plain(device, told)) }
    }

    fn nvmlDeviceGetMemoryInfo_v2(device: Device, memory: *mut MemoryInfo2) |real| {
        let tell = |told: MemoryInfo2| {
            let (total, used, free) = seen(granted(device), told.total, told.free);
            MemoryInfo2 { total, reserved: 0, free, used, ..told }
        };
        // SAFETY: the program's own call.
        unsafe { retell(real(device, memory), memory, tell) }
    }

    fn nvmlDeviceGetConfComputeProtectedMemoryUsage(device: Device, memory: *mut MemoryInfo) |real| {
        // SAFETY: the program's own call.
        unsafe { retell(real(device, memory), memory, |told| plain(device, told)) }
    }

    fn nvmlDeviceGetConfComputeMemSizeInfo(device: Device, sizes: *mut Sizes) |real| {
        let kib = |kib: u64| within(device, kib << 10) >> 10;
        let tell = |told: Sizes| Sizes {
            protected_kib: kib(told.protected_kib),
            unprotected_kib: kib(told.unprotected_kib),
        };
        // SAFETY: the program's own call.
        unsafe { retell(real(device, sizes), sizes, tell) }
    }

    // What of it is in use is others' doing as well: as much is said to be as the container uses of the GPU's memory.
    fn nvmlDeviceGetBAR1MemoryInfo(device: Device, memory: *mut Bar1) |real| {
        let tell = |told: Bar1| {
            let (total, used, free) = seen(granted_of_part(device), told.total, told.total);
            Bar1 { total, free, used }
        };
        // SAFETY: the program's own call.
        unsafe { retell(real(device, memory), memory, tell) }
    }

    fn nvmlDeviceGetAttributes(device: Device, told: *mut Attributes) |real| {
        // SAFETY: the program's own call.
        unsafe { retell(real(device, told), told, |told| attributes(device, told)) }
    }

    fn nvmlDeviceGetAttributes_v2(device: Device, told: *mut Attributes) |real| {
        // SAFETY: the program's own call.
        unsafe { retell(real(device, told), told, |told| attributes(device, told)) }
    }
}
