//! Stream-ordered memory and pools.
//!
//! The charge is for the memory that a pool keeps (see [`crate::pools`]). An allocation on a stream
//! that captures is a node of a graph, and no memory yet.

use core::ffi::{c_int, c_void};

use super::physical::{Place, Properties, place};
use super::route::hooks;
use crate::allocation::{free_pointer, retry};
use crate::charge::{Charge, Refusal, charge_once, gpu_of};
use crate::driver::cuda::{self, Form, Handle, OUT_OF_MEMORY, Pointer, SUCCESS};
use crate::driver_counted;
use crate::pools::{self, ON_HOST, kept, settle, trim_pool};
use crate::state::with_state;
use crate::sys;

/// Pools allocate GPU memory in multiples of this at least.
const GRANULARITY: u64 = 2 << 20;

/// Returns the counter's key of the pool that a call allocates from, as far as it is known before.
/// Without a named pool it is the current one of the device, unless the stream is of another
/// device.
fn key_before(pool: Option<Handle>) -> Option<u64> {
    let known = |pool| with_state(|state| pools::key_of(state, pool)).flatten();
    if let Some(known) = pool.and_then(known) {
        return Some(known);
    }
    let device = cuda::current_device()?;
    let current = cuda::current_pool(device)?;
    let gpu = gpu_of(device).filter(|_| pool.is_none_or(|pool| pool == current))?;
    with_state(|state| pools::add(state, current, gpu)).flatten()
}

/// Charge of a call in advance, and the counter that it is for: none if the pool was not known.
#[derive(Clone, Copy)]
struct Before {
    key: Option<u64>,
    charge: Option<Charge>,
}

impl Before {
    /// Charges the most that a pool may have to allocate: nothing if it keeps enough, which is
    /// charged already.
    fn charge(pool: Option<Handle>, bytes: u64) -> Result<Self, Refusal> {
        let key = key_before(pool);
        let rounded = bytes.checked_next_multiple_of(GRANULARITY).unwrap_or(u64::MAX);
        let attempt = || match key {
            Some(key) => with_state(|state| driver_counted::charge_call(state, key, rounded))
                .unwrap_or(Err(Refusal::NotGranted)),
            None => {
                charge_once(cuda::current_device(), rounded).map(|charged| charged.charge(rounded))
            }
        };
        let charge = match attempt() {
            Err(Refusal::NotGranted | Refusal::NotYet) if has_left(key, bytes) => None,
            Err(Refusal::NotGranted | Refusal::NotYet) => Some(retry(attempt)?),
            charged => Some(charged?),
        };
        Ok(Self { key, charge })
    }

    /// Changes the charge to the memory that the pool keeps after the call.
    fn settle(self, key: u64) -> Result<(), Refusal> {
        match (self.key, self.charge) {
            (Some(expected), Some(charge)) if expected == key => {
                driver_counted::settle_call(key, charge, || kept(key))
            }
            (Some(_), Some(_)) => {
                self.undo();
                settle(key, None)
            }
            (_, charge) => settle(key, charge),
        }
    }

    /// Releases the charge of a call that did not allocate from that pool. Other calls may have
    /// relied on it, so the pool is read.
    fn undo(self) {
        match (self.key, self.charge) {
            (Some(key), Some(charge)) => {
                if driver_counted::settle_call(key, charge, || kept(key)).is_err() {
                    trim_pool(key);
                }
            }
            (None, Some(charge)) => charge.undo(),
            (_, None) => {}
        }
    }
}

/// Returns true if a pool keeps enough memory that is not allocated; it is charged already.
fn has_left(key: Option<u64>, bytes: u64) -> bool {
    let used = key
        .and_then(|key| pools::with_pool(key, |pool| cuda::pool_attribute(pool, cuda::POOL_USED)));
    let Some(used) = used.flatten() else { return false };
    let charged =
        with_state(|state| state.counters().get(key?).map(|counter| counter.charged)).flatten();
    charged.is_some_and(|charged| charged.saturating_sub(used) >= bytes)
}

fn is_on_host(pool: Handle) -> bool {
    with_state(|state| pools::key_of(state, pool)).flatten() == Some(ON_HOST)
}

/// Allocates from a pool.
///
/// # Safety
/// `out` is where the driver writes the pointer.
unsafe fn allocate(
    out: *mut Pointer,
    bytes: usize,
    pool: Option<Handle>,
    stream: (Handle, Form),
    real: impl FnOnce() -> c_int,
) -> c_int {
    if cuda::is_capturing(stream.0, stream.1) || pool.is_some_and(is_on_host) {
        return real();
    }
    // SAFETY: by this function's contract.
    let pointer = || unsafe { out.read_unaligned() };
    let before = match Before::charge(pool, bytes as u64) {
        Ok(before) => before,
        Err(refusal) => return refusal.result(real, || cuda::free(pointer())),
    };
    let result = real();
    if result != SUCCESS {
        before.undo();
        return result;
    }
    let pool = pool.or_else(|| cuda::pool_of(pointer()));
    match keep(pointer(), pool, before) {
        Ok(()) => SUCCESS,
        Err(key) => {
            cuda::free(pointer());
            pools::note_release();
            // The memory that the pool has allocated for it is not charged, and must be released.
            match key {
                Some(key) => trim_pool(key),
                None => pool.into_iter().for_each(cuda::trim_pool),
            }
            OUT_OF_MEMORY
        }
    }
}

/// Stores an allocation, and charges the memory that its pool keeps now.
///
/// # Errors
/// The memory is not granted, or there is no room for the allocation; with the key of the pool's
/// counter.
fn keep(pointer: Pointer, pool: Option<Handle>, before: Before) -> Result<(), Option<u64>> {
    if cuda::is_on_host(pointer) {
        before.undo();
        return Ok(());
    }
    let gpu = cuda::device_of(pointer).and_then(gpu_of).or_else(|| gpu_of_managed(pointer));
    let added = with_state(|state| {
        let key = pools::add(state, pool?, gpu?)?;
        Some((key, pools::add_piece(state, pointer, key)))
    });
    let Some((key, is_added)) = added.flatten() else {
        before.undo();
        return Err(None);
    };
    let settled = before.settle(key);
    if is_added && settled.is_ok() {
        return Ok(());
    }
    with_state(|state| pools::forget_piece(state, pointer));
    Err(Some(key))
}

/// Returns the GPU that managed memory without a device is charged to, as by `cuMemAllocManaged`.
fn gpu_of_managed(pointer: Pointer) -> Option<u32> {
    gpu_of(cuda::current_device().filter(|_| cuda::is_managed(pointer) == Some(true))?)
}

/// Frees memory on a stream. If the stream captures, the free is a node of a graph.
fn free_on(pointer: Pointer, stream: (Handle, Form), real: impl FnOnce() -> c_int) -> c_int {
    if cuda::is_capturing(stream.0, stream.1) { real() } else { free_pointer(pointer, real) }
}

/// Destroys a pool. During the call no thread reads the pool, and it stays charged: the driver may
/// refuse.
fn destroy(pool: Handle, real: impl FnOnce() -> c_int) -> c_int {
    let key = with_state(|state| pools::key_of(state, pool)).flatten();
    let set_leaving = |is_leaving: bool| {
        with_state(|state| {
            if let Some(counter) = key.and_then(|key| state.counters().get(key)) {
                counter.is_leaving = is_leaving;
            }
        });
    };
    set_leaving(true);
    while with_state(|state| {
        key.and_then(|key| state.counters().get(key)).is_some_and(|counter| counter.readers > 0)
    }) == Some(true)
    {
        sys::yield_thread();
    }
    let result = real();
    if result == SUCCESS {
        with_state(|state| pools::remove(state, pool, key));
    } else {
        set_leaving(false);
        // Calls of other threads were not read meanwhile.
        pools::settle_if_known(key);
    }
    result
}

/// Adds a new pool by the place of its memory. An older pool with this handle was destroyed.
///
/// # Errors
/// The place is unknown: the memory cannot be charged.
fn created(pool: Handle, place: Place) -> Result<(), Refusal> {
    with_state(|state| {
        let stale = pools::key_of(state, pool);
        pools::remove(state, pool, stale);
    });
    match place {
        Place::Host => {
            with_state(|state| pools::add_on_host(state, pool));
        }
        Place::Device(device) => {
            if let Some(gpu) = gpu_of(device) {
                with_state(|state| pools::add(state, pool, gpu));
            }
        }
        // Added with its first allocation.
        Place::Managed => {}
        Place::Unknown => return Err(Refusal::NotGranted),
    }
    Ok(())
}

/// Settles a pool after a call that may change the memory that it keeps, or its release threshold.
fn changed(pool: Handle, result: c_int) -> c_int {
    pools::note_release();
    let key = with_state(|state| pools::key_of(state, pool)).flatten();
    pools::settle_if_known(key);
    result
}

hooks! {
    fn cuMemAllocAsync(out: *mut Pointer, bytes: usize, stream: Handle) |real| {
        // SAFETY: the program's own call.
        unsafe { allocate(out, bytes, None, (stream, Form::Legacy), || real(out, bytes, stream)) }
    }

    fn cuMemAllocAsync_ptsz(out: *mut Pointer, bytes: usize, stream: Handle) |real| {
        // SAFETY: the program's own call.
        unsafe { allocate(out, bytes, None, (stream, Form::PerThread), || real(out, bytes, stream)) }
    }

    fn cuMemAllocFromPoolAsync(out: *mut Pointer, bytes: usize, pool: Handle, stream: Handle) |real| {
        // SAFETY: the program's own call.
        unsafe { allocate(out, bytes, Some(pool), (stream, Form::Legacy), || real(out, bytes, pool, stream)) }
    }

    fn cuMemAllocFromPoolAsync_ptsz(out: *mut Pointer, bytes: usize, pool: Handle, stream: Handle) |real| {
        // SAFETY: the program's own call.
        unsafe { allocate(out, bytes, Some(pool), (stream, Form::PerThread), || real(out, bytes, pool, stream)) }
    }

    fn cuMemFreeAsync(pointer: Pointer, stream: Handle) |real| {
        // SAFETY: the program's own call.
        free_on(pointer, (stream, Form::Legacy), || unsafe { real(pointer, stream) })
    }

    fn cuMemFreeAsync_ptsz(pointer: Pointer, stream: Handle) |real| {
        // SAFETY: the program's own call.
        free_on(pointer, (stream, Form::PerThread), || unsafe { real(pointer, stream) })
    }

    fn cuMemPoolCreate(out: *mut Handle, properties: *const Properties) |real| {
        // SAFETY: the program's own call.
        let result = unsafe { real(out, properties) };
        if result != SUCCESS {
            return result;
        }
        // SAFETY: the call succeeded: the driver has read the one and written the other.
        let (pool, place) = unsafe { (out.read_unaligned(), place(properties)) };
        match created(pool, place) {
            Ok(()) => SUCCESS,
            Err(_) => {
                cuda::destroy_pool(pool);
                OUT_OF_MEMORY
            }
        }
    }

    fn cuMemPoolDestroy(pool: Handle) |real| {
        // SAFETY: the program's own call.
        destroy(pool, || unsafe { real(pool) })
    }

    fn cuMemPoolSetAttribute(pool: Handle, attribute: c_int, value: *mut c_void) |real| {
        // SAFETY: the program's own call.
        changed(pool, unsafe { real(pool, attribute, value) })
    }

    fn cuMemPoolTrimTo(pool: Handle, keep: usize) |real| {
        // SAFETY: the program's own call.
        changed(pool, unsafe { real(pool, keep) })
    }
}
