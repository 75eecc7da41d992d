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
use crate::trace;

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
        trace::refusal();
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

/// The tables whose entries end with the context that they were made in.
const OF_CONTEXT: [Kind; 4] = [Kind::Pointer, Kind::Array, Kind::Imported, Kind::External];

/// A context that the driver is asked to end. Its entries are marked before the call: right after
/// it, the driver may give the same address to the context of another thread.
struct Leaving {
    context: usize,
    /// The context's own entry; `None` for a context that is not known or that another thread
    /// ends.
    known: Option<Cost>,
}

impl Leaving {
    /// In [`Cost::context`]: the context is about to end. User space has no such address.
    const MARK: usize = 1 << 63;

    fn new(context: usize) -> Self {
        let take_out = |state: &mut State| {
            let known = state.table(Kind::Context).remove(context as u64)?;
            Self::rename(state, context, context | Self::MARK);
            Some(known)
        };
        Self { context, known: with_state(take_out).flatten() }
    }

    fn rename(state: &mut State, from: usize, to: usize) {
        for kind in OF_CONTEXT {
            state.table(kind).each(|cost| {
                if cost.context == from {
                    cost.context = to;
                }
            });
        }
    }

    /// The context is as it was.
    fn stay(self) {
        let Self { context, known: Some(known) } = self else { return };
        with_state(|state| {
            Self::rename(state, context | Self::MARK, context);
            Self::put_back(state, context, known);
        });
    }

    fn put_back(state: &mut State, context: usize, known: Cost) {
        if state.table(Kind::Context).make_room() {
            state.table(Kind::Context).put(context as u64, known);
        }
    }

    /// The driver has freed what was allocated in the context, which lives on.
    fn empty(self) {
        let Self { context, known: Some(known) } = self else { return };
        with_state(|state| {
            Self::put_back(state, context, known);
            Self::release_all(state, context);
        });
        crate::pool::refresh();
    }

    /// The context has ended.
    fn end(self) {
        let Self { context, known: Some(known) } = self else { return };
        with_state(|state| {
            Self::release_all(state, context);
            state.end_context(known.gpu as usize);
        });
        crate::pool::refresh();
    }

    fn release_all(state: &mut State, context: usize) {
        for kind in OF_CONTEXT {
            let mut place = 0;
            let goes = |_, cost: &Cost| cost.context == context | Self::MARK;
            while let Some(cost) = state.table(kind).remove_next(&mut place, goes) {
                state.release(cost.gpu as usize, cost.bytes);
            }
        }
        limit::ended(state, context);
    }
}

fn destroy(context: Handle, real: impl FnOnce() -> c_int) -> c_int {
    let leaving = Leaving::new(context as usize);
    compute::context_may_end(context as usize, real, |result| {
        if result == SUCCESS {
            leaving.end()
        } else {
            leaving.stay()
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

/// Removes one attachment; the last ends the context.
fn detach(context: Handle, real: impl FnOnce() -> c_int) -> c_int {
    let is_last = attach(context as usize, -1) == Some(0);
    let result = if is_last { destroy(context, real) } else { real() };
    if result != SUCCESS {
        attach(context as usize, 1);
    }
    result
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
    if result == SUCCESS
        && let Some(context) = note()
    {
        attach(context, 1);
    }
    result
}

/// Calls the driver to release a primary context. Only the last release marks what the context
/// holds, which is a pass over all that the process holds.
fn release(device: Device, real: impl FnOnce() -> c_int) -> c_int {
    let context = primary(device);
    if attach(context, -1).is_none_or(|retained| retained == 0) {
        return end_primary(device, real, false);
    }
    let result = real();
    if result != SUCCESS {
        attach(context, 1);
    } else if cuda::primary_is_active(device) == Some(false) {
        // What the driver counted for other reasons, for a green context for example, is gone too.
        compute::context_is_gone(context);
        Leaving::new(context).end();
    }
    result
}

/// Calls the driver to reset a primary context, or to release it for the last time.
fn end_primary(device: Device, real: impl FnOnce() -> c_int, resets: bool) -> c_int {
    let context = primary(device);
    let leaving = Leaving::new(context);
    compute::context_may_end(context, real, |result| {
        // It is known again if another thread has retained it meanwhile, for which it began anew.
        let has_ended = result == SUCCESS
            && (cuda::primary_is_active(device) == Some(false)
                || with_state(|state| is_known(state, context)) == Some(true));
        let is_empty = result == SUCCESS && resets;
        match (has_ended, is_empty) {
            (true, _) => leaving.end(),
            (false, true) => leaving.empty(),
            (false, false) => leaving.stay(),
        }
        has_ended || is_empty
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
            Leaving::new(known).end();
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
        detach(context, || unsafe { real(context) })
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
        release(device, || unsafe { real(device) })
    }

    fn cuDevicePrimaryCtxRelease_v2(device: Device) |real| {
        // SAFETY: the program's own call.
        release(device, || unsafe { real(device) })
    }

    fn cuDevicePrimaryCtxReset(device: Device) |real| {
        // SAFETY: the program's own call.
        end_primary(device, || unsafe { real(device) }, true)
    }

    fn cuDevicePrimaryCtxReset_v2(device: Device) |real| {
        // SAFETY: the program's own call.
        end_primary(device, || unsafe { real(device) }, true)
    }
}
