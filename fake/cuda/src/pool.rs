//! Stream-ordered memory, from pools. A pool keeps nothing: what is freed goes back at once.

use std::ffi::{c_int, c_uint, c_void};

use crate::abi::{Answer, In, Out, export};
use crate::allocation::Kind;
use crate::context::current;
use crate::device::{Device, gpu};
use crate::state::{self, Handle, State};
use crate::status::Status;
use crate::stream;

/// A memory pool.
#[derive(Debug)]
pub(crate) struct Pool {
    gpu: usize,
    default: bool,
    /// Bytes that it may keep; reported, without effect.
    release_threshold: u64,
}

/// The beginning of `CUmemPoolProps`; the rest of its 88 bytes is not looked at.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Properties {
    kind: c_int,
    handle_types: c_int,
    location_type: c_int,
    location: c_int,
}

/// `CU_MEM_LOCATION_TYPE_DEVICE`.
pub(crate) const ON_DEVICE: c_int = 1;

/// Attributes of a pool.
const RELEASE_THRESHOLD: c_int = 4;
const RESERVED_NOW: c_int = 5;
const USED_HIGH: c_int = 8;

fn default_pool(state: &mut State, gpu: usize) -> Handle {
    let known = state.pools.iter().find(|(_, pool)| pool.gpu == gpu && pool.default).map(|(pool, _)| *pool);
    known.unwrap_or_else(|| {
        let handle = state.new_handle();
        state.pools.insert(handle, Pool { gpu, default: true, release_threshold: 0 });
        handle
    })
}

fn current_pool(state: &mut State, gpu: usize) -> Handle {
    match state.current_pools.get(&gpu) {
        Some(pool) => *pool,
        None => default_pool(state, gpu),
    }
}

fn used(state: &State, pool: Handle) -> u64 {
    let of_pool = state.allocations.values().filter(|allocation| allocation.kind == Kind::Pool(pool));
    of_pool.map(|allocation| allocation.bytes).sum()
}

fn allocate(out: Out<u64>, bytes: usize, pool: Option<Handle>, on: Handle) -> Answer {
    out.check()?;
    let mut state = state::lock()?;
    let gpu = stream::gpu_of(&state, on)?;
    let pool = pool.unwrap_or_else(|| current_pool(&mut state, gpu));
    let gpu = state.pools.get(&pool).ok_or(Status::InvalidValue)?.gpu;
    let context = current().ok_or(Status::InvalidContext)?;
    out.set(state.allocate(gpu, context, bytes as u64, Kind::Pool(pool))?)
}

export! {
    fn cuMemAllocAsync(pointer: Out<u64>, bytes: usize, on: Handle) { allocate(pointer, bytes, None, on) }

    fn cuMemAllocFromPoolAsync(pointer: Out<u64>, bytes: usize, pool: Handle, on: Handle) {
        allocate(pointer, bytes, Some(pool), on)
    }

    fn cuMemFreeAsync(pointer: u64, on: Handle) {
        let mut state = state::lock()?;
        stream::gpu_of(&state, on)?;
        if pointer == 0 { Err(Status::InvalidValue) } else { state.free(pointer) }
    }

    fn cuMemPoolCreate(pool: Out<Handle>, properties: In<Properties>) {
        pool.check()?;
        let Properties { kind, handle_types, location_type, location } = properties.get()?;
        // Pinned, not to be shared with other processes, on a GPU.
        if (kind, handle_types, location_type) != (1, 0, ON_DEVICE) {
            return Err(Status::NotSupported);
        }
        let gpu = gpu(Device::at(location))?;
        let mut state = state::lock()?;
        let handle = state.new_handle();
        state.pools.insert(handle, Pool { gpu, default: false, release_threshold: 0 });
        pool.set(handle)
    }

    fn cuMemPoolDestroy(pool: Handle) {
        let mut state = state::lock()?;
        if state.pools.get(&pool).is_none_or(|pool| pool.default) {
            return Err(Status::InvalidValue);
        }
        state.pools.remove(&pool);
        state.current_pools.retain(|_, current| *current != pool);
        Ok(())
    }

    fn cuMemPoolTrimTo(pool: Handle, keep: usize) {
        let _ = keep;
        state::lock()?.pools.get(&pool).map(drop).ok_or(Status::InvalidValue)
    }

    fn cuMemPoolGetAttribute(pool: Handle, attribute: c_int, value: *mut c_void) {
        let state = state::lock()?;
        let threshold = state.pools.get(&pool).ok_or(Status::InvalidValue)?.release_threshold;
        // The first three are switches for reuse, which there is none of; the others are 64-bit sizes.
        match attribute {
            1..=3 => Out::<c_int>::from(value).set(1),
            RELEASE_THRESHOLD => Out::<u64>::from(value).set(threshold),
            RESERVED_NOW..=USED_HIGH => Out::<u64>::from(value).set(used(&state, pool)),
            _ => Err(Status::InvalidValue),
        }
    }

    fn cuMemPoolSetAttribute(pool: Handle, attribute: c_int, value: In<u64>) {
        let mut state = state::lock()?;
        let pool = state.pools.get_mut(&pool).ok_or(Status::InvalidValue)?;
        match attribute {
            1..=3 | 6 | USED_HIGH => Ok(()),
            RELEASE_THRESHOLD => {
                pool.release_threshold = value.get()?;
                Ok(())
            }
            _ => Err(Status::InvalidValue),
        }
    }

    fn cuMemPoolSetAccess(pool: Handle, access: *const c_void, count: usize) {
        let _ = (access, count);
        state::lock()?.pools.get(&pool).map(drop).ok_or(Status::InvalidValue)
    }

    fn cuMemPoolGetAccess(flags: Out<c_uint>, pool: Handle, location: *const c_void) {
        let _ = location;
        state::lock()?.pools.get(&pool).ok_or(Status::InvalidValue)?;
        // Read and write.
        flags.set(3)
    }

    fn cuDeviceGetDefaultMemPool(pool: Out<Handle>, device: Device) {
        let gpu = gpu(device)?;
        pool.set(default_pool(&mut *state::lock()?, gpu))
    }

    fn cuDeviceGetMemPool(pool: Out<Handle>, device: Device) {
        let gpu = gpu(device)?;
        pool.set(current_pool(&mut *state::lock()?, gpu))
    }

    fn cuDeviceSetMemPool(device: Device, pool: Handle) {
        let gpu = gpu(device)?;
        let mut state = state::lock()?;
        if state.pools.get(&pool).is_none_or(|pool| pool.gpu != gpu) {
            return Err(Status::InvalidValue);
        }
        state.current_pools.insert(gpu, pool);
        Ok(())
    }
}
