//! A line every few seconds, so that a long trial can be told from one that hangs.

use std::time::{Duration, Instant};

const EVERY: Duration = Duration::from_secs(5);

/// How far a trial has come.
pub(super) struct Progress {
    what: &'static str,
    all: usize,
    began: Instant,
    told: Instant,
}

impl Progress {
    /// Nothing is done yet of `all` of these.
    pub(super) fn new(what: &'static str, all: usize) -> Self {
        Self { what, all, began: Instant::now(), told: Instant::now() }
    }

    /// So many are done; says so if it has not for a while.
    pub(super) fn at(&mut self, done: usize, more: impl FnOnce() -> String) {
        if self.told.elapsed() >= EVERY {
            self.told = Instant::now();
            let seconds = self.began.elapsed().as_secs_f64();
            let rate = f64::from(u32::try_from(done).unwrap_or(u32::MAX)) / seconds;
            println!(
                "    {done} of {} {} after {seconds:.0} s ({rate:.0}/s){}",
                self.all,
                self.what,
                more()
            );
        }
    }
}
