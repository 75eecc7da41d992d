//! A clock that goes only while the program waits: preloaded (`LD_PRELOAD`), it answers for libc's
//! functions and for `syscall`.
//!
//! A wait with an end (`nanosleep`, `clock_nanosleep`, a futex with a time-out) returns at once,
//! and the monotonic clock is so much later from then on. Each look at the clock costs 50 ns, so
//! that a loop that waits for a time comes to its end. How busy the machine is makes no difference:
//! the same program sees the same times in each run, but for where the clock begins.
//!
//! For programs of one thread, by themselves: nobody is waited *for* here. A futex whose word
//! another thread or process would have changed times out instead. The time of day is the kernel's.

mod kernel;

use std::ffi::{c_int, c_long};
use std::sync::atomic::{AtomicU64, Ordering};

/// What a look at the clock takes, in nanoseconds: as long as the kernel's own on an ordinary
/// machine.
const LOOK_NS: u64 = 50;

const SECOND_NS: u64 = 1_000_000_000;

/// Monotonic time in nanoseconds; 0 until the first look.
static NOW: AtomicU64 = AtomicU64::new(0);

/// The time, so much later. Begins at the machine's, so that times of programs that ran before are
/// in the past.
fn pass(ns: u64) -> u64 {
    if NOW.load(Ordering::Relaxed) == 0 {
        let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: `time` is ours.
        unsafe { kernel::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
        let _ = NOW.compare_exchange(0, nanoseconds(&time), Ordering::Relaxed, Ordering::Relaxed);
    }
    NOW.fetch_add(ns, Ordering::Relaxed) + ns
}

fn nanoseconds(time: &libc::timespec) -> u64 {
    let [seconds, rest] = [time.tv_sec, time.tv_nsec].map(|part| u64::try_from(part).unwrap_or(0));
    seconds.saturating_mul(SECOND_NS).saturating_add(rest)
}

fn is_paused(clock: libc::clockid_t) -> bool {
    matches!(
        clock,
        libc::CLOCK_MONOTONIC
            | libc::CLOCK_MONOTONIC_RAW
            | libc::CLOCK_MONOTONIC_COARSE
            | libc::CLOCK_BOOTTIME
    )
}

fn fails(errno: c_int) -> c_int {
    // SAFETY: the thread's own.
    unsafe { *libc::__errno_location() = errno };
    -1
}

/// As libc's.
///
/// # Safety
/// As libc's: `time` is writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn clock_gettime(clock: libc::clockid_t, time: *mut libc::timespec) -> c_int {
    if !is_paused(clock) {
        // SAFETY: the caller vouches for `time`.
        return unsafe { kernel::clock_gettime(clock, time) };
    }
    let now = pass(LOOK_NS);
    let [seconds, rest] = [now / SECOND_NS, now % SECOND_NS].map(u64::cast_signed);
    // SAFETY: the caller vouches for `time`.
    unsafe { *time = libc::timespec { tv_sec: seconds, tv_nsec: rest } };
    0
}

/// As libc's, without signals.
///
/// # Safety
/// As libc's: `length` is readable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nanosleep(
    length: *const libc::timespec,
    _left: *mut libc::timespec,
) -> c_int {
    // SAFETY: the caller vouches for it.
    pass(nanoseconds(unsafe { &*length }));
    0
}

/// As libc's, without signals; whatever the clock, by the one that is paused.
///
/// # Safety
/// As libc's: `time` is readable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn clock_nanosleep(
    _clock: libc::clockid_t,
    flags: c_int,
    time: *const libc::timespec,
    _left: *mut libc::timespec,
) -> c_int {
    // SAFETY: the caller vouches for it.
    let time = nanoseconds(unsafe { &*time });
    let is_end = flags & libc::TIMER_ABSTIME != 0;
    pass(if is_end { time.saturating_sub(pass(0)) } else { time });
    0
}

/// As libc's, for looks at the clock and waits for a futex; all else is the kernel's.
///
/// # Safety
/// As libc's: the arguments are what the call wants. The function is variadic in C; integers and
/// pointers go the same way to one that is not, in the calling conventions of x86-64 and aarch64.
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
        // SAFETY: the caller's own arguments, as this call takes them.
        libc::SYS_clock_gettime => unsafe { clock_gettime(a as c_int, b as *mut _).into() },
        libc::SYS_futex if b as c_int | libc::FUTEX_PRIVATE_FLAG == wait && d != 0 => {
            // SAFETY: a futex word is aligned and readable, and so is its time-out.
            let (word, length) =
                unsafe { (&*(a as *const std::sync::atomic::AtomicU32), &*(d as *const _)) };
            if word.load(Ordering::SeqCst) != c as u32 {
                return fails(libc::EAGAIN).into();
            }
            pass(nanoseconds(length));
            fails(libc::ETIMEDOUT).into()
        }
        // SAFETY: the caller's own call.
        _ => match unsafe { kernel::call(number, [a, b, c, d, e, f]) } {
            error @ -4095..=-1 => fails(-error as c_int).into(),
            result => result,
        },
    }
}
