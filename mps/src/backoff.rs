//! How long to wait before a daemon that ended is started again.

use std::time::Duration;

const FIRST: Duration = Duration::from_secs(1);
const LONGEST: Duration = Duration::from_secs(30);

/// A daemon that was ready for so long had started well: the next end is another matter.
const SOUND: Duration = Duration::from_secs(60);

/// Twice as long each time, up to half a minute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Backoff(Duration);

impl Default for Backoff {
    fn default() -> Self {
        Self(FIRST)
    }
}

impl Backoff {
    /// After an end that followed so long a time of being ready.
    pub(crate) fn pause(&mut self, ready: Duration) -> Duration {
        if ready >= SOUND {
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
    fn it_doubles_up_to_half_a_minute_and_begins_anew_after_a_minute_of_readiness() {
        let mut backoff = Backoff::default();
        let mut pause = |ready| backoff.pause(Duration::from_secs(ready)).as_secs();
        let pauses: Vec<_> = [0, 59, 0, 0, 0, 0, 0].into_iter().map(&mut pause).collect();
        assert_eq!(pauses, [1, 2, 4, 8, 16, 30, 30]);
        assert_eq!([pause(60), pause(0)], [1, 2]);
    }
}
