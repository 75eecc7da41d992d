//! Programs that ask for the driver's functions get the hooks instead.
//!
//! `dlsym` and `dlvsym` are told by name. `cuGetProcAddress` is asked itself, and its answer is told by address: one name has
//! several forms with different arguments, and only the driver knows which of them a program is given.

use core::ffi::{CStr, c_char, c_int, c_void};
use core::sync::atomic::{AtomicUsize, Ordering};

use crate::cuda::{NOT_FOUND, SUCCESS};
use crate::elf::Library;
use crate::route::{Of, all, hooks};

/// The address of libc's `dlsym`; 0 = not looked up yet.
static REAL_DLSYM: AtomicUsize = AtomicUsize::new(0);
/// The address of libc's `dlvsym`; 0 = not looked up yet.
static REAL_DLVSYM: AtomicUsize = AtomicUsize::new(0);

/// Looks a function of the loader up; it has lived in libc since glibc 2.34, and in libdl before.
fn real_loader_function(cache: &AtomicUsize, name: &CStr) -> usize {
    let known = cache.load(Ordering::Acquire);
    if known != 0 {
        return known;
    }
    let of = |library: &[u8]| Library::loaded(library)?.function(name);
    let found = of(b"libc.so.").or_else(|| of(b"libdl.so.")).unwrap_or(0);
    cache.store(found, Ordering::Release);
    found
}

/// What a program gets for a name: a hook; or 0, and the loader shall answer.
///
/// # Safety
/// `name` is NULL or a terminated string.
unsafe fn route(name: *const c_char) -> usize {
    if name.is_null() {
        return 0;
    }
    // SAFETY: by this function's contract.
    let name = unsafe { CStr::from_ptr(name) };
    match name.to_bytes() {
        b"dlsym" => dlsym as *const () as usize,
        b"dlvsym" => dlvsym as *const () as usize,
        bytes if bytes.starts_with(b"cu") || bytes.starts_with(b"nvml") => {
            let route = all().find(|route| route.symbol == name);
            // Looked up now, since the program may have opened the library again since the last time.
            route.filter(|route| route.look_up().is_some()).map_or(0, |route| route.hook.0 as usize)
        }
        _ => 0,
    }
}

/// Answers for `dlsym`: a function to return, or the real `dlsym` to go to.
unsafe extern "C" fn route_dlsym(name: *const c_char) -> Answer {
    // SAFETY: what a program gives `dlsym` is a name.
    let hook = unsafe { route(name) };
    Answer { hook, real: real_loader_function(&REAL_DLSYM, c"dlsym") }
}

/// As [`route_dlsym`].
unsafe extern "C" fn route_dlvsym(name: *const c_char) -> Answer {
    // SAFETY: what a program gives `dlvsym` is a name.
    let hook = unsafe { route(name) };
    Answer { hook, real: real_loader_function(&REAL_DLVSYM, c"dlvsym") }
}

/// Returned in two registers.
#[repr(C)]
struct Answer {
    /// What to return, if it is not 0.
    hook: usize,
    /// Else where to go, if it is not 0.
    real: usize,
}

/// Goes to the real function in place of this one, so that the loader sees the program as its caller: that is how it
/// understands "the next library".
macro_rules! forward {
    ($route:ident) => {{
        #[cfg(target_arch = "x86_64")]
        core::arch::naked_asm!(
            "push rdi",
            "push rsi",
            "push rdx",
            "mov rdi, rsi",
            "call {route}",
            "mov rcx, rdx",
            "pop rdx",
            "pop rsi",
            "pop rdi",
            "test rax, rax",
            "jnz 2f",
            "test rcx, rcx",
            "jz 2f",
            "jmp rcx",
            "2:",
            "ret",
            route = sym $route,
        );
        #[cfg(target_arch = "aarch64")]
        core::arch::naked_asm!(
            "stp x29, x30, [sp, #-48]!",
            "stp x0, x1, [sp, #16]",
            "str x2, [sp, #32]",
            "mov x0, x1",
            "bl {route}",
            "mov x9, x0",
            "mov x10, x1",
            "ldr x2, [sp, #32]",
            "ldp x0, x1, [sp, #16]",
            "ldp x29, x30, [sp], #48",
            "cbnz x9, 2f",
            "cbz x10, 2f",
            "br x10",
            "2:",
            "mov x0, x9",
            "ret",
            route = sym $route,
        );
    }};
}

/// `void *dlsym(void *handle, const char *name)`
#[unsafe(no_mangle)]
#[unsafe(naked)]
unsafe extern "C" fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    forward!(route_dlsym)
}

/// `void *dlvsym(void *handle, const char *name, const char *version)`
#[unsafe(no_mangle)]
#[unsafe(naked)]
unsafe extern "C" fn dlvsym(handle: *mut c_void, name: *const c_char, version: *const c_char) -> *mut c_void {
    forward!(route_dlvsym)
}

type GetProcAddress2 = unsafe extern "C" fn(*const c_char, *mut *mut c_void, c_int, u64, *mut c_int) -> c_int;

/// Asks the real `cuGetProcAddress` once for each function that has a hook, and notes what it hands out.
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
        let result = unsafe { ask(route.base.as_ptr(), &mut found, route.version, flags, &mut status) };
        if result == SUCCESS && !found.is_null() {
            route.note_handed_out(found as usize);
        }
    }
}

/// Puts the hook in the place of a function that the driver has handed out. A function that takes memory, in a form that is
/// not known here, is not handed out at all.
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
