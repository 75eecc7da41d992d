//! Only tessera-controller begins an allocation of our devices; only it and the cluster's own parts
//! end one.

use serde_json::json;

use super::desk::{
    ADMINISTRATOR, At, CLAIM_CONTROLLER, CONTROLLER, CONTROLLER_MANAGER, Desk, FINALIZER, OTHER,
    OURS, SCHEDULER, User, all, allocation, claim, no_allocation,
};
use super::desk::{Ask, EDITOR};

const HELD: At<'_> = At("resourceclaims", "held", "");
const HELD_STATUS: At<'_> = At("resourceclaims", "held", "status");

pub(super) async fn check(desk: &Desk) -> anyhow::Result<()> {
    begins_with_the_controller(desk).await?;
    others_are_free(desk).await;
    stays_as_it_is(desk).await;
    ends_with_the_cluster(desk).await;
    desk.allowed(EDITOR, "deleting an unallocated claim", HELD, Ask::Delete).await;
    Ok(())
}

async fn begins_with_the_controller(desk: &Desk) -> anyhow::Result<()> {
    let mut born = claim("held", json!({}));
    born["status"] = allocation(&[OURS])["status"].clone();
    desk.allowed(
        EDITOR,
        "a claim with a status of its own",
        all("resourceclaims"),
        Ask::Create(born),
    )
    .await;
    let there = desk.look(HELD).await?;
    desk.expect("a claim is born without an allocation", there["status"]["allocation"].is_null());

    let finalizer = json!({"metadata": {"finalizers": [FINALIZER]}});
    desk.allowed(CONTROLLER, "setting the finalizer", HELD, Ask::Merge(finalizer)).await;
    let says = "only tessera-controller allocates";
    for by in [SCHEDULER, CONTROLLER_MANAGER, ADMINISTRATOR] {
        desk.refused(by, "an allocation", says, HELD_STATUS, Ask::Merge(allocation(&[OURS]))).await;
        let mixed = Ask::Merge(allocation(&[OTHER, OURS]));
        desk.refused(by, "an allocation among those of another driver", says, HELD_STATUS, mixed)
            .await;
    }
    Ok(())
}

async fn others_are_free(desk: &Desk) {
    for by in [SCHEDULER, ADMINISTRATOR] {
        let begin = Ask::Merge(allocation(&[OTHER]));
        desk.allowed(by, "another driver's allocation", HELD_STATUS, begin).await;
        desk.allowed(
            by,
            "the end of another driver's allocation",
            HELD_STATUS,
            Ask::Merge(no_allocation()),
        )
        .await;
    }
}

/// What an allocation says is the API server's to keep; who uses it is the scheduler's and the
/// claim controller's to write.
async fn stays_as_it_is(desk: &Desk) {
    desk.allowed(CONTROLLER, "an allocation", HELD_STATUS, Ask::Merge(allocation(&[OURS]))).await;
    for results in [&[OTHER][..], &[OURS, OURS], &[OTHER, OURS]] {
        let other = Ask::Merge(allocation(results));
        // "field cannot be modified once set" on 1.37, "field is immutable" on 1.36.
        let says = "status.allocation: Invalid value";
        desk.refused(
            CONTROLLER,
            "another allocation in its place",
            says,
            HELD_STATUS,
            other.clone(),
        )
        .await;
        desk.refused(ADMINISTRATOR, "another allocation in its place", "", HELD_STATUS, other)
            .await;
    }
    let consumer = |name: &str| json!({"apiGroup": "example.com", "resource": "tests", "name": name, "uid": name});
    for (by, users) in [(SCHEDULER, vec!["x", "y"]), (CLAIM_CONTROLLER, vec!["x"])] {
        let users: Vec<_> = users.into_iter().map(consumer).collect();
        let reserve = Ask::Merge(json!({"status": {"reservedFor": users}}));
        desk.allowed(by, "changing who uses a claim", HELD_STATUS, reserve).await;
    }
    // As many as the API allows: the cost of the policy has a limit too.
    let users: Vec<_> = (0..256).map(|number| consumer(&format!("consumer-{number}"))).collect();
    let reserve = Ask::Merge(json!({"status": {"reservedFor": users}}));
    desk.allowed(SCHEDULER, "256 users of a claim", HELD_STATUS, reserve).await;
}

async fn ends_with_the_cluster(desk: &Desk) {
    let end = || Ask::Merge(no_allocation());
    let may: [User; 4] = [SCHEDULER, CONTROLLER_MANAGER, CLAIM_CONTROLLER, CONTROLLER];
    for by in may {
        desk.refused(ADMINISTRATOR, "ending an allocation", "may not end", HELD_STATUS, end())
            .await;
        desk.allowed(by, "ending an allocation", HELD_STATUS, end()).await;
        desk.allowed(CONTROLLER, "an allocation", HELD_STATUS, Ask::Merge(allocation(&[OURS])))
            .await;
    }
    desk.allowed(CONTROLLER, "ending an allocation", HELD_STATUS, end()).await;
    let strip = Ask::Merge(json!({"metadata": {"finalizers": null}}));
    desk.allowed(EDITOR, "removing the finalizer of a claim without allocation", HELD, strip).await;
}
