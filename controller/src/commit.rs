//! Writing decisions: one claim, one allocation, nothing else.
//!
//! # Order
//! 1. The finalizer, if it is not there: without it kube-controller-manager never clears the
//!    allocation.
//! 2. One merge patch of `/status` with the complete allocation. `reservedFor` stays the
//!    scheduler's.
//! 3. What the API server answers is compared with what was sent: one with a gate off drops fields
//!    silently.
//!
//! Both patches carry the `resourceVersion` they were decided on, so whatever happened in between
//! makes them fail with a conflict. A crash between the two leaves an unallocated claim with a
//! finalizer, which is planned again like any other.
//!
//! A request without an answer may or may not have been carried out, and the devices must count as
//! taken as long as that is open. So it is sent again, the same to the letter, until there is an
//! answer: it succeeds once, and after that its version is a conflict, which shows what was
//! written.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::resource::v1::{AllocationResult, ResourceClaim};
use kube::api::{Patch, PatchParams};
use kube::{Api, Client, ResourceExt};
use serde_json::{Value, json};
use tessera_api::names::DELETE_PROTECTION_FINALIZER;
use tessera_api::quantity::Quantity;
use tokio::sync::{Semaphore, SemaphorePermit};

use crate::fault;
use crate::leadership::Tenure;

/// Requests under way at once. An API server with default limits takes this without queueing.
const REQUESTS: usize = 32;

/// No request of ours may be under way longer than this. It is what a new leader waits for, and
/// less than what lies between the renew deadline and the end of the lease.
pub const REQUEST_TIMEOUT: Duration = Duration::from_secs(4);

/// Between sendings of a request that was not answered: this long at first, doubled each time.
const FIRST_PAUSE: Duration = Duration::from_millis(100);

/// At most this long.
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// Our name as a writer of fields.
pub const FIELD_MANAGER: &str = "tessera-controller";

/// Why a claim was not written.
#[derive(Debug, thiserror::Error)]
pub enum CommitError {
    /// Somebody else has written it since the decision was made.
    #[error("ResourceClaim {claim} has changed since it was decided on")]
    Conflict {
        /// Namespace and name.
        claim: String,
        /// How it is now; none if it is gone.
        now: Option<Box<ResourceClaim>>,
    },
    /// The API server took it and kept something else.
    #[error(
        "the API server did not keep `{field}` of the allocation of {claim}; is a DRA feature gate off there?"
    )]
    Dropped {
        /// Namespace and name.
        claim: String,
        /// The first field that differs.
        field: String,
        /// The claim after the allocation was taken back; none if that failed too.
        now: Option<Box<ResourceClaim>>,
    },
    /// The API server refused.
    #[error("the API server refused a write of ResourceClaim {claim}")]
    Request {
        /// Namespace and name.
        claim: String,
        /// What it said.
        #[source]
        source: Box<kube::Error>,
    },
}

impl CommitError {
    /// Whether the server would say the same again: a policy or a missing permission, or a feature
    /// that it does not have. 404 is not among them, for a claim that is made anew.
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

/// A claim's leave to send. Kept between its writes, for otherwise the second write of the first
/// claim of a burst would queue behind the first writes of all others, and nobody would have an
/// allocation before everybody has a finalizer.
#[derive(Default)]
struct Turn<'w>(Option<SemaphorePermit<'w>>);

/// Writes claims.
#[derive(Clone)]
pub struct Writer {
    client: Client,
    tenure: Tenure,
    /// One is held while a request is under way, and from one write of a claim to its next. Not
    /// while a write that got no answer waits to be sent again: that does not hold up others.
    slots: Arc<Semaphore>,
}

impl Writer {
    /// A writer that uses `client`. Clones share the number of requests that may be under way.
    pub fn new(client: Client) -> Self {
        Self { client, tenure: Tenure::endless(), slots: Arc::new(Semaphore::new(REQUESTS)) }
    }

    /// The same writer, which sends nothing outside of `tenure`.
    #[must_use]
    pub fn during(self, tenure: Tenure) -> Self {
        Self { tenure, ..self }
    }

    /// Writes an allocation to `claim`, which must be the object that it was decided on.
    ///
    /// Returns only when it is certain what happened, so as long as the API server is away it does
    /// not return.
    ///
    /// # Errors
    /// Nothing was written that stands.
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
            // An earlier sending of it was carried out after all.
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

    /// Takes the allocation back. Only for a claim that nobody has reserved, as `claim` shows it.
    ///
    /// # Errors
    /// As [`allocate`](Self::allocate).
    pub async fn release(&self, claim: &ResourceClaim) -> Result<ResourceClaim, CommitError> {
        self.clear(claim, json!({"allocation": null, "devices": null})).await
    }

    /// Takes the allocation back together with its reservations, which the API server does not keep
    /// without one. Only for a claim that is reserved by nobody but pods that are bound
    /// elsewhere.
    ///
    /// # Errors
    /// As [`allocate`](Self::allocate).
    pub async fn deallocate(&self, claim: &ResourceClaim) -> Result<ResourceClaim, CommitError> {
        self.clear(claim, json!({"allocation": null, "devices": null, "reservedFor": null})).await
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

    /// Sends a patch until there is an answer to it. It is still the claim's `turn` after a write
    /// that was carried out.
    async fn patch<'w>(
        &'w self,
        claim: &ResourceClaim,
        part: Part,
        patch: Value,
        turn: &mut Turn<'w>,
    ) -> Result<ResourceClaim, CommitError> {
        let api: Api<ResourceClaim> =
            Api::namespaced(self.client.clone(), claim.namespace().as_deref().unwrap_or_default());
        let patch = Patch::Merge(patch);
        let mut pause = FIRST_PAUSE;
        // Whether an earlier sending may have been carried out.
        let mut open = false;
        loop {
            let slot = match turn.0.take() {
                Some(slot) => Some(slot),
                // Never closed.
                None => self.slots.acquire().await.ok(),
            };
            // Nothing is known about what was sent before, so this write has no outcome: the next
            // leader finds out.
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
                // Who may write is asked before versions are compared: this says nothing about an
                // earlier sending.
                Ok(Err(kube::Error::Api(status))) if open && matches!(status.code, 401 | 403) => {
                    tracing::warn!(
                        claim = name(claim),
                        code = status.code,
                        "refused after a write without an answer, sending it again"
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
                        "no answer to a write, sending it again"
                    );
                }
                Err(_) => {
                    tracing::warn!(
                        claim = name(claim),
                        "no answer to a write in time, sending it again"
                    )
                }
            }
            open = true;
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    /// The claim as it is now; none if it is another one or gone. Where a write of ours is `open`,
    /// which the conflict may be with, only the claim itself or its absence is an answer: a
    /// refusal is none, as an API server that has not read its RBAC rules yet refuses
    /// everything.
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
                        "cannot read a claim after a conflict, trying again"
                    );
                }
                Err(_) => {
                    tracing::warn!(
                        claim = name(claim),
                        "no answer to the read of a claim, trying again"
                    )
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
    let params = PatchParams { field_manager: Some(FIELD_MANAGER.into()), ..Default::default() };
    match part {
        Part::Object => api.patch(claim, &params, patch).await,
        Part::Status => api.patch_status(claim, &params, patch).await,
    }
}

/// The first field of the allocation that `claim` does not have as it was sent.
fn difference(allocation: &AllocationResult, claim: &ResourceClaim) -> Option<String> {
    let kept = claim.status.as_ref().and_then(|s| s.allocation.as_ref());
    first_difference(&json!(allocation), &json!(kept))
}

#[derive(Clone, Copy)]
enum Part {
    Object,
    Status,
}

fn name(claim: &ResourceClaim) -> String {
    format!("{}/{}", claim.namespace().unwrap_or_default(), claim.name_any())
}

/// The path of the first thing that was sent and is not there. What the server adds does not
/// matter, nor how it spells a quantity.
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
