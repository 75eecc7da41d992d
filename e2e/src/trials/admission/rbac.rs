//! RBAC rights of Tessera's components and of users, on which the admission policies rely.

use serde_json::json;

use super::harness::{
    ADMINISTRATOR, Action, AdmissionHarness, CONTROLLER, DRIVER, EDITOR, NODE, OWN_DRIVER, Target,
    all, allocation, claim,
};

const CANNOT: &str = " cannot ";
const CLAIM: Target<'_> = Target("resourceclaims", "allocated", "");
const CLAIM_STATUS: Target<'_> = Target("resourceclaims", "allocated", "status");

pub(super) async fn check(harness: &AdmissionHarness) {
    harness
        .expect_allowed(
            EDITOR,
            "a claim",
            all("resourceclaims"),
            Action::Create(claim("allocated", json!({}))),
        )
        .await;
    let label = || Action::Merge(json!({"metadata": {"labels": {"a": "b"}}}));
    let allocate = || Action::Merge(allocation(&[OWN_DRIVER]));
    // An editor may change claims, but neither their allocations nor slices.
    harness.expect_allowed(EDITOR, "a label", CLAIM, label()).await;
    harness.expect_denied(EDITOR, "an allocation", CANNOT, CLAIM_STATUS, allocate()).await;
    harness
        .expect_denied(
            EDITOR,
            "deleting all slices",
            CANNOT,
            all("resourceslices"),
            Action::DeleteCollection(String::new()),
        )
        .await;
    // The driver may only read claims.
    harness.expect_denied(DRIVER, "an allocation", CANNOT, CLAIM_STATUS, allocate()).await;
    harness.expect_denied(DRIVER, "a label", CANNOT, CLAIM, label()).await;
    harness.expect_denied(DRIVER, "deleting a claim", CANNOT, CLAIM, Action::Delete).await;
    harness
        .expect_denied(
            DRIVER,
            "a claim",
            CANNOT,
            all("resourceclaims"),
            Action::Create(claim("other", json!({}))),
        )
        .await;
    let taint = Action::Merge(json!({"spec": {"unschedulable": true}}));
    harness
        .expect_denied(DRIVER, "changing a node", CANNOT, Target("nodes", NODE, ""), taint)
        .await;
    // The controller allocates claims, but may neither create nor delete claims, pods or slices.
    harness.expect_denied(CONTROLLER, "deleting a claim", CANNOT, CLAIM, Action::Delete).await;
    harness
        .expect_denied(
            CONTROLLER,
            "a claim",
            CANNOT,
            all("resourceclaims"),
            Action::Create(claim("other", json!({}))),
        )
        .await;
    harness
        .expect_denied(
            CONTROLLER,
            "deleting a slice",
            CANNOT,
            Target("resourceslices", "any", ""),
            Action::Delete,
        )
        .await;
    harness
        .expect_denied(
            CONTROLLER,
            "deleting a pod",
            CANNOT,
            Target("pods", "any", ""),
            Action::Delete,
        )
        .await;
    for by in [DRIVER, CONTROLLER] {
        let secret = json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "any"}});
        harness.expect_denied(by, "a secret", CANNOT, all("secrets"), Action::Create(secret)).await;
    }
    harness.expect_allowed(ADMINISTRATOR, "deleting the claim", CLAIM, Action::Delete).await;
}
