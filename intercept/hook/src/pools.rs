//! Pools of stream-ordered memory, as they are charged.
//!
//! A pool keeps memory that is not allocated, and releases it when the driver decides to. So the
//! charge is for the memory that the pool keeps, by the driver's counter (see
//! [`crate::driver_counted`]), and not for the allocations from it.

use core::sync::atomic::{AtomicBool, Ordering};

use crate::charge::{Charge, Refusal};
use crate::driver::cuda::{self, Handle, Pointer};
use crate::driver_counted;
use crate::graph_memory;
use crate::state::{DriverCounter, Kind, POOL, State, kind, with_state};
use crate::sys;
use crate::table::Cost;

/// Key of pools of host memory, which costs no GPU memory.
pub(crate) const ON_HOST: u64 = POOL;

/// True if a pool may release memory when the program synchronizes: it keeps more than is allocated
/// and more than its release threshold.
static MAY_RELEASE: AtomicBool = AtomicBool::new(false);

/// Notes that a pool may release memory when the program synchronizes.
pub(crate) fn note_release() {
    MAY_RELEASE.store(true, Ordering::Relaxed);
}

/// Returns the counter's key of a known pool.
pub(crate) fn key_of(state: &mut State, pool: Handle) -> Option<u64> {
    state.table(Kind::Pool).get(pool as u64).map(|known| known.bytes)
}

/// Returns the counter's key of a pool; adds a pool that is not known.
pub(crate) fn add(state: &mut State, pool: Handle, gpu: u32) -> Option<u64> {
    if let Some(known) = key_of(state, pool) {
        return Some(known);
    }
    let key = POOL | state.next_ticket();
    if !state.table(Kind::Pool).make_room()
        || !driver_counted::begin(state, key, gpu, pool as usize)
    {
        return None;
    }
    state.table(Kind::Pool).put(pool as u64, Cost { bytes: key, context: 0, gpu, holders: 1 });
    Some(key)
}

/// Adds a pool of host memory. Without room for it, its memory is charged at first, and released
/// once its place is known.
pub(crate) fn add_on_host(state: &mut State, pool: Handle) {
    let table = state.table(Kind::Pool);
    if table.make_room() {
        table.put(pool as u64, Cost { bytes: ON_HOST, context: 0, gpu: 0, holders: 1 });
    }
}

/// Removes a destroyed pool; its handle may be another pool's already. Its charge stays until its
/// last allocation is freed.
pub(crate) fn remove(state: &mut State, pool: Handle, key: Option<u64>) {
    if key.is_some() && key_of(state, pool) == key {
        state.table(Kind::Pool).remove(pool as u64);
    }
    if let Some(counter) = key.and_then(|key| state.counters().get(key)) {
        counter.handle = 0;
    }
    key.into_iter().for_each(|key| end_if_empty(state, key));
}

fn end_if_empty(state: &mut State, key: u64) {
    let is_over = |counter: &mut DriverCounter| {
        counter.handle == 0 && counter.pieces == 0 && counter.readers == 0
    };
    if state.counters().get(key).is_some_and(is_over) {
        driver_counted::end(state, key);
    }
}

/// Adds an allocation from a pool. An older object at this address was freed without a call: the
/// driver returns no address twice.
pub(crate) fn add_piece(state: &mut State, pointer: Pointer, key: u64) -> bool {
    if !state.table(Kind::Pooled).make_room() {
        return false;
    }
    forget_piece(state, pointer);
    if let Some(stale) = state.table(Kind::Pointer).remove(pointer) {
        state.release(stale.gpu as usize, stale.bytes);
    }
    state.table(Kind::Pooled).put(pointer, Cost { bytes: key, context: 0, gpu: 0, holders: 1 });
    if let Some(counter) = state.counters().get(key) {
        counter.pieces += 1;
    }
    true
}

/// Counts a freed allocation; returns true if the pool's counter can still be read.
fn remove_piece(state: &mut State, key: u64) -> bool {
    let Some(counter) = state.counters().get(key) else { return false };
    counter.pieces = counter.pieces.saturating_sub(1);
    let is_readable = counter.handle != 0;
    end_if_empty(state, key);
    is_readable
}

/// Forgets an allocation at an address that the driver has returned for another object: it was
/// freed without a call.
pub(crate) fn forget_piece(state: &mut State, pointer: Pointer) {
    if let Some(stale) = state.table(Kind::Pooled).remove(pointer) {
        remove_piece(state, stale.bytes);
    }
}

/// Settles the pool of a freed allocation.
pub(crate) fn freed(key: u64) {
    note_release();
    if with_state(|state| remove_piece(state, key)) == Some(true) {
        let _ = settle(key, None);
    }
}

/// Returns the handle of a pool, which is not destroyed until it has been read. While the driver
/// may be destroying the pool this waits, because the driver may refuse; but not for ever.
fn begin_reading(key: u64) -> Option<usize> {
    /// Far more than the driver needs to refuse.
    const TIMES: usize = 256;
    for times in 0..TIMES {
        let begun = with_state(|state| {
            let counter = state.counters().get(key).filter(|counter| counter.handle != 0)?;
            counter.readers = counter.readers.saturating_add(u32::from(!counter.is_leaving));
            Some((counter.handle, counter.is_leaving))
        });
        match begun?? {
            (handle, false) => return Some(handle),
            (_, true) => sys::back_off(times),
        }
    }
    None
}

/// Runs a function on a pool's handle, unless the pool was destroyed. The pool is not destroyed
/// meanwhile.
pub(crate) fn with_pool<T>(key: u64, run: impl FnOnce(Handle) -> T) -> Option<T> {
    let pool = begin_reading(key)?;
    let result = run(pool as Handle);
    with_state(|state| {
        if let Some(counter) = state.counters().get(key) {
            counter.readers = counter.readers.saturating_sub(1);
        }
    });
    Some(result)
}

/// Returns the bytes that a pool keeps.
pub(crate) fn kept(key: u64) -> Option<u64> {
    with_pool(key, |pool| cuda::pool_attribute(pool, cuda::POOL_RESERVED)).flatten()
}

/// Changes the charge of a pool to the bytes that it keeps.
pub(crate) fn settle(key: u64, before: Option<Charge>) -> Result<(), Refusal> {
    driver_counted::settle(key, before, || kept(key))
}

/// Settles a pool if it is known and not of host memory.
pub(crate) fn settle_if_known(key: Option<u64>) {
    if let Some(key) = key.filter(|key| *key != ON_HOST) {
        // Memory that is not granted stays uncharged until the next reading.
        let _ = settle(key, None);
    }
}

/// Releases the unused memory of a pool.
pub(crate) fn trim_pool(key: u64) {
    with_pool(key, cuda::trim_pool);
    // Memory that is not granted stays uncharged until the next reading.
    let _ = settle(key, None);
}

/// Calls `run` with every pool.
fn each(mut run: impl FnMut(u64)) {
    let mut place = 0;
    while let Some(Some((key, next))) = with_state(|state| state.counters().key_from(place)) {
        place = next;
        if kind(key) == POOL {
            run(key);
        }
    }
}

/// Settles all pools and graphs.
pub(crate) fn refresh() {
    graph_memory::refresh();
    each(|key| {
        // Memory that is not granted stays uncharged until the next reading.
        let _ = settle(key, None);
    });
}

/// Settles all pools and graphs after the program has synchronized, if memory was freed since the
/// last time.
pub(crate) fn refresh_after_sync() {
    if MAY_RELEASE.load(Ordering::Relaxed) && MAY_RELEASE.swap(false, Ordering::Relaxed) {
        refresh();
        each(|key| {
            if with_pool(key, may_release) == Some(true) {
                note_release();
            }
        });
    }
}

/// Returns true if a pool may release more memory: another stream may not have reached the free
/// yet. A pool that cannot be read counts as that.
fn may_release(pool: Handle) -> bool {
    let read = |attribute| cuda::pool_attribute(pool, attribute);
    let least = read(cuda::POOL_USED)
        .zip(read(cuda::POOL_THRESHOLD))
        .map_or(0, |(used, threshold)| used.max(threshold));
    read(cuda::POOL_RESERVED).is_none_or(|reserved| reserved > least)
}

/// Releases the unused memory of pools and graphs, as the driver does before it refuses memory.
/// Returns true if there are any.
pub(crate) fn trim() -> bool {
    cuda::relaxed(|| {
        let mut any = graph_memory::trim();
        each(|key| {
            any = true;
            trim_pool(key);
        });
        any
    })
}
