//! Captures: what a stream is given is recorded in place of being done.
//!
//! A capture is as easily spoilt as the real one: a call that would wait for the GPU, or ask it,
//! ends it for threads that did not say that they know what they do
//! (`cuThreadExchangeStreamCaptureMode`).

use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::thread::{self, ThreadId};
use std::time::Duration;

use crate::abi::{Answer, In, Out, export};
use crate::graph::Graph;
use crate::state::{self, Handle, State};
use crate::status::Status;
use crate::stream;

/// `CUstreamCaptureMode`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    Global = 0,
    ThreadLocal = 1,
    Relaxed = 2,
}

impl Mode {
    fn of(number: c_int) -> Answer<Self> {
        match number {
            0 => Ok(Self::Global),
            1 => Ok(Self::ThreadLocal),
            2 => Ok(Self::Relaxed),
            _ => Err(Status::InvalidValue),
        }
    }
}

/// What a stream has recorded so far.
#[derive(Debug)]
pub(crate) struct Capture {
    mode: Mode,
    thread: ThreadId,
    kernels: Duration,
    nodes: Vec<Handle>,
    spoilt: bool,
}

thread_local! {
    static MODE: Cell<Mode> = const { Cell::new(Mode::Global) };
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

    /// Whether it forbids this thread what could spoil it.
    fn forbids(&self) -> bool {
        match MODE.get() {
            Mode::Global => {
                self.mode == Mode::Global
                    || self.mode == Mode::ThreadLocal && self.thread == thread::current().id()
            }
            Mode::ThreadLocal => {
                self.mode != Mode::Relaxed && self.thread == thread::current().id()
            }
            Mode::Relaxed => false,
        }
    }
}

/// A call that asks or waits for the GPU: spoils every capture that forbids it.
pub(crate) fn check_unsafe(state: &mut State) -> Answer {
    let mut spoilt = false;
    for capture in state.streams.values_mut().filter_map(|stream| stream.capture.as_mut()) {
        if capture.forbids() {
            capture.spoilt = true;
            spoilt = true;
        }
    }
    if spoilt { Err(Status::StreamCaptureUnsupported) } else { Ok(()) }
}

/// The default stream waits for others, so for those that capture too: it cannot be used.
fn check_default(state: &State, on: Handle) -> Answer {
    let waits =
        state.streams.values().any(|stream| stream.capture.is_some() && stream.is_blocking());
    if stream::is_default(on) && waits { Err(Status::StreamCaptureImplicit) } else { Ok(()) }
}

fn begin(on: Handle, mode: c_int) -> Answer {
    let mode = Mode::of(mode)?;
    let mut state = state::lock()?;
    let stream = state.streams.get_mut(&on).ok_or(Status::StreamCaptureUnsupported)?;
    if stream.capture.is_some() {
        return Err(Status::IllegalState);
    }
    stream.capture = Some(Capture {
        mode,
        thread: thread::current().id(),
        kernels: Duration::ZERO,
        nodes: Vec::new(),
        spoilt: false,
    });
    Ok(())
}

export! {
    fn cuStreamBeginCapture(on: Handle) { begin(on, Mode::Global as c_int) }
    fn cuStreamBeginCapture_v2(on: Handle, mode: c_int) { begin(on, mode) }

    fn cuStreamEndCapture(on: Handle, graph: Out<Handle>) {
        graph.check()?;
        let mut state = state::lock()?;
        let stream = state.streams.get_mut(&on).ok_or(Status::InvalidHandle)?;
        let capture = stream.capture.take().ok_or(Status::IllegalState)?;
        if capture.spoilt {
            graph.set(Handle::NULL)?;
            return Err(Status::StreamCaptureInvalidated);
        }
        let handle = state.new_handle();
        state.graphs.insert(handle, Graph { kernels: capture.kernels, nodes: capture.nodes });
        graph.set(handle)
    }

    fn cuStreamIsCapturing(on: Handle, status: Out<c_int>) {
        let state = state::lock()?;
        stream::gpu_of(&state, on)?;
        check_default(&state, on)?;
        let capture = state.streams.get(&on).and_then(|stream| stream.capture.as_ref());
        status.set(capture.map_or(0, |capture| if capture.spoilt { 2 } else { 1 }))
    }

    fn cuThreadExchangeStreamCaptureMode(mode: *mut c_void) {
        state::lock()?;
        let new = Mode::of(In::<c_int>::from(mode).get()?)?;
        Out::from(mode).set(MODE.replace(new) as c_int)
    }
}
