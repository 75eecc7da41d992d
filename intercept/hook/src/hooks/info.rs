//! Reports of memory by CUDA: limited by the grants, and larger than the GPU only if memory spills
//! to the host.

use core::ffi::c_uint;

use super::route::hooks;
use crate::charge::uuid_of;
use crate::driver::cuda::{self, Device, SUCCESS};
use crate::pools;
use crate::state::{Memory, with_state};

/// Returns the memory of a device as the container is to see it; nothing without a grant.
fn granted(device: Option<Device>) -> Memory {
    pools::refresh();
    let of = |device| {
        let uuid = uuid_of(device)?;
        let memory = with_state(|state| state.memory(uuid))?;
        Some(Memory { spills: memory.spills && cuda::moves_managed_memory(device), ..memory })
    };
    device.and_then(of).unwrap_or(Memory::NONE)
}

/// Changes a result that the driver has written, if the program requested it.
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
            let memory = granted(cuda::current_device());
            // SAFETY: the call succeeded: the driver has written there.
            unsafe {
                adjust(free, |free| memory.free_of(free as u64), usize::MAX);
                adjust(total, |total| memory.total_of(total as u64), usize::MAX);
            }
        }
        result
    }

    fn cuMemGetInfo(free: *mut c_uint, total: *mut c_uint) |real| {
        // SAFETY: the program's own call.
        let result = unsafe { real(free, total) };
        if result == SUCCESS {
            let memory = granted(cuda::current_device());
            // SAFETY: the call succeeded: the driver has written there.
            unsafe {
                adjust(free, |free| memory.free_of(free.into()), c_uint::MAX);
                adjust(total, |total| memory.total_of(total.into()), c_uint::MAX);
            }
        }
        result
    }

    fn cuDeviceTotalMem_v2(bytes: *mut usize, device: Device) |real| {
        // SAFETY: the program's own call.
        let result = unsafe { real(bytes, device) };
        if result == SUCCESS {
            let memory = granted(Some(device));
            // SAFETY: the call succeeded: the driver has written there.
            unsafe { adjust(bytes, |bytes| memory.total_of(bytes as u64), usize::MAX) };
        }
        result
    }

    fn cuDeviceTotalMem(bytes: *mut c_uint, device: Device) |real| {
        // SAFETY: the program's own call.
        let result = unsafe { real(bytes, device) };
        if result == SUCCESS {
            let memory = granted(Some(device));
            // SAFETY: the call succeeded: the driver has written there.
            unsafe { adjust(bytes, |bytes| memory.total_of(bytes.into()), c_uint::MAX) };
        }
        result
    }
}
