//! Stream-ordered memory from pools. A pool charges GPU memory in chunks and keeps freed memory
//! until the program synchronises with the GPU or trims the pool. It then releases whole chunks
//! beyond its threshold. When the GPU is full, every pool of the process releases its free chunks.

use std::ffi::{c_int, c_uint, c_void};

use crate::abi::{CuResult, InPtr, OutPtr, export};
use crate::allocation::{AllocationKind, charge, refund, rounded};
use crate::capture;
use crate::context::current;
use crate::device::{Device, gpu};
use crate::graph::NodeKind;
use crate::state::{self, Handle, State};
use crate::status::Status;
use crate::stream;
use crate::timeline;

/// A memory pool.
#[derive(Debug, Default)]
pub(crate) struct Pool {
    /// GPU; `None` for host or managed memory, which is not accounted.
    gpu: Option<usize>,
    /// Set for managed memory: true if its preferred location is the host.
    managed: Option<bool>,
    default: bool,
    /// The pool was destroyed, and exists until the last of its allocations is freed.
    destroyed: bool,
    /// Bytes that it keeps at a synchronisation.
    release_threshold: u64,
    /// Bytes charged to the pool, and the allocated part of them.
    reserved: u64,
    used: u64,
    /// Freed bytes whose stream has not reached the free, with its end time.
    returning: Vec<(u64, u64)>,
    reserved_high: u64,
    used_high: u64,
}

/// Size by which a pool grows and shrinks.
const CHUNK: u64 = 32 << 20;

/// Start of `CUmemPoolProps`; the rest of its 88 bytes is ignored.
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
/// `CU_MEM_LOCATION_TYPE_HOST` to `..._HOST_NUMA_CURRENT`.
const ON_HOST: std::ops::RangeInclusive<c_int> = 2..=4;
/// `CU_MEM_LOCATION_TYPE_DEVICE_LOCALITY_DOMAIN`: the lowest byte is the device.
const ON_DOMAIN: c_int = 6;
/// A type that no cuda.h defines, as in a driver that is newer than the interceptor.
const ON_UNKNOWN_TYPE: c_int = 7;

/// `CU_MEM_ALLOCATION_TYPE_MANAGED`.
const MANAGED: c_int = 2;

/// Returns the GPU of new memory; `None` for the host.
pub(crate) fn location(kind: c_int, location: c_int) -> CuResult<Option<usize>> {
    match kind {
        ON_DEVICE | ON_UNKNOWN_TYPE => Ok(Some(gpu(Device::at(location))?)),
        ON_DOMAIN => Ok(Some(gpu(Device::at(location & 0xff))?)),
        kind if ON_HOST.contains(&kind) => Ok(None),
        _ => Err(Status::InvalidValue),
    }
}

/// Pool attributes.
const RELEASE_THRESHOLD: c_int = 4;
const RESERVED_NOW: c_int = 5;
const RESERVED_HIGH: c_int = 6;
const USED_NOW: c_int = 7;
const USED_HIGH: c_int = 8;

impl Pool {
    /// Releases the free chunks but keeps `keep` bytes.
    fn shrink(&mut self, keep: u64) -> CuResult {
        let now = timeline::now();
        self.returning.retain(|(until, _)| *until > now);
        let held = self.used + self.returning.iter().map(|(_, bytes)| bytes).sum::<u64>();
        let target = held.max(keep.min(self.reserved)).next_multiple_of(CHUNK);
        let Some(less) = self.reserved.checked_sub(target) else { return Ok(()) };
        self.reserved = target;
        self.gpu.map_or(Ok(()), |gpu| refund(gpu, less))
    }
}

impl State {
    /// Charges GPU memory to a pool if it has too little.
    fn grow(&mut self, handle: Handle, bytes: u64) -> CuResult {
        let pool = self.pools.get(&handle).ok_or(Status::InvalidValue)?;
        let wanted =
            pool.used.checked_add(bytes).and_then(|bytes| bytes.checked_next_multiple_of(CHUNK));
        let wanted = wanted.ok_or(Status::OutOfMemory)?.max(pool.reserved);
        let more = wanted - pool.reserved;
        if let Some(gpu) = pool.gpu {
            self.charge(gpu, more)?;
        }
        let pool = self.pools.get_mut(&handle).ok_or(Status::InvalidValue)?;
        // Not `wanted`: the pool may have shrunk while memory was charged.
        pool.reserved += more;
        pool.used += bytes;
        pool.reserved_high = pool.reserved_high.max(pool.reserved);
        pool.used_high = pool.used_high.max(pool.used);
        Ok(())
    }

    /// Charges memory of a GPU. If it is full, pools release their free chunks first.
    pub(crate) fn charge(&mut self, gpu: usize, bytes: u64) -> CuResult {
        if charge(gpu, bytes).is_ok() {
            return Ok(());
        }
        self.pools
            .values_mut()
            .filter(|pool| pool.gpu == Some(gpu))
            .try_for_each(|pool| pool.shrink(0))?;
        charge(gpu, bytes)
    }

    /// Returns an allocation to its pool.
    pub(crate) fn return_to_pool(&mut self, handle: Handle, bytes: u64) -> CuResult {
        let Some(pool) = self.pools.get_mut(&handle) else { return Ok(()) };
        pool.used -= bytes;
        if !pool.destroyed || pool.used > 0 {
            return Ok(());
        }
        pool.returning.clear();
        pool.shrink(0)?;
        self.pools.remove(&handle);
        Ok(())
    }

    /// Shrinks all pools after a synchronisation.
    pub(crate) fn shrink_pools(&mut self) -> CuResult {
        self.pools.values_mut().try_for_each(|pool| pool.shrink(pool.release_threshold))
    }

    /// Frees the memory of a GPU's pools when its last context is destroyed.
    pub(crate) fn release_pools_of(&mut self, gpu: usize) -> CuResult {
        let pools = &self.pools;
        let of_gpu = |kind: AllocationKind| match kind {
            AllocationKind::Pool(pool) => {
                pools.get(&pool).is_some_and(|pool| pool.gpu == Some(gpu))
            }
            AllocationKind::Graph(_) => true,
            _ => false,
        };
        let freed = self.allocations.iter().filter(|(_, allocation)| of_gpu(allocation.kind));
        for address in freed.map(|(address, _)| *address).collect::<Vec<_>>() {
            self.free(address)?;
        }
        for pool in self.pools.values_mut().filter(|pool| pool.gpu == Some(gpu)) {
            pool.returning.clear();
            pool.shrink(0)?;
        }
        self.trim_graphs(gpu)?;
        self.reset_addresses(gpu);
        Ok(())
    }
}

fn default_pool(state: &mut State, gpu: usize) -> Handle {
    let known = state
        .pools
        .iter()
        .find(|(_, pool)| pool.gpu == Some(gpu) && pool.default)
        .map(|(pool, _)| *pool);
    known.unwrap_or_else(|| {
        let handle = state.new_handle();
        state.pools.insert(handle, Pool { gpu: Some(gpu), default: true, ..Pool::default() });
        handle
    })
}

fn current_pool(state: &mut State, gpu: usize) -> Handle {
    match state.current_pools.get(&gpu) {
        Some(pool) => *pool,
        None => default_pool(state, gpu),
    }
}

fn allocate(out: OutPtr<u64>, bytes: usize, pool: Option<Handle>, on: Handle) -> CuResult {
    out.check()?;
    let mut state = state::lock()?;
    let gpu = stream::gpu_of(&state, on)?;
    if state.streams.get(&on).is_some_and(|stream| stream.capture.is_some()) {
        let (node, address) = state.alloc_node(gpu, bytes as u64)?;
        state.capture_node(on, node)?;
        return out.set(address);
    }
    let pool = pool.unwrap_or_else(|| current_pool(&mut state, gpu));
    let own = state.pools.get(&pool).filter(|pool| !pool.destroyed).ok_or(Status::InvalidValue)?;
    let kind = match (own.gpu, own.managed) {
        (Some(_), _) => AllocationKind::Pool(pool),
        (None, Some(on_host)) => AllocationKind::ManagedPool { pool, on_host },
        (None, None) => AllocationKind::HostPool(pool),
    };
    let gpu = own.gpu.unwrap_or(gpu);
    let context = current().ok_or(Status::InvalidContext)?;
    state.grow(
        pool,
        rounded(bytes as u64).filter(|bytes| *bytes > 0).ok_or(Status::InvalidValue)?,
    )?;
    out.set(state.allocate(gpu, context, bytes as u64, kind)?)
}

export! {
    fn cuMemAllocAsync(pointer: OutPtr<u64>, bytes: usize, on: Handle) { allocate(pointer, bytes, None, on) }

    fn cuMemAllocFromPoolAsync(pointer: OutPtr<u64>, bytes: usize, pool: Handle, on: Handle) {
        allocate(pointer, bytes, Some(pool), on)
    }

    fn cuMemFreeAsync(pointer: u64, on: Handle) {
        let mut state = state::lock()?;
        stream::gpu_of(&state, on)?;
        if state.capture_node(on, NodeKind::Free { address: pointer })?.is_some() {
            return Ok(());
        }
        let until = stream::end_of(&state, on)?;
        let of_pool = state.allocations.get(&pointer).and_then(|allocation| match allocation.kind {
            AllocationKind::Pool(pool) => Some((pool, allocation.bytes)),
            _ => None,
        });
        if let Some((pool, bytes)) = of_pool
            && let Some(pool) = state.pools.get_mut(&pool)
        {
            pool.returning.push((until, rounded(bytes).unwrap_or(0)));
        }
        if pointer == 0 { Err(Status::InvalidValue) } else { state.free(pointer) }
    }

    fn cuMemPoolCreate(pool: OutPtr<Handle>, properties: InPtr<Properties>) {
        pool.check()?;
        let Properties { kind, handle_types, location_type, location } = properties.get()?;
        // Pinned, and not shared or shared through descriptors; or managed.
        let managed = match (kind, handle_types) {
            (1, 0 | 1) => None,
            (MANAGED, 0) if location_type == 0 => Some(false),
            (MANAGED, 0) => Some(ON_HOST.contains(&location_type)),
            _ => return Err(Status::NotSupported),
        };
        let gpu = match managed {
            Some(_) => None,
            None => self::location(location_type, location)?,
        };
        let mut state = state::lock()?;
        let handle = state.new_handle();
        state.pools.insert(handle, Pool { gpu, managed, ..Pool::default() });
        pool.set(handle)
    }

    fn cuMemPoolDestroy(pool: Handle) {
        let mut state = state::lock()?;
        let known = state.pools.get_mut(&pool).filter(|pool| !pool.default && !pool.destroyed);
        known.ok_or(Status::InvalidValue)?.destroyed = true;
        // Nothing is freed: the pool is removed if it has no allocations.
        state.return_to_pool(pool, 0)?;
        state.current_pools.retain(|_, current| *current != pool);
        Ok(())
    }

    fn cuMemPoolTrimTo(pool: Handle, keep: usize) {
        let mut state = state::lock()?;
        capture::check_unsafe(&mut state)?;
        state.pools.get_mut(&pool).ok_or(Status::InvalidValue)?.shrink(keep as u64)
    }

    fn cuMemPoolGetAttribute(pool: Handle, attribute: c_int, value: *mut c_void) {
        let state = state::lock()?;
        let pool = state.pools.get(&pool).filter(|pool| !pool.destroyed).ok_or(Status::InvalidValue)?;
        // The first three are flags for reuse, which is not modelled; the others are 64-bit sizes.
        match attribute {
            1..=3 => OutPtr::<c_int>::from(value).set(1),
            RELEASE_THRESHOLD => OutPtr::<u64>::from(value).set(pool.release_threshold),
            RESERVED_NOW => OutPtr::<u64>::from(value).set(pool.reserved),
            RESERVED_HIGH => OutPtr::<u64>::from(value).set(pool.reserved_high),
            USED_NOW => OutPtr::<u64>::from(value).set(pool.used),
            USED_HIGH => OutPtr::<u64>::from(value).set(pool.used_high),
            _ => Err(Status::InvalidValue),
        }
    }

    fn cuMemPoolSetAttribute(pool: Handle, attribute: c_int, value: InPtr<u64>) {
        let mut state = state::lock()?;
        let pool = state.pools.get_mut(&pool).ok_or(Status::InvalidValue)?;
        match attribute {
            1..=3 | RESERVED_HIGH | USED_HIGH => Ok(()),
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

    fn cuMemPoolGetAccess(flags: OutPtr<c_uint>, pool: Handle, location: *const c_void) {
        let _ = location;
        state::lock()?.pools.get(&pool).ok_or(Status::InvalidValue)?;
        // Read and write.
        flags.set(3)
    }

    fn cuDeviceGetDefaultMemPool(pool: OutPtr<Handle>, device: Device) {
        let gpu = gpu(device)?;
        pool.set(default_pool(&mut *state::lock()?, gpu))
    }

    fn cuDeviceGetMemPool(pool: OutPtr<Handle>, device: Device) {
        let gpu = gpu(device)?;
        pool.set(current_pool(&mut *state::lock()?, gpu))
    }

    fn cuDeviceSetMemPool(device: Device, pool: Handle) {
        let gpu = gpu(device)?;
        let mut state = state::lock()?;
        if state.pools.get(&pool).is_none_or(|pool| pool.gpu != Some(gpu)) {
            return Err(Status::InvalidValue);
        }
        state.current_pools.insert(gpu, pool);
        Ok(())
    }
}
