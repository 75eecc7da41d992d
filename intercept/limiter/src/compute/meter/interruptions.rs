//! Interruptions of windows by turns of other contexts.
//!
//! The use in an interrupted window is not known: the turns of others may be of any length. It is
//! derived from the windows without an interruption. A turn of the process ends at any time, so
//! that a window of the length `x` is interrupted with the probability `x / slice`, a long one more
//! often than a short one (inspection paradox). For each window that was not, `x / (slice - x)`
//! windows of that length were.

use crate::compute::proportion::in_proportion;

/// One interruption.
const ONE: u64 = 1 << 16;

/// Interruptions over which the sums are means.
const MEMORY: u64 = 32 * ONE;

/// Interruptions from which the sums are used.
const LEAST: u64 = 4 * ONE;

/// Interruptions of windows in which the process had work all the time, in 65536ths.
#[derive(Debug)]
pub(super) struct Interruptions {
    /// Interruptions that follow from the windows without.
    expected: u64,
    /// Sum of the lengths of the windows that they interrupt, times 65536, in us.
    expected_us: u64,
    seen: u64,
}

impl Interruptions {
    pub(super) const fn new() -> Self {
        Self { expected: 0, expected_us: 0, seen: 0 }
    }

    /// Learns the length of a window. Without a slice of another context in it, it was not
    /// interrupted.
    pub(super) fn learn(&mut self, elapsed_ns: u64, slice_ns: u64) {
        if self.expected.max(self.seen) > MEMORY {
            *self = Self {
                expected: self.expected / 2,
                expected_us: self.expected_us / 2,
                seen: self.seen / 2,
            };
        }
        if elapsed_ns >= slice_ns {
            self.seen += ONE;
            return;
        }
        let known_ns = elapsed_ns.min(slice_ns / 8 * 7);
        let expected = in_proportion(known_ns, ONE, slice_ns - known_ns);
        self.expected += expected;
        self.expected_us += expected.saturating_mul(known_ns / 1_000);
    }

    /// Returns true if the interrupted windows are shorter than this: as many were seen as follow
    /// from the others. Windows that are always interrupted are long ones.
    pub(super) fn are_of_windows_below(&self, most_ns: u64) -> bool {
        let are_expected = self.seen >= LEAST && self.seen <= 2 * self.expected;
        are_expected && self.mean_ns().is_some_and(|mean_ns| mean_ns < most_ns)
    }

    /// Returns the mean GPU time of an interrupted window. `None` if too few others are known.
    pub(super) fn mean_ns(&self) -> Option<u64> {
        (self.expected >= LEAST).then(|| self.expected_us / self.expected * 1_000)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const US: u64 = 1_000;
    const SLICE: u64 = 2_000 * US;

    /// Learns windows of these lengths in turn on a GPU that another context has after each slice,
    /// also for a slice. Returns the mean GPU time of those that were interrupted.
    fn learn_in_turn(interruptions: &mut Interruptions, lengths_us: &[u64], turns: u64) -> u64 {
        let (mut now, mut interrupted_ns) = (0, 0);
        for length_us in lengths_us.iter().cycle() {
            let length_ns = length_us * US;
            let ends = (now + length_ns) / SLICE - now / SLICE;
            interruptions.learn(length_ns + ends * SLICE, SLICE);
            now += length_ns;
            interrupted_ns += ends * length_ns;
            if now > turns * SLICE {
                break;
            }
        }
        interrupted_ns / turns
    }

    #[test]
    fn use_in_interrupted_windows_follows_from_the_others() {
        for lengths_us in [&[203][..], &[37, 411], &[13, 13, 13, 907, 101]] {
            let mut interruptions = Interruptions::new();
            let used_ns = learn_in_turn(&mut interruptions, lengths_us, 400);
            let mean_ns = interruptions.mean_ns().unwrap();
            assert!(mean_ns.abs_diff(used_ns) < used_ns / 8, "{mean_ns} {used_ns} {lengths_us:?}");
            assert!(interruptions.are_of_windows_below(SLICE / 8 * 5), "{lengths_us:?}");
        }
    }

    #[test]
    fn windows_that_are_always_interrupted_are_long() {
        for lengths_us in [&[2_300][..], &[3, 5, 2_003], &[1_700, 3]] {
            let mut interruptions = Interruptions::new();
            learn_in_turn(&mut interruptions, lengths_us, 400);
            assert!(!interruptions.are_of_windows_below(SLICE / 8 * 5), "{interruptions:?}");
        }
    }

    #[test]
    fn few_interruptions_say_nothing() {
        let mut interruptions = Interruptions::new();
        learn_in_turn(&mut interruptions, &[203], 2);
        assert_eq!(interruptions.mean_ns(), None);
        assert!(!interruptions.are_of_windows_below(SLICE));
    }
}
