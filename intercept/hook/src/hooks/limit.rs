//! Limits of contexts, for which the driver reserves memory: stacks of all threads that can run,
//! the heap, the output of printf. Their initial values are part of a context's cost; an increase
//! is charged.

use core::ffi::{c_int, c_uint};

use super::route::hooks;
use crate::allocation::charge;
use crate::charge::gpu_of;
use crate::driver::cuda::{self, Device, OUT_OF_MEMORY, SUCCESS};
use crate::driver_counted;
use crate::state::{LIMIT, State, with_state};

/// `CU_LIMIT_STACK_SIZE`, of each thread.
const STACK: c_uint = 0;
/// `CU_LIMIT_MALLOC_HEAP_SIZE`, the last limit that takes memory.
const HEAP: c_uint = 2;

/// Alignment of contexts: the number of the limit fits into these bits of the key.
const ALIGNMENT: u64 = 8;

fn key(context: usize, limit: c_uint) -> u64 {
    LIMIT | context as u64 & !(ALIGNMENT - 1) | u64::from(limit)
}

/// Returns the bytes that a limit takes.
fn cost(device: Device, limit: c_uint, value: u64) -> u64 {
    /// `CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT` and `..._MAX_THREADS_PER_MULTIPROCESSOR`.
    const MULTIPROCESSORS: c_int = 16;
    const THREADS: c_int = 39;
    if limit != STACK {
        return value;
    }
    let of_device = |attribute| cuda::device_attribute(device, attribute).unwrap_or(u64::MAX);
    value.saturating_mul(of_device(MULTIPROCESSORS).saturating_mul(of_device(THREADS)))
}

/// Removes the limits of a context that has ended.
pub(super) fn ended(state: &mut State, context: usize) {
    (STACK..=HEAP).for_each(|limit| driver_counted::end(state, key(context, limit)));
}

/// Returns the initial value of a limit, and the bytes charged for it now.
fn known(state: &mut State, key: u64, gpu: u32, now: u64) -> Option<(u64, u64)> {
    let is_new = state.counters().get(key).is_none();
    if !driver_counted::begin(state, key, gpu, 0) {
        return None;
    }
    let counter = state.counters().get(key)?;
    if is_new {
        counter.first = now;
    }
    Some((counter.first, counter.charged))
}

/// Sets a limit.
fn set(limit: c_uint, value: usize, real: impl Fn(usize) -> c_int) -> c_int {
    let (device, context) = (cuda::current_device(), cuda::current_context());
    let now = cuda::limit(limit).filter(|_| limit <= HEAP);
    let (Some(device), Some(context), Some(now)) = (device, context, now) else {
        return real(value);
    };
    let Some(gpu) = gpu_of(device) else { return real(value) };
    let key = key(context, limit);
    let known = with_state(|state| known(state, key, gpu, now as u64)).flatten();
    let Some((first, charged)) = known else { return OUT_OF_MEMORY };
    let cost =
        |value: usize| cost(device, limit, value as u64).saturating_sub(cost(device, limit, first));
    let settle = |before| driver_counted::settle(key, before, || cuda::limit(limit).map(cost));
    let Ok(before) = charge(Some(device), cost(value).saturating_sub(charged)) else {
        return OUT_OF_MEMORY;
    };
    let result = real(value);
    if result != SUCCESS {
        before.undo();
        return result;
    }
    // The driver may have rounded it up.
    if settle(Some(before)).is_ok() {
        return SUCCESS;
    }
    real(now);
    let _ = settle(None);
    OUT_OF_MEMORY
}

hooks! {
    fn cuCtxSetLimit(limit: c_uint, value: usize) |real| {
        // SAFETY: the program's own call.
        set(limit, value, |value| unsafe { real(limit, value) })
    }
}
