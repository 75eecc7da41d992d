//! kube-scheduler's reservation of a claim, held on its way to the API server while the claim
//! becomes another one's or nobody's: pod and claim never end on different nodes.
//!
//! PreBind answers a conflict by reading the claim again and reserving whatever it is by then
//! (`bindClaim` of Kubernetes 1.37.1). So where the claim has been allocated anew in between, the
//! scheduler itself binds the pod to the node of the old allocation, and the controller has to
//! bring the two together.

use std::net::{IpAddr, UdpSocket};

use axum::http::StatusCode;
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::api::{Patch, PatchParams, PostParams};
use kube::{Api, ResourceExt};
use serde_json::json;

use super::bench::{Bench, PATIENCE, holder};
use super::deleted_early::own_claim;
use super::neighbour::CONTROLLER;
use super::{overcommit, placement};
use crate::harness::TrialOutcome;
use crate::operations::Operations;
use crate::proxy::{HoldingProxy, Match};
use crate::runner::Outcome;
use crate::wait::{self, Verdict};

const SCHEDULER: &str = "system:kube-scheduler";
const CONTROL_PLANE: &str = "control-plane";

pub(super) async fn forced(bench: Bench) -> TrialOutcome {
    let hands = bench.hands()?;
    let proxy = HoldingProxy::start(bench.client_of(SCHEDULER)?, own_address(&bench)?).await?;
    hands.run(&["scheduler-through", CONTROL_PLANE, &proxy.url()]).await?;
    let outcome = overcommit::never_during(&bench, each_order(&bench, &proxy)).await;
    cordon(&bench, &nodes(&bench).await?, false).await?;
    restore(hands).await?;
    outcome
}

async fn restore(hands: &Operations) -> anyhow::Result<()> {
    Ok(hands.run(&["scheduler-through", CONTROL_PLANE, "nobody"]).await.map(drop)?)
}

/// The address of this machine on the way to the API server, and so one at which its machine
/// reaches this one.
fn own_address(bench: &Bench) -> anyhow::Result<IpAddr> {
    let server = bench.server();
    let host = server.host().unwrap_or_default();
    let socket = UdpSocket::bind("0.0.0.0:0")?;
    // Sends nothing: it only chooses the way.
    socket.connect((host, server.port_u16().unwrap_or(443)))?;
    Ok(socket.local_addr()?.ip())
}

async fn each_order(bench: &Bench, proxy: &HoldingProxy) -> TrialOutcome {
    allocated_elsewhere(bench, proxy).await?;
    taken_back(bench, proxy).await?;
    deleted(bench, proxy).await?;
    Ok(Outcome::Held(vec![]))
}

/// The claim is on another node by the time the scheduler reads it again.
async fn allocated_elsewhere(bench: &Bench, proxy: &HoldingProxy) -> anyhow::Result<()> {
    let (pod, claim) = ("moved", "claim-1");
    let old = held(bench, proxy, pod, claim).await?;
    let node = placement::node_of(&old).unwrap_or_default().to_owned();
    let only = std::slice::from_ref(&node);
    cordon(bench, only, true).await?;
    take_back(bench, &old).await?;
    let elsewhere = |claim: &ResourceClaim| placement::node_of(claim) != Some(&node);
    placement::allocated(bench, claim, "on another node", elsewhere).await?;
    refused(proxy).await?;
    placement::together(bench, pod, claim).await?;
    cordon(bench, only, false).await?;
    done(bench, pod, claim).await
}

/// The claim is nobody's by the time the scheduler reads it again.
async fn taken_back(bench: &Bench, proxy: &HoldingProxy) -> anyhow::Result<()> {
    let (pod, claim) = ("delayed", "claim-2");
    let old = held(bench, proxy, pod, claim).await?;
    let nodes = nodes(bench).await?;
    cordon(bench, &nodes, true).await?;
    take_back(bench, &old).await?;
    placement::told(bench, pod, "InsufficientDevices").await?;
    refused(proxy).await?;
    let failed = |pod: Option<&Pod>| match pod.and_then(|pod| pod.status.as_ref()) {
        Some(status)
            if status
                .conditions
                .iter()
                .flatten()
                .any(|c| c.reason.as_deref() == Some("SchedulerError")) =>
        {
            Verdict::Done(())
        }
        status => Verdict::NotYet(json!(status).to_string()),
    };
    wait::until_one(bench.pods(), pod, "the scheduler to give its attempt up", PATIENCE, failed)
        .await?;
    cordon(bench, &nodes, false).await?;
    placement::together(bench, pod, claim).await?;
    done(bench, pod, claim).await
}

/// The pod is gone by the time the scheduler reads the claim again.
async fn deleted(bench: &Bench, proxy: &HoldingProxy) -> anyhow::Result<()> {
    let (pod, claim) = ("gone", "claim-3");
    held(bench, proxy, pod, claim).await?;
    bench.delete(&[pod.to_owned()]).await?;
    placement::unallocated(bench, claim).await?;
    refused(proxy).await?;
    // Nobody holds it: the next pod has it, and then nobody again.
    bench.create(holder("next", json!({"name": "gpu", "resourceClaimName": claim}))).await?;
    placement::together(bench, "next", claim).await?;
    done(bench, "next", claim).await
}

/// Makes a pod with a claim of its own, and waits until the scheduler is about to reserve that.
/// Returns the claim.
async fn held(
    bench: &Bench,
    proxy: &HoldingProxy,
    pod: &str,
    claim: &str,
) -> anyhow::Result<ResourceClaim> {
    bench
        .claims()
        .create(&PostParams::default(), &serde_json::from_value(own_claim(claim))?)
        .await?;
    // The claim does not name the pod before it is reserved for it.
    let path_ends = format!("/namespaces/{}/resourceclaims/{claim}/status", bench.namespace());
    proxy.hold(Match { path_ends, body_has: pod.to_owned() });
    bench.create(holder(pod, json!({"name": "gpu", "resourceClaimName": claim}))).await?;
    let waited = tokio::time::timeout(PATIENCE, proxy.held()).await;
    waited.map_err(|_| anyhow::anyhow!("the scheduler does not reserve {claim} for {pod}"))?;
    placement::allocated(bench, claim, "allocated and not reserved", |claim| {
        !placement::is_reserved(claim)
    })
    .await
}

/// Lets the reservation go, which is for a claim that has changed.
async fn refused(proxy: &HoldingProxy) -> anyhow::Result<()> {
    let answer = tokio::time::timeout(PATIENCE, proxy.let_go()).await?;
    anyhow::ensure!(
        answer == StatusCode::CONFLICT,
        "the held reservation was answered with {answer}"
    );
    Ok(())
}

/// Does what the controller does when it gives a place up.
async fn take_back(bench: &Bench, claim: &ResourceClaim) -> anyhow::Result<()> {
    let status = json!({
        "metadata": {"resourceVersion": claim.resource_version()},
        "status": {"allocation": null, "devices": null},
    });
    let claims: Api<ResourceClaim> =
        Api::namespaced(bench.client_of(CONTROLLER)?, bench.namespace());
    claims.patch_status(&claim.name_any(), &PatchParams::default(), &Patch::Merge(status)).await?;
    Ok(())
}

async fn done(bench: &Bench, pod: &str, claim: &str) -> anyhow::Result<()> {
    bench.delete(&[pod.to_owned()]).await?;
    placement::unallocated(bench, claim).await?;
    placement::delete_claim(bench, claim).await
}

async fn nodes(bench: &Bench) -> anyhow::Result<Vec<String>> {
    let nodes: Api<Node> = Api::all(bench.client.clone());
    Ok(nodes.list(&Default::default()).await?.iter().map(ResourceExt::name_any).collect())
}

async fn cordon(bench: &Bench, names: &[String], cordoned: bool) -> anyhow::Result<()> {
    let nodes: Api<Node> = Api::all(bench.client.clone());
    for name in names {
        if cordoned {
            nodes.cordon(name).await?
        } else {
            nodes.uncordon(name).await?
        };
    }
    Ok(())
}
