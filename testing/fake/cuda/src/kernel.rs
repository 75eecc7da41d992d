//! Attributes of functions and kernels, and how many of their blocks fit on a multiprocessor.

use std::ffi::{c_int, c_uint, c_void};

use crate::abi::{CuResult, OutPtr, export};
use crate::device::Device;
use crate::driver;
use crate::state::{self, Handle};
use crate::status::Status;

/// Maximum threads of a block.
pub(crate) const MAX_THREADS: c_int = 1024;

/// Threads that are resident on a multiprocessor at once.
const RESIDENT_THREADS: c_int = 2048;

/// Shared memory of a multiprocessor that a block may use, in bytes.
const SHARED_BYTES: usize = 227 << 10;

fn check(function: Handle) -> CuResult {
    state::lock()?.functions.get(&function).map(drop).ok_or(Status::InvalidHandle)
}

/// Returns an attribute (`CUfunction_attribute`) of a function that is compiled for the first GPU.
fn attribute(which: c_int, function: Handle) -> CuResult<c_int> {
    check(function)?;
    let machine = driver::machine()?;
    let capability = machine.world().gpus[0].model.compute_capability;
    match which {
        // Threads of a block; registers of a thread; versions of PTX and of the code.
        0 => Ok(MAX_THREADS),
        4 => Ok(32),
        5 | 6 => Ok((capability.major * 10 + capability.minor).cast_signed()),
        // Bytes of memory, or flags that are not set; a carveout that is not chosen is -1.
        9 => Ok(-1),
        1..=16 => Ok(0),
        _ => Err(Status::InvalidValue),
    }
}

/// Returns the number of blocks of so many threads that fit on a multiprocessor.
pub(crate) fn resident_blocks(threads: u64) -> u64 {
    (RESIDENT_THREADS.unsigned_abs() as u64 / threads.max(1)).clamp(1, 32)
}

fn active_blocks(blocks: OutPtr<c_int>, function: Handle, threads: c_int) -> CuResult {
    check(function)?;
    if threads <= 0 || threads > MAX_THREADS {
        return Err(Status::InvalidValue);
    }
    blocks.set(resident_blocks(threads.unsigned_abs().into()) as c_int)
}

export! {
    fn cuFuncGetAttribute(value: OutPtr<c_int>, which: c_int, function: Handle) {
        value.set(attribute(which, function)?)
    }

    fn cuFuncSetAttribute(function: Handle, which: c_int, value: c_int) {
        let _ = (which, value);
        check(function)
    }

    fn cuFuncSetCacheConfig(function: Handle, config: c_int) {
        let _ = config;
        check(function)
    }

    fn cuKernelGetAttribute(value: OutPtr<c_int>, which: c_int, kernel: Handle, device: Device) {
        crate::device::gpu(device)?;
        value.set(attribute(which, kernel)?)
    }

    fn cuKernelSetAttribute(which: c_int, value: c_int, kernel: Handle, device: Device) {
        let _ = (which, value);
        crate::device::gpu(device)?;
        check(kernel)
    }

    fn cuKernelSetCacheConfig(kernel: Handle, config: c_int, device: Device) {
        let _ = config;
        crate::device::gpu(device)?;
        check(kernel)
    }

    fn cuFuncIsLoaded(loaded: OutPtr<c_int>, function: Handle) {
        check(function)?;
        loaded.set(1)
    }

    fn cuFuncLoad(function: Handle) { check(function) }

    fn cuOccupancyMaxActiveBlocksPerMultiprocessor(
        blocks: OutPtr<c_int>,
        function: Handle,
        threads: c_int,
        shared_bytes: usize,
    ) {
        let _ = shared_bytes;
        active_blocks(blocks, function, threads)
    }

    fn cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
        blocks: OutPtr<c_int>,
        function: Handle,
        threads: c_int,
        shared_bytes: usize,
        flags: c_uint,
    ) {
        let _ = (shared_bytes, flags);
        active_blocks(blocks, function, threads)
    }

    fn cuOccupancyMaxPotentialBlockSize(
        least_blocks: OutPtr<c_int>,
        threads: OutPtr<c_int>,
        function: Handle,
        shared_bytes_of: *const c_void,
        shared_bytes: usize,
        limit: c_int,
    ) {
        let _ = (shared_bytes_of, shared_bytes);
        check(function)?;
        let best = if limit > 0 { limit.min(MAX_THREADS) } else { MAX_THREADS };
        let multiprocessors = driver::machine()?.world().gpus[0].model.multiprocessors;
        least_blocks.set(c_int::try_from(multiprocessors).unwrap_or(c_int::MAX) * (RESIDENT_THREADS / best))?;
        threads.set(best)
    }

    fn cuOccupancyMaxActiveClusters(clusters: OutPtr<c_int>, function: Handle, config: *const c_void) {
        check(function)?;
        if config.is_null() {
            return Err(Status::InvalidValue);
        }
        clusters.set(c_int::try_from(driver::machine()?.world().gpus[0].model.multiprocessors).unwrap_or(1))
    }

    fn cuOccupancyMaxPotentialClusterSize(size: OutPtr<c_int>, function: Handle, config: *const c_void) {
        check(function)?;
        if config.is_null() {
            return Err(Status::InvalidValue);
        }
        size.set(8)
    }

    fn cuOccupancyAvailableDynamicSMemPerBlock(
        bytes: OutPtr<usize>,
        function: Handle,
        blocks: c_int,
        threads: c_int,
    ) {
        check(function)?;
        if blocks <= 0 || threads <= 0 {
            return Err(Status::InvalidValue);
        }
        bytes.set(SHARED_BYTES / blocks as usize)
    }
}
