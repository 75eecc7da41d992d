//! Plain memory: taken at once, given back at once.
//!
//! Where a grant lets it spill, it is managed: the driver moves it to the host when the GPU is
//! full. That is all of it, from the first byte, and not only what does not fit: what is managed
//! can be moved away for tenants whose memory stays, who get theirs always (`docs/adr/
//! 0089-memory-oversubscription.md`).

use core::ffi::{c_int, c_uint};
use core::mem::transmute;

use crate::charge::{Charge, charge, charged, charged_as};
use crate::cuda::{self, OUT_OF_MEMORY, Pointer, SUCCESS};
use crate::pool::give_back;
use crate::route::hooks;
use crate::state::Kind;

/// Takes managed memory.
///
/// # Safety
/// `out` is where the program wants the pointer, or NULL.
unsafe fn managed(out: *mut Pointer, bytes: usize) -> Option<c_int> {
    type Real = unsafe extern "C" fn(*mut Pointer, usize, c_uint) -> c_int;
    /// `CU_MEM_ATTACH_GLOBAL`: every stream of every GPU may use it, as other memory.
    const ATTACH_GLOBAL: c_uint = 1;
    let address = cuMemAllocManaged::ROUTE.real()?;
    // SAFETY: the type is that of cuda.h; the pointer goes where the program wants it.
    Some(unsafe { transmute::<usize, Real>(address)(out, bytes, ATTACH_GLOBAL) })
}

/// Whether plain memory that is charged so spills: it is granted so, and the current device can do
/// it.
fn spills(charge: Option<Charge>) -> bool {
    charge.is_some_and(|charge| charge.may_spill)
        && cuda::current_device().is_some_and(cuda::moves_managed_memory)
}

/// Takes plain memory, by the driver's own function where it is not to spill.
///
/// # Safety
/// As [`managed`].
unsafe fn plain(
    out: *mut Pointer,
    bytes: usize,
    charge: Option<Charge>,
    real: impl FnOnce() -> c_int,
) -> c_int {
    // SAFETY: by this function's contract.
    let taken = if spills(charge) { unsafe { managed(out, bytes) } } else { None };
    taken.unwrap_or_else(real)
}

/// Takes pitched memory, by the driver's own function where it is not to spill; that also answers
/// what is wrong with a call.
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
    // SAFETY: by this function's contract.
    let taken = if spills(charge) { unsafe { managed(out, bytes) } } else { None };
    if taken == Some(SUCCESS) {
        // SAFETY: by this function's contract, and it is not NULL.
        unsafe { pitch.write_unaligned(row) };
    }
    taken.unwrap_or_else(real)
}

/// Reads a result that the driver has just written.
///
/// # Safety
/// `out` is what the program gave the driver for its result, and the driver was content with it.
unsafe fn read<T: Copy + Into<u64>>(out: *const T) -> u64 {
    // SAFETY: by this function's contract; programs may keep results anywhere.
    if out.is_null() { 0 } else { unsafe { out.read_unaligned() }.into() }
}

/// The rows of pitched memory, as the driver is expected to lay them out, and as they are where the
/// memory is managed.
fn expected_pitch(width: u64) -> u64 {
    /// The pitch alignment of all GPUs so far, and what their textures must be aligned to
    /// (`CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT`).
    const ALIGNMENT: u64 = 512;
    width.checked_next_multiple_of(ALIGNMENT).unwrap_or(u64::MAX)
}

/// Pitched memory: what it costs is known only afterwards.
fn pitched(
    width: u64,
    height: u64,
    take: impl FnOnce(Option<Charge>) -> c_int,
    taken: impl FnOnce() -> (u64, u64),
    give_back: impl Fn(u64),
) -> c_int {
    let expected = expected_pitch(width).saturating_mul(height);
    let charge = match charge(cuda::current_device(), expected) {
        Ok(charge) => charge,
        Err(refusal) => return refusal.answer(|| take(None), || give_back(taken().0)),
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
            give_back(pointer);
            OUT_OF_MEMORY
        }
    }
}

hooks! {
    fn cuMemAlloc_v2(out: *mut Pointer, bytes: usize) |real| {
        charged_as(
            bytes as u64,
            Kind::Pointer,
            // SAFETY: the program's own call.
            |charge| unsafe { plain(out, bytes, charge, || real(out, bytes)) },
            // SAFETY: the driver has written there.
            || unsafe { read(out) },
            cuda::free,
        )
    }

    // The form of CUDA 2, with pointers and sizes of 32 bits, which managed memory does not fit into.
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
        give_back(pointer, || unsafe { real(pointer) })
    }

    fn cuMemFree(pointer: c_uint) |real| {
        // SAFETY: the program's own call.
        give_back(pointer.into(), || unsafe { real(pointer) })
    }
}
