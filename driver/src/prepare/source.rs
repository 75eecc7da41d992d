//! Reads claims from the API server.

use std::time::Duration;

use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::{Api, Client};
use tessera_api::names::{ClaimName, ClaimUid, Namespace};
use tokio::time::{Instant, timeout_at};

use super::claim_pods::ClaimPods;

/// Errors of reading a claim.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The claim does not exist.
    #[error("ResourceClaim {namespace}/{name} does not exist")]
    NotFound {
        /// The namespace of the claim.
        namespace: Namespace,
        /// The name of the claim.
        name: ClaimName,
    },
    /// The API server did not answer in time.
    #[error("timeout of the API server for ResourceClaim {namespace}/{name}")]
    TimedOut {
        /// The namespace of the claim.
        namespace: Namespace,
        /// The name of the claim.
        name: ClaimName,
    },
    /// The API server could not be reached, or refused the request.
    #[error("cannot read ResourceClaim {namespace}/{name}")]
    Api {
        /// The namespace of the claim.
        namespace: Namespace,
        /// The name of the claim.
        name: ClaimName,
        /// The cause.
        source: Box<kube::Error>,
    },
}

/// Errors of listing claims.
#[derive(Debug, thiserror::Error)]
pub enum ListError {
    /// The API server did not answer in time.
    #[error("timeout of the API server for a list of ResourceClaims")]
    TimedOut,
    /// The API server could not be reached, or refused the request.
    #[error("cannot list ResourceClaims")]
    Api(#[from] kube::Error),
}

/// Deadline of one page of a list.
const PAGE_TIMEOUT: Duration = Duration::from_secs(30);

/// Deadline of one attempt. A Prepare has 40 s, so that several attempts fit.
const TIMEOUT: Duration = Duration::from_secs(10);

impl ReadError {
    /// Returns true if another attempt may succeed: after all errors but refusals of the request
    /// itself.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        match self {
            Self::NotFound { .. } => false,
            Self::TimedOut { .. } => true,
            Self::Api { source, .. } => match &**source {
                kube::Error::Api(status) => status.code == 429 || status.code >= 500,
                _ => true,
            },
        }
    }
}

/// Reader of claims.
#[derive(Clone)]
pub struct ClaimSource {
    client: Client,
    pods: ClaimPods,
}

impl std::fmt::Debug for ClaimSource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ClaimSource")
    }
}

impl ClaimSource {
    /// Returns a reader that uses `client`.
    #[must_use]
    pub fn new(client: Client) -> Self {
        Self { client, pods: ClaimPods::default() }
    }

    /// Returns the pods of the claims that were read.
    #[must_use]
    pub fn pods(&self) -> &ClaimPods {
        &self.pods
    }

    /// Forgets the pods of all claims but those that are `wanted`.
    pub fn retain_pods(&self, wanted: impl Fn(&ClaimUid) -> bool) {
        self.pods.retain(wanted);
    }

    /// Reads the latest version of one claim (a quorum read), until `until` at most.
    ///
    /// # Errors
    /// [`ReadError`].
    pub async fn read(
        &self,
        namespace: &Namespace,
        name: &ClaimName,
        until: Instant,
    ) -> Result<ResourceClaim, ReadError> {
        let api: Api<ResourceClaim> = Api::namespaced(self.client.clone(), namespace.as_str());
        let (for_error, name_for_error) = (namespace.clone(), name.clone());
        match timeout_at(until.min(Instant::now() + TIMEOUT), api.get(name.as_str())).await {
            Ok(Ok(claim)) => {
                self.pods.record(&claim);
                Ok(claim)
            }
            Ok(Err(kube::Error::Api(status))) if status.code == 404 => {
                Err(ReadError::NotFound { namespace: for_error, name: name_for_error })
            }
            Ok(Err(error)) => Err(ReadError::Api {
                namespace: for_error,
                name: name_for_error,
                source: Box::new(error),
            }),
            Err(_) => Err(ReadError::TimedOut { namespace: for_error, name: name_for_error }),
        }
    }

    /// Returns the claims of the cluster that are `wanted`, read page by page. Used only to rebuild
    /// a lost journal.
    ///
    /// Other claims are dropped with their page: all claims of a large cluster with their managed
    /// fields need more memory than a driver has. Each page has a deadline.
    ///
    /// # Errors
    /// The error of the API server, or a timeout.
    pub async fn list(
        &self,
        wanted: impl Fn(&ResourceClaim) -> bool,
    ) -> Result<Vec<ResourceClaim>, ListError> {
        /// Page size of kubectl.
        const PAGE: u32 = 500;
        let api: Api<ResourceClaim> = Api::all(self.client.clone());
        let mut claims = Vec::new();
        let mut parameters = kube::api::ListParams::default().limit(PAGE);
        loop {
            let page = timeout_at(Instant::now() + PAGE_TIMEOUT, api.list(&parameters));
            let page = page.await.map_err(|_| ListError::TimedOut)??;
            claims.extend(page.items.into_iter().filter(&wanted));
            match page.metadata.continue_.filter(|token| !token.is_empty()) {
                Some(token) => parameters.continue_token = Some(token),
                None => return Ok(claims),
            }
        }
    }
}
