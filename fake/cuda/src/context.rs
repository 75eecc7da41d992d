//! Contexts, and which of them is current in a thread.

use std::cell::RefCell;
use std::ffi::{c_int, c_uint, c_void};

use crate::abi::{Answer, Out, export};
use crate::device::{Device, gpu};
use crate::driver;
use crate::state::{self, Handle, State};
use crate::status::Status;
use crate::timeline;

/// A context.
#[derive(Debug)]
pub(crate) struct Context {
    pub(crate) gpu: usize,
    pub(crate) flags: u32,
    id: u64,
    peers: Vec<Handle>,
}

/// The primary context of a GPU.
#[derive(Debug, Default)]
pub(crate) struct Primary {
    context: Option<Handle>,
    retained: u32,
    flags: u32,
}

thread_local! {
    /// The thread's stack of contexts; the last is current.
    static STACK: RefCell<Vec<Handle>> = const { RefCell::new(Vec::new()) };
}

/// The version that `cuCtxGetApiVersion` has answered since CUDA 3.2.
const API_VERSION: c_uint = 3020;

/// The current context, if there is one.
pub(crate) fn current() -> Option<Handle> {
    STACK.with_borrow(|stack| stack.last().copied()).filter(|context| *context != Handle::NULL)
}

/// The GPU of the current context.
pub(crate) fn current_gpu(state: &State) -> Answer<usize> {
    let context = current().ok_or(Status::InvalidContext)?;
    state.contexts.get(&context).map(|context| context.gpu).ok_or(Status::InvalidContext)
}

/// Makes a context, which takes memory.
fn make(state: &mut State, gpu: usize, flags: u32) -> Answer<Handle> {
    let machine = driver::machine()?;
    let board = &machine.world().gpus[gpu];
    let taken = machine.usage().take(gpu, board.model.context_bytes(), machine.capacity(board));
    taken.map_err(|_| Status::OutOfMemory)?;
    let handle = state.new_handle();
    let id = handle.0 as u64;
    state.contexts.insert(handle, Context { gpu, flags, id, peers: Vec::new() });
    Ok(handle)
}

/// Ends a context: everything made in it goes too.
fn destroy(state: &mut State, handle: Handle) -> Answer {
    let context = state.contexts.remove(&handle).ok_or(Status::InvalidContext)?;
    let machine = driver::machine()?;
    machine.usage().give_back(context.gpu, machine.world().gpus[context.gpu].model.context_bytes());
    state.free_all_of(handle)?;
    state.streams.retain(|_, stream| stream.context != handle);
    state.events.retain(|_, event| event.context != handle);
    state.modules.retain(|_, module| module.context != handle);
    state.functions.retain(|_, function| function.context != handle);
    STACK.with_borrow_mut(|stack| stack.retain(|other| *other != handle));
    Ok(())
}

fn create(out: Out<Handle>, flags: c_uint, device: Device) -> Answer {
    out.check()?;
    let gpu = gpu(device)?;
    let mut state = state::lock()?;
    let context = make(&mut state, gpu, flags)?;
    STACK.with_borrow_mut(|stack| stack.push(context));
    out.set(context)
}

fn retain_primary(out: Out<Handle>, device: Device) -> Answer {
    out.check()?;
    let gpu = gpu(device)?;
    let mut state = state::lock()?;
    let primary = state.primaries.entry(gpu).or_default();
    let flags = primary.flags;
    let context = match primary.context {
        Some(context) => context,
        None => make(&mut state, gpu, flags)?,
    };
    let primary = state.primaries.entry(gpu).or_default();
    primary.context = Some(context);
    primary.retained += 1;
    out.set(context)
}

fn release_primary(device: Device) -> Answer {
    let gpu = gpu(device)?;
    let mut state = state::lock()?;
    let primary = state.primaries.entry(gpu).or_default();
    primary.retained = primary.retained.checked_sub(1).ok_or(Status::InvalidContext)?;
    if primary.retained > 0 {
        return Ok(());
    }
    primary.context.take().map_or(Ok(()), |context| destroy(&mut state, context))
}

/// Ends the primary context and begins it anew: those who retain it keep their handle.
fn reset_primary(device: Device) -> Answer {
    let gpu = gpu(device)?;
    let mut state = state::lock()?;
    let Some(context) = state.primaries.entry(gpu).or_default().context else { return Ok(()) };
    state.free_all_of(context)
}

fn set_primary_flags(device: Device, flags: c_uint) -> Answer {
    let gpu = gpu(device)?;
    state::lock()?.primaries.entry(gpu).or_default().flags = flags;
    Ok(())
}

fn with_current<T>(read: impl FnOnce(&mut Context) -> Answer<T>) -> Answer<T> {
    let mut state = state::lock()?;
    let context = current().ok_or(Status::InvalidContext)?;
    read(state.contexts.get_mut(&context).ok_or(Status::InvalidContext)?)
}

fn check_alive(state: &State, context: Handle) -> Answer {
    if state.contexts.contains_key(&context) { Ok(()) } else { Err(Status::InvalidContext) }
}

fn push(context: Handle) -> Answer {
    check_alive(&*state::lock()?, context)?;
    STACK.with_borrow_mut(|stack| stack.push(context));
    Ok(())
}

fn pop(out: Out<Handle>) -> Answer {
    driver::machine()?;
    let context = STACK.with_borrow_mut(Vec::pop).ok_or(Status::InvalidContext)?;
    out.set_if_wanted(context);
    Ok(())
}

export! {
    fn cuDevicePrimaryCtxRetain(context: Out<Handle>, device: Device) { retain_primary(context, device) }
    fn cuDevicePrimaryCtxRelease(device: Device) { release_primary(device) }
    fn cuDevicePrimaryCtxRelease_v2(device: Device) { release_primary(device) }
    fn cuDevicePrimaryCtxReset(device: Device) { reset_primary(device) }
    fn cuDevicePrimaryCtxReset_v2(device: Device) { reset_primary(device) }
    fn cuDevicePrimaryCtxSetFlags(device: Device, flags: c_uint) { set_primary_flags(device, flags) }
    fn cuDevicePrimaryCtxSetFlags_v2(device: Device, flags: c_uint) { set_primary_flags(device, flags) }

    fn cuDevicePrimaryCtxGetState(device: Device, flags: Out<c_uint>, active: Out<c_int>) {
        let gpu = gpu(device)?;
        let mut state = state::lock()?;
        let primary = state.primaries.entry(gpu).or_default();
        flags.set(primary.flags)?;
        active.set(c_int::from(primary.context.is_some()))
    }

    fn cuCtxCreate(context: Out<Handle>, flags: c_uint, device: Device) { create(context, flags, device) }
    fn cuCtxCreate_v2(context: Out<Handle>, flags: c_uint, device: Device) { create(context, flags, device) }

    fn cuCtxCreate_v3(
        context: Out<Handle>,
        affinity: *const c_void,
        count: c_int,
        flags: c_uint,
        device: Device,
    ) {
        // Execution affinity needs MPS, which is not modelled.
        if !affinity.is_null() || count != 0 {
            return Err(Status::NotSupported);
        }
        create(context, flags, device)
    }

    fn cuCtxCreate_v4(context: Out<Handle>, parameters: *const c_void, flags: c_uint, device: Device) {
        if !parameters.is_null() {
            return Err(Status::NotSupported);
        }
        create(context, flags, device)
    }

    fn cuCtxDestroy(context: Handle) { destroy(&mut *state::lock()?, context) }
    fn cuCtxDestroy_v2(context: Handle) { destroy(&mut *state::lock()?, context) }
    fn cuCtxPushCurrent(context: Handle) { push(context) }
    fn cuCtxPushCurrent_v2(context: Handle) { push(context) }
    fn cuCtxPopCurrent(context: Out<Handle>) { pop(context) }
    fn cuCtxPopCurrent_v2(context: Out<Handle>) { pop(context) }

    fn cuCtxSetCurrent(context: Handle) {
        let state = state::lock()?;
        if context != Handle::NULL {
            check_alive(&state, context)?;
        }
        STACK.with_borrow_mut(|stack| {
            stack.pop();
            if context != Handle::NULL {
                stack.push(context);
            }
        });
        Ok(())
    }

    fn cuCtxGetCurrent(context: Out<Handle>) {
        driver::machine()?;
        context.set(current().unwrap_or(Handle::NULL))
    }

    fn cuCtxGetDevice(device: Out<Device>) {
        device.set(Device::of(with_current(|context| Ok(context.gpu))?))
    }

    fn cuCtxGetFlags(flags: Out<c_uint>) { flags.set(with_current(|context| Ok(context.flags))?) }

    fn cuCtxGetId(context: Handle, id: Out<u64>) {
        let context = if context == Handle::NULL { current().ok_or(Status::InvalidContext)? } else { context };
        let state = state::lock()?;
        id.set(state.contexts.get(&context).ok_or(Status::InvalidContext)?.id)
    }

    fn cuCtxGetApiVersion(context: Handle, version: Out<c_uint>) {
        let context = if context == Handle::NULL { current().ok_or(Status::InvalidContext)? } else { context };
        check_alive(&*state::lock()?, context)?;
        version.set(API_VERSION)
    }

    fn cuCtxSynchronize() {
        let end = {
            let state = state::lock()?;
            let gpu = current_gpu(&state)?;
            state.timelines.get(&gpu).map_or(0, |timeline| timeline.end())
        };
        timeline::wait_until(end);
        Ok(())
    }

    fn cuCtxGetLimit(value: Out<usize>, limit: c_uint) {
        with_current(|_| Ok(()))?;
        // Stack bytes per thread, bytes of printf's buffer, bytes of malloc's heap: CUDA's defaults.
        match limit {
            0 => value.set(1024),
            1 | 2 => value.set(8 << 20),
            _ => Err(Status::NotSupported),
        }
    }

    fn cuCtxSetLimit(limit: c_uint, value: usize) {
        // Accepted, without effect: nothing runs that could reach a limit.
        let _ = value;
        with_current(|_| if limit <= 2 { Ok(()) } else { Err(Status::NotSupported) })
    }

    fn cuCtxGetCacheConfig(config: Out<c_uint>) { with_current(|_| config.set(0)) }

    fn cuCtxSetCacheConfig(config: c_uint) {
        with_current(|_| if config <= 3 { Ok(()) } else { Err(Status::InvalidValue) })
    }

    fn cuCtxGetStreamPriorityRange(least: Out<c_int>, greatest: Out<c_int>) {
        with_current(|_| Ok(()))?;
        least.set_if_wanted(0);
        greatest.set_if_wanted(crate::stream::HIGHEST_PRIORITY);
        Ok(())
    }

    fn cuCtxEnablePeerAccess(peer: Handle, flags: c_uint) {
        if flags != 0 {
            return Err(Status::InvalidValue);
        }
        check_alive(&*state::lock()?, peer)?;
        with_current(|context| {
            if context.peers.contains(&peer) {
                return Err(Status::PeerAccessAlreadyEnabled);
            }
            context.peers.push(peer);
            Ok(())
        })
    }

    fn cuCtxDisablePeerAccess(peer: Handle) {
        with_current(|context| {
            let at = context.peers.iter().position(|other| *other == peer);
            context.peers.swap_remove(at.ok_or(Status::PeerAccessNotEnabled)?);
            Ok(())
        })
    }
}
