//! What NVML says of memory: the same as CUDA.

use core::ffi::{CStr, c_char, c_int, c_uint, c_void};
use core::mem::transmute;
use core::str::FromStr as _;

use tessera_intercept_abi::GpuUuid;

use crate::elf::Library;
use crate::root::with_state;
use crate::route::hooks;
use crate::state::Memory;

/// `nvmlDevice_t`.
type Device = *mut c_void;

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
const SUCCESS: c_int = 0;

/// The UUID of a device. Not remembered: NVML is opened and closed at will, and handles then mean others.
fn uuid(device: Device) -> Option<GpuUuid> {
    /// `NVML_DEVICE_UUID_V2_BUFFER_SIZE`
    const ROOM: usize = 96;
    type Real = unsafe extern "C" fn(Device, *mut c_char, c_uint) -> c_int;
    let address = Library::loaded(b"libnvidia-ml.so.")?.function(c"nvmlDeviceGetUUID")?;
    let mut text = [0_u8; ROOM];
    // SAFETY: the type is that of nvml.h, the buffer as long as is said.
    let result =
        unsafe { transmute::<usize, Real>(address)(device, text.as_mut_ptr().cast(), ROOM as c_uint) };
    if result != SUCCESS {
        return None;
    }
    GpuUuid::from_str(CStr::from_bytes_until_nul(&text).ok()?.to_str().ok()?).ok()
}

/// Total, used and free bytes as the container is to see them, of a device that has so many in total and free.
fn seen(device: Device, total: u64, free: u64) -> (u64, u64, u64) {
    crate::pool::refresh();
    let granted = uuid(device).and_then(|uuid| with_state(|state| state.memory(uuid)));
    let Memory { limit, used } = granted.unwrap_or(Memory { limit: 0, used: 0 });
    let total = limit.min(total);
    let free = total.saturating_sub(used).min(free);
    (total, total - free, free)
}

hooks! {
    fn nvmlDeviceGetMemoryInfo(device: Device, memory: *mut MemoryInfo) |real| {
        // SAFETY: the program's own call.
        let result = unsafe { real(device, memory) };
        if result == SUCCESS && !memory.is_null() {
            // SAFETY: the driver was content and has written there.
            let told = unsafe { memory.read_unaligned() };
            let (total, used, free) = seen(device, told.total, told.free);
            // SAFETY: as above.
            unsafe { memory.write_unaligned(MemoryInfo { total, free, used }) };
        }
        result
    }

    fn nvmlDeviceGetMemoryInfo_v2(device: Device, memory: *mut MemoryInfo2) |real| {
        // SAFETY: the program's own call.
        let result = unsafe { real(device, memory) };
        if result == SUCCESS && !memory.is_null() {
            // SAFETY: the driver was content and has written there.
            let told = unsafe { memory.read_unaligned() };
            let (total, used, free) = seen(device, told.total, told.free);
            // SAFETY: as above.
            unsafe { memory.write_unaligned(MemoryInfo2 { total, reserved: 0, free, used, ..told }) };
        }
        result
    }
}
