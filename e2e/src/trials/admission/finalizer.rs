//! The finalizer stays as long as a device of ours is allocated, however somebody tries to get rid
//! of it.

use serde_json::{Value, json};

use super::desk::{
    ADMINISTRATOR, Ask, At, CLAIM_CONTROLLER, CONTROLLER, Desk, EDITOR, FINALIZER,
    GARBAGE_COLLECTOR, OTHER, OURS, SCHEDULER, allocation, claim, no_allocation,
};

const KEPT: At<'_> = At("resourceclaims", "kept", "");
const KEPT_STATUS: At<'_> = At("resourceclaims", "kept", "status");
const SAYS: &str = "delete-protection stays while";
const MANAGER: &str = "policies";

pub(super) async fn check(desk: &Desk) -> anyhow::Result<()> {
    of_another_driver(desk).await;
    // Applied, so that its manager could take it away by applying less.
    let applied = with_finalizers("kept", &[FINALIZER, "example.com/theirs"]);
    desk.allowed(EDITOR, "a claim with finalizers", KEPT, Ask::Apply(MANAGER, applied)).await;
    desk.allowed(CONTROLLER, "an allocation", KEPT_STATUS, Ask::Merge(allocation(&[OURS]))).await;
    stays(desk).await?;
    goes_with_the_allocation(desk).await
}

fn with_finalizers(name: &str, finalizers: &[&str]) -> Value {
    let mut claim = claim(name, json!({}));
    claim["metadata"]["finalizers"] = json!(finalizers);
    claim
}

async fn of_another_driver(desk: &Desk) {
    let (claim, strip) =
        (with_finalizers("theirs", &[FINALIZER]), json!({"metadata": {"finalizers": null}}));
    let at = At("resourceclaims", "theirs", "");
    desk.allowed(
        EDITOR,
        "a claim of another driver",
        super::desk::all("resourceclaims"),
        Ask::Create(claim),
    )
    .await;
    let status = At("resourceclaims", "theirs", "status");
    desk.allowed(SCHEDULER, "its allocation", status, Ask::Merge(allocation(&[OTHER]))).await;
    desk.allowed(EDITOR, "removing its finalizer", at, Ask::Merge(strip)).await;
    desk.allowed(EDITOR, "deleting it", at, Ask::Delete).await;
}

async fn stays(desk: &Desk) -> anyhow::Result<()> {
    let mut without = desk.look(KEPT).await?;
    without["metadata"]["finalizers"] = json!(["example.com/theirs"]);
    without["metadata"].as_object_mut().map(|metadata| metadata.remove("managedFields"));
    let ways = [
        ("by a merge patch", Ask::Merge(json!({"metadata": {"finalizers": null}}))),
        ("by a JSON patch", Ask::Json(json!([{"op": "remove", "path": "/metadata/finalizers"}]))),
        ("by an update", Ask::Replace(without)),
        ("by applying less", Ask::Apply(MANAGER, with_finalizers("kept", &["example.com/theirs"]))),
        ("for another", Ask::Merge(json!({"metadata": {"finalizers": ["example.com/theirs"]}}))),
    ];
    for (how, ask) in ways {
        for by in [EDITOR, ADMINISTRATOR] {
            desk.refused(by, &format!("removing the finalizer {how}"), SAYS, KEPT, ask.clone())
                .await;
        }
    }
    // The API server takes no finalizers from there.
    let strip = Ask::Merge(json!({"metadata": {"finalizers": null}}));
    desk.allowed(
        ADMINISTRATOR,
        "a patch of the status that names no finalizers",
        KEPT_STATUS,
        strip,
    )
    .await;
    let there = desk.look(KEPT).await?;
    desk.expect("the finalizer survives a patch of the status", has_finalizer(&there));

    let label = Ask::Merge(json!({"metadata": {"labels": {"a": "b"}}}));
    desk.allowed(EDITOR, "a label on an allocated claim", KEPT, label).await;
    let housekeeping =
        Ask::Merge(json!({"metadata": {"finalizers": [FINALIZER], "ownerReferences": null}}));
    desk.allowed(GARBAGE_COLLECTOR, "removing another finalizer", KEPT, housekeeping).await;
    Ok(())
}

fn has_finalizer(claim: &Value) -> bool {
    let finalizers = claim["metadata"]["finalizers"].as_array();
    finalizers.is_some_and(|finalizers| finalizers.iter().any(|one| one == FINALIZER))
}

/// Also once the claim is being deleted: kube-controller-manager ends the allocation first.
async fn goes_with_the_allocation(desk: &Desk) -> anyhow::Result<()> {
    desk.allowed(EDITOR, "deleting an allocated claim", KEPT, Ask::Delete).await;
    let there = desk.look(KEPT).await?;
    let deleting = there["metadata"]["deletionTimestamp"].is_string() && has_finalizer(&there);
    desk.expect("an allocated claim that is deleted stays for its finalizer", deleting);
    let strip = || Ask::Merge(json!({"metadata": {"finalizers": null}}));
    desk.refused(EDITOR, "removing the finalizer of a deleted claim", SAYS, KEPT, strip()).await;
    desk.refused(CLAIM_CONTROLLER, "removing the finalizer before its time", SAYS, KEPT, strip())
        .await;
    desk.allowed(
        CLAIM_CONTROLLER,
        "ending the allocation of a deleted claim",
        KEPT_STATUS,
        Ask::Merge(no_allocation()),
    )
    .await;
    // The rest is for the cluster's own controller, which is let through.
    desk.gone("kept").await
}
