//! Policy `tessera-finalizer`: no request removes the finalizer while a device is allocated.

use serde_json::{Value, json};

use super::harness::{
    ADMINISTRATOR, Action, AdmissionHarness, CLAIM_CONTROLLER, EDITOR, FINALIZER,
    GARBAGE_COLLECTOR, OTHER_DRIVER, SCHEDULER, Target, allocation, claim, expect_allocation,
    no_allocation,
};

const CLAIM: Target<'_> = Target("resourceclaims", "protected", "");
const CLAIM_STATUS: Target<'_> = Target("resourceclaims", "protected", "status");
const MESSAGE: &str = "delete-protection stays while";
const MANAGER: &str = "policies";

pub(super) async fn check(harness: &AdmissionHarness) -> anyhow::Result<()> {
    of_another_driver(harness).await;
    of_an_extended_resource(harness).await?;
    // Server-side apply, so that the field manager could remove it by applying less.
    let applied = with_finalizers("protected", &[FINALIZER, "example.com/other"]);
    harness
        .expect_allowed(EDITOR, "a claim with finalizers", CLAIM, Action::Apply(MANAGER, applied))
        .await;
    expect_allocation(harness, CLAIM_STATUS).await;
    cannot_be_removed(harness).await?;
    is_removed_after_release(harness).await
}

fn with_finalizers(name: &str, finalizers: &[&str]) -> Value {
    let mut claim = claim(name, json!({}));
    claim["metadata"]["finalizers"] = json!(finalizers);
    claim
}

async fn of_another_driver(harness: &AdmissionHarness) {
    let (claim, strip) =
        (with_finalizers("other-driver", &[FINALIZER]), json!({"metadata": {"finalizers": null}}));
    let at = Target("resourceclaims", "other-driver", "");
    harness
        .expect_allowed(
            EDITOR,
            "a claim of another driver",
            super::harness::all("resourceclaims"),
            Action::Create(claim),
        )
        .await;
    let status = Target("resourceclaims", "other-driver", "status");
    harness
        .expect_allowed(
            SCHEDULER,
            "its allocation",
            status,
            Action::Merge(allocation(&[OTHER_DRIVER])),
        )
        .await;
    harness.expect_allowed(EDITOR, "removing its finalizer", at, Action::Merge(strip)).await;
    harness.expect_allowed(EDITOR, "deleting it", at, Action::Delete).await;
}

/// kube-scheduler deletes a claim that it has made itself, with its allocation.
async fn of_an_extended_resource(harness: &AdmissionHarness) -> anyhow::Result<()> {
    let at = Target("resourceclaims", "extended", "");
    let mut made = with_finalizers("extended", &[FINALIZER]);
    made["metadata"]["annotations"] =
        json!({"resource.kubernetes.io/extended-resource-claim": "true"});
    let create = Action::Create(made);
    let all = super::harness::all("resourceclaims");
    harness.expect_allowed(EDITOR, "a claim of an extended resource", all, create).await;
    expect_allocation(harness, Target("resourceclaims", "extended", "status")).await;
    let mut without = harness.get(at).await?;
    without["metadata"].as_object_mut().map(|metadata| metadata.remove("managedFields"));
    without["metadata"]["finalizers"] = json!([]);
    let strip = Action::Replace(without);
    let what = "removing the finalizer of a claim of an extended resource";
    for by in [EDITOR, ADMINISTRATOR] {
        harness.expect_denied(by, what, MESSAGE, at, strip.clone()).await;
    }
    harness.expect_allowed(SCHEDULER, what, at, strip).await;
    harness.expect_allowed(EDITOR, "deleting it", at, Action::Delete).await;
    Ok(())
}

async fn cannot_be_removed(harness: &AdmissionHarness) -> anyhow::Result<()> {
    let mut without = harness.get(CLAIM).await?;
    without["metadata"]["finalizers"] = json!(["example.com/other"]);
    without["metadata"].as_object_mut().map(|metadata| metadata.remove("managedFields"));
    let requests = [
        ("by a merge patch", Action::Merge(json!({"metadata": {"finalizers": null}}))),
        (
            "by a JSON patch",
            Action::Json(json!([{"op": "remove", "path": "/metadata/finalizers"}])),
        ),
        ("by an update", Action::Replace(without)),
        (
            "by applying less",
            Action::Apply(MANAGER, with_finalizers("protected", &["example.com/other"])),
        ),
        (
            "in favour of another",
            Action::Merge(json!({"metadata": {"finalizers": ["example.com/other"]}})),
        ),
    ];
    for (how, action) in requests {
        for by in [EDITOR, ADMINISTRATOR] {
            harness
                .expect_denied(
                    by,
                    &format!("removing the finalizer {how}"),
                    MESSAGE,
                    CLAIM,
                    action.clone(),
                )
                .await;
        }
    }
    // The API server ignores finalizers in a status patch.
    let strip = Action::Merge(json!({"metadata": {"finalizers": null}}));
    harness
        .expect_allowed(
            ADMINISTRATOR,
            "a patch of the status that names no finalizers",
            CLAIM_STATUS,
            strip,
        )
        .await;
    let current = harness.get(CLAIM).await?;
    harness.expect("the finalizer survives a patch of the status", has_finalizer(&current));

    let label = Action::Merge(json!({"metadata": {"labels": {"a": "b"}}}));
    harness.expect_allowed(EDITOR, "a label on an allocated claim", CLAIM, label).await;
    let housekeeping =
        Action::Merge(json!({"metadata": {"finalizers": [FINALIZER], "ownerReferences": null}}));
    harness
        .expect_allowed(GARBAGE_COLLECTOR, "removing another finalizer", CLAIM, housekeeping)
        .await;
    Ok(())
}

fn has_finalizer(claim: &Value) -> bool {
    let finalizers = claim["metadata"]["finalizers"].as_array();
    finalizers.is_some_and(|finalizers| finalizers.iter().any(|one| one == FINALIZER))
}

/// Also while the claim is being deleted: kube-controller-manager releases the allocation first.
async fn is_removed_after_release(harness: &AdmissionHarness) -> anyhow::Result<()> {
    harness.expect_allowed(EDITOR, "deleting an allocated claim", CLAIM, Action::Delete).await;
    let current = harness.get(CLAIM).await?;
    let deleting = current["metadata"]["deletionTimestamp"].is_string() && has_finalizer(&current);
    harness.expect("an allocated claim that is deleted stays for its finalizer", deleting);
    let strip = || Action::Merge(json!({"metadata": {"finalizers": null}}));
    harness
        .expect_denied(EDITOR, "removing the finalizer of a deleted claim", MESSAGE, CLAIM, strip())
        .await;
    harness
        .expect_denied(
            CLAIM_CONTROLLER,
            "removing the finalizer before the release",
            MESSAGE,
            CLAIM,
            strip(),
        )
        .await;
    harness
        .expect_allowed(
            CLAIM_CONTROLLER,
            "releasing a claim that is being deleted",
            CLAIM_STATUS,
            Action::Merge(no_allocation()),
        )
        .await;
    // kube-controller-manager removes the finalizer and is not denied.
    harness.wait_deleted("protected").await
}
