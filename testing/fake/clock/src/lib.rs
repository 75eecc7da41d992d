//! Preload library (`LD_PRELOAD`) that skews the wall clock (CLOCK_REALTIME) of one process.
//!
//! `clock_gettime`, `gettimeofday` and `time` return a time of day that is ahead by the number of
//! seconds in the file that `TESSERA_FAKE_CLOCK` names.
//!
//! The file has one `i64` in the machine's byte order. It is mapped, so that a write in place
//! changes the clock of a running process; truncating the file crashes the process. Other clocks
//! (monotonic, boot time) are not skewed, as on a machine whose clock is set. Unlike on such a
//! machine, file times and the kernel's own times are not skewed either.
//!
//! Rust's standard library and programs that use libc call these symbols. Programs that call the
//! vDSO directly see the real time.

use std::ffi::{CStr, c_int, c_long};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicI64, AtomicPtr, Ordering};

/// Environment variable that names the file.
const VARIABLE: &CStr = c"TESSERA_FAKE_CLOCK";

/// Skew of zero, used if there is no file.
static NO_SKEW: AtomicI64 = AtomicI64::new(0);

/// The mapped file, or [`NO_SKEW`]; null until the first call.
static SKEW: AtomicPtr<AtomicI64> = AtomicPtr::new(null_mut());

/// Returns the skew in seconds.
fn skew() -> i64 {
    let mut found = SKEW.load(Ordering::Acquire);
    if found.is_null() {
        // Two threads may both map the file: both mappings have the same content, and the extra one
        // is harmless.
        found = map().unwrap_or(&raw const NO_SKEW as *mut AtomicI64);
        SKEW.store(found, Ordering::Release);
    }
    // SAFETY: this is `NO_SKEW`, or a page-aligned mapping of at least eight bytes that is never
    // unmapped.
    unsafe { &*found }.load(Ordering::Relaxed)
}

fn map() -> Option<*mut AtomicI64> {
    const LENGTH: usize = size_of::<AtomicI64>();
    // SAFETY: the name is a C string. The value is used before the environment can change: at the
    // first read of the clock, which in the target programs happens before they start threads.
    let path = unsafe { libc::getenv(VARIABLE.as_ptr()) };
    if path.is_null() {
        return None;
    }
    // SAFETY: a C string from the environment, and flags that need no mode.
    let file = unsafe { libc::open(path, libc::O_RDONLY | libc::O_CLOEXEC) };
    if file < 0 {
        return None;
    }
    // SAFETY: a new mapping, which changes no existing memory.
    let page =
        unsafe { libc::mmap(null_mut(), LENGTH, libc::PROT_READ, libc::MAP_SHARED, file, 0) };
    // SAFETY: the descriptor was opened here; the mapping does not need it.
    unsafe { libc::close(file) };
    (page != libc::MAP_FAILED).then_some(page.cast())
}

/// Returns the kernel's clock by a system call, because libc's function is the one replaced here.
///
/// # Safety
/// `time` is writable.
unsafe fn kernel_time(clock: libc::clockid_t, time: *mut libc::timespec) -> c_int {
    // SAFETY: the caller guarantees that `time` is writable.
    unsafe { libc::syscall(libc::SYS_clock_gettime, clock as c_long, time) as c_int }
}

/// Replaces libc's `clock_gettime`.
///
/// # Safety
/// `time` must be writable, as for libc's function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn clock_gettime(clock: libc::clockid_t, time: *mut libc::timespec) -> c_int {
    // SAFETY: the caller guarantees that `time` is writable.
    let outcome = unsafe { kernel_time(clock, time) };
    if outcome == 0 && matches!(clock, libc::CLOCK_REALTIME | libc::CLOCK_REALTIME_COARSE) {
        // SAFETY: the kernel has just written it.
        unsafe { (*time).tv_sec += skew() };
    }
    outcome
}

/// Replaces libc's `gettimeofday`, without time zones.
///
/// # Safety
/// `time` must be writable or null, as for libc's function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gettimeofday(time: *mut libc::timeval, _zone: *mut libc::c_void) -> c_int {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `now` is a local variable.
    let outcome = unsafe { clock_gettime(libc::CLOCK_REALTIME, &raw mut now) };
    if outcome == 0 && !time.is_null() {
        // SAFETY: the caller guarantees that `time` is writable.
        unsafe { *time = libc::timeval { tv_sec: now.tv_sec, tv_usec: now.tv_nsec / 1000 } };
    }
    outcome
}

/// Replaces libc's `time`.
///
/// # Safety
/// `time` must be writable or null, as for libc's function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn time(time: *mut libc::time_t) -> libc::time_t {
    let mut now = libc::timespec { tv_sec: -1, tv_nsec: 0 };
    // SAFETY: `now` is a local variable.
    unsafe { clock_gettime(libc::CLOCK_REALTIME, &raw mut now) };
    if !time.is_null() {
        // SAFETY: the caller guarantees that `time` is writable.
        unsafe { *time = now.tv_sec };
    }
    now.tv_sec
}
