//! Writes of the scheduler: reservations, bindings, conditions, deallocations.

use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::{AllocationResult, ResourceClaim};
use kube::api::{Api, Patch, PatchParams};
use kube::runtime::events::EventType;
use kube::{Client, ResourceExt};
use serde_json::{Value, json};

use super::allocation::Allocations;
use crate::events::{EventWriter, PodEvent};
use crate::pod_claim::{self, FINALIZER};

/// Upstream's default for conflicts.
const ATTEMPTS: usize = 5;

/// Error that prevented the binding of a pod to its node.
#[derive(Debug, thiserror::Error)]
pub(super) enum BindError {
    #[error("claim {claim} got deleted in the meantime")]
    ClaimDeleted { claim: String },
    #[error("claim {claim} got deallocated elsewhere in the meantime")]
    Deallocated { claim: String },
    #[error("claim {claim} got allocated elsewhere in the meantime")]
    Allocated { claim: String },
    #[error("add finalizer to claim {claim}")]
    Protect { claim: String, source: kube::Error },
    #[error("add reservation to claim {claim}")]
    Reserve { claim: String, source: kube::Error },
    #[error("device binding failed")]
    ConditionFailed,
    #[error("device binding timeout")]
    ConditionTimeout,
    #[error("binding rejected")]
    Bind(#[source] kube::Error),
}

impl BindError {
    fn is_conflict(&self) -> bool {
        let (Self::Reserve { source, .. } | Self::Protect { source, .. }) = self else {
            return false;
        };
        matches!(source, kube::Error::Api(status) if status.is_conflict())
    }

    /// Returns the message for the pod's condition, with the cause, as on a real cluster.
    pub(super) fn condition_message(&self) -> String {
        let plugin = if matches!(self, Self::Bind(_)) {
            ""
        } else {
            "running PreBind plugin \"DynamicResources\": "
        };
        match std::error::Error::source(self) {
            Some(source) => format!("{plugin}{self}: {source}"),
            None => format!("{plugin}{self}"),
        }
    }
}

/// A pod that was bound.
pub(super) struct Bound {
    /// The pod, or `None` if it was deleted meanwhile.
    pub(super) pod: Option<Pod>,
    /// Its claims, as reserved.
    pub(super) claims: Vec<ResourceClaim>,
}

pub(super) struct Binder {
    client: Client,
    events: EventWriter,
}

impl Binder {
    pub(super) fn new(client: Client, name: &str) -> Self {
        Self { events: EventWriter::new(client.clone(), name), client }
    }

    fn pods(&self, pod: &Pod) -> Api<Pod> {
        Api::namespaced(self.client.clone(), &pod.namespace().unwrap_or_default())
    }

    fn claims(&self, claim: &ResourceClaim) -> Api<ResourceClaim> {
        Api::namespaced(self.client.clone(), &claim.namespace().unwrap_or_default())
    }

    /// Reserves the claims of a pod: the first part of PreBind. Reservations are given back if one
    /// fails.
    pub(super) async fn reserve_all(
        &self,
        pod: &Pod,
        claims: &[Arc<ResourceClaim>],
        mut allocations: Allocations,
        node: &str,
    ) -> Result<Vec<ResourceClaim>, BindError> {
        if !claims.is_empty() {
            // Nominates the node so that other components see it, as 1.35 and newer do. A failure
            // is ignored.
            let nominate = json!({"status": {"nominatedNodeName": node}});
            let name = pod.name_any();
            drop(
                self.pods(pod)
                    .patch_status(&name, &PatchParams::default(), &Patch::Strategic(nominate))
                    .await,
            );
        }
        let mut reserved = Vec::new();
        for (index, claim) in claims.iter().enumerate() {
            let allocation = allocations.remove(&index);
            if allocation.is_none() && pod_claim::is_reserved_for(pod, claim) {
                reserved.push(ResourceClaim::clone(claim));
                continue;
            }
            match self.reserve(pod, claim, allocation.as_ref()).await {
                Ok(claim) => reserved.push(claim),
                Err(error) => {
                    self.give_back(pod, &reserved).await;
                    return Err(error);
                }
            }
        }
        Ok(reserved)
    }

    /// Removes the reservations of a pod.
    pub(super) async fn give_back(&self, pod: &Pod, reserved: &[ResourceClaim]) {
        for claim in reserved {
            self.unreserve(pod, claim).await;
        }
    }

    /// Binds a pod whose claims are reserved, which are given back if that fails.
    pub(super) async fn bind(
        &self,
        pod: &Pod,
        reserved: Vec<ResourceClaim>,
        node: &str,
    ) -> Result<Bound, BindError> {
        if let Err(error) = self.write_binding(pod, node).await {
            self.give_back(pod, &reserved).await;
            return Err(error);
        }
        let note = format!(
            "Successfully assigned {}/{} to {node}",
            pod.namespace().unwrap_or_default(),
            pod.name_any()
        );
        let event = PodEvent {
            type_: EventType::Normal,
            reason: "Scheduled",
            action: "Binding",
            note: &note,
        };
        self.events.publish(pod, event).await;
        // Later decisions count this pod on its node before the watch reports it.
        let pod = self.pods(pod).get_opt(&pod.name_any()).await.ok().flatten();
        Ok(Bound { pod, claims: reserved })
    }

    async fn write_binding(&self, pod: &Pod, node: &str) -> Result<(), BindError> {
        let body = json!({
            "apiVersion": "v1", "kind": "Binding",
            "metadata": {"name": pod.name_any(), "namespace": pod.namespace(), "uid": pod.uid()},
            "target": {"kind": "Node", "name": node},
        });
        let path = format!(
            "/api/v1/namespaces/{}/pods/{}/binding",
            pod.namespace().unwrap_or_default(),
            pod.name_any()
        );
        let request = axum::http::Request::post(path)
            .header("content-type", "application/json")
            .body(body.to_string().into_bytes())
            .expect("invariant: names form a valid path");
        self.client.request::<Value>(request).await.map(drop).map_err(BindError::Bind)
    }

    /// Adds the pod to the claim's consumers, with the allocation if the scheduler made one.
    ///
    /// As upstream, a conflict is resolved by reading again, and a concurrently changed allocation
    /// is not detected.
    async fn reserve(
        &self,
        pod: &Pod,
        claim: &ResourceClaim,
        allocation: Option<&AllocationResult>,
    ) -> Result<ResourceClaim, BindError> {
        let name = claim.name_any();
        let key = format!("{}/{name}", claim.namespace().unwrap_or_default());
        let claims = self.claims(claim);
        let mut claim = claim.clone();
        for attempt in 1.. {
            if claim.metadata.deletion_timestamp.is_some() {
                return Err(BindError::ClaimDeleted { claim: key });
            }
            match (pod_claim::is_allocated(&claim), allocation) {
                (false, None) => return Err(BindError::Deallocated { claim: key }),
                (true, Some(_)) => return Err(BindError::Allocated { claim: key }),
                (true, None) | (false, Some(_)) => {}
            }
            match self.write(pod, &claim, allocation).await {
                Err(error) if error.is_conflict() && attempt < ATTEMPTS => {
                    let failed = |source| BindError::Reserve { claim: key.clone(), source };
                    claim = claims.get(&name).await.map_err(failed)?;
                }
                answer => return answer,
            }
        }
        unreachable!("the last attempt returns")
    }

    /// Makes one attempt: the finalizer, if there is an allocation, then the status.
    async fn write(
        &self,
        pod: &Pod,
        claim: &ResourceClaim,
        allocation: Option<&AllocationResult>,
    ) -> Result<ResourceClaim, BindError> {
        let (claims, name) = (self.claims(claim), claim.name_any());
        let key = format!("{}/{name}", claim.namespace().unwrap_or_default());
        let mut version = claim.resource_version();
        if allocation.is_some()
            && !claim.finalizers().iter().any(|finalizer| finalizer == FINALIZER)
        {
            let finalizers: Vec<_> =
                claim.finalizers().iter().map(String::as_str).chain([FINALIZER]).collect();
            let patch = json!({"metadata": {"resourceVersion": version, "finalizers": finalizers}});
            let patched = claims.patch(&name, &PatchParams::default(), &Patch::Merge(patch)).await;
            let failed = |source| BindError::Protect { claim: key.clone(), source };
            version = patched.map_err(failed)?.resource_version();
        }
        let patch = Patch::Merge(reservation(pod, claim, version.as_deref(), allocation));
        let patched = claims.patch_status(&name, &PatchParams::default(), &patch).await;
        patched.map_err(|source| BindError::Reserve { claim: key, source })
    }

    async fn unreserve(&self, pod: &Pod, claim: &ResourceClaim) {
        let patch = json!({
            "metadata": {"uid": claim.uid()},
            "status": {"reservedFor": [{"$patch": "delete", "uid": pod.uid()}]},
        });
        let (claims, name) = (self.claims(claim), claim.name_any());
        if let Err(error) =
            claims.patch_status(&name, &PatchParams::default(), &Patch::Strategic(patch)).await
        {
            tracing::debug!(error = &error as &dyn std::error::Error, "cannot remove reservation");
        }
    }

    /// Clears allocation, device status and consumers of a claim, at its observed version.
    pub(super) async fn deallocate(
        &self,
        claim: &ResourceClaim,
    ) -> Result<ResourceClaim, kube::Error> {
        let patch = json!({
            "metadata": {"resourceVersion": claim.resource_version()},
            "status": {"allocation": null, "devices": null, "reservedFor": null},
        });
        self.claims(claim)
            .patch_status(&claim.name_any(), &PatchParams::default(), &Patch::Merge(patch))
            .await
    }

    /// Reports that no node fits.
    pub(super) async fn unschedulable(
        &self,
        pod: &Pod,
        message: &str,
    ) -> Result<Option<Pod>, kube::Error> {
        self.report_failure(pod, "Unschedulable", message).await
    }

    /// Reports that the attempt failed.
    pub(super) async fn failed(
        &self,
        pod: &Pod,
        message: &str,
    ) -> Result<Option<Pod>, kube::Error> {
        self.report_failure(pod, "SchedulerError", message).await
    }

    async fn report_failure(
        &self,
        pod: &Pod,
        reason: &str,
        message: &str,
    ) -> Result<Option<Pod>, kube::Error> {
        let event = PodEvent {
            type_: EventType::Warning,
            reason: "FailedScheduling",
            action: "Scheduling",
            note: message,
        };
        self.events.publish(pod, event).await;
        let Some(patch) = condition(pod, reason, message) else { return Ok(None) };
        let patched = self
            .pods(pod)
            .patch_status(&pod.name_any(), &PatchParams::default(), &Patch::Strategic(patch))
            .await;
        match patched {
            Err(kube::Error::Api(status)) if status.is_not_found() => Ok(None),
            patched => patched.map(Some),
        }
    }
}

fn reservation(
    pod: &Pod,
    claim: &ResourceClaim,
    version: Option<&str>,
    allocation: Option<&AllocationResult>,
) -> Value {
    let mut consumers = pod_claim::reserved_for(claim).to_vec();
    consumers.push(pod_claim::consumer(pod));
    let mut status = json!({"reservedFor": consumers});
    // The real scheduler sets the time if an allocator omitted it, and the server then refuses the
    // whole update.
    let present = claim.status.as_ref().and_then(|status| status.allocation.as_ref());
    if let Some(allocation) = allocation {
        status["allocation"] = json!(allocation);
    } else if present.is_some_and(|allocation| allocation.allocation_timestamp.is_none()) {
        status["allocation"] = json!({"allocationTimestamp": seconds(Timestamp::now())});
    }
    json!({"metadata": {"resourceVersion": version}, "status": status})
}

fn seconds(time: Timestamp) -> String {
    time.strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}

/// Returns the patch that sets PodScheduled to False and clears the nomination that the attempt
/// saw, or `None` if nothing changes.
fn condition(pod: &Pod, reason: &str, message: &str) -> Option<Value> {
    let status = pod.status.as_ref();
    let before = status.and_then(|status| status.conditions.as_ref()).and_then(|conditions| {
        conditions.iter().find(|condition| condition.type_ == "PodScheduled")
    });
    let nominated = status.is_some_and(|status| status.nominated_node_name.is_some());
    let same = before.is_some_and(|before| {
        before.status == "False"
            && before.reason.as_deref() == Some(reason)
            && before.message.as_deref() == Some(message)
            && before.observed_generation == pod.metadata.generation
    });
    if same && !nominated {
        return None;
    }
    // The transition time is kept when the condition stays False.
    let since = before
        .filter(|before| before.status == "False")
        .and_then(|before| before.last_transition_time.as_ref())
        .map_or_else(|| seconds(Timestamp::now()), |time| seconds(time.0));
    let mut patch = json!({"status": {
        "conditions": [{
            "type": "PodScheduled", "status": "False", "reason": reason, "message": message,
            "lastTransitionTime": since, "observedGeneration": pod.metadata.generation,
        }],
    }});
    if nominated {
        patch["status"]["nominatedNodeName"] = Value::Null;
    }
    Some(patch)
}
