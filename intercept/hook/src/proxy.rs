//! Proxies: libraries in the place of the driver's, with every function of every release.
//!
//! ```text
//!  program --cuMemAlloc_v2--> export --slot--> the preload library's hook, if that is loaded  --+
//!                                        `---> otherwise this library's hook  ----------------- +--> the real driver,
//!          --cuDeviceGet----> export --slot-----------------------------------------------------+    /usr/local/lib/
//!          --a newer function, by dlsym: the loader continues with this library's dependency ---+    tessera/driver/
//! ```
//!
//! An export is a jump through a slot, which is filled at its first use. So functions with unknown
//! parameters pass too, at the cost of two instructions.
//!
//! **Nothing is charged twice.** The hooks of one library charge in a process, for its whole life:
//! those of the preload library if it is loaded, because it is loaded before all others. Its hooks
//! call the real driver, because `LoadedLibrary::driver` skips proxies. A proxy's own hooks run
//! only without the preload library.

use core::ffi::{CStr, c_int};
use core::sync::atomic::{AtomicUsize, Ordering};

pub use tessera_intercept_symbols::Library;

use crate::driver::{self, LoadedLibrary, PROXY_MARK};
use crate::hooks::all;

/// Soname of the preload library.
const PRELOAD: &[u8] = b"libtessera_intercept.so";

/// Library whose hooks charge.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Hooks {
    Own = 1,
    OfPreload = 2,
}

/// Returns the library whose hooks charge. Decided once: after a change, charges would stay that no
/// hook releases.
fn hooks() -> Hooks {
    static DECIDED: AtomicUsize = AtomicUsize::new(0);
    let decide =
        || if LoadedLibrary::find(PRELOAD).is_some() { Hooks::OfPreload } else { Hooks::Own };
    let known = match DECIDED.load(Ordering::Acquire) {
        0 => {
            let decided = decide() as usize;
            DECIDED
                .compare_exchange(0, decided, Ordering::AcqRel, Ordering::Acquire)
                .err()
                .unwrap_or(decided)
        }
        known => known,
    };
    if known == Hooks::OfPreload as usize { Hooks::OfPreload } else { Hooks::Own }
}

/// Returns the function that an export jumps to; `None` if the driver does not have it.
fn target_of(library: Library, name: &CStr) -> Option<usize> {
    let real = LoadedLibrary::driver(library)?.function(name)?;
    let is_route = |route: &&crate::hooks::Route| {
        route.library() == library && route.function.symbol() == name
    };
    let Some(own) = all().find(is_route) else { return Some(real) };
    let of_preload = || LoadedLibrary::find(PRELOAD)?.function(name);
    match hooks() {
        Hooks::OfPreload => of_preload().or(Some(own.hook())),
        Hooks::Own => Some(own.hook()),
    }
}

/// Fills the slot of an export, and returns its target.
pub fn fill(library: Library, name: Option<&CStr>, slot: Option<&AtomicUsize>) -> usize {
    match (name.and_then(|name| target_of(library, name)), slot) {
        (Some(address), Some(slot)) => {
            slot.store(address, Ordering::Release);
            address
        }
        _ => match library {
            Library::Cuda => absent_in_cuda as *const () as usize,
            Library::Nvml => absent_in_nvml as *const () as usize,
        },
    }
}

/// Target of functions of CUDA that the driver does not have.
extern "C" fn absent_in_cuda() -> c_int {
    driver::absent(Library::Cuda)
}

/// Target of functions of NVML that the driver does not have.
extern "C" fn absent_in_nvml() -> c_int {
    driver::absent(Library::Nvml)
}

/// Hides the exports of functions that the driver does not have, so that programs that look for
/// them find nothing, as without the proxy. Call it when the proxy is initialized: the real library
/// is loaded by then, because the proxy depends on it. `inside` is a function of the proxy.
///
/// # Safety
/// The loader is initializing the proxy, so no other thread looks symbols of it up.
pub unsafe fn hide_absent(library: Library, inside: *const ()) {
    let Some(driver) = LoadedLibrary::driver(library) else { return };
    let is_hidden = |name: &CStr| name != PROXY_MARK && driver.function(name).is_none();
    // SAFETY: by this function's contract. On an error, programs find functions that return the
    // library's error for an absent function.
    let _ = unsafe { tessera_intercept_exports::hide(inside, is_hidden) };
}

/// Defines the first-use function of a proxy: it saves the arguments, fills the slot, and jumps to
/// the target. The index of the export is in a register that no argument uses.
#[doc(hidden)]
#[macro_export]
macro_rules! proxy_first_use {
    ($fill:ident) => {
        #[unsafe(naked)]
        unsafe extern "C" fn first_use() {
            #[cfg(target_arch = "x86_64")]
            core::arch::naked_asm!(
                "push rbp",
                "mov rbp, rsp",
                "push rdi",
                "push rsi",
                "push rdx",
                "push rcx",
                "push r8",
                "push r9",
                "sub rsp, 128",
                "movups [rsp], xmm0",
                "movups [rsp + 16], xmm1",
                "movups [rsp + 32], xmm2",
                "movups [rsp + 48], xmm3",
                "movups [rsp + 64], xmm4",
                "movups [rsp + 80], xmm5",
                "movups [rsp + 96], xmm6",
                "movups [rsp + 112], xmm7",
                "mov edi, r11d",
                "call {fill}",
                "mov r11, rax",
                "movups xmm0, [rsp]",
                "movups xmm1, [rsp + 16]",
                "movups xmm2, [rsp + 32]",
                "movups xmm3, [rsp + 48]",
                "movups xmm4, [rsp + 64]",
                "movups xmm5, [rsp + 80]",
                "movups xmm6, [rsp + 96]",
                "movups xmm7, [rsp + 112]",
                "add rsp, 128",
                "pop r9",
                "pop r8",
                "pop rcx",
                "pop rdx",
                "pop rsi",
                "pop rdi",
                "pop rbp",
                "jmp r11",
                fill = sym $fill,
            );
            #[cfg(target_arch = "aarch64")]
            core::arch::naked_asm!(
                "stp x29, x30, [sp, #-224]!",
                "mov x29, sp",
                "stp x0, x1, [sp, #16]",
                "stp x2, x3, [sp, #32]",
                "stp x4, x5, [sp, #48]",
                "stp x6, x7, [sp, #64]",
                "str x8, [sp, #80]",
                "stp q0, q1, [sp, #96]",
                "stp q2, q3, [sp, #128]",
                "stp q4, q5, [sp, #160]",
                "stp q6, q7, [sp, #192]",
                "mov w0, w17",
                "bl {fill}",
                "mov x16, x0",
                "ldp x0, x1, [sp, #16]",
                "ldp x2, x3, [sp, #32]",
                "ldp x4, x5, [sp, #48]",
                "ldp x6, x7, [sp, #64]",
                "ldr x8, [sp, #80]",
                "ldp q0, q1, [sp, #96]",
                "ldp q2, q3, [sp, #128]",
                "ldp q4, q5, [sp, #160]",
                "ldp q6, q7, [sp, #192]",
                "ldp x29, x30, [sp], #224",
                "br x16",
                fill = sym $fill,
            );
        }
    };
}

/// Jump of one export.
#[doc(hidden)]
#[macro_export]
macro_rules! proxy_export {
    ($index:literal) => {{
        #[cfg(target_arch = "x86_64")]
        core::arch::naked_asm!(
            "mov r11, qword ptr [rip + {slots} + 8 * {index}]",
            "test r11, r11",
            "jz 2f",
            "jmp r11",
            "2:",
            "mov r11d, {index}",
            "jmp {first_use}",
            slots = sym SLOTS,
            index = const $index,
            first_use = sym first_use,
        );
        #[cfg(target_arch = "aarch64")]
        core::arch::naked_asm!(
            "adrp x16, {slots} + 8 * {index}",
            "ldr x16, [x16, :lo12:{slots} + 8 * {index}]",
            "cbz x16, 2f",
            "br x16",
            "2:",
            "mov w17, {index}",
            "b {first_use}",
            slots = sym SLOTS,
            index = const $index,
            first_use = sym first_use,
        );
    }};
}

/// Defines all exports of a proxy: number, name, name for C.
#[macro_export]
macro_rules! proxy {
    ($library:ident, $count:literal: $($index:literal $name:ident $text:literal,)*) => {
        /// Target of each export; 0: not used yet.
        static SLOTS: [core::sync::atomic::AtomicUsize; $count] =
            [const { core::sync::atomic::AtomicUsize::new(0) }; $count];

        static NAMES: [&core::ffi::CStr; $count] = [$($text),*];

        const LIBRARY: $crate::proxy::Library = $crate::proxy::Library::$library;

        /// Fills the slot of an export, and returns its target.
        extern "C" fn fill(index: u32) -> usize {
            let (name, slot) = (NAMES.get(index as usize), SLOTS.get(index as usize));
            $crate::proxy::fill(LIBRARY, name.copied(), slot)
        }

        $crate::proxy_first_use!(fill);

        /// By their names, which are those of the hooks too.
        mod exported {
            use super::*;
            $(
                #[unsafe(no_mangle)]
                #[unsafe(naked)]
                unsafe extern "C" fn $name() {
                    $crate::proxy_export!($index)
                }
            )*
        }

        /// Mark by which a proxy is recognized; never called.
        #[unsafe(no_mangle)]
        extern "C" fn tessera_intercept_proxy() {}

        /// Initializes the proxy.
        extern "C" fn initialize() {
            // SAFETY: called by the loader while it initializes this library.
            unsafe { $crate::proxy::hide_absent(LIBRARY, initialize as *const ()) };
        }

        #[used]
        #[unsafe(link_section = ".init_array")]
        static INITIALIZE: extern "C" fn() = initialize;
    };
}
