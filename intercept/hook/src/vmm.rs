//! Physical memory and its mappings.
//!
//! Programs often let go of the handle as soon as the memory is mapped, and the memory lives until the last mapping goes. So
//! the cost belongs to the memory (under a number of our own), and handles and mappings hold it.

use core::ffi::{c_int, c_ulonglong, c_void};
use core::sync::atomic::{AtomicU64, Ordering};

use crate::charge::{Charge, charge};
use crate::cuda::{OUT_OF_MEMORY, Pointer, SUCCESS};
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

/// `CU_MEM_LOCATION_TYPE_DEVICE`.
const ON_DEVICE: c_int = 1;

/// The device that memory is to be on; `None` for host memory, which costs nothing here, and for what the driver refuses.
///
/// # Safety
/// `properties` is NULL or what the program wants the driver to read.
pub(crate) unsafe fn device(properties: *const Properties) -> Option<c_int> {
    if properties.is_null() {
        return None;
    }
    // SAFETY: by this function's contract.
    let Properties { location_type, location, .. } = unsafe { properties.read_unaligned() };
    (location_type == ON_DEVICE).then_some(location)
}

/// A number for a piece of physical memory, different from all others and from handles of the driver's.
fn next_number() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// A handle or a mapping says in `bytes` which memory it holds, and in `holders` how often.
fn holder(number: u64, length: u64) -> Cost {
    Cost { bytes: number, context: usize::try_from(length).unwrap_or(usize::MAX), gpu: 0, holders: 1 }
}

/// Handles are remembered among the arrays' keys no more than memory among handles': each kind has a table of its own, and
/// memory shares that of handles with its number's top bit set, which no handle has.
const MEMORY: u64 = 1 << 63;

/// Remembers new memory and its handle.
fn remember(state: &mut State, charge: Charge, handle: u64) -> bool {
    let number = next_number();
    let table = state.table(Kind::Physical);
    if !table.make_room() {
        return false;
    }
    table.put(MEMORY | number, Cost { bytes: charge.bytes, context: 0, gpu: charge.gpu, holders: 1 });
    if !table.make_room() {
        table.remove(MEMORY | number);
        return false;
    }
    table.put(handle & !MEMORY, holder(number, 0));
    true
}

/// One holder less; the last frees the memory.
fn let_go(state: &mut State, number: u64) {
    let Some(memory) = state.table(Kind::Physical).get(MEMORY | number) else { return };
    memory.holders = memory.holders.saturating_sub(1);
    let (holders, gpu, bytes) = (memory.holders, memory.gpu, memory.bytes);
    if holders == 0 {
        state.table(Kind::Physical).remove(MEMORY | number);
        state.release(gpu as usize, bytes);
    }
}

/// One holder more.
fn hold(state: &mut State, number: u64) {
    if let Some(memory) = state.table(Kind::Physical).get(MEMORY | number) {
        memory.holders = memory.holders.saturating_add(1);
    }
}

fn release_handle(state: &mut State, handle: u64) {
    let table = state.table(Kind::Physical);
    let Some(known) = table.get(handle & !MEMORY) else { return };
    known.holders -= 1;
    let (left, number) = (known.holders, known.bytes);
    if left == 0 {
        table.remove(handle & !MEMORY);
    }
    let_go(state, number);
}

fn map(state: &mut State, pointer: Pointer, length: u64, handle: u64) {
    let Some(number) = state.table(Kind::Physical).get(handle & !MEMORY).map(|known| known.bytes) else {
        return;
    };
    if state.table(Kind::Mapping).make_room() {
        state.table(Kind::Mapping).put(pointer, holder(number, length));
        hold(state, number);
    }
}

/// Forgets the mappings in a range: it may have several, one after the other.
fn unmap(state: &mut State, pointer: Pointer, length: u64) {
    let end = pointer.saturating_add(length);
    let mut at = pointer;
    while at < end {
        let Some(mapping) = state.table(Kind::Mapping).remove(at) else { return };
        let_go(state, mapping.bytes);
        at = at.saturating_add((mapping.context as u64).max(1));
    }
}

/// A handle that the driver made for memory that is mapped.
fn retained(state: &mut State, handle: u64, address: u64) {
    let Some(number) = state.table(Kind::Mapping).get(address).map(|mapping| mapping.bytes) else { return };
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
    if let Some(address) = cuMemRelease::ROUTE.real() {
        // SAFETY: the type is that of cuda.h; the program has not seen the handle.
        unsafe { core::mem::transmute::<usize, unsafe extern "C" fn(u64) -> c_int>(address)(handle) };
    }
}

hooks! {
    fn cuMemCreate(
        out: *mut u64, bytes: usize, properties: *const Properties, flags: c_ulonglong,
    ) |real| {
        // SAFETY: the program's own call.
        let take = || unsafe { real(out, bytes, properties, flags) };
        // SAFETY: the program's own description.
        let Some(device) = (unsafe { device(properties) }) else { return take() };
        let charge = match charge(Some(device), bytes as u64) {
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
        if with_state(|state| remember(state, charge, handle)) == Some(true) {
            return SUCCESS;
        }
        charge.undo();
        release(handle);
        OUT_OF_MEMORY
    }

    fn cuMemRelease(handle: u64) |real| {
        // SAFETY: the program's own call.
        let result = unsafe { real(handle) };
        if result == SUCCESS {
            with_state(|state| release_handle(state, handle));
        }
        result
    }

    fn cuMemMap(pointer: Pointer, bytes: usize, offset: usize, handle: u64, flags: c_ulonglong) |real| {
        // SAFETY: the program's own call.
        let result = unsafe { real(pointer, bytes, offset, handle, flags) };
        if result == SUCCESS {
            with_state(|state| map(state, pointer, bytes as u64, handle));
        }
        result
    }

    fn cuMemUnmap(pointer: Pointer, bytes: usize) |real| {
        // SAFETY: the program's own call.
        let result = unsafe { real(pointer, bytes) };
        if result == SUCCESS {
            with_state(|state| unmap(state, pointer, bytes as u64));
        }
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
