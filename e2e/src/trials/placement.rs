//! Where pods and their claims are, and what is said about them.

use k8s_openapi::api::core::v1::{Event, Pod};
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::api::DeleteParams;
use kube::{Api, ResourceExt};

use super::bench::{Bench, PATIENCE};
use crate::leftovers::holds_device;
use crate::wait::{self, Verdict, Watch};

/// The node that an allocation binds its claim to.
pub(super) fn node_of(claim: &ResourceClaim) -> Option<&str> {
    let selector = claim.status.as_ref()?.allocation.as_ref()?.node_selector.as_ref()?;
    let field = selector.node_selector_terms.first()?.match_fields.as_ref()?.first()?;
    field.values.as_ref()?.first().map(String::as_str)
}

/// Whether the claim is the pod's: made for it from a template, or a user's own that bears its
/// name.
pub(super) fn is_of(claim: &ResourceClaim, pod: &str) -> bool {
    claim.owner_references().iter().any(|owner| owner.name == pod) || claim.name_any() == pod
}

/// Whether the scheduler or kube-controller-manager has reserved the claim for somebody.
pub(super) fn is_reserved(claim: &ResourceClaim) -> bool {
    claim
        .status
        .as_ref()
        .and_then(|status| status.reserved_for.as_ref())
        .is_some_and(|r| !r.is_empty())
}

/// The node that a pod is bound to.
pub(super) fn node_name(pod: &Pod) -> Option<&str> {
    pod.spec.as_ref()?.node_name.as_deref()
}

/// Waits until the pod's claim holds a device and `is_it` is content with the claim.
pub(super) async fn allocated(
    bench: &Bench,
    pod: &str,
    what: &str,
    is_it: impl Fn(&ResourceClaim) -> bool,
) -> anyhow::Result<ResourceClaim> {
    let what = format!("the claim of {pod} to be {what}");
    Ok(wait::until(bench.claims(), Default::default(), &what, PATIENCE, holding(pod, is_it))
        .await?)
}

/// A watch of the claims that has begun.
pub(super) async fn watch(bench: &Bench) -> anyhow::Result<Watch<ResourceClaim>> {
    Ok(Watch::begun(bench.claims(), Default::default(), PATIENCE).await?)
}

/// As [`allocated`], also where the allocation is taken back at once, if the watch began before it
/// was made.
pub(super) async fn seen_allocated(
    claims: &mut Watch<ResourceClaim>,
    pod: &str,
    what: &str,
    is_it: impl Fn(&ResourceClaim) -> bool,
) -> anyhow::Result<ResourceClaim> {
    let what = format!("the claim of {pod} to be {what}");
    Ok(claims.until(&what, PATIENCE, holding(pod, is_it)).await?)
}

/// Judges whether the pod's claim holds a device and `is_it` is content with the claim.
fn holding(
    pod: &str,
    is_it: impl Fn(&ResourceClaim) -> bool,
) -> impl Fn(&[ResourceClaim]) -> Verdict<ResourceClaim> {
    move |claims| {
        let claim = claims.iter().find(|claim| is_of(claim, pod));
        match claim.filter(|claim| holds_device(claim) && is_it(claim)) {
            Some(claim) => Verdict::Done(claim.clone()),
            None => Verdict::NotYet(claim.map_or_else(|| "no claim".into(), describe)),
        }
    }
}

/// Waits until the pod's claim holds nothing or is gone.
pub(super) async fn unallocated(bench: &Bench, pod: &str) -> anyhow::Result<()> {
    let judge = |claims: &[ResourceClaim]| {
        let claim = claims.iter().find(|claim| is_of(claim, pod) && holds_device(claim));
        claim.map_or(Verdict::Done(()), |claim| Verdict::NotYet(describe(claim)))
    };
    let what = format!("the claim of {pod} to hold nothing");
    Ok(wait::until(bench.claims(), Default::default(), &what, PATIENCE, judge).await?)
}

/// Waits until the pod runs on the node that its claim is on, and the claim is reserved; returns
/// that node.
pub(super) async fn together(bench: &Bench, pod: &str, claim: &str) -> anyhow::Result<String> {
    let running = bench.holds(pod).await?;
    let node = node_name(&running).unwrap_or_default().to_owned();
    let claims = bench.claims().list(&Default::default()).await?;
    let claim = claims.items.into_iter().find(|found| is_of(found, claim));
    let claim = claim.ok_or_else(|| anyhow::anyhow!("pod {pod} runs without a claim"))?;
    anyhow::ensure!(
        node_of(&claim) == Some(&node) && is_reserved(&claim),
        "pod {pod} runs on {node}, and its claim is: {}",
        describe(&claim)
    );
    Ok(node)
}

/// Deletes a user's claim and waits until it is gone: no finalizer is left on it.
pub(super) async fn delete_claim(bench: &Bench, name: &str) -> anyhow::Result<()> {
    bench.claims().delete(name, &DeleteParams::default()).await?;
    let judge = |claim: Option<&ResourceClaim>| match claim {
        None => Verdict::Done(()),
        Some(claim) => {
            Verdict::NotYet(format!("finalizers {:?}, {}", claim.finalizers(), describe(claim)))
        }
    };
    Ok(wait::until_one(bench.claims(), name, &format!("claim {name} to be gone"), PATIENCE, judge)
        .await?)
}

/// Waits until an event of that reason is written about the pod; returns its text.
pub(super) async fn told(bench: &Bench, pod: &str, reason: &str) -> anyhow::Result<String> {
    event(bench, pod, reason, |event| event.reason.as_deref() == Some(reason)).await
}

/// Waits until an event about the pod says all of these; returns its text.
pub(super) async fn told_of(bench: &Bench, pod: &str, words: &[&str]) -> anyhow::Result<String> {
    let says = |event: &Event| {
        event.message.as_ref().is_some_and(|text| words.iter().all(|word| text.contains(word)))
    };
    event(bench, pod, &format!("that says {words:?}"), says).await
}

async fn event(
    bench: &Bench,
    pod: &str,
    what: &str,
    is_it: impl Fn(&Event) -> bool,
) -> anyhow::Result<String> {
    let events: Api<Event> = Api::namespaced(bench.client.clone(), bench.namespace());
    let judge = |events: &[Event]| {
        let about =
            || events.iter().filter(|event| event.involved_object.name.as_deref() == Some(pod));
        let text = |event: &Event| event.message.clone().unwrap_or_default();
        let seen = |event: &Event| {
            format!("{}: {}", event.reason.as_deref().unwrap_or_default(), text(event))
        };
        match about().find(|event| is_it(event)) {
            Some(event) => Verdict::Done(text(event)),
            None => Verdict::NotYet(about().map(seen).collect::<Vec<_>>().join("; ")),
        }
    };
    let what = format!("an event {what} about {pod}");
    Ok(wait::until(events, Default::default(), &what, PATIENCE, judge).await?)
}

fn describe(claim: &ResourceClaim) -> String {
    serde_json::to_string(&claim.status).unwrap_or_default()
}
