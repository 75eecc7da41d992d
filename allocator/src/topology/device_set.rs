//! A set of devices of one machine.

use std::fmt;
use std::ops::{BitAnd, BitOr, Sub};

/// A set of devices of one machine, by positions 0 to 63.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct DeviceSet(u64);

impl DeviceSet {
    /// Maximum number of devices.
    pub const MAX: usize = 64;
    /// The empty set.
    pub const EMPTY: Self = Self(0);

    /// Creates a set from bits; the lowest bit is position 0.
    pub const fn from_bits(bits: u64) -> Self {
        Self(bits)
    }

    /// Creates the set of the first `count` positions, at most 64.
    pub const fn first(count: usize) -> Self {
        if count >= Self::MAX { Self(u64::MAX) } else { Self((1 << count) - 1) }
    }

    /// Creates a set with one device.
    ///
    /// # Panics
    /// Panics if the position is not below 64.
    pub const fn one(position: usize) -> Self {
        assert!(position < Self::MAX, "a machine has at most 64 devices");
        Self(1 << position)
    }

    /// Returns the set as bits; the lowest bit is position 0.
    pub const fn bits(self) -> u64 {
        self.0
    }

    /// Returns the number of devices.
    pub const fn len(self) -> usize {
        self.0.count_ones() as usize
    }

    /// Returns true if the set is empty.
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Returns true if the set contains the device at `position`.
    pub const fn contains(self, position: usize) -> bool {
        position < Self::MAX && self.0 >> position & 1 == 1
    }

    /// Returns true if all devices are in `other`.
    pub const fn is_subset(self, other: Self) -> bool {
        self.0 & !other.0 == 0
    }

    /// Returns the devices above `position`.
    pub(super) const fn above(self, position: usize) -> Self {
        Self(self.0 & !Self::first(position + 1).0)
    }

    /// Returns the positions in ascending order.
    pub fn iter(self) -> impl Iterator<Item = usize> {
        let mut rest = self.0;
        std::iter::from_fn(move || {
            let position = (rest != 0).then(|| rest.trailing_zeros() as usize)?;
            rest &= rest - 1;
            Some(position)
        })
    }
}

impl FromIterator<usize> for DeviceSet {
    /// # Panics
    /// Panics if a position is not below 64.
    fn from_iter<T: IntoIterator<Item = usize>>(positions: T) -> Self {
        positions.into_iter().fold(Self::EMPTY, |set, position| set | Self::one(position))
    }
}

impl BitAnd for DeviceSet {
    type Output = Self;
    fn bitand(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }
}

impl BitOr for DeviceSet {
    type Output = Self;
    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

impl Sub for DeviceSet {
    type Output = Self;
    fn sub(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }
}

impl fmt::Debug for DeviceSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.iter()).finish()
    }
}
