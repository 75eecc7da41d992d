//! Host memory that is known to the GPU. It is real, but not pinned.

use std::collections::HashMap;
use std::ffi::{c_uint, c_void};
use std::sync::{Mutex, PoisonError};

use crate::abi::{CuResult, OutPtr, export};
use crate::driver;
use crate::status::Status;

/// Host memory that the driver allocated or that was registered, by address.
static HOST_MEMORY: Mutex<Option<HashMap<u64, HostMemory>>> = Mutex::new(None);

#[derive(Debug, Clone, Copy)]
struct HostMemory {
    bytes: u64,
    flags: c_uint,
    is_allocated: bool,
}

/// Maps zeroed host memory, which uses no physical memory until it is touched.
pub(crate) fn map(bytes: u64) -> CuResult<u64> {
    let length = usize::try_from(bytes).map_err(|_| Status::OutOfMemory)?;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: a new anonymous mapping at an address of the kernel's choice.
    let address = unsafe {
        libc::mmap(std::ptr::null_mut(), length, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0)
    };
    if address == libc::MAP_FAILED { Err(Status::OutOfMemory) } else { Ok(address as u64) }
}

/// Unmaps memory of [`map`].
pub(crate) fn unmap(address: u64, bytes: u64) {
    // SAFETY: the caller got this range from `map` and no longer uses it.
    unsafe { libc::munmap(address as *mut c_void, bytes as usize) };
}

fn with_host_memory<T>(
    operation: impl FnOnce(&mut HashMap<u64, HostMemory>) -> CuResult<T>,
) -> CuResult<T> {
    driver::machine()?;
    let mut memories = HOST_MEMORY.lock().unwrap_or_else(PoisonError::into_inner);
    operation(memories.get_or_insert_with(HashMap::new))
}

fn allocate(out: OutPtr<u64>, bytes: usize, flags: c_uint) -> CuResult {
    out.check()?;
    if bytes == 0 {
        return Err(Status::InvalidValue);
    }
    with_host_memory(|memories| {
        let address = map(bytes as u64)?;
        memories.insert(address, HostMemory { bytes: bytes as u64, flags, is_allocated: true });
        out.set(address)
    })
}

fn register(address: u64, bytes: usize, flags: c_uint) -> CuResult {
    if address == 0 || bytes == 0 {
        return Err(Status::InvalidValue);
    }
    with_host_memory(|memories| {
        memories.entry(address).or_insert(HostMemory {
            bytes: bytes as u64,
            flags,
            is_allocated: false,
        });
        Ok(())
    })
}

fn release(address: u64, is_allocated: bool) -> CuResult {
    with_host_memory(|memories| {
        let memory =
            memories.get(&address).copied().filter(|memory| memory.is_allocated == is_allocated);
        let memory = memory.ok_or(Status::InvalidValue)?;
        memories.remove(&address);
        if is_allocated {
            unmap(address, memory.bytes);
        }
        Ok(())
    })
}

/// Returns address and bytes of the known host memory at an address.
pub(crate) fn at(address: u64) -> CuResult<Option<(u64, u64)>> {
    with_host_memory(|memories| {
        let contains = |(start, memory): &(&u64, &HostMemory)| {
            address.checked_sub(**start).is_some_and(|offset| offset < memory.bytes)
        };
        Ok(memories.iter().find(contains).map(|(start, memory)| (*start, memory.bytes)))
    })
}

/// Returns true if a range is host memory that is known to the GPU.
pub(crate) fn is_known(address: u64, bytes: u64) -> CuResult<bool> {
    with_host_memory(|memories| {
        let contains = |(start, memory): (&u64, &HostMemory)| {
            let inside = address.checked_sub(*start).and_then(|offset| offset.checked_add(bytes));
            inside.is_some_and(|end| end <= memory.bytes)
        };
        Ok(memories.iter().any(contains))
    })
}

export! {
    fn cuMemAllocHost(pointer: OutPtr<u64>, bytes: c_uint) { allocate(pointer, bytes as usize, 0) }
    fn cuMemAllocHost_v2(pointer: OutPtr<u64>, bytes: usize) { allocate(pointer, bytes, 0) }
    fn cuMemHostAlloc(pointer: OutPtr<u64>, bytes: usize, flags: c_uint) { allocate(pointer, bytes, flags) }
    fn cuMemFreeHost(pointer: u64) { release(pointer, true) }
    fn cuMemHostRegister_v2(pointer: u64, bytes: usize, flags: c_uint) { register(pointer, bytes, flags) }
    fn cuMemHostUnregister(pointer: u64) { release(pointer, false) }

    fn cuMemHostGetDevicePointer_v2(device: OutPtr<u64>, host: u64, flags: c_uint) {
        if flags != 0 {
            return Err(Status::InvalidValue);
        }
        // Unified addressing: host memory has the same address on the GPU.
        with_host_memory(|memories| if memories.contains_key(&host) { Ok(()) } else { Err(Status::InvalidValue) })?;
        device.set(host)
    }

    fn cuMemHostGetFlags(flags: OutPtr<c_uint>, host: u64) {
        let memory = with_host_memory(|memories| memories.get(&host).copied().ok_or(Status::InvalidValue))?;
        flags.set(memory.flags)
    }
}
