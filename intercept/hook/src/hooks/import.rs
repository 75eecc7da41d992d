//! Memory of other processes and other APIs: it is charged to each process that has it open, as
//! long as it is open.
//!
//! The memory lives while it is open here, also if its owner has freed it or has ended. Imports
//! through handles of physical memory are charged with their mappings (see [`crate::physical`]),
//! because the driver does not report their size before.
//!
//! Memory that a process of the same claim has exported is not charged again
//! (docs/adr/0111-imports-within-a-claim.md). Handles of physical memory are file descriptors,
//! which do not show who has exported them.

use core::ffi::{c_int, c_uint, c_void};

use tessera_intercept_limiter::{ExportHandle, note_export, was_exported};

use super::route::hooks;
use crate::allocation::{allocate, charge, free};
use crate::charge::{Charge, Refusal, gpu_of};
use crate::driver::cuda::{self, Handle, OUT_OF_MEMORY, Pointer, SUCCESS};
use crate::state::{Kind, State, with_state};
use crate::table::Cost;

/// `CUipcMemHandle`
#[repr(C)]
#[derive(Clone, Copy)]
pub struct IpcHandle(ExportHandle);

/// The beginning of `CUDA_EXTERNAL_MEMORY_HANDLE_DESC`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct External {
    kind: c_int,
    handle: [u64; 2],
    bytes: u64,
}

/// Charges memory that was opened. The same memory opened again has the same address, and one more
/// holder.
fn opened(pointer: Pointer, handle: &ExportHandle) -> c_int {
    let again = with_state(|state| hold(state, pointer)) == Some(true);
    if again || charge_opened(pointer, handle).is_ok() {
        return SUCCESS;
    }
    cuda::close_ipc(pointer);
    OUT_OF_MEMORY
}

fn hold(state: &mut State, pointer: Pointer) -> bool {
    let known = state.table(Kind::Imported).get(pointer);
    known.is_some_and(|known| {
        known.holders = known.holders.saturating_add(1);
        true
    })
}

fn charge_opened(pointer: Pointer, handle: &ExportHandle) -> Result<(), Refusal> {
    let charge = charge_import(pointer, handle)?;
    let context = cuda::current_context().unwrap_or(0);
    let kept = with_state(|state| keep(state, pointer, charge, context));
    if kept == Some(true) { Ok(()) } else { Err(Refusal::NotGranted) }
}

/// Charges imported memory, unless a process of the claim has exported it.
fn charge_import(pointer: Pointer, handle: &ExportHandle) -> Result<Charge, Refusal> {
    let bytes = cuda::length_of(pointer).ok_or(Refusal::NotGranted)?;
    let device = cuda::device_of(pointer);
    let is_own = device.and_then(gpu_of).is_some_and(|gpu| is_exported(gpu, handle));
    charge(device, if is_own { 0 } else { bytes })
}

/// Returns true if a process of the claim has exported memory of a GPU under a handle.
fn is_exported(gpu: u32, handle: &ExportHandle) -> bool {
    let is_known = |state: &mut State| {
        state.shares(gpu as usize).iter().any(|share| was_exported(share.ledger(), handle))
    };
    with_state(is_known) == Some(true)
}

/// Notes that memory was exported.
///
/// # Safety
/// `handle` is where the driver has written the handle.
unsafe fn exported(handle: *const ExportHandle, pointer: Pointer) {
    // SAFETY: by this function's contract.
    let handle = unsafe { handle.read_unaligned() };
    if let Some(gpu) = cuda::device_of(pointer).and_then(gpu_of) {
        with_state(|state| {
            state
                .shares(gpu as usize)
                .iter()
                .for_each(|share| note_export(share.ledger(), &handle));
        });
    }
}

/// Stores the cost of opened memory. Another thread may have opened it meanwhile, and was charged.
fn keep(state: &mut State, pointer: Pointer, charge: Charge, context: usize) -> bool {
    let (held, room) = (hold(state, pointer), state.table(Kind::Imported).make_room());
    if held || !room {
        state.release(charge.gpu as usize, charge.bytes);
        return held;
    }
    let cost = Cost { bytes: charge.bytes, context, gpu: charge.gpu, holders: 1 };
    state.table(Kind::Imported).put(pointer, cost);
    true
}

/// Closes memory. A holder is removed before the driver is called, because the driver may return
/// the same address to another thread right after. The last holder removes the cost in the same
/// step, so that no thread becomes a holder of memory that is about to be closed.
fn close(pointer: Pointer, real: impl FnOnce() -> c_int) -> c_int {
    let last = with_state(|state| unhold(state, pointer)).flatten();
    let result = real();
    with_state(|state| match (result, last) {
        (SUCCESS, Some(cost)) if cost.holders == 0 => state.release(cost.gpu as usize, cost.bytes),
        (SUCCESS, _) | (_, None) => {}
        (_, Some(cost)) => restore(state, pointer, cost),
    });
    result
}

/// Removes a holder; returns the cost that is left.
fn unhold(state: &mut State, pointer: Pointer) -> Option<Cost> {
    let known = state.table(Kind::Imported).get(pointer)?;
    known.holders = known.holders.saturating_sub(1);
    let left = *known;
    if left.holders == 0 {
        state.table(Kind::Imported).remove(pointer);
    }
    Some(left)
}

/// Restores a holder after the driver did not close the memory. Another thread may have opened it
/// meanwhile, and was charged.
fn restore(state: &mut State, pointer: Pointer, left: Cost) {
    if hold(state, pointer) {
        if left.holders == 0 {
            state.release(left.gpu as usize, left.bytes);
        }
    } else if state.table(Kind::Imported).make_room() {
        state.table(Kind::Imported).put(pointer, Cost { holders: 1, ..left });
    }
}

/// Returns the bytes of external memory to be imported. 0 for NULL, which the driver refuses.
///
/// # Safety
/// `description` is NULL or what the program wants the driver to read.
unsafe fn bytes_of(description: *const External) -> u64 {
    if description.is_null() {
        return 0;
    }
    // SAFETY: by this function's contract.
    unsafe { description.read_unaligned() }.bytes
}

hooks! {
    fn cuIpcGetMemHandle(out: *mut IpcHandle, pointer: Pointer) |real| {
        // SAFETY: the program's own call.
        let result = unsafe { real(out, pointer) };
        if result == SUCCESS {
            // SAFETY: the call succeeded: the driver has written there.
            unsafe { exported(out.cast(), pointer) };
        }
        result
    }

    fn cuMemPoolExportPointer(out: *mut c_void, pointer: Pointer) |real| {
        // SAFETY: the program's own call.
        let result = unsafe { real(out, pointer) };
        if result == SUCCESS {
            // SAFETY: the call succeeded: the driver has written there.
            unsafe { exported(out.cast(), pointer) };
        }
        result
    }

    fn cuIpcOpenMemHandle(out: *mut Pointer, handle: IpcHandle, flags: c_uint) |real| {
        // SAFETY: the program's own call.
        match unsafe { real(out, handle, flags) } {
            // SAFETY: the call succeeded: the driver has written there.
            SUCCESS => opened(unsafe { out.read_unaligned() }, &handle.0),
            error => error,
        }
    }

    fn cuIpcOpenMemHandle_v2(out: *mut Pointer, handle: IpcHandle, flags: c_uint) |real| {
        // SAFETY: the program's own call.
        match unsafe { real(out, handle, flags) } {
            // SAFETY: the call succeeded: the driver has written there.
            SUCCESS => opened(unsafe { out.read_unaligned() }, &handle.0),
            error => error,
        }
    }

    fn cuIpcCloseMemHandle(pointer: Pointer) |real| {
        // SAFETY: the program's own call.
        close(pointer, || unsafe { real(pointer) })
    }

    // It is freed as memory of the process's own.
    fn cuMemPoolImportPointer(out: *mut Pointer, pool: Handle, data: *mut c_void) |real| {
        // SAFETY: the program's own call.
        let result = unsafe { real(out, pool, data) };
        if result != SUCCESS {
            return result;
        }
        // SAFETY: the call succeeded: the driver has written there.
        let pointer = unsafe { out.read_unaligned() };
        // SAFETY: the driver has read it.
        let handle = unsafe { data.cast::<ExportHandle>().read_unaligned() };
        // As all memory of pools it belongs to no context.
        let kept = charge_import(pointer, &handle).and_then(|charge| charge.keep(Kind::Pointer, pointer, 0));
        match kept {
            Ok(()) => SUCCESS,
            Err(_) => {
                cuda::free(pointer);
                OUT_OF_MEMORY
            }
        }
    }

    fn cuImportExternalMemory(out: *mut Handle, description: *const External) |real| {
        // SAFETY: the program's own description.
        let bytes = unsafe { bytes_of(description) };
        // SAFETY: the program's own call.
        let take = || unsafe { real(out, description) };
        // SAFETY: the driver has written there.
        let taken = || unsafe { out.read_unaligned() } as u64;
        let destroy = |memory| cuda::destroy_external(memory as Handle);
        allocate(bytes, Kind::External, take, taken, destroy)
    }

    fn cuDestroyExternalMemory(memory: Handle) |real| {
        // SAFETY: the program's own call.
        free(Kind::External, memory as u64, || unsafe { real(memory) })
    }
}
