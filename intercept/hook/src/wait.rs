//! Programs that wait for the GPU: that is when pools let go of memory, and the time to look what
//! launches took.

use core::ffi::c_int;

use crate::compute;
use crate::cuda::Handle;
use crate::pool::refresh_after_waiting;
use crate::route::hooks;

fn waited(result: c_int, look: fn()) -> c_int {
    refresh_after_waiting();
    look();
    result
}

hooks! {
    fn cuCtxSynchronize() |real| {
        // SAFETY: the program's own call.
        waited(unsafe { real() }, compute::context_is_done)
    }

    fn cuCtxSynchronize_v2(context: Handle) |real| {
        // SAFETY: the program's own call.
        waited(unsafe { real(context) }, compute::work_is_done)
    }

    fn cuStreamSynchronize(stream: Handle) |real| {
        // SAFETY: the program's own call.
        waited(unsafe { real(stream) }, compute::work_is_done)
    }

    fn cuStreamSynchronize_ptsz(stream: Handle) |real| {
        // SAFETY: the program's own call.
        waited(unsafe { real(stream) }, compute::work_is_done)
    }

    fn cuEventSynchronize(event: Handle) |real| {
        // SAFETY: the program's own call.
        waited(unsafe { real(event) }, compute::work_is_done)
    }
}
