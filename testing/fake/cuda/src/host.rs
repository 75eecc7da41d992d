//! Host memory that the GPU knows: really there, not pinned.

use std::collections::HashMap;
use std::ffi::{c_uint, c_void};
use std::sync::{Mutex, PoisonError};

use crate::abi::{Answer, Out, export};
use crate::driver;
use crate::status::Status;

/// Length of each piece of host memory that the driver made or was told of.
static PIECES: Mutex<Option<HashMap<u64, Piece>>> = Mutex::new(None);

#[derive(Debug, Clone, Copy)]
struct Piece {
    bytes: u64,
    flags: c_uint,
    ours: bool,
}

/// Takes zeroed host memory that costs nothing until it is touched.
pub(crate) fn map(bytes: u64) -> Answer<u64> {
    let length = usize::try_from(bytes).map_err(|_| Status::OutOfMemory)?;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: a new anonymous mapping at a place of the kernel's choice.
    let address = unsafe {
        libc::mmap(std::ptr::null_mut(), length, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0)
    };
    if address == libc::MAP_FAILED { Err(Status::OutOfMemory) } else { Ok(address as u64) }
}

/// Gives back what [`map`] gave.
pub(crate) fn unmap(address: u64, bytes: u64) {
    // SAFETY: the caller got exactly this from `map` and forgets it now.
    unsafe { libc::munmap(address as *mut c_void, bytes as usize) };
}

fn with_pieces<T>(use_them: impl FnOnce(&mut HashMap<u64, Piece>) -> Answer<T>) -> Answer<T> {
    driver::machine()?;
    let mut pieces = PIECES.lock().unwrap_or_else(PoisonError::into_inner);
    use_them(pieces.get_or_insert_with(HashMap::new))
}

fn allocate(out: Out<u64>, bytes: usize, flags: c_uint) -> Answer {
    out.check()?;
    if bytes == 0 {
        return Err(Status::InvalidValue);
    }
    with_pieces(|pieces| {
        let address = map(bytes as u64)?;
        pieces.insert(address, Piece { bytes: bytes as u64, flags, ours: true });
        out.set(address)
    })
}

fn register(address: u64, bytes: usize, flags: c_uint) -> Answer {
    if address == 0 || bytes == 0 {
        return Err(Status::InvalidValue);
    }
    with_pieces(|pieces| {
        pieces.entry(address).or_insert(Piece { bytes: bytes as u64, flags, ours: false });
        Ok(())
    })
}

fn forget(address: u64, ours: bool) -> Answer {
    with_pieces(|pieces| {
        let piece = pieces.get(&address).copied().filter(|piece| piece.ours == ours);
        let piece = piece.ok_or(Status::InvalidValue)?;
        pieces.remove(&address);
        if ours {
            unmap(address, piece.bytes);
        }
        Ok(())
    })
}

export! {
    fn cuMemAllocHost(pointer: Out<u64>, bytes: c_uint) { allocate(pointer, bytes as usize, 0) }
    fn cuMemAllocHost_v2(pointer: Out<u64>, bytes: usize) { allocate(pointer, bytes, 0) }
    fn cuMemHostAlloc(pointer: Out<u64>, bytes: usize, flags: c_uint) { allocate(pointer, bytes, flags) }
    fn cuMemFreeHost(pointer: u64) { forget(pointer, true) }
    fn cuMemHostRegister_v2(pointer: u64, bytes: usize, flags: c_uint) { register(pointer, bytes, flags) }
    fn cuMemHostUnregister(pointer: u64) { forget(pointer, false) }

    fn cuMemHostGetDevicePointer_v2(device: Out<u64>, host: u64, flags: c_uint) {
        if flags != 0 {
            return Err(Status::InvalidValue);
        }
        // One address space: host memory is at the same address for the GPU.
        with_pieces(|pieces| if pieces.contains_key(&host) { Ok(()) } else { Err(Status::InvalidValue) })?;
        device.set(host)
    }

    fn cuMemHostGetFlags(flags: Out<c_uint>, host: u64) {
        let piece = with_pieces(|pieces| pieces.get(&host).copied().ok_or(Status::InvalidValue))?;
        flags.set(piece.flags)
    }
}
