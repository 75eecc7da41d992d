//! End times of GPU work.
//!
//! Time is real time since the first call, in nanoseconds. The length of work is modelled and
//! scaled by the world's `time.scale`. A GPU executes the kernels of this process one after the
//! other; other processes do not slow it down.

use std::sync::OnceLock;
use std::thread;
use std::time::{Duration, Instant};

/// End times of a GPU's kernels and copies.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Timeline {
    kernels: u64,
    copies: u64,
}

/// Engine that executes work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Engine {
    /// Multiprocessors.
    Kernels,
    /// Copy engine.
    Copies,
}

impl Timeline {
    /// Queues work behind the work of the stream, which ends at `stream_end`, and of the engine.
    /// Returns its end time.
    pub(crate) fn queue(&mut self, engine: Engine, stream_end: u64, length: Duration) -> u64 {
        let busy = match engine {
            Engine::Kernels => &mut self.kernels,
            Engine::Copies => &mut self.copies,
        };
        let length = u64::try_from(length.as_nanos()).unwrap_or(u64::MAX);
        *busy = now().max(stream_end).max(*busy).saturating_add(length);
        *busy
    }

    /// Returns the end time of all work.
    pub(crate) fn end(&self) -> u64 {
        self.kernels.max(self.copies)
    }
}

/// Returns the nanoseconds since the first call.
pub(crate) fn now() -> u64 {
    static BEGIN: OnceLock<Instant> = OnceLock::new();
    u64::try_from(BEGIN.get_or_init(Instant::now).elapsed().as_nanos()).unwrap_or(u64::MAX)
}

/// Waits until `end`.
#[expect(clippy::disallowed_methods, reason = "a deadline: the modelled end of GPU work")]
pub(crate) fn wait_until(end: u64) {
    if let Some(left) = end.checked_sub(now()) {
        thread::sleep(Duration::from_nanos(left));
    }
}

/// Busy-waits, as for the CPU time of a launch, which is too short to sleep.
pub(crate) fn spin(length: Duration) {
    let begin = Instant::now();
    while begin.elapsed() < length {
        std::hint::spin_loop();
    }
}
