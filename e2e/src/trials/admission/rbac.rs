//! RBAC rights of Tessera's components and of users, on which the admission policies rely.

use serde_json::json;

use super::harness::{
    ADMINISTRATOR, Action, AdmissionHarness, CONTROLLER, DRIVER, DRIVER_ELSEWHERE, EDITOR, NODE,
    OWN_DRIVER, Target, all, allocation, claim,
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
    check_resizes(harness).await;
    harness.expect_allowed(ADMINISTRATOR, "deleting the claim", CLAIM, Action::Delete).await;
}

/// An editor asks for sizes, the controller grants them, and the driver of that node reports.
async fn check_resizes(harness: &AdmissionHarness) {
    const RESIZE: Target<'_> = Target("gpuresizes", "allocated", "");
    const STATUS: Target<'_> = Target("gpuresizes", "allocated", "status");
    let resize = json!({
        "apiVersion": "gpu.tessera.dev/v1alpha1", "kind": "GpuResize",
        "metadata": {"name": "allocated"},
        "spec": {"requests": [{"name": "gpu", "memory": "1Gi"}]},
    });
    let create = Action::Create(resize);
    harness.expect_allowed(EDITOR, "a resize", all("gpuresizes"), create).await;
    let status = |fields: serde_json::Value| Action::Merge(json!({"status": fields}));
    let grant = || status(json!({"node": NODE, "claimUID": "u", "grant": 1}));
    let report = || status(json!({"appliedGrant": 1}));
    harness.expect_denied(EDITOR, "a grant", CANNOT, STATUS, grant()).await;
    let own_node = "only about shares of its own node";
    harness.expect_denied(DRIVER, "a report without a grant", own_node, STATUS, report()).await;
    harness.expect_allowed(CONTROLLER, "a grant", STATUS, grant()).await;
    harness.expect_allowed(DRIVER, "a report", STATUS, report()).await;
    harness.expect_denied(DRIVER_ELSEWHERE, "a report", own_node, STATUS, report()).await;
    let only_applied = "writes only what it has applied";
    for fields in [json!({"grant": 2}), json!({"node": "other"}), json!({"granted": [{}]})] {
        harness.expect_denied(DRIVER, "a grant", only_applied, STATUS, status(fields)).await;
    }
    let spec = || Action::Merge(json!({"spec": {"requests": []}}));
    for by in [DRIVER, CONTROLLER] {
        harness.expect_denied(by, "another size", CANNOT, RESIZE, spec()).await;
    }
    harness.expect_allowed(EDITOR, "deleting the resize", RESIZE, Action::Delete).await;
}
