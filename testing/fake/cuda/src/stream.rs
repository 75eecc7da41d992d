//! Streams.

use std::ffi::{c_int, c_uint, c_void};
use std::time::Duration;

use crate::abi::{CuResult, OutPtr, export};
use crate::capture::{self, CapturedStream};
use crate::context::{current, current_gpu};
use crate::device::Device;
use crate::driver;
use crate::event;
use crate::graph::{HostFunction, NodeKind};
use crate::state::{self, Handle, State};
use crate::status::Status;
use crate::timeline::{self, Engine, Queued, now};

/// Highest priority; lower numbers come first.
pub(crate) const HIGHEST_PRIORITY: c_int = -5;

/// A CUDA stream.
#[derive(Debug)]
pub(crate) struct Stream {
    pub(crate) context: Handle,
    gpu: usize,
    flags: c_uint,
    priority: c_int,
    /// End time of its work.
    end: u64,
    /// Hardware channel of its work.
    channel: usize,
    /// Its part in a capture.
    pub(crate) capture: Option<CapturedStream>,
}

impl Stream {
    /// Returns true if the default stream waits for this stream.
    pub(crate) fn is_blocking(&self) -> bool {
        /// `CU_STREAM_NON_BLOCKING`
        const NON_BLOCKING: c_uint = 1;
        self.flags & NON_BLOCKING == 0
    }
}

/// Returns true for the default stream: NULL, `CU_STREAM_LEGACY` or `CU_STREAM_PER_THREAD`.
pub(crate) fn is_default(stream: Handle) -> bool {
    stream.0 <= 2
}

/// Returns the GPU of a stream. The default stream's GPU is that of the current context.
pub(crate) fn gpu_of(state: &State, stream: Handle) -> CuResult<usize> {
    if is_default(stream) {
        return current_gpu(state);
    }
    state.streams.get(&stream).map(|stream| stream.gpu).ok_or(Status::InvalidHandle)
}

/// Returns the end time of a stream's work. The default stream waits for all work of the GPU.
pub(crate) fn end_of(state: &State, stream: Handle) -> CuResult<u64> {
    let gpu = gpu_of(state, stream)?;
    let all = || state.timelines.get(&gpu).map_or(0, timeline::Timeline::end);
    Ok(state.streams.get(&stream).map_or_else(all, |stream| stream.end))
}

impl State {
    /// Queues work in a stream and returns its end time.
    pub(crate) fn queue(&mut self, on: Handle, engine: Engine, length: Duration) -> CuResult<u64> {
        let (gpu, before) = (gpu_of(self, on)?, end_of(self, on)?);
        if self.capture_node(on, NodeKind::Work(engine, length))?.is_some() {
            return Ok(before);
        }
        let channel = self.streams.get(&on).map_or(0, |stream| stream.channel);
        let timeline = self.timelines.entry(gpu).or_default();
        let Queued { end, added } = timeline.queue(engine, channel, before, length);
        if let Some(stream) = self.streams.get_mut(&on) {
            stream.end = end;
        }
        if added > 0 {
            let ends_in = Duration::from_nanos(end.saturating_sub(now()));
            driver::machine()?.usage().work(gpu, Duration::from_nanos(added), ends_in);
        }
        Ok(end)
    }

    /// Makes a stream wait until a time.
    pub(crate) fn wait_until(&mut self, on: Handle, until: u64) -> CuResult {
        gpu_of(self, on)?;
        if let Some(stream) = self.streams.get_mut(&on) {
            stream.end = stream.end.max(until);
        }
        Ok(())
    }
}

fn create(out: OutPtr<Handle>, flags: c_uint, priority: c_int) -> CuResult {
    out.check()?;
    if flags > 1 {
        return Err(Status::InvalidValue);
    }
    let mut state = state::lock()?;
    let gpu = current_gpu(&state)?;
    let context = current().ok_or(Status::InvalidContext)?;
    let handle = state.new_handle();
    let priority = priority.clamp(HIGHEST_PRIORITY, 0);
    // Channel 0 has the default stream, too.
    state.created_streams += 1;
    let channel = state.created_streams;
    let stream = Stream { context, gpu, flags, priority, end: 0, channel, capture: None };
    state.streams.insert(handle, stream);
    out.set(handle)
}

/// Destroys a stream; its queued work still runs on the GPU's timeline.
fn destroy(stream: Handle) -> CuResult {
    let mut state = state::lock()?;
    state.drop_captures_of(stream);
    state.streams.remove(&stream).map(drop).ok_or(Status::InvalidHandle)
}

export! {
    fn cuStreamCreate(stream: OutPtr<Handle>, flags: c_uint) { create(stream, flags, 0) }

    fn cuStreamCreateWithPriority(stream: OutPtr<Handle>, flags: c_uint, priority: c_int) {
        create(stream, flags, priority)
    }

    fn cuStreamDestroy(stream: Handle) { destroy(stream) }
    fn cuStreamDestroy_v2(stream: Handle) { destroy(stream) }

    fn cuStreamSynchronize(stream: Handle) {
        let end = {
            let mut state = state::lock()?;
            capture::check_unsafe(&mut state)?;
            end_of(&state, stream)?
        };
        timeline::wait_until(end);
        state::lock()?.shrink_pools()
    }

    fn cuStreamQuery(stream: Handle) {
        capture::check_unsafe(&mut *state::lock()?)?;
        if now() < end_of(&*state::lock()?, stream)? { Err(Status::NotReady) } else { Ok(()) }
    }

    fn cuStreamWaitEvent(stream: Handle, event: Handle, flags: c_uint) {
        let mut state = state::lock()?;
        let known = state.events.get(&event).ok_or(Status::InvalidHandle)?;
        match (&known.captured, known.recorded) {
            (Some(place), _) => {
                let place = place.clone();
                state.join_capture(stream, place)
            }
            (None, Some(_)) if state.place_of(stream).is_some() => match flags {
                event::EXTERNAL => state.capture_node(stream, NodeKind::WaitEvent).map(drop),
                _ => Err(Status::StreamCaptureIsolation),
            },
            (None, recorded) => state.wait_until(stream, recorded.unwrap_or(0)),
        }
    }

    fn cuStreamGetFlags(stream: Handle, flags: OutPtr<c_uint>) {
        let state = state::lock()?;
        gpu_of(&state, stream)?;
        flags.set(state.streams.get(&stream).map_or(0, |stream| stream.flags))
    }

    fn cuStreamGetPriority(stream: Handle, priority: OutPtr<c_int>) {
        let state = state::lock()?;
        gpu_of(&state, stream)?;
        priority.set(state.streams.get(&stream).map_or(0, |stream| stream.priority))
    }

    fn cuStreamGetGreenCtx(stream: Handle, context: OutPtr<Handle>) {
        gpu_of(&*state::lock()?, stream)?;
        context.set(Handle::NULL)
    }

    fn cuStreamGetId(stream: Handle, id: OutPtr<u64>) {
        gpu_of(&*state::lock()?, stream)?;
        id.set(stream.0 as u64)
    }

    fn cuStreamGetDevice(stream: Handle, device: OutPtr<Device>) {
        device.set(Device::of(gpu_of(&*state::lock()?, stream)?))
    }

    fn cuStreamGetCtx(stream: Handle, context: OutPtr<Handle>) {
        let state = state::lock()?;
        gpu_of(&state, stream)?;
        let own = state.streams.get(&stream).map(|stream| stream.context);
        context.set(own.or_else(current).ok_or(Status::InvalidContext)?)
    }

    fn cuLaunchHostFunc(stream: Handle, function: Option<extern "C" fn(*mut c_void)>, data: *mut c_void) {
        let function = HostFunction { function: function.ok_or(Status::InvalidValue)?, data: data as usize };
        let mut state = state::lock()?;
        if state.capture_node(stream, NodeKind::Host(function))?.is_some() {
            return Ok(());
        }
        function.call_at(end_of(&state, stream)?);
        Ok(())
    }
}
