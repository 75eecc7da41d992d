//! Messages as users read them.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use tessera_allocator::model::PodUid;
use tessera_allocator::{QuotaShortfall, RefusalCause, ReservedNode};
use tessera_api::events;
use tessera_api::names::{
    ClaimUid, DeviceClassName, Namespace, NodeName, PodName, QuotaName, RequestName,
};
use tessera_api::quantity::Quantity;
use tessera_api::quota::QuotaResource;
use tessera_api::reason::{Explanation, MAX_EVENT_BYTES, Reason};
use tessera_index::{Misplaced, RepairAction, RepairBlocker};
use tessera_messages::{
    NO_DEVICES_PUBLISHED, metric_label, node_mismatch_message, refusal_message, refusal_reason,
};

fn node(name: &str) -> NodeName {
    NodeName::new(name).unwrap()
}

fn reserved() -> ReservedNode {
    ReservedNode {
        pod: PodUid::new("uid"),
        namespace: Namespace::new("default").unwrap(),
        name: PodName::new("p").unwrap(),
        node: node("node-a"),
        until: 600,
    }
}

fn short_of_cores() -> Reason {
    Reason::Insufficient { capacity: "cores".to_owned() }
}

#[test]
fn insufficient_devices_begins_with_the_totals() {
    let mut explanation = Explanation::new();
    explanation.count_short(short_of_cores(), &node("node-a"), Quantity::from_integer(25));
    let class = Reason::ClassSelector { class: "h100.gpu.tessera.dev".to_owned() };
    explanation.count(class, &node("node-b"), 11);
    let cause = RefusalCause::NoFit(explanation.into());
    assert_eq!(refusal_reason(&cause), events::INSUFFICIENT_DEVICES);
    assert_eq!(
        refusal_message("c", &cause, Some(&reserved())),
        "0/12 GPUs available for ResourceClaim c: 1 insufficient cores (25 short), 11 not selected \
         by DeviceClass h100.gpu.tessera.dev; node node-a is reserved for the pod until \
         1970-01-01T00:10:00Z"
    );
    assert_eq!(metric_label(&cause), "ClassSelector");
}

#[test]
fn insufficient_devices_fits_into_an_event() {
    let mut explanation = Explanation::new();
    for number in 0..100 {
        let class = Reason::ClassSelector { class: format!("class-{number}.example.com") };
        explanation.count(class, &node("node-a"), 1);
    }
    let text = refusal_message(
        &"c".repeat(253),
        &RefusalCause::NoFit(explanation.into()),
        Some(&reserved()),
    );
    assert!(text.len() <= MAX_EVENT_BYTES, "{} bytes: {text}", text.len());
    assert!(text.ends_with("is reserved for the pod until 1970-01-01T00:10:00Z"), "{text}");
}

#[test]
fn cluster_without_devices_has_its_own_label() {
    assert_eq!(metric_label(&RefusalCause::NoFit(Explanation::new().into())), NO_DEVICES_PUBLISHED);
}

#[test]
fn unknown_class_is_named_with_the_request() {
    let cause = RefusalCause::UnknownClass {
        request: RequestName::new("gpu").unwrap(),
        class: DeviceClassName::new("h200.gpu.tessera.dev").unwrap(),
    };
    assert_eq!(
        refusal_message("c", &cause, None),
        "ResourceClaim c: request `gpu` refers to DeviceClass `h200.gpu.tessera.dev`, which does \
         not exist; list classes with `kubectl get deviceclasses`"
    );
}

#[test]
fn quota_message_says_by_how_much_and_when_waiting_is_vain() {
    let shortfall = |asked: u64, used: u64, hard: u64| {
        Box::new(QuotaShortfall {
            quota: QuotaName::new("team").unwrap(),
            resource: QuotaResource::Memory,
            asked: Quantity::from_mib(asked << 10),
            used: Quantity::from_mib(used << 10),
            hard: Quantity::from_mib(hard << 10),
        })
    };
    let cause = RefusalCause::OverQuota(shortfall(8, 36, 40));
    assert_eq!(refusal_reason(&cause), events::QUOTA_EXCEEDED);
    assert_eq!(metric_label(&cause), "QuotaExceeded");
    assert_eq!(
        refusal_message("c", &cause, None),
        "ResourceClaim c: over quota by 4Gi of memory (used 36Gi of 40Gi): the pod asks for 8Gi, and \
         GpuQuota `team` limits the namespace"
    );
    let never = refusal_message("c", &RefusalCause::OverQuota(shortfall(48, 0, 40)), None);
    assert!(
        never.ends_with("the quota never admits the pod: ask for less, or have the quota raised")
    );
}

#[test]
fn misplaced_claim_is_reported_with_its_repair() {
    let of = |repair_action| Misplaced {
        pod: PodUid::new("uid"),
        claim: ClaimUid::new("claim").unwrap(),
        node: node("node-b"),
        allocated: Some(node("node-a")),
        repair_action,
    };
    assert_eq!(
        node_mismatch_message("c", &of(RepairAction::Deallocate)),
        "the pod is bound to node node-b, but ResourceClaim c is allocated on node node-a; no pod \
         uses it there, so it will be moved to the pod's node"
    );
    let in_use = node_mismatch_message("c", &of(RepairAction::Blocked(RepairBlocker::InUse)));
    assert!(in_use.ends_with("another pod may be using it; delete the pod to start over"));
}
