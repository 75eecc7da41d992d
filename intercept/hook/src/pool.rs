//! Memory in the order of streams, and the pools that it comes from.
//!
//! A pool keeps memory that nobody holds, and lets go of it when the driver finds time for that. So
//! not the pieces that are out are charged, but what the pool keeps, as the driver counts it (see
//! [`crate::gauge`]). What is asked for on a stream that captures is a node of a graph, and no
//! memory yet.

use core::ffi::{c_int, c_void};
use core::sync::atomic::{AtomicBool, Ordering};

use crate::charge::{Charge, Refusal, charge_once, discharge, gpu_of, insist};
use crate::cuda::{self, Form, Handle, OUT_OF_MEMORY, Pointer, SUCCESS};
use crate::gauge::{self, POOL};
use crate::pointers::Cost;
use crate::root::with_state;
use crate::route::hooks;
use crate::state::{Kind, State};
use crate::vmm::{Place, Properties, place};

/// In place of the key of a gauge: a pool of memory of the host, which costs nothing here.
const ON_HOST: u64 = POOL;

/// Pools take memory from the GPU in multiples of this at least.
const GRANULARITY: u64 = 2 << 20;

/// Whether some pool may let go of memory when the program waits for the GPU: it keeps more than is
/// out of it and more than it may keep then.
static LOOSE: AtomicBool = AtomicBool::new(false);

/// The key of a known pool's gauge.
fn key_of(state: &mut State, pool: Handle) -> Option<u64> {
    state.table(Kind::Pool).get(pool as u64).map(|known| known.bytes)
}

/// The same; begins one where the pool is new here.
fn adopt(state: &mut State, pool: Handle, gpu: u32) -> Option<u64> {
    if let Some(known) = key_of(state, pool) {
        return Some(known);
    }
    let key = POOL | state.next_ticket();
    if !state.table(Kind::Pool).make_room() || !gauge::begin(state, key, gpu, pool as usize) {
        return None;
    }
    state.table(Kind::Pool).put(pool as u64, Cost { bytes: key, context: 0, gpu, holders: 1 });
    Some(key)
}

/// The gauge of the pool that a call takes from, as far as that can be known before. Where none is
/// named it is the current one of the device, unless the stream is another device's.
fn gauge_before(pool: Option<Handle>) -> Option<u64> {
    if let Some(known) = pool.and_then(|pool| with_state(|state| key_of(state, pool)).flatten()) {
        return Some(known);
    }
    let device = cuda::current_device()?;
    let current = cuda::current_pool(device)?;
    let gpu = gpu_of(device).filter(|_| pool.is_none_or(|pool| pool == current))?;
    with_state(|state| adopt(state, current, gpu)).flatten()
}

/// A pool is destroyed: what was taken from it and is still out keeps the memory, and is paid for
/// until the last piece is back.
fn gone(state: &mut State, key: u64) {
    if let Some(gauge) = state.gauges().get(key) {
        gauge.handle = 0;
        end_if_empty(state, key);
    }
}

fn end_if_empty(state: &mut State, key: u64) {
    let is_over =
        |gauge: &mut gauge::Gauge| gauge.handle == 0 && gauge.pieces == 0 && gauge.readers == 0;
    if state.gauges().get(key).is_some_and(is_over) {
        gauge::end(state, key);
    }
}

/// A piece is back; answers whether what the pool keeps can still be read.
fn piece_is_back(state: &mut State, key: u64) -> bool {
    let Some(gauge) = state.gauges().get(key) else { return false };
    gauge.pieces = gauge.pieces.saturating_sub(1);
    let readable = gauge.handle != 0;
    end_if_empty(state, key);
    readable
}

/// What is remembered of an address that the driver has given out for something else: it went
/// without a call that said so.
pub(crate) fn forget_piece(state: &mut State, pointer: Pointer) {
    if let Some(stale) = state.table(Kind::Pooled).remove(pointer) {
        piece_is_back(state, stale.bytes);
    }
}

/// The handle of a pool, which is not destroyed until it has been read. While the driver may be
/// destroying it that is waited for, since it may refuse; but not for ever.
fn begin_reading(key: u64) -> Option<usize> {
    /// Far more than it takes the driver to refuse.
    const TIMES: usize = 256;
    for times in 0..TIMES {
        let begun = with_state(|state| {
            let gauge = state.gauges().get(key).filter(|gauge| gauge.handle != 0)?;
            gauge.readers = gauge.readers.saturating_add(u32::from(!gauge.leaving));
            Some((gauge.handle, gauge.leaving))
        });
        match begun?? {
            (handle, false) => return Some(handle),
            (_, true) => crate::sys::give_way_again(times),
        }
    }
    None
}

/// Runs something on a pool's handle, unless the pool is gone. While that goes on it is not
/// destroyed.
fn with_pool<T>(key: u64, run: impl FnOnce(Handle) -> T) -> Option<T> {
    let pool = begin_reading(key)?;
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

/// Pays what a pool keeps now, if it is known and not the host's.
fn reread(key: Option<u64>) {
    if let Some(key) = key.filter(|key| *key != ON_HOST) {
        // What is not granted stays unpaid, and is asked for again with the next reading.
        let _ = settle(key, None);
    }
}

/// Has a pool let go of what nobody holds.
fn trim_pool(key: u64) {
    with_pool(key, cuda::trim_pool);
    // What is not granted stays unpaid, and is asked for again with the next reading.
    let _ = settle(key, None);
}

/// What a call was charged with, and on which gauge: none where the pool was not known.
#[derive(Clone, Copy)]
struct Before {
    key: Option<u64>,
    charge: Option<Charge>,
}

impl Before {
    /// The call is done; pays for what the pool keeps now.
    fn settle(self, key: u64) -> Result<(), Refusal> {
        match (self.key, self.charge) {
            (Some(expected), Some(charge)) if expected == key => {
                gauge::settle_call(key, charge, || kept(key))
            }
            (Some(_), Some(_)) => {
                self.call_off();
                settle(key, None)
            }
            (_, charge) => settle(key, charge),
        }
    }

    /// Nothing came of it for that pool. Others may have relied on what was charged: so the pool is
    /// read.
    fn call_off(self) {
        match (self.key, self.charge) {
            (Some(key), Some(charge)) => {
                if gauge::settle_call(key, charge, || kept(key)).is_err() {
                    trim_pool(key);
                }
            }
            (None, Some(charge)) => charge.undo(),
            (_, None) => {}
        }
    }
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

/// The same after the program has waited for the GPU, where something was freed since the last
/// time.
pub(crate) fn refresh_after_waiting() {
    if LOOSE.load(Ordering::Relaxed) && LOOSE.swap(false, Ordering::Relaxed) {
        refresh();
        each(|key| {
            if with_pool(key, is_loose) == Some(true) {
                LOOSE.store(true, Ordering::Relaxed);
            }
        });
    }
}

/// Whether a pool may let go of more: another stream may not have come to the free yet. What cannot
/// be read counts as that.
fn is_loose(pool: Handle) -> bool {
    let read = |attribute| cuda::pool_attribute(pool, attribute);
    let least = read(cuda::POOL_USED)
        .zip(read(cuda::POOL_THRESHOLD))
        .map_or(0, |(used, may)| used.max(may));
    read(cuda::POOL_RESERVED).is_none_or(|reserved| reserved > least)
}

/// Has pools and graphs let go of what nobody holds, as the driver does before it refuses memory.
/// Answers whether there are any.
pub(crate) fn trim() -> bool {
    cuda::relaxed(|| {
        let mut any = crate::graph::trim();
        each(|key| {
            any = true;
            trim_pool(key);
        });
        any
    })
}

/// Whether what a pool keeps, and nobody holds, is enough; that is paid already.
fn has_left(key: Option<u64>, bytes: u64) -> bool {
    let used =
        key.and_then(|key| with_pool(key, |pool| cuda::pool_attribute(pool, cuda::POOL_USED)));
    let Some(used) = used.flatten() else { return false };
    let paid = with_state(|state| state.gauges().get(key?).map(|gauge| gauge.paid)).flatten();
    paid.is_some_and(|paid| paid.saturating_sub(used) >= bytes)
}

fn is_on_host(pool: Handle) -> bool {
    with_state(|state| key_of(state, pool)).flatten() == Some(ON_HOST)
}

/// Charges what a pool may have to take: nothing where it has enough left, and that is paid.
fn charge_before(pool: Option<Handle>, bytes: u64) -> Result<Before, Refusal> {
    let key = gauge_before(pool);
    let rounded = bytes.checked_next_multiple_of(GRANULARITY).unwrap_or(u64::MAX);
    let charge_once = || match key {
        Some(key) => with_state(|state| gauge::charge_call(state, key, rounded))
            .unwrap_or(Err(Refusal::NotGranted)),
        None => charge_once(cuda::current_device(), rounded),
    };
    let charge = match charge_once() {
        Err(Refusal::NotGranted | Refusal::NotYet) if has_left(key, bytes) => None,
        Err(Refusal::NotGranted | Refusal::NotYet) => Some(insist(charge_once)?),
        charged => Some(charged?),
    };
    Ok(Before { key, charge })
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
        before.call_off();
        return result;
    }
    let pool = pool.or_else(|| cuda::pool_of(pointer()));
    match keep(pointer(), pool, before) {
        Ok(()) => SUCCESS,
        Err(key) => {
            cuda::free(pointer());
            LOOSE.store(true, Ordering::Relaxed);
            // What the pool took for it is not paid, and must not stay with it.
            match key {
                Some(key) => trim_pool(key),
                None => pool.into_iter().for_each(cuda::trim_pool),
            }
            OUT_OF_MEMORY
        }
    }
}

/// Remembers a pointer and pays for what its pool keeps now.
///
/// # Errors
/// That is not granted, or cannot be remembered; with the key of the pool's gauge.
fn keep(pointer: Pointer, pool: Option<Handle>, before: Before) -> Result<(), Option<u64>> {
    if cuda::is_on_host(pointer) {
        before.call_off();
        return Ok(());
    }
    let gpu = cuda::device_of(pointer).and_then(gpu_of).or_else(|| gpu_of_managed(pointer));
    let remembered = with_state(|state| {
        let key = adopt(state, pool?, gpu?)?;
        Some((key, remember(state, pointer, key)))
    });
    let Some((key, remembered)) = remembered.flatten() else {
        before.call_off();
        return Err(None);
    };
    let settled = before.settle(key);
    if remembered && settled.is_ok() {
        return Ok(());
    }
    with_state(|state| forget_piece(state, pointer));
    Err(Some(key))
}

/// Managed memory may be said to be on no device; then it is charged as `cuMemAllocManaged` is.
fn gpu_of_managed(pointer: Pointer) -> Option<u32> {
    gpu_of(cuda::current_device().filter(|_| cuda::is_managed(pointer) == Some(true))?)
}

/// Remembers a piece of a pool. What had the address is gone: the driver gives nothing out twice.
fn remember(state: &mut State, pointer: Pointer, key: u64) -> bool {
    if !state.table(Kind::Pooled).make_room() {
        return false;
    }
    forget_piece(state, pointer);
    if let Some(stale) = state.table(Kind::Pointer).remove(pointer) {
        state.release(stale.gpu as usize, stale.bytes);
    }
    state.table(Kind::Pooled).put(pointer, Cost { bytes: key, context: 0, gpu: 0, holders: 1 });
    if let Some(gauge) = state.gauges().get(key) {
        gauge.pieces += 1;
    }
    true
}

/// Gives a pointer back, whether it is a pool's or not.
pub(crate) fn give_back(pointer: Pointer, real: impl FnOnce() -> c_int) -> c_int {
    let found = with_state(|state| match state.table(Kind::Pooled).remove(pointer) {
        Some(piece) => (Some(piece), None),
        None => (None, state.table(Kind::Pointer).remove(pointer)),
    });
    let (piece, plain) = found.unwrap_or_default();
    let Some(piece) = piece else { return discharge(Kind::Pointer, pointer, plain, real) };
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
    let readable = with_state(|state| piece_is_back(state, key));
    if readable == Some(true) {
        let _ = settle(key, None);
    }
    result
}

/// The same on a stream: where that captures, the free is a node of a graph.
fn give_back_on(pointer: Pointer, stream: (Handle, Form), real: impl FnOnce() -> c_int) -> c_int {
    if cuda::is_capturing(stream.0, stream.1) { real() } else { give_back(pointer, real) }
}

/// Destroys a pool. While the driver is at it, nobody reads the pool, and it stays charged: the
/// driver may refuse.
fn destroy(pool: Handle, real: impl FnOnce() -> c_int) -> c_int {
    let key = with_state(|state| key_of(state, pool)).flatten();
    let leaving = |leaving: bool| {
        with_state(|state| {
            if let Some(gauge) = key.and_then(|key| state.gauges().get(key)) {
                gauge.leaving = leaving;
            }
        });
    };
    leaving(true);
    while with_state(|state| {
        key.and_then(|key| state.gauges().get(key)).is_some_and(|gauge| gauge.readers > 0)
    }) == Some(true)
    {
        crate::sys::give_way();
    }
    let result = real();
    if result == SUCCESS {
        with_state(|state| forget_pool(state, pool, key));
    } else {
        leaving(false);
        // What others did meanwhile was not read.
        reread(key);
    }
    result
}

/// A pool is destroyed; its handle may be another pool's already.
fn forget_pool(state: &mut State, pool: Handle, key: Option<u64>) {
    if key.is_some() && key_of(state, pool) == key {
        state.table(Kind::Pool).remove(pool as u64);
    }
    key.into_iter().for_each(|key| gone(state, key));
}

/// Remembers a new pool by where its memory is to be. What had the handle is destroyed.
///
/// # Errors
/// Nobody can say who is to pay for its memory.
fn created(pool: Handle, place: Place) -> Result<(), Refusal> {
    with_state(|state| {
        let stale = key_of(state, pool);
        forget_pool(state, pool, stale);
    });
    match place {
        Place::Host => {
            with_state(|state| remember_on_host(state, pool));
        }
        Place::Device(device) => {
            if let Some(gpu) = gpu_of(device) {
                with_state(|state| adopt(state, pool, gpu));
            }
        }
        // It is known from its first memory on.
        Place::Managed => {}
        Place::Unknown => return Err(Refusal::NotGranted),
    }
    Ok(())
}

fn destroy_new(pool: Handle) {
    // SAFETY: it takes one handle; the program has not seen this one.
    unsafe { cuMemPoolDestroy::ROUTE.give_back(pool as u64) };
}

/// Where there is no room for it, its memory is charged at first and credited once it is seen where
/// that lies.
fn remember_on_host(state: &mut State, pool: Handle) {
    let table = state.table(Kind::Pool);
    if table.make_room() {
        table.put(pool as u64, Cost { bytes: ON_HOST, context: 0, gpu: 0, holders: 1 });
    }
}

/// After a call that may change what a known pool keeps.
fn changed(pool: Handle, result: c_int) -> c_int {
    // It may have to keep less from now on.
    LOOSE.store(true, Ordering::Relaxed);
    let key = with_state(|state| key_of(state, pool)).flatten();
    reread(key);
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

    fn cuMemPoolCreate(out: *mut Handle, properties: *const Properties) |real| {
        // SAFETY: the program's own call.
        let result = unsafe { real(out, properties) };
        if result != SUCCESS {
            return result;
        }
        // SAFETY: the driver was content, has read the one and written the other.
        let (pool, place) = unsafe { (out.read_unaligned(), place(properties)) };
        match created(pool, place) {
            Ok(()) => SUCCESS,
            Err(_) => {
                destroy_new(pool);
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
