//! Programs that ask `cuGetProcAddress` for the driver's functions get the hooks instead.
//!
//! It is asked itself, and its answer is told by address: one name has several forms with different
//! arguments, and only the driver knows which of them a program is given.

use core::ffi::{CStr, c_char, c_int, c_void};
use core::sync::atomic::{AtomicUsize, Ordering};

use tessera_intercept_symbols::Class;

use crate::cuda::{self, NOT_FOUND, SUCCESS};
use crate::route::{Of, Route, all, hooks};
use crate::unknown;

type GetProcAddress2 =
    unsafe extern "C" fn(*const c_char, *mut *mut c_void, c_int, u64, *mut c_int) -> c_int;

type GetProcAddress1 = unsafe extern "C" fn(*const c_char, *mut *mut c_void, c_int, u64) -> c_int;

/// The driver's own `cuGetProcAddress`, in the newest form that the driver has.
#[derive(Clone, Copy)]
enum Ask {
    /// Of drivers before CUDA 12, which return an error for a function that they do not have.
    First(GetProcAddress1),
    Second(GetProcAddress2),
}

impl Ask {
    fn of_driver() -> Option<(Self, usize)> {
        // SAFETY: the types are those of cuda.h.
        unsafe {
            if let Some(address) = cuGetProcAddress_v2::ROUTE.real() {
                let ask = core::mem::transmute::<usize, GetProcAddress2>(address);
                return Some((Self::Second(ask), address));
            }
            let address = cuGetProcAddress::ROUTE.real()?;
            let ask = core::mem::transmute::<usize, GetProcAddress1>(address);
            Some((Self::First(ask), address))
        }
    }

    /// Returns the address that the driver hands out for a function, 0 if it has no such function.
    fn address(self, route: &Route) -> usize {
        /// `CU_GET_PROC_ADDRESS_LEGACY_STREAM` and `..._PER_THREAD_DEFAULT_STREAM`.
        const LEGACY: u64 = 1;
        const PER_THREAD: u64 = 2;
        /// `CU_GET_PROC_ADDRESS_SUCCESS`
        const FOUND: c_int = 0;
        let flags = if route.per_thread { PER_THREAD } else { LEGACY };
        let (name, version) = (route.base.as_ptr(), route.version);
        let (mut found, mut status) = (core::ptr::null_mut(), FOUND);
        // SAFETY: a terminated name, and results that go to local variables.
        let result = unsafe {
            match self {
                Self::First(ask) => ask(name, &mut found, version, flags),
                Self::Second(ask) => ask(name, &mut found, version, flags, &mut status),
            }
        };
        if result == SUCCESS && status == FOUND { found as usize } else { 0 }
    }
}

/// Asks the driver once for each function that has a hook, and notes the address that it hands out.
///
/// Threads that come here at the same time each learn all addresses by themselves, which is
/// idempotent: no lock is held over the driver's calls, and no thread sees addresses half learnt.
fn learn_addresses() {
    static LEARNT_AT: AtomicUsize = AtomicUsize::new(0);
    let Some((ask, address)) = Ask::of_driver() else { return };
    if LEARNT_AT.load(Ordering::Acquire) == address {
        return;
    }
    // For a version that is newer than its own, the driver would hand out an older form, which has
    // other parameters.
    let driver = cuda::driver_version().unwrap_or(c_int::MAX);
    for route in all().filter(|route| route.of == Of::Cuda) {
        let handed_out = if route.version <= driver { ask.address(route) } else { 0 };
        route.note_handed_out(handed_out);
    }
    LEARNT_AT.store(address, Ordering::Release);
}

/// Puts the hook in the place of a function that the driver has handed out.
///
/// A form that is newer than the symbol table is not handed out if it takes memory or hands out
/// functions: the limit would not hold. Other functions pass in such a form, and are counted:
/// without them, no program would run on a new driver.
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
    match all().find(|route| route.of == Of::Cuda && route.base == name) {
        Some(route) if matches!(route.class, Class::Memory | Class::Resolves) => {
            put(0);
            return NOT_FOUND;
        }
        Some(_) => unknown::count(),
        None => unknown::note(name),
    }
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
