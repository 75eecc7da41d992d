//! Physical memory and its mappings.
//!
//! Programs often let go of the handle as soon as the memory is mapped, and the memory lives until
//! the last mapping goes. So the cost belongs to the memory (under a number of our own), and
//! handles, mappings and what it is bound to hold it.

use core::ffi::{c_int, c_ulonglong, c_void};
use core::ops::Range;
use core::sync::atomic::{AtomicU64, Ordering};

use crate::bind::{self, Owner};
use crate::charge::{self, Charge, charge};
use crate::cuda::{self, Device, OUT_OF_MEMORY, Pointer, SUCCESS};
use crate::pointers::Cost;
use crate::root::with_state;
use crate::route::hooks;
use crate::state::{Kind, State};

/// The beginning of `CUmemAllocationProp`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Properties {
    kind: c_int,
    handle_types: c_int,
    location_type: c_int,
    location: c_int,
}

/// Where memory is to be, as far as somebody pays for it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    /// On the host, where it stays: it costs nothing here.
    Host,
    /// On a device, or a part of one.
    Device(Device),
    /// Managed, without a device that it is said to be on.
    Managed,
    /// Nobody here knows the type of the place: such memory is not to be had.
    Unknown,
}

/// Where memory is to be. For NULL, which the driver refuses, it is not known.
///
/// # Safety
/// `properties` is NULL or what the program wants the driver to read.
pub(crate) unsafe fn place(properties: *const Properties) -> Place {
    if properties.is_null() {
        return Place::Unknown;
    }
    // SAFETY: by this function's contract.
    place_of(&unsafe { properties.read_unaligned() })
}

/// `CUmemAllocationType` and `CUmemLocationType`, whose numbers are those of cuda.h.
fn place_of(properties: &Properties) -> Place {
    const PINNED: c_int = 1;
    const MANAGED: c_int = 2;
    const NONE: c_int = 0;
    const DEVICE: c_int = 1;
    const HOST: c_int = 2;
    const HOST_NUMA_CURRENT: c_int = 4;
    const DEVICE_LOCALITY_DOMAIN: c_int = 6;
    match (properties.location_type, properties.kind) {
        (DEVICE, _) => Place::Device(properties.location),
        // A byte with the device, and one with the domain.
        (DEVICE_LOCALITY_DOMAIN, _) => Place::Device(properties.location & 0xff),
        (NONE | HOST..=HOST_NUMA_CURRENT, MANAGED) => Place::Managed,
        (HOST..=HOST_NUMA_CURRENT, PINNED) => Place::Host,
        _ => Place::Unknown,
    }
}

/// What the driver says of a handle.
fn properties_of(handle: u64) -> Option<Properties> {
    let mut room = [0_u64; 32];
    if !cuda::allocation_properties(handle, &mut room) {
        return None;
    }
    // SAFETY: there is more room than the properties have bytes, which are all integers.
    Some(unsafe { room.as_ptr().cast::<Properties>().read_unaligned() })
}

/// A number for a piece of physical memory, different from all others and from handles of the
/// driver's.
fn next_number() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// A handle or a mapping says in `bytes` which memory it holds, and in `holders` how often.
fn holder(number: u64, length: u64) -> Cost {
    Cost {
        bytes: number,
        context: usize::try_from(length).unwrap_or(usize::MAX),
        gpu: 0,
        holders: 1,
    }
}

/// In place of a number: mapped memory that is not a GPU's, or of which nothing is known.
const NO_MEMORY: u64 = 0;

/// Handles are remembered among the arrays' keys no more than memory among handles': each kind has
/// a table of its own, and memory shares that of handles with its number's top bit set, which no
/// handle has.
const MEMORY: u64 = 1 << 63;

/// In place of a context: imported memory, of which the driver says only with a mapping how much it
/// is.
const IMPORTED: usize = 1;

/// Remembers new memory and its handle.
fn remember(state: &mut State, memory: Cost, handle: u64) -> bool {
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

/// Remembers the handle of something without memory of its own. Where there is no room, what is
/// bound to it is not kept.
pub(crate) fn remember_without_memory(state: &mut State, handle: u64) {
    remember(state, Cost { holders: 1, ..Cost::default() }, handle);
}

/// Remembers an imported handle; without a GPU it is one of something that has no memory there.
/// What this process has taken itself has its handle already, and is paid.
fn remember_imported(state: &mut State, handle: u64, gpu: Option<u32>) -> bool {
    let table = state.table(Kind::Physical);
    if let Some(known) = table.get(handle & !MEMORY) {
        known.holders = known.holders.saturating_add(1);
        let number = known.bytes;
        hold(state, number);
        return true;
    }
    let context = if gpu.is_some() { IMPORTED } else { 0 };
    remember(state, Cost { bytes: 0, context, gpu: gpu.unwrap_or(0), holders: 1 }, handle)
}

/// The number of the memory that a handle holds.
pub(crate) fn number_of(state: &mut State, handle: u64) -> Option<u64> {
    state.table(Kind::Physical).get(handle & !MEMORY).map(|known| known.bytes)
}

/// The number of the memory of a GPU that is mapped at an address.
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

/// The GPU that memory lies on.
pub(crate) fn gpu_of(state: &mut State, number: u64) -> Option<u32> {
    state.table(Kind::Physical).get(MEMORY | number).map(|memory| memory.gpu)
}

/// One holder less; the last frees the memory.
pub(crate) fn let_go(state: &mut State, number: u64) {
    let Some(memory) = state.table(Kind::Physical).get(MEMORY | number) else { return };
    memory.holders = memory.holders.saturating_sub(1);
    let (holders, gpu, bytes) = (memory.holders, memory.gpu, memory.bytes);
    if holders == 0 {
        state.table(Kind::Physical).remove(MEMORY | number);
        state.release(gpu as usize, bytes);
        bind::gone(state, Owner::Multicast(number));
    }
}

/// One holder more.
pub(crate) fn hold(state: &mut State, number: u64) {
    if let Some(memory) = state.table(Kind::Physical).get(MEMORY | number) {
        memory.holders = memory.holders.saturating_add(1);
    }
}

/// Takes a handle out, before the driver gives it to another thread; answers the number of its
/// memory.
fn take_handle(state: &mut State, handle: u64) -> Option<u64> {
    let table = state.table(Kind::Physical);
    let known = table.get(handle & !MEMORY)?;
    known.holders = known.holders.saturating_sub(1);
    let (left, number) = (known.holders, known.bytes);
    if left == 0 {
        table.remove(handle & !MEMORY);
    }
    Some(number)
}

/// Puts a handle back that the driver did not release.
fn put_handle(state: &mut State, handle: u64, number: u64) {
    let table = state.table(Kind::Physical);
    if let Some(known) = table.get(handle & !MEMORY) {
        known.holders = known.holders.saturating_add(1);
    } else if table.make_room() {
        table.put(handle & !MEMORY, holder(number, 0));
    }
}

/// What a mapping of imported memory costs beyond what is paid for it.
fn cost_of_mapping(state: &mut State, handle: u64, length: u64) -> Option<(u32, u64)> {
    let number = number_of(state, handle)?;
    let memory = state.table(Kind::Physical).get(MEMORY | number)?;
    let more = length.saturating_sub(memory.bytes);
    (memory.context == IMPORTED && more > 0).then_some((memory.gpu, more))
}

/// Remembers a mapping, also of memory that is not a GPU's: one call may unmap both. What was
/// charged for it becomes part of what the memory costs.
fn map(state: &mut State, pointer: Pointer, length: u64, handle: u64, charge: Option<Charge>) {
    let number = number_of(state, handle);
    if let Some(charge) = charge {
        let memory = number.and_then(|number| state.table(Kind::Physical).get(MEMORY | number));
        // Another thread may have mapped it meanwhile, and paid.
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
        // What was there is unmapped, or the driver would not have mapped this.
        if let Some(stale) = state.table(Kind::Mapping).put(pointer, holder(number, length)) {
            let_go(state, stale.bytes);
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

/// Says of the mappings in a range whether they are about to go. One that another thread makes
/// there meanwhile is not.
fn set_leaving(state: &mut State, pointer: Pointer, length: u64, leaving: bool) {
    each_mapping(state, pointer, length, |state, at| {
        if let Some(mapping) = state.table(Kind::Mapping).get(at) {
            mapping.holders = u32::from(!leaving);
        }
    });
}

/// Forgets the mappings in a range that were about to go.
fn unmap(state: &mut State, pointer: Pointer, length: u64) {
    each_mapping(state, pointer, length, |state, at| {
        let leaves = state.table(Kind::Mapping).get(at).is_some_and(|mapping| mapping.holders == 0);
        if leaves && let Some(mapping) = state.table(Kind::Mapping).remove(at) {
            let_go(state, mapping.bytes);
        }
    });
}

/// A handle that the driver made for memory that is mapped.
fn retained(state: &mut State, handle: u64, address: u64) {
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

/// Gives physical memory back that was got in vain.
fn release(handle: u64) {
    // SAFETY: it takes one handle; the program has not seen this one.
    unsafe { cuMemRelease::ROUTE.give_back(handle) };
}

hooks! {
    fn cuMemCreate(
        out: *mut u64, bytes: usize, properties: *const Properties, flags: c_ulonglong,
    ) |real| {
        // SAFETY: the program's own call.
        let take = || unsafe { real(out, bytes, properties, flags) };
        // SAFETY: the program's own description.
        let device = match unsafe { place(properties) } {
            Place::Host => return take(),
            Place::Device(device) => Some(device),
            Place::Managed => cuda::current_device(),
            Place::Unknown => None,
        };
        let charge = match charge(device, bytes as u64) {
            Ok(charge) => charge,
            // SAFETY: the driver was content and has written there.
            Err(refusal) => return refusal.answer(take, || release(unsafe { out.read_unaligned() })),
        };
        let result = take();
        if result != SUCCESS {
            charge.undo();
            return result;
        }
        // SAFETY: the driver was content and has written there.
        let handle = unsafe { out.read_unaligned() };
        let memory = Cost { bytes: charge.bytes, context: 0, gpu: charge.gpu, holders: 1 };
        if with_state(|state| remember(state, memory, handle)) == Some(true) {
            return SUCCESS;
        }
        charge.undo();
        release(handle);
        OUT_OF_MEMORY
    }

    fn cuMemImportFromShareableHandle(out: *mut u64, shared: *mut c_void, kind: c_int) |real| {
        // SAFETY: the program's own call.
        let result = unsafe { real(out, shared, kind) };
        if result != SUCCESS {
            return result;
        }
        // SAFETY: the driver was content and has written there.
        let handle = unsafe { out.read_unaligned() };
        let gpu = match properties_of(handle).map(|properties| place_of(&properties)) {
            // Something that has no memory of its own.
            None | Some(Place::Host) => Ok(None),
            // Memory of a GPU of which the container has no share is not to be had.
            Some(Place::Device(device)) => charge::gpu_of(device).map(Some).ok_or(()),
            Some(Place::Managed) => cuda::current_device().and_then(charge::gpu_of).map(Some).ok_or(()),
            Some(Place::Unknown) => Err(()),
        };
        let remembered = gpu.is_ok_and(|gpu| with_state(|state| remember_imported(state, handle, gpu)) == Some(true));
        if remembered {
            return SUCCESS;
        }
        release(handle);
        OUT_OF_MEMORY
    }

    fn cuMemRelease(handle: u64) |real| {
        let number = with_state(|state| take_handle(state, handle)).flatten();
        // SAFETY: the program's own call.
        let result = unsafe { real(handle) };
        if let Some(number) = number {
            with_state(|state| match result {
                SUCCESS => let_go(state, number),
                _ => put_handle(state, handle, number),
            });
        }
        result
    }

    fn cuMemMap(pointer: Pointer, bytes: usize, offset: usize, handle: u64, flags: c_ulonglong) |real| {
        let cost = with_state(|state| cost_of_mapping(state, handle, bytes as u64)).flatten();
        let charged = cost.map(|(gpu, more)| charge::charge_gpu(gpu, more)).transpose();
        let Ok(charge) = charged else { return OUT_OF_MEMORY };
        // SAFETY: the program's own call.
        let result = unsafe { real(pointer, bytes, offset, handle, flags) };
        if result == SUCCESS {
            with_state(|state| map(state, pointer, bytes as u64, handle, charge));
        } else {
            charge.into_iter().for_each(Charge::undo);
        }
        result
    }

    fn cuMemUnmap(pointer: Pointer, bytes: usize) |real| {
        with_state(|state| set_leaving(state, pointer, bytes as u64, true));
        // SAFETY: the program's own call.
        let result = unsafe { real(pointer, bytes) };
        with_state(|state| match result {
            SUCCESS => unmap(state, pointer, bytes as u64),
            _ => set_leaving(state, pointer, bytes as u64, false),
        });
        result
    }

    fn cuMemRetainAllocationHandle(out: *mut u64, address: *mut c_void) |real| {
        // SAFETY: the program's own call.
        let result = unsafe { real(out, address) };
        if result == SUCCESS && !out.is_null() {
            // SAFETY: the driver was content and has written there.
            let handle = unsafe { out.read_unaligned() };
            with_state(|state| retained(state, handle, address as u64));
        }
        result
    }
}
