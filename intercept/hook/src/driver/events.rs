//! Events, queries of streams, and green contexts.

use core::ffi::{c_int, c_uint};

use super::cuda::{Handle, SUCCESS};
use super::function::driver_functions;

/// `CUDA_ERROR_NOT_READY`.
const NOT_READY: c_int = 600;

driver_functions! {
    fn cuCtxFromGreenCtx(context: *mut Handle, green: Handle);
    fn cuEventCreate(event: *mut Handle, flags: c_uint);
    fn cuEventRecord(event: Handle, stream: Handle);
    fn cuEventQuery(event: Handle);
    fn cuStreamQuery(stream: Handle);
    fn cuEventElapsedTime(milliseconds: *mut f32, from: Handle, to: Handle);
}

/// Creates an event with timing in the current context.
pub(crate) fn create() -> Option<Handle> {
    /// `CU_EVENT_DEFAULT`
    const TIMING: c_uint = 0;
    let mut event = core::ptr::null_mut();
    // SAFETY: the result goes to a local variable.
    (unsafe { cuEventCreate(&mut event, TIMING) } == SUCCESS && !event.is_null()).then_some(event)
}

/// Records an event of the interceptor in a stream; returns true on success.
pub(crate) fn record(event: Handle, stream: Handle) -> bool {
    // SAFETY: the stream is the one that the program launches in.
    unsafe { cuEventRecord(event, stream) == SUCCESS }
}

/// Returns true if the GPU has not reached an event yet. An event that cannot be queried counts as
/// reached.
pub(crate) fn is_pending(event: Handle) -> bool {
    // SAFETY: the event is the interceptor's.
    unsafe { cuEventQuery(event) == NOT_READY }
}

/// Returns true if a stream is known to be idle.
pub(crate) fn is_idle(stream: Handle) -> bool {
    has_work(stream) == Some(false)
}

/// Returns true if a stream has work; `None` if it cannot be queried.
pub(crate) fn has_work(stream: Handle) -> Option<bool> {
    // SAFETY: the stream is the one that the program launches in.
    match unsafe { cuStreamQuery(stream) } {
        SUCCESS => Some(false),
        NOT_READY => Some(true),
        _ => None,
    }
}

/// Returns the GPU's time in ns from one reached event to another.
pub(crate) fn elapsed_ns(from: Handle, to: Handle) -> Option<i64> {
    let mut milliseconds = 0.0;
    // SAFETY: the result goes to a local variable; both events are the interceptor's.
    let result = unsafe { cuEventElapsedTime(&mut milliseconds, from, to) };
    (result == SUCCESS).then_some((f64::from(milliseconds) * 1e6) as i64)
}

/// Returns the context under which a green context is current.
pub(crate) fn context_of_green(green: Handle) -> Option<usize> {
    let mut context = core::ptr::null_mut();
    // SAFETY: the result goes to a local variable.
    (unsafe { cuCtxFromGreenCtx(&mut context, green) } == SUCCESS && !context.is_null())
        .then_some(context as usize)
}
