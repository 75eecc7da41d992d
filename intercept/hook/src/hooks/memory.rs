//! Plain memory, which is allocated and freed immediately.
//!
//! If a grant allows it to spill, all of it is managed memory, from the first byte: the driver
//! moves it to the host when the GPU is full. So tenants whose memory does not spill always get
//! theirs (`docs/adr/0089-memory-oversubscription.md`).

use core::ffi::{c_int, c_uint};

use super::route::hooks;
use crate::allocation::{allocate, allocate_with, charge, free_pointer};
use crate::charge::Charge;
use crate::driver::cuda::{self, OUT_OF_MEMORY, Pointer, SUCCESS, allocate_managed};
use crate::state::Kind;

/// Returns true if memory with this charge spills: its grant allows it, and the current device can
/// move managed memory.
fn spills(charge: Option<Charge>) -> bool {
    charge.is_some_and(|charge| charge.may_spill)
        && cuda::current_device().is_some_and(cuda::moves_managed_memory)
}

/// Allocates plain memory, by the driver's own function if it does not spill.
///
/// # Safety
/// `out` is where the program wants the pointer, or NULL.
unsafe fn plain(
    out: *mut Pointer,
    bytes: usize,
    charge: Option<Charge>,
    real: impl FnOnce() -> c_int,
) -> c_int {
    // SAFETY: by this function's contract.
    if spills(charge) { unsafe { allocate_managed(out, bytes) } } else { real() }
}

/// Allocates pitched memory, by the driver's own function if it does not spill; that also returns
/// the errors of an invalid call.
///
/// # Safety
/// `out` and `pitch` are where the program wants the results, or NULL.
unsafe fn plain_rows(
    out: *mut Pointer,
    pitch: *mut usize,
    (width, height, element): (usize, usize, c_uint),
    charge: Option<Charge>,
    real: impl FnOnce() -> c_int,
) -> c_int {
    let well_formed = matches!(element, 4 | 8 | 16)
        && width > 0
        && height > 0
        && !out.is_null()
        && !pitch.is_null();
    let row = expected_pitch(width as u64) as usize;
    let Some(bytes) = row.checked_mul(height).filter(|_| well_formed) else { return real() };
    if !spills(charge) {
        return real();
    }
    // SAFETY: by this function's contract.
    let result = unsafe { allocate_managed(out, bytes) };
    if result == SUCCESS {
        // SAFETY: by this function's contract, and it is not NULL.
        unsafe { pitch.write_unaligned(row) };
    }
    result
}

/// Reads a result that the driver has just written.
///
/// # Safety
/// `out` is the program's pointer for the result of a call that succeeded.
unsafe fn read<T: Copy + Into<u64>>(out: *const T) -> u64 {
    // SAFETY: by this function's contract; programs may keep results anywhere.
    if out.is_null() { 0 } else { unsafe { out.read_unaligned() }.into() }
}

/// Returns the pitch that the driver is expected to choose, and that managed memory gets.
fn expected_pitch(width: u64) -> u64 {
    /// Pitch alignment of all GPUs so far, and their texture alignment
    /// (`CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT`).
    const ALIGNMENT: u64 = 512;
    width.checked_next_multiple_of(ALIGNMENT).unwrap_or(u64::MAX)
}

/// Allocates pitched memory, whose size is known only afterwards.
fn pitched(
    width: u64,
    height: u64,
    take: impl FnOnce(Option<Charge>) -> c_int,
    taken: impl FnOnce() -> (u64, u64),
    free: impl Fn(u64),
) -> c_int {
    let expected = expected_pitch(width).saturating_mul(height);
    let charge = match charge(cuda::current_device(), expected) {
        Ok(charge) => charge,
        Err(refusal) => return refusal.result(|| take(None), || free(taken().0)),
    };
    let result = take(Some(charge));
    if result != SUCCESS {
        charge.undo();
        return result;
    }
    let (pointer, pitch) = taken();
    let kept = charge.resize(pitch.saturating_mul(height)).and_then(|charge| {
        charge.keep(Kind::Pointer, pointer, cuda::current_context().unwrap_or(0))
    });
    match kept {
        Ok(()) => SUCCESS,
        Err(_) => {
            free(pointer);
            OUT_OF_MEMORY
        }
    }
}

hooks! {
    fn cuMemAlloc_v2(out: *mut Pointer, bytes: usize) |real| {
        allocate_with(
            bytes as u64,
            Kind::Pointer,
            // SAFETY: the program's own call.
            |charge| unsafe { plain(out, bytes, charge, || real(out, bytes)) },
            // SAFETY: the driver has written there.
            || unsafe { read(out) },
            cuda::free,
        )
    }

    // Form of CUDA 2, with pointers and sizes of 32 bits, which managed memory does not fit into.
    fn cuMemAlloc(out: *mut c_uint, bytes: c_uint) |real| {
        allocate(
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
        allocate(
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
            |charge| unsafe {
                let asked = (width, height, element);
                plain_rows(out, pitch, asked, charge, || real(out, pitch, width, height, element))
            },
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
            |_| unsafe { real(out, pitch, width, height, element) },
            // SAFETY: the driver has written there.
            || unsafe { (read(out), read(pitch)) },
            cuda::free,
        )
    }

    fn cuMemFree_v2(pointer: Pointer) |real| {
        // SAFETY: the program's own call.
        free_pointer(pointer, || unsafe { real(pointer) })
    }

    fn cuMemFree(pointer: c_uint) |real| {
        // SAFETY: the program's own call.
        free_pointer(pointer.into(), || unsafe { real(pointer) })
    }
}
