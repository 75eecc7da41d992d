//! Captures of streams: launches in them are not made but become nodes of a graph.

use core::ffi::{c_int, c_void};

use super::route::hooks;
use crate::compute;
use crate::driver::cuda::Handle;

/// Notes the capture before it begins: no captured launch may be taken for one that is made.
fn begins(begin: impl FnOnce() -> c_int) -> c_int {
    compute::capture_begins();
    begin()
}

hooks! {
    fn cuStreamBeginCapture(stream: Handle) |real| {
        // SAFETY: the program's own call.
        begins(|| unsafe { real(stream) })
    }

    fn cuStreamBeginCapture_ptsz(stream: Handle) |real| {
        // SAFETY: the program's own call.
        begins(|| unsafe { real(stream) })
    }

    fn cuStreamBeginCapture_v2(stream: Handle, mode: c_int) |real| {
        // SAFETY: the program's own call.
        begins(|| unsafe { real(stream, mode) })
    }

    fn cuStreamBeginCapture_v2_ptsz(stream: Handle, mode: c_int) |real| {
        // SAFETY: the program's own call.
        begins(|| unsafe { real(stream, mode) })
    }

    fn cuStreamBeginCaptureToGraph(
        stream: Handle, graph: Handle, after: *const Handle, edges: *const c_void, count: usize, mode: c_int,
    ) |real| {
        // SAFETY: the program's own call.
        begins(|| unsafe { real(stream, graph, after, edges, count, mode) })
    }

    fn cuStreamBeginCaptureToGraph_ptsz(
        stream: Handle, graph: Handle, after: *const Handle, edges: *const c_void, count: usize, mode: c_int,
    ) |real| {
        // SAFETY: the program's own call.
        begins(|| unsafe { real(stream, graph, after, edges, count, mode) })
    }

    fn cuStreamBeginCaptureToCig(stream: Handle, parameters: *mut c_void) |real| {
        // SAFETY: the program's own call.
        begins(|| unsafe { real(stream, parameters) })
    }

    fn cuStreamBeginCaptureToCig_ptsz(stream: Handle, parameters: *mut c_void) |real| {
        // SAFETY: the program's own call.
        begins(|| unsafe { real(stream, parameters) })
    }

    fn cuStreamBeginRecaptureToGraph(
        stream: Handle, mode: c_int, graph: Handle, changed: *const c_void, data: *mut c_void,
    ) |real| {
        // SAFETY: the program's own call.
        begins(|| unsafe { real(stream, mode, graph, changed, data) })
    }

    fn cuStreamBeginRecaptureToGraph_ptsz(
        stream: Handle, mode: c_int, graph: Handle, changed: *const c_void, data: *mut c_void,
    ) |real| {
        // SAFETY: the program's own call.
        begins(|| unsafe { real(stream, mode, graph, changed, data) })
    }
}
