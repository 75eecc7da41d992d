//! Part of estimated GPU time.

use crate::compute::proportion::in_proportion;

/// Part of estimated GPU time that is charged, in 65536ths.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Part(u32);

impl Part {
    /// All of it.
    pub(super) const ALL: Self = Self(1 << 16);
    /// Nearly all of it.
    pub(super) const MOST: Self = Self(Self::ALL.0 / 8 * 7);
    /// The least: 32 streams whose kernels all run at the same time.
    const LEAST: Self = Self(Self::ALL.0 / 32);

    /// Returns the part that was used of what was estimated, which is not 0.
    pub(super) fn of_sums(used_ns: u64, estimated_ns: u64) -> Self {
        let part = in_proportion(u64::from(Self::ALL.0), used_ns.min(estimated_ns), estimated_ns);
        Self(u32::try_from(part).unwrap_or(Self::ALL.0)).clamp(Self::LEAST, Self::ALL)
    }

    /// Returns this part of a time.
    pub(super) const fn of(self, ns: u64) -> u64 {
        if self.0 == Self::ALL.0 {
            return ns;
        }
        in_proportion(ns, self.0 as u64, Self::ALL.0 as u64)
    }

    /// Returns the time of which a time is this part.
    pub(super) const fn whole(self, ns: u64) -> u64 {
        in_proportion(ns, Self::ALL.0 as u64, self.0 as u64)
    }

    /// Returns the part of two times together, of which each has its own.
    pub(super) fn mean((first, ns): (Self, u64), (second, other_ns): (Self, u64)) -> Self {
        let both_ns = ns + other_ns;
        if first.0 == second.0 || both_ns == 0 {
            return second;
        }
        let of_both = |part: Self, ns| in_proportion(part.0 as u64, ns, both_ns) as u32;
        Self(of_both(first, ns) + of_both(second, other_ns))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn part_is_between_a_32nd_and_all() {
        let of_8_ms = |used, estimated| Part::of_sums(used, estimated).of(8_000_000);
        assert_eq!(of_8_ms(1, 4), 2_000_000);
        assert_eq!((of_8_ms(9, 4), of_8_ms(0, 4)), (8_000_000, 250_000));
        assert_eq!(Part::of_sums(1, 4).whole(500), 2_000);
        assert_eq!(Part::ALL.of(u64::MAX), u64::MAX);
    }

    #[test]
    fn mean_is_weighted_by_time() {
        let quarter = Part::of_sums(1, 4);
        for (first, second) in
            [((quarter, 300), (Part::ALL, 100)), ((Part::ALL, 100), (quarter, 300))]
        {
            assert_eq!(Part::mean(first, second).of(16_000), 7_000);
        }
        assert_eq!(Part::mean((Part::ALL, 0), (quarter, 0)), quarter);
    }
}
