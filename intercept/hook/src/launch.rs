//! Launches are counted in the ledger. Compute shares are not enforced yet.

use core::ffi::{c_int, c_uint, c_void};
use core::sync::atomic::{AtomicU64, Ordering};

use crate::charge::uuid_of;
use crate::cuda::{self, Handle, SUCCESS};
use crate::root::{launches, set_launches, with_state};
use crate::route::hooks;

/// Counts a launch on the GPU of the current context.
fn count() {
    let place = match launches() {
        Some(place) => Some(place),
        None => find_place(),
    };
    if let Some(place) = place {
        place.fetch_add(1, Ordering::Relaxed);
    }
}

/// Where launches are counted; where the container has one GPU only, it stays there.
fn find_place() -> Option<&'static AtomicU64> {
    let uuid = uuid_of(cuda::current_device()?)?;
    let (place, only_one) = with_state(|state| {
        let gpu = state.find(uuid)?;
        let place = state.shares(gpu).first_mut()?.launches()?;
        Some((place, state.gpu_count() == 1))
    })??;
    if only_one {
        set_launches(place);
    }
    Some(place)
}

fn counted(result: c_int) -> c_int {
    if result == SUCCESS {
        count();
    }
    result
}

hooks! {
    fn cuLaunchKernel(
        function: Handle, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint, block_y: c_uint,
        block_z: c_uint, shared: c_uint, stream: Handle, parameters: *mut *mut c_void, extra: *mut *mut c_void,
    ) |real| {
        // SAFETY: the program's own call.
        counted(unsafe {
            real(
                function, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared, stream, parameters, extra,
            )
        })
    }

    fn cuLaunchKernel_ptsz(
        function: Handle, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint, block_y: c_uint,
        block_z: c_uint, shared: c_uint, stream: Handle, parameters: *mut *mut c_void, extra: *mut *mut c_void,
    ) |real| {
        // SAFETY: the program's own call.
        counted(unsafe {
            real(
                function, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared, stream, parameters, extra,
            )
        })
    }

    fn cuLaunchKernelEx(
        config: *const c_void, function: Handle, parameters: *mut *mut c_void, extra: *mut *mut c_void,
    ) |real| {
        // SAFETY: the program's own call.
        counted(unsafe { real(config, function, parameters, extra) })
    }

    fn cuLaunchKernelEx_ptsz(
        config: *const c_void, function: Handle, parameters: *mut *mut c_void, extra: *mut *mut c_void,
    ) |real| {
        // SAFETY: the program's own call.
        counted(unsafe { real(config, function, parameters, extra) })
    }
}
