//! What CUDA says of memory: the grants' word, never more than the GPU has.

use core::ffi::c_uint;

use crate::charge::uuid_of;
use crate::cuda::{self, Device, SUCCESS};
use crate::root::with_state;
use crate::route::hooks;
use crate::state::Memory;

/// Memory of a device as the container is to see it; nothing where there is no grant.
fn granted(device: Option<Device>) -> Memory {
    crate::pool::refresh();
    let nothing = Memory { limit: 0, used: 0 };
    device.and_then(uuid_of).and_then(|uuid| with_state(|state| state.memory(uuid))).unwrap_or(nothing)
}

/// Changes a result that the driver has written, where the program asked for it.
///
/// # Safety
/// `out` is NULL, or the driver has written there.
unsafe fn adjust<T: Copy + TryFrom<u64>>(out: *mut T, bytes: impl FnOnce(T) -> u64, most: T) {
    if !out.is_null() {
        // SAFETY: by this function's contract.
        unsafe { out.write_unaligned(T::try_from(bytes(out.read_unaligned())).unwrap_or(most)) };
    }
}

hooks! {
    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) |real| {
        // SAFETY: the program's own call.
        let result = unsafe { real(free, total) };
        if result == SUCCESS {
            let Memory { limit, used } = granted(cuda::current_device());
            // SAFETY: the driver was content and has written there.
            unsafe {
                adjust(free, |free| limit.saturating_sub(used).min(free as u64), usize::MAX);
                adjust(total, |total| limit.min(total as u64), usize::MAX);
            }
        }
        result
    }

    fn cuMemGetInfo(free: *mut c_uint, total: *mut c_uint) |real| {
        // SAFETY: the program's own call.
        let result = unsafe { real(free, total) };
        if result == SUCCESS {
            let Memory { limit, used } = granted(cuda::current_device());
            // SAFETY: the driver was content and has written there.
            unsafe {
                adjust(free, |free| limit.saturating_sub(used).min(free.into()), c_uint::MAX);
                adjust(total, |total| limit.min(total.into()), c_uint::MAX);
            }
        }
        result
    }

    fn cuDeviceTotalMem_v2(bytes: *mut usize, device: Device) |real| {
        // SAFETY: the program's own call.
        let result = unsafe { real(bytes, device) };
        if result == SUCCESS {
            let limit = granted(Some(device)).limit;
            // SAFETY: the driver was content and has written there.
            unsafe { adjust(bytes, |bytes| limit.min(bytes as u64), usize::MAX) };
        }
        result
    }

    fn cuDeviceTotalMem(bytes: *mut c_uint, device: Device) |real| {
        // SAFETY: the program's own call.
        let result = unsafe { real(bytes, device) };
        if result == SUCCESS {
            let limit = granted(Some(device)).limit;
            // SAFETY: the driver was content and has written there.
            unsafe { adjust(bytes, |bytes| limit.min(bytes.into()), c_uint::MAX) };
        }
        result
    }
}
