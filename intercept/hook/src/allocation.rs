//! Allocations: charge, call the driver, then keep the charge or undo it.

use core::ffi::c_int;

use crate::charge::{Charge, ChargedGpu, Refusal, charge_gpu_once, charge_once};
use crate::driver::cuda::{self, Device, OUT_OF_MEMORY, Pointer, SUCCESS};
use crate::pools;
use crate::state::{Kind, State, with_state};
use crate::sys;
use crate::table::Cost;
use crate::trace;

/// Charges memory of a device. Before it is refused, pools are trimmed, as the driver does when it
/// has no more memory.
///
/// # Errors
/// See [`Refusal`].
#[inline]
pub(crate) fn charge(device: Option<Device>, bytes: u64) -> Result<Charge, Refusal> {
    charge_device(device, bytes).map(|charged| charged.charge(bytes))
}

fn charge_device(device: Option<Device>, bytes: u64) -> Result<ChargedGpu, Refusal> {
    retry(|| charge_once(device, bytes))
}

/// Charges memory of a GPU, as [`charge`].
///
/// # Errors
/// The memory is not granted.
pub(crate) fn charge_gpu(gpu: u32, bytes: u64) -> Result<Charge, Refusal> {
    retry(|| charge_gpu_once(gpu, bytes))
}

/// Tries to charge, trims pools, and tries again. While calls of other threads are under way, their
/// memory may be charged twice: this waits for them, but not for ever, because a call may take
/// long.
///
/// # Errors
/// As `attempt`.
pub(crate) fn retry<T>(attempt: impl Fn() -> Result<T, Refusal>) -> Result<T, Refusal> {
    /// A quarter of a second: far more than a call takes that does not wait for the GPU.
    const TIMES: usize = 256;
    let mut outcome = attempt();
    for times in 0..TIMES {
        let is_final = matches!(outcome, Err(Refusal::NotGranted));
        if !matches!(outcome, Err(Refusal::NotGranted | Refusal::NotYet)) || !pools::trim() {
            break;
        }
        outcome = attempt();
        if is_final && matches!(outcome, Err(Refusal::NotGranted)) {
            break;
        }
        if outcome.is_err() {
            sys::back_off(times);
        }
    }
    if outcome.is_err() {
        print_refusal();
    }
    outcome
}

/// Prints the last refusal, if tracing is on.
pub(crate) fn print_refusal() {
    if trace::is_on()
        && let Some(refusal) = with_state(|state| state.last_refusal().take()).flatten()
    {
        trace::refusal(refusal);
    }
}

impl Refusal {
    /// Returns the error for the program. Without a device the driver is called, whose result is an
    /// error; if it does allocate something, that is freed.
    pub(crate) fn result(self, call: impl FnOnce() -> c_int, free: impl FnOnce()) -> c_int {
        if self != Self::NoDevice {
            return OUT_OF_MEMORY;
        }
        match call() {
            SUCCESS => {
                free();
                OUT_OF_MEMORY
            }
            error => error,
        }
    }
}

impl Charge {
    /// Makes the charge the cost of an object.
    ///
    /// # Errors
    /// There is no room for it, and nothing is charged any more: the object must be freed.
    pub(crate) fn keep(self, kind: Kind, key: u64, context: usize) -> Result<(), Refusal> {
        let cost = Cost { bytes: self.bytes, context, gpu: self.gpu, holders: 1 };
        let kept = with_state(|state| {
            if !state.table(kind).make_room() {
                state.release(self.gpu as usize, self.bytes);
                return false;
            }
            // The driver returns no address twice: an older object at this one was freed without
            // a call, for example with its context.
            if matches!(kind, Kind::Pointer) {
                pools::forget_piece(state, key);
            }
            if let Some(stale) = state.table(kind).put(key, cost) {
                state.release(stale.gpu as usize, stale.bytes);
            }
            true
        });
        if kept == Some(true) { Ok(()) } else { Err(Refusal::NotGranted) }
    }
}

/// Charges memory, calls the driver, and stores the cost of the object that it returned.
///
/// `call` calls the driver; `result` reads the object that it returned; `free` undoes the call.
pub(crate) fn allocate(
    bytes: u64,
    kind: Kind,
    call: impl FnOnce() -> c_int,
    result: impl FnOnce() -> u64,
    free: impl FnOnce(u64),
) -> c_int {
    allocate_with(bytes, kind, |_| call(), result, free)
}

/// As [`allocate`], if the call depends on the charge. Without a charge the driver is called for
/// its error only.
pub(crate) fn allocate_with(
    bytes: u64,
    kind: Kind,
    call: impl FnOnce(Option<Charge>) -> c_int,
    result: impl FnOnce() -> u64,
    free: impl FnOnce(u64),
) -> c_int {
    let charge = match charge(cuda::current_device(), bytes) {
        Ok(charge) => charge,
        Err(refusal) => return refusal.result(|| call(None), || free(result())),
    };
    let code = call(Some(charge));
    if code != SUCCESS {
        charge.undo();
        return code;
    }
    let key = result();
    match charge.keep(kind, key, cuda::current_context().unwrap_or(0)) {
        Ok(()) => SUCCESS,
        Err(_) => {
            free(key);
            OUT_OF_MEMORY
        }
    }
}

/// Frees an object. Its cost is removed before the driver is called, because the driver may return
/// the same address to another thread right after, and restored if the driver refuses.
pub(crate) fn free(kind: Kind, key: u64, call: impl FnOnce() -> c_int) -> c_int {
    let cost = with_state(|state| state.table(kind).remove(key)).flatten();
    free_removed(kind, key, cost, call)
}

/// As [`free`], if the cost was removed before.
fn free_removed(kind: Kind, key: u64, cost: Option<Cost>, call: impl FnOnce() -> c_int) -> c_int {
    let code = call();
    if let Some(cost) = cost {
        with_state(|state| {
            if code == SUCCESS {
                state.release(cost.gpu as usize, cost.bytes);
            } else {
                restore(state, kind, key, cost);
            }
        });
    }
    code
}

fn restore(state: &mut State, kind: Kind, key: u64, cost: Cost) {
    if state.table(kind).make_room() {
        state.table(kind).put(key, cost);
    }
}

/// Frees memory at a device pointer, from a pool or not.
pub(crate) fn free_pointer(pointer: Pointer, call: impl FnOnce() -> c_int) -> c_int {
    let found = with_state(|state| match state.table(Kind::Pooled).remove(pointer) {
        Some(piece) => (Some(piece), None),
        None => (None, state.table(Kind::Pointer).remove(pointer)),
    });
    let (piece, plain) = found.unwrap_or_default();
    let Some(piece) = piece else { return free_removed(Kind::Pointer, pointer, plain, call) };
    let code = call();
    if code == SUCCESS {
        pools::freed(piece.bytes);
    } else {
        with_state(|state| restore(state, Kind::Pooled, pointer, piece));
    }
    code
}
