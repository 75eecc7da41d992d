//! When work ends.
//!
//! Time is real time since the first look at it, in nanoseconds; how long work takes is modelled,
//! and stretched or shortened by the world's `time.scale`. A GPU does one kernel after the other,
//! of this process: other processes do not slow it down.

use std::sync::OnceLock;
use std::thread;
use std::time::{Duration, Instant};

/// When a GPU's kernels and copies end.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Timeline {
    kernels: u64,
    copies: u64,
}

/// What does the work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Engine {
    /// The multiprocessors.
    Kernels,
    /// The copy engine.
    Copies,
}

impl Timeline {
    /// Queues work behind what the stream (which ends at `stream_end`) and the engine have. Answers
    /// when it ends.
    pub(crate) fn queue(&mut self, engine: Engine, stream_end: u64, length: Duration) -> u64 {
        let busy = match engine {
            Engine::Kernels => &mut self.kernels,
            Engine::Copies => &mut self.copies,
        };
        let length = u64::try_from(length.as_nanos()).unwrap_or(u64::MAX);
        *busy = now().max(stream_end).max(*busy).saturating_add(length);
        *busy
    }

    /// When all of it ends.
    pub(crate) fn end(&self) -> u64 {
        self.kernels.max(self.copies)
    }
}

/// Nanoseconds since the first call.
pub(crate) fn now() -> u64 {
    static BEGIN: OnceLock<Instant> = OnceLock::new();
    u64::try_from(BEGIN.get_or_init(Instant::now).elapsed().as_nanos()).unwrap_or(u64::MAX)
}

/// Waits until that time.
#[expect(clippy::disallowed_methods, reason = "a deadline: the modelled end of GPU work")]
pub(crate) fn wait_until(end: u64) {
    if let Some(left) = end.checked_sub(now()) {
        thread::sleep(Duration::from_nanos(left));
    }
}

/// Keeps the caller busy, as making a launch does: too short to sleep.
pub(crate) fn spin(length: Duration) {
    let begin = Instant::now();
    while begin.elapsed() < length {
        std::hint::spin_loop();
    }
}
