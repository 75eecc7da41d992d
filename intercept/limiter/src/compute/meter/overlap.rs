//! Overlap: kernels of several streams of a process that run at the same time.
//!
//! A process uses the GPU while any of its streams runs, so the times of its launches add up to
//! more than it uses. The events of all its streams have one clock: the time from one end of a
//! measured launch to the next is the most that all launches in between can have used, and exactly
//! that if the process had work all the time. Later launches are charged that part of their
//! estimates in advance.

use super::Meter;
use super::interruptions::Interruptions;
use crate::compute::part::Part;

/// Charged GPU time over which the parts are means.
const MEMORY_NS: u64 = 30_000_000;

/// Charged GPU time before which a part is not known.
const LEAST_NS: u64 = 2_000_000;

/// Decaying sums of estimated and used GPU time, in ns.
#[derive(Debug, Clone, Copy)]
struct Sums {
    estimated: u64,
    used: u64,
}

impl Sums {
    const fn new() -> Self {
        Self { estimated: 0, used: 0 }
    }

    fn add(&mut self, estimated_ns: u64, used_ns: u64) {
        if self.estimated > MEMORY_NS {
            *self = Self { estimated: self.estimated / 2, used: self.used / 2 };
        }
        self.estimated = self.estimated.saturating_add(estimated_ns);
        self.used = self.used.saturating_add(used_ns);
    }

    fn part(&self) -> Part {
        if self.estimated < LEAST_NS {
            return Part::ALL;
        }
        Part::of_sums(self.used, self.estimated)
    }
}

/// Use of launches of several streams, beside their estimates.
#[derive(Debug)]
pub(super) struct Overlap {
    /// All launches.
    all: Sums,
    /// Launches that ended while the process had work all the time.
    within: Sums,
    /// Turns of other contexts between them.
    pub(super) interruptions: Interruptions,
    /// GPU time from the end of the last span in the order of submission to the latest end.
    ahead_ns: u64,
}

impl Overlap {
    pub(super) const fn new() -> Self {
        Self {
            all: Sums::new(),
            within: Sums::new(),
            interruptions: Interruptions::new(),
            ahead_ns: 0,
        }
    }

    /// Forgets what was learnt: the process launches in one stream.
    pub(super) const fn reset(&mut self) {
        (self.all, self.within) = (Sums::new(), Sums::new());
        self.interruptions = Interruptions::new();
    }

    /// Returns the part of estimates that is charged in advance.
    pub(super) fn part(&self) -> Part {
        self.all.part()
    }

    /// Returns the part of estimates that launches beside others use.
    pub(super) fn part_within(&self) -> Part {
        self.within.part()
    }

    /// A span ended this time after the last span in the order of submission, and is now the last.
    /// Returns the time from the latest end to its end.
    pub(super) fn advance(&mut self, after_last_ns: i64) -> u64 {
        let ahead_ns = i64::try_from(self.ahead_ns).unwrap_or(i64::MAX);
        let beyond_ns = after_last_ns.saturating_sub(ahead_ns);
        self.ahead_ns = u64::try_from(beyond_ns.saturating_neg()).unwrap_or(0);
        u64::try_from(beyond_ns).unwrap_or(0)
    }

    /// A span that was submitted before the last one ended this time after it. Returns the time
    /// from the latest end to its end, 0 if it is earlier.
    pub(super) fn overtaken(&mut self, after_last_ns: i64) -> u64 {
        let after_last_ns = u64::try_from(after_last_ns).unwrap_or(0);
        let beyond_ns = after_last_ns.saturating_sub(self.ahead_ns);
        self.ahead_ns += beyond_ns;
        beyond_ns
    }

    /// The next span begins a new sequence: nothing is known of the latest end.
    pub(super) const fn restart(&mut self) {
        self.ahead_ns = 0;
    }

    /// Learns what launches used.
    pub(super) fn learn(&mut self, estimated_ns: u64, used_ns: u64) {
        self.all.add(estimated_ns, used_ns);
    }

    /// Learns what launches used that ended while the process had work all the time.
    pub(super) fn learn_within(&mut self, estimated_ns: u64, used_ns: u64) {
        self.within.add(estimated_ns, used_ns);
    }
}

impl Meter {
    /// Returns the part of estimates that is charged in advance.
    pub(super) fn charged_part(&self, now: u64) -> Part {
        if self.has_streams(now) { self.overlap.part() } else { Part::ALL }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_of_all_spans_add_up_to_the_latest_end() {
        let mut overlap = Overlap::new();
        assert_eq!(overlap.advance(100), 100, "ends at 100");
        assert_eq!(overlap.overtaken(30), 30, "at 130, submitted before");
        assert_eq!(overlap.overtaken(20), 0, "at 120");
        assert_eq!(overlap.advance(10), 0, "at 110");
        assert_eq!(overlap.advance(40), 20, "at 150");
        overlap.restart();
        assert_eq!(overlap.advance(7), 7);
    }

    #[test]
    fn part_is_all_until_it_is_known() {
        let mut overlap = Overlap::new();
        overlap.learn(LEAST_NS - 1, LEAST_NS / 4);
        assert_eq!(overlap.part(), Part::ALL);
        overlap.learn(LEAST_NS, LEAST_NS / 4);
        assert_eq!(overlap.part().of(4_000), 1_000);
        assert_eq!(overlap.part_within(), Part::ALL, "nothing is known of these");
        overlap.reset();
        assert_eq!(overlap.part(), Part::ALL);
    }
}
