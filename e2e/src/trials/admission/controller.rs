//! Policy `tessera-controller`: the controller writes the finalizer and allocations of its devices,
//! and nothing else of a claim.

use serde_json::{Value, json};

use super::harness::{
    ADMINISTRATOR, Action, AdmissionHarness, CONTROLLER, EDITOR, FINALIZER, OTHER_DRIVER,
    OWN_DRIVER, SCHEDULER, Target, all, allocation, claim, expect_allocation, no_allocation,
};

/// Returns the patch that reserves a claim for these consumers.
fn reservation(names: &[&str]) -> Value {
    let consumer = |name: &&str| json!({"apiGroup": "example.com", "resource": "tests", "name": name, "uid": name});
    json!({"status": {"reservedFor": names.iter().map(consumer).collect::<Vec<_>>()}})
}

const CLAIM: Target<'_> = Target("resourceclaims", "written", "");
const CLAIM_STATUS: Target<'_> = Target("resourceclaims", "written", "status");
const OTHER: Target<'_> = Target("resourceclaims", "of-other-driver", "");
const OTHER_STATUS: Target<'_> = Target("resourceclaims", "of-other-driver", "status");

pub(super) async fn check(harness: &AdmissionHarness) {
    metadata_is_unchanged(harness).await;
    consumers_are_cleared_with_the_allocation_only(harness).await;
    other_drivers_are_left_alone(harness).await;
}

async fn metadata_is_unchanged(harness: &AdmissionHarness) {
    let mut unallocated = claim("written", json!({}));
    unallocated["metadata"]["finalizers"] = json!(["example.com/other"]);
    let create = Action::Create(unallocated);
    harness.expect_allowed(EDITOR, "a claim", all("resourceclaims"), create).await;
    let owner = json!([{"apiVersion": "v1", "kind": "ConfigMap", "name": "x", "uid": "x"}]);
    let edits = [
        ("a label", json!({"labels": {"a": "b"}}), "changes neither"),
        ("an annotation", json!({"annotations": {"a": "b"}}), "changes neither"),
        (
            "an owner, with which it is deleted",
            json!({"ownerReferences": owner}),
            "changes neither",
        ),
        ("another finalizer", json!({"finalizers": [FINALIZER, "example.com/x"]}), "only adds"),
        ("the end of another finalizer", json!({"finalizers": [FINALIZER]}), "only adds"),
        ("the end of all finalizers", json!({"finalizers": null}), "only adds"),
    ];
    for (what, metadata, message) in edits {
        let edit = Action::Merge(json!({"metadata": metadata}));
        harness.expect_denied(CONTROLLER, what, message, CLAIM, edit).await;
    }
    let finalizers = json!({"metadata": {"finalizers": ["example.com/other", FINALIZER]}});
    let add = Action::Merge(finalizers);
    harness.expect_allowed(CONTROLLER, "the finalizer beside another", CLAIM, add).await;
    let strip = Action::Merge(json!({"metadata": {"finalizers": ["example.com/other"]}}));
    harness.expect_denied(CONTROLLER, "the end of the finalizer", "only adds", CLAIM, strip).await;
}

async fn consumers_are_cleared_with_the_allocation_only(harness: &AdmissionHarness) {
    expect_allocation(harness, CLAIM_STATUS).await;
    let changes: [(&str, Value); 3] = [
        ("another consumer", reservation(&["x", "y"])),
        ("another consumer in its place", reservation(&["y"])),
        ("the end of the consumers", json!({"status": {"reservedFor": null}})),
    ];
    for (what, change) in changes {
        let message = "only together with its allocation";
        let change = Action::Merge(change);
        harness.expect_denied(CONTROLLER, what, message, CLAIM_STATUS, change).await;
    }
    let end = Action::Merge(no_allocation());
    harness.expect_allowed(CONTROLLER, "the end of both", CLAIM_STATUS, end).await;
    harness
        .expect_allowed(
            ADMINISTRATOR,
            "the end of all finalizers",
            CLAIM,
            Action::Merge(json!({"metadata": {"finalizers": null}})),
        )
        .await;
    harness.expect_allowed(EDITOR, "deleting the claim", CLAIM, Action::Delete).await;
}

async fn other_drivers_are_left_alone(harness: &AdmissionHarness) {
    let create = Action::Create(claim("of-other-driver", json!({})));
    harness.expect_allowed(EDITOR, "a claim", all("resourceclaims"), create).await;
    let message = "all of gpu.tessera.dev";
    for results in [&[OTHER_DRIVER][..], &[OWN_DRIVER, OTHER_DRIVER][..]] {
        let allocate = Action::Merge(allocation(results));
        let what = "an allocation of another driver's device";
        harness.expect_denied(CONTROLLER, what, message, OTHER_STATUS, allocate).await;
    }
    let allocate = Action::Merge(allocation(&[OTHER_DRIVER]));
    harness.expect_allowed(SCHEDULER, "its allocation", OTHER_STATUS, allocate).await;
    let end = Action::Merge(no_allocation());
    let what = "the end of another driver's allocation";
    harness.expect_denied(CONTROLLER, what, message, OTHER_STATUS, end.clone()).await;
    harness.expect_allowed(SCHEDULER, what, OTHER_STATUS, end).await;
    harness.expect_allowed(EDITOR, "deleting the claim", OTHER, Action::Delete).await;
}
