//! Namespaces of tests, and checks that tests leave no objects in the cluster.

use std::time::Duration;

use anyhow::{Context as _, ensure};
use k8s_openapi::api::core::v1::{Namespace, Pod};
use k8s_openapi::api::resource::v1::{DeviceRequestAllocationResult, ResourceClaim};
use kube::api::{DeleteParams, ListParams, PostParams};
use kube::{Api, Client, ResourceExt};
use serde_json::json;

use crate::inventory::DRIVER;
use crate::wait::{self, CheckResult};

/// Time limit for claims of an earlier test to lose their allocation.
const TIMEOUT: Duration = Duration::from_secs(300);

/// Creates the namespace of a test. Its GpuConfigs are not validated when they are written: tests
/// check what the plan makes of wrong ones.
///
/// # Errors
/// Returns an error if it cannot be created.
pub async fn create_namespace(client: &Client, name: &str) -> anyhow::Result<()> {
    let labels = json!({"gpu.tessera.dev/validation": "none"});
    let namespace = json!({"metadata": {"name": name, "labels": labels}});
    let namespaces: Api<Namespace> = Api::all(client.clone());
    let created =
        namespaces.create(&PostParams::default(), &serde_json::from_value(namespace)?).await;
    created.map(drop).with_context(|| format!("cannot create namespace {name}"))
}

/// Waits until no claim has a device of the driver under test.
///
/// # Errors
/// Returns an error if a claim is still allocated after the time limit.
pub async fn none_allocated(client: &Client) -> anyhow::Result<()> {
    let check = |claims: &[ResourceClaim]| {
        let holding: Vec<_> =
            claims.iter().filter(|claim| holds_device(claim)).map(full_name).collect();
        CheckResult::done_if(holding.is_empty(), || holding.join(", "))
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
    device_results(claim).any(|result| result.driver == DRIVER)
}

/// Returns the devices that are allocated to the claim, of all drivers.
pub fn device_results(
    claim: &ResourceClaim,
) -> impl Iterator<Item = &DeviceRequestAllocationResult> {
    let allocation = claim.status.as_ref().and_then(|status| status.allocation.as_ref());
    let devices = allocation.and_then(|allocation| allocation.devices.as_ref());
    devices.and_then(|devices| devices.results.as_ref()).into_iter().flatten()
}

fn full_name<K: kube::Resource>(object: &K) -> String {
    format!("{}/{}", object.namespace().unwrap_or_default(), object.name_any())
}

/// Deletes a namespace and waits until it is deleted. A missing namespace is no error.
///
/// # Errors
/// Returns an error if the API server refuses the deletion or if the deletion takes too long.
pub async fn delete_namespace(client: &Client, name: &str, within: Duration) -> anyhow::Result<()> {
    let namespaces: Api<Namespace> = Api::all(client.clone());
    match namespaces.delete(name, &DeleteParams::default()).await {
        Ok(_) => {}
        Err(kube::Error::Api(status)) if status.is_not_found() => return Ok(()),
        Err(error) => {
            return Err(error).with_context(|| format!("cannot delete namespace {name}"));
        }
    }
    let what = format!("namespace {name} to be deleted");
    Ok(wait::until_one(namespaces, name, &what, within, CheckResult::deleted).await?)
}

/// Checks that the pods and claims of a deleted namespace were deleted with it.
///
/// # Errors
/// Returns an error that names the remaining objects.
pub async fn none_of_namespace(client: &Client, namespace: &str) -> anyhow::Result<()> {
    let pods: Api<Pod> = Api::namespaced(client.clone(), namespace);
    let claims: Api<ResourceClaim> = Api::namespaced(client.clone(), namespace);
    let pods = pods.list(&ListParams::default()).await?;
    let claims = claims.list(&ListParams::default()).await?;
    let names = pods.iter().map(|pod| format!("Pod {}", pod.name_any()));
    let names =
        names.chain(claims.iter().map(|claim| format!("ResourceClaim {}", claim.name_any())));
    let objects = names.collect::<Vec<_>>().join(", ");
    ensure!(objects.is_empty(), "objects left in namespace {namespace}: {objects}");
    Ok(())
}
