//! Distribution of the number of devices per request.

use super::DeviceSet;

/// Distribution of the sizes of future requests.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct SizeMix {
    /// Share of requests per size (index is size - 1), in units of 1/`WHOLE`. The sum is `WHOLE`.
    shares: Vec<u32>,
}

impl SizeMix {
    /// Sum of the shares.
    pub(super) const WHOLE: u32 = 1 << 16;

    /// Creates the mix from the counts of size 1, size 2 and so on. Without counts it is the
    /// default mix.
    pub fn new(counts: &[u64]) -> Self {
        let counts = &counts[..counts.len().min(DeviceSet::MAX)];
        let sum: u128 = counts.iter().map(|&count| u128::from(count)).sum();
        if sum == 0 {
            return Self::default();
        }
        let scaled = |below: u128| (below * u128::from(Self::WHOLE) / sum) as u32;
        let mut below = 0;
        let share = |&count: &u64| {
            let start = scaled(below);
            below += u128::from(count);
            scaled(below) - start
        };
        let mut shares: Vec<u32> = counts.iter().map(share).collect();
        while shares.last() == Some(&0) {
            shares.pop();
        }
        Self { shares }
    }

    /// Returns the sizes that occur with their shares of [`WHOLE`](Self::WHOLE), ascending.
    pub(super) fn shares(&self) -> impl Iterator<Item = (usize, u32)> {
        self.shares
            .iter()
            .enumerate()
            .filter(|(_, share)| **share > 0)
            .map(|(at, share)| (at + 1, *share))
    }

    /// Returns the largest size that occurs.
    pub(super) fn largest(&self) -> usize {
        self.shares.len()
    }
}

/// Default mix: one to four devices, equally often.
impl Default for SizeMix {
    fn default() -> Self {
        Self { shares: vec![Self::WHOLE / 4; 4] }
    }
}
