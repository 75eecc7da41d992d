//! Waits two hours and a millisecond with every kind of wait, and prints the elapsed time. Used by
//! the test; it has one thread and no test harness.

use std::ffi::c_long;
use std::io::Error;
use std::thread;
use std::time::{Duration, Instant};

const HOUR: Duration = Duration::from_secs(3600);

/// Waits up to an hour on a futex whose word is 0; returns the result and errno.
fn wait_while(value: u32) -> (c_long, Option<i32>) {
    let (word, hour) = (0_u32, libc::timespec { tv_sec: 3600, tv_nsec: 0 });
    // SAFETY: word and time live as long as the call.
    let code = unsafe {
        libc::syscall(libc::SYS_futex, &raw const word, libc::FUTEX_WAIT, value, &raw const hour)
    };
    (code, Error::last_os_error().raw_os_error())
}

#[expect(clippy::disallowed_methods, reason = "the function under test")]
fn main() {
    // The loader only warns about a missing preload library, and the waits would be real.
    let maps = std::fs::read_to_string("/proc/self/maps").expect("readable");
    assert!(maps.contains("paused_clock"), "not preloaded");
    let began = Instant::now();
    thread::sleep(HOUR);
    assert_eq!(wait_while(0), (-1, Some(libc::ETIMEDOUT)));
    assert_eq!(wait_while(1), (-1, Some(libc::EAGAIN)));
    while began.elapsed() < HOUR * 2 + Duration::from_millis(1) {}
    // SAFETY: the call has no arguments.
    assert_eq!(unsafe { libc::syscall(libc::SYS_getpid) }, i64::from(std::process::id()));
    // SAFETY: closing an invalid descriptor only fails.
    assert_eq!(unsafe { libc::syscall(libc::SYS_close, -1) }, -1);
    assert_eq!(Error::last_os_error().raw_os_error(), Some(libc::EBADF));
    println!("{}", began.elapsed().as_nanos());
}
