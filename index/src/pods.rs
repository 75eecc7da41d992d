//! Pods: their claims and their requests of nodes.

use std::collections::BTreeSet;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{Pod, PodStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ManagedFieldsEntry;
use litemap::LiteMap;
use tessera_allocator::model::{PendingPod, PodClaim, PodUid, SchedulingConstraints};
use tessera_api::names::{
    CONTROLLER_FIELD_MANAGER, ClaimName, ClaimUid, MIRROR_ANNOTATION, Namespace, NodeName, PodName,
};

use crate::convert;
use crate::groups::GroupMember;

/// A pod.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct PodEntry {
    pub(crate) uid: PodUid,
    pub(crate) namespace: Namespace,
    pub(crate) name: PodName,
    /// `spec.nodeName`.
    pub(crate) node: Option<NodeName>,
    /// Its phase is `Succeeded` or `Failed`: no container runs any more.
    pub(crate) finished: bool,
    /// Its phase is `Failed`.
    pub(crate) failed: bool,
    pub(crate) deleting: bool,
    /// It has scheduling gates, so it is not planned yet.
    pub(crate) gated: bool,
    pub(crate) priority: i32,
    /// Its `preemptionPolicy` is not `Never`.
    pub(crate) is_preempting: bool,
    /// It is the mirror of a static pod, which no API request ends.
    pub(crate) is_mirror: bool,
    pub(crate) created: i64,
    pub(crate) nomination: Option<Nomination>,
    /// The group that it gets its devices with.
    pub(crate) group: Option<Box<GroupMember>>,
    /// `spec.schedulingGroup.podGroupName`: claims may be that PodGroup's.
    pub(crate) pod_group: Option<Box<str>>,
    /// Its claims in pod order.
    pub(crate) claims: Vec<ClaimRef>,
    pub(crate) scheduling: Arc<SchedulingConstraints>,
    /// A container of it has run, so its devices may be in use. Containers that the kubelet has
    /// not reported yet are not seen.
    pub(crate) started: bool,
    /// The message of the condition `PodScheduled`, if the pod is unbound and the condition is
    /// `False` with reason `Unschedulable`.
    pub(crate) unschedulable: Option<String>,
    /// The claim of each name at the time of binding: a recreated object is another claim.
    pub(crate) links: LiteMap<ClaimName, ClaimUid>,
    /// The requests that are counted for it on a node.
    pub(crate) counted: Option<Arc<SchedulingConstraints>>,
    /// The node on which its requests are counted.
    pub(crate) counted_on: Option<NodeName>,
    /// They are counted as those of a pod that holds devices of ours.
    pub(crate) counted_as_holder: bool,
}

/// `status.nominatedNodeName`, and the component that set it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Nomination {
    /// The node.
    pub node: NodeName,
    /// The component that set it.
    pub by: Nominator,
}

impl Nomination {
    /// Returns the nomination of a pod.
    pub fn of(object: &Pod) -> Option<Self> {
        let node = object.status.as_ref()?.nominated_node_name.as_deref()?;
        let by = nominator(object.metadata.managed_fields.as_deref().unwrap_or_default());
        Some(Self { node: NodeName::new(node).ok()?, by })
    }
}

/// The component that set `status.nominatedNodeName`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Nominator {
    /// tessera-controller: the devices of the pod are allocated on the node.
    Controller,
    /// kube-scheduler: it evicts pods from the node, or binds the pod. The same value that it
    /// confirms stays the controller's.
    Scheduler,
}

/// One entry of `spec.resourceClaims`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ClaimRef {
    /// The entry's own name.
    pub(crate) entry: String,
    /// The name of the claim; none = not generated yet.
    pub(crate) name: Option<ClaimName>,
    /// The pod itself names the claim, validly or not; otherwise see [`crate::generated`].
    pub(crate) stated: bool,
    /// It is generated from a template, so it has to be owned by the pod or its PodGroup.
    pub(crate) generated: bool,
}

impl PodEntry {
    /// Reads a pod. Returns none for an object that the API server cannot have stored.
    pub(crate) fn new(object: &Pod) -> Option<Self> {
        let metadata = &object.metadata;
        let spec = object.spec.as_ref()?;
        let status = object.status.as_ref();
        let phase = status.and_then(|s| s.phase.as_deref());
        let node = |name: &Option<String>| name.as_deref().and_then(|n| NodeName::new(n).ok());
        Some(Self {
            uid: PodUid::new(metadata.uid.as_deref()?),
            namespace: Namespace::new(metadata.namespace.as_deref()?).ok()?,
            name: PodName::new(metadata.name.as_deref()?).ok()?,
            node: node(&spec.node_name),
            finished: matches!(phase, Some("Succeeded" | "Failed")),
            failed: phase == Some("Failed"),
            deleting: metadata.deletion_timestamp.is_some(),
            gated: spec.scheduling_gates.as_ref().is_some_and(|g| !g.is_empty()),
            priority: spec.priority.unwrap_or(0),
            is_preempting: spec.preemption_policy.as_deref() != Some("Never"),
            is_mirror: metadata
                .annotations
                .as_ref()
                .is_some_and(|annotations| annotations.contains_key(MIRROR_ANNOTATION)),
            created: metadata.creation_timestamp.as_ref().map_or(0, |t| t.0.as_second()),
            nomination: Nomination::of(object),
            group: GroupMember::of(object).map(Box::new),
            pod_group: spec
                .scheduling_group
                .as_ref()
                .and_then(|group| group.pod_group_name.as_deref())
                .map(Into::into),
            claims: claims(object),
            scheduling: Arc::new(match spec.node_name {
                None => convert::scheduling(spec),
                // Of bound pods only the requests are needed.
                Some(_) => SchedulingConstraints {
                    requests: convert::pod_requests(spec),
                    ..SchedulingConstraints::default()
                },
            }),
            started: status.is_some_and(|s| phase == Some("Running") || has_started(s)),
            unschedulable: status.and_then(unschedulable).filter(|_| spec.node_name.is_none()),
            links: LiteMap::with_capacity(if spec.node_name.is_some() { 1 } else { 0 }),
            counted: None,
            counted_on: None,
            counted_as_holder: false,
        })
    }

    /// Returns the pod as the allocator's input.
    pub(crate) fn pending(&self, claims: Vec<PodClaim>) -> PendingPod {
        PendingPod {
            uid: self.uid.clone(),
            namespace: self.namespace.clone(),
            name: self.name.clone(),
            priority: self.priority,
            created: self.created,
            claims,
            scheduling: Arc::clone(&self.scheduling),
            nominated_node: self.node_with_room().cloned(),
            excluded_nodes: BTreeSet::new(),
            together_with: Vec::new(),
            topology: None,
        }
    }

    /// Returns true if nothing but a nomination by the controller was added or removed.
    pub(crate) fn differs_only_by_own_nomination(&self, old: &Self) -> bool {
        let without = |pod: &Self| Self { nomination: None, ..pod.clone() };
        self.node_with_room().is_none()
            && old.node_with_room().is_none()
            && self.nomination != old.nomination
            && without(self) == without(old)
    }

    /// Returns true if the pod is bound to a node and containers of it may run there.
    pub(crate) fn is_running(&self) -> bool {
        self.node.is_some() && !self.finished
    }

    /// Returns the node on which room is being made for the pod: a nomination by the controller
    /// says only where its devices are.
    pub(crate) fn node_with_room(&self) -> Option<&NodeName> {
        let nomination = self.nomination.as_ref()?;
        (nomination.by == Nominator::Scheduler).then_some(&nomination.node)
    }

    /// Returns true if the pod waits for a node.
    pub(crate) fn is_waiting(&self) -> bool {
        self.node.is_none() && !self.finished && !self.deleting
    }
}

/// Returns the component that set `status.nominatedNodeName`: the API server records the last
/// client that changed a field.
fn nominator(fields: &[ManagedFieldsEntry]) -> Nominator {
    let is_nomination = |entry: &&ManagedFieldsEntry| {
        let fields = entry.fields_v1.as_ref().map(|fields| &fields.0["f:status"]);
        fields.is_some_and(|status| status.get("f:nominatedNodeName").is_some())
    };
    let mut own =
        fields.iter().filter(|entry| entry.manager.as_deref() == Some(CONTROLLER_FIELD_MANAGER));
    if own.any(|entry| is_nomination(&entry)) {
        Nominator::Controller
    } else {
        Nominator::Scheduler
    }
}

fn has_started(status: &PodStatus) -> bool {
    let lists = [
        &status.init_container_statuses,
        &status.container_statuses,
        &status.ephemeral_container_statuses,
    ];
    lists.into_iter().flatten().flatten().any(|container| {
        let state = container.state.as_ref();
        container.container_id.as_deref().is_some_and(|id| !id.is_empty())
            || container.restart_count > 0
            || state.is_some_and(|s| s.running.is_some() || s.terminated.is_some())
    })
}

fn unschedulable(status: &PodStatus) -> Option<String> {
    let mut conditions = status.conditions.iter().flatten();
    let condition = conditions.find(|c| c.type_ == "PodScheduled" && c.status == "False")?;
    (condition.reason.as_deref() == Some("Unschedulable"))
        .then(|| condition.message.clone().unwrap_or_default())
}

fn claims(object: &Pod) -> Vec<ClaimRef> {
    let entries = object.spec.iter().flat_map(|s| s.resource_claims.iter().flatten());
    let statuses = || object.status.iter().flat_map(|s| s.resource_claim_statuses.iter().flatten());
    let mut claims = Vec::new();
    for entry in entries {
        if let Some(name) = &entry.resource_claim_name {
            claims.push(ClaimRef {
                entry: entry.name.clone(),
                name: ClaimName::new(name).ok(),
                stated: true,
                generated: false,
            });
            continue;
        }
        let status = statuses().find(|s| s.name == entry.name);
        // With a status without a name the pod does not need the claim (KEP-3063, optional claims).
        if let Some(status) = status {
            if let Some(name) = &status.resource_claim_name {
                claims.push(ClaimRef {
                    entry: entry.name.clone(),
                    name: ClaimName::new(name).ok(),
                    stated: true,
                    generated: true,
                });
            }
        } else {
            claims.push(ClaimRef {
                entry: entry.name.clone(),
                name: None,
                stated: false,
                generated: true,
            });
        }
    }
    claims.shrink_to_fit();
    claims
}
