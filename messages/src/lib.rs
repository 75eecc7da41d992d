//! Event reasons and messages for pending pods and claims.
//!
//! The controller's events and metrics and `kubectl tessera explain` share these texts, so they
//! agree word for word.
//!
//! ```text
//!   allocator::RefusalCause, ReservedNode   --refusal_*, metric_label-->   event, metric, explain
//!   index::PlanningBlocker, Misplaced       --blocker_*, node_mismatch_*--> event, explain
//! ```

#![forbid(unsafe_code)]

use std::fmt::Display;

use k8s_openapi::jiff::Timestamp;
use tessera_allocator::model::DeviceId;
use tessera_allocator::{GroupShortfall, QuotaShortfall, RefusalCause, ReservedNode};
use tessera_api::events::{self, EventReason};
use tessera_api::names::{
    DRIVER_NAME, Namespace, NodeGroupName, NodeName, POD_GROUP_ANNOTATION,
    POD_GROUP_SIZE_ANNOTATION, PodName,
};
use tessera_api::reason::MAX_EVENT_BYTES;
use tessera_index::{
    DeviceTrouble, GroupProblem, MAX_GROUP_SIZE, Misplaced, PlanningBlocker, RepairAction,
    RepairBlocker,
};

/// Metric label and finding: no ResourceSlice of the driver has a device.
pub const NO_DEVICES_PUBLISHED: &str = "NoDevicesPublished";

/// Message of [`events::POD_STATUS_MISSING_CLAIM`]; see
/// [`Index::is_unlisted`](tessera_index::Index::is_unlisted).
pub const NOT_LISTED_NOTE: &str = "the pod's status does not list all ResourceClaims that were \
     created for the pod, so kube-scheduler ignores the pod and Tessera allocates no devices for \
     it; kube-controller-manager writes that status: check that it runs. Before Kubernetes 1.37 \
     it may never list all claims of a pod with several claims (kubernetes/kubernetes#138407): \
     delete the pod to start over";

/// The most names of nodes or pods in one message, which an event has to hold.
const MAX_NAMES: usize = 10;

/// Returns the message of [`events::PREEMPTING`]. `victims` are namespaces and names.
pub fn preempting_message(nodes: &[NodeName], victims: &[String]) -> String {
    let nodes_word = if nodes.len() == 1 { "node" } else { "nodes" };
    format!(
        "room is made on {nodes_word} {}, and kept for up to 5 minutes: these pods of lower \
         priority are evicted, those of a group all together: {}",
        listed(nodes, MAX_NAMES),
        listed(victims, MAX_NAMES)
    )
}

/// Returns the first names of a list, and the number of the others.
pub fn listed(names: &[impl Display], at_most: usize) -> String {
    let (first, others) = names.split_at(names.len().min(at_most));
    let first: Vec<String> = first.iter().map(ToString::to_string).collect();
    match others.len() {
        0 => first.join(", "),
        others => format!("{} and {others} more", first.join(", ")),
    }
}

/// Returns the message of [`events::NODE_REQUESTED`]. `namespace` is that of placeholder pods.
pub fn node_requested_message(namespace: &Namespace, group: &NodeGroupName) -> String {
    format!(
        "no node has the devices: a placeholder pod in namespace {namespace} asks the cluster \
         autoscaler for a node of group {group}"
    )
}

/// Returns the message of [`events::PREEMPTED`].
pub fn preempted_message(namespace: &Namespace, name: &PodName) -> String {
    format!("evicted so that pod {namespace}/{name} of a higher priority gets the devices")
}

/// Returns the message of [`events::EVICTED_FROM_GPU`].
pub fn recovery_message(device: &DeviceId, trouble: &DeviceTrouble) -> String {
    let gpu = format!("{}/{}", device.pool.pool, device.device);
    match trouble {
        DeviceTrouble::Unhealthy { cause } => {
            format!("evicted because GPU {gpu} of the pod is unhealthy ({cause})")
        }
        DeviceTrouble::NotPublished => {
            format!("evicted because GPU {gpu} of the pod is not published any more")
        }
        DeviceTrouble::Overcommitted => format!(
            "evicted because more of GPU {gpu} is allocated than it has, and the pod is of the \
             lowest priority or the youngest on it"
        ),
    }
}

/// Returns the event reason of a claim that cannot be allocated.
pub fn refusal_reason(cause: &RefusalCause) -> EventReason {
    match cause {
        RefusalCause::NoFit(_) => events::INSUFFICIENT_DEVICES,
        RefusalCause::OverQuota(_) => events::QUOTA_EXCEEDED,
        RefusalCause::GroupDoesNotFit(_) => events::GROUP_DOES_NOT_FIT,
        RefusalCause::BudgetExceeded => events::SEARCH_BUDGET_EXCEEDED,
        RefusalCause::UnknownClass { .. } => events::UNKNOWN_DEVICE_CLASS,
        RefusalCause::NotSupported { .. } => events::NOT_SUPPORTED,
        RefusalCause::Config { .. } => events::INVALID_CONFIG,
    }
}

/// Returns the event message of a claim that cannot be allocated: at most [`MAX_EVENT_BYTES`].
///
/// `claim` is the name of the ResourceClaim, `reserved` the node that is reserved for its pod.
pub fn refusal_message(
    claim: &str,
    cause: &RefusalCause,
    reserved: Option<&ReservedNode>,
) -> String {
    match cause {
        RefusalCause::UnknownClass { request, class } => format!(
            "ResourceClaim {claim}: request `{request}` refers to DeviceClass `{class}`, which \
             does not exist; list classes with `kubectl get deviceclasses`"
        ),
        RefusalCause::NotSupported { request, what } => format!(
            "ResourceClaim {claim}: request `{request}` uses {what}, which this version does not \
             support"
        ),
        RefusalCause::Config { request, error } => {
            format!("ResourceClaim {claim}: request `{request}`: {error}")
        }
        RefusalCause::OverQuota(shortfall) => {
            format!("ResourceClaim {claim}: {}", quota_message(shortfall))
        }
        RefusalCause::GroupDoesNotFit(shortfall) => {
            let GroupShortfall { pods, placed, first, topology } = shortfall;
            let where_all = topology.as_ref().map(|label| {
                format!(" on nodes with one value of the label `{label}`, which the group requires")
            });
            format!(
                "ResourceClaim {claim}: the pod's group needs devices for {pods} pods at the same \
                 time{}, and there are devices for {placed}; the first pod that does not fit is \
                 `{first}`",
                where_all.unwrap_or_default()
            )
        }
        RefusalCause::BudgetExceeded => format!(
            "ResourceClaim {claim}: search budget exceeded, by combinations of devices or by the CPU \
             time of the namespace's CEL selectors; request fewer devices or constraints in one \
             claim, or simplify its selectors"
        ),
        RefusalCause::NoFit(explanation) => {
            let closing = reserved
                .map(|reserved| format!("; {}", reservation_message(reserved)))
                .unwrap_or_default();
            let subject = format!("ResourceClaim {claim}");
            explanation.render_for(&subject, MAX_EVENT_BYTES - closing.len()) + &closing
        }
    }
}

/// Returns the message about a quota that is exceeded.
fn quota_message(shortfall: &QuotaShortfall) -> String {
    let QuotaShortfall { quota, resource, asked, used, hard } = shortfall;
    let (over, resource) = (shortfall.over(), resource.name());
    let advice = match asked > hard {
        true => "; the quota never admits the pod: ask for less, or have the quota raised",
        false => "",
    };
    format!(
        "over quota by {over} of {resource} (used {used} of {hard}): the pod asks for {asked}, and \
         GpuQuota `{quota}` limits the namespace{advice}"
    )
}

/// Returns the message about the node that is reserved for a pod.
pub fn reservation_message(reserved: &ReservedNode) -> String {
    let ReservedNode { node, until, .. } = reserved;
    match Timestamp::from_second(*until) {
        Ok(until) => format!("node {node} is reserved for the pod until {until}"),
        // Beyond the year 9999.
        Err(_) => format!("node {node} is reserved for the pod"),
    }
}

/// Returns the metric label of a cause: few values, none from users. Of several reasons the one
/// with most devices.
pub fn metric_label(cause: &RefusalCause) -> &'static str {
    let RefusalCause::NoFit(explanation) = cause else { return refusal_reason(cause).name() };
    let most = explanation.totals().iter().rev().max_by_key(|(_, devices)| **devices);
    most.map_or(NO_DEVICES_PUBLISHED, |(reason, _)| reason.code())
}

/// Returns the event reason of a pod that cannot be planned because of a claim.
pub fn blocker_reason(blocker: PlanningBlocker) -> EventReason {
    match blocker {
        PlanningBlocker::MixedDrivers => events::MIXED_DRIVERS,
        PlanningBlocker::BoundPod => events::CLAIM_IN_USE,
        PlanningBlocker::Group(_) => events::GROUP_INCOMPLETE,
    }
}

/// Returns the event message of a pod that cannot be planned because of a claim.
pub fn blocker_message(claim: &str, blocker: PlanningBlocker) -> String {
    match blocker {
        PlanningBlocker::MixedDrivers => format!(
            "ResourceClaim {claim} requests devices of {DRIVER_NAME} and of another driver, which \
             Tessera does not allocate; split it into one claim per driver, or add the driver to \
             managedDrivers of the chart"
        ),
        PlanningBlocker::BoundPod => format!(
            "ResourceClaim {claim} is not allocated, and another pod that uses it is bound; \
             it must be allocated on the node of that pod first"
        ),
        PlanningBlocker::Group(problem) => group_message(problem),
    }
}

fn group_message(problem: GroupProblem) -> String {
    match problem {
        GroupProblem::SizeMissing => format!(
            "the pod has the annotation `{POD_GROUP_ANNOTATION}` and not \
             `{POD_GROUP_SIZE_ANNOTATION}`: add it, with the number of pods of the group"
        ),
        GroupProblem::SizeInvalid => format!(
            "the annotation `{POD_GROUP_SIZE_ANNOTATION}` of the pod is not a number from 1 to \
             {MAX_GROUP_SIZE}: write the number of pods of the group"
        ),
        GroupProblem::NameMissing => format!(
            "the pod has the annotation `{POD_GROUP_SIZE_ANNOTATION}` and neither an owner nor \
             `{POD_GROUP_ANNOTATION}`: add the name of the group"
        ),
        GroupProblem::PodGroupMissing => {
            "the PodGroup that the pod names does not exist: create it, in the pod's namespace"
                .to_owned()
        }
        GroupProblem::PodGroupTooLarge => format!(
            "the PodGroup that the pod names starts more than {MAX_GROUP_SIZE} pods together, which \
             one plan does not place: lower its minimum"
        ),
        GroupProblem::Incomplete { size, present } => format!(
            "the pod's group has {size} pods, and {present} of them have devices or wait for them; \
             the group gets its devices once all of them exist without scheduling gates and with \
             their claims"
        ),
    }
}

/// Returns the event message of a bound pod with a claim that is not allocated on its node.
pub fn node_mismatch_message(claim: &str, misplaced: &Misplaced) -> String {
    let Misplaced { node, allocated, repair_action, .. } = misplaced;
    let place = allocated
        .as_ref()
        .map_or_else(|| "not allocated".to_owned(), |there| format!("allocated on node {there}"));
    let repair = repair(repair_action);
    format!("the pod is bound to node {node}, but ResourceClaim {claim} is {place}; {repair}")
}

fn repair(repair_action: &RepairAction) -> &'static str {
    match repair_action {
        RepairAction::Deallocate => "no pod uses it there, so it will be moved to the pod's node",
        RepairAction::Restore(_) => "its previous allocation will be restored",
        RepairAction::Plan => "it will be allocated there",
        RepairAction::Blocked(RepairBlocker::Started) => {
            "containers of the pod have run, and it is not known with which devices; delete the \
             pod to start over"
        }
        RepairAction::Blocked(RepairBlocker::InUse) => {
            "another pod may be using it; delete the pod to start over"
        }
    }
}
