//! `kubectl tessera explain`: why a pod or a claim is pending, or the GPUs that it has.
//!
//! The reasons come from the controller's own planner over the same objects, and the texts from
//! the renderer of its events.

mod claim;
mod extended;
mod outside;
mod pod;
mod render;

pub use claim::{PodClaimReport, RequestReport, RequestSpec};
pub(crate) use extended::{ExtendedResource, is_our_class};
pub use outside::Finding;
pub(crate) use outside::{NOT_MANAGED, of_cluster, supply};
pub use render::{claim_text, pod_text};

use claim::ClaimContext;
pub(crate) use render::claim_lines;

use k8s_openapi::api::core::v1::{Event, Pod};
use k8s_openapi::api::resource::v1::ResourceClaim;
use k8s_openapi::jiff::Timestamp;
use serde::Serialize;
use tessera_allocator::model::{ClusterSnapshot as Cluster, PendingPod, PodUid};
use tessera_allocator::{AllocationPlan, PlanSettings, plan};
use tessera_api::events::Reporter;
use tessera_api::names::{ClaimName, Namespace, PodName};
use tessera_index::{ClaimState, Index, Work};

use crate::cluster::event_time;
use crate::devices::AllocatedDevice;
use crate::snapshot::{IndexedSnapshot, Snapshot};

/// A snapshot with the plan that the controller would make of it.
pub struct PlanView<'v> {
    /// The objects.
    pub(crate) snapshot: &'v Snapshot,
    pub(crate) index: &'v Index,
    /// The allocator's view of the cluster.
    pub(crate) cluster: Cluster,
    /// The pods that the controller would plan, and the blocked ones.
    pub(crate) work: Work,
    /// The decisions that the controller would make.
    pub(crate) plan: AllocationPlan,
    pub(crate) settings: PlanSettings,
    /// The time to which ages are counted.
    pub(crate) now: Timestamp,
}

impl PlanView<'_> {
    /// Returns the plan if these pods were the only pending ones.
    pub(crate) fn plan_alone(&self, pods: &[PendingPod]) -> AllocationPlan {
        plan(&self.cluster, pods, PlanSettings { reservation_delay: None, ..self.settings })
    }
}

impl<'v> PlanView<'v> {
    /// Plans all pending pods of the snapshot as the controller would at the time `now`.
    pub fn new(
        snapshot: &'v Snapshot,
        indexed: &'v IndexedSnapshot,
        settings: PlanSettings,
        now: Timestamp,
    ) -> Self {
        let index = &indexed.index;
        let (cluster, work) = (index.snapshot(), index.work());
        let settings = PlanSettings { now: now.as_second(), ..settings };
        let plan = plan(&cluster, &work.pending, settings);
        Self { snapshot, index, cluster, work, plan, settings, now }
    }
}

/// The explanation of a pod.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PodReport {
    /// The pod's namespace.
    pub namespace: String,
    /// The pod's name.
    pub pod: String,
    /// The pod's state, in one word.
    pub state: PodState,
    /// The answer, in one sentence.
    pub message: String,
    /// The node to which the pod is bound, or would be.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    /// The pod's claims, in pod order.
    pub claims: Vec<PodClaimReport>,
    /// Conditions outside of the plan that explain the state.
    pub findings: Vec<Finding>,
    /// Last event of Tessera for each reason, the newest last.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub events: Vec<EventReport>,
    /// Advice to the user.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hint: Option<String>,
}

/// The state of a pod with regard to its claims.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum PodState {
    /// The pod uses no ResourceClaims.
    NoClaims,
    /// The pod has succeeded or failed.
    Completed,
    /// The pod is being deleted.
    Terminating,
    /// The pod is bound, and its claims are allocated on its node.
    Bound,
    /// The pod is bound, and a claim is not allocated on its node.
    NodeMismatch,
    /// The pod has a scheduling gate.
    SchedulingGated,
    /// A claim of the pod does not exist, or belongs to another owner.
    MissingClaim,
    /// The pod cannot be planned before a user changes something.
    Blocked,
    /// No node has the devices.
    Pending,
    /// The pod fits, and the controller has not allocated its claims yet.
    Schedulable,
    /// The pod's claims are allocated, and kube-scheduler has not bound it yet.
    PendingScheduling,
    /// The pod uses claims of other drivers only.
    NotManaged,
}

impl PodState {
    /// Returns true if the pod is not bound and not finished.
    pub fn is_pending(self) -> bool {
        !matches!(self, Self::NoClaims | Self::Completed | Self::Terminating | Self::Bound)
    }
}

/// An event of a Tessera component.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct EventReport {
    /// Time of the last occurrence.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub at: Option<Timestamp>,
    /// The reporting component.
    pub by: String,
    /// The reason.
    pub reason: String,
    /// The message.
    pub message: String,
    /// True if the pod was bound after the event, which is no longer current.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub before_binding: bool,
}

/// The explanation of a ResourceClaim.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ClaimReport {
    /// The claim's namespace.
    pub namespace: String,
    /// The claim's name.
    pub name: String,
    /// The answer, in one sentence.
    pub message: String,
    /// True if the claim is not allocated and should be.
    #[serde(rename = "waits")]
    pub is_pending: bool,
    /// Allocated devices; empty for a pending claim.
    pub devices: Vec<AllocatedDevice>,
    /// The node on which the claim is allocated.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    /// Consumers in `status.reservedFor`, by resource and name.
    pub reserved_for: Vec<String>,
    /// Explanations of the pods that use the claim.
    pub pods: Vec<PodReport>,
}

/// Error returned when the object to explain does not exist.
#[derive(Debug, thiserror::Error)]
pub enum ExplainError {
    /// The pod does not exist.
    #[error("pod `{name}` not found in namespace `{namespace}`{elsewhere}")]
    NoPod {
        /// The namespace.
        namespace: Namespace,
        /// The pod.
        name: PodName,
        /// Other namespaces with a pod of that name, as text.
        elsewhere: String,
    },
    /// The claim does not exist.
    #[error("ResourceClaim `{name}` not found in namespace `{namespace}`{elsewhere}")]
    NoClaim {
        /// The namespace.
        namespace: Namespace,
        /// The claim.
        name: ClaimName,
        /// Other namespaces with a claim of that name, as text.
        elsewhere: String,
    },
    /// The pod has no such entry in `spec.resourceClaims`.
    #[error("pod `{pod}` has no entry `{entry}` in spec.resourceClaims; its entries: {entries}")]
    NoEntry {
        /// The pod.
        pod: PodName,
        /// The entry.
        entry: String,
        /// The entries of the pod.
        entries: String,
    },
    /// The claim of a pod's entry is not generated yet.
    #[error(
        "entry `{entry}` of pod `{pod}` has no ResourceClaim yet; see `kubectl tessera explain pod \
         {pod}`"
    )]
    NotGenerated {
        /// The pod.
        pod: PodName,
        /// The entry.
        entry: String,
    },
}

/// Explains a pod. `events` are the events about it, the newest last.
///
/// # Errors
/// [`ExplainError::NoPod`].
pub fn pod(
    view: &PlanView<'_>,
    namespace: &Namespace,
    name: &PodName,
    events: &[Event],
) -> Result<PodReport, ExplainError> {
    let uid = find_pod(view, namespace, name)?;
    let report = pod::report(view, uid);
    let bound_at = Some(report.state)
        .filter(|state| matches!(state, PodState::Bound | PodState::Completed))
        .and_then(|_| binding_time(find_object(view, uid)?));
    Ok(PodReport { events: latest_events(events, bound_at), ..report })
}

fn find_pod<'v>(
    view: &'v PlanView<'_>,
    namespace: &Namespace,
    name: &PodName,
) -> Result<&'v PodUid, ExplainError> {
    view.index.pod_by_name(namespace, name).ok_or_else(|| {
        let pods = view.snapshot.pods.iter().map(|pod| &pod.metadata);
        let named = pods.filter(|metadata| metadata.name.as_deref() == Some(name.as_str()));
        let elsewhere = elsewhere(named.filter_map(|metadata| metadata.namespace.as_deref()));
        ExplainError::NoPod { namespace: namespace.clone(), name: name.clone(), elsewhere }
    })
}

pub(crate) fn find_object<'v>(view: &PlanView<'v>, uid: &PodUid) -> Option<&'v Pod> {
    view.snapshot.pods.iter().find(|pod| pod.metadata.uid.as_deref() == Some(uid.as_str()))
}

/// Returns the time when kube-scheduler bound the pod.
fn binding_time(pod: &Pod) -> Option<Timestamp> {
    let conditions = pod.status.as_ref()?.conditions.as_ref()?;
    let bound = conditions.iter().find(|c| c.type_ == "PodScheduled" && c.status == "True")?;
    bound.last_transition_time.as_ref().map(|time| time.0)
}

/// Returns the name of the ResourceClaim of an entry of a pod's `spec.resourceClaims`.
///
/// # Errors
/// The pod or the entry does not exist, or its claim is not generated yet.
pub fn claim_of_entry(
    view: &PlanView<'_>,
    namespace: &Namespace,
    pod: &PodName,
    entry: &str,
) -> Result<ClaimName, ExplainError> {
    let claims = view.index.claim_standings(find_pod(view, namespace, pod)?);
    let (pod, entry) = (pod.clone(), entry.to_owned());
    match claims.iter().find(|claim| claim.entry == entry) {
        Some(claim) => claim.name.clone().ok_or(ExplainError::NotGenerated { pod, entry }),
        None => {
            let entries: Vec<&str> = claims.iter().map(|claim| claim.entry.as_str()).collect();
            let entries = if entries.is_empty() { "none".to_owned() } else { entries.join(", ") };
            Err(ExplainError::NoEntry { pod, entry, entries })
        }
    }
}

/// Explains a ResourceClaim and the pods that use it.
///
/// # Errors
/// [`ExplainError::NoClaim`].
pub fn claim(
    view: &PlanView<'_>,
    namespace: &Namespace,
    name: &ClaimName,
) -> Result<ClaimReport, ExplainError> {
    let all = || view.snapshot.resource_claims.iter();
    let named = || all().filter(|claim| claim.metadata.name.as_deref() == Some(name.as_str()));
    let found =
        named().find(|claim| claim.metadata.namespace.as_deref() == Some(namespace.as_str()));
    let uid = view.index.claim_by_name(namespace, name);
    let Some((object, uid)) = found.zip(uid) else {
        let elsewhere = elsewhere(named().filter_map(|claim| claim.metadata.namespace.as_deref()));
        return Err(ExplainError::NoClaim {
            namespace: namespace.clone(),
            name: name.clone(),
            elsewhere,
        });
    };
    let pods: Vec<PodUid> = view.index.pods_with(uid).into_iter().collect();
    let pods: Vec<PodReport> = pods.iter().map(|pod| pod::report(view, pod)).collect();
    let context = ClaimContext::of_claim(view, uid);
    let (message, is_pending) = answer(object, &context, &pods);
    let devices = match &context.state {
        ClaimState::Allocated(allocation) => {
            allocation.results.iter().map(AllocatedDevice::from).collect()
        }
        _ => Vec::new(),
    };
    Ok(ClaimReport {
        namespace: namespace.to_string(),
        name: name.to_string(),
        message,
        is_pending,
        devices,
        node: context.node(),
        reserved_for: reserved_for(object),
        pods,
    })
}

/// Returns the answer about a claim, and true if the claim is pending.
fn answer(
    object: &ResourceClaim,
    context: &ClaimContext<'_>,
    pods: &[PodReport],
) -> (String, bool) {
    if object.metadata.deletion_timestamp.is_some() {
        return ("it is being deleted and disappears when no pod uses it".to_owned(), false);
    }
    match &context.state {
        ClaimState::Allocated(_) => (context.message(), false),
        ClaimState::Foreign => (context.message(), true),
        _ if pods.is_empty() => (
            "no pod uses it: a claim is allocated for a pending pod that names it in \
             spec.resourceClaims"
                .to_owned(),
            true,
        ),
        _ => ("it is not allocated; see its pods below".to_owned(), true),
    }
}

fn reserved_for(object: &ResourceClaim) -> Vec<String> {
    let consumers = object.status.iter().flat_map(|status| status.reserved_for.iter().flatten());
    consumers.map(|consumer| format!("{}/{}", consumer.resource, consumer.name)).collect()
}

fn elsewhere<'n>(namespaces: impl Iterator<Item = &'n str>) -> String {
    let namespaces: Vec<&str> = namespaces.collect();
    match namespaces.as_slice() {
        [] => String::new(),
        some => format!("; found in {}: choose one with -n NAMESPACE", some.join(", ")),
    }
}

/// Returns the last event of Tessera's components for each reason, the newest last.
fn latest_events(events: &[Event], bound_at: Option<Timestamp>) -> Vec<EventReport> {
    let mut latest: Vec<EventReport> = Vec::new();
    for event in events {
        let component = event.reporting_component.as_deref().filter(|name| !name.is_empty());
        let by = component.or(event.source.as_ref().and_then(|source| source.component.as_deref()));
        let Some(by) = by.filter(|by| Reporter::is_tessera(by)) else { continue };
        let at = event_time(event);
        let report = EventReport {
            at,
            by: by.to_owned(),
            reason: event.reason.clone().unwrap_or_default(),
            message: event.message.clone().unwrap_or_default(),
            before_binding: at.zip(bound_at).is_some_and(|(at, bound)| at <= bound),
        };
        latest.retain(|earlier| earlier.reason != report.reason);
        latest.push(report);
    }
    latest
}
