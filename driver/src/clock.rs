//! The clock of ledgers and grants.

use rustix::time::ClockId;

/// Returns the time of the clock that ledgers and grants use.
pub(crate) fn monotonic_ns() -> u64 {
    let time = rustix::time::clock_gettime(ClockId::Monotonic);
    u64::try_from(time.tv_sec).unwrap_or(0) * 1_000_000_000
        + u64::try_from(time.tv_nsec).unwrap_or(0)
}
