//! Contexts, and the current context of each thread.

use std::cell::RefCell;
use std::ffi::{c_int, c_uint, c_void};

use crate::abi::{CuResult, OutPtr, export};
use crate::allocation::refund;
use crate::capture;
use crate::context_storage::Destruction;
use crate::device::{Device, gpu};
use crate::driver;
use crate::state::{self, Handle, State};
use crate::status::Status;
use crate::timeline;

/// A CUDA context.
#[derive(Debug)]
pub(crate) struct Context {
    pub(crate) gpu: usize,
    pub(crate) flags: u32,
    id: u64,
    peers: Vec<Handle>,
    /// Number of attachments; the context is destroyed with the last.
    attached: u32,
    /// Limits in bytes: stack of a thread, printf buffer, heap.
    limits: [u64; 3],
}

/// Initial limits: CUDA's defaults. Their memory is part of a context's size.
const DEFAULT_LIMITS: [u64; 3] = [1024, 8 << 20, 8 << 20];

/// A green context: a part of a primary context, which it keeps alive.
#[derive(Debug)]
pub(crate) struct Green {
    device: Device,
}

/// Primary context of a GPU.
#[derive(Debug, Default)]
pub(crate) struct Primary {
    context: Option<Handle>,
    retained: u32,
    flags: u32,
}

/// A kind of contexts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ContextKind {
    /// The context of a GPU, which all libraries in the process share.
    Primary,
    /// A context of the program's own.
    Plain,
}

/// Handle of the first GPU's primary context. Handles of primary contexts are known before these
/// exist: the runtime asks for them when it starts.
const FIRST_PRIMARY: usize = 0x7e55_9a00_0000;

/// Returns the handle of a GPU's primary context, which may not exist.
pub(crate) fn primary_handle(gpu: usize) -> Handle {
    Handle(FIRST_PRIMARY + gpu * 64)
}

/// Returns the GPU whose primary context has that handle.
fn gpu_of_primary(context: Handle) -> Option<usize> {
    let gpus = driver::machine().ok()?.world().gpus.len();
    (0..gpus).find(|gpu| primary_handle(*gpu) == context)
}

thread_local! {
    /// Context stack of the thread; the last one is current.
    static STACK: RefCell<Vec<Handle>> = const { RefCell::new(Vec::new()) };
}

/// Changes the context stack of the thread. Libraries call this from destructors of thread-local
/// storage too, after the stack was destroyed.
fn change_stack<T>(change: impl FnOnce(&mut Vec<Handle>) -> T) -> CuResult<T> {
    STACK.try_with(|stack| change(&mut stack.borrow_mut())).map_err(|_| Status::Deinitialized)
}

/// Version that `cuCtxGetApiVersion` returns since CUDA 3.2.
const API_VERSION: c_uint = 3020;

/// Returns the current context, if any.
pub(crate) fn current() -> Option<Handle> {
    // A destructor at the end of a thread may call the driver when the stack is gone.
    let last = STACK.try_with(|stack| stack.borrow().last().copied()).ok().flatten();
    last.filter(|context| *context != Handle::NULL)
}

/// Returns the GPU of the current context.
pub(crate) fn current_gpu(state: &State) -> CuResult<usize> {
    let context = current().ok_or(Status::InvalidContext)?;
    state.contexts.get(&context).map(|context| context.gpu).ok_or(Status::InvalidContext)
}

/// Creates a context, which uses memory.
fn create_context(
    state: &mut State,
    gpu: usize,
    flags: u32,
    kind: ContextKind,
) -> CuResult<Handle> {
    let machine = driver::machine()?;
    let board = &machine.world().gpus[gpu];
    if machine.is_lost(board) {
        return Err(Status::DeviceUnavailable);
    }
    state.charge(gpu, board.model.context_bytes())?;
    let new = state.new_handle();
    // As an allocator of addresses does, the driver hands out the last that became free.
    let handle = match kind {
        ContextKind::Primary => primary_handle(gpu),
        ContextKind::Plain => state.spare_contexts.pop().unwrap_or(new),
    };
    let id = new.0 as u64;
    state.contexts.insert(
        handle,
        Context { gpu, flags, id, peers: Vec::new(), attached: 1, limits: DEFAULT_LIMITS },
    );
    Ok(handle)
}

/// Destroys a context and everything that belongs to it. Returns the destructors of what libraries
/// have stored for it, which the caller runs without the lock.
fn destroy(state: &mut State, handle: Handle) -> CuResult<Vec<Destruction>> {
    let context = state.contexts.remove(&handle).ok_or(Status::InvalidContext)?;
    let machine = driver::machine()?;
    refund(context.gpu, machine.world().gpus[context.gpu].model.context_bytes())?;
    refund(context.gpu, reserved_for(context.gpu, &context.limits)?)?;
    state.free_all_of(handle)?;
    if !state.contexts.values().any(|other| other.gpu == context.gpu) {
        state.release_pools_of(context.gpu)?;
    }
    state.streams.retain(|_, stream| stream.context != handle);
    state.events.retain(|_, event| event.context != handle);
    let mut refunds = Vec::new();
    state.modules.retain(|_, module| {
        let (left, ends) = module.leave(handle);
        refunds.extend(left);
        !ends
    });
    refunds.into_iter().try_for_each(|(gpu, bytes)| refund(gpu, bytes))?;
    state.functions.retain(|_, function| function.context != Some(handle));
    if handle != primary_handle(context.gpu) {
        state.spare_contexts.push(handle);
    }
    let _ = STACK.try_with(|stack| stack.borrow_mut().retain(|other| *other != handle));
    let keys: Vec<_> =
        state.context_storage.keys().filter(|(context, _)| *context == handle).copied().collect();
    let destruction = |key: (Handle, usize)| {
        Some(Destruction::of(handle, key.1, state.context_storage.remove(&key)?))
    };
    Ok(keys.into_iter().filter_map(destruction).collect())
}

/// Destroys a context, and what libraries have stored for it.
fn end(handle: Handle) -> CuResult {
    let destructions = destroy(&mut *state::lock()?, handle)?;
    destructions.into_iter().for_each(Destruction::run);
    Ok(())
}

/// Returns the bytes that the driver reserves for limits beyond the defaults.
fn reserved_for(gpu: usize, limits: &[u64; 3]) -> CuResult<u64> {
    let model = &driver::machine()?.world().gpus[gpu].model;
    let threads = u64::from(model.multiprocessors) * u64::from(model.threads_per_multiprocessor);
    let beyond =
        limits.iter().zip(DEFAULT_LIMITS).map(|(limit, first)| limit.saturating_sub(first));
    let bytes = beyond.zip([threads, 1, 1]).map(|(limit, times)| limit.saturating_mul(times));
    Ok(bytes.fold(0, u64::saturating_add))
}

fn set_limit(limit: usize, value: u64) -> CuResult {
    let mut state = state::lock()?;
    let current = current().ok_or(Status::InvalidContext)?;
    let context = state.contexts.get(&current).ok_or(Status::InvalidContext)?;
    let (gpu, mut limits) = (context.gpu, context.limits);
    let before = reserved_for(gpu, &limits)?;
    *limits.get_mut(limit).ok_or(Status::NotSupported)? = value;
    let after = reserved_for(gpu, &limits)?;
    state.charge(gpu, after.saturating_sub(before))?;
    refund(gpu, before.saturating_sub(after))?;
    state.contexts.get_mut(&current).ok_or(Status::InvalidContext)?.limits = limits;
    Ok(())
}

/// Removes one attachment; the last one destroys the context.
fn detach(handle: Handle) -> CuResult {
    let is_last = {
        let mut state = state::lock()?;
        let context = state.contexts.get_mut(&handle).ok_or(Status::InvalidContext)?;
        context.attached -= 1;
        context.attached == 0
    };
    if is_last { end(handle) } else { Ok(()) }
}

fn create_green(out: OutPtr<Handle>, resources: Handle, device: Device) -> CuResult {
    out.check()?;
    if resources == Handle::NULL {
        return Err(Status::InvalidValue);
    }
    let mut primary = Handle::NULL;
    retain_primary(OutPtr::to(&mut primary), device)?;
    let mut state = state::lock()?;
    let handle = state.new_handle();
    state.green.insert(handle, Green { device });
    out.set(handle)
}

fn destroy_green(handle: Handle) -> CuResult {
    let green = state::lock()?.green.remove(&handle).ok_or(Status::InvalidContext)?;
    release_primary(green.device)
}

fn create(out: OutPtr<Handle>, flags: c_uint, device: Device) -> CuResult {
    out.check()?;
    let gpu = gpu(device)?;
    let mut state = state::lock()?;
    let context = create_context(&mut state, gpu, flags, ContextKind::Plain)?;
    change_stack(|stack| stack.push(context))?;
    out.set(context)
}

fn retain_primary(out: OutPtr<Handle>, device: Device) -> CuResult {
    out.check()?;
    let gpu = gpu(device)?;
    let mut state = state::lock()?;
    let primary = state.primaries.entry(gpu).or_default();
    let flags = primary.flags;
    let context = match primary.context {
        Some(context) => context,
        None => create_context(&mut state, gpu, flags, ContextKind::Primary)?,
    };
    let primary = state.primaries.entry(gpu).or_default();
    primary.context = Some(context);
    primary.retained += 1;
    out.set(context)
}

fn release_primary(device: Device) -> CuResult {
    let gpu = gpu(device)?;
    let last = {
        let mut state = state::lock()?;
        let primary = state.primaries.entry(gpu).or_default();
        primary.retained = primary.retained.checked_sub(1).ok_or(Status::InvalidContext)?;
        if primary.retained > 0 { None } else { primary.context.take() }
    };
    last.map_or(Ok(()), end)
}

/// Resets the primary context; its handle stays valid.
fn reset_primary(device: Device) -> CuResult {
    let gpu = gpu(device)?;
    let mut state = state::lock()?;
    let Some(context) = state.primaries.entry(gpu).or_default().context else { return Ok(()) };
    state.free_all_of(context)?;
    if state.contexts.len() == 1 { state.release_pools_of(gpu) } else { Ok(()) }
}

fn set_primary_flags(device: Device, flags: c_uint) -> CuResult {
    let gpu = gpu(device)?;
    state::lock()?.primaries.entry(gpu).or_default().flags = flags;
    Ok(())
}

fn with_current<T>(read: impl FnOnce(&mut Context) -> CuResult<T>) -> CuResult<T> {
    let mut state = state::lock()?;
    let context = current().ok_or(Status::InvalidContext)?;
    read(state.contexts.get_mut(&context).ok_or(Status::InvalidContext)?)
}

/// Checks a handle that becomes current: of a context, or of a primary context that may not exist
/// yet.
fn check_handle(state: &State, context: Handle) -> CuResult {
    let is_known = state.contexts.contains_key(&context) || gpu_of_primary(context).is_some();
    if is_known { Ok(()) } else { Err(Status::InvalidContext) }
}

fn check_alive(state: &State, context: Handle) -> CuResult {
    if state.contexts.contains_key(&context) { Ok(()) } else { Err(Status::InvalidContext) }
}

/// Returns the GPU of a context, or of a primary context that may not exist yet; NULL is the
/// current one.
fn gpu_of(context: Handle) -> CuResult<usize> {
    let context = match context {
        Handle::NULL => current().ok_or(Status::InvalidContext)?,
        context => context,
    };
    let state = state::lock()?;
    let known = state.contexts.get(&context).map(|context| context.gpu);
    known.or_else(|| gpu_of_primary(context)).ok_or(Status::InvalidContext)
}

/// Waits until a context's GPU has done all work.
fn synchronize(gpu: impl FnOnce(&State) -> CuResult<usize>) -> CuResult {
    let end = {
        let mut state = state::lock()?;
        capture::check_unsafe(&mut state)?;
        let gpu = gpu(&state)?;
        state.timelines.get(&gpu).map_or(0, |timeline| timeline.end())
    };
    timeline::wait_until(end);
    state::lock()?.shrink_pools()
}

fn push(context: Handle) -> CuResult {
    check_handle(&*state::lock()?, context)?;
    change_stack(|stack| stack.push(context))?;
    Ok(())
}

fn pop(out: OutPtr<Handle>) -> CuResult {
    driver::machine()?;
    let context = change_stack(Vec::pop)?.ok_or(Status::InvalidContext)?;
    out.set_unless_null(context);
    Ok(())
}

export! {
    fn cuDevicePrimaryCtxRetain(context: OutPtr<Handle>, device: Device) { retain_primary(context, device) }
    fn cuDevicePrimaryCtxRelease(device: Device) { release_primary(device) }
    fn cuDevicePrimaryCtxRelease_v2(device: Device) { release_primary(device) }
    fn cuDevicePrimaryCtxReset(device: Device) { reset_primary(device) }
    fn cuDevicePrimaryCtxReset_v2(device: Device) { reset_primary(device) }
    fn cuDevicePrimaryCtxSetFlags(device: Device, flags: c_uint) { set_primary_flags(device, flags) }
    fn cuDevicePrimaryCtxSetFlags_v2(device: Device, flags: c_uint) { set_primary_flags(device, flags) }

    fn cuDevicePrimaryCtxGetState(device: Device, flags: OutPtr<c_uint>, active: OutPtr<c_int>) {
        let gpu = gpu(device)?;
        let mut state = state::lock()?;
        let primary = state.primaries.entry(gpu).or_default();
        flags.set(primary.flags)?;
        active.set(c_int::from(primary.context.is_some()))
    }

    fn cuCtxCreate(context: OutPtr<Handle>, flags: c_uint, device: Device) { create(context, flags, device) }
    fn cuCtxCreate_v2(context: OutPtr<Handle>, flags: c_uint, device: Device) { create(context, flags, device) }

    fn cuCtxCreate_v3(
        context: OutPtr<Handle>,
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

    fn cuCtxCreate_v4(context: OutPtr<Handle>, parameters: *const c_void, flags: c_uint, device: Device) {
        if !parameters.is_null() {
            return Err(Status::NotSupported);
        }
        create(context, flags, device)
    }

    fn cuGLCtxCreate(context: OutPtr<Handle>, flags: c_uint, device: Device) { create(context, flags, device) }
    fn cuGLCtxCreate_v2(context: OutPtr<Handle>, flags: c_uint, device: Device) { create(context, flags, device) }

    fn cuVDPAUCtxCreate_v2(
        context: OutPtr<Handle>,
        flags: c_uint,
        device: Device,
        vdpau: c_uint,
        resolve: *const c_void,
    ) {
        let _ = (vdpau, resolve);
        create(context, flags, device)
    }

    fn cuDeviceGetDevResource(device: Device, resource: *mut c_void, kind: c_int) {
        // Multiprocessors; the content is opaque.
        let _ = resource;
        gpu(device)?;
        if kind == 1 { Ok(()) } else { Err(Status::InvalidValue) }
    }

    fn cuDevResourceGenerateDesc(description: OutPtr<Handle>, resources: *const c_void, count: c_uint) {
        if resources.is_null() || count == 0 {
            return Err(Status::InvalidValue);
        }
        description.set(state::lock()?.new_handle())
    }

    fn cuGreenCtxCreate(context: OutPtr<Handle>, resources: Handle, device: Device, flags: c_uint) {
        // CU_GREEN_CTX_DEFAULT_STREAM
        if flags != 1 {
            return Err(Status::InvalidValue);
        }
        create_green(context, resources, device)
    }

    fn cuGreenCtxDestroy(context: Handle) { destroy_green(context) }

    fn cuCtxAttach(context: OutPtr<Handle>, flags: c_uint) {
        context.check()?;
        if flags != 0 {
            return Err(Status::InvalidValue);
        }
        with_current(|context| {
            context.attached += 1;
            Ok(())
        })?;
        context.set(current().ok_or(Status::InvalidContext)?)
    }

    fn cuCtxDetach(context: Handle) { detach(context) }
    fn cuCtxDestroy(context: Handle) { end(context) }
    fn cuCtxDestroy_v2(context: Handle) { end(context) }
    fn cuCtxPushCurrent(context: Handle) { push(context) }
    fn cuCtxPushCurrent_v2(context: Handle) { push(context) }
    fn cuCtxPopCurrent(context: OutPtr<Handle>) { pop(context) }
    fn cuCtxPopCurrent_v2(context: OutPtr<Handle>) { pop(context) }

    fn cuCtxSetCurrent(context: Handle) {
        let state = state::lock()?;
        if context != Handle::NULL {
            check_handle(&state, context)?;
        }
        change_stack(|stack| {
            stack.pop();
            if context != Handle::NULL {
                stack.push(context);
            }
        })
    }

    fn cuCtxGetCurrent(context: OutPtr<Handle>) {
        driver::machine()?;
        context.set(current().unwrap_or(Handle::NULL))
    }

    fn cuCtxGetDevice(device: OutPtr<Device>) { device.set(Device::of(gpu_of(Handle::NULL)?)) }

    fn cuCtxGetDevice_v2(device: OutPtr<Device>, context: Handle) {
        device.set(Device::of(gpu_of(context)?))
    }

    fn cuCtxGetFlags(flags: OutPtr<c_uint>) { flags.set(with_current(|context| Ok(context.flags))?) }

    fn cuCtxGetId(context: Handle, id: OutPtr<u64>) {
        let context = if context == Handle::NULL { current().ok_or(Status::InvalidContext)? } else { context };
        let state = state::lock()?;
        id.set(state.contexts.get(&context).ok_or(Status::InvalidContext)?.id)
    }

    fn cuCtxGetApiVersion(context: Handle, version: OutPtr<c_uint>) {
        let context = if context == Handle::NULL { current().ok_or(Status::InvalidContext)? } else { context };
        check_alive(&*state::lock()?, context)?;
        version.set(API_VERSION)
    }

    fn cuCtxSynchronize() { synchronize(current_gpu) }

    fn cuCtxSynchronize_v2(context: Handle) {
        let gpu = gpu_of(context)?;
        synchronize(|_| Ok(gpu))
    }

    fn cuCtxGetLimit(value: OutPtr<usize>, limit: c_uint) {
        let limits = with_current(|context| Ok(context.limits))?;
        value.set(match (limits.get(limit as usize), limit) {
            (Some(bytes), _) => *bytes as usize,
            // Depth and number of launches of kernels by kernels, fetches and persistence of the
            // L2 cache, sizes of rings.
            (None, 3) => 2,
            (None, 4) => 2048,
            (None, 5) => 128,
            (None, 6..=9) => 0,
            _ => return Err(Status::InvalidValue),
        })
    }

    fn cuCtxSetLimit(limit: c_uint, value: usize) { set_limit(limit as usize, value as u64) }

    fn cuCtxGetCacheConfig(config: OutPtr<c_uint>) { with_current(|_| config.set(0)) }

    fn cuCtxSetCacheConfig(config: c_uint) {
        with_current(|_| if config <= 3 { Ok(()) } else { Err(Status::InvalidValue) })
    }

    fn cuCtxGetStreamPriorityRange(least: OutPtr<c_int>, greatest: OutPtr<c_int>) {
        with_current(|_| Ok(()))?;
        least.set_unless_null(0);
        greatest.set_unless_null(crate::stream::HIGHEST_PRIORITY);
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
