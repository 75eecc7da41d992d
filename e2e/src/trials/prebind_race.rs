//! Trial that holds kube-scheduler's reservation of a claim while the claim is released or
//! reallocated. Pod and claim never end on different nodes.
//!
//! After a conflict, PreBind reads the claim again and reserves its current state (`bindClaim` in
//! Kubernetes 1.37.1). If the claim was reallocated meanwhile, the scheduler binds the pod to the
//! node of the old allocation, and the controller must repair that.

use std::net::{IpAddr, UdpSocket};

use axum::http::StatusCode;
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::api::{Patch, PatchParams};
use kube::{Api, ResourceExt};
use serde_json::json;

use super::deleted_early::user_claim;
use super::other_pool::CONTROLLER;
use super::test_bed::{TIMEOUT, TestBed, holder, wait_one};
use super::{overcommit, placement};
use crate::harness::TrialOutcome;
use crate::operations::Operations;
use crate::proxy::{HoldingProxy, WriteFilter};
use crate::runner::Outcome;
use crate::wait::CheckResult;

const SCHEDULER: &str = "system:kube-scheduler";
const CONTROL_PLANE: &str = "control-plane";

pub(super) async fn check_races(test_bed: TestBed) -> TrialOutcome {
    let operations = test_bed.operations()?;
    let proxy =
        HoldingProxy::start(test_bed.client_of(SCHEDULER)?, own_address(&test_bed)?).await?;
    operations.run(&["scheduler-through", CONTROL_PLANE, &proxy.url()]).await?;
    let outcome = overcommit::check_during(&test_bed, each_order(&test_bed, &proxy)).await;
    cordon(&test_bed, &nodes(&test_bed).await?, false).await?;
    restore(operations).await?;
    outcome
}

async fn restore(operations: &Operations) -> anyhow::Result<()> {
    operations.run(&["scheduler-through", CONTROL_PLANE, "none"]).await.map(drop)
}

/// Returns this machine's address on the route to the API server. The API server's machine can
/// reach it.
fn own_address(test_bed: &TestBed) -> anyhow::Result<IpAddr> {
    let server = test_bed.server();
    let host = server.host().unwrap_or_default();
    let socket = UdpSocket::bind("0.0.0.0:0")?;
    // Sends no packets; it only selects the route.
    socket.connect((host, server.port_u16().unwrap_or(443)))?;
    Ok(socket.local_addr()?.ip())
}

async fn each_order(test_bed: &TestBed, proxy: &HoldingProxy) -> TrialOutcome {
    allocated_elsewhere(test_bed, proxy).await?;
    released(test_bed, proxy).await?;
    deleted(test_bed, proxy).await?;
    Ok(Outcome::Passed(vec![]))
}

/// The claim is allocated on another node before the scheduler reads it again.
async fn allocated_elsewhere(test_bed: &TestBed, proxy: &HoldingProxy) -> anyhow::Result<()> {
    let (pod, claim) = ("moved", "claim-1");
    let old = hold_reservation(test_bed, proxy, pod, claim).await?;
    let node = placement::node_of(&old).unwrap_or_default().to_owned();
    let only = std::slice::from_ref(&node);
    cordon(test_bed, only, true).await?;
    release_claim(test_bed, &old).await?;
    let elsewhere = |claim: &ResourceClaim| placement::node_of(claim) != Some(&node);
    placement::wait_allocated(test_bed, claim, "on another node", elsewhere).await?;
    expect_conflict(proxy).await?;
    placement::check_colocated(test_bed, pod, claim).await?;
    cordon(test_bed, only, false).await?;
    clean_up(test_bed, pod, claim).await
}

/// The claim is released before the scheduler reads it again.
async fn released(test_bed: &TestBed, proxy: &HoldingProxy) -> anyhow::Result<()> {
    let (pod, claim) = ("delayed", "claim-2");
    let old = hold_reservation(test_bed, proxy, pod, claim).await?;
    let nodes = nodes(test_bed).await?;
    cordon(test_bed, &nodes, true).await?;
    release_claim(test_bed, &old).await?;
    placement::wait_event_reason(test_bed, pod, "InsufficientDevices").await?;
    expect_conflict(proxy).await?;
    let failed = |pod: Option<&Pod>| match pod.and_then(|pod| pod.status.as_ref()) {
        Some(status)
            if status
                .conditions
                .iter()
                .flatten()
                .any(|c| c.reason.as_deref() == Some("SchedulerError")) =>
        {
            CheckResult::Done(())
        }
        status => CheckResult::Pending(json!(status).to_string()),
    };
    wait_one(test_bed.pods(), pod, "the scheduling attempt to fail", failed).await?;
    cordon(test_bed, &nodes, false).await?;
    placement::check_colocated(test_bed, pod, claim).await?;
    clean_up(test_bed, pod, claim).await
}

/// The pod is deleted before the scheduler reads the claim again.
async fn deleted(test_bed: &TestBed, proxy: &HoldingProxy) -> anyhow::Result<()> {
    let (pod, claim) = ("deleted", "claim-3");
    hold_reservation(test_bed, proxy, pod, claim).await?;
    test_bed.delete(&[pod]).await?;
    placement::wait_unallocated(test_bed, claim).await?;
    expect_conflict(proxy).await?;
    // The claim is released; the next pod uses it, and it is released again.
    test_bed.create(holder("next", json!({"name": "gpu", "resourceClaimName": claim}))).await?;
    placement::check_colocated(test_bed, "next", claim).await?;
    clean_up(test_bed, "next", claim).await
}

/// Creates a pod with its own claim, and waits until the scheduler's reservation of the claim is
/// held. Returns the claim.
async fn hold_reservation(
    test_bed: &TestBed,
    proxy: &HoldingProxy,
    pod: &str,
    claim: &str,
) -> anyhow::Result<ResourceClaim> {
    test_bed.create_claim(user_claim(claim)).await?;
    // The claim does not contain the pod's name before it is reserved for it.
    let path_suffix = format!("/namespaces/{}/resourceclaims/{claim}/status", test_bed.namespace());
    proxy.hold(WriteFilter { path_suffix, body_contains: pod.to_owned() });
    test_bed.create(holder(pod, json!({"name": "gpu", "resourceClaimName": claim}))).await?;
    let waited = tokio::time::timeout(TIMEOUT, proxy.wait_held()).await;
    waited.map_err(|_| anyhow::anyhow!("the scheduler did not reserve {claim} for {pod}"))?;
    placement::wait_allocated(test_bed, claim, "allocated and not reserved", |claim| {
        !placement::is_reserved(claim)
    })
    .await
}

/// Releases the held reservation, and checks that it fails with a conflict.
async fn expect_conflict(proxy: &HoldingProxy) -> anyhow::Result<()> {
    let answer = tokio::time::timeout(TIMEOUT, proxy.release()).await?;
    anyhow::ensure!(
        answer == StatusCode::CONFLICT,
        "the held reservation returned {answer}, expected a conflict"
    );
    Ok(())
}

/// Releases the claim as the controller does.
async fn release_claim(test_bed: &TestBed, claim: &ResourceClaim) -> anyhow::Result<()> {
    let status = json!({
        "metadata": {"resourceVersion": claim.resource_version()},
        "status": {"allocation": null, "devices": null},
    });
    let claims: Api<ResourceClaim> =
        Api::namespaced(test_bed.client_of(CONTROLLER)?, test_bed.namespace());
    claims.patch_status(&claim.name_any(), &PatchParams::default(), &Patch::Merge(status)).await?;
    Ok(())
}

async fn clean_up(test_bed: &TestBed, pod: &str, claim: &str) -> anyhow::Result<()> {
    test_bed.delete(&[pod]).await?;
    placement::wait_unallocated(test_bed, claim).await?;
    placement::delete_claim(test_bed, claim).await
}

async fn nodes(test_bed: &TestBed) -> anyhow::Result<Vec<String>> {
    let nodes: Api<Node> = Api::all(test_bed.client.clone());
    Ok(nodes.list(&Default::default()).await?.iter().map(ResourceExt::name_any).collect())
}

async fn cordon(test_bed: &TestBed, names: &[String], cordoned: bool) -> anyhow::Result<()> {
    let nodes: Api<Node> = Api::all(test_bed.client.clone());
    for name in names {
        if cordoned {
            nodes.cordon(name).await?
        } else {
            nodes.uncordon(name).await?
        };
    }
    Ok(())
}
