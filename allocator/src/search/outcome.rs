//! Results of a search.

use crate::capacity::CapacityError;
use crate::outcome::RefusalCause;
use crate::selector::SelectorError;
use crate::shape::Chosen;

/// Maximum number of devices of one claim (`AllocationResultsMaxSize`).
pub(crate) const MAX_RESULTS: usize = 32;

/// Result of searching one node.
#[derive(Debug)]
pub(crate) enum SearchOutcome {
    /// A complete solution: the devices of each claim, in order.
    Found(Vec<Vec<Chosen>>),
    /// There is no solution.
    Infeasible,
    /// The search failed; index of the claim, and the reason.
    Failed(usize, SearchFailure),
    /// The step budget is spent.
    OutOfSteps,
}

/// Failure of a search; upstream also stops for this pod.
#[derive(Debug, Clone, PartialEq)]
pub enum SearchFailure {
    /// The request can never be served.
    Request(RefusalCause),
    /// A selector failed on a device.
    Selector(SelectorError),
    /// An amount cannot be computed.
    Capacity(CapacityError),
    /// "All" devices violate a constraint on this attribute.
    AllViolatesConstraint(String),
    /// "All" devices are requested, and this pool is incomplete.
    AllWithIncompletePool(String),
    /// "All" devices are requested, and this pool is invalid.
    AllWithInvalidPool(String),
    /// More than 32 devices for one claim.
    TooManyDevices(u64),
    /// A constraint of an unknown type.
    UnknownConstraint,
    /// A node selector in a slice is invalid.
    NodeSelector(String),
}
