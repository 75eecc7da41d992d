//! `kubectl tessera explain`: why a pod or a claim waits, or where it is and that all is well.
//!
//! The reasons come from the controller's own planner over the same objects, and their words from
//! the renderer of its events.

mod claim;
mod outside;
mod pod;
mod render;

pub use claim::{Ask, ClaimReport, RequestReport};
pub use outside::Finding;
pub use render::{claim_text, pod_text};

use claim::Subject;
pub(crate) use outside::supply;
pub(crate) use render::claim_lines;

use k8s_openapi::api::core::v1::Event;
use k8s_openapi::api::resource::v1::ResourceClaim;
use k8s_openapi::jiff::Timestamp;
use serde::Serialize;
use tessera_allocator::model::{PendingPod, PodUid, Snapshot as Cluster};
use tessera_allocator::{Plan, Settings, plan};
use tessera_api::names::{ClaimName, Namespace, PodName};
use tessera_index::{ClaimState, Index, Work};

use crate::cluster::told_at;
use crate::devices::Given;
use crate::snapshot::{Picture, Snapshot};

/// What there is to look at.
pub struct View<'v> {
    /// The objects.
    pub(crate) snapshot: &'v Snapshot,
    pub(crate) index: &'v Index,
    /// What the allocator sees.
    pub(crate) cluster: Cluster,
    /// The pods that the controller would plan now, and those that it cannot.
    pub(crate) work: Work,
    /// What the controller would decide now.
    pub(crate) plan: Plan,
    pub(crate) settings: Settings,
    /// The moment that ages are counted to.
    pub(crate) now: Timestamp,
}

impl View<'_> {
    /// What the controller would decide if these pods were the only ones that wait.
    pub(crate) fn plan_alone(&self, pods: &[PendingPod]) -> Plan {
        plan(&self.cluster, pods, Settings { patience: None, ..self.settings })
    }
}

impl<'v> View<'v> {
    /// Plans as the controller would at this moment.
    pub fn new(
        snapshot: &'v Snapshot,
        picture: &'v Picture,
        settings: Settings,
        now: Timestamp,
    ) -> Self {
        let index = &picture.index;
        let (cluster, work) = (index.snapshot(), index.work());
        let settings = Settings { now: now.as_second(), ..settings };
        let plan = plan(&cluster, &work.pending, settings);
        Self { snapshot, index, cluster, work, plan, settings, now }
    }
}

/// How it is with a pod.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PodReport {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub pod: String,
    /// In one word.
    pub state: PodState,
    /// In one sentence.
    pub message: String,
    /// Where it is bound, or would be placed now.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    /// Its claims, in pod order.
    pub claims: Vec<ClaimReport>,
    /// What else stands in the way or explains it.
    pub findings: Vec<Finding>,
    /// What Tessera's parts last told in events, one for each reason, the newest last.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub events: Vec<Said>,
}

/// How it is with a pod, in one word.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum PodState {
    /// It asks for nothing through claims.
    NoClaims,
    /// It has ended.
    Ended,
    /// It is being deleted.
    Deleting,
    /// It is bound and has its devices.
    Bound,
    /// It is bound, and one of its claims is not where it is.
    Misplaced,
    /// A scheduling gate holds it back.
    Gated,
    /// A claim of it is not there, or not its own.
    Incomplete,
    /// It cannot be planned before somebody changes something.
    Blocked,
    /// Nothing fits.
    Waiting,
    /// It fits, and the controller has not written it yet.
    Placeable,
    /// Its claims are allocated; kube-scheduler has to bind it.
    ForScheduler,
    /// It asks other drivers only.
    Foreign,
}

impl PodState {
    /// Whether the pod has to wait for something.
    pub fn waits(self) -> bool {
        !matches!(self, Self::NoClaims | Self::Ended | Self::Deleting | Self::Bound)
    }
}

/// An event.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Said {
    /// When it was last told.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub at: Option<Timestamp>,
    /// Who told it.
    pub by: String,
    /// Its reason.
    pub reason: String,
    /// Its text.
    pub message: String,
}

/// How it is with a claim.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Report {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// In one sentence.
    pub message: String,
    /// Whether it waits for something.
    pub waits: bool,
    /// What it has; empty unless it is allocated.
    pub devices: Vec<Given>,
    /// The node that it is on.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    /// Who has reserved it, by resource and name.
    pub reserved_for: Vec<String>,
    /// How it is with the pods that use it.
    pub pods: Vec<PodReport>,
}

/// Why there is nothing to explain.
#[derive(Debug, thiserror::Error)]
pub enum ExplainError {
    /// There is no such pod.
    #[error("no Pod `{name}` in namespace `{namespace}`{elsewhere}")]
    NoPod {
        /// The namespace.
        namespace: Namespace,
        /// The pod.
        name: PodName,
        /// Where there is one of that name.
        elsewhere: String,
    },
    /// There is no such claim.
    #[error("no ResourceClaim `{name}` in namespace `{namespace}`{elsewhere}")]
    NoClaim {
        /// The namespace.
        namespace: Namespace,
        /// The claim.
        name: ClaimName,
        /// Where there is one of that name.
        elsewhere: String,
    },
}

/// Explains a pod. `events` are those about it, the newest last.
///
/// # Errors
/// There is no such pod.
pub fn pod(
    view: &View<'_>,
    namespace: &Namespace,
    name: &PodName,
    events: &[Event],
) -> Result<PodReport, ExplainError> {
    let Some(uid) = view.index.pod_called(namespace, name) else {
        let named = view
            .snapshot
            .pods
            .iter()
            .filter(|pod| pod.metadata.name.as_deref() == Some(name.as_str()));
        let elsewhere = elsewhere(named.filter_map(|pod| pod.metadata.namespace.as_deref()));
        return Err(ExplainError::NoPod {
            namespace: namespace.clone(),
            name: name.clone(),
            elsewhere,
        });
    };
    Ok(PodReport { events: said(events), ..pod::report(view, uid) })
}

/// Explains a claim.
///
/// # Errors
/// There is no such claim.
pub fn claim(
    view: &View<'_>,
    namespace: &Namespace,
    name: &ClaimName,
) -> Result<Report, ExplainError> {
    let all = || view.snapshot.resource_claims.iter();
    let named = || all().filter(|claim| claim.metadata.name.as_deref() == Some(name.as_str()));
    let found =
        named().find(|claim| claim.metadata.namespace.as_deref() == Some(namespace.as_str()));
    let uid = view.index.claim_of_name(namespace, name);
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
    let subject = Subject::of_claim(view, uid);
    let (message, waits) = standing(object, &subject, &pods);
    let given = match &subject.state {
        ClaimState::Allocated(allocation) => allocation.results.iter().map(Given::from).collect(),
        _ => Vec::new(),
    };
    Ok(Report {
        namespace: namespace.to_string(),
        name: name.to_string(),
        message,
        waits,
        devices: given,
        node: subject.node(),
        reserved_for: reserved_for(object),
        pods,
    })
}

fn standing(object: &ResourceClaim, subject: &Subject<'_>, pods: &[PodReport]) -> (String, bool) {
    if object.metadata.deletion_timestamp.is_some() {
        return ("it is being deleted; that ends when nobody uses it any more".to_owned(), false);
    }
    match &subject.state {
        ClaimState::Allocated(_) => (subject.message(), false),
        ClaimState::Foreign => (subject.message(), true),
        _ if pods.is_empty() => (
            "no pod uses it: a claim is allocated when a pod that names it in spec.resourceClaims waits for a node"
                .to_owned(),
            true,
        ),
        _ => ("it is not allocated; see the pods that wait for it".to_owned(), true),
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
        some => format!("; there is one in {}: choose with -n NAMESPACE", some.join(", ")),
    }
}

/// The last event of each reason that one of our parts told.
fn said(events: &[Event]) -> Vec<Said> {
    let mut told: Vec<Said> = Vec::new();
    for event in events {
        let component = event.reporting_component.as_deref().filter(|name| !name.is_empty());
        let by = component.or(event.source.as_ref().and_then(|source| source.component.as_deref()));
        let Some(by) = by.filter(|by| by.starts_with("tessera-")) else { continue };
        let said = Said {
            at: told_at(event),
            by: by.to_owned(),
            reason: event.reason.clone().unwrap_or_default(),
            message: event.message.clone().unwrap_or_default(),
        };
        told.retain(|earlier| earlier.reason != said.reason);
        told.push(said);
    }
    told
}
