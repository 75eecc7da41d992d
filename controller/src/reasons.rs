//! The reasons of the Kubernetes events that the controller publishes.
//!
//! Scripts and alerts match them, so a reason is never renamed silently: see `docs/adr/0033`.

use tessera_allocator::Cause;
use tessera_index::Obstacle;
use tessera_messages as message;

/// No node has enough devices for a claim.
pub const INSUFFICIENT_DEVICES: &str = "InsufficientDevices";
/// No device is published at all.
pub const NO_DEVICES_PUBLISHED: &str = "NoDevicesPublished";
/// The step budget of a search was spent before an answer.
pub const SEARCH_BUDGET_EXCEEDED: &str = "SearchBudgetExceeded";
/// A DeviceClass does not exist.
pub const UNKNOWN_DEVICE_CLASS: &str = "UnknownDeviceClass";
/// A claim uses a feature that this version does not support.
pub const NOT_SUPPORTED: &str = "NotSupported";
/// A GpuConfig has an invalid field or value.
pub const INVALID_CONFIG: &str = "InvalidConfig";
/// A claim requests devices of our driver and of another.
pub const MIXED_DRIVERS: &str = "MixedDrivers";
/// A claim has to be allocated on the node of another pod that is bound with it.
pub const CLAIM_IN_USE: &str = "ClaimInUse";
/// The status of a pod lacks one of its claims.
pub const POD_STATUS_MISSING_CLAIM: &str = "PodStatusMissingClaim";
/// The pod is planned again, on another node.
pub const RESCHEDULING: &str = "Rescheduling";
/// The API server dropped fields of an allocation.
pub const ALLOCATION_FIELDS_DROPPED: &str = "AllocationFieldsDropped";
/// The claim of a bound pod is on another node, or not allocated.
pub const CLAIM_NODE_MISMATCH: &str = "ClaimNodeMismatch";
/// A claim was deleted while a bound pod uses it.
pub const CLAIM_DELETED_IN_USE: &str = "ClaimDeletedInUse";
/// The API server does not answer a write of a claim.
pub const API_SERVER_TIMEOUT: &str = "APIServerTimeout";
/// More of a device is allocated than it has.
pub const OVERCOMMITTED: &str = "Overcommitted";

/// Returns the reason of the event about a pod that was refused for this cause.
pub fn of_cause(cause: &Cause) -> &'static str {
    match cause {
        Cause::NoFit(_) => INSUFFICIENT_DEVICES,
        Cause::NotDecided => SEARCH_BUDGET_EXCEEDED,
        Cause::UnknownClass { .. } => UNKNOWN_DEVICE_CLASS,
        Cause::NotSupported { .. } => NOT_SUPPORTED,
        Cause::Config { .. } => INVALID_CONFIG,
    }
}

/// Returns the reason of the event about a pod that cannot be planned.
pub fn of_obstacle(obstacle: Obstacle) -> &'static str {
    match obstacle {
        Obstacle::MixedDrivers => MIXED_DRIVERS,
        Obstacle::BoundPod => CLAIM_IN_USE,
    }
}

/// Returns the label of the cause in metrics: of several, the one of most devices.
pub fn metric_label(cause: &Cause) -> &'static str {
    match cause {
        Cause::NoFit(explanation) if explanation.tallies().next().is_none() => NO_DEVICES_PUBLISHED,
        Cause::NoFit(_) => message::label(cause),
        _ => of_cause(cause),
    }
}
