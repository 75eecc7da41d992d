//! System calls without libc, because libc's functions are the ones replaced here.

use std::arch::asm;
use std::ffi::{c_int, c_long};

/// Makes a system call and returns the kernel's result; errors are negative numbers.
///
/// # Safety
/// The arguments must be valid for the call.
#[cfg(target_arch = "x86_64")]
pub(crate) unsafe fn call(number: c_long, [a, b, c, d, e, f]: [usize; 6]) -> c_long {
    let mut result = number;
    // SAFETY: by the kernel's calling convention, only these three registers change.
    unsafe {
        asm!("syscall", inlateout("rax") result, in("rdi") a, in("rsi") b, in("rdx") c, in("r10") d, in("r8") e,
             in("r9") f, lateout("rcx") _, lateout("r11") _, options(nostack));
    }
    result
}

/// Makes a system call and returns the kernel's result; errors are negative numbers.
///
/// # Safety
/// The arguments must be valid for the call.
#[cfg(target_arch = "aarch64")]
pub(crate) unsafe fn call(number: c_long, [a, b, c, d, e, f]: [usize; 6]) -> c_long {
    let mut result = a as c_long;
    // SAFETY: by the kernel's calling convention, only the first register changes.
    unsafe {
        asm!("svc 0", in("x8") number, inlateout("x0") result, in("x1") b, in("x2") c, in("x3") d, in("x4") e,
             in("x5") f, options(nostack));
    }
    result
}

/// Reads the kernel's clock.
///
/// # Safety
/// `time` must be writable.
pub(crate) unsafe fn clock_gettime(clock: libc::clockid_t, time: *mut libc::timespec) -> c_int {
    // SAFETY: the caller guarantees that `time` is writable.
    let result =
        unsafe { call(libc::SYS_clock_gettime, [clock as usize, time as usize, 0, 0, 0, 0]) };
    if result < 0 { crate::set_errno(-result as c_int) } else { 0 }
}
