//! Policy `tessera-allocation`: only tessera-controller allocates the driver's devices. Only it and
//! the cluster's controllers release them.

use serde_json::json;

use super::harness::{
    ADMINISTRATOR, AdmissionHarness, CLAIM_CONTROLLER, CONTROLLER, CONTROLLER_MANAGER, FINALIZER,
    NODE, OTHER_DRIVER, OWN_DRIVER, SCHEDULER, Target, User, all, allocation, claim,
    expect_allocation, no_allocation,
};
use super::harness::{Action, EDITOR};

const CLAIM: Target<'_> = Target("resourceclaims", "allocated", "");
const CLAIM_STATUS: Target<'_> = Target("resourceclaims", "allocated", "status");

pub(super) async fn check(harness: &AdmissionHarness) -> anyhow::Result<()> {
    only_controller_allocates(harness).await?;
    other_drivers_are_unrestricted(harness).await;
    allocation_is_immutable(harness).await;
    sizes_are_of_the_controller(harness).await;
    cluster_components_release(harness).await;
    harness.expect_allowed(EDITOR, "deleting an unallocated claim", CLAIM, Action::Delete).await;
    Ok(())
}

async fn only_controller_allocates(harness: &AdmissionHarness) -> anyhow::Result<()> {
    let mut with_status = claim("allocated", json!({}));
    with_status["status"] = allocation(&[OWN_DRIVER])["status"].clone();
    harness
        .expect_allowed(
            EDITOR,
            "a claim with a status of its own",
            all("resourceclaims"),
            Action::Create(with_status),
        )
        .await;
    let created = harness.get(CLAIM).await?;
    harness.expect(
        "a claim is created without an allocation",
        created["status"]["allocation"].is_null(),
    );

    let finalizer = json!({"metadata": {"finalizers": [FINALIZER]}});
    harness
        .expect_allowed(CONTROLLER, "setting the finalizer", CLAIM, Action::Merge(finalizer))
        .await;
    let message = "only tessera-controller allocates";
    for by in [SCHEDULER, CONTROLLER_MANAGER, ADMINISTRATOR] {
        harness
            .expect_denied(
                by,
                "an allocation",
                message,
                CLAIM_STATUS,
                Action::Merge(allocation(&[OWN_DRIVER])),
            )
            .await;
        let mixed = Action::Merge(allocation(&[OTHER_DRIVER, OWN_DRIVER]));
        harness
            .expect_denied(
                by,
                "an allocation among those of another driver",
                message,
                CLAIM_STATUS,
                mixed,
            )
            .await;
    }
    Ok(())
}

async fn other_drivers_are_unrestricted(harness: &AdmissionHarness) {
    for by in [SCHEDULER, ADMINISTRATOR] {
        let begin = Action::Merge(allocation(&[OTHER_DRIVER]));
        harness.expect_allowed(by, "another driver's allocation", CLAIM_STATUS, begin).await;
        harness
            .expect_allowed(
                by,
                "the end of another driver's allocation",
                CLAIM_STATUS,
                Action::Merge(no_allocation()),
            )
            .await;
    }
}

/// Only the API server keeps the content of an allocation. The scheduler and the claim controller
/// write its consumers.
async fn allocation_is_immutable(harness: &AdmissionHarness) {
    expect_allocation(harness, CLAIM_STATUS).await;
    for results in [&[OTHER_DRIVER][..], &[OWN_DRIVER, OWN_DRIVER], &[OTHER_DRIVER, OWN_DRIVER]] {
        let other = Action::Merge(allocation(results));
        // "field cannot be modified once set" in 1.37, "field is immutable" in 1.36.
        let message = "status.allocation: Invalid value";
        harness
            .expect_denied(
                CONTROLLER,
                "another allocation in its place",
                message,
                CLAIM_STATUS,
                other.clone(),
            )
            .await;
        harness
            .expect_denied(
                ADMINISTRATOR,
                "another allocation in its place",
                "",
                CLAIM_STATUS,
                other,
            )
            .await;
    }
    let consumer = |name: &str| json!({"apiGroup": "example.com", "resource": "tests", "name": name, "uid": name});
    for (by, users) in [(SCHEDULER, vec!["x", "y"]), (CLAIM_CONTROLLER, vec!["x"])] {
        let users: Vec<_> = users.into_iter().map(consumer).collect();
        let reserve = Action::Merge(json!({"status": {"reservedFor": users}}));
        harness.expect_allowed(by, "changing who uses a claim", CLAIM_STATUS, reserve).await;
    }
    // The maximum that the API allows, because the policy's cost has a limit.
    let users: Vec<_> = (0..256).map(|number| consumer(&format!("consumer-{number}"))).collect();
    let reserve = Action::Merge(json!({"status": {"reservedFor": users}}));
    harness.expect_allowed(SCHEDULER, "256 users of a claim", CLAIM_STATUS, reserve).await;
}

/// The sizes that count for shares are in `status.devices`.
async fn sizes_are_of_the_controller(harness: &AdmissionHarness) {
    let devices = |memory: &str| {
        let data = json!({
            "apiVersion": "gpu.tessera.dev/v1alpha1", "kind": "GpuShareSize",
            "memory": memory, "cores": "1",
        });
        let device = json!({"driver": OWN_DRIVER, "pool": NODE, "device": "gpu-0", "data": data});
        Action::Merge(json!({"status": {"devices": [device]}}))
    };
    let message = "only tessera-controller writes status.devices";
    let what = "another size of a share";
    // Where the API server requires a permission of its own, that comes first.
    harness.expect_denied(SCHEDULER, what, "status.devices", CLAIM_STATUS, devices("1Mi")).await;
    harness.expect_denied(ADMINISTRATOR, what, message, CLAIM_STATUS, devices("1Mi")).await;
    harness.expect_allowed(CONTROLLER, what, CLAIM_STATUS, devices("1Gi")).await;
    let none = Action::Merge(json!({"status": {"devices": null}}));
    harness.expect_denied(ADMINISTRATOR, what, message, CLAIM_STATUS, none).await;
}

async fn cluster_components_release(harness: &AdmissionHarness) {
    let end = || Action::Merge(no_allocation());
    let may: [User; 4] = [SCHEDULER, CONTROLLER_MANAGER, CLAIM_CONTROLLER, CONTROLLER];
    for by in may {
        harness
            .expect_denied(
                ADMINISTRATOR,
                "ending an allocation",
                "may not end",
                CLAIM_STATUS,
                end(),
            )
            .await;
        harness.expect_allowed(by, "ending an allocation", CLAIM_STATUS, end()).await;
        expect_allocation(harness, CLAIM_STATUS).await;
    }
    harness.expect_allowed(CONTROLLER, "ending an allocation", CLAIM_STATUS, end()).await;
    let strip = Action::Merge(json!({"metadata": {"finalizers": null}}));
    harness
        .expect_allowed(
            EDITOR,
            "removing the finalizer of a claim without allocation",
            CLAIM,
            strip,
        )
        .await;
}
