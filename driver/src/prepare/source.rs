//! Reads claims from the API.

use std::time::Duration;

use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::{Api, Client};
use tessera_api::names::{ClaimName, Namespace};
use tokio::time::{Instant, timeout_at};

/// Why a claim could not be read.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// There is none.
    #[error("ResourceClaim {namespace}/{name} does not exist")]
    NotFound {
        /// Its namespace.
        namespace: Namespace,
        /// Its name.
        name: ClaimName,
    },
    /// The API server did not answer in time.
    #[error("the API server did not answer in time for ResourceClaim {namespace}/{name}")]
    TimedOut {
        /// Its namespace.
        namespace: Namespace,
        /// Its name.
        name: ClaimName,
    },
    /// The API server could not be reached, or refused.
    #[error("ResourceClaim {namespace}/{name} could not be read")]
    Api {
        /// Its namespace.
        namespace: Namespace,
        /// Its name.
        name: ClaimName,
        /// What happened.
        source: Box<kube::Error>,
    },
}

/// For one attempt. The whole of a Prepare has 40 s, so that several fit.
const TIMEOUT: Duration = Duration::from_secs(10);

impl ReadError {
    /// Whether another attempt may succeed: everything except what the API server says about this
    /// request itself.
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

/// Reads claims.
#[derive(Clone)]
pub struct ClaimSource {
    client: Client,
}

impl std::fmt::Debug for ClaimSource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ClaimSource")
    }
}

impl ClaimSource {
    /// Reads through `client`.
    #[must_use]
    pub fn new(client: Client) -> Self {
        Self { client }
    }

    /// Reads one claim, as it is now (a quorum read), and waits until `until` at most.
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
            Ok(Ok(claim)) => Ok(claim),
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

    /// The claims of the cluster that are `wanted`, read page by page. Only for rebuilding a lost
    /// journal.
    ///
    /// The others are dropped with their page: all of a large cluster's claims, with the managed
    /// fields of each, are more than the memory that a driver has.
    ///
    /// # Errors
    /// What the API says.
    pub async fn list(
        &self,
        wanted: impl Fn(&ResourceClaim) -> bool,
    ) -> Result<Vec<ResourceClaim>, kube::Error> {
        /// As kubectl's default.
        const PAGE: u32 = 500;
        let api: Api<ResourceClaim> = Api::all(self.client.clone());
        let mut claims = Vec::new();
        let mut parameters = kube::api::ListParams::default().limit(PAGE);
        loop {
            let page = api.list(&parameters).await?;
            claims.extend(page.items.into_iter().filter(&wanted));
            match page.metadata.continue_.filter(|token| !token.is_empty()) {
                Some(token) => parameters.continue_token = Some(token),
                None => return Ok(claims),
            }
        }
    }
}
