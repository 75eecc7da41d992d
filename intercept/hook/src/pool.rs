//! Memory in the order of streams, and the pools that it comes from.
//!
//! A pool keeps memory that nobody holds, and lets go of it when the driver finds time for that. So not the pieces that are
//! out are charged, but what the pool keeps, as the driver counts it (see [`crate::gauge`]). What is asked for on a stream
//! that captures is a node of a graph, and no memory yet.

use core::ffi::{c_int, c_void};
use core::sync::atomic::{AtomicBool, Ordering};

use crate::charge::{Charge, Refusal, charge_gpu_once, charge_once, discharged, gpu_of};
use crate::cuda::{self, Form, Handle, OUT_OF_MEMORY, Pointer, SUCCESS};
use crate::gauge::{self, POOL};
use crate::pointers::Cost;
use crate::root::with_state;
use crate::route::hooks;
use crate::state::{Kind, State};
use crate::vmm::{Properties, device};

/// In place of the key of a gauge: a pool of memory of the host, which costs nothing here.
const ON_HOST: u64 = POOL;

/// Pools take memory from the GPU in multiples of this at least.
const GRANULARITY: u64 = 2 << 20;

/// Whether some pool may let go of memory when the program waits for the GPU.
static LOOSE: AtomicBool = AtomicBool::new(false);

/// The key of a pool's gauge; begins one where the pool is new here.
fn adopt(state: &mut State, pool: Handle, gpu: u32) -> Option<u64> {
    if let Some(known) = state.table(Kind::Pool).get(pool as u64) {
        return Some(known.bytes);
    }
    let key = POOL | state.next_ticket();
    if !state.table(Kind::Pool).make_room() || !gauge::begin(state, key, gpu, pool as usize) {
        return None;
    }
    state.table(Kind::Pool).put(pool as u64, Cost { bytes: key, context: 0, gpu, holders: 1 });
    Some(key)
}

/// Runs something on a pool's handle, unless the pool is gone. While that goes on it is not destroyed.
fn with_pool<T>(key: u64, run: impl FnOnce(Handle) -> T) -> Option<T> {
    let pool = with_state(|state| {
        let gauge = state.gauges().get(key).filter(|gauge| gauge.handle != 0)?;
        gauge.readers = gauge.readers.saturating_add(1);
        Some(gauge.handle)
    })??;
    let result = run(pool as Handle);
    with_state(|state| {
        if let Some(gauge) = state.gauges().get(key) {
            gauge.readers = gauge.readers.saturating_sub(1);
        }
    });
    Some(result)
}

/// What a pool keeps.
fn kept(key: u64) -> Option<u64> {
    with_pool(key, |pool| cuda::pool_attribute(pool, cuda::POOL_RESERVED)).flatten()
}

fn settle(key: u64, before: Option<Charge>) -> Result<(), Refusal> {
    gauge::settle(key, before, || kept(key))
}

/// Does something with every pool.
fn each(mut run: impl FnMut(u64)) {
    let mut place = 0;
    while let Some(Some((key, next))) = with_state(|state| state.gauges().key_from(place)) {
        place = next;
        if gauge::kind(key) == POOL {
            run(key);
        }
    }
}

/// Pays what all pools and graphs keep now.
pub(crate) fn refresh() {
    crate::graph::refresh();
    each(|key| {
        // What is not granted stays unpaid, and is asked for again with the next reading.
        let _ = settle(key, None);
    });
}

/// The same after the program has waited for the GPU, where something was freed since the last time.
pub(crate) fn refresh_after_waiting() {
    if LOOSE.load(Ordering::Relaxed) && LOOSE.swap(false, Ordering::Relaxed) {
        refresh();
    }
}

/// Has pools and graphs let go of what nobody holds, as the driver does before it refuses memory. Answers whether there are any.
pub(crate) fn trim() -> bool {
    let mut any = crate::graph::trim();
    each(|key| {
        any = true;
        with_pool(key, cuda::trim_pool);
        let _ = settle(key, None);
    });
    any
}

/// Whether what a pool keeps, and nobody holds, is enough; that is paid already.
fn has_left(pool: Option<Handle>, bytes: u64) -> bool {
    let Some(pool) = pool.or_else(|| cuda::current_pool(cuda::current_device()?)) else { return false };
    let Some(used) = cuda::pool_attribute(pool, cuda::POOL_USED) else { return false };
    let paid = with_state(|state| {
        let key = state.table(Kind::Pool).get(pool as u64)?.bytes;
        state.gauges().get(key).map(|gauge| gauge.paid)
    });
    paid.flatten().is_some_and(|paid| paid.saturating_sub(used) >= bytes)
}

fn is_on_host(pool: Handle) -> bool {
    let known = with_state(|state| state.table(Kind::Pool).get(pool as u64).map(|known| known.bytes));
    known.flatten() == Some(ON_HOST)
}

/// Charges what a pool may have to take. `Ok(None)`: it has enough left, and that is paid.
fn charge_before(pool: Option<Handle>, bytes: u64) -> Result<Option<Charge>, Refusal> {
    let of_pool =
        with_state(|state| state.table(Kind::Pool).get(pool? as u64).map(|known| known.gpu)).flatten();
    let rounded = bytes.checked_next_multiple_of(GRANULARITY).unwrap_or(u64::MAX);
    let charge = || match of_pool {
        Some(gpu) => charge_gpu_once(gpu, rounded),
        None => charge_once(cuda::current_device(), rounded),
    };
    match charge() {
        Err(Refusal::NotGranted) if has_left(pool, bytes) => Ok(None),
        Err(Refusal::NotGranted) if trim() => charge().map(Some),
        charged => charged.map(Some),
    }
}

/// Takes from a pool.
///
/// # Safety
/// `out` is where the driver is to put the pointer.
unsafe fn take(
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
    let before = match charge_before(pool, bytes as u64) {
        Ok(before) => before,
        Err(refusal) => return refusal.answer(real, || cuda::free(pointer())),
    };
    let result = real();
    if result != SUCCESS {
        before.into_iter().for_each(Charge::undo);
        return result;
    }
    match keep(pointer(), pool, before) {
        Ok(()) => SUCCESS,
        Err(key) => {
            cuda::free(pointer());
            let _ = key.map(|key| settle(key, None));
            OUT_OF_MEMORY
        }
    }
}

/// Remembers a pointer and pays for what its pool keeps now.
///
/// # Errors
/// That is not granted, or cannot be remembered; with the key of the pool's gauge.
fn keep(pointer: Pointer, pool: Option<Handle>, before: Option<Charge>) -> Result<(), Option<u64>> {
    if cuda::is_on_host(pointer) {
        before.into_iter().for_each(Charge::undo);
        return Ok(());
    }
    let pool = pool.or_else(|| cuda::pool_of(pointer));
    let gpu = cuda::device_of(pointer).and_then(gpu_of);
    let key = pool.zip(gpu).and_then(|(pool, gpu)| with_state(|state| adopt(state, pool, gpu)).flatten());
    let Some(key) = key else {
        before.into_iter().for_each(Charge::undo);
        return Err(None);
    };
    let remembered = with_state(|state| {
        let room = state.table(Kind::Pooled).make_room();
        if room {
            state.table(Kind::Pooled).put(pointer, Cost { bytes: key, context: 0, gpu: 0, holders: 1 });
            if let Some(gauge) = state.gauges().get(key) {
                gauge.pieces += 1;
            }
        }
        room
    });
    let settled = settle(key, before);
    if remembered == Some(true) && settled.is_ok() {
        return Ok(());
    }
    with_state(|state| {
        state.table(Kind::Pooled).remove(pointer).inspect(|_| {
            if let Some(gauge) = state.gauges().get(key) {
                gauge.pieces -= 1;
            }
        })
    });
    Err(Some(key))
}

/// Gives a pointer back, whether it is a pool's or not.
pub(crate) fn give_back(pointer: Pointer, real: impl FnOnce() -> c_int) -> c_int {
    let Some(piece) = with_state(|state| state.table(Kind::Pooled).remove(pointer)).flatten() else {
        return discharged(Kind::Pointer, pointer, real);
    };
    let result = real();
    let key = piece.bytes;
    if result != SUCCESS {
        with_state(|state| {
            if state.table(Kind::Pooled).make_room() {
                state.table(Kind::Pooled).put(pointer, piece);
            }
        });
        return result;
    }
    LOOSE.store(true, Ordering::Relaxed);
    let readable = with_state(|state| {
        let gauge = state.gauges().get(key)?;
        gauge.pieces = gauge.pieces.saturating_sub(1);
        let gauge = *gauge;
        if gauge.handle == 0 && gauge.pieces == 0 {
            gauge::end(state, key);
        }
        Some(gauge.handle != 0)
    });
    if readable.flatten() == Some(true) {
        let _ = settle(key, None);
    }
    result
}

/// The same on a stream: where that captures, the free is a node of a graph.
fn give_back_on(pointer: Pointer, stream: (Handle, Form), real: impl FnOnce() -> c_int) -> c_int {
    if cuda::is_capturing(stream.0, stream.1) { real() } else { give_back(pointer, real) }
}

/// Destroys a pool. What was taken from it and is still out keeps the memory: it is paid for until the last piece is back.
fn destroy(pool: Handle, real: impl FnOnce() -> c_int) -> c_int {
    let known = with_state(|state| state.table(Kind::Pool).remove(pool as u64)).flatten();
    let Some(known) = known else { return real() };
    let key = known.bytes;
    if key == ON_HOST {
        return real();
    }
    let set_handle = |handle: usize| {
        with_state(|state| {
            let gauge = state.gauges().get(key)?;
            gauge.handle = handle;
            Some(gauge.readers)
        })
    };
    // Nobody begins to read it from here on; who is at it gets done.
    set_handle(0);
    while with_state(|state| state.gauges().get(key).map_or(0, |gauge| gauge.readers))
        .is_some_and(|readers| readers > 0)
    {
        crate::sys::give_way();
    }
    let result = real();
    with_state(|state| {
        if result != SUCCESS {
            if state.table(Kind::Pool).make_room() {
                state.table(Kind::Pool).put(pool as u64, known);
            }
        } else if state.gauges().get(key).is_some_and(|gauge| gauge.pieces == 0) {
            gauge::end(state, key);
        }
    });
    if result != SUCCESS {
        set_handle(pool as usize);
    }
    result
}

/// Where there is no room for it, its memory is charged at first and credited once it is seen where that lies.
fn remember_on_host(state: &mut State, pool: Handle) {
    let table = state.table(Kind::Pool);
    if table.make_room() {
        table.put(pool as u64, Cost { bytes: ON_HOST, context: 0, gpu: 0, holders: 1 });
    }
}

/// After a call that may change what a known pool keeps.
fn changed(pool: Handle, result: c_int) -> c_int {
    let key = with_state(|state| state.table(Kind::Pool).get(pool as u64).map(|known| known.bytes)).flatten();
    let _ = key.filter(|key| *key != ON_HOST).map(|key| settle(key, None));
    result
}

hooks! {
    fn cuMemAllocAsync(out: *mut Pointer, bytes: usize, stream: Handle) |real| {
        // SAFETY: the program's own call.
        unsafe { take(out, bytes, None, (stream, Form::Legacy), || real(out, bytes, stream)) }
    }

    fn cuMemAllocAsync_ptsz(out: *mut Pointer, bytes: usize, stream: Handle) |real| {
        // SAFETY: the program's own call.
        unsafe { take(out, bytes, None, (stream, Form::PerThread), || real(out, bytes, stream)) }
    }

    fn cuMemAllocFromPoolAsync(out: *mut Pointer, bytes: usize, pool: Handle, stream: Handle) |real| {
        // SAFETY: the program's own call.
        unsafe { take(out, bytes, Some(pool), (stream, Form::Legacy), || real(out, bytes, pool, stream)) }
    }

    fn cuMemAllocFromPoolAsync_ptsz(out: *mut Pointer, bytes: usize, pool: Handle, stream: Handle) |real| {
        // SAFETY: the program's own call.
        unsafe { take(out, bytes, Some(pool), (stream, Form::PerThread), || real(out, bytes, pool, stream)) }
    }

    fn cuMemFreeAsync(pointer: Pointer, stream: Handle) |real| {
        // SAFETY: the program's own call.
        give_back_on(pointer, (stream, Form::Legacy), || unsafe { real(pointer, stream) })
    }

    fn cuMemFreeAsync_ptsz(pointer: Pointer, stream: Handle) |real| {
        // SAFETY: the program's own call.
        give_back_on(pointer, (stream, Form::PerThread), || unsafe { real(pointer, stream) })
    }

    // A new pool keeps nothing, and is known from its first memory on; only those of the host are told apart here.
    fn cuMemPoolCreate(out: *mut Handle, properties: *const Properties) |real| {
        // SAFETY: the program's own call.
        let result = unsafe { real(out, properties) };
        // SAFETY: the driver was content, has read the one and written the other.
        if result == SUCCESS && unsafe { device(properties) }.is_none() {
            // SAFETY: as above.
            let pool = unsafe { out.read_unaligned() };
            with_state(|state| remember_on_host(state, pool));
        }
        result
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
