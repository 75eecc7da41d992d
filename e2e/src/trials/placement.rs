//! Helpers that check where pods and their claims are placed, and wait for events about them.

use k8s_openapi::api::core::v1::{Event, Pod};
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::api::DeleteParams;
use kube::{Api, ResourceExt};

use serde_json::{Value, json};

use super::test_bed::{TIMEOUT, TestBed, wait_all, wait_deleted};
use crate::leftovers::holds_device;
use crate::wait::{CheckResult, Watch};

/// Returns the node to which an allocation is restricted.
pub(super) fn node_of(claim: &ResourceClaim) -> Option<&str> {
    let selector = claim.status.as_ref()?.allocation.as_ref()?.node_selector.as_ref()?;
    let field = selector.node_selector_terms.first()?.match_fields.as_ref()?.first()?;
    field.values.as_ref()?.first().map(String::as_str)
}

/// Returns true if the claim belongs to the pod. It is generated for the pod, or it is a user's
/// claim with the pod's name.
pub(super) fn belongs_to(claim: &ResourceClaim, pod: &str) -> bool {
    claim.owner_references().iter().any(|owner| owner.name == pod) || claim.name_any() == pod
}

/// Returns true if the claim is reserved for a consumer.
pub(super) fn is_reserved(claim: &ResourceClaim) -> bool {
    claim
        .status
        .as_ref()
        .and_then(|status| status.reserved_for.as_ref())
        .is_some_and(|r| !r.is_empty())
}

/// Returns the node to which a pod is bound.
pub(super) fn node_name(pod: &Pod) -> Option<&str> {
    pod.spec.as_ref()?.node_name.as_deref()
}

/// Waits until the pod's claim is allocated and `accept` accepts it.
pub(super) async fn wait_allocated(
    test_bed: &TestBed,
    pod: &str,
    what: &str,
    accept: impl Fn(&ResourceClaim) -> bool,
) -> anyhow::Result<ResourceClaim> {
    let what = format!("the claim of {pod} to be {what}");
    wait_all(test_bed.claims(), &what, allocated_check(pod, accept)).await
}

/// Starts a watch of the namespace's claims.
pub(super) async fn start_claim_watch(test_bed: &TestBed) -> anyhow::Result<Watch<ResourceClaim>> {
    Ok(Watch::started(test_bed.claims(), Default::default(), TIMEOUT).await?)
}

/// Waits as [`wait_allocated`] does, on a watch that started before. Also observes an allocation
/// that is released immediately.
pub(super) async fn wait_allocated_in(
    claims: &mut Watch<ResourceClaim>,
    pod: &str,
    what: &str,
    accept: impl Fn(&ResourceClaim) -> bool,
) -> anyhow::Result<ResourceClaim> {
    let what = format!("the claim of {pod} to be {what}");
    Ok(claims.until(&what, TIMEOUT, allocated_check(pod, accept)).await?)
}

/// Returns a check that the pod's claim is allocated and that `accept` accepts it.
fn allocated_check(
    pod: &str,
    accept: impl Fn(&ResourceClaim) -> bool,
) -> impl Fn(&[ResourceClaim]) -> CheckResult<ResourceClaim> {
    move |claims| {
        let claim = claims.iter().find(|claim| belongs_to(claim, pod));
        match claim.filter(|claim| holds_device(claim) && accept(claim)) {
            Some(claim) => CheckResult::Done(claim.clone()),
            None => CheckResult::Pending(claim.map_or_else(|| "no claim".into(), describe)),
        }
    }
}

/// Waits until the pod's claim is not allocated or is deleted.
pub(super) async fn wait_unallocated(test_bed: &TestBed, pod: &str) -> anyhow::Result<()> {
    let check = |claims: &[ResourceClaim]| {
        let claim = claims.iter().find(|claim| belongs_to(claim, pod) && holds_device(claim));
        claim.map_or(CheckResult::Done(()), |claim| CheckResult::Pending(describe(claim)))
    };
    let what = format!("the claim of {pod} to be released");
    wait_all(test_bed.claims(), &what, check).await
}

/// Returns the field of a GpuConfig that places shares where the most is allocated, whatever pods
/// the controller has planned before.
pub(super) fn binpack() -> Value {
    json!({"placement": {"node": "Binpack", "device": "Binpack"}})
}

/// Waits until the pod runs, and checks that its claim is allocated on the same node and reserved.
/// Returns the node.
pub(super) async fn check_colocated(
    test_bed: &TestBed,
    pod: &str,
    claim: &str,
) -> anyhow::Result<String> {
    let running = test_bed.wait_running(pod).await?;
    let node = node_name(&running).unwrap_or_default().to_owned();
    let claims = test_bed.claims().list(&Default::default()).await?;
    let claim = claims.items.into_iter().find(|found| belongs_to(found, claim));
    let claim = claim.ok_or_else(|| anyhow::anyhow!("pod {pod} runs without a claim"))?;
    anyhow::ensure!(
        node_of(&claim) == Some(&node) && is_reserved(&claim),
        "pod {pod} runs on {node}, but the status of its claim is {}",
        describe(&claim)
    );
    Ok(node)
}

/// Deletes a user's claim, and waits until it is deleted, which shows that no finalizer is left.
pub(super) async fn delete_claim(test_bed: &TestBed, name: &str) -> anyhow::Result<()> {
    test_bed.claims().delete(name, &DeleteParams::default()).await?;
    wait_deleted(test_bed.claims(), name).await
}

/// Waits for an event with that reason about the pod; returns its message.
pub(super) async fn wait_event_reason(
    test_bed: &TestBed,
    pod: &str,
    reason: &str,
) -> anyhow::Result<String> {
    wait_event(test_bed, pod, reason, |event| event.reason.as_deref() == Some(reason)).await
}

/// Waits for an event about the pod whose message contains all of these texts; returns its message.
pub(super) async fn wait_event_text(
    test_bed: &TestBed,
    pod: &str,
    texts: &[&str],
) -> anyhow::Result<String> {
    let contains_all = |event: &Event| {
        event.message.as_ref().is_some_and(|text| texts.iter().all(|part| text.contains(part)))
    };
    wait_event(test_bed, pod, &format!("that contains {texts:?}"), contains_all).await
}

async fn wait_event(
    test_bed: &TestBed,
    pod: &str,
    what: &str,
    accept: impl Fn(&Event) -> bool,
) -> anyhow::Result<String> {
    let events: Api<Event> = Api::namespaced(test_bed.client.clone(), test_bed.namespace());
    let check = |events: &[Event]| {
        let about =
            || events.iter().filter(|event| event.involved_object.name.as_deref() == Some(pod));
        let text = |event: &Event| event.message.clone().unwrap_or_default();
        let seen = |event: &Event| {
            format!("{}: {}", event.reason.as_deref().unwrap_or_default(), text(event))
        };
        match about().find(|event| accept(event)) {
            Some(event) => CheckResult::Done(text(event)),
            None => CheckResult::Pending(about().map(seen).collect::<Vec<_>>().join("; ")),
        }
    };
    let what = format!("an event {what} about {pod}");
    wait_all(events, &what, check).await
}

fn describe(claim: &ResourceClaim) -> String {
    serde_json::to_string(&claim.status).unwrap_or_default()
}
