//! Plain memory: taken at once, given back at once.

use core::ffi::{c_int, c_uint};

use crate::charge::{charge, charged};
use crate::cuda::{self, OUT_OF_MEMORY, Pointer, SUCCESS};
use crate::pool::give_back;
use crate::route::hooks;
use crate::state::Kind;

/// Reads a result that the driver has just written.
///
/// # Safety
/// `out` is what the program gave the driver for its result, and the driver was content with it.
unsafe fn read<T: Copy + Into<u64>>(out: *const T) -> u64 {
    // SAFETY: by this function's contract; programs may keep results anywhere.
    if out.is_null() { 0 } else { unsafe { out.read_unaligned() }.into() }
}

/// The rows of pitched memory, as the driver is expected to lay them out.
fn expected_pitch(width: u64) -> u64 {
    /// The pitch alignment of all GPUs so far.
    const ALIGNMENT: u64 = 512;
    width.checked_next_multiple_of(ALIGNMENT).unwrap_or(u64::MAX)
}

/// Pitched memory: what it costs is known only afterwards.
fn pitched(
    width: u64,
    height: u64,
    take: impl FnOnce() -> c_int,
    taken: impl FnOnce() -> (u64, u64),
    give_back: impl Fn(u64),
) -> c_int {
    let expected = expected_pitch(width).saturating_mul(height);
    let charge = match charge(cuda::current_device(), expected) {
        Ok(charge) => charge,
        Err(refusal) => return refusal.answer(take, || give_back(taken().0)),
    };
    let result = take();
    if result != SUCCESS {
        charge.undo();
        return result;
    }
    let (pointer, pitch) = taken();
    let kept = charge
        .resize(pitch.saturating_mul(height))
        .and_then(|charge| charge.keep(Kind::Pointer, pointer, cuda::current_context().unwrap_or(0)));
    match kept {
        Ok(()) => SUCCESS,
        Err(_) => {
            give_back(pointer);
            OUT_OF_MEMORY
        }
    }
}

hooks! {
    fn cuMemAlloc_v2(out: *mut Pointer, bytes: usize) |real| {
        charged(
            bytes as u64,
            Kind::Pointer,
            // SAFETY: the program's own call.
            || unsafe { real(out, bytes) },
            // SAFETY: the driver has written there.
            || unsafe { read(out) },
            cuda::free,
        )
    }

    // The form of CUDA 2, with pointers and sizes of 32 bits.
    fn cuMemAlloc(out: *mut c_uint, bytes: c_uint) |real| {
        charged(
            bytes.into(),
            Kind::Pointer,
            // SAFETY: the program's own call.
            || unsafe { real(out, bytes) },
            // SAFETY: the driver has written there.
            || unsafe { read(out) },
            cuda::free,
        )
    }

    fn cuMemAllocManaged(out: *mut Pointer, bytes: usize, flags: c_uint) |real| {
        charged(
            bytes as u64,
            Kind::Pointer,
            // SAFETY: the program's own call.
            || unsafe { real(out, bytes, flags) },
            // SAFETY: the driver has written there.
            || unsafe { read(out) },
            cuda::free,
        )
    }

    fn cuMemAllocPitch_v2(
        out: *mut Pointer, pitch: *mut usize, width: usize, height: usize, element: c_uint,
    ) |real| {
        pitched(
            width as u64,
            height as u64,
            // SAFETY: the program's own call.
            || unsafe { real(out, pitch, width, height, element) },
            // SAFETY: the driver has written there.
            || unsafe { (read(out), pitch.read_unaligned() as u64) },
            cuda::free,
        )
    }

    fn cuMemAllocPitch(
        out: *mut c_uint, pitch: *mut c_uint, width: c_uint, height: c_uint, element: c_uint,
    ) |real| {
        pitched(
            width.into(),
            height.into(),
            // SAFETY: the program's own call.
            || unsafe { real(out, pitch, width, height, element) },
            // SAFETY: the driver has written there.
            || unsafe { (read(out), read(pitch)) },
            cuda::free,
        )
    }

    fn cuMemFree_v2(pointer: Pointer) |real| {
        // SAFETY: the program's own call.
        give_back(pointer, || unsafe { real(pointer) })
    }

    fn cuMemFree(pointer: c_uint) |real| {
        // SAFETY: the program's own call.
        give_back(pointer.into(), || unsafe { real(pointer) })
    }
}
