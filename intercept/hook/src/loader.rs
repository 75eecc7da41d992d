//! `dlsym` and `dlvsym` of the preload library: programs get hooks in the place of the driver's
//! functions, by their names.
//!
//! Only the preload library exports them, because it comes before libc. In a proxy, the loader
//! finds the exports by itself.

use core::ffi::{CStr, c_char, c_void};
use core::sync::atomic::{AtomicUsize, Ordering};

use tessera_intercept_symbols::{Library, is_known};

use crate::driver::LoadedLibrary;
use crate::hooks::all;
use crate::unknown;

/// Address of libc's `dlsym`; 0: not looked up yet.
static REAL_DLSYM: AtomicUsize = AtomicUsize::new(0);
/// Address of libc's `dlvsym`; 0: not looked up yet.
static REAL_DLVSYM: AtomicUsize = AtomicUsize::new(0);

/// Looks up a function of the loader: it is in libc from glibc 2.34 on, and in libdl before.
fn real_loader_function(cache: &AtomicUsize, name: &CStr) -> usize {
    let known = cache.load(Ordering::Acquire);
    if known != 0 {
        return known;
    }
    let of = |library: &[u8]| LoadedLibrary::find(library)?.function(name);
    let found = of(b"libc.so.").or_else(|| of(b"libdl.so.")).unwrap_or(0);
    cache.store(found, Ordering::Release);
    found
}

/// Result of a lookup.
enum Found {
    /// A hook.
    Hook(usize),
    /// The result of the loader.
    OfLoader,
    /// Nothing.
    Nothing,
}

/// # Safety
/// `name` is NULL or a terminated string.
unsafe fn find(handle: *mut c_void, name: *const c_char) -> Found {
    if name.is_null() {
        return Found::OfLoader;
    }
    // SAFETY: by this function's contract.
    let name = unsafe { CStr::from_ptr(name) };
    match name.to_bytes() {
        b"dlsym" => Found::Hook(dlsym as *const () as usize),
        b"dlvsym" => Found::Hook(dlvsym as *const () as usize),
        [b'c', b'u', b'A'..=b'Z', ..] => find_in_driver(Library::Cuda, handle, name),
        [b'n', b'v', b'm', b'l', b'A'..=b'Z', ..] => find_in_driver(Library::Nvml, handle, name),
        _ => Found::OfLoader,
    }
}

fn find_in_driver(library: Library, handle: *mut c_void, name: &CStr) -> Found {
    if let Some(route) = all().find(|route| route.function.symbol() == name) {
        // Looked up now, because the program may have opened the library again.
        return match route.function.look_up() {
            Some(_) => Found::Hook(route.hook()),
            // The driver does not have it. In a search of all libraries, the loader would find the
            // hook.
            None if handle == libc::RTLD_DEFAULT || handle == libc::RTLD_NEXT => Found::Nothing,
            None => Found::OfLoader,
        };
    }
    if !is_known(name.to_bytes())
        && LoadedLibrary::driver(library).is_some_and(|driver| driver.function(name).is_some())
    {
        unknown::note(name);
    }
    Found::OfLoader
}

/// Looks a name up for `dlsym`: returns a function, or the real `dlsym` to jump to.
unsafe extern "C" fn route_dlsym(handle: *mut c_void, name: *const c_char) -> Lookup {
    // SAFETY: a program passes a name to `dlsym`.
    let found = unsafe { find(handle, name) };
    found.lookup(&REAL_DLSYM, c"dlsym")
}

/// As [`route_dlsym`].
unsafe extern "C" fn route_dlvsym(handle: *mut c_void, name: *const c_char) -> Lookup {
    // SAFETY: a program passes a name to `dlvsym`.
    let found = unsafe { find(handle, name) };
    found.lookup(&REAL_DLVSYM, c"dlvsym")
}

/// Returned in two registers.
#[repr(C)]
struct Lookup {
    /// Function to return, if it is not 0.
    hook: usize,
    /// Otherwise the function to jump to, if it is not 0.
    real: usize,
}

impl Found {
    fn lookup(self, cache: &AtomicUsize, name: &CStr) -> Lookup {
        match self {
            Self::Hook(hook) => Lookup { hook, real: 0 },
            Self::OfLoader => Lookup { hook: 0, real: real_loader_function(cache, name) },
            Self::Nothing => Lookup { hook: 0, real: 0 },
        }
    }
}

/// Jumps to the real function, so that the loader sees the program as its caller: `RTLD_NEXT`
/// depends on that.
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
///
/// # Safety
/// As dlsym(3).
#[unsafe(naked)]
pub unsafe extern "C" fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    forward!(route_dlsym)
}

/// `void *dlvsym(void *handle, const char *name, const char *version)`
///
/// # Safety
/// As dlvsym(3).
#[unsafe(naked)]
pub unsafe extern "C" fn dlvsym(
    handle: *mut c_void,
    name: *const c_char,
    version: *const c_char,
) -> *mut c_void {
    forward!(route_dlvsym)
}
