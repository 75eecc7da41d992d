//! Checks that tests leave no objects in the cluster.

use std::time::Duration;

use k8s_openapi::api::core::v1::{Namespace, Pod};
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::api::{DeleteParams, ListParams};
use kube::{Api, Client, ResourceExt};

use crate::inventory::DRIVER;
use crate::wait::{self, CheckResult, WaitError};

/// Time limit for claims of an earlier test to lose their allocation.
const TIMEOUT: Duration = Duration::from_secs(300);

/// Error of a cleanup check.
#[derive(Debug, thiserror::Error)]
pub enum LeftoverError {
    /// A request to the API server failed.
    #[error("cannot {action}")]
    Api {
        /// The request.
        action: String,
        /// The cause.
        source: Box<kube::Error>,
    },
    /// An object was not deleted in time.
    #[error(transparent)]
    Wait(#[from] WaitError),
    /// Objects are left in a deleted namespace.
    #[error("objects left in namespace {namespace}: {objects}")]
    Objects {
        /// The namespace.
        namespace: String,
        /// Kinds and names of the objects.
        objects: String,
    },
}

/// Waits until no claim has a device of the driver under test.
///
/// # Errors
/// Returns an error if a claim is still allocated after the time limit.
pub async fn none_allocated(client: &Client) -> Result<(), LeftoverError> {
    let check = |claims: &[ResourceClaim]| {
        let holding: Vec<_> =
            claims.iter().filter(|claim| holds_device(claim)).map(full_name).collect();
        if holding.is_empty() {
            CheckResult::Done(())
        } else {
            CheckResult::Pending(holding.join(", "))
        }
    };
    Ok(wait::until(
        Api::all(client.clone()),
        Default::default(),
        "no claim to hold a GPU",
        TIMEOUT,
        check,
    )
    .await?)
}

/// Returns true if a device of the driver under test is allocated to the claim.
pub fn holds_device(claim: &ResourceClaim) -> bool {
    let allocation = claim.status.as_ref().and_then(|status| status.allocation.as_ref());
    let results = allocation
        .and_then(|allocation| allocation.devices.as_ref())
        .and_then(|d| d.results.as_ref());
    results.into_iter().flatten().any(|result| result.driver == DRIVER)
}

fn full_name<K: kube::Resource>(object: &K) -> String {
    format!("{}/{}", object.namespace().unwrap_or_default(), object.name_any())
}

/// Deletes a namespace and waits until it is deleted. A missing namespace is no error.
///
/// # Errors
/// Returns an error if the API server refuses the deletion or if the deletion takes too long.
pub async fn delete_namespace(
    client: &Client,
    name: &str,
    within: Duration,
) -> Result<(), LeftoverError> {
    let namespaces: Api<Namespace> = Api::all(client.clone());
    match namespaces.delete(name, &DeleteParams::default()).await {
        Ok(_) => {}
        Err(kube::Error::Api(status)) if status.is_not_found() => return Ok(()),
        Err(error) => {
            return Err(LeftoverError::Api {
                action: format!("delete namespace {name}"),
                source: Box::new(error),
            });
        }
    }
    let check = |namespace: Option<&Namespace>| match namespace {
        None => CheckResult::Done(()),
        Some(namespace) => {
            CheckResult::Pending(serde_json::to_string(&namespace.status).unwrap_or_default())
        }
    };
    Ok(wait::until_one(namespaces, name, &format!("namespace {name} to be deleted"), within, check)
        .await?)
}

/// Checks that the pods and claims of a deleted namespace were deleted with it.
///
/// # Errors
/// Returns an error that names the remaining objects.
pub async fn none_of_namespace(client: &Client, namespace: &str) -> Result<(), LeftoverError> {
    let failed = |error| LeftoverError::Api {
        action: format!("list objects of {namespace}"),
        source: Box::new(error),
    };
    let pods: Api<Pod> = Api::namespaced(client.clone(), namespace);
    let claims: Api<ResourceClaim> = Api::namespaced(client.clone(), namespace);
    let pods = pods.list(&ListParams::default()).await.map_err(failed)?;
    let claims = claims.list(&ListParams::default()).await.map_err(failed)?;
    let names = pods.iter().map(|pod| format!("Pod {}", pod.name_any()));
    let names =
        names.chain(claims.iter().map(|claim| format!("ResourceClaim {}", claim.name_any())));
    let objects = names.collect::<Vec<_>>().join(", ");
    if objects.is_empty() {
        Ok(())
    } else {
        Err(LeftoverError::Objects { namespace: namespace.to_owned(), objects })
    }
}
