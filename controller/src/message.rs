//! What is said to users: the text of events.

use tessera_allocator::Cause;
use tessera_api::reason::MAX_EVENT_BYTES;

/// The reason of an event about claims that wait, `PascalCase` as Kubernetes has it.
pub(crate) fn reason(cause: &Cause) -> &'static str {
    match cause {
        Cause::NoFit(_) => "NoDevices",
        Cause::NotDecided => "NotDecided",
        Cause::UnknownClass { .. } => "UnknownDeviceClass",
        Cause::NotSupported { .. } => "NotSupported",
        Cause::Config { .. } => "InvalidConfig",
    }
}

/// The text of that event.
pub(crate) fn note(claim: &str, cause: &Cause) -> String {
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
        Cause::Config { request, error } => format!("ResourceClaim {claim}: request `{request}`: {error}"),
        Cause::NotDecided => format!(
            "ResourceClaim {claim}: too many combinations of devices to decide in time; ask for fewer devices or \
             constraints in one claim"
        ),
        Cause::NoFit(explanation) => {
            let opening = format!("ResourceClaim {claim} has to wait: ");
            let rest = explanation.render(MAX_EVENT_BYTES - opening.len());
            opening + &rest
        }
    }
}

/// A short name of the cause for metrics: few values, none from users. Of several reasons that of the most devices.
pub(crate) fn label(cause: &Cause) -> &'static str {
    let Cause::NoFit(explanation) = cause else { return reason(cause) };
    let most = explanation.tallies().max_by_key(|(_, tally)| tally.devices());
    most.map_or("NoDevicePublished", |(reason, _)| reason.code())
}
