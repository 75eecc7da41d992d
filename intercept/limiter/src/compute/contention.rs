//! Contention of a GPU by other contexts.

use crate::compute::proportion::in_proportion;

/// Number of other contexts that had work on the GPU at the same time, on average over some time,
/// in 1/256.
///
/// A GPU that is shared in time gives every context with work the same slice in turn. So of the
/// wall time in which a process has work, its own part is one divided by one plus this number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Contention(u32);

impl Contention {
    /// No other context.
    pub const NONE: Self = Self(0);
    /// Less than this is an artefact of reading clocks one after the other.
    const NOTICEABLE: u32 = 8;
    /// The difference from a whole number of contexts that is more than the error of readings.
    const PARTIAL: u32 = 32;

    /// Takes 256ths of a context.
    #[must_use]
    pub const fn new(in_256ths: u32) -> Self {
        Self(in_256ths)
    }

    /// Returns the mean over `wall_ns` from the sum of the busy times of the others.
    #[must_use]
    pub fn over(busy_ns: u64, wall_ns: u64) -> Self {
        let average = busy_ns.saturating_mul(256) / wall_ns.max(1);
        Self(u32::try_from(average).unwrap_or(u32::MAX))
    }

    /// Returns the contention under which a process got `own_ns` of `wall_ns`.
    #[must_use]
    pub fn of_share(own_ns: u64, wall_ns: u64) -> Self {
        Self::over(wall_ns.saturating_sub(own_ns), own_ns)
    }

    /// Adds contexts that always have work.
    #[must_use]
    pub fn and(self, contexts: u64) -> Self {
        Self(u32::try_from(contexts.saturating_mul(256)).unwrap_or(u32::MAX).saturating_add(self.0))
    }

    /// Returns 256ths of a context.
    #[must_use]
    pub const fn in_256ths(self) -> u32 {
        self.0
    }

    /// Returns whole contexts, rounded up.
    #[must_use]
    pub const fn contexts(self) -> u64 {
        self.0.div_ceil(256) as u64
    }

    /// Returns true if it is too small to be measured.
    #[must_use]
    pub const fn is_negligible(self) -> bool {
        self.0 < Self::NOTICEABLE
    }

    /// Returns true if some context had work for a part of the time only.
    #[must_use]
    pub const fn is_partial(self) -> bool {
        let part = self.0 % 256;
        part >= Self::PARTIAL && part <= 256 - Self::PARTIAL
    }

    /// Returns the part of a time with work that was the process's own. Between whole numbers of
    /// contexts it is in proportion: half a context on average is one for half of the time.
    #[must_use]
    pub const fn share_of(self, wall_ns: u64) -> u64 {
        if self.is_negligible() {
            return wall_ns;
        }
        let (whole, part) = (self.0 as u64 / 256, self.0 as u64 % 256);
        let (fewer, more) = (wall_ns / (whole + 1), wall_ns / (whole + 2));
        fewer - in_proportion(fewer - more, part, 256)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_contexts_have_work_all_the_time() {
        let is_partial = |in_256ths| Contention::new(in_256ths).is_partial();
        assert!([0, 31, 225, 256, 287, 512].into_iter().all(|part| !is_partial(part)));
        assert!([32, 128, 224, 288, 400].into_iter().all(is_partial));
    }
}
