//! Who else is on the GPU.

use crate::compute::proportion::in_proportion;

/// How many other contexts had work on the GPU at the same time, on average over some time, in
/// 1/256.
///
/// A GPU that is shared in time gives every context with work the same slice in turn. So of the
/// wall time in which a process has work, one part in one plus this is its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Crowd(u32);

impl Crowd {
    /// Nobody.
    pub const NOBODY: Self = Self(0);
    /// Less than this much company is nobody: what comes of reading clocks one after the other.
    const NOTICEABLE: u32 = 8;

    /// Takes 256ths of a context.
    #[must_use]
    pub const fn new(in_256ths: u32) -> Self {
        Self(in_256ths)
    }

    /// From the sum of the others' busy time over some time.
    #[must_use]
    pub fn over(busy_ns: u64, wall_ns: u64) -> Self {
        let average = busy_ns.saturating_mul(256) / wall_ns.max(1);
        Self(u32::try_from(average).unwrap_or(u32::MAX))
    }

    /// From what a process had of some time.
    #[must_use]
    pub fn of_share(had_ns: u64, wall_ns: u64) -> Self {
        Self::over(wall_ns.saturating_sub(had_ns), had_ns)
    }

    /// And so many more.
    #[must_use]
    pub fn and(self, contexts: u64) -> Self {
        Self(u32::try_from(contexts.saturating_mul(256)).unwrap_or(u32::MAX).saturating_add(self.0))
    }

    /// 256ths of a context.
    #[must_use]
    pub const fn in_256ths(self) -> u32 {
        self.0
    }

    /// Whether there is nobody to speak of.
    #[must_use]
    pub const fn is_nobody(self) -> bool {
        self.0 < Self::NOTICEABLE
    }

    /// What of a time with work was this process's own. Between whole numbers of others it is in
    /// proportion: with half a context on average, one was there half the time.
    #[must_use]
    pub const fn share_of(self, wall_ns: u64) -> u64 {
        if self.is_nobody() {
            return wall_ns;
        }
        let (whole, part) = (self.0 as u64 / 256, self.0 as u64 % 256);
        let (fewer, more) = (wall_ns / (whole + 1), wall_ns / (whole + 2));
        fewer - in_proportion(fewer - more, part, 256)
    }
}
