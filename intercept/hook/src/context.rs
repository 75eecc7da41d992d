//! Contexts that end: what was taken in them is free again, without a call for each piece.

use core::ffi::c_int;

use crate::cuda::{self, Device, Handle, SUCCESS};
use crate::root::with_state;
use crate::route::hooks;
use crate::state::Kind;

/// Gives back what was taken in a context.
fn ended(context: usize) {
    if context == 0 {
        return;
    }
    with_state(|state| {
        for kind in [Kind::Pointer, Kind::Array] {
            while let Some(cost) = state.table(kind).remove_of_context(context) {
                state.release(cost.gpu as usize, cost.bytes);
            }
        }
    });
}

/// The primary context of a device, as it was last retained.
fn primary(device: Device) -> usize {
    with_state(|state| state.primary(device).map_or(0, |context| *context)).unwrap_or(0)
}

/// Calls the driver to reset or release a primary context.
fn release(device: Device, real: impl FnOnce() -> c_int, resets: bool) -> c_int {
    let context = primary(device);
    let result = real();
    if result == SUCCESS && (resets || cuda::primary_is_active(device) == Some(false)) {
        ended(context);
    }
    result
}

hooks! {
    fn cuCtxDestroy(context: Handle) |real| {
        // SAFETY: the program's own call.
        let result = unsafe { real(context) };
        if result == SUCCESS {
            ended(context as usize);
        }
        result
    }

    fn cuCtxDestroy_v2(context: Handle) |real| {
        // SAFETY: the program's own call.
        let result = unsafe { real(context) };
        if result == SUCCESS {
            ended(context as usize);
        }
        result
    }

    fn cuDevicePrimaryCtxRetain(out: *mut Handle, device: Device) |real| {
        // SAFETY: the program's own call.
        let result = unsafe { real(out, device) };
        if result == SUCCESS && !out.is_null() {
            // SAFETY: the driver was content and has written there.
            let context = unsafe { out.read_unaligned() } as usize;
            with_state(|state| {
                if let Some(place) = state.primary(device) {
                    *place = context;
                }
            });
        }
        result
    }

    fn cuDevicePrimaryCtxRelease(device: Device) |real| {
        // SAFETY: the program's own call.
        release(device, || unsafe { real(device) }, false)
    }

    fn cuDevicePrimaryCtxRelease_v2(device: Device) |real| {
        // SAFETY: the program's own call.
        release(device, || unsafe { real(device) }, false)
    }

    fn cuDevicePrimaryCtxReset(device: Device) |real| {
        // SAFETY: the program's own call.
        release(device, || unsafe { real(device) }, true)
    }

    fn cuDevicePrimaryCtxReset_v2(device: Device) |real| {
        // SAFETY: the program's own call.
        release(device, || unsafe { real(device) }, true)
    }
}
