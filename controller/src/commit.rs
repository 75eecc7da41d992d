//! Writes of claims: the allocation of one claim, and nothing else.
//!
//! # Order
//! 1. The finalizer, if it is not there: without it kube-controller-manager never clears the
//!    allocation.
//! 2. One merge patch of `/status` with the complete allocation. `reservedFor` stays the
//!    scheduler's.
//! 3. The answer is compared with what was sent: an API server drops fields silently where a
//!    feature gate is off.
//!
//! Both patches carry the `resourceVersion` that they were decided on, so any change in between
//! makes them fail with a conflict. A crash between the two leaves an unallocated claim with a
//! finalizer, which is planned again like any other.
//!
//! A request without an answer may have been carried out, and its devices must count as taken until
//! that is known. So the identical request is sent again until there is an answer: it succeeds
//! once, and after that its version conflicts, and the claim shows what was written.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::resource::v1::{
    AllocationResult, DeviceRequestAllocationResult, ResourceClaim,
};
use k8s_openapi::jiff::Timestamp;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams, Preconditions};
use kube::{Api, Client, Resource as _, ResourceExt};
use serde_json::{Value, json};
use tessera_api::names::{
    CONTROLLER_FIELD_MANAGER, DELETE_PROTECTION_FINALIZER, GROUP_COMPLETE_CONDITION,
    GROUP_FAILED_CONDITION,
};
use tessera_api::quantity::Quantity;
use tessera_api::resize::SizedShare;
use tessera_index::has_barrier;
use tokio::sync::{Semaphore, SemaphorePermit};

use crate::core::effect::BarrierOutcome;
use crate::fault;
use crate::leadership::Tenure;

/// The most requests under way at the same time. An API server with default limits serves this many
/// without queueing.
const REQUESTS: usize = 32;

/// The time-out of a request. A new leader waits for this time, and it is shorter than the time
/// between the renew deadline and the end of the lease.
pub const REQUEST_TIMEOUT: Duration = Duration::from_secs(4);

/// The first pause before a request without an answer is sent again, doubled each time.
const FIRST_PAUSE: Duration = Duration::from_millis(100);

/// The longest pause.
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// The failure of a write of a claim.
#[derive(Debug, thiserror::Error)]
pub enum CommitError {
    /// Another client has written it since the decision was made.
    #[error("ResourceClaim {claim} has changed since it was decided on")]
    Conflict {
        /// Namespace and name.
        claim: String,
        /// The claim as it is now; none if it does not exist any more or cannot be read.
        now: Option<Box<ResourceClaim>>,
    },
    /// The API server stored it without some field.
    #[error(
        "the API server dropped `{field}` of the allocation of ResourceClaim {claim}; is a DRA feature gate off there?"
    )]
    Dropped {
        /// Namespace and name.
        claim: String,
        /// The first field that differs.
        field: String,
        /// The claim after the allocation was released; none if that failed too.
        now: Option<Box<ResourceClaim>>,
    },
    /// The API server refused.
    #[error("the API server refused a write of ResourceClaim {claim}")]
    Request {
        /// Namespace and name.
        claim: String,
        /// Its answer.
        #[source]
        source: Box<kube::Error>,
    },
}

impl CommitError {
    /// Returns true if the API server will refuse it again: a policy, a missing permission, or a
    /// missing feature. 404 does not count, since a claim may be recreated.
    #[must_use]
    pub fn is_lasting(&self) -> bool {
        match self {
            Self::Conflict { .. } => false,
            Self::Dropped { .. } => true,
            Self::Request { source, .. } => {
                matches!(&**source, kube::Error::Api(status) if matches!(status.code, 400 | 401 | 403 | 405 | 413 | 415 | 422))
            }
        }
    }
}

/// The permit of a claim to send requests. It is kept between the two writes of the claim.
/// Otherwise the second write of the first claim of a burst would queue behind the first writes of
/// all others, and no claim would be allocated before all have their finalizer.
#[derive(Default)]
struct Turn<'w>(Option<SemaphorePermit<'w>>);

/// Writes claims.
#[derive(Clone)]
pub struct Writer {
    client: Client,
    tenure: Tenure,
    /// A permit is held while a request is under way, and between the two writes of a claim. It is
    /// not held while an unanswered write waits to be sent again, so others are not delayed.
    slots: Arc<Semaphore>,
}

impl Writer {
    /// Returns a writer that uses `client`. Clones share the limit of requests under way.
    pub fn new(client: Client) -> Self {
        Self { client, tenure: Tenure::endless(), slots: Arc::new(Semaphore::new(REQUESTS)) }
    }

    /// Returns the writer restricted to `tenure`: it sends nothing outside of it.
    #[must_use]
    pub fn during(self, tenure: Tenure) -> Self {
        Self { tenure, ..self }
    }

    /// Writes an allocation to `claim`, which must be the object that it was decided on.
    ///
    /// Returns only when the outcome is certain, so it does not return while the API server is
    /// away.
    ///
    /// # Errors
    /// Nothing is stored.
    pub async fn allocate(
        &self,
        claim: &ResourceClaim,
        allocation: &AllocationResult,
    ) -> Result<ResourceClaim, CommitError> {
        fault::point_async("allocation-decided").await;
        let (mut version, mut turn) = (claim.resource_version(), Turn::default());
        if !claim.finalizers().iter().any(|f| f == DELETE_PROTECTION_FINALIZER) {
            let mut finalizers = claim.finalizers().to_vec();
            finalizers.push(DELETE_PROTECTION_FINALIZER.to_owned());
            let patch = json!({"metadata": {"resourceVersion": version, "finalizers": finalizers}});
            version = self.patch(claim, Part::Object, patch, &mut turn).await?.resource_version();
            fault::point_async("finalizer-written").await;
        }
        let patch =
            json!({"metadata": {"resourceVersion": version}, "status": {"allocation": allocation}});
        let written = self.patch(claim, Part::Status, patch, &mut turn).await;
        drop(turn);
        let written = match written {
            // An earlier sending was carried out after all.
            Err(CommitError::Conflict { now: Some(now), .. })
                if difference(allocation, &now).is_none() =>
            {
                *now
            }
            written => written?,
        };
        fault::point_async("allocation-written").await;
        match difference(allocation, &written) {
            None => Ok(written),
            Some(field) => {
                let now = self.release(&written).await.ok().map(Box::new);
                Err(CommitError::Dropped { claim: name(claim), field, now })
            }
        }
    }

    /// Clears the allocation of a claim that is not reserved, as `claim` shows it.
    ///
    /// # Errors
    /// As [`allocate`](Self::allocate).
    pub async fn release(&self, claim: &ResourceClaim) -> Result<ResourceClaim, CommitError> {
        self.clear(claim, json!({"allocation": null, "devices": null})).await
    }

    /// Clears the allocation together with its reservations, which the API server does not store
    /// without one. Only for a claim that is reserved by nothing but pods that are bound elsewhere.
    ///
    /// # Errors
    /// As [`allocate`](Self::allocate).
    pub async fn deallocate(&self, claim: &ResourceClaim) -> Result<ResourceClaim, CommitError> {
        self.clear(claim, json!({"allocation": null, "devices": null, "reservedFor": null})).await
    }

    /// Ends the wait at the barrier of a group: sets the condition of `outcome` at the time `at` on
    /// the devices of the claim that have the barrier. Conditions of other clients stay.
    ///
    /// # Errors
    /// As [`allocate`](Self::allocate).
    pub async fn conclude(
        &self,
        claim: &ResourceClaim,
        outcome: BarrierOutcome,
        at: Timestamp,
    ) -> Result<ResourceClaim, CommitError> {
        fault::point_async("barrier-decided").await;
        let patch = devices_patch(claim, &json!(concluded_devices(claim, outcome, at)));
        let part = Part::Conditions;
        let concluded = self.patch(claim, part, patch, &mut Turn::default()).await?;
        fault::point_async("barrier-written").await;
        Ok(concluded)
    }

    /// Changes the sizes that count for shares of the claim. Entries of other clients stay.
    ///
    /// # Errors
    /// As [`allocate`](Self::allocate).
    pub async fn resize(
        &self,
        claim: &ResourceClaim,
        sizes: &[SizedShare],
    ) -> Result<ResourceClaim, CommitError> {
        fault::point_async("resize-decided").await;
        let devices: Vec<Value> = sizes.iter().map(SizedShare::device_status).collect();
        let patch = devices_patch(claim, &json!(devices));
        let part = Part::Sizes;
        let resized = self.patch(claim, part, patch, &mut Turn::default()).await?;
        fault::point_async("resize-written").await;
        Ok(resized)
    }

    async fn clear(
        &self,
        claim: &ResourceClaim,
        status: Value,
    ) -> Result<ResourceClaim, CommitError> {
        fault::point_async("release-decided").await;
        let patch =
            json!({"metadata": {"resourceVersion": claim.resource_version()}, "status": status});
        let released = self.patch(claim, Part::Status, patch, &mut Turn::default()).await?;
        fault::point_async("release-written").await;
        Ok(released)
    }

    /// Sends a patch until it is answered. The claim keeps its `turn` after a write that was
    /// carried out.
    async fn patch<'w>(
        &'w self,
        claim: &ResourceClaim,
        part: Part,
        patch: Value,
        turn: &mut Turn<'w>,
    ) -> Result<ResourceClaim, CommitError> {
        let api: Api<ResourceClaim> =
            Api::namespaced(self.client.clone(), claim.namespace().as_deref().unwrap_or_default());
        let patch = match part {
            Part::Object | Part::Status => Patch::Merge(patch),
            Part::Conditions | Part::Sizes => Patch::Apply(patch),
        };
        let mut pause = FIRST_PAUSE;
        // An earlier sending may have been carried out.
        let mut open = false;
        loop {
            let slot = match turn.0.take() {
                Some(slot) => Some(slot),
                // Never closed.
                None => self.slots.acquire().await.ok(),
            };
            // An earlier sending may still be carried out, so this write has no outcome: the next
            // leader lists the claim.
            while self.tenure.is_over() {
                tokio::time::sleep(LONGEST_PAUSE).await;
            }
            let answer =
                tokio::time::timeout(REQUEST_TIMEOUT, send(&api, &claim.name_any(), part, &patch))
                    .await;
            if matches!(answer, Ok(Ok(_))) {
                *turn = Turn(slot);
            } else {
                drop(slot);
            }
            match answer {
                Ok(Ok(written)) => return Ok(written),
                Ok(Err(kube::Error::Api(status))) if matches!(status.code, 404 | 409) => {
                    return Err(CommitError::Conflict {
                        claim: name(claim),
                        now: self.read(claim, &api, open).await,
                    });
                }
                // Permission is checked before versions are compared: this is no evidence about an
                // earlier sending.
                Ok(Err(kube::Error::Api(status))) if open && matches!(status.code, 401 | 403) => {
                    tracing::warn!(
                        claim = name(claim),
                        code = status.code,
                        "write was refused after one without an answer, sending it again"
                    );
                }
                Ok(Err(kube::Error::Api(status))) if status.code < 500 && status.code != 429 => {
                    let source = Box::new(kube::Error::Api(status));
                    return Err(CommitError::Request { claim: name(claim), source });
                }
                Ok(Err(error)) => {
                    let error = &error as &dyn std::error::Error;
                    tracing::warn!(
                        claim = name(claim),
                        error,
                        "write was not answered, sending it again"
                    );
                }
                Err(_) => {
                    tracing::warn!(claim = name(claim), "write timed out, sending it again")
                }
            }
            open = true;
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    /// Returns the claim as it is now; none if it does not exist or is another one. Where an
    /// earlier sending is `open`, with which the conflict may be, a refusal is no answer: an
    /// API server that has not synced its RBAC rules refuses everything.
    async fn read(
        &self,
        claim: &ResourceClaim,
        api: &Api<ResourceClaim>,
        open: bool,
    ) -> Option<Box<ResourceClaim>> {
        let mut pause = FIRST_PAUSE;
        loop {
            match tokio::time::timeout(REQUEST_TIMEOUT, api.get_opt(&claim.name_any())).await {
                Ok(Ok(now)) => return now.filter(|now| now.uid() == claim.uid()).map(Box::new),
                Ok(Err(kube::Error::Api(status)))
                    if !open && status.code < 500 && status.code != 429 =>
                {
                    return None;
                }
                Ok(Err(error)) => {
                    let error = &error as &dyn std::error::Error;
                    tracing::warn!(
                        claim = name(claim),
                        error,
                        "cannot read a claim after a conflict, retrying"
                    );
                }
                Err(_) => {
                    tracing::warn!(claim = name(claim), "read of a claim timed out, retrying")
                }
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }
}

async fn send(
    api: &Api<ResourceClaim>,
    claim: &str,
    part: Part,
    patch: &Patch<Value>,
) -> Result<ResourceClaim, kube::Error> {
    let parameters = patch_parameters();
    match part {
        Part::Object => api.patch(claim, &parameters, patch).await,
        Part::Status => api.patch_status(claim, &parameters, patch).await,
        Part::Conditions => api.patch_status(claim, &parameters.force(), patch).await,
        Part::Sizes => {
            let field_manager = Some(SIZES_FIELD_MANAGER.to_owned());
            let parameters = PatchParams { field_manager, ..parameters };
            api.patch_status(claim, &parameters.force(), patch).await
        }
    }
}

/// Returns an apply patch of `status.devices`.
fn devices_patch(claim: &ResourceClaim, devices: &Value) -> Value {
    json!({
        "apiVersion": ResourceClaim::api_version(&()), "kind": ResourceClaim::kind(&()),
        "metadata": {
            "name": claim.name_any(), "namespace": claim.namespace(),
            "resourceVersion": claim.resource_version(),
        },
        "status": {"devices": devices},
    })
}

/// Returns the devices of a claim at a barrier, each with the condition of `outcome`.
fn concluded_devices(claim: &ResourceClaim, outcome: BarrierOutcome, at: Timestamp) -> Vec<Value> {
    let (condition, reason, message) = match outcome {
        BarrierOutcome::Complete => {
            (GROUP_COMPLETE_CONDITION, "GroupComplete", "all pods of the group have a node")
        }
        BarrierOutcome::Failed => {
            (GROUP_FAILED_CONDITION, "GroupFailed", "not all pods of the group have got a node")
        }
    };
    let allocation = claim.status.as_ref().and_then(|status| status.allocation.as_ref());
    let devices = allocation.and_then(|allocation| allocation.devices.as_ref());
    let results = devices.and_then(|devices| devices.results.as_deref()).unwrap_or_default();
    let device = |result: &DeviceRequestAllocationResult| {
        let condition = json!({
            "type": condition, "status": "True", "reason": reason, "message": message,
            "lastTransitionTime": at.to_string(),
        });
        let mut device = json!({
            "driver": result.driver, "pool": result.pool, "device": result.device,
            "conditions": [condition],
        });
        if let Some(share) = &result.share_id {
            device["shareID"] = share.clone().into();
        }
        device
    };
    results.iter().filter(|result| has_barrier(result)).map(device).collect()
}

/// Returns the parameters of all creations and replacements by the controller.
pub(crate) fn post_parameters() -> PostParams {
    let field_manager = Some(CONTROLLER_FIELD_MANAGER.to_owned());
    PostParams { field_manager, ..PostParams::default() }
}

/// Returns the parameters of the deletion of the object with this UID and no other.
pub(crate) fn delete_parameters(uid: &str) -> DeleteParams {
    let preconditions = Some(Preconditions { uid: Some(uid.to_owned()), resource_version: None });
    DeleteParams { preconditions, ..DeleteParams::default() }
}

/// Returns the parameters of all patches by the controller.
pub(crate) fn patch_parameters() -> PatchParams {
    PatchParams {
        field_manager: Some(CONTROLLER_FIELD_MANAGER.to_owned()),
        ..PatchParams::default()
    }
}

/// Returns the first field of the allocation that `claim` does not have as it was sent.
fn difference(allocation: &AllocationResult, claim: &ResourceClaim) -> Option<String> {
    let kept = claim.status.as_ref().and_then(|s| s.allocation.as_ref());
    first_difference(&json!(allocation), &json!(kept))
}

#[derive(Clone, Copy)]
enum Part {
    Object,
    Status,
    /// Conditions of devices, which other clients have conditions beside.
    Conditions,
    /// Sizes of shares. An apply removes what its manager has applied before and leaves out, so
    /// they have a manager of their own.
    Sizes,
}

/// The manager of the sizes of shares.
const SIZES_FIELD_MANAGER: &str = "tessera-controller-sizes";

fn name(claim: &ResourceClaim) -> String {
    format!("{}/{}", claim.namespace().unwrap_or_default(), claim.name_any())
}

/// Returns the path of the first value that was sent and is not stored. Values that the API server
/// adds and other notations of a quantity are no difference.
fn first_difference(sent: &Value, kept: &Value) -> Option<String> {
    match (sent, kept) {
        (Value::Null, _) => None,
        (Value::Object(sent), Value::Object(kept)) => sent.iter().find_map(|(key, value)| {
            let rest = first_difference(value, kept.get(key).unwrap_or(&Value::Null))?;
            Some(if rest.is_empty() { key.clone() } else { format!("{key}.{rest}") })
        }),
        (Value::Array(sent), Value::Array(kept)) if sent.len() == kept.len() => {
            sent.iter().zip(kept).enumerate().find_map(|(i, (a, b))| {
                let rest = first_difference(a, b)?;
                Some(if rest.is_empty() { i.to_string() } else { format!("{i}.{rest}") })
            })
        }
        (Value::Array(sent), Value::Null) if sent.is_empty() => None,
        (Value::String(a), Value::String(b)) if a == b || same_amount(a, b) => None,
        (sent, kept) if sent == kept => None,
        _ => Some(String::new()),
    }
}

fn same_amount(a: &str, b: &str) -> bool {
    matches!((Quantity::parse(a), Quantity::parse(b)), (Ok(a), Ok(b)) if a == b)
}
