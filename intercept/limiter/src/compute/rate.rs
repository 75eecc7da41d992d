//! Rate at which a container may use GPU time.

/// Part of a GPU's time in hundredths of a percent, 1 to 10,000.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Rate(u16);

impl Rate {
    /// The whole GPU: launches need no tokens.
    pub const FULL: Self = Self(10_000);

    /// The least that a container without a guarantee gets while others use the GPU.
    pub const LEAST: Self = Self(100);

    /// Takes hundredths of a percent; less than one counts as one, more than 10,000 as 10,000.
    #[must_use]
    pub const fn new(hundredths: u16) -> Self {
        match hundredths {
            0 => Self(1),
            1..=9_999 => Self(hundredths),
            _ => Self::FULL,
        }
    }

    /// Takes percent.
    #[must_use]
    pub const fn from_percent(percent: u32) -> Self {
        if percent >= 100 { Self::FULL } else { Self::new(percent as u16 * 100) }
    }

    /// Returns this part of a rate, at least 0.01 percent.
    #[must_use]
    pub const fn of(self, rate: Self) -> Self {
        Self::new((rate.0 as u32 * self.0 as u32 / Self::FULL.0 as u32) as u16)
    }

    /// Returns hundredths of a percent.
    #[must_use]
    pub const fn hundredths(self) -> u16 {
        self.0
    }

    /// Returns the wall time in which the bucket gains this GPU time.
    #[must_use]
    pub const fn wall_ns(self, gpu_ns: u64) -> u64 {
        gpu_ns.saturating_mul(10_000) / self.0 as u64
    }

    /// Returns the GPU time that the bucket gains within this wall time.
    #[must_use]
    pub const fn gpu_ns(self, wall_ns: u64) -> u64 {
        wall_ns.saturating_mul(self.0 as u64) / 10_000
    }
}
