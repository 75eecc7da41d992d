//! Programs that ask the loader for the driver's functions get the hooks instead, by their names.
//!
//! Of the preload library only, which comes before libc: in a proxy, the loader finds the exports
//! by itself.

use core::ffi::{CStr, c_char, c_void};
use core::sync::atomic::{AtomicUsize, Ordering};

use tessera_intercept_symbols::is_known;

use crate::elf::Library;
use crate::route::{Of, all};
use crate::unknown;

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

/// What a program gets for a name.
enum Found {
    /// A function of ours.
    Hook(usize),
    /// What the loader answers.
    Loaders,
    /// Nothing.
    Nothing,
}

/// # Safety
/// `name` is NULL or a terminated string.
unsafe fn find(handle: *mut c_void, name: *const c_char) -> Found {
    if name.is_null() {
        return Found::Loaders;
    }
    // SAFETY: by this function's contract.
    let name = unsafe { CStr::from_ptr(name) };
    match name.to_bytes() {
        b"dlsym" => Found::Hook(dlsym as *const () as usize),
        b"dlvsym" => Found::Hook(dlvsym as *const () as usize),
        [b'c', b'u', b'A'..=b'Z', ..] => find_in_driver(Of::Cuda, handle, name),
        [b'n', b'v', b'm', b'l', b'A'..=b'Z', ..] => find_in_driver(Of::Nvml, handle, name),
        _ => Found::Loaders,
    }
}

fn find_in_driver(of: Of, handle: *mut c_void, name: &CStr) -> Found {
    if let Some(route) = all().find(|route| route.symbol == name) {
        // Looked up now, since the program may have opened the library again since the last time.
        return match route.look_up() {
            Some(_) => Found::Hook(route.hook.0 as usize),
            // The driver does not have it. Searching everything that is loaded, the loader would
            // find the hook.
            None if handle == libc::RTLD_DEFAULT || handle == libc::RTLD_NEXT => Found::Nothing,
            None => Found::Loaders,
        };
    }
    if !is_known(name.to_bytes())
        && Library::driver(of).is_some_and(|driver| driver.function(name).is_some())
    {
        unknown::note(name);
    }
    Found::Loaders
}

/// Answers for `dlsym`: a function to return, or the real `dlsym` to go to.
unsafe extern "C" fn route_dlsym(handle: *mut c_void, name: *const c_char) -> Answer {
    // SAFETY: what a program gives `dlsym` is a name.
    let found = unsafe { find(handle, name) };
    found.answer(&REAL_DLSYM, c"dlsym")
}

/// As [`route_dlsym`].
unsafe extern "C" fn route_dlvsym(handle: *mut c_void, name: *const c_char) -> Answer {
    // SAFETY: what a program gives `dlvsym` is a name.
    let found = unsafe { find(handle, name) };
    found.answer(&REAL_DLVSYM, c"dlvsym")
}

/// Returned in two registers.
#[repr(C)]
struct Answer {
    /// What to return, if it is not 0.
    hook: usize,
    /// Else where to go, if it is not 0.
    real: usize,
}

impl Found {
    fn answer(self, cache: &AtomicUsize, loaders: &CStr) -> Answer {
        match self {
            Self::Hook(hook) => Answer { hook, real: 0 },
            Self::Loaders => Answer { hook: 0, real: real_loader_function(cache, loaders) },
            Self::Nothing => Answer { hook: 0, real: 0 },
        }
    }
}

/// Goes to the real function in place of this one, so that the loader sees the program as its
/// caller: that is how it understands "the next library".
macro_rules! forward {
    ($route:ident) => {{
        #[cfg(target_arch = "x86_64")]
        core::arch::naked_asm!(
            "push rdi",
            "push rsi",
            "push rdx",
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
unsafe extern "C" fn dlvsym(
    handle: *mut c_void,
    name: *const c_char,
    version: *const c_char,
) -> *mut c_void {
    forward!(route_dlvsym)
}
