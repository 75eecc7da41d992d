//! Writing decisions: one claim, one allocation, nothing else.
//!
//! # Order
//! 1. The finalizer, if it is not there: without it kube-controller-manager never clears the allocation.
//! 2. One merge patch of `/status` with the complete allocation. `reservedFor` stays the scheduler's.
//! 3. What the API server answers is compared with what was sent: one with a gate off drops fields silently.
//!
//! Both patches carry the `resourceVersion` they were decided on, so whatever happened in between makes them fail with a
//! conflict. A crash between the two leaves an unallocated claim with a finalizer, which is planned again like any other.

use std::time::Duration;

use k8s_openapi::api::resource::v1::{AllocationResult, ResourceClaim};
use kube::api::{Patch, PatchParams};
use kube::{Api, Client, ResourceExt};
use serde_json::{Value, json};
use tessera_api::names::DELETE_PROTECTION_FINALIZER;
use tessera_api::quantity::Quantity;

/// No request of ours may be under way longer than this. It is what a new leader waits for, and less than what lies between
/// the renew deadline and the end of the lease.
pub const REQUEST_TIMEOUT: Duration = Duration::from_secs(4);

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
    /// The API server refused or was not reached.
    #[error("cannot write ResourceClaim {claim}")]
    Request {
        /// Namespace and name.
        claim: String,
        /// What it said.
        #[source]
        source: Box<kube::Error>,
    },
    /// No answer in time.
    #[error("no answer to a write of ResourceClaim {claim} within {REQUEST_TIMEOUT:?}")]
    Timeout {
        /// Namespace and name.
        claim: String,
    },
}

/// Writes claims.
#[derive(Clone)]
pub struct Writer {
    client: Client,
}

impl Writer {
    /// A writer that uses `client`.
    pub fn new(client: Client) -> Self {
        Self { client }
    }

    /// Writes an allocation to `claim`, which must be the object that it was decided on.
    ///
    /// # Errors
    /// Nothing was written, or (for [`CommitError::Timeout`] and some of [`CommitError::Request`]) it is not known whether
    /// it was: the watch will tell.
    pub async fn allocate(
        &self,
        claim: &ResourceClaim,
        allocation: &AllocationResult,
    ) -> Result<ResourceClaim, CommitError> {
        let mut version = claim.resource_version();
        if !claim.finalizers().iter().any(|f| f == DELETE_PROTECTION_FINALIZER) {
            let mut finalizers = claim.finalizers().to_vec();
            finalizers.push(DELETE_PROTECTION_FINALIZER.to_owned());
            let patch = json!({"metadata": {"resourceVersion": version, "finalizers": finalizers}});
            version = self.patch(claim, Part::Object, patch).await?.resource_version();
        }
        let patch = json!({"metadata": {"resourceVersion": version}, "status": {"allocation": allocation}});
        let written = self.patch(claim, Part::Status, patch).await?;
        let kept = written.status.as_ref().and_then(|s| s.allocation.as_ref());
        match first_difference(&json!(allocation), &json!(kept)) {
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
        let patch = json!({
            "metadata": {"resourceVersion": claim.resource_version()},
            "status": {"allocation": null, "devices": null},
        });
        self.patch(claim, Part::Status, patch).await
    }

    async fn patch(
        &self,
        claim: &ResourceClaim,
        part: Part,
        patch: Value,
    ) -> Result<ResourceClaim, CommitError> {
        let api: Api<ResourceClaim> =
            Api::namespaced(self.client.clone(), claim.namespace().as_deref().unwrap_or_default());
        let (object, params) = (
            claim.name_any(),
            PatchParams { field_manager: Some(FIELD_MANAGER.into()), ..Default::default() },
        );
        let patch = Patch::Merge(patch);
        let request = async {
            match part {
                Part::Object => api.patch(&object, &params, &patch).await,
                Part::Status => api.patch_status(&object, &params, &patch).await,
            }
        };
        match tokio::time::timeout(REQUEST_TIMEOUT, request).await {
            Err(_) => Err(CommitError::Timeout { claim: name(claim) }),
            Ok(Ok(written)) => Ok(written),
            Ok(Err(kube::Error::Api(status))) if status.code == 409 || status.code == 404 => {
                let now = tokio::time::timeout(REQUEST_TIMEOUT, api.get_opt(&object)).await;
                let now = now.ok().and_then(Result::ok).flatten().map(Box::new);
                Err(CommitError::Conflict { claim: name(claim), now })
            }
            Ok(Err(source)) => Err(CommitError::Request { claim: name(claim), source: Box::new(source) }),
        }
    }
}

#[derive(Clone, Copy)]
enum Part {
    Object,
    Status,
}

fn name(claim: &ResourceClaim) -> String {
    format!("{}/{}", claim.namespace().unwrap_or_default(), claim.name_any())
}

/// The path of the first thing that was sent and is not there. What the server adds does not matter, nor how it spells a
/// quantity.
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
