//! What RBAC leaves to our components and to users: the policies build on it.

use serde_json::json;

use super::desk::{
    ADMINISTRATOR, Ask, At, CONTROLLER, DRIVER, Desk, EDITOR, NODE, OURS, all, allocation, claim,
};

const CANNOT: &str = " cannot ";
const HELD: At<'_> = At("resourceclaims", "held", "");
const HELD_STATUS: At<'_> = At("resourceclaims", "held", "status");

pub(super) async fn check(desk: &Desk) {
    desk.allowed(EDITOR, "a claim", all("resourceclaims"), Ask::Create(claim("held", json!({}))))
        .await;
    let label = || Ask::Merge(json!({"metadata": {"labels": {"a": "b"}}}));
    let allocate = || Ask::Merge(allocation(&[OURS]));
    // An editor changes claims, not what is allocated to them, and no slice.
    desk.allowed(EDITOR, "a label", HELD, label()).await;
    desk.refused(EDITOR, "an allocation", CANNOT, HELD_STATUS, allocate()).await;
    desk.refused(
        EDITOR,
        "deleting all slices",
        CANNOT,
        all("resourceslices"),
        Ask::DeleteCollection(String::new()),
    )
    .await;
    // The driver reads claims.
    desk.refused(DRIVER, "an allocation", CANNOT, HELD_STATUS, allocate()).await;
    desk.refused(DRIVER, "a label", CANNOT, HELD, label()).await;
    desk.refused(DRIVER, "deleting a claim", CANNOT, HELD, Ask::Delete).await;
    desk.refused(
        DRIVER,
        "a claim",
        CANNOT,
        all("resourceclaims"),
        Ask::Create(claim("other", json!({}))),
    )
    .await;
    let taint = Ask::Merge(json!({"spec": {"unschedulable": true}}));
    desk.refused(DRIVER, "changing a node", CANNOT, At("nodes", NODE, ""), taint).await;
    // The controller allocates, and neither makes nor ends claims, pods or slices.
    desk.refused(CONTROLLER, "deleting a claim", CANNOT, HELD, Ask::Delete).await;
    desk.refused(
        CONTROLLER,
        "a claim",
        CANNOT,
        all("resourceclaims"),
        Ask::Create(claim("other", json!({}))),
    )
    .await;
    desk.refused(
        CONTROLLER,
        "deleting a slice",
        CANNOT,
        At("resourceslices", "any", ""),
        Ask::Delete,
    )
    .await;
    desk.refused(CONTROLLER, "deleting a pod", CANNOT, At("pods", "any", ""), Ask::Delete).await;
    for by in [DRIVER, CONTROLLER] {
        let secret = json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "any"}});
        desk.refused(by, "a secret", CANNOT, all("secrets"), Ask::Create(secret)).await;
    }
    desk.allowed(ADMINISTRATOR, "deleting the claim", HELD, Ask::Delete).await;
}
