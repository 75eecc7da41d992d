//! Memory that another process or another API has taken: it is charged to each process that has it
//! open, as long as it is open.
//!
//! Its owner may be gone, or have given it back; the memory lives while it is open here. What is
//! imported through handles of physical memory is charged with its mappings (see [`crate::vmm`]),
//! since the driver does not say before how much it is.
//!
//! Not charged is what a process of the same claim has exported, which was charged to it
//! (docs/adr/0111-imports-within-a-claim.md). Handles of physical memory are descriptors, of which
//! it cannot be told.

use core::ffi::{c_int, c_uint, c_void};

use tessera_intercept_limiter::{ExportHandle, note_export, was_exported};

use crate::charge::{Charge, Refusal, charge, charged, discharged, gpu_of};
use crate::cuda::{self, Handle, OUT_OF_MEMORY, Pointer, SUCCESS};
use crate::pointers::Cost;
use crate::root::with_state;
use crate::route::hooks;
use crate::state::{Kind, State};

/// `CUipcMemHandle`
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct IpcHandle(ExportHandle);

/// The beginning of `CUDA_EXTERNAL_MEMORY_HANDLE_DESC`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct External {
    kind: c_int,
    handle: [u64; 2],
    bytes: u64,
}

/// Charges memory that was opened. The same memory opened again has the same address, and is one
/// more holder.
fn opened(pointer: Pointer, handle: &ExportHandle, close: impl FnOnce(Pointer)) -> c_int {
    let again = with_state(|state| hold(state, pointer)) == Some(true);
    if again || pay(pointer, handle).is_ok() {
        return SUCCESS;
    }
    close(pointer);
    OUT_OF_MEMORY
}

fn hold(state: &mut State, pointer: Pointer) -> bool {
    let known = state.table(Kind::Imported).get(pointer);
    known.is_some_and(|known| {
        known.holders = known.holders.saturating_add(1);
        true
    })
}

fn pay(pointer: Pointer, handle: &ExportHandle) -> Result<(), Refusal> {
    let charge = charge_import(pointer, handle)?;
    let context = cuda::current_context().unwrap_or(0);
    let kept = with_state(|state| keep(state, pointer, charge, context));
    if kept == Some(true) { Ok(()) } else { Err(Refusal::NotGranted) }
}

/// Charges memory that was imported, unless a process of the claim has exported it.
fn charge_import(pointer: Pointer, handle: &ExportHandle) -> Result<Charge, Refusal> {
    let bytes = cuda::length_of(pointer).ok_or(Refusal::NotGranted)?;
    let device = cuda::device_of(pointer);
    let is_own = device.and_then(gpu_of).is_some_and(|gpu| is_exported(gpu, handle));
    charge(device, if is_own { 0 } else { bytes })
}

/// Whether a process of the claim has exported memory of a GPU under a handle.
fn is_exported(gpu: u32, handle: &ExportHandle) -> bool {
    let is_known = |state: &mut State| {
        state.shares(gpu as usize).iter().any(|share| was_exported(share.ledger(), handle))
    };
    with_state(is_known) == Some(true)
}

/// Notes that memory was exported.
///
/// # Safety
/// `handle` is where the driver has put the handle.
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

/// Another thread may have opened the same meanwhile, and paid.
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

/// Closes memory: one holder less before the driver is called, since it may give the same address
/// to another thread right after. The last takes the cost out in the same step, so that nobody
/// becomes a holder of what is about to go.
fn close(pointer: Pointer, real: impl FnOnce() -> c_int) -> c_int {
    let last = with_state(|state| lower(state, pointer)).flatten();
    let result = real();
    with_state(|state| match (result, last) {
        (SUCCESS, Some(cost)) if cost.holders == 0 => state.release(cost.gpu as usize, cost.bytes),
        (SUCCESS, _) | (_, None) => {}
        (_, Some(cost)) => still_open(state, pointer, cost),
    });
    result
}

/// One holder less; answers what is left.
fn lower(state: &mut State, pointer: Pointer) -> Option<Cost> {
    let known = state.table(Kind::Imported).get(pointer)?;
    known.holders = known.holders.saturating_sub(1);
    let left = *known;
    if left.holders == 0 {
        state.table(Kind::Imported).remove(pointer);
    }
    Some(left)
}

/// The driver did not close it. Another thread may have opened it meanwhile, and paid.
fn still_open(state: &mut State, pointer: Pointer, left: Cost) {
    if hold(state, pointer) {
        if left.holders == 0 {
            state.release(left.gpu as usize, left.bytes);
        }
    } else if state.table(Kind::Imported).make_room() {
        state.table(Kind::Imported).put(pointer, Cost { holders: 1, ..left });
    }
}

/// Bytes that are about to be imported. For NULL nothing: the driver refuses it.
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

fn close_ipc(pointer: Pointer) {
    if let Some(address) = cuIpcCloseMemHandle::ROUTE.real() {
        // SAFETY: the type is that of cuda.h; the program has not seen the pointer.
        unsafe {
            core::mem::transmute::<usize, unsafe extern "C" fn(Pointer) -> c_int>(address)(pointer)
        };
    }
}

fn destroy_external(memory: u64) {
    if let Some(address) = cuDestroyExternalMemory::ROUTE.real() {
        // SAFETY: the type is that of cuda.h; the program has not seen the handle.
        unsafe {
            core::mem::transmute::<usize, unsafe extern "C" fn(Handle) -> c_int>(address)(
                memory as Handle,
            )
        };
    }
}

hooks! {
    fn cuIpcGetMemHandle(out: *mut IpcHandle, pointer: Pointer) |real| {
        // SAFETY: the program's own call.
        let result = unsafe { real(out, pointer) };
        if result == SUCCESS {
            // SAFETY: the driver was content and has written there.
            unsafe { exported(out.cast(), pointer) };
        }
        result
    }

    fn cuMemPoolExportPointer(out: *mut c_void, pointer: Pointer) |real| {
        // SAFETY: the program's own call.
        let result = unsafe { real(out, pointer) };
        if result == SUCCESS {
            // SAFETY: the driver was content and has written there.
            unsafe { exported(out.cast(), pointer) };
        }
        result
    }

    fn cuIpcOpenMemHandle(out: *mut Pointer, handle: IpcHandle, flags: c_uint) |real| {
        // SAFETY: the program's own call.
        match unsafe { real(out, handle, flags) } {
            // SAFETY: the driver was content and has written there.
            SUCCESS => opened(unsafe { out.read_unaligned() }, &handle.0, close_ipc),
            error => error,
        }
    }

    fn cuIpcOpenMemHandle_v2(out: *mut Pointer, handle: IpcHandle, flags: c_uint) |real| {
        // SAFETY: the program's own call.
        match unsafe { real(out, handle, flags) } {
            // SAFETY: the driver was content and has written there.
            SUCCESS => opened(unsafe { out.read_unaligned() }, &handle.0, close_ipc),
            error => error,
        }
    }

    fn cuIpcCloseMemHandle(pointer: Pointer) |real| {
        // SAFETY: the program's own call.
        close(pointer, || unsafe { real(pointer) })
    }

    // It is freed like memory of the process's own.
    fn cuMemPoolImportPointer(out: *mut Pointer, pool: Handle, data: *mut c_void) |real| {
        // SAFETY: the program's own call.
        let result = unsafe { real(out, pool, data) };
        if result != SUCCESS {
            return result;
        }
        // SAFETY: the driver was content and has written there.
        let pointer = unsafe { out.read_unaligned() };
        // SAFETY: the driver has read it.
        let handle = unsafe { data.cast::<ExportHandle>().read_unaligned() };
        // Like all memory of pools it is no context's.
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
        charged(bytes, Kind::External, take, taken, destroy_external)
    }

    fn cuDestroyExternalMemory(memory: Handle) |real| {
        // SAFETY: the program's own call.
        discharged(Kind::External, memory as u64, || unsafe { real(memory) })
    }
}
