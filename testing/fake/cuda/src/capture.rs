//! Stream captures: work is recorded instead of executed.
//!
//! A capture is invalidated as easily as NVIDIA's: a call that waits for the GPU or queries it, or
//! that makes pools or graphs release memory, invalidates it, unless the thread has permitted such
//! calls with `cuThreadExchangeStreamCaptureMode`.

use std::cell::Cell;
use std::ffi::{c_int, c_uint, c_void};
use std::thread::{self, ThreadId};

use crate::abi::{CuResult, InPtr, OutPtr, export};
use crate::graph::{Graph, Node, NodeKind, handles};
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

/// A capture: the work of its streams becomes one graph, whose handle it has from its beginning.
#[derive(Debug)]
pub(crate) struct Capture {
    mode: CaptureMode,
    thread: ThreadId,
    /// The stream that began it, and that ends it.
    origin: Handle,
    is_invalidated: bool,
}

/// The part of a stream in a capture.
#[derive(Debug)]
pub(crate) struct CapturedStream {
    place: Place,
    /// Its last own work, which must precede the end of the capture. Nodes that the program adds to
    /// the graph itself do not count.
    last: Option<Handle>,
}

/// A place in a capture: what follows there depends on `after`.
#[derive(Debug, Clone)]
pub(crate) struct Place {
    graph: Handle,
    after: Vec<Handle>,
}

thread_local! {
    static MODE: Cell<CaptureMode> = const { Cell::new(CaptureMode::Global) };
}

impl Capture {
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

impl State {
    /// Returns the part of a stream in a capture.
    fn part(&self, on: Handle) -> Option<&CapturedStream> {
        self.streams.get(&on).and_then(|stream| stream.capture.as_ref())
    }

    /// As [`part`](Self::part), to be changed.
    fn part_mut(&mut self, on: Handle) -> Option<&mut CapturedStream> {
        self.streams.get_mut(&on).and_then(|stream| stream.capture.as_mut())
    }

    /// Records a node in the capture of a stream. Returns `None` if the stream does not capture.
    ///
    /// # Errors
    /// The capture is invalidated.
    pub(crate) fn capture_node(&mut self, on: Handle, kind: NodeKind) -> CuResult<Option<Handle>> {
        let Some(Place { graph, after }) = self.place_of(on) else { return Ok(None) };
        self.check_valid(graph)?;
        let node = self.add_node(graph, Node { kind, after })?;
        if let Some(part) = self.part_mut(on) {
            part.place.after = vec![node];
            part.last = Some(node);
        }
        Ok(Some(node))
    }

    fn check_valid(&self, graph: Handle) -> CuResult {
        match self.captures.get(&graph) {
            Some(capture) if !capture.is_invalidated => Ok(()),
            _ => Err(Status::StreamCaptureInvalidated),
        }
    }

    /// Returns the place of a stream in a capture, if it captures.
    pub(crate) fn place_of(&self, on: Handle) -> Option<Place> {
        self.part(on).map(|part| part.place.clone())
    }

    /// Makes a stream wait for an event of a capture: the stream becomes part of the capture.
    ///
    /// # Errors
    /// The capture has ended, or the stream is part of another one.
    pub(crate) fn join_capture(&mut self, on: Handle, event: Place) -> CuResult {
        if !self.captures.contains_key(&event.graph) {
            return Err(Status::StreamCaptureIsolation);
        }
        let stream = self.streams.get_mut(&on).ok_or(Status::StreamCaptureImplicit)?;
        match &mut stream.capture {
            None => stream.capture = Some(CapturedStream { place: event, last: None }),
            Some(part) if part.place.graph == event.graph => {
                for node in event.after {
                    if !part.place.after.contains(&node) {
                        part.place.after.push(node);
                    }
                }
            }
            Some(_) => return Err(Status::StreamCaptureMerge),
        }
        Ok(())
    }

    /// Ends a capture that a stream has begun, and returns its graph.
    fn end_capture(&mut self, on: Handle) -> CuResult<Handle> {
        let Place { graph, after } = self.place_of(on).ok_or(Status::IllegalState)?;
        let origin = self.captures.get(&graph).map(|capture| capture.origin);
        if origin != Some(on) {
            return Err(Status::StreamCaptureUnmatched);
        }
        let valid = self.check_valid(graph).and_then(|()| self.check_joined(on, graph, &after));
        self.drop_capture(graph);
        if let Err(error) = valid {
            self.graphs.remove(&graph);
            return Err(error);
        }
        Ok(graph)
    }

    /// Checks that the work of all streams of a capture precedes the end of its first stream.
    fn check_joined(&self, origin: Handle, graph: Handle, end: &[Handle]) -> CuResult {
        let before = self.with_all_before(end);
        let others = self.streams.iter().filter(|(handle, _)| **handle != origin);
        let mut parts = others.filter_map(|(_, stream)| stream.capture.as_ref());
        let is_joined = |part: &CapturedStream| {
            part.place.graph != graph || part.last.is_none_or(|last| before.contains(&last))
        };
        if parts.all(is_joined) { Ok(()) } else { Err(Status::StreamCaptureUnjoined) }
    }

    /// Ends the captures that a stream has begun.
    pub(crate) fn drop_captures_of(&mut self, origin: Handle) {
        let of_origin = |(_, capture): &(&Handle, &Capture)| capture.origin == origin;
        let graphs: Vec<_> =
            self.captures.iter().filter(of_origin).map(|(graph, _)| *graph).collect();
        graphs.into_iter().for_each(|graph| self.drop_capture(graph));
    }

    fn drop_capture(&mut self, graph: Handle) {
        self.captures.remove(&graph);
        for stream in self.streams.values_mut() {
            stream.capture.take_if(|part| part.place.graph == graph);
        }
    }
}

/// Checks a call that queries or waits for the GPU. Invalidates every capture that forbids it.
pub(crate) fn check_unsafe(state: &mut State) -> CuResult {
    let mut is_forbidden = false;
    for capture in state.captures.values_mut().filter(|capture| capture.forbids()) {
        capture.is_invalidated = true;
        is_forbidden = true;
    }
    if is_forbidden { Err(Status::StreamCaptureUnsupported) } else { Ok(()) }
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
    stream.capture = Some(CapturedStream { place: Place { graph, after: Vec::new() }, last: None });
    let thread = thread::current().id();
    state.captures.insert(graph, Capture { mode, thread, origin: on, is_invalidated: false });
    state.graphs.insert(graph, Graph::default());
    Ok(())
}

/// `CUstreamCaptureStatus`
fn status_of(state: &State, on: Handle) -> CuResult<c_int> {
    stream::gpu_of(state, on)?;
    check_default(state, on)?;
    let is_valid = state.part(on).map(|part| state.check_valid(part.place.graph).is_ok());
    Ok(is_valid.map_or(0, |is_valid| if is_valid { 1 } else { 2 }))
}

/// Results of `cuStreamGetCaptureInfo` besides the status; each may be NULL.
struct Info {
    id: OutPtr<u64>,
    graph: OutPtr<Handle>,
    after: OutPtr<*const Handle>,
    count: OutPtr<usize>,
}

fn info(on: Handle, status: OutPtr<c_int>, info: &Info) -> CuResult {
    let state = state::lock()?;
    status.set(status_of(&state, on)?)?;
    if let Some(part) = state.part(on) {
        let Place { graph, after } = &part.place;
        info.id.set_unless_null(graph.0 as u64);
        info.graph.set_unless_null(*graph);
        // Valid until the next call for this stream, as with NVIDIA's driver.
        info.after.set_unless_null(after.as_ptr());
        info.count.set_unless_null(after.len());
    }
    Ok(())
}

/// Replaces the nodes that the next node of a capturing stream depends on, or adds to them.
fn update_dependencies(on: Handle, nodes: *const Handle, count: usize, flags: c_uint) -> CuResult {
    const SET: c_uint = 1;
    if flags > SET {
        return Err(Status::InvalidValue);
    }
    let wanted = handles(nodes, count)?;
    let mut state = state::lock()?;
    if !wanted.iter().all(|node| state.nodes.contains_key(node)) {
        return Err(Status::InvalidValue);
    }
    state.streams.get(&on).ok_or(Status::InvalidHandle)?;
    let after = &mut state.part_mut(on).ok_or(Status::IllegalState)?.place.after;
    if flags == SET {
        *after = wanted;
    } else {
        after.extend(wanted);
    }
    Ok(())
}

export! {
    fn cuStreamBeginCapture(on: Handle) { begin(on, CaptureMode::Global as c_int) }
    fn cuStreamBeginCapture_v2(on: Handle, mode: c_int) { begin(on, mode) }

    fn cuStreamEndCapture(on: Handle, graph: OutPtr<Handle>) {
        graph.check()?;
        let mut state = state::lock()?;
        state.streams.get(&on).ok_or(Status::InvalidHandle)?;
        let ended = state.end_capture(on);
        graph.set(*ended.as_ref().unwrap_or(&Handle::NULL))?;
        ended.map(drop)
    }

    fn cuStreamGetCaptureInfo(on: Handle, status: OutPtr<c_int>, id: OutPtr<u64>) {
        let none = std::ptr::null_mut();
        let graph = OutPtr::from(none);
        info(on, status, &Info { id, graph, after: OutPtr::from(none), count: OutPtr::from(none) })
    }

    fn cuStreamGetCaptureInfo_v2(
        on: Handle,
        status: OutPtr<c_int>,
        id: OutPtr<u64>,
        graph: OutPtr<Handle>,
        dependencies: OutPtr<*const Handle>,
        count: OutPtr<usize>,
    ) {
        info(on, status, &Info { id, graph, after: dependencies, count })
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
        edges.set_unless_null(std::ptr::null());
        info(on, status, &Info { id, graph, after: dependencies, count })
    }

    fn cuStreamUpdateCaptureDependencies(on: Handle, nodes: *const Handle, count: usize, flags: c_uint) {
        update_dependencies(on, nodes, count, flags)
    }

    fn cuStreamUpdateCaptureDependencies_v2(
        on: Handle,
        nodes: *const Handle,
        edges: *const c_void,
        count: usize,
        flags: c_uint,
    ) {
        let _ = edges;
        update_dependencies(on, nodes, count, flags)
    }

    fn cuStreamIsCapturing(on: Handle, status: OutPtr<c_int>) {
        status.set(status_of(&*state::lock()?, on)?)
    }

    fn cuThreadExchangeStreamCaptureMode(mode: *mut c_void) {
        state::lock()?;
        let new = CaptureMode::from_number(InPtr::<c_int>::from(mode).get()?)?;
        OutPtr::from(mode).set(MODE.replace(new) as c_int)
    }
}
