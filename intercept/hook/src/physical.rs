//! Physical memory, its handles, mappings and bindings, as they are charged.
//!
//! Programs often release the handle as soon as the memory is mapped, and the memory lives until
//! its last mapping is removed. So the cost belongs to the memory, under a number of the
//! interceptor, and handles, mappings and bindings hold it.

use core::ops::Range;
use core::sync::atomic::{AtomicU64, Ordering};

use crate::charge::Charge;
use crate::driver::cuda::Pointer;
use crate::state::{Binding, Kind, Owner, State};
use crate::table::Cost;

/// Number of mapped memory that is not of a GPU, or that is unknown.
const NO_MEMORY: u64 = 0;

/// Bit of the keys of memory, which shares a table with handles: no handle has it.
const MEMORY: u64 = 1 << 63;

/// In [`Cost::context`]: imported memory. The driver reports its size only with a mapping.
const IMPORTED: usize = 1;

/// Returns a number of physical memory that was never returned before.
fn next_number() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// Returns the entry of a handle or mapping: `bytes` is the number of its memory, `holders` counts
/// how often it holds it, and `context` is the length of a mapping.
fn holder(number: u64, length: u64) -> Cost {
    Cost {
        bytes: number,
        context: usize::try_from(length).unwrap_or(usize::MAX),
        gpu: 0,
        holders: 1,
    }
}

/// Adds allocated memory and its handle.
pub(crate) fn add_allocated(state: &mut State, charge: Charge, handle: u64) -> bool {
    let cost = Cost { bytes: charge.bytes, context: 0, gpu: charge.gpu, holders: 1 };
    add(state, cost, handle)
}

fn add(state: &mut State, memory: Cost, handle: u64) -> bool {
    let number = next_number();
    let table = state.table(Kind::Physical);
    if !table.make_room() {
        return false;
    }
    table.put(MEMORY | number, memory);
    if !table.make_room() {
        table.remove(MEMORY | number);
        return false;
    }
    table.put(handle & !MEMORY, holder(number, 0));
    true
}

/// Adds the handle of an object without memory of its own. Without room for it, memory that is
/// bound to it is not held.
pub(crate) fn add_without_memory(state: &mut State, handle: u64) {
    add(state, Cost { holders: 1, ..Cost::default() }, handle);
}

/// Adds an imported handle; one without a GPU has no memory there. Memory that this process has
/// allocated itself has its handle already, and is charged.
pub(crate) fn add_imported(state: &mut State, handle: u64, gpu: Option<u32>) -> bool {
    let table = state.table(Kind::Physical);
    if let Some(known) = table.get(handle & !MEMORY) {
        known.holders = known.holders.saturating_add(1);
        let number = known.bytes;
        hold(state, number);
        return true;
    }
    let context = if gpu.is_some() { IMPORTED } else { 0 };
    add(state, Cost { bytes: 0, context, gpu: gpu.unwrap_or(0), holders: 1 }, handle)
}

/// Adds a handle that the driver made for memory that is mapped at an address.
pub(crate) fn add_retained(state: &mut State, handle: u64, address: u64) {
    let Some(number) = number_at(state, address) else { return };
    let table = state.table(Kind::Physical);
    if let Some(known) = table.get(handle & !MEMORY).filter(|known| known.bytes == number) {
        known.holders = known.holders.saturating_add(1);
    } else if table.make_room() {
        table.put(handle & !MEMORY, holder(number, 0));
    } else {
        return;
    }
    hold(state, number);
}

/// Returns the number of a handle's memory.
pub(crate) fn number_of(state: &mut State, handle: u64) -> Option<u64> {
    state.table(Kind::Physical).get(handle & !MEMORY).map(|known| known.bytes)
}

/// Returns the number of the GPU memory that is mapped at an address.
pub(crate) fn number_at(state: &mut State, address: Pointer) -> Option<u64> {
    let mut place = 0;
    while let Some((start, next)) = state.table(Kind::Mapping).key_from(place) {
        place = next;
        let mapping = *state.table(Kind::Mapping).get(start)?;
        if address.checked_sub(start).is_some_and(|offset| offset < mapping.context as u64) {
            return Some(mapping.bytes).filter(|number| *number != NO_MEMORY);
        }
    }
    None
}

/// Returns the GPU of memory.
pub(crate) fn gpu_of_memory(state: &mut State, number: u64) -> Option<u32> {
    state.table(Kind::Physical).get(MEMORY | number).map(|memory| memory.gpu)
}

/// Adds a holder of memory.
fn hold(state: &mut State, number: u64) {
    if let Some(memory) = state.table(Kind::Physical).get(MEMORY | number) {
        memory.holders = memory.holders.saturating_add(1);
    }
}

/// Removes a holder of memory; the last one frees the memory.
pub(crate) fn unhold(state: &mut State, number: u64) {
    let Some(memory) = state.table(Kind::Physical).get(MEMORY | number) else { return };
    memory.holders = memory.holders.saturating_sub(1);
    let (holders, gpu, bytes) = (memory.holders, memory.gpu, memory.bytes);
    if holders == 0 {
        state.table(Kind::Physical).remove(MEMORY | number);
        state.release(gpu as usize, bytes);
        unbind_all(state, Owner::Multicast(number));
    }
}

/// Removes a handle before the driver returns it to another thread; returns the number of its
/// memory.
pub(crate) fn take_handle(state: &mut State, handle: u64) -> Option<u64> {
    let table = state.table(Kind::Physical);
    let known = table.get(handle & !MEMORY)?;
    known.holders = known.holders.saturating_sub(1);
    let (left, number) = (known.holders, known.bytes);
    if left == 0 {
        table.remove(handle & !MEMORY);
    }
    Some(number)
}

/// Restores a handle that the driver did not release.
pub(crate) fn put_handle(state: &mut State, handle: u64, number: u64) {
    let table = state.table(Kind::Physical);
    if let Some(known) = table.get(handle & !MEMORY) {
        known.holders = known.holders.saturating_add(1);
    } else if table.make_room() {
        table.put(handle & !MEMORY, holder(number, 0));
    }
}

/// Returns the GPU and the bytes of a mapping of imported memory beyond those that are charged.
pub(crate) fn cost_of_mapping(state: &mut State, handle: u64, length: u64) -> Option<(u32, u64)> {
    let number = number_of(state, handle)?;
    let memory = state.table(Kind::Physical).get(MEMORY | number)?;
    let more = length.saturating_sub(memory.bytes);
    (memory.context == IMPORTED && more > 0).then_some((memory.gpu, more))
}

/// Adds a mapping, also of memory that is not of a GPU: one call may unmap both. The charge becomes
/// part of the memory's cost.
pub(crate) fn map(
    state: &mut State,
    pointer: Pointer,
    length: u64,
    handle: u64,
    charge: Option<Charge>,
) {
    let number = number_of(state, handle);
    if let Some(charge) = charge {
        let memory = number.and_then(|number| state.table(Kind::Physical).get(MEMORY | number));
        // Another thread may have mapped it meanwhile, and was charged.
        let needed = memory.map_or(0, |memory| {
            let needed = length.saturating_sub(memory.bytes).min(charge.bytes);
            memory.bytes += needed;
            needed
        });
        state.release(charge.gpu as usize, charge.bytes - needed);
    }
    if state.table(Kind::Mapping).make_room() {
        let number = number.unwrap_or(NO_MEMORY);
        hold(state, number);
        // An older mapping was removed, otherwise the driver would not have mapped this one.
        if let Some(stale) = state.table(Kind::Mapping).put(pointer, holder(number, length)) {
            unhold(state, stale.bytes);
        }
    }
}

/// Returns the first mapping in a range.
fn first_mapping(state: &mut State, range: Range<Pointer>) -> Option<Pointer> {
    let table = state.table(Kind::Mapping);
    if table.get(range.start).is_some() {
        return Some(range.start);
    }
    let (mut first, mut place) = (None, 0);
    while let Some((start, next)) = table.key_from(place) {
        place = next;
        if range.contains(&start) && first.is_none_or(|first| start < first) {
            first = Some(start);
        }
    }
    first
}

/// Calls `found` with the mappings in a range, in the order of their addresses. A range usually has
/// one mapping, or several without gaps.
fn each_mapping(
    state: &mut State,
    pointer: Pointer,
    length: u64,
    mut found: impl FnMut(&mut State, u64),
) {
    let end = pointer.saturating_add(length);
    let mut at = pointer;
    while at < end
        && let Some(start) = first_mapping(state, at..end)
        && let Some(mapping) = state.table(Kind::Mapping).get(start).copied()
    {
        found(state, start);
        at = start.saturating_add((mapping.context as u64).max(1));
    }
}

/// Marks the mappings in a range as about to be removed, or not. A mapping that another thread
/// makes there meanwhile is not marked.
pub(crate) fn set_leaving(state: &mut State, pointer: Pointer, length: u64, leaving: bool) {
    each_mapping(state, pointer, length, |state, at| {
        if let Some(mapping) = state.table(Kind::Mapping).get(at) {
            mapping.holders = u32::from(!leaving);
        }
    });
}

/// Removes the marked mappings in a range.
pub(crate) fn unmap(state: &mut State, pointer: Pointer, length: u64) {
    each_mapping(state, pointer, length, |state, at| {
        let leaves = state.table(Kind::Mapping).get(at).is_some_and(|mapping| mapping.holders == 0);
        if leaves && let Some(mapping) = state.table(Kind::Mapping).remove(at) {
            unhold(state, mapping.bytes);
        }
    });
}

/// Binds memory to an object. Without a GPU, it is that of the memory. Without room for the
/// binding, the memory stays charged.
pub(crate) fn bind(
    state: &mut State,
    owner: Owner,
    at: u64,
    gpu: Option<u32>,
    memory: Option<u64>,
) {
    let Some(memory) = memory else { return };
    hold(state, memory);
    let gpu = gpu.or_else(|| gpu_of_memory(state, memory));
    let key = state.next_ticket();
    if state.bindings().make_room() {
        state.bindings().put(key, Binding { owner, at, gpu, memory });
    }
}

/// Removes bindings that were made before a ticket: another thread may have bound memory at the
/// same place after the driver had removed the binding.
pub(crate) fn unbind(state: &mut State, before: u64, goes: impl Fn(&Binding) -> bool) {
    let mut place = 0;
    let goes = |key, binding: &Binding| key < before && goes(binding);
    while let Some(binding) = state.bindings().remove_next(&mut place, goes) {
        unhold(state, binding.memory);
    }
}

/// Removes all bindings of a destroyed object.
pub(crate) fn unbind_all(state: &mut State, owner: Owner) {
    unbind(state, u64::MAX, |binding| binding.owner == owner);
}
