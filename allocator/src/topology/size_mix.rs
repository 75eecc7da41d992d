//! How many devices requests ask for.

use super::DeviceSet;

/// The distribution of the sizes of requests: what is expected of those to come.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct SizeMix {
    /// Of `WHOLE`, how many requests ask for so many devices; by size less one. They add up to
    /// `WHOLE`.
    shares: Vec<u32>,
}

impl SizeMix {
    /// What the shares add up to.
    pub(super) const WHOLE: u32 = 1 << 16;

    /// The mix in which sizes come as often as `counts` says: of size 1, of size 2 and so on.
    /// Without any count it is the built-in prior.
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

    /// The sizes that occur, with their shares of [`WHOLE`](Self::WHOLE), ascending.
    pub(super) fn shares(&self) -> impl Iterator<Item = (usize, u32)> {
        self.shares
            .iter()
            .enumerate()
            .filter(|(_, share)| **share > 0)
            .map(|(at, share)| (at + 1, *share))
    }

    /// The largest size that occurs.
    pub(super) fn largest(&self) -> usize {
        self.shares.len()
    }
}

/// The built-in prior: one to four devices, equally often.
impl Default for SizeMix {
    fn default() -> Self {
        Self { shares: vec![Self::WHOLE / 4; 4] }
    }
}
