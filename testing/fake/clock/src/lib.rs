//! A wall clock that is wrong, for one process, at any moment: preloaded (`LD_PRELOAD`), it answers
//! `clock_gettime`, `gettimeofday` and `time` for the time of day with so many seconds more as the
//! file says that `TESSERA_FAKE_CLOCK` names.
//!
//! The file holds one `i64` in the machine's byte order. It is mapped, so a write in place is a
//! jump of the clock of a running process; who truncates the file ends the process. Clocks that are
//! not of the day (monotonic, boot time) stay right, as on a machine whose clock is set. Times of
//! files and of the kernel stay right too, which on such a machine they would not.
//!
//! Rust's standard library and libc programs call these symbols; a program that enters the vDSO by
//! itself is not fooled.

use std::ffi::{CStr, c_int, c_long};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicI64, AtomicPtr, Ordering};

/// Names the file.
const VARIABLE: &CStr = c"TESSERA_FAKE_CLOCK";

/// What is read where there is no file.
static RIGHT: AtomicI64 = AtomicI64::new(0);

/// The mapped file, or [`RIGHT`]; null until the first call.
static AHEAD: AtomicPtr<AtomicI64> = AtomicPtr::new(null_mut());

/// By how many seconds the clock is ahead.
fn ahead() -> i64 {
    let mut found = AHEAD.load(Ordering::Acquire);
    if found.is_null() {
        // Two threads may both map it: the mappings are the same, and one more of them does no
        // harm.
        found = map().unwrap_or(&raw const RIGHT as *mut AtomicI64);
        AHEAD.store(found, Ordering::Release);
    }
    // SAFETY: it is `RIGHT`, or a mapping of at least eight bytes that is never undone, aligned as
    // a page is.
    unsafe { &*found }.load(Ordering::Relaxed)
}

fn map() -> Option<*mut AtomicI64> {
    const LENGTH: usize = size_of::<AtomicI64>();
    // SAFETY: the name is a C string; the value is used before anything could change the
    // environment: at the first look at the clock, which in the programs this is made for comes
    // before their first thread.
    let path = unsafe { libc::getenv(VARIABLE.as_ptr()) };
    if path.is_null() {
        return None;
    }
    // SAFETY: a C string from the environment, and flags that need no mode.
    let file = unsafe { libc::open(path, libc::O_RDONLY | libc::O_CLOEXEC) };
    if file < 0 {
        return None;
    }
    // SAFETY: a new mapping, which takes no memory away from anybody.
    let page =
        unsafe { libc::mmap(null_mut(), LENGTH, libc::PROT_READ, libc::MAP_SHARED, file, 0) };
    // SAFETY: the descriptor is ours; the mapping does not need it.
    unsafe { libc::close(file) };
    (page != libc::MAP_FAILED).then_some(page.cast())
}

/// The kernel's clock. Past libc: its own function is the one that is replaced here.
///
/// # Safety
/// `time` is writable.
unsafe fn kernel_time(clock: libc::clockid_t, time: *mut libc::timespec) -> c_int {
    // SAFETY: the caller vouches for `time`.
    unsafe { libc::syscall(libc::SYS_clock_gettime, clock as c_long, time) as c_int }
}

/// As libc's.
///
/// # Safety
/// As libc's: `time` is writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn clock_gettime(clock: libc::clockid_t, time: *mut libc::timespec) -> c_int {
    // SAFETY: the caller vouches for `time`.
    let outcome = unsafe { kernel_time(clock, time) };
    if outcome == 0 && matches!(clock, libc::CLOCK_REALTIME | libc::CLOCK_REALTIME_COARSE) {
        // SAFETY: the kernel has just written it.
        unsafe { (*time).tv_sec += ahead() };
    }
    outcome
}

/// As libc's, without time zones.
///
/// # Safety
/// As libc's: `time` is writable or null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gettimeofday(time: *mut libc::timeval, _zone: *mut libc::c_void) -> c_int {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `now` is ours.
    let outcome = unsafe { clock_gettime(libc::CLOCK_REALTIME, &raw mut now) };
    if outcome == 0 && !time.is_null() {
        // SAFETY: the caller vouches for `time`.
        unsafe { *time = libc::timeval { tv_sec: now.tv_sec, tv_usec: now.tv_nsec / 1000 } };
    }
    outcome
}

/// As libc's.
///
/// # Safety
/// As libc's: `time` is writable or null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn time(time: *mut libc::time_t) -> libc::time_t {
    let mut now = libc::timespec { tv_sec: -1, tv_nsec: 0 };
    // SAFETY: `now` is ours.
    unsafe { clock_gettime(libc::CLOCK_REALTIME, &raw mut now) };
    if !time.is_null() {
        // SAFETY: the caller vouches for `time`.
        unsafe { *time = now.tv_sec };
    }
    now.tv_sec
}
