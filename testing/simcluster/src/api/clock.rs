//! The server's wall clock, which a test can set wrong.

use std::sync::atomic::{AtomicI64, Ordering};

use jiff::{SignedDuration, Timestamp};

/// The machine's clock plus an offset.
#[derive(Debug, Default)]
pub(crate) struct Clock {
    ahead_seconds: AtomicI64,
}

impl Clock {
    pub(crate) fn now(&self) -> Timestamp {
        let (now, ahead) = (
            Timestamp::now(),
            SignedDuration::from_secs(self.ahead_seconds.load(Ordering::Relaxed)),
        );
        now.checked_add(ahead).unwrap_or(now)
    }

    pub(crate) fn set_ahead(&self, seconds: i64) {
        self.ahead_seconds.store(seconds, Ordering::Relaxed);
    }
}
