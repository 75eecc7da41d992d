//! Contexts: each takes memory, and allocations in a context end with it, without a call for each.
//!
//! The first context of a process on a GPU is part of the process's account until it ends; each
//! further one at the same time is charged the same bytes again.

use core::ffi::{c_int, c_uint, c_void};

use super::limit;
use super::route::hooks;
use crate::allocation::print_refusal;
use crate::charge::gpu_of;
use crate::compute;
use crate::driver::cuda::{self, Device, Handle, OUT_OF_MEMORY, SUCCESS};
use crate::pools;
use crate::state::{Kind, State, with_state};
use crate::table::Cost;

/// Creates a context: `take` calls the driver, `taken` returns the context.
fn begin(
    device: Device,
    take: impl FnOnce() -> c_int,
    taken: impl FnOnce() -> Option<usize>,
) -> c_int {
    // Without a share there is nothing to charge, and no memory can be allocated in the context.
    let Some(gpu) = gpu_of(device) else { return take() };
    if !(charge(gpu) || pools::trim() && charge(gpu)) {
        print_refusal();
        return OUT_OF_MEMORY;
    }
    let result = take();
    let begun = if result == SUCCESS { taken() } else { None };
    with_state(|state| match begun.filter(|context| !is_known(state, *context)) {
        Some(context) => add(state, context, gpu),
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

/// Adds a context. Without room for it, it stays charged.
fn add(state: &mut State, context: usize, gpu: u32) {
    let table = state.table(Kind::Context);
    if table.make_room() {
        table.put(context as u64, Cost { bytes: 0, context: 0, gpu, holders: 1 });
    }
}

/// Creates a context that is not a primary one.
///
/// # Safety
/// `out` is where the driver writes the context.
unsafe fn create(out: *mut Handle, device: Device, take: impl FnOnce() -> c_int) -> c_int {
    // SAFETY: the call succeeded: the driver has written there.
    begin(device, take, || Some(unsafe { out.read_unaligned() } as usize))
}

/// Kinds of objects that end with the context that they were made in.
const OF_CONTEXT: [Kind; 4] = [Kind::Pointer, Kind::Array, Kind::Imported, Kind::External];

/// A context that the driver is being called to destroy. Its entries are marked before the call:
/// right after it, the driver may return the same address to another thread.
struct Leaving {
    context: usize,
    /// The context's own entry; `None` for an unknown context, or one that another thread
    /// destroys.
    known: Option<Cost>,
}

impl Leaving {
    /// In [`Cost::context`]: the context is about to be destroyed. User space has no such address.
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

    /// Restores the context, which was not destroyed.
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

    /// Releases the allocations of the context, which was reset and lives on.
    fn empty(self) {
        let Self { context, known: Some(known) } = self else { return };
        with_state(|state| {
            Self::put_back(state, context, known);
            Self::release_all(state, context);
        });
        pools::refresh();
    }

    /// Removes the context, which was destroyed.
    fn end(self) {
        let Self { context, known: Some(known) } = self else { return };
        with_state(|state| {
            Self::release_all(state, context);
            state.end_context(known.gpu as usize);
        });
        pools::refresh();
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

/// Adds or removes an attachment; returns their number. `None` for an unknown context.
fn attach(context: usize, change: i32) -> Option<u32> {
    let changed = with_state(|state| {
        let known = state.table(Kind::Context).get(context as u64)?;
        known.holders = known.holders.saturating_add_signed(change);
        Some(known.holders)
    });
    changed.flatten()
}

/// Removes an attachment; the last one destroys the context.
fn detach(context: Handle, real: impl FnOnce() -> c_int) -> c_int {
    let is_last = attach(context as usize, -1) == Some(0);
    let result = if is_last { destroy(context, real) } else { real() };
    if result != SUCCESS {
        attach(context as usize, 1);
    }
    result
}

/// Returns the primary context of a device when it was last retained.
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

/// Calls the driver for an operation that activates the primary context.
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

/// Calls the driver to release a primary context. Only the last release marks the objects of the
/// context, because that passes over all objects of the process.
fn release(device: Device, real: impl FnOnce() -> c_int) -> c_int {
    let context = primary(device);
    if attach(context, -1).is_none_or(|retained| retained == 0) {
        return end_primary(device, real, false);
    }
    let result = real();
    if result != SUCCESS {
        attach(context, 1);
    } else if cuda::primary_is_active(device) == Some(false) {
        // Attachments that the driver counted for other objects, such as green contexts, ended too.
        compute::context_ended(context);
        Leaving::new(context).end();
    }
    result
}

/// Calls the driver to reset a primary context, or to release it for the last time.
fn end_primary(device: Device, real: impl FnOnce() -> c_int, resets: bool) -> c_int {
    let context = primary(device);
    let leaving = Leaving::new(context);
    compute::context_may_end(context, real, |result| {
        // It is known again if another thread has retained it meanwhile, which created it again.
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

/// Removes the primary contexts that are not active any more.
fn end_primaries() {
    for device in 0.. {
        let Some(known) =
            with_state(|state| state.primary(device).map(|context| *context)).flatten()
        else {
            return;
        };
        if known != 0 && cuda::primary_is_active(device) == Some(false) {
            compute::context_ended(known);
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
            // SAFETY: the call succeeded: the driver has written there.
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
        // SAFETY: the call succeeded: the driver has written there.
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
