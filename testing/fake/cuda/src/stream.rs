//! Streams.

use std::ffi::{c_int, c_uint, c_void};
use std::time::Duration;

use crate::abi::{Answer, Out, export};
use crate::capture::{self, Capture};
use crate::context::{current, current_gpu};
use crate::device::Device;
use crate::state::{self, Handle, State};
use crate::status::Status;
use crate::timeline::{self, Engine, now};

/// The highest priority; lower numbers come first.
pub(crate) const HIGHEST_PRIORITY: c_int = -5;

/// A stream.
#[derive(Debug)]
pub(crate) struct Stream {
    pub(crate) context: Handle,
    gpu: usize,
    flags: c_uint,
    priority: c_int,
    /// When its work ends.
    end: u64,
    /// What it records, while it does.
    pub(crate) capture: Option<Capture>,
}

impl Stream {
    /// Whether the default stream waits for it.
    pub(crate) fn is_blocking(&self) -> bool {
        /// `CU_STREAM_NON_BLOCKING`
        const NON_BLOCKING: c_uint = 1;
        self.flags & NON_BLOCKING == 0
    }
}

/// NULL, `CU_STREAM_LEGACY` and `CU_STREAM_PER_THREAD`: the default stream.
pub(crate) fn is_default(stream: Handle) -> bool {
    stream.0 <= 2
}

/// The GPU of a stream; that of the current context for the default stream.
pub(crate) fn gpu_of(state: &State, stream: Handle) -> Answer<usize> {
    if is_default(stream) {
        return current_gpu(state);
    }
    state.streams.get(&stream).map(|stream| stream.gpu).ok_or(Status::InvalidHandle)
}

/// When the work of a stream ends. The default stream waits for all of the GPU's work.
pub(crate) fn end_of(state: &State, stream: Handle) -> Answer<u64> {
    let gpu = gpu_of(state, stream)?;
    let all = || state.timelines.get(&gpu).map_or(0, timeline::Timeline::end);
    Ok(state.streams.get(&stream).map_or_else(all, |stream| stream.end))
}

impl State {
    /// Puts work into a stream; answers when it ends.
    pub(crate) fn queue(&mut self, on: Handle, engine: Engine, length: Duration) -> Answer<u64> {
        let (gpu, before) = (gpu_of(self, on)?, end_of(self, on)?);
        if let Some(capture) = self.streams.get_mut(&on).and_then(|stream| stream.capture.as_mut())
        {
            capture.add(length);
            return Ok(before);
        }
        let end = self.timelines.entry(gpu).or_default().queue(engine, before, length);
        if let Some(stream) = self.streams.get_mut(&on) {
            stream.end = end;
        }
        Ok(end)
    }

    /// Lets a stream wait until that time.
    pub(crate) fn hold_back(&mut self, on: Handle, until: u64) -> Answer {
        gpu_of(self, on)?;
        if let Some(stream) = self.streams.get_mut(&on) {
            stream.end = stream.end.max(until);
        }
        Ok(())
    }
}

fn create(out: Out<Handle>, flags: c_uint, priority: c_int) -> Answer {
    out.check()?;
    if flags > 1 {
        return Err(Status::InvalidValue);
    }
    let mut state = state::lock()?;
    let gpu = current_gpu(&state)?;
    let context = current().ok_or(Status::InvalidContext)?;
    let handle = state.new_handle();
    let priority = priority.clamp(HIGHEST_PRIORITY, 0);
    state.streams.insert(handle, Stream { context, gpu, flags, priority, end: 0, capture: None });
    out.set(handle)
}

/// Ends a stream; its work goes on, as the GPU's timeline knows.
fn destroy(stream: Handle) -> Answer {
    state::lock()?.streams.remove(&stream).map(drop).ok_or(Status::InvalidHandle)
}

export! {
    fn cuStreamCreate(stream: Out<Handle>, flags: c_uint) { create(stream, flags, 0) }

    fn cuStreamCreateWithPriority(stream: Out<Handle>, flags: c_uint, priority: c_int) {
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
        let _ = flags;
        let mut state = state::lock()?;
        let recorded = state.events.get(&event).ok_or(Status::InvalidHandle)?.recorded.unwrap_or(0);
        state.hold_back(stream, recorded)
    }

    fn cuStreamGetFlags(stream: Handle, flags: Out<c_uint>) {
        let state = state::lock()?;
        gpu_of(&state, stream)?;
        flags.set(state.streams.get(&stream).map_or(0, |stream| stream.flags))
    }

    fn cuStreamGetPriority(stream: Handle, priority: Out<c_int>) {
        let state = state::lock()?;
        gpu_of(&state, stream)?;
        priority.set(state.streams.get(&stream).map_or(0, |stream| stream.priority))
    }

    fn cuStreamGetId(stream: Handle, id: Out<u64>) {
        gpu_of(&*state::lock()?, stream)?;
        id.set(stream.0 as u64)
    }

    fn cuStreamGetDevice(stream: Handle, device: Out<Device>) {
        device.set(Device::of(gpu_of(&*state::lock()?, stream)?))
    }

    fn cuStreamGetCtx(stream: Handle, context: Out<Handle>) {
        let state = state::lock()?;
        gpu_of(&state, stream)?;
        let own = state.streams.get(&stream).map(|stream| stream.context);
        context.set(own.or_else(current).ok_or(Status::InvalidContext)?)
    }

    fn cuLaunchHostFunc(stream: Handle, function: Option<extern "C" fn(*mut c_void)>, data: *mut c_void) {
        let function = function.ok_or(Status::InvalidValue)?;
        let end = end_of(&*state::lock()?, stream)?;
        let data = data as usize;
        std::thread::spawn(move || {
            timeline::wait_until(end);
            function(data as *mut c_void);
        });
        Ok(())
    }
}
