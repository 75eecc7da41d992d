//! Programs that ask `cuGetProcAddress` for the driver's functions get the hooks instead.
//!
//! It is asked itself, and its answer is told by address: one name has several forms with different
//! arguments, and only the driver knows which of them a program is given.

use core::ffi::{CStr, c_char, c_int, c_void};
use core::sync::atomic::{AtomicUsize, Ordering};

use crate::cuda::{NOT_FOUND, SUCCESS};
use crate::route::{Of, all, hooks};
use crate::unknown;

type GetProcAddress2 =
    unsafe extern "C" fn(*const c_char, *mut *mut c_void, c_int, u64, *mut c_int) -> c_int;

/// Asks the real `cuGetProcAddress` once for each function that has a hook, and notes what it hands
/// out.
fn learn_addresses() {
    /// `CU_GET_PROC_ADDRESS_LEGACY_STREAM` and `..._PER_THREAD_DEFAULT_STREAM`.
    const LEGACY: u64 = 1;
    const PER_THREAD: u64 = 2;
    static LEARNT_AT: AtomicUsize = AtomicUsize::new(0);
    let Some(address) = cuGetProcAddress_v2::ROUTE.real() else { return };
    if LEARNT_AT.swap(address, Ordering::AcqRel) == address {
        return;
    }
    // SAFETY: the type is that of cuda.h.
    let ask = unsafe { core::mem::transmute::<usize, GetProcAddress2>(address) };
    for route in all().filter(|route| route.of == Of::Cuda) {
        let flags = if route.per_thread { PER_THREAD } else { LEGACY };
        let (mut found, mut status) = (core::ptr::null_mut(), 0);
        // SAFETY: a terminated name, and results that go to variables of ours.
        let result =
            unsafe { ask(route.base.as_ptr(), &mut found, route.version, flags, &mut status) };
        if result == SUCCESS && !found.is_null() {
            route.note_handed_out(found as usize);
        }
    }
}

/// Puts the hook in the place of a function that the driver has handed out. A function that takes
/// memory, in a form that is not known here, is not handed out at all.
///
/// # Safety
/// `out` is NULL, or the driver has written there; `name` is NULL or a terminated string.
unsafe fn hand_out(name: *const c_char, out: *mut *mut c_void, result: c_int) -> c_int {
    if result != SUCCESS || out.is_null() || name.is_null() {
        return result;
    }
    learn_addresses();
    // SAFETY: by this function's contract.
    let (given, name) = unsafe { (out.read_unaligned() as usize, CStr::from_ptr(name)) };
    if given == 0 {
        return result;
    }
    let put = |address: usize| {
        // SAFETY: by this function's contract.
        unsafe { out.write_unaligned(address as *mut c_void) };
    };
    if let Some(route) = all().find(|route| route.of == Of::Cuda && route.leads_to(given)) {
        put(route.hook.0 as usize);
        return result;
    }
    if all().any(|route| route.of == Of::Cuda && route.base == name) {
        put(0);
        return NOT_FOUND;
    }
    unknown::note(name);
    result
}

hooks! {
    fn cuGetProcAddress(name: *const c_char, out: *mut *mut c_void, version: c_int, flags: u64) |real| {
        // SAFETY: the program's own call.
        unsafe { hand_out(name, out, real(name, out, version, flags)) }
    }

    fn cuGetProcAddress_ptsz(name: *const c_char, out: *mut *mut c_void, version: c_int, flags: u64) |real| {
        // SAFETY: the program's own call.
        unsafe { hand_out(name, out, real(name, out, version, flags)) }
    }

    fn cuGetProcAddress_v2(
        name: *const c_char, out: *mut *mut c_void, version: c_int, flags: u64, status: *mut c_int,
    ) |real| {
        // SAFETY: the program's own call.
        unsafe { hand_out(name, out, real(name, out, version, flags, status)) }
    }

    fn cuGetProcAddress_v2_ptsz(
        name: *const c_char, out: *mut *mut c_void, version: c_int, flags: u64, status: *mut c_int,
    ) |real| {
        // SAFETY: the program's own call.
        unsafe { hand_out(name, out, real(name, out, version, flags, status)) }
    }
}
