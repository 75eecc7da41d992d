//! Contexts: each costs memory, and what was taken in one is free again when it ends, without a
//! call for each piece.
//!
//! The first context of a process on a GPU is part of the process's account as long as it lives;
//! each further one that is there at the same time costs the same once more.

use core::ffi::{c_int, c_uint, c_void};

use crate::charge::gpu_of;
use crate::compute;
use crate::cuda::{self, Device, Handle, OUT_OF_MEMORY, SUCCESS};
use crate::limit;
use crate::pointers::Cost;
use crate::root::with_state;
use crate::route::hooks;
use crate::state::{Kind, State};

/// Begins a context: `take` calls the driver, `taken` says which context there is then.
fn begin(
    device: Device,
    take: impl FnOnce() -> c_int,
    taken: impl FnOnce() -> Option<usize>,
) -> c_int {
    // Where the container has no share there is nothing that could pay, and no memory to be had in
    // the context.
    let Some(gpu) = gpu_of(device) else { return take() };
    if !(charge(gpu) || crate::pool::trim() && charge(gpu)) {
        return OUT_OF_MEMORY;
    }
    let result = take();
    let begun = if result == SUCCESS { taken() } else { None };
    with_state(|state| match begun.filter(|context| !is_known(state, *context)) {
        Some(context) => remember(state, context, gpu),
        None => state.end_context(gpu as usize),
    });
    result
}

fn charge(gpu: u32) -> bool {
    with_state(|state| state.begin_context(gpu as usize).is_ok()) == Some(true)
}

fn is_known(state: &mut State, context: usize) -> bool {
    state.table(Kind::Context).get(context as u64).is_some()
}

/// A context that there is no room for stays charged.
fn remember(state: &mut State, context: usize, gpu: u32) {
    let table = state.table(Kind::Context);
    if table.make_room() {
        table.put(context as u64, Cost { bytes: 0, context: 0, gpu, holders: 1 });
    }
}

/// Begins a context of the program's own.
///
/// # Safety
/// `out` is where the driver is to put it.
unsafe fn create(out: *mut Handle, device: Device, take: impl FnOnce() -> c_int) -> c_int {
    // SAFETY: the driver was content and has written there.
    begin(device, take, || Some(unsafe { out.read_unaligned() } as usize))
}

/// Gives back what was taken in a context.
fn emptied(context: usize) {
    if context == 0 {
        return;
    }
    with_state(|state| {
        for kind in [Kind::Pointer, Kind::Array, Kind::Imported, Kind::External, Kind::Module] {
            let mut place = 0;
            let goes = |_, cost: &Cost| cost.context == context;
            while let Some(cost) = state.table(kind).remove_next(&mut place, goes) {
                state.release(cost.gpu as usize, cost.bytes);
            }
        }
        limit::ended(state, context);
    });
    crate::pool::refresh();
}

/// Gives back what a context cost.
fn ended(context: usize) {
    emptied(context);
    with_state(|state| {
        if let Some(known) = state.table(Kind::Context).remove(context as u64) {
            state.end_context(known.gpu as usize);
        }
    });
}

fn destroy(context: Handle, real: impl FnOnce() -> c_int) -> c_int {
    compute::context_may_end(context as usize, real, |result| {
        if result == SUCCESS {
            ended(context as usize);
        }
        result == SUCCESS
    })
}

/// One attachment more or less; answers how many there are. `None` for a context that is not known.
fn attach(context: usize, change: i32) -> Option<u32> {
    let changed = with_state(|state| {
        let known = state.table(Kind::Context).get(context as u64)?;
        known.holders = known.holders.saturating_add_signed(change);
        Some(known.holders)
    });
    changed.flatten()
}

/// The primary context of a device, as it was last retained.
fn primary(device: Device) -> usize {
    with_state(|state| state.primary(device).map_or(0, |context| *context)).unwrap_or(0)
}

fn set_primary(device: Device, context: usize) {
    with_state(|state| {
        if let Some(place) = state.primary(device) {
            *place = context;
        }
    });
}

/// Calls the driver for something that begins the primary context, unless that is there.
fn begin_primary(
    device: Device,
    take: impl FnOnce() -> c_int,
    taken: impl FnOnce() -> Option<usize>,
) -> c_int {
    let note = || taken().inspect(|context| set_primary(device, *context));
    if cuda::primary_is_active(device) != Some(true) {
        return begin(device, take, note);
    }
    let result = take();
    if result == SUCCESS {
        note();
    }
    result
}

/// Calls the driver to reset or release a primary context.
fn release(device: Device, real: impl FnOnce() -> c_int, resets: bool) -> c_int {
    let context = primary(device);
    compute::context_may_end(context, real, |result| {
        if result != SUCCESS {
            return false;
        }
        let gone = cuda::primary_is_active(device) == Some(false);
        if gone {
            ended(context);
        } else if resets {
            emptied(context);
        }
        gone || resets
    })
}

/// Ends the primary contexts that nobody retains any more.
fn end_primaries() {
    for device in 0.. {
        let Some(known) =
            with_state(|state| state.primary(device).map(|context| *context)).flatten()
        else {
            return;
        };
        if known != 0 && cuda::primary_is_active(device) == Some(false) {
            compute::context_is_gone(known);
            ended(known);
        }
    }
}

hooks! {
    fn cuCtxCreate(out: *mut Handle, flags: c_uint, device: Device) |real| {
        // SAFETY: the program's own call.
        unsafe { create(out, device, || real(out, flags, device)) }
    }

    fn cuCtxCreate_v2(out: *mut Handle, flags: c_uint, device: Device) |real| {
        // SAFETY: the program's own call.
        unsafe { create(out, device, || real(out, flags, device)) }
    }

    fn cuCtxCreate_v3(
        out: *mut Handle, affinity: *mut c_void, count: c_int, flags: c_uint, device: Device,
    ) |real| {
        // SAFETY: the program's own call.
        unsafe { create(out, device, || real(out, affinity, count, flags, device)) }
    }

    fn cuCtxCreate_v4(out: *mut Handle, parameters: *mut c_void, flags: c_uint, device: Device) |real| {
        // SAFETY: the program's own call.
        unsafe { create(out, device, || real(out, parameters, flags, device)) }
    }

    fn cuGLCtxCreate(out: *mut Handle, flags: c_uint, device: Device) |real| {
        // SAFETY: the program's own call.
        unsafe { create(out, device, || real(out, flags, device)) }
    }

    fn cuGLCtxCreate_v2(out: *mut Handle, flags: c_uint, device: Device) |real| {
        // SAFETY: the program's own call.
        unsafe { create(out, device, || real(out, flags, device)) }
    }

    fn cuVDPAUCtxCreate(
        out: *mut Handle, flags: c_uint, device: Device, vdpau: c_uint, resolve: *mut c_void,
    ) |real| {
        // SAFETY: the program's own call.
        unsafe { create(out, device, || real(out, flags, device, vdpau, resolve)) }
    }

    fn cuVDPAUCtxCreate_v2(
        out: *mut Handle, flags: c_uint, device: Device, vdpau: c_uint, resolve: *mut c_void,
    ) |real| {
        // SAFETY: the program's own call.
        unsafe { create(out, device, || real(out, flags, device, vdpau, resolve)) }
    }

    fn cuCtxDestroy(context: Handle) |real| {
        // SAFETY: the program's own call.
        destroy(context, || unsafe { real(context) })
    }

    fn cuCtxDestroy_v2(context: Handle) |real| {
        // SAFETY: the program's own call.
        destroy(context, || unsafe { real(context) })
    }

    fn cuCtxAttach(out: *mut Handle, flags: c_uint) |real| {
        // SAFETY: the program's own call.
        let result = unsafe { real(out, flags) };
        if result == SUCCESS && !out.is_null() {
            // SAFETY: the driver was content and has written there.
            attach(unsafe { out.read_unaligned() } as usize, 1);
        }
        result
    }

    fn cuCtxDetach(context: Handle) |real| {
        // SAFETY: the program's own call.
        compute::context_may_end(context as usize, || unsafe { real(context) }, |result| {
            let gone = result == SUCCESS && attach(context as usize, -1) == Some(0);
            if gone {
                ended(context as usize);
            }
            gone
        })
    }

    // A green context is a part of the primary context, which it keeps alive.
    fn cuGreenCtxCreate(out: *mut Handle, resources: Handle, device: Device, flags: c_uint) |real| {
        // SAFETY: the program's own call.
        begin_primary(device, || unsafe { real(out, resources, device, flags) }, || cuda::primary(device))
    }

    fn cuGreenCtxDestroy(context: Handle) |real| {
        // SAFETY: the program's own call.
        let result = compute::green_context_may_end(context, || unsafe { real(context) });
        if result == SUCCESS {
            end_primaries();
        }
        result
    }

    fn cuDevicePrimaryCtxRetain(out: *mut Handle, device: Device) |real| {
        // SAFETY: the program's own call.
        let take = || unsafe { real(out, device) };
        // SAFETY: the driver was content and has written there.
        begin_primary(device, take, || Some(unsafe { out.read_unaligned() } as usize))
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
