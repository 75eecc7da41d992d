//! Time as the core reads it: a monotonic clock for deadlines, a wall clock for ages.
//!
//! The core reads no clock. Each step gets a [`Now`], so tests choose the time.

use std::ops::{Add, AddAssign, Sub};
use std::time::Duration;

/// A point in time on a monotonic clock, as the duration since this process began to lead.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Moment(Duration);

impl Moment {
    /// The beginning of the clock.
    pub const START: Self = Self(Duration::ZERO);

    /// Returns the moment at this duration after the beginning of the clock.
    #[must_use]
    pub fn after_start(elapsed: Duration) -> Self {
        Self(elapsed)
    }

    /// Returns the duration since the beginning of the clock.
    #[must_use]
    pub fn since_start(self) -> Duration {
        self.0
    }
}

impl Add<Duration> for Moment {
    type Output = Self;

    /// A moment beyond the end of the clock is its end.
    fn add(self, duration: Duration) -> Self {
        Self(self.0.saturating_add(duration))
    }
}

impl AddAssign<Duration> for Moment {
    fn add_assign(&mut self, duration: Duration) {
        *self = *self + duration;
    }
}

impl Sub for Moment {
    type Output = Duration;

    /// The duration since an earlier moment; zero since a later one.
    fn sub(self, earlier: Self) -> Duration {
        self.0.saturating_sub(earlier.0)
    }
}

impl Sub<Duration> for Moment {
    type Output = Self;

    /// A moment before the beginning of the clock is its beginning.
    fn sub(self, duration: Duration) -> Self {
        Self(self.0.saturating_sub(duration))
    }
}

/// The time of one step of the core.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Now {
    /// The monotonic time: holds and deadlines.
    pub monotonic: Moment,
    /// The wall clock in seconds since the epoch: ages of pods only.
    pub wall: i64,
}
