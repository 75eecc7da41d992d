//! Preload library (`LD_PRELOAD`) with a deterministic virtual monotonic clock.
//!
//! The clock advances only during waits. The library replaces libc's functions and `syscall`.
//!
//! A wait with a timeout (`nanosleep`, `clock_nanosleep`, a futex with a timeout) returns at once,
//! and the monotonic clock advances by its length. Each read of the clock costs 50 ns, so that a
//! loop that polls the clock ends. The load of the machine makes no difference: a program sees the
//! same times in each run, except for the start of the clock.
//!
//! Only for programs with one thread that do not depend on other processes. A futex whose word
//! another thread or process would have changed times out instead. The time of day is the kernel's.

mod kernel;

use std::ffi::{c_int, c_long};
use std::sync::atomic::{AtomicU64, Ordering};

/// Cost of a read of the clock in nanoseconds: as long as the kernel's on an ordinary machine.
const READ_NS: u64 = 50;

const SECOND_NS: u64 = 1_000_000_000;

/// Monotonic time in nanoseconds; 0 until the first read.
static NOW: AtomicU64 = AtomicU64::new(0);

/// Advances the clock and returns the new time.
///
/// The clock starts at the machine's time, so that times of earlier programs are in the past.
fn advance(ns: u64) -> u64 {
    if NOW.load(Ordering::Relaxed) == 0 {
        let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: `time` is a local variable.
        unsafe { kernel::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
        let _ = NOW.compare_exchange(0, nanoseconds(&time), Ordering::Relaxed, Ordering::Relaxed);
    }
    NOW.fetch_add(ns, Ordering::Relaxed) + ns
}

fn nanoseconds(time: &libc::timespec) -> u64 {
    let [seconds, rest] = [time.tv_sec, time.tv_nsec].map(|part| u64::try_from(part).unwrap_or(0));
    seconds.saturating_mul(SECOND_NS).saturating_add(rest)
}

fn is_virtual(clock: libc::clockid_t) -> bool {
    matches!(
        clock,
        libc::CLOCK_MONOTONIC
            | libc::CLOCK_MONOTONIC_RAW
            | libc::CLOCK_MONOTONIC_COARSE
            | libc::CLOCK_BOOTTIME
    )
}

fn set_errno(errno: c_int) -> c_int {
    // SAFETY: errno belongs to the calling thread.
    unsafe { *libc::__errno_location() = errno };
    -1
}

/// Replaces libc's `clock_gettime`.
///
/// # Safety
/// `time` must be writable, as for libc's function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn clock_gettime(clock: libc::clockid_t, time: *mut libc::timespec) -> c_int {
    if !is_virtual(clock) {
        // SAFETY: the caller guarantees that `time` is writable.
        return unsafe { kernel::clock_gettime(clock, time) };
    }
    let now = advance(READ_NS);
    let [seconds, rest] = [now / SECOND_NS, now % SECOND_NS].map(u64::cast_signed);
    // SAFETY: the caller guarantees that `time` is writable.
    unsafe { *time = libc::timespec { tv_sec: seconds, tv_nsec: rest } };
    0
}

/// Replaces libc's `nanosleep`, without signals.
///
/// # Safety
/// `length` must be readable, as for libc's function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nanosleep(
    length: *const libc::timespec,
    _left: *mut libc::timespec,
) -> c_int {
    // SAFETY: the caller guarantees that `length` is readable.
    advance(nanoseconds(unsafe { &*length }));
    0
}

/// Replaces libc's `clock_nanosleep`, without signals. All clocks are the virtual one.
///
/// # Safety
/// `time` must be readable, as for libc's function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn clock_nanosleep(
    _clock: libc::clockid_t,
    flags: c_int,
    time: *const libc::timespec,
    _left: *mut libc::timespec,
) -> c_int {
    // SAFETY: the caller guarantees that `time` is readable.
    let time = nanoseconds(unsafe { &*time });
    let is_end = flags & libc::TIMER_ABSTIME != 0;
    advance(if is_end { time.saturating_sub(advance(0)) } else { time });
    0
}

/// Replaces libc's `syscall` for reads of the clock and futex waits; other calls go to the kernel.
///
/// # Safety
/// The arguments must be valid for the call. The function is variadic in C. In the calling
/// conventions of x86-64 and aarch64, integers and pointers are passed in the same way to a
/// function that is not.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn syscall(
    number: c_long,
    a: usize,
    b: usize,
    c: usize,
    d: usize,
    e: usize,
    f: usize,
) -> c_long {
    let wait = libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG;
    match number {
        // SAFETY: the arguments of the caller, in the order of this call.
        libc::SYS_clock_gettime => unsafe { clock_gettime(a as c_int, b as *mut _).into() },
        libc::SYS_futex if b as c_int | libc::FUTEX_PRIVATE_FLAG == wait && d != 0 => {
            // SAFETY: a futex word is aligned and readable, and so is its timeout.
            let (word, length) =
                unsafe { (&*(a as *const std::sync::atomic::AtomicU32), &*(d as *const _)) };
            if word.load(Ordering::SeqCst) != c as u32 {
                return set_errno(libc::EAGAIN).into();
            }
            advance(nanoseconds(length));
            set_errno(libc::ETIMEDOUT).into()
        }
        // SAFETY: the arguments of the caller.
        _ => match unsafe { kernel::call(number, [a, b, c, d, e, f]) } {
            error @ -4095..=-1 => set_errno(-error as c_int).into(),
            result => result,
        },
    }
}
