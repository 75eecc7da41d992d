//! Events.

use std::ffi::c_uint;

use crate::abi::{CuResult, OutPtr, export};
use crate::capture::{self, Place};
use crate::context::{current, current_gpu};
use crate::driver;
use crate::graph::NodeKind;
use crate::state::{self, Handle, State};
use crate::status::Status;
use crate::stream;
use crate::timeline::{self, now};

/// A CUDA event.
#[derive(Debug)]
pub(crate) struct Event {
    pub(crate) context: Handle,
    timed: bool,
    /// End time of the work before the event; `None` if it was never recorded.
    pub(crate) recorded: Option<u64>,
    /// Its place in a capture, if it was last recorded there.
    pub(crate) captured: Option<Place>,
}

/// Content of `CUipcEventHandle`.
#[repr(C)]
#[derive(Clone, Copy)]
struct IpcEvent {
    process: u64,
    event: u64,
    rest: [u64; 6],
}

/// `CU_EVENT_DISABLE_TIMING`.
const NO_TIMING: c_uint = 2;

/// `CU_EVENT_RECORD_EXTERNAL`, `CU_EVENT_WAIT_EXTERNAL`: in a capture, a node instead of an order.
pub(crate) const EXTERNAL: c_uint = 1;

fn record(event: Handle, on: Handle, flags: c_uint) -> CuResult {
    let mut state = state::lock()?;
    let end = stream::end_of(&state, on)?.max(now());
    state.events.get(&event).ok_or(Status::InvalidHandle)?;
    if flags == EXTERNAL {
        if state.capture_node(on, NodeKind::RecordEvent(event))?.is_some() {
            return Ok(());
        }
        return Err(Status::IllegalState);
    }
    let captured = state.place_of(on);
    let recorded = if captured.is_some() { None } else { Some(end) };
    let known = state.events.get_mut(&event).ok_or(Status::InvalidHandle)?;
    (known.recorded, known.captured) = (recorded, captured);
    Ok(())
}

impl State {
    /// Records an event at a time.
    pub(crate) fn record_at(&mut self, event: Handle, time: u64) {
        if let Some(event) = self.events.get_mut(&event) {
            (event.recorded, event.captured) = (Some(time), None);
        }
    }
}

/// Returns the time at which an event completes. An event that was never recorded is complete.
fn time_of(event: Handle) -> CuResult<u64> {
    let state = state::lock()?;
    let event = state.events.get(&event).ok_or(Status::InvalidHandle)?;
    if event.captured.is_some() {
        return Err(Status::CapturedEvent);
    }
    Ok(event.recorded.unwrap_or(0))
}

fn destroy(event: Handle) -> CuResult {
    state::lock()?.events.remove(&event).map(drop).ok_or(Status::InvalidHandle)
}

/// Writes the milliseconds of modelled time between two completed events to `out`.
fn elapsed(out: OutPtr<f32>, start: Handle, end: Handle) -> CuResult {
    let (from, to) = {
        let state = state::lock()?;
        let time = |event: Handle| {
            let event = state
                .events
                .get(&event)
                .filter(|event| event.timed)
                .ok_or(Status::InvalidHandle)?;
            if event.captured.is_some() {
                return Err(Status::CapturedEvent);
            }
            event.recorded.ok_or(Status::InvalidHandle)
        };
        (time(start)?, time(end)?)
    };
    if now() < from.max(to) {
        return Err(Status::NotReady);
    }
    let scale = driver::machine()?.world().time.scale;
    let nanos = to as f64 - from as f64;
    out.set((if scale > 0.0 { nanos / scale / 1e6 } else { 0.0 }) as f32)
}

export! {
    fn cuEventCreate(event: OutPtr<Handle>, flags: c_uint) {
        event.check()?;
        if flags > 7 {
            return Err(Status::InvalidValue);
        }
        let mut state = state::lock()?;
        current_gpu(&state)?;
        let context = current().ok_or(Status::InvalidContext)?;
        let handle = state.new_handle();
        state.events.insert(handle, Event { context, timed: flags & NO_TIMING == 0, recorded: None, captured: None });
        event.set(handle)
    }

    fn cuIpcGetEventHandle(handle: OutPtr<IpcEvent>, event: Handle) {
        state::lock()?.events.get(&event).ok_or(Status::InvalidHandle)?;
        handle.set(IpcEvent { process: std::process::id().into(), event: event.0 as u64, rest: [0; 6] })
    }

    // Its work is done: processes hand events over when they have waited for them, or wait then.
    fn cuIpcOpenEventHandle(event: OutPtr<Handle>, handle: IpcEvent) {
        event.check()?;
        if handle.process == 0 || handle.event == 0 {
            return Err(Status::InvalidValue);
        }
        let mut state = state::lock()?;
        current_gpu(&state)?;
        let context = current().ok_or(Status::InvalidContext)?;
        let opened = state.new_handle();
        state.events.insert(opened, Event { context, timed: false, recorded: None, captured: None });
        event.set(opened)
    }

    fn cuEventDestroy(event: Handle) { destroy(event) }
    fn cuEventDestroy_v2(event: Handle) { destroy(event) }
    fn cuEventRecord(event: Handle, on: Handle) { record(event, on, 0) }

    fn cuEventRecordWithFlags(event: Handle, on: Handle, flags: c_uint) {
        if flags > EXTERNAL { Err(Status::InvalidValue) } else { record(event, on, flags) }
    }

    fn cuEventQuery(event: Handle) {
        capture::check_unsafe(&mut *state::lock()?)?;
        if now() < time_of(event)? { Err(Status::NotReady) } else { Ok(()) }
    }

    fn cuEventSynchronize(event: Handle) {
        capture::check_unsafe(&mut *state::lock()?)?;
        timeline::wait_until(time_of(event)?);
        state::lock()?.shrink_pools()
    }

    fn cuEventElapsedTime(milliseconds: OutPtr<f32>, start: Handle, end: Handle) {
        elapsed(milliseconds, start, end)
    }

    fn cuEventElapsedTime_v2(milliseconds: OutPtr<f32>, start: Handle, end: Handle) {
        elapsed(milliseconds, start, end)
    }
}
