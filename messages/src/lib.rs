//! Event reasons and messages for pending pods and claims.
//!
//! The controller's events and metrics and `kubectl tessera explain` share these texts, so they
//! agree word for word.
//!
//! ```text
//!   allocator::Cause, Kept        --reason, note, label--> event, metric label, explain
//!   index::Obstacle, Misplaced    --obstacle_reason, obstacle, misplaced--> event, explain
//! ```

#![forbid(unsafe_code)]

use k8s_openapi::jiff::Timestamp;
use tessera_allocator::{Cause, Kept};
use tessera_api::events::{self, EventReason};
use tessera_api::names::DRIVER_NAME;
use tessera_api::reason::MAX_EVENT_BYTES;
use tessera_index::{Misplaced, Obstacle, RepairAction, RepairBlocker};

/// Metric label and finding: no ResourceSlice of the driver has a device.
pub const NO_DEVICES_PUBLISHED: &str = "NoDevicesPublished";

/// Message of [`events::POD_STATUS_MISSING_CLAIM`]; see
/// [`Index::is_unlisted`](tessera_index::Index::is_unlisted).
pub const NOT_LISTED_NOTE: &str = "the pod's status does not list all ResourceClaims that were \
     created for the pod, so kube-scheduler ignores the pod and Tessera allocates no devices for \
     it; kube-controller-manager writes that status: check that it runs. Before Kubernetes 1.37 \
     it may never list all claims of a pod with several claims (kubernetes/kubernetes#138407): \
     delete the pod to start over";

/// Returns the event reason of a claim that cannot be allocated.
pub fn reason(cause: &Cause) -> EventReason {
    match cause {
        Cause::NoFit(_) => events::INSUFFICIENT_DEVICES,
        Cause::NotDecided => events::SEARCH_BUDGET_EXCEEDED,
        Cause::UnknownClass { .. } => events::UNKNOWN_DEVICE_CLASS,
        Cause::NotSupported { .. } => events::NOT_SUPPORTED,
        Cause::Config { .. } => events::INVALID_CONFIG,
    }
}

/// Returns the event message of a claim that cannot be allocated: at most [`MAX_EVENT_BYTES`].
///
/// `claim` is the name of the ResourceClaim, `kept` the node that is reserved for its pod.
pub fn note(claim: &str, cause: &Cause, kept: Option<&Kept>) -> String {
    match cause {
        Cause::UnknownClass { request, class } => format!(
            "ResourceClaim {claim}: request `{request}` refers to DeviceClass `{class}`, which \
             does not exist; list classes with `kubectl get deviceclasses`"
        ),
        Cause::NotSupported { request, what } => format!(
            "ResourceClaim {claim}: request `{request}` uses {what}, which this version does not \
             support"
        ),
        Cause::Config { request, error } => {
            format!("ResourceClaim {claim}: request `{request}`: {error}")
        }
        Cause::NotDecided => format!(
            "ResourceClaim {claim}: search budget exceeded, too many combinations of devices; \
             request fewer devices or constraints in one claim"
        ),
        Cause::NoFit(explanation) => {
            let closing = kept.map(|kept| format!("; {}", kept_free(kept))).unwrap_or_default();
            let subject = format!("ResourceClaim {claim}");
            explanation.render_for(&subject, MAX_EVENT_BYTES - closing.len()) + &closing
        }
    }
}

/// Returns the message about the node that is reserved for a pod.
pub fn kept_free(kept: &Kept) -> String {
    let Kept { node, until, .. } = kept;
    match Timestamp::from_second(*until) {
        Ok(until) => format!("node {node} is reserved for the pod until {until}"),
        // Beyond the year 9999.
        Err(_) => format!("node {node} is reserved for the pod"),
    }
}

/// Returns the metric label of a cause: few values, none from users. Of several reasons the one
/// with most devices.
pub fn label(cause: &Cause) -> &'static str {
    let Cause::NoFit(explanation) = cause else { return reason(cause).name() };
    let most = explanation.tallies().max_by_key(|(_, tally)| tally.devices());
    most.map_or(NO_DEVICES_PUBLISHED, |(reason, _)| reason.code())
}

/// Returns the event reason of a pod that cannot be planned because of a claim.
pub fn obstacle_reason(obstacle: Obstacle) -> EventReason {
    match obstacle {
        Obstacle::MixedDrivers => events::MIXED_DRIVERS,
        Obstacle::BoundPod => events::CLAIM_IN_USE,
    }
}

/// Returns the event message of a pod that cannot be planned because of a claim.
pub fn obstacle(claim: &str, obstacle: Obstacle) -> String {
    match obstacle {
        Obstacle::MixedDrivers => format!(
            "ResourceClaim {claim} requests devices of {DRIVER_NAME} and of another driver; \
             split it into one claim per driver"
        ),
        Obstacle::BoundPod => format!(
            "ResourceClaim {claim} is not allocated, and another pod that uses it is bound; \
             it must be allocated on the node of that pod first"
        ),
    }
}

/// Returns the event message of a bound pod with a claim that is not allocated on its node.
pub fn misplaced(claim: &str, misplaced: &Misplaced) -> String {
    let Misplaced { node, allocated, repair_action, .. } = misplaced;
    let place = allocated
        .as_ref()
        .map_or_else(|| "not allocated".to_owned(), |there| format!("allocated on node {there}"));
    let repair = repair(repair_action);
    format!("the pod is bound to node {node}, but ResourceClaim {claim} is {place}; {repair}")
}

fn repair(repair_action: &RepairAction) -> &'static str {
    match repair_action {
        RepairAction::TakeBack => "no pod uses it there, so it will be moved to the pod's node",
        RepairAction::Restore(_) => "its previous allocation will be restored",
        RepairAction::Plan => "it will be allocated there",
        RepairAction::None(RepairBlocker::Started) => {
            "containers of the pod have run, and it is not known with which devices; delete the \
             pod to start over"
        }
        RepairAction::None(RepairBlocker::InUse) => {
            "another pod may be using it; delete the pod to start over"
        }
    }
}
