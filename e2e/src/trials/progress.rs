//! Progress messages of long trials.

use std::time::{Duration, Instant};

const INTERVAL: Duration = Duration::from_secs(5);

/// Progress of a trial.
pub(super) struct Progress {
    what: &'static str,
    total: usize,
    began: Instant,
    reported: Instant,
}

impl Progress {
    /// Creates the progress of `all` items.
    pub(super) fn new(what: &'static str, total: usize) -> Self {
        Self { what, total, began: Instant::now(), reported: Instant::now() }
    }

    /// Reports that `done` items are finished, at most every 5 s.
    pub(super) fn report(&mut self, done: usize, more: impl FnOnce() -> String) {
        if self.reported.elapsed() >= INTERVAL {
            self.reported = Instant::now();
            let seconds = self.began.elapsed().as_secs_f64();
            let rate = f64::from(u32::try_from(done).unwrap_or(u32::MAX)) / seconds;
            println!(
                "    {done} of {} {} after {seconds:.0} s ({rate:.0}/s){}",
                self.total,
                self.what,
                more()
            );
        }
    }
}
