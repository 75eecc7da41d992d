//! Requests for sets of devices, and their results.

use super::matrix::Score;
use super::{DeviceSet, TopologyPreferences};

/// A request for a set of devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SetRequest {
    /// Number of devices.
    pub count: usize,
    /// Devices that may be chosen.
    pub candidates: DeviceSet,
    /// Devices that are entirely free; the remaining ones have a residual value. Choosing a
    /// candidate that is not in this set (for example a shared GPU) has no cost for later
    /// requests.
    pub free: DeviceSet,
    /// Required and preferred topology.
    pub preferences: TopologyPreferences,
}

/// A feasible set of devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SetChoice {
    /// Devices of the set.
    pub devices: DeviceSet,
    /// Score of the set: the sum over its pairs.
    pub score: Score,
    /// Lowest score of a pair; `None` for fewer than two devices.
    pub weakest_pair: Option<Score>,
    /// True if no set is better; false if there were too many sets to compare all.
    pub proven: bool,
}

/// Error: the step budget was spent before the search ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not decided: the step budget is spent")]
pub struct OutOfSteps;
