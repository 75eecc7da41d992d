//! Pods, as far as they need devices or take room on a node.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use k8s_openapi::api::core::v1::{Pod, PodStatus};
use tessera_allocator::model::{PendingPod, PodClaim, PodUid, Scheduling};
use tessera_api::names::{ClaimName, ClaimUid, Namespace, NodeName, PodName};
use tessera_api::quantity::Quantity;

use crate::convert;

/// One pod.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct PodEntry {
    pub(crate) uid: PodUid,
    pub(crate) namespace: Namespace,
    pub(crate) name: PodName,
    /// `spec.nodeName`.
    pub(crate) node: Option<NodeName>,
    /// Succeeded or failed: nothing of it runs any more.
    pub(crate) finished: bool,
    pub(crate) deleting: bool,
    /// It has scheduling gates: not to be planned yet.
    pub(crate) gated: bool,
    pub(crate) priority: i32,
    pub(crate) created: i64,
    pub(crate) nominated: Option<NodeName>,
    /// Its claims in pod order.
    pub(crate) claims: Vec<ClaimRef>,
    pub(crate) scheduling: Arc<Scheduling>,
    /// A container of it has been there, so its devices may be in use. What kubelet has not
    /// reported yet is not seen.
    pub(crate) started: bool,
    /// While it waits: condition `PodScheduled` is `False` with reason `Unschedulable`; its
    /// message.
    pub(crate) unschedulable: Option<String>,
    /// Which claim a name meant when the pod was bound: an object made anew under the name is
    /// another one.
    pub(crate) links: BTreeMap<ClaimName, ClaimUid>,
    /// What is booked for it on a node, as it was when it was booked.
    pub(crate) booked_requests: BTreeMap<String, Quantity>,
    /// The node on which its requests are booked.
    pub(crate) booked_on: Option<NodeName>,
    /// Whether they are booked as those of a pod that holds devices of ours.
    pub(crate) booked_as_holder: bool,
}

/// One entry of `spec.resourceClaims`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ClaimRef {
    /// The entry's own name.
    pub(crate) entry: String,
    /// The claim's name; none = not generated yet.
    pub(crate) name: Option<ClaimName>,
    /// The pod itself says what the claim is called, or would if it were a name; otherwise see
    /// [`crate::generated`].
    pub(crate) stated: bool,
    /// It is made from a template, so it has to be owned by the pod.
    pub(crate) generated: bool,
}

impl PodEntry {
    /// Reads a pod; `None` for an object that the API server cannot have made.
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
            deleting: metadata.deletion_timestamp.is_some(),
            gated: spec.scheduling_gates.as_ref().is_some_and(|g| !g.is_empty()),
            priority: spec.priority.unwrap_or(0),
            created: metadata.creation_timestamp.as_ref().map_or(0, |t| t.0.as_second()),
            nominated: status.and_then(|s| node(&s.nominated_node_name)),
            claims: claims(object),
            scheduling: Arc::new(match spec.node_name {
                None => convert::scheduling(spec),
                // Of bound pods only what they take of the node is needed.
                Some(_) => {
                    Scheduling { requests: convert::pod_requests(spec), ..Scheduling::default() }
                }
            }),
            started: status.is_some_and(|s| phase == Some("Running") || has_started(s)),
            unschedulable: status.and_then(unschedulable).filter(|_| spec.node_name.is_none()),
            links: BTreeMap::new(),
            booked_requests: BTreeMap::new(),
            booked_on: None,
            booked_as_holder: false,
        })
    }

    /// The pod as the allocator is to see it.
    pub(crate) fn pending(&self, claims: Vec<PodClaim>) -> PendingPod {
        PendingPod {
            uid: self.uid.clone(),
            namespace: self.namespace.clone(),
            name: self.name.clone(),
            priority: self.priority,
            created: self.created,
            claims,
            scheduling: Arc::clone(&self.scheduling),
            nominated: self.nominated.clone(),
            excluded: BTreeSet::new(),
        }
    }

    /// Bound to a node, and something of it may run there.
    pub(crate) fn is_running(&self) -> bool {
        self.node.is_some() && !self.finished
    }

    /// Waits for a node.
    pub(crate) fn is_waiting(&self) -> bool {
        self.node.is_none() && !self.finished && !self.deleting
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
        // A status without a name: the pod does not need the claim (KEP-3063, optional claims).
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
    claims
}
