//! Synchronizations: pools release memory at them, and launches that are done are settled.

use core::ffi::c_int;

use super::route::hooks;
use crate::compute;
use crate::driver::cuda::Handle;
use crate::pools::refresh_after_sync;

fn synced(result: c_int, settle: fn()) -> c_int {
    refresh_after_sync();
    settle();
    result
}

hooks! {
    fn cuCtxSynchronize() |real| {
        // SAFETY: the program's own call.
        synced(unsafe { real() }, compute::context_synced)
    }

    fn cuCtxSynchronize_v2(context: Handle) |real| {
        // SAFETY: the program's own call.
        synced(unsafe { real(context) }, compute::work_synced)
    }

    fn cuStreamSynchronize(stream: Handle) |real| {
        // SAFETY: the program's own call.
        synced(unsafe { real(stream) }, compute::work_synced)
    }

    fn cuStreamSynchronize_ptsz(stream: Handle) |real| {
        // SAFETY: the program's own call.
        synced(unsafe { real(stream) }, compute::work_synced)
    }

    fn cuEventSynchronize(event: Handle) |real| {
        // SAFETY: the program's own call.
        synced(unsafe { real(event) }, compute::work_synced)
    }
}
