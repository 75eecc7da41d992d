//! The kernel, past libc: its own functions are those that are replaced here.

use std::arch::asm;
use std::ffi::{c_int, c_long};

/// A system call; what the kernel answers, errors as negative numbers.
///
/// # Safety
/// The arguments are what the call wants.
#[cfg(target_arch = "x86_64")]
pub(crate) unsafe fn call(number: c_long, [a, b, c, d, e, f]: [usize; 6]) -> c_long {
    let mut result = number;
    // SAFETY: the kernel's convention: it keeps all registers but these three.
    unsafe {
        asm!("syscall", inlateout("rax") result, in("rdi") a, in("rsi") b, in("rdx") c, in("r10") d, in("r8") e,
             in("r9") f, lateout("rcx") _, lateout("r11") _, options(nostack));
    }
    result
}

/// A system call; what the kernel answers, errors as negative numbers.
///
/// # Safety
/// The arguments are what the call wants.
#[cfg(target_arch = "aarch64")]
pub(crate) unsafe fn call(number: c_long, [a, b, c, d, e, f]: [usize; 6]) -> c_long {
    let mut result = a as c_long;
    // SAFETY: the kernel's convention: it keeps all registers but the first.
    unsafe {
        asm!("svc 0", in("x8") number, inlateout("x0") result, in("x1") b, in("x2") c, in("x3") d, in("x4") e,
             in("x5") f, options(nostack));
    }
    result
}

/// The time, by the kernel's clock.
///
/// # Safety
/// `time` is writable.
pub(crate) unsafe fn clock_gettime(clock: libc::clockid_t, time: *mut libc::timespec) -> c_int {
    // SAFETY: the caller vouches for `time`.
    let result =
        unsafe { call(libc::SYS_clock_gettime, [clock as usize, time as usize, 0, 0, 0, 0]) };
    if result < 0 { crate::fails(-result as c_int) } else { 0 }
}
