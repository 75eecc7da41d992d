//! Programs that wait for the GPU: that is when pools let go of memory.

use core::ffi::c_int;

use crate::cuda::Handle;
use crate::pool::refresh_after_waiting;
use crate::route::hooks;

fn waited(result: c_int) -> c_int {
    refresh_after_waiting();
    result
}

hooks! {
    fn cuCtxSynchronize() |real| {
        // SAFETY: the program's own call.
        waited(unsafe { real() })
    }

    fn cuCtxSynchronize_v2(context: Handle) |real| {
        // SAFETY: the program's own call.
        waited(unsafe { real(context) })
    }

    fn cuStreamSynchronize(stream: Handle) |real| {
        // SAFETY: the program's own call.
        waited(unsafe { real(stream) })
    }

    fn cuStreamSynchronize_ptsz(stream: Handle) |real| {
        // SAFETY: the program's own call.
        waited(unsafe { real(stream) })
    }

    fn cuEventSynchronize(event: Handle) |real| {
        // SAFETY: the program's own call.
        waited(unsafe { real(event) })
    }
}
