//! Answers to the effects of the controller's core, as an API server gives them.

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::{
    AllocationResult, ResourceClaim, ResourceClaimConsumerReference,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use tessera_allocator::selector::CompiledSelector;
use tessera_api::names::ShareId;
use tessera_controller::core::clock::{Moment, Now};
use tessera_controller::core::effect::{AllocationDraft, Effect, NominationWrite};
use tessera_controller::core::event::{Event, NominationOutcome};

/// The wall clock at the start, in seconds since the epoch: 2026-01-10 12:00.
const START: i64 = 1_768_046_400;

/// Returns both clocks.
pub(crate) fn clocks(now: Moment) -> Now {
    let seconds = i64::try_from(now.since_start().as_secs()).unwrap_or(i64::MAX - START);
    Now { monotonic: now, wall: START + seconds }
}

/// Returns the success of an effect that changes neither claims nor the life of pods; none for
/// others.
pub(crate) fn success(effect: &Effect) -> Option<Event> {
    match effect {
        Effect::Notify(notice) => Some(Event::NoticeEnded { id: notice.id, is_delivered: true }),
        Effect::Nominate(NominationWrite { pod, node, .. }) => {
            let (pod, node) = (pod.uid.clone(), node.clone());
            let outcome = NominationOutcome::Stored;
            Some(Event::NominationEnded { pod, node, outcome })
        }
        Effect::Compile { namespace, expression } => {
            drop(CompiledSelector::cached(expression));
            Some(Event::Compiled { namespace: namespace.clone() })
        }
        _ => None,
    }
}

/// Returns the allocation of a claim for one share, which gets the ID of this number. The shares
/// that exist at the start have other IDs.
pub(crate) fn allocation(
    draft: &AllocationDraft,
    claim: &ResourceClaim,
    number: u64,
) -> AllocationResult {
    let share = || ShareId::new(format!("2f0c2d3e-9a41-7c3b-8e55-{number:012x}"));
    let share = || share().expect("invariant: a UUID");
    draft.render(claim, Time(Timestamp::UNIX_EPOCH), share)
}

/// Returns the reservation of a claim for a pod.
///
/// # Panics
/// The pod has no name or no UID.
pub(crate) fn reservation(pod: &Pod) -> ResourceClaimConsumerReference {
    ResourceClaimConsumerReference {
        resource: "pods".to_owned(),
        name: pod.metadata.name.clone().expect("pods have names"),
        uid: pod.metadata.uid.clone().expect("pods have UIDs"),
        ..ResourceClaimConsumerReference::default()
    }
}
