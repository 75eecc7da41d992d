//! Stream-ordered memory. Charged when it is asked for and given back when the free is queued: what a pool keeps for later is
//! not counted yet.

use core::ffi::c_int;

use crate::charge::{charge, discharged};
use crate::cuda::{self, Device, Handle, OUT_OF_MEMORY, Pointer, SUCCESS};
use crate::route::hooks;
use crate::state::Kind;

/// Takes from a pool. Which GPU that lies on shows afterwards: then another grant may have to pay.
fn take(bytes: usize, out: *mut Pointer, real: impl FnOnce() -> c_int, free: impl Fn(Pointer)) -> c_int {
    let device = cuda::current_device();
    let first = match charge(device, bytes as u64) {
        Ok(charge) => charge,
        // SAFETY: the driver was content and has written there.
        Err(refusal) => return refusal.answer(real, || free(unsafe { out.read_unaligned() })),
    };
    let result = real();
    if result != SUCCESS {
        first.undo();
        return result;
    }
    // SAFETY: the driver was content and has written there.
    let pointer = unsafe { out.read_unaligned() };
    let elsewhere: Option<Device> = cuda::device_of(pointer).filter(|there| Some(*there) != device);
    let payer = match elsewhere {
        None => Ok(first),
        Some(there) => {
            first.undo();
            charge(Some(there), bytes as u64)
        }
    };
    let context = cuda::current_context().unwrap_or(0);
    match payer.and_then(|charge| charge.keep(Kind::Pointer, pointer, context)) {
        Ok(()) => SUCCESS,
        Err(_) => {
            free(pointer);
            OUT_OF_MEMORY
        }
    }
}

hooks! {
    fn cuMemAllocAsync(out: *mut Pointer, bytes: usize, stream: Handle) |real| {
        // SAFETY: the program's own call.
        take(bytes, out, || unsafe { real(out, bytes, stream) }, cuda::free)
    }

    fn cuMemAllocAsync_ptsz(out: *mut Pointer, bytes: usize, stream: Handle) |real| {
        // SAFETY: the program's own call.
        take(bytes, out, || unsafe { real(out, bytes, stream) }, cuda::free)
    }

    fn cuMemAllocFromPoolAsync(out: *mut Pointer, bytes: usize, pool: Handle, stream: Handle) |real| {
        // SAFETY: the program's own call.
        take(bytes, out, || unsafe { real(out, bytes, pool, stream) }, cuda::free)
    }

    fn cuMemAllocFromPoolAsync_ptsz(out: *mut Pointer, bytes: usize, pool: Handle, stream: Handle) |real| {
        // SAFETY: the program's own call.
        take(bytes, out, || unsafe { real(out, bytes, pool, stream) }, cuda::free)
    }

    fn cuMemFreeAsync(pointer: Pointer, stream: Handle) |real| {
        // SAFETY: the program's own call.
        discharged(Kind::Pointer, pointer, || unsafe { real(pointer, stream) })
    }

    fn cuMemFreeAsync_ptsz(pointer: Pointer, stream: Handle) |real| {
        // SAFETY: the program's own call.
        discharged(Kind::Pointer, pointer, || unsafe { real(pointer, stream) })
    }
}
