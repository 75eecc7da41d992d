//! Reasons that lie outside of the plan: nobody carries it out, or there is nothing to plan with.

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use serde::Serialize;
use tessera_allocator::model::PodUid;
use tessera_api::names::{CONTROLLER_LEASE, DRIVER_NAME};
use tessera_messages as message;

use super::{PodState, View};

const NOT_MANAGED: &str = "NotManaged";

/// client-go's default, should a Lease not say.
const LEASE_SECONDS: i32 = 15;

/// The clocks of two machines may differ by so much before a Lease is called expired.
const CLOCKS_APART: SignedDuration = SignedDuration::from_secs(15);

/// By then the claims of a pod have been made and its status names them. The controller has looked
/// twice by then.
const A_WHILE: SignedDuration = SignedDuration::from_mins(2);

/// Something that stands in the way, or that the rest should be read with.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// In one word.
    pub code: &'static str,
    /// In a sentence, with what to do.
    pub message: String,
}

/// What matters to a pod in that state.
pub(super) fn findings(
    view: &View<'_>,
    uid: &PodUid,
    pod: Option<&Pod>,
    state: PodState,
) -> Vec<Finding> {
    let is_planned = matches!(state, PodState::Waiting | PodState::Placeable | PodState::Blocked);
    let mut findings: Vec<Finding> = unlisted(view, uid, pod).into_iter().collect();
    if !is_planned && state != PodState::Misplaced {
        return findings;
    }
    findings.extend(supply(view));
    if !findings.iter().any(|finding| finding.code == NOT_MANAGED) {
        findings.extend(controller(view));
    }
    findings
}

/// Whether kube-scheduler knows of all the claims of a pod that waits for it. For moments it does
/// not know those of any new pod.
fn unlisted(view: &View<'_>, uid: &PodUid, pod: Option<&Pod>) -> Option<Finding> {
    let created = pod?.metadata.creation_timestamp.as_ref()?;
    let is_new = view.now.duration_since(created.0) < A_WHILE;
    let finding =
        || Finding { code: message::NOT_LISTED, message: message::NOT_LISTED_NOTE.to_owned() };
    (!is_new && view.index.is_unlisted(uid)).then(finding)
}

/// Whether there is anything that the controller could give.
pub(crate) fn supply(view: &View<'_>) -> Vec<Finding> {
    let devices = || view.cluster.slices.values().flat_map(|slice| &slice.devices);
    if devices().next().is_none() {
        let message = format!(
            "no ResourceSlice of {DRIVER_NAME} has a device: does the DaemonSet tessera-driver run on the GPU nodes?"
        );
        return vec![Finding { code: message::NO_DEVICES_PUBLISHED, message }];
    }
    if devices().all(|device| device.foreign) {
        let message = "no device carries the fence of the controller (mode: stock, or just changed to managed): kube-scheduler \
                       allocates, and its words are in `kubectl describe pod`";
        return vec![Finding { code: NOT_MANAGED, message: message.to_owned() }];
    }
    Vec::new()
}

/// Whether there is a controller at work, as far as Leases tell.
fn controller(view: &View<'_>) -> Option<Finding> {
    let finding = |code, message| Some(Finding { code, message });
    if let Some(because) = view.snapshot.not_read("leases.coordination.k8s.io") {
        let message = format!(
            "whether the controller runs is not known: its Lease could not be read ({because})"
        );
        return finding("ControllerUnknown", message);
    }
    let leases = &view.snapshot.leases;
    if leases.is_empty() {
        let message = format!(
            "the controller does not run: there is no Lease {CONTROLLER_LEASE} in any namespace (is the Helm chart installed?)"
        );
        return finding("ControllerAbsent", message);
    }
    if leases.iter().any(|lease| state(lease, view.now) == Tenure::Held) {
        return None;
    }
    let lease = leases.iter().max_by_key(|lease| renewed(lease))?;
    let namespace = lease.metadata.namespace.as_deref().unwrap_or_default();
    let message = match state(lease, view.now) {
        Tenure::Released if renewed(lease).is_none() => format!(
            "no controller is at work: none has held Lease {namespace}/{CONTROLLER_LEASE} yet; see `kubectl -n {namespace} get pods`"
        ),
        Tenure::Released => format!(
            "no controller is at work: the last one gave its Lease back; see `kubectl -n {namespace} get pods`"
        ),
        _ => format!(
            "no controller is at work: Lease {namespace}/{CONTROLLER_LEASE} of {} was last renewed {} ago; see `kubectl -n \
             {namespace} get pods`",
            holder(lease).unwrap_or("nobody"),
            renewed(lease).map_or_else(|| "never".to_owned(), |at| age(view.now, at))
        ),
    };
    finding("ControllerDown", message)
}

#[derive(PartialEq, Eq)]
enum Tenure {
    Held,
    Expired,
    Released,
}

fn state(lease: &Lease, now: Timestamp) -> Tenure {
    let Some(renewed) = renewed(lease) else { return Tenure::Released };
    if holder(lease).is_none() {
        return Tenure::Released;
    }
    let seconds =
        lease.spec.as_ref().and_then(|spec| spec.lease_duration_seconds).unwrap_or(LEASE_SECONDS);
    let until = SignedDuration::from_secs(i64::from(seconds)) + CLOCKS_APART;
    if now.duration_since(renewed) > until { Tenure::Expired } else { Tenure::Held }
}

fn holder(lease: &Lease) -> Option<&str> {
    lease.spec.as_ref()?.holder_identity.as_deref().filter(|holder| !holder.is_empty())
}

fn renewed(lease: &Lease) -> Option<Timestamp> {
    lease.spec.as_ref()?.renew_time.as_ref().map(|time| time.0)
}

/// How long ago, in the largest unit that is at least one, as kubectl prints ages.
pub(crate) fn age(now: Timestamp, at: Timestamp) -> String {
    let seconds = now.duration_since(at).as_secs().max(0);
    match seconds {
        0..120 => format!("{seconds}s"),
        120..7200 => format!("{}m", seconds / 60),
        7200..172_800 => format!("{}h", seconds / 3600),
        _ => format!("{}d", seconds / 86400),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ages_have_one_unit() {
        let now: Timestamp = "2026-01-10T00:00:00Z".parse().expect("a time");
        let ago = |seconds| age(now, now - SignedDuration::from_secs(seconds));
        assert_eq!(
            [ago(0), ago(119), ago(120), ago(7200), ago(200_000), ago(-5)],
            ["0s", "119s", "2m", "2h", "2d", "0s"]
        );
    }
}
