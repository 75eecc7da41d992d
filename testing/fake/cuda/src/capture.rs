//! Stream captures: work is recorded instead of executed.
//!
//! A capture is invalidated as easily as NVIDIA's: a call that waits for the GPU or queries it, or
//! that makes pools or graphs release memory, invalidates it, unless the thread has permitted such
//! calls with `cuThreadExchangeStreamCaptureMode`.

use std::cell::Cell;
use std::ffi::{c_int, c_uint, c_void};
use std::thread::{self, ThreadId};
use std::time::Duration;

use crate::abi::{CuResult, InPtr, OutPtr, export};
use crate::graph::Graph;
use crate::state::{self, Handle, State};
use crate::status::Status;
use crate::stream;

/// `CUstreamCaptureMode`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CaptureMode {
    Global = 0,
    ThreadLocal = 1,
    Relaxed = 2,
}

impl CaptureMode {
    fn from_number(number: c_int) -> CuResult<Self> {
        match number {
            0 => Ok(Self::Global),
            1 => Ok(Self::ThreadLocal),
            2 => Ok(Self::Relaxed),
            _ => Err(Status::InvalidValue),
        }
    }
}

/// Recorded work of a stream.
#[derive(Debug)]
pub(crate) struct Capture {
    /// The graph that it becomes.
    graph: Handle,
    mode: CaptureMode,
    thread: ThreadId,
    kernels: Duration,
    nodes: Vec<Handle>,
    invalidated: bool,
}

thread_local! {
    static MODE: Cell<CaptureMode> = const { Cell::new(CaptureMode::Global) };
}

impl Capture {
    /// Records work.
    pub(crate) fn add(&mut self, length: Duration) {
        self.kernels += length;
    }

    /// Records a node.
    pub(crate) fn add_node(&mut self, node: Handle) {
        self.nodes.push(node);
    }

    /// Returns true if it forbids unsafe calls on this thread.
    fn forbids(&self) -> bool {
        match MODE.get() {
            CaptureMode::Global => {
                self.mode == CaptureMode::Global
                    || self.mode == CaptureMode::ThreadLocal
                        && self.thread == thread::current().id()
            }
            CaptureMode::ThreadLocal => {
                self.mode != CaptureMode::Relaxed && self.thread == thread::current().id()
            }
            CaptureMode::Relaxed => false,
        }
    }
}

/// Checks a call that queries or waits for the GPU. Invalidates every capture that forbids it.
pub(crate) fn check_unsafe(state: &mut State) -> CuResult {
    let mut invalidated = false;
    for capture in state.streams.values_mut().filter_map(|stream| stream.capture.as_mut()) {
        if capture.forbids() {
            capture.invalidated = true;
            invalidated = true;
        }
    }
    if invalidated { Err(Status::StreamCaptureUnsupported) } else { Ok(()) }
}

/// The default stream waits for blocking streams. If one of them is capturing, it cannot be used.
fn check_default(state: &State, on: Handle) -> CuResult {
    let waits =
        state.streams.values().any(|stream| stream.capture.is_some() && stream.is_blocking());
    if stream::is_default(on) && waits { Err(Status::StreamCaptureImplicit) } else { Ok(()) }
}

fn begin(on: Handle, mode: c_int) -> CuResult {
    let mode = CaptureMode::from_number(mode)?;
    let mut state = state::lock()?;
    let graph = state.new_handle();
    let stream = state.streams.get_mut(&on).ok_or(Status::StreamCaptureUnsupported)?;
    if stream.capture.is_some() {
        return Err(Status::IllegalState);
    }
    stream.capture = Some(Capture {
        graph,
        mode,
        thread: thread::current().id(),
        kernels: Duration::ZERO,
        nodes: Vec::new(),
        invalidated: false,
    });
    Ok(())
}

/// Tells whether a stream captures, and into which graph. Dependencies are not modelled: a graph
/// takes the sum of its kernels' times.
fn info(on: Handle, status: OutPtr<c_int>, id: OutPtr<u64>, graph: OutPtr<Handle>) -> CuResult {
    let state = state::lock()?;
    stream::gpu_of(&state, on)?;
    check_default(&state, on)?;
    let capture = state.streams.get(&on).and_then(|stream| stream.capture.as_ref());
    status.set(capture.map_or(0, |capture| if capture.invalidated { 2 } else { 1 }))?;
    if let Some(capture) = capture {
        id.set_unless_null(capture.graph.0 as u64);
        graph.set_unless_null(capture.graph);
    }
    Ok(())
}

fn check_capturing(on: Handle) -> CuResult {
    let state = state::lock()?;
    let stream = state.streams.get(&on).ok_or(Status::InvalidHandle)?;
    stream.capture.as_ref().map(drop).ok_or(Status::IllegalState)
}

export! {
    fn cuStreamBeginCapture(on: Handle) { begin(on, CaptureMode::Global as c_int) }
    fn cuStreamBeginCapture_v2(on: Handle, mode: c_int) { begin(on, mode) }

    fn cuStreamEndCapture(on: Handle, graph: OutPtr<Handle>) {
        graph.check()?;
        let mut state = state::lock()?;
        let stream = state.streams.get_mut(&on).ok_or(Status::InvalidHandle)?;
        let capture = stream.capture.take().ok_or(Status::IllegalState)?;
        if capture.invalidated {
            graph.set(Handle::NULL)?;
            return Err(Status::StreamCaptureInvalidated);
        }
        let (handle, kernels, nodes) = (capture.graph, capture.kernels, capture.nodes);
        state.graphs.insert(handle, Graph { kernels, nodes });
        graph.set(handle)
    }

    fn cuStreamGetCaptureInfo(on: Handle, status: OutPtr<c_int>, id: OutPtr<u64>) {
        info(on, status, id, OutPtr::from(std::ptr::null_mut()))
    }

    fn cuStreamGetCaptureInfo_v2(
        on: Handle,
        status: OutPtr<c_int>,
        id: OutPtr<u64>,
        graph: OutPtr<Handle>,
        dependencies: OutPtr<*const Handle>,
        count: OutPtr<usize>,
    ) {
        dependencies.set_unless_null(std::ptr::null());
        count.set_unless_null(0);
        info(on, status, id, graph)
    }

    fn cuStreamGetCaptureInfo_v3(
        on: Handle,
        status: OutPtr<c_int>,
        id: OutPtr<u64>,
        graph: OutPtr<Handle>,
        dependencies: OutPtr<*const Handle>,
        edges: OutPtr<*const c_void>,
        count: OutPtr<usize>,
    ) {
        dependencies.set_unless_null(std::ptr::null());
        edges.set_unless_null(std::ptr::null());
        count.set_unless_null(0);
        info(on, status, id, graph)
    }

    fn cuStreamUpdateCaptureDependencies(on: Handle, nodes: *const Handle, count: usize, flags: c_uint) {
        let _ = (nodes, count, flags);
        check_capturing(on)
    }

    fn cuStreamUpdateCaptureDependencies_v2(
        on: Handle,
        nodes: *const Handle,
        edges: *const c_void,
        count: usize,
        flags: c_uint,
    ) {
        let _ = (nodes, edges, count, flags);
        check_capturing(on)
    }

    fn cuStreamIsCapturing(on: Handle, status: OutPtr<c_int>) {
        let state = state::lock()?;
        stream::gpu_of(&state, on)?;
        check_default(&state, on)?;
        let capture = state.streams.get(&on).and_then(|stream| stream.capture.as_ref());
        status.set(capture.map_or(0, |capture| if capture.invalidated { 2 } else { 1 }))
    }

    fn cuThreadExchangeStreamCaptureMode(mode: *mut c_void) {
        state::lock()?;
        let new = CaptureMode::from_number(InPtr::<c_int>::from(mode).get()?)?;
        OutPtr::from(mode).set(MODE.replace(new) as c_int)
    }
}
