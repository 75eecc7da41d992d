//! Delay before a daemon that exited is restarted.

use std::time::Duration;

const FIRST: Duration = Duration::from_secs(1);
const LONGEST: Duration = Duration::from_secs(30);

/// Ready time after which a daemon has started well, so that the delay is reset.
const STABLE: Duration = Duration::from_secs(60);

/// Delay that doubles with each failure, up to 30 seconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Backoff(Duration);

impl Default for Backoff {
    fn default() -> Self {
        Self(FIRST)
    }
}

impl Backoff {
    /// Returns the delay after an exit that followed `ready` of readiness.
    pub(crate) fn pause(&mut self, ready: Duration) -> Duration {
        if ready >= STABLE {
            *self = Self::default();
        }
        let pause = self.0;
        self.0 = (pause * 2).min(LONGEST);
        pause
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn doubles_up_to_30_s_and_resets_after_60_s_ready() {
        let mut backoff = Backoff::default();
        let mut pause = |ready| backoff.pause(Duration::from_secs(ready)).as_secs();
        let pauses: Vec<_> = [0, 59, 0, 0, 0, 0, 0].into_iter().map(&mut pause).collect();
        assert_eq!(pauses, [1, 2, 4, 8, 16, 30, 30]);
        assert_eq!([pause(60), pause(0)], [1, 2]);
    }
}
