//! What scenarios must not leave in the cluster.

use std::time::Duration;

use k8s_openapi::api::core::v1::{Namespace, Pod};
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::api::{DeleteParams, ListParams};
use kube::{Api, Client, ResourceExt};

use crate::inventory::DRIVER;
use crate::wait::{self, Verdict, WaitError};

/// How long an earlier scenario's claims may take to lose their allocation.
const PATIENCE: Duration = Duration::from_secs(300);

/// Something is left, or could not be looked for.
#[derive(Debug, thiserror::Error)]
pub enum LeftoverError {
    /// The API server refused.
    #[error("{what}")]
    Api {
        /// What was to be done.
        what: String,
        /// Why not.
        source: Box<kube::Error>,
    },
    /// Something did not go away.
    #[error(transparent)]
    Wait(#[from] WaitError),
    /// Objects of a namespace that is gone.
    #[error("left in namespace {namespace}: {objects}")]
    Objects {
        /// The namespace.
        namespace: String,
        /// Their kinds and names.
        objects: String,
    },
}

/// Waits until no claim holds a device of ours.
///
/// # Errors
/// Some still do after minutes.
pub async fn none_allocated(client: &Client) -> Result<(), LeftoverError> {
    let judge = |claims: &[ResourceClaim]| {
        let holding: Vec<_> =
            claims.iter().filter(|claim| holds_device(claim)).map(full_name).collect();
        if holding.is_empty() { Verdict::Done(()) } else { Verdict::NotYet(holding.join(", ")) }
    };
    Ok(wait::until(
        Api::all(client.clone()),
        Default::default(),
        "no claim to hold a GPU",
        PATIENCE,
        judge,
    )
    .await?)
}

/// Whether a device of the driver under test is allocated to the claim.
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

/// Deletes a namespace and waits until it is gone. One that is not there is gone.
///
/// # Errors
/// The server refuses, or it takes too long.
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
                what: format!("delete namespace {name}"),
                source: Box::new(error),
            });
        }
    }
    let judge = |namespace: Option<&Namespace>| match namespace {
        None => Verdict::Done(()),
        Some(namespace) => {
            Verdict::NotYet(serde_json::to_string(&namespace.status).unwrap_or_default())
        }
    };
    Ok(wait::until_one(namespaces, name, &format!("namespace {name} to be gone"), within, judge)
        .await?)
}

/// Says that a namespace that is gone took its pods and claims along.
///
/// # Errors
/// Some are left.
pub async fn none_of_namespace(client: &Client, namespace: &str) -> Result<(), LeftoverError> {
    let failed = |error| LeftoverError::Api {
        what: format!("list objects of {namespace}"),
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
