//! Namespaces of tests, and checks that tests leave no objects in the cluster.

use std::time::Duration;

use anyhow::Context as _;
use k8s_openapi::api::core::v1::{Namespace, Pod};
use k8s_openapi::api::resource::v1::{DeviceRequestAllocationResult, ResourceClaim};
use kube::api::{DeleteParams, ListParams, PostParams};
use kube::core::NamespaceResourceScope;
use kube::runtime::watcher;
use kube::{Api, Client, Resource, ResourceExt};
use serde::Serialize;
use serde_json::json;

use crate::inventory::DRIVER;
use crate::wait::{self, CheckResult, Watched};

/// Time limit for claims of an earlier test to lose their allocation, and for the namespaces of
/// tests to be deleted.
const TIMEOUT: Duration = Duration::from_secs(300);

/// Label of the namespaces of tests.
const LABEL: (&str, &str) = ("app.kubernetes.io/managed-by", "tessera-e2e");

/// Creates the namespace of a test. Its GpuConfigs are not validated when they are written: tests
/// check what the plan makes of wrong ones.
///
/// # Errors
/// Returns an error if it cannot be created.
pub async fn create_namespace(client: &Client, name: &str) -> anyhow::Result<()> {
    let (label, value) = LABEL;
    let labels = json!({"gpu.tessera.dev/validation": "none", label: value});
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

/// Requests the deletion of a namespace. Returns false if there is none.
async fn begin_deletion(client: &Client, name: &str) -> anyhow::Result<bool> {
    let namespaces: Api<Namespace> = Api::all(client.clone());
    match namespaces.delete(name, &DeleteParams::default()).await {
        Ok(_) => Ok(true),
        Err(kube::Error::Api(status)) if status.is_not_found() => Ok(false),
        Err(error) => Err(error).with_context(|| format!("cannot delete namespace {name}")),
    }
}

/// Deletes a namespace and waits until it is deleted. A missing namespace is no error.
///
/// # Errors
/// Returns an error if the API server refuses the deletion or if the deletion takes too long.
pub async fn delete_namespace(client: &Client, name: &str, within: Duration) -> anyhow::Result<()> {
    if !begin_deletion(client, name).await? {
        return Ok(());
    }
    let namespaces: Api<Namespace> = Api::all(client.clone());
    let what = format!("namespace {name} to be deleted");
    Ok(wait::until_one(namespaces, name, &what, within, CheckResult::deleted).await?)
}

/// Deletes the namespace of a test, and waits until its pods and claims are deleted. The namespace
/// itself is deleted later: kube-controller-manager waits for 5 s before it begins, and a wait for
/// that after each test took a sixth of the time of all tests. A missing namespace is no error.
///
/// # Errors
/// Returns an error if the API server refuses a deletion or if the deletions take too long; it has
/// the remaining objects.
pub async fn clear_namespace(client: &Client, name: &str, within: Duration) -> anyhow::Result<()> {
    // First, so that no controller creates a pod or a claim again.
    if !begin_deletion(client, name).await? {
        return Ok(());
    }
    delete_all::<Pod>(client, name, within).await?;
    delete_all::<ResourceClaim>(client, name, within).await
}

async fn delete_all<K>(client: &Client, namespace: &str, within: Duration) -> anyhow::Result<()>
where
    K: Watched + Resource<DynamicType = (), Scope = NamespaceResourceScope> + Serialize,
{
    let objects: Api<K> = Api::namespaced(client.clone(), namespace);
    let what = format!("{} of namespace {namespace} to be deleted", K::plural(&()));
    let deleted = objects.delete_collection(&DeleteParams::default(), &ListParams::default()).await;
    deleted.with_context(|| format!("cannot delete {} of {namespace}", K::plural(&())))?;
    Ok(wait::until(objects, Default::default(), &what, within, CheckResult::none_left).await?)
}

/// Waits until no namespace of an earlier test is left: each was to be deleted, so an object in it
/// blocks its deletion otherwise. `own` is the namespace of the current test.
///
/// # Errors
/// Returns an error that has the remaining namespaces with their conditions.
pub async fn none_but(client: &Client, own: &str) -> anyhow::Result<()> {
    let check = |namespaces: &[Namespace]| {
        let others = namespaces.iter().filter(|namespace| namespace.name_any() != own);
        CheckResult::none_left(&others.cloned().collect::<Vec<_>>())
    };
    let (label, value) = LABEL;
    let of_tests = watcher::Config::default().labels(&format!("{label}={value}"));
    let what = "the namespaces of earlier tests to be deleted";
    Ok(wait::until(Api::all(client.clone()), of_tests, what, TIMEOUT, check).await?)
}
