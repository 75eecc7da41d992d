//! What is said about pods and claims that wait: the reasons and texts of events, and of the
//! command line.
//!
//! Events, `kubectl tessera explain` and metrics take their words from here, so that whoever reads
//! two of them reads the same.

use k8s_openapi::jiff::Timestamp;
use tessera_allocator::{Cause, Kept};
use tessera_api::names::DRIVER_NAME;
use tessera_api::reason::MAX_EVENT_BYTES;

use crate::repair::{Hindrance, Misplaced, Remedy};
use crate::work::Obstacle;

/// The reason of an event about claims that wait, `PascalCase` as Kubernetes has it.
pub fn reason(cause: &Cause) -> &'static str {
    match cause {
        Cause::NoFit(_) => "NoDevices",
        Cause::NotDecided => "NotDecided",
        Cause::UnknownClass { .. } => "UnknownDeviceClass",
        Cause::NotSupported { .. } => "NotSupported",
        Cause::Config { .. } => "InvalidConfig",
    }
}

/// The text of that event, for the claim of that name: at most [`MAX_EVENT_BYTES`]. `kept` is the
/// node that is kept free for the pod.
pub fn note(claim: &str, cause: &Cause, kept: Option<&Kept>) -> String {
    match cause {
        Cause::UnknownClass { request, class } => format!(
            "ResourceClaim {claim}: request `{request}` names DeviceClass `{class}`, which does not exist; \
             `kubectl get deviceclasses` lists those that do"
        ),
        Cause::NotSupported { request, what } => {
            format!(
                "ResourceClaim {claim}: request `{request}` uses {what}, which is not supported in this version"
            )
        }
        Cause::Config { request, error } => {
            format!("ResourceClaim {claim}: request `{request}`: {error}")
        }
        Cause::NotDecided => format!(
            "ResourceClaim {claim}: too many combinations of devices to decide in time; ask for fewer devices or \
             constraints in one claim"
        ),
        Cause::NoFit(explanation) => {
            let opening = format!("ResourceClaim {claim} has to wait: ");
            let closing = kept.map(|kept| format!("; {}", kept_free(kept))).unwrap_or_default();
            let rest = explanation.render(MAX_EVENT_BYTES - opening.len() - closing.len());
            opening + &rest + &closing
        }
    }
}

/// What the pod is told for which a node is kept free.
pub fn kept_free(kept: &Kept) -> String {
    let Kept { node, until, .. } = kept;
    match Timestamp::from_second(*until) {
        Ok(until) => format!("node {node} is kept free for the pod until {until}"),
        // Beyond the year 9999.
        Err(_) => format!("node {node} is kept free for the pod"),
    }
}

/// A short name of the cause for metrics: few values, none from users. Of several reasons that of
/// the most devices.
pub fn label(cause: &Cause) -> &'static str {
    let Cause::NoFit(explanation) = cause else { return reason(cause) };
    let most = explanation.tallies().max_by_key(|(_, tally)| tally.devices());
    most.map_or("NoDevicePublished", |(reason, _)| reason.code())
}

/// Reason and text of the event about a pod that cannot be planned because of the claim of that
/// name.
pub fn obstacle(claim: &str, obstacle: Obstacle) -> (&'static str, String) {
    match obstacle {
        Obstacle::MixedDrivers => (
            "MixedDrivers",
            format!(
                "ResourceClaim {claim} asks {DRIVER_NAME} and another driver for devices; split it into one claim \
                 per driver"
            ),
        ),
        Obstacle::BoundPod => (
            "ClaimInUse",
            format!(
                "ResourceClaim {claim} has to be allocated where another pod is bound with it, before this pod can \
                 use it"
            ),
        ),
    }
}

/// Reason of the event about a pod of which [`Index::is_unlisted`](crate::Index::is_unlisted) holds
/// for long.
pub const NOT_LISTED: &str = "ClaimNotListed";

/// Its text, and what explains such a pod before that.
pub const NOT_LISTED_NOTE: &str = "the pod's status does not name all ResourceClaims that were made for it, so kube-scheduler leaves the pod \
     alone, and it gets no devices while that lasts; kube-controller-manager writes the status: see whether it works. Before Kubernetes \
     1.37 it may name the claims of a pod with several by turns and never all (kubernetes/kubernetes#138407): then delete the pod to \
     start over";

/// The text of the event about a bound pod whose claim of that name is not where the pod is.
pub fn misplaced(claim: &str, misplaced: &Misplaced) -> String {
    let Misplaced { node, allocated, remedy, .. } = misplaced;
    let place = allocated
        .as_ref()
        .map_or_else(|| "not allocated".to_owned(), |there| format!("allocated on node {there}"));
    let outlook = outlook(remedy);
    format!("the pod is bound to node {node}, but ResourceClaim {claim} is {place}; {outlook}")
}

fn outlook(remedy: &Remedy) -> &'static str {
    match remedy {
        Remedy::TakeBack => "nobody uses it there, so it is moved to the pod's node",
        Remedy::Restore(_) => "it gets back what it had",
        Remedy::Plan => "it is to be allocated there",
        Remedy::None(Hindrance::Started) => {
            "containers of the pod have run, and it is not known with which devices; delete the pod to start over"
        }
        Remedy::None(Hindrance::InUse) => {
            "another pod may be using it; delete the pod to start over"
        }
    }
}
