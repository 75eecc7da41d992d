//! In the place of the driver's library: every function that some release has, under its name.
//!
//! ```text
//!  program --cuMemAlloc_v2--> export --slot--> the preload library's hook, where that is loaded  --+
//!                                        `---> else this library's own hook  --------------------- +--> the real driver,
//!          --cuDeviceGet----> export --slot--------------------------------------------------------+    /usr/local/lib/
//!          --a function of tomorrow, by dlsym: the loader goes on to what this library needs ------+    tessera/driver/
//! ```
//!
//! An export is a jump through a slot, which is filled when it is first used. So what takes other
//! arguments than are known here is passed through as well, at the cost of two instructions.
//!
//! **Nobody is charged twice.** One library's hooks do the charging in a process, for its whole
//! life. The preload library's, if it is there: it is loaded before everything else. Its hooks call
//! the real driver, since a proxy is passed over when they look for it ([`Library::driver`]). A
//! proxy's own hooks run only where there is no preload library.

use core::ffi::{CStr, c_int};
use core::sync::atomic::{AtomicUsize, Ordering};

use crate::elf::{Library, PROXY_MARK};
use crate::route::{Of, all};

/// The library that this one stands in for.
#[cfg(artefact = "cuda")]
const OF: Of = Of::Cuda;
/// See the other.
#[cfg(artefact = "nvml")]
const OF: Of = Of::Nvml;

/// The soname of the preload library.
const PRELOAD: &[u8] = b"libtessera_intercept.so";

/// Whose hooks charge.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Hooks {
    Own = 1,
    OfPreload = 2,
}

/// Decided once: to change sides would leave charges behind that nobody takes back.
fn hooks() -> Hooks {
    static DECIDED: AtomicUsize = AtomicUsize::new(0);
    let decide = || if Library::loaded(PRELOAD).is_some() { Hooks::OfPreload } else { Hooks::Own };
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

/// Where a function leads; `None` where the driver does not have it.
fn leads_to(name: &CStr) -> Option<usize> {
    let real = Library::driver(OF)?.function(name)?;
    let Some(own) = all().find(|route| route.of == OF && route.symbol == name) else {
        return Some(real);
    };
    let others = || Library::loaded(PRELOAD)?.function(name);
    match hooks() {
        Hooks::OfPreload => others().or(Some(own.hook.0 as usize)),
        Hooks::Own => Some(own.hook.0 as usize),
    }
}

/// Fills the slot of a function, and answers where to go.
extern "C" fn fill(index: u32) -> usize {
    let found = NAMES.get(index as usize).and_then(|name| leads_to(name));
    match (found, SLOTS.get(index as usize)) {
        (Some(address), Some(slot)) => {
            slot.store(address, Ordering::Release);
            address
        }
        _ => absent as *const () as usize,
    }
}

/// Stands for a function that the driver does not have.
extern "C" fn absent() -> c_int {
    crate::cuda::absent(OF)
}

/// Where an export goes whose slot is empty: fills it with the arguments put aside, and goes on as
/// if nothing had been. The index comes in a register that belongs to no argument.
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
        fill = sym fill,
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
        fill = sym fill,
    );
}

/// The jump of one export.
macro_rules! export {
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

/// All exports: number, name, name for C.
macro_rules! exports {
    ($count:literal: $($index:literal $name:ident $text:literal,)*) => {
        /// Where each leads; 0 = not used yet.
        static SLOTS: [AtomicUsize; $count] = [const { AtomicUsize::new(0) }; $count];

        static NAMES: [&CStr; $count] = [$($text),*];

        /// By their names, which are those of the hooks as well.
        mod exported {
            use super::*;
            $(
                #[unsafe(no_mangle)]
                #[unsafe(naked)]
                unsafe extern "C" fn $name() {
                    export!($index)
                }
            )*
        }
    };
}

include!(concat!(env!("OUT_DIR"), "/exports.rs"));

/// By this a proxy is known; nobody calls it.
#[unsafe(no_mangle)]
extern "C" fn tessera_intercept_proxy() {}

/// What a proxy does when it is loaded: it hides the functions that the driver behind it does not
/// have, so that programs that look for them find what they find without it: nothing. The real
/// library is loaded by then, since this one needs it.
extern "C" fn hide_what_the_driver_lacks() {
    let Some(driver) = Library::driver(OF) else { return };
    let is_hidden = |name: &CStr| name != PROXY_MARK && driver.function(name).is_none();
    // SAFETY: the loader initialises this library, and lets nobody look symbols up meanwhile. Where
    // nothing can be hidden, functions are found that answer that they are not there.
    let _ = unsafe {
        tessera_intercept_exports::hide(hide_what_the_driver_lacks as *const (), is_hidden)
    };
}

#[used]
#[unsafe(link_section = ".init_array")]
static WHEN_LOADED: extern "C" fn() = hide_what_the_driver_lacks;
