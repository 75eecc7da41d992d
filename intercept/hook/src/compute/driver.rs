//! The driver's functions about events and contexts: its own, never the hooks.

use core::ffi::{c_int, c_uint};

use crate::cuda::{Handle, Helper, SUCCESS};

/// `CUDA_ERROR_NOT_READY`.
const NOT_READY: c_int = 600;

static CTX_FROM_GREEN: Helper = Helper::new("cuCtxFromGreenCtx");
static EVENT_CREATE: Helper = Helper::new("cuEventCreate");
static EVENT_RECORD: Helper = Helper::new("cuEventRecord");
static EVENT_QUERY: Helper = Helper::new("cuEventQuery");
static STREAM_QUERY: Helper = Helper::new("cuStreamQuery");
static EVENT_ELAPSED: Helper = Helper::new("cuEventElapsedTime");

/// Forgets where they are: the driver was loaded anew.
pub(crate) fn forget_helpers() {
    let all = [
        &CTX_FROM_GREEN,
        &EVENT_CREATE,
        &EVENT_RECORD,
        &EVENT_QUERY,
        &STREAM_QUERY,
        &EVENT_ELAPSED,
    ];
    all.into_iter().for_each(Helper::forget);
}

/// An event with timing, in the current context.
pub(super) fn create_event() -> Option<Handle> {
    /// `CU_EVENT_DEFAULT`
    const TIMING: c_uint = 0;
    type Real = unsafe extern "C" fn(*mut Handle, c_uint) -> c_int;
    // SAFETY: the type is that of cuda.h.
    let real = unsafe { core::mem::transmute::<usize, Real>(EVENT_CREATE.address()?) };
    let mut event = core::ptr::null_mut();
    // SAFETY: the result goes to a variable of ours.
    (unsafe { real(&mut event, TIMING) } == SUCCESS && !event.is_null()).then_some(event)
}

/// Puts an event of ours into a stream.
pub(super) fn record_event(event: Handle, stream: Handle) -> bool {
    type Real = unsafe extern "C" fn(Handle, Handle) -> c_int;
    let Some(address) = EVENT_RECORD.address() else { return false };
    // SAFETY: the type is that of cuda.h; the stream is the one that the program launches in.
    unsafe { core::mem::transmute::<usize, Real>(address)(event, stream) == SUCCESS }
}

/// Whether the GPU has not come to an event yet. One that cannot be asked is none to wait for.
pub(super) fn is_pending(event: Handle) -> bool {
    type Real = unsafe extern "C" fn(Handle) -> c_int;
    let Some(address) = EVENT_QUERY.address() else { return false };
    // SAFETY: the type is that of cuda.h; the event is ours.
    unsafe { core::mem::transmute::<usize, Real>(address)(event) == NOT_READY }
}

/// Whether a stream has nothing to do. One that cannot be asked may have.
pub(super) fn is_idle(stream: Handle) -> bool {
    type Real = unsafe extern "C" fn(Handle) -> c_int;
    let Some(address) = STREAM_QUERY.address() else { return false };
    // SAFETY: the type is that of cuda.h; the stream is the one that the program launches in.
    unsafe { core::mem::transmute::<usize, Real>(address)(stream) == SUCCESS }
}

/// Time from one event that was passed to another, of the GPU's clock.
pub(super) fn elapsed_ns(from: Handle, to: Handle) -> Option<i64> {
    type Real = unsafe extern "C" fn(*mut f32, Handle, Handle) -> c_int;
    // SAFETY: the type is that of cuda.h.
    let real = unsafe { core::mem::transmute::<usize, Real>(EVENT_ELAPSED.address()?) };
    let mut milliseconds = 0.0;
    // SAFETY: the result goes to a variable of ours; both events are ours.
    let result = unsafe { real(&mut milliseconds, from, to) };
    (result == SUCCESS).then_some((f64::from(milliseconds) * 1e6) as i64)
}

/// The context that a green context is, to those who make it current.
pub(super) fn context_of_green(green: Handle) -> Option<usize> {
    type Real = unsafe extern "C" fn(*mut Handle, Handle) -> c_int;
    // SAFETY: the type is that of cuda.h.
    let real = unsafe { core::mem::transmute::<usize, Real>(CTX_FROM_GREEN.address()?) };
    let mut context = core::ptr::null_mut();
    // SAFETY: the result goes to a variable of ours.
    (unsafe { real(&mut context, green) } == SUCCESS && !context.is_null())
        .then_some(context as usize)
}
