//! Which feasible choice is preferred: the order in which nodes and devices are tried. The first that works is taken.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use tessera_api::quantity::Quantity;

use crate::model::{Device, DeviceUse};

/// A placement policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Policy {
    /// Upstream's order: nodes by name, pools by driver and name, devices as published.
    FirstFit,
    /// The fullest first, so that whole devices and nodes stay free.
    #[default]
    Binpack,
    /// The emptiest first, so that neighbours disturb each other least.
    Spread,
}

/// Parts per million of something that is taken.
pub(crate) type Ppm = u64;

const WHOLE: Ppm = 1_000_000;

/// How much of a device is taken: of the capacity of which most is taken. All of it where it is allocated as a whole.
pub(crate) fn taken(
    device: &Device,
    used: Option<&DeviceUse>,
    planned: Option<&BTreeMap<String, Quantity>>,
) -> Ppm {
    if used.is_some_and(|u| u.exclusive > 0) {
        return WHOLE;
    }
    let of = |map: Option<&BTreeMap<String, Quantity>>, name: &str| {
        map.and_then(|m| m.get(name)).map_or(0, Quantity::nano)
    };
    let ratio = |(name, capacity): (&String, &crate::model::Capacity)| {
        let sum = of(used.map(|u| &u.consumed), name).saturating_add(of(planned, name)).max(0);
        let whole = capacity.value.nano();
        if whole <= 0 { 0 } else { sum.saturating_mul(i128::from(WHOLE)) / whole }
    };
    let most = device.capacity.iter().map(ratio).max().unwrap_or(0);
    // A share without any capacity is the least that can be told from nothing.
    let least = Ppm::from(used.is_some_and(|u| u.shares > 0));
    Ppm::try_from(most).unwrap_or(WHOLE).clamp(least, WHOLE)
}

/// What devices are sorted by; smaller is tried earlier. The last field is upstream's position and settles ties.
pub(crate) type DeviceRank = (Ppm, Quantity, usize);

impl Policy {
    /// The rank of a device of which `taken` is taken, `whole` being its memory (the first of two equally full devices
    /// should be the smaller one, so that large ones stay for those who need them).
    pub(crate) fn rank_device(self, taken: Ppm, whole: Quantity, position: usize) -> DeviceRank {
        match self {
            Self::FirstFit => (0, Quantity::ZERO, position),
            Self::Binpack => (WHOLE - taken.min(WHOLE), whole, position),
            Self::Spread => (taken, Quantity::ZERO, position),
        }
    }

    /// Sorts nodes, given with how much of their devices is taken, into the order in which they are tried.
    pub(crate) fn sort_nodes<T: Ord>(self, nodes: &mut [(Ppm, T)]) {
        match self {
            Self::FirstFit => nodes.sort_by(|a, b| a.1.cmp(&b.1)),
            Self::Binpack => nodes.sort_by(|a, b| (Reverse(a.0), &a.1).cmp(&(Reverse(b.0), &b.1))),
            Self::Spread => nodes.sort(),
        }
    }
}
