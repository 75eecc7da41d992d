//! Findings outside of the plan: no controller carries it out, or there are no devices.

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use serde::Serialize;
use tessera_allocator::model::PodUid;
use tessera_api::events;
use tessera_api::names::{CONTROLLER_LEASE, DRIVER_NAME};
use tessera_messages as message;

use super::{PlanView, PodState};

/// Code of the finding that kube-scheduler allocates.
pub(crate) const NOT_MANAGED: &str = "NotManaged";

/// Duration of a Lease without one: client-go's default.
const LEASE_SECONDS: i32 = 15;

/// Tolerated difference between the clocks of two machines.
const MAX_CLOCK_SKEW: SignedDuration = SignedDuration::from_secs(15);

/// Age of a pod at which its status should list all claims. The controller's audit has run twice by
/// then.
const NEW_POD_AGE: SignedDuration = SignedDuration::from_mins(2);

/// A condition outside of the plan that explains the state of a pod.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// The condition, in one word.
    pub code: &'static str,
    /// The condition and what to do, in one sentence.
    pub message: String,
}

/// Returns the findings that are relevant to a pod in that state.
pub(super) fn findings(
    view: &PlanView<'_>,
    uid: &PodUid,
    pod: Option<&Pod>,
    state: PodState,
) -> Vec<Finding> {
    let is_planned = matches!(state, PodState::Pending | PodState::Schedulable | PodState::Blocked);
    let mut findings: Vec<Finding> = unlisted(view, uid, pod).into_iter().collect();
    if !is_planned && state != PodState::NodeMismatch {
        return findings;
    }
    findings.extend(of_cluster(view));
    findings
}

/// Returns the findings about devices and the controller. In stock mode none has to run.
pub(crate) fn of_cluster(view: &PlanView<'_>) -> Vec<Finding> {
    let mut findings = supply(view);
    if !findings.iter().any(|finding| finding.code == NOT_MANAGED) {
        findings.extend(controller(view));
    }
    findings
}

/// Returns a finding if the status of a pending pod does not list all of its claims. A new pod's
/// status never does for a moment.
fn unlisted(view: &PlanView<'_>, uid: &PodUid, pod: Option<&Pod>) -> Option<Finding> {
    let created = pod?.metadata.creation_timestamp.as_ref()?;
    let is_new = view.now.duration_since(created.0) < NEW_POD_AGE;
    let finding = || Finding {
        code: events::POD_STATUS_MISSING_CLAIM.name(),
        message: message::NOT_LISTED_NOTE.to_owned(),
    };
    (!is_new && view.index.is_unlisted(uid)).then(finding)
}

/// Returns a finding if no device can be allocated by the controller.
pub(crate) fn supply(view: &PlanView<'_>) -> Vec<Finding> {
    let devices = || {
        let all = view.cluster.slices.values().flat_map(|slice| &slice.devices);
        all.filter(|device| !device.is_foreign)
    };
    if devices().next().is_none() {
        let message = format!(
            "no ResourceSlice of {DRIVER_NAME} has a device; check that the DaemonSet tessera-driver \
             runs on the GPU nodes"
        );
        return vec![Finding { code: message::NO_DEVICES_PUBLISHED, message }];
    }
    if devices().all(|device| device.is_unmanaged) {
        let message = "no device has the taint of managed mode (the chart has mode: stock, or was \
                       just changed to managed), so kube-scheduler allocates; see `kubectl \
                       describe pod`";
        return vec![Finding { code: NOT_MANAGED, message: message.to_owned() }];
    }
    Vec::new()
}

/// Returns a finding unless a Lease shows a running controller.
fn controller(view: &PlanView<'_>) -> Option<Finding> {
    let finding = |code, message| Some(Finding { code, message });
    if let Some(because) = view.snapshot.not_read("leases.coordination.k8s.io") {
        let message = format!("unknown if the controller runs: cannot list Leases ({because})");
        return finding("ControllerUnknown", message);
    }
    let leases = &view.snapshot.leases;
    if leases.is_empty() {
        let message = format!(
            "the controller does not run: no namespace has a Lease {CONTROLLER_LEASE}; check that the \
             Helm chart is installed"
        );
        return finding("ControllerAbsent", message);
    }
    if leases.iter().any(|lease| lease_state(lease, view.now) == LeaseState::Held) {
        return None;
    }
    let lease = leases.iter().max_by_key(|lease| renewed(lease))?;
    let namespace = lease.metadata.namespace.as_deref().unwrap_or_default();
    let message = match lease_state(lease, view.now) {
        LeaseState::Released if renewed(lease).is_none() => format!(
            "no controller runs: Lease {namespace}/{CONTROLLER_LEASE} was never acquired; see \
             `kubectl -n {namespace} get pods`"
        ),
        LeaseState::Released => format!(
            "no controller runs: the last one released its Lease; see `kubectl -n {namespace} get \
             pods`"
        ),
        _ => format!(
            "no controller runs: Lease {namespace}/{CONTROLLER_LEASE} of {} was last renewed {} \
             ago; see `kubectl -n {namespace} get pods`",
            holder(lease).unwrap_or("no holder"),
            renewed(lease).map_or_else(|| "never".to_owned(), |at| age(view.now, at))
        ),
    };
    finding("ControllerDown", message)
}

#[derive(PartialEq, Eq)]
enum LeaseState {
    Held,
    Expired,
    Released,
}

fn lease_state(lease: &Lease, now: Timestamp) -> LeaseState {
    let Some(renewed) = renewed(lease) else { return LeaseState::Released };
    if holder(lease).is_none() {
        return LeaseState::Released;
    }
    let seconds =
        lease.spec.as_ref().and_then(|spec| spec.lease_duration_seconds).unwrap_or(LEASE_SECONDS);
    let until = SignedDuration::from_secs(i64::from(seconds)) + MAX_CLOCK_SKEW;
    if now.duration_since(renewed) > until { LeaseState::Expired } else { LeaseState::Held }
}

fn holder(lease: &Lease) -> Option<&str> {
    lease.spec.as_ref()?.holder_identity.as_deref().filter(|holder| !holder.is_empty())
}

fn renewed(lease: &Lease) -> Option<Timestamp> {
    lease.spec.as_ref()?.renew_time.as_ref().map(|time| time.0)
}

/// Returns the age of `at` in its largest unit, as kubectl prints ages.
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
